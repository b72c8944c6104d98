#include "base/dtype.h"

#include <cassert>

#include "absl/strings/str_cat.h"

namespace quern {
namespace {

struct DTypeEntry {
  DType dtype;
  absl::string_view name;
  int bits;
};

// In the order of the enum.
constexpr DTypeEntry kDTypeEntries[] = {
    {DType::kBool, "BOOL", 8},
    {DType::kU8, "U8", 8},
    {DType::kI8, "I8", 8},
    {DType::kF8E5M2, "F8_E5M2", 8},
    {DType::kF8E4M3, "F8_E4M3", 8},
    {DType::kF8E8M0, "F8_E8M0", 8},
    {DType::kF8E4M3Fnuz, "F8_E4M3FNUZ", 8},
    {DType::kF8E5M2Fnuz, "F8_E5M2FNUZ", 8},
    {DType::kI16, "I16", 16},
    {DType::kU16, "U16", 16},
    {DType::kF16, "F16", 16},
    {DType::kBF16, "BF16", 16},
    {DType::kI32, "I32", 32},
    {DType::kU32, "U32", 32},
    {DType::kF32, "F32", 32},
    {DType::kC64, "C64", 64},
    {DType::kF64, "F64", 64},
    {DType::kI64, "I64", 64},
    {DType::kU64, "U64", 64},
    {DType::kF4, "F4", 4},
    {DType::kF6E2M3, "F6_E2M3", 6},
    {DType::kF6E3M2, "F6_E3M2", 6},
};

const DTypeEntry& Find(DType dtype) { return kDTypeEntries[static_cast<int>(dtype)]; }

}  // namespace

absl::string_view DTypeName(DType dtype) { return Find(dtype).name; }

absl::StatusOr<DType> ParseDType(absl::string_view name) {
  for (const DTypeEntry& entry : kDTypeEntries) {
    if (entry.name == name) return entry.dtype;
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown dtype \"", name, "\""));
}

int BitsPerElement(DType dtype) { return Find(dtype).bits; }

int BytesPerElement(DType dtype) {
  assert(Find(dtype).bits % 8 == 0);
  return Find(dtype).bits / 8;
}

}  // namespace quern
