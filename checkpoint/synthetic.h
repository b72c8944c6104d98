// Names, shapes and configs of synthetic checkpoints of known families. Values come from the worker.
#ifndef QUERN_CHECKPOINT_SYNTHETIC_H_
#define QUERN_CHECKPOINT_SYNTHETIC_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/dtype.h"

namespace quern::checkpoint {

struct SyntheticOptions {
  std::string family;    // "laguna", "qwen3_moe", "mixtral", "llama"
  uint32_t layers = 0;   // required
  uint32_t experts = 0;  // 0: the family's full size, here and below
  uint32_t hidden = 0;
  uint32_t intermediate = 0;  // of an expert in MoE families, else of the MLP
  uint32_t vocab = 0;
  DType dtype = DType::kBF16;
};

struct SyntheticTensor {
  std::string name;
  DType dtype;
  std::vector<uint64_t> shape;
  std::string distribution;       // "normal", "ones", "zeros"
  double standard_deviation = 0;  // of "normal"
};

struct SyntheticModel {
  std::vector<SyntheticTensor> tensors;  // in the order of layers
  std::string config;                    // text of config.json that transformers loads
};

// INVALID_ARGUMENT for an unknown family (the known ones are listed) or dimensions that do not fit each other.
absl::StatusOr<SyntheticModel> DescribeSynthetic(const SyntheticOptions& options);

}  // namespace quern::checkpoint

#endif  // QUERN_CHECKPOINT_SYNTHETIC_H_
