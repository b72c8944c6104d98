// What a scheme is, as data: the vocabulary that recipes, plans and manifests share.
#ifndef QUERN_QUANT_SCHEME_SPEC_H_
#define QUERN_QUANT_SCHEME_SPEC_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/dtype.h"

namespace quern::quant {

// kPlain: not quantized, the values themselves in BF16, F16 or F32: num_bits 16 or 32, where 16 bits with scale=bf16 are BF16 and else F16;
// strategy tensor, symmetric, minmax, reference. Decoding a checkpoint to plain weights is encoding them in this "scheme". Its texts are
// exactly "plain16 tensor symmetric observer=minmax numerics=reference scale=bf16", "plain16 tensor symmetric observer=minmax
// numerics=reference" (F16) and "plain32 tensor symmetric observer=minmax numerics=reference".
enum class NumberType { kInt, kFloat, kPlain };
enum class Strategy { kTensor, kChannel, kGroup, kBlock, kTensorGroup };
// kSweep: NVFP4 only, all 126 positive E4M3 values as scale of every block.
enum class Observer { kMinMax, kMse, kImportance, kSweep };
// kReference rounds every intermediate to the weight's dtype, as llm-compressor does: same bytes. kPrecise stays in f32 until the end.
enum class Numerics { kReference, kPrecise };

// In which dtype scales are stored. kWeight: the weight's own. The others are fixed by a format (NVFP4: E4M3; MX: E8M0 in U8; ModelOpt's
// FP8 and the FP8 checkpoints of DeepSeek: F32).
enum class ScaleType { kWeight, kF32, kBf16, kE4m3, kE8m0, kF16 };
// What an engine does with activations. It decides names and configs, no byte of a weight; kFp8Static and kNvfp4Static store a scale made
// of ModuleInputs::activation_amax.
enum class Activations { kNone, kInt4Token, kInt8Token, kFp8Token, kFp8Group128, kFp8Static, kNvfp4Static, kMxfp4, kMxfp8 };
// Whose arithmetic and names: ModelOpt's NVFP4 and FP8 differ from compressed-tensors' in both.
enum class Convention { kCompressedTensors, kModelOpt };

struct SchemeSpec {
  int num_bits = 4;
  NumberType type = NumberType::kInt;
  Strategy strategy = Strategy::kGroup;
  int64_t group_size = 128;  // kGroup, kTensorGroup: columns; kBlock: rows and columns of a block; else 0
  bool symmetric = true;
  Observer observer = Observer::kMinMax;
  Numerics numerics = Numerics::kReference;
  ScaleType scale = ScaleType::kWeight;
  Activations activations = Activations::kNone;
  Convention convention = Convention::kCompressedTensors;

  // Canonical text, for example "int4 group=32 asymmetric observer=minmax numerics=reference". Plans and manifests hold this. Words for
  // scale, activations and convention follow only where they are not the default: "float4 tensor_group=16 symmetric observer=minmax
  // numerics=reference scale=e4m3".
  std::string ToString() const;
  static absl::StatusOr<SchemeSpec> Parse(absl::string_view text);
  friend bool operator==(const SchemeSpec&, const SchemeSpec&) = default;
};

// compressed-tensors' preset of that name, upper or lower case: W2A16 .. W8A16 with _ASYM, W8A8, FP8_DYNAMIC, NVFP4A16, ...
// INVALID_ARGUMENT lists the known names.
absl::StatusOr<SchemeSpec> PresetScheme(absl::string_view name);
std::vector<std::string> PresetNames();

// The plain scheme that stores values in a dtype; INVALID_ARGUMENT for another than BF16, F16 and F32.
absl::StatusOr<SchemeSpec> PlainSpec(DType dtype);
// The dtype in which a plain scheme stores values.
DType PlainDType(const SchemeSpec& spec);

// The same weights in the convention of ModelOpt; INVALID_ARGUMENT names the schemes that it has.
absl::StatusOr<SchemeSpec> ToModelOpt(const SchemeSpec& spec);

// compressed-tensors' name of the format that a spec is stored in: "pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
// "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized".
absl::string_view FormatName(const SchemeSpec& spec);

// The spec can be executed by this version: INVALID_ARGUMENT says what is not supported.
absl::Status CheckSupported(const SchemeSpec& spec);

}  // namespace quern::quant

#endif  // QUERN_QUANT_SCHEME_SPEC_H_
