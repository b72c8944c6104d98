#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "quant/kernels/integer_tile.h"
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

// Buffers of an encoded tile, the same for the kernels and for the definition.
struct Encoded {
  std::vector<unsigned char> packed, scales, zero_points;
  std::vector<RowError> errors;
};

constexpr int64_t kRows = 2;
constexpr int64_t kColumns = 160;

IntegerTile PointTo(IntegerTile tile, Encoded& encoded) {
  encoded.packed.assign(kRows * kColumns, 0);
  encoded.scales.assign(kRows * kColumns * 4, 0);
  encoded.zero_points.assign(kRows * kColumns * 4, 0);
  encoded.errors.assign(kRows, RowError());
  tile.packed = encoded.packed.data();
  tile.packed_stride = kColumns;
  tile.scales = encoded.scales.data();
  tile.scale_stride = kColumns * 4;
  tile.zero_points = encoded.zero_points.data();
  tile.zero_point_stride = kColumns * 4;
  return tile;
}

// Compares the active kernels with the scalar definition on one tile of seeded bits: finite values of many magnitudes.
template <class D>
absl::Status Compare(absl::string_view dtype, ElementType element, const scalar::IntegerFormat& format, int64_t group) {
  std::vector<typename D::Bits> elements;
  uint64_t state = 1;
  for (int64_t i = 0; i < kRows * kColumns; ++i) {
    state = state * 6364136223846793005 + 1442695040888963407;
    const float fraction = static_cast<float>(static_cast<int32_t>(state >> 32)) * 0x1p-31f;
    elements.push_back(D::FromFloat(fraction / static_cast<float>(1 << (state >> 29 & 7))));
  }
  IntegerTile tile;
  tile.format = format;
  tile.element = element;
  tile.rows = kRows;
  tile.columns = kColumns;
  tile.group = group;
  tile.elements = reinterpret_cast<const unsigned char*>(elements.data());
  tile.element_stride = kColumns * static_cast<int64_t>(sizeof elements[0]);
  Encoded expected, actual;
  const IntegerTile by_definition = PointTo(tile, expected);
  const IntegerTile by_kernel = PointTo(tile, actual);
  EncodeOptions options;
  options.errors = expected.errors.data();
  EncodeScalar(by_definition, options);
  options.errors = actual.errors.data();
  Encode(by_kernel, options);
  std::vector<typename D::Bits> expected_values(elements.size()), actual_values(elements.size());
  DecodeScalar(by_definition, reinterpret_cast<unsigned char*>(expected_values.data()), tile.element_stride);
  Decode(by_kernel, reinterpret_cast<unsigned char*>(actual_values.data()), tile.element_stride);
  const auto differ = [&](absl::string_view what) {
    return absl::InternalError(absl::StrCat("self-test on ", ActiveTarget(), ": ", what, " of ", dtype, " to int", format.bits,
                                            format.symmetric ? " symmetric" : " asymmetric", format.precise ? " precise" : "",
                                            " in groups of ", group, " are not those of the definition"));
  };
  if (actual.packed != expected.packed) return differ("codes");
  if (actual.scales != expected.scales) return differ("scales");
  if (actual.zero_points != expected.zero_points) return differ("zero points");
  if (actual_values != expected_values) return differ("decoded values");
  if (std::memcmp(actual.errors.data(), expected.errors.data(), kRows * sizeof(RowError)) != 0) return differ("error figures");
  return absl::OkStatus();
}

}  // namespace

absl::Status SelfTest() {
  for (const Golden& golden : kGolden) QUERN_RETURN_IF_ERROR(Check(golden));
  for (int bits = 2; bits <= 8; ++bits) {
    for (const bool symmetric : {true, false}) {
      for (const bool precise : {true, false}) {
        for (const int64_t group : {int64_t{32}, kColumns}) {
          const scalar::IntegerFormat format = {bits, symmetric, precise};
          QUERN_RETURN_IF_ERROR(Compare<scalar::Bf16>("BF16", ElementType::kBf16, format, group));
          QUERN_RETURN_IF_ERROR(Compare<scalar::F16>("F16", ElementType::kF16, format, group));
          QUERN_RETURN_IF_ERROR(Compare<scalar::F32>("F32", ElementType::kF32, format, group));
        }
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace quern::quant
