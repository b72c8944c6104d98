// What a scheme is, as data: the vocabulary that recipes, plans and manifests share.
#ifndef QUERN_QUANT_SCHEME_SPEC_H_
#define QUERN_QUANT_SCHEME_SPEC_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace quern::quant {

enum class NumberType { kInt, kFloat };
enum class Strategy { kTensor, kChannel, kGroup, kBlock, kTensorGroup };
enum class Observer { kMinMax, kMse, kImportance };
// kReference rounds every intermediate to the weight's dtype, as llm-compressor does: same bytes. kPrecise stays in f32 until the end.
enum class Numerics { kReference, kPrecise };

struct SchemeSpec {
  int num_bits = 4;
  NumberType type = NumberType::kInt;
  Strategy strategy = Strategy::kGroup;
  int64_t group_size = 128;  // kGroup only; else 0
  bool symmetric = true;
  Observer observer = Observer::kMinMax;
  Numerics numerics = Numerics::kReference;

  // Canonical text, for example "int4 group=32 asymmetric observer=minmax numerics=reference". Plans and manifests hold this.
  std::string ToString() const;
  static absl::StatusOr<SchemeSpec> Parse(absl::string_view text);
  friend bool operator==(const SchemeSpec&, const SchemeSpec&) = default;
};

// compressed-tensors' preset of that name, upper or lower case: W4A16, W4A16_ASYM, W8A16, and W2A16 .. W8A16 with _ASYM. INVALID_ARGUMENT
// lists the known names.
absl::StatusOr<SchemeSpec> PresetScheme(absl::string_view name);
std::vector<std::string> PresetNames();

// The spec can be executed by this version: INVALID_ARGUMENT says what is not supported.
absl::Status CheckSupported(const SchemeSpec& spec);

}  // namespace quern::quant

#endif  // QUERN_QUANT_SCHEME_SPEC_H_
