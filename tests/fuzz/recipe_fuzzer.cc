// A recipe of arbitrary bytes: rejected, or written as canonical text that reads back as the same recipe.
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "checkpoint/family.h"
#include "daemon/recipe/recipe.h"
#include "tests/fuzz/fuzz_check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using quern::daemon::ParseRecipe;
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const auto recipe = ParseRecipe(text, {});
  if (!recipe.ok()) {
    // The same bytes beside a scheme of the command line.
    (void)ParseRecipe(text, {.scheme = "W4A16", .group_size = "32", .targets = {std::string(text)}, .ignore = {}});
    return 0;
  }
  const std::string canonical = recipe->ToYaml();
  const auto again = ParseRecipe(canonical, {});
  FUZZ_CHECK(again.ok());
  FUZZ_CHECK(again->ToYaml() == canonical);
  FUZZ_CHECK(again->groups.size() == recipe->groups.size());
  FUZZ_CHECK(again->ignore.size() == recipe->ignore.size());
  for (size_t g = 0; g < recipe->groups.size(); ++g) {
    FUZZ_CHECK(again->groups[g].scheme == recipe->groups[g].scheme);
    FUZZ_CHECK(again->groups[g].targets.size() == recipe->groups[g].targets.size());
    for (size_t t = 0; t < recipe->groups[g].targets.size(); ++t) {
      const quern::daemon::Pattern& pattern = recipe->groups[g].targets[t];
      FUZZ_CHECK(again->groups[g].targets[t].text() == pattern.text());
      FUZZ_CHECK(again->groups[g].targets[t].kind() == pattern.kind());
      (void)pattern.Matches("model.layers.10.mlp.experts.3.gate_proj", quern::checkpoint::Role::kRoutedExperts, true);
    }
  }
  return 0;
}
