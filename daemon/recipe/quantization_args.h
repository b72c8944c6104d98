// Schemes in the vocabulary of compressed-tensors (its QuantizationArgs), which recipes and quantization_config share.
#ifndef QUERN_DAEMON_RECIPE_QUANTIZATION_ARGS_H_
#define QUERN_DAEMON_RECIPE_QUANTIZATION_ARGS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quant/scheme_spec.h"

namespace quern::daemon {

// The twelve members, without actorder and observer_kwargs, which Quern always writes as null and {}.
struct QuantizationArgs {
  int num_bits = 8;
  std::string type = "int";
  std::string strategy;                  // "group", "token", ...
  std::optional<int64_t> group_size;     // columns
  std::optional<int64_t> block_rows;     // of block_structure
  std::optional<int64_t> block_columns;  // as above
  bool symmetric = true;
  enum class Dynamic { kFalse, kTrue, kLocal };
  Dynamic dynamic = Dynamic::kFalse;
  std::string observer;     // empty: null
  std::string scale_dtype;  // "torch.uint8"; empty: null
  std::string zp_dtype;     // as above

  friend bool operator==(const QuantizationArgs&, const QuantizationArgs&) = default;
};

// Of a scheme in the convention of compressed-tensors; kPlain has none: INVALID_ARGUMENT.
absl::StatusOr<QuantizationArgs> WeightArgs(const quant::SchemeSpec& spec);
// Nothing for kNone.
std::optional<QuantizationArgs> InputArgs(quant::Activations activations);

// The scheme that args of weights and of input activations describe, with numerics left as they are by default. A scale_dtype that is null
// is the one that the format has. Observers of activations are not looked at. INVALID_ARGUMENT says what is not supported.
absl::StatusOr<quant::SchemeSpec> SpecOf(const QuantizationArgs& weights);
absl::StatusOr<quant::Activations> ActivationsOf(const QuantizationArgs& inputs);

// "memoryless_minmax", "memoryless_mse", "imatrix_mse" and Quern's own "nvfp4_sweep".
absl::string_view ObserverName(quant::Observer observer);
// Also takes the names without "memoryless_" and "nvfp4_". INVALID_ARGUMENT lists the known names.
absl::StatusOr<quant::Observer> ParseObserver(absl::string_view name);

// Whether the scheme stores scales made of activations that somebody has measured, so that it needs --activation-scales.
bool HasStaticActivations(const quant::SchemeSpec& spec);
// A preset with the same weights (FP8: with finer scales) that needs no data: "FP8_DYNAMIC", "NVFP4A16".
absl::string_view DataFreePreset(const quant::SchemeSpec& spec);

// A name for people: the preset with its group size ("W4A16_ASYM g32"), else the canonical text.
std::string ShortName(const quant::SchemeSpec& spec);
// The preset that gives `spec` once group size, observer and numerics are put in, or empty.
std::string PresetOf(const quant::SchemeSpec& spec);
// Whether a group size may be put into it: one scale a group or a channel of integers.
bool TakesGroupSize(const quant::SchemeSpec& spec);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RECIPE_QUANTIZATION_ARGS_H_
