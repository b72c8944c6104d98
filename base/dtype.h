// The element types of safetensors files.
#ifndef QUERN_BASE_DTYPE_H_
#define QUERN_BASE_DTYPE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace quern {

// Not stored anywhere by number; files and messages carry the name.
enum class DType {
  kBool,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
  kF4,
  kF6E2M3,
  kF6E3M2,
};

// The name in a safetensors header, for example "BF16" or "F8_E4M3".
absl::string_view DTypeName(DType dtype);

// INVALID_ARGUMENT for a name that the format does not know.
absl::StatusOr<DType> ParseDType(absl::string_view name);

// Bits of one element: 4 for F4, 6 for F6_*, else a multiple of 8.
int BitsPerElement(DType dtype);

// Bytes of one element. The dtype must not be one of less than 8 bits.
int BytesPerElement(DType dtype);

}  // namespace quern

#endif  // QUERN_BASE_DTYPE_H_
