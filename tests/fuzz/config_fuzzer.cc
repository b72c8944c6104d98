// A config.json of arbitrary bytes: rejected, or edited so that the new member reads back and removing what was added restores the rest.
#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "checkpoint/family.h"
#include "checkpoint/json_text.h"
#include "checkpoint/model_config.h"
#include "tests/fuzz/fuzz_check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using quern::checkpoint::GetJsonMember;
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const auto config = quern::checkpoint::ParseModelConfig(text, "fuzz");
  if (!config.ok()) return 0;
  FUZZ_CHECK(config->text == text);
  FUZZ_CHECK(quern::checkpoint::CheckJsonText(text).ok());
  // Any text stands in for a tensor's name.
  quern::checkpoint::Family::For(*config).Identify(text, *config);

  const auto edited = WithQuantizationConfig(*config, R"({"a": [1]})");
  FUZZ_CHECK(edited.ok());
  const auto reparsed = quern::checkpoint::ParseModelConfig(*edited, "fuzz");
  FUZZ_CHECK(reparsed.ok());
  FUZZ_CHECK(reparsed->quantization_config == R"({"a": [1]})");
  FUZZ_CHECK(reparsed->model_type == config->model_type);
  FUZZ_CHECK(reparsed->hidden_size == config->hidden_size);
  FUZZ_CHECK(reparsed->num_hidden_layers == config->num_hidden_layers);
  FUZZ_CHECK(reparsed->num_experts == config->num_experts);
  FUZZ_CHECK(reparsed->tie_word_embeddings == config->tie_word_embeddings);

  const auto removed = quern::checkpoint::RemoveJsonMember(*edited, "quantization_config");
  FUZZ_CHECK(removed.ok());
  const auto member = GetJsonMember(*removed, "quantization_config");
  FUZZ_CHECK(member.ok() && !member->has_value());
  // Where there was none at all, what remains is the text itself; an empty object loses its white space.
  const auto before = GetJsonMember(text, "quantization_config");
  const auto nested = GetJsonMember(text, "text_config.quantization_config");
  FUZZ_CHECK(before.ok() && nested.ok());
  if (!before->has_value() && !nested->has_value() && text.find(':') != absl::string_view::npos) FUZZ_CHECK(*removed == text);
  return 0;
}
