#include <array>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "quant/scheme.h"

namespace quern::quant {
namespace {

// One group of eight BF16 values (0.30 -0.12 0.05 -0.31 0.22 0 -0.07 0.155), repeated so that it fills a group of 32.
constexpr std::array<uint16_t, 8> kGroup = {0x3E9A, 0xBDF6, 0x3D4D, 0xBE9F, 0x3E61, 0x0000, 0xBD8F, 0x3E1F};

struct Golden {
  bool symmetric;
  uint16_t scale;
  uint32_t word;        // of eight 4-bit codes
  uint32_t zero_point;  // packed
};
constexpr Golden kGolden[] = {{true, 0x3D2A, 0xC68D195F, 0}, {false, 0x3D26, 0xC68D095F, 8}};

absl::Status Check(const Golden& golden) {
  SchemeSpec spec;
  spec.group_size = 32;
  spec.symmetric = golden.symmetric;
  QUERN_ASSIGN_OR_RETURN(const Scheme* scheme, Scheme::For(spec));
  std::vector<uint16_t> weight;
  for (int i = 0; i < 4; ++i) weight.insert(weight.end(), kGroup.begin(), kGroup.end());
  Tile tile;
  tile.dtype = DType::kBF16;
  tile.row_end = 1;
  tile.col_end = 32;
  tile.data = reinterpret_cast<const std::byte*>(weight.data());
  tile.row_stride = 64;
  std::array<uint32_t, 4> words = {};
  uint16_t scale = 0;
  uint32_t zero_point = 0;
  const auto buffer = [](void* data, int64_t stride) {
    RegionBuffer region;
    region.data = static_cast<std::byte*>(data);
    region.row_stride = stride;
    return region;
  };
  std::vector<RegionBuffer> regions = {buffer(words.data(), 16), buffer(&scale, 2)};
  if (!spec.symmetric) regions.push_back(buffer(&zero_point, 4));
  regions.push_back(RegionBuffer());
  RowError error;
  QUERN_RETURN_IF_ERROR(scheme->Encode(tile, ModuleInputs(), nullptr, NonfinitePolicy::kFail, regions, absl::MakeSpan(&error, 1)));
  const auto differs = [&](absl::string_view what, uint32_t actual, uint32_t expected) {
    return absl::InternalError(absl::StrCat("self-test of scheme \"", spec.ToString(), "\" on ", KernelTarget(), ": ", what, " is 0x",
                                            absl::Hex(actual), ", expected 0x", absl::Hex(expected)));
  };
  if (scale != golden.scale) return differs("the scale", scale, golden.scale);
  if (zero_point != golden.zero_point) return differs("the zero point", zero_point, golden.zero_point);
  for (const uint32_t word : words) {
    if (word != golden.word) return differs("a word of codes", word, golden.word);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status SelfTest() {
  for (const Golden& golden : kGolden) QUERN_RETURN_IF_ERROR(Check(golden));
  return absl::OkStatus();
}

}  // namespace quern::quant
