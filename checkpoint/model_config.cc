#include "checkpoint/model_config.h"

#include <initializer_list>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "checkpoint/json_cursor.h"
#include "checkpoint/json_text.h"

namespace quern::checkpoint {
namespace {

// Where a quantization_config may stand, under its names of old too, the first one before the others. In the oldest form it is a part of
// the compression_config.
constexpr absl::string_view kQuantizationKeys[] = {"quantization_config",
                                                   "text_config.quantization_config",
                                                   "compression_config.quantization_config",
                                                   "text_config.compression_config.quantization_config",
                                                   "compression_config",
                                                   "text_config.compression_config"};

absl::StatusOr<std::string> WithoutOtherKeys(std::string text) {
  for (const absl::string_view key : {"text_config.quantization_config", "compression_config", "text_config.compression_config"}) {
    QUERN_ASSIGN_OR_RETURN(text, RemoveJsonMember(text, key));
  }
  return text;
}

// The text of the first of `keys` that is there, under text_config before top-level.
absl::StatusOr<std::optional<std::string>> FirstMember(absl::string_view text, std::initializer_list<absl::string_view> keys) {
  for (const absl::string_view prefix : {"text_config.", ""}) {
    for (const absl::string_view key : keys) {
      absl::StatusOr<std::optional<std::string>> value = GetJsonMember(text, absl::StrCat(prefix, key));
      if (!value.ok() || (value->has_value() && **value != "null")) return value;
    }
  }
  return std::optional<std::string>();
}

// Empty when `value` is no string.
std::string StringValue(const std::optional<std::string>& value) {
  std::string decoded;
  if (!value || !JsonCursor(*value).ReadString(&decoded).ok()) return "";
  return decoded;
}

// Lists (a size for each layer) and fractions are no size that Quern could use: nullopt.
absl::StatusOr<std::optional<uint64_t>> FirstNumber(absl::string_view text, std::initializer_list<absl::string_view> keys) {
  QUERN_ASSIGN_OR_RETURN(std::optional<std::string> value, FirstMember(text, keys));
  uint64_t number;
  if (!value || !JsonCursor(*value).ReadUnsigned(&number).ok()) return std::optional<uint64_t>();
  return std::optional<uint64_t>(number);
}

absl::Status Fill(ModelConfig* config) {
  const std::string& text = config->text;
  QUERN_ASSIGN_OR_RETURN(std::optional<std::string> model_type, GetJsonMember(text, "model_type"));
  config->outer_model_type = StringValue(model_type);
  QUERN_ASSIGN_OR_RETURN(model_type, FirstMember(text, {"model_type"}));
  config->model_type = StringValue(model_type);
  QUERN_ASSIGN_OR_RETURN(config->vocab_size, FirstNumber(text, {"vocab_size"}));
  QUERN_ASSIGN_OR_RETURN(config->hidden_size, FirstNumber(text, {"hidden_size"}));
  QUERN_ASSIGN_OR_RETURN(config->num_hidden_layers, FirstNumber(text, {"num_hidden_layers"}));
  QUERN_ASSIGN_OR_RETURN(config->num_experts,
                         FirstNumber(text, {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}));
  QUERN_ASSIGN_OR_RETURN(config->intermediate_size, FirstNumber(text, {"intermediate_size"}));
  QUERN_ASSIGN_OR_RETURN(config->moe_intermediate_size, FirstNumber(text, {"moe_intermediate_size", "expert_intermediate_size"}));
  // Mixtral and OLMoE have experts only and no name of its own for their size.
  if (config->num_experts && !config->moe_intermediate_size) config->moe_intermediate_size = config->intermediate_size;
  for (const absl::string_view key : {"tie_word_embeddings", "text_config.tie_word_embeddings"}) {
    QUERN_ASSIGN_OR_RETURN(std::optional<std::string> tied, GetJsonMember(text, key));
    if (tied && *tied == "true") config->tie_word_embeddings = true;
  }
  for (const absl::string_view key : kQuantizationKeys) {
    QUERN_ASSIGN_OR_RETURN(const std::optional<std::string> quantization, GetJsonMember(text, key));
    const absl::string_view value = quantization.has_value() ? absl::string_view(*quantization) : absl::string_view("null");
    if (value != "null" && config->quantization_config.empty()) config->quantization_config = std::string(value);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view text, absl::string_view path) {
  if (IsGitLfsPointer(text)) return GitLfsPointerError(path);
  ModelConfig config;
  config.text = std::string(text);
  QUERN_RETURN_IF_ERROR(Annotate(Fill(&config), path));
  return config;
}

absl::StatusOr<std::string> WithQuantizationConfig(const ModelConfig& config, absl::string_view quantization_config) {
  QUERN_ASSIGN_OR_RETURN(std::string text, SetJsonMember(config.text, "quantization_config", quantization_config));
  return WithoutOtherKeys(std::move(text));
}

absl::StatusOr<std::string> WithoutQuantizationConfig(const ModelConfig& config) {
  QUERN_ASSIGN_OR_RETURN(std::string text, RemoveJsonMember(config.text, "quantization_config"));
  return WithoutOtherKeys(std::move(text));
}

}  // namespace quern::checkpoint
