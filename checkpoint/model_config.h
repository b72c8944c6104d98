// What Quern needs to know of a checkpoint's config.json.
#ifndef QUERN_CHECKPOINT_MODEL_CONFIG_H_
#define QUERN_CHECKPOINT_MODEL_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace quern::checkpoint {

struct ModelConfig {
  std::string text;        // the file, byte for byte
  std::string model_type;  // of the text model where `text_config` has one of its own, else top-level; may be empty
  std::string outer_model_type;
  std::optional<uint64_t> vocab_size;
  std::optional<uint64_t> hidden_size;
  std::optional<uint64_t> num_hidden_layers;
  std::optional<uint64_t> num_experts;
  std::optional<uint64_t> intermediate_size;      // of dense layers
  std::optional<uint64_t> moe_intermediate_size;  // of experts
  bool tie_word_embeddings = false;
  // The text of `quantization_config`, also one under text_config or its old name, compression_config; empty when there is none.
  std::string quantization_config;
};

// `path` is for messages.
absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view text, absl::string_view path);

// The config with `quantization_config` as its quantization_config; one under text_config, or under its old name, is dropped.
absl::StatusOr<std::string> WithQuantizationConfig(const ModelConfig& config, absl::string_view quantization_config);
// The config without any.
absl::StatusOr<std::string> WithoutQuantizationConfig(const ModelConfig& config);

}  // namespace quern::checkpoint

#endif  // QUERN_CHECKPOINT_MODEL_CONFIG_H_
