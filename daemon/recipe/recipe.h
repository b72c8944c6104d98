// A recipe: which modules are quantized, how. Parsed from YAML (Quern's own form and llm-compressor's) and from command-line shorthands.
#ifndef QUERN_DAEMON_RECIPE_RECIPE_H_
#define QUERN_DAEMON_RECIPE_RECIPE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/family.h"
#include "quant/scheme_spec.h"

namespace quern::daemon {

// One pattern as the user wrote it: a role, "Linear", an exact module name, a glob (with * or ?), or "re:" and an RE2 regex that is matched
// as Python's re.match does (anchored at the start only). Exact names and globs match the whole name. Cheap to copy.
class Pattern {
 public:
  // INVALID_ARGUMENT explains a bad regex; lookaround is refused with a way to rewrite it.
  static absl::StatusOr<Pattern> Parse(absl::string_view text);

  enum class Kind { kRole, kLinear, kExact, kGlob, kRegex };
  Kind kind() const { return kind_; }
  const std::string& text() const { return text_; }
  // `linear`: the module is a 2-D weight that no default ignore covers.
  bool Matches(absl::string_view module, checkpoint::Role role, bool linear) const;

 private:
  struct Compiled;
  Kind kind_ = Kind::kExact;
  std::string text_;
  std::shared_ptr<const Compiled> compiled_;
};

struct RecipeGroup {
  std::vector<Pattern> targets;
  quant::SchemeSpec scheme;
  std::string scheme_name;  // preset, for messages; may be empty
};

enum class NonDivisiblePolicy { kFail, kKeep };
enum class NonfinitePolicy { kFail, kClamp };

struct Recipe {
  std::vector<RecipeGroup> groups;  // first match wins; a top-level scheme is the last group
  std::vector<Pattern> ignore;
  NonDivisiblePolicy non_divisible = NonDivisiblePolicy::kFail;
  NonfinitePolicy nonfinite = NonfinitePolicy::kFail;

  // Canonical YAML: parsing it gives the same recipe, and equal recipes give equal text.
  std::string ToYaml() const;
};

// The command line's shorthands; empty fields leave the recipe's own. They act on the recipe's top-level group, or on its only one: a
// scheme adds such a group, tried last, when there is none. A group size is also that of every other group whose preset has integers in
// groups and which says none of its own, an observer that of every preset which says none of its own. `ignore` is added to the recipe's.
struct RecipeShorthands {
  std::string scheme;
  std::string group_size;  // a number or "channel"
  std::string observer{};  // "mse"; of every preset that says none of its own
  std::vector<std::string> targets;
  std::vector<std::string> ignore;
};

// `yaml` may be empty when shorthands.scheme is given. Unknown keys are refused by name and line.
absl::StatusOr<Recipe> ParseRecipe(absl::string_view yaml, const RecipeShorthands& shorthands);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RECIPE_RECIPE_H_
