#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "quant/kernels/float_tile.h"
#include "quant/kernels/integer_tile.h"
#include "quant/scheme.h"

namespace quern::quant {
namespace {

// One group of eight BF16 values (0.30 -0.12 0.05 -0.31 0.22 0 -0.07 0.155), repeated so that it fills a group of 32.
constexpr std::array<uint16_t, 8> kGroup = {0x3E9A, 0xBDF6, 0x3D4D, 0xBE9F, 0x3E61, 0x0000, 0xBD8F, 0x3E1F};

std::vector<uint16_t> GoldenWeight() {
  std::vector<uint16_t> weight(4 * kGroup.size());
  for (size_t i = 0; i < weight.size(); ++i) weight[i] = kGroup[i % kGroup.size()];
  return weight;
}

// One row of BF16, which outlives the tile.
Tile TileOf(const std::vector<uint16_t>& weight) {
  Tile tile;
  tile.dtype = DType::kBF16;
  tile.row_end = 1;
  tile.col_end = static_cast<int64_t>(weight.size());
  tile.data = reinterpret_cast<const std::byte*>(weight.data());
  tile.row_stride = tile.col_end * 2;
  return tile;
}

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
  const std::vector<uint16_t> weight = GoldenWeight();
  const Tile tile = TileOf(weight);
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

// The same group under the float formats, whose bytes compressed-tensors and ModelOpt give: codes of the eight values, the scale's bytes.
struct FloatGolden {
  const char* spec;
  std::vector<uint8_t> codes;
  std::vector<uint8_t> scale;
};

const std::vector<FloatGolden>& FloatGoldens() {
  static const auto* const goldens = new std::vector<FloatGolden>{
      {"float8 channel symmetric observer=minmax numerics=reference", {0x7E, 0xF3, 0x69, 0xFE, 0x7A, 0x00, 0xED, 0x76}, {0x36, 0x3A}},
      {"float8 block=128 symmetric observer=minmax numerics=reference activations=fp8_group128",
       {0x7E, 0xF3, 0x69, 0xFE, 0x7A, 0x00, 0xED, 0x76},
       {0x36, 0x3A}},
      {"float4 tensor_group=16 symmetric observer=minmax numerics=reference scale=e4m3", {0xC7, 0xF2, 0x06, 0x5B}, {0x7E, 0x7E}},
      {"float4 group=32 symmetric observer=minmax numerics=reference scale=e8m0", {0xC6, 0xE2, 0x06, 0x4A}, {0x7B}},
      {"float8 group=32 symmetric observer=minmax numerics=reference scale=e8m0", {0x7A, 0xEF, 0x65, 0xFA, 0x76, 0x00, 0xE9, 0x72}, {0x75}},
      {"float4 tensor_group=16 symmetric observer=minmax numerics=reference scale=e4m3 convention=modelopt",
       {0xC7, 0xF2, 0x06, 0x5B},
       {0x7E, 0x7E}},
      {"float8 channel symmetric observer=minmax numerics=reference scale=f32 convention=modelopt",
       {0x7E, 0xF3, 0x69, 0xFE, 0x7A, 0x00, 0xED, 0x76},
       {0xDB, 0xB6, 0x35, 0x3A}},
  };
  return *goldens;
}

absl::Status Check(const FloatGolden& golden) {
  QUERN_ASSIGN_OR_RETURN(const SchemeSpec spec, SchemeSpec::Parse(golden.spec));
  QUERN_ASSIGN_OR_RETURN(const Scheme* scheme, Scheme::For(spec));
  const std::vector<uint16_t> weight = GoldenWeight();
  const Tile tile = TileOf(weight);
  const std::unique_ptr<Statistics> statistics = scheme->NewStatistics({1, 32});
  QUERN_RETURN_IF_ERROR(scheme->Observe(tile, ModuleInputs(), *statistics));
  QUERN_ASSIGN_OR_RETURN(const std::vector<Region> regions, scheme->Regions(DType::kBF16, {1, 32}));
  std::vector<uint8_t> codes(static_cast<size_t>(regions[0].bytes_per_row)), scale(static_cast<size_t>(regions[1].bytes_per_row));
  std::vector<RegionBuffer> buffers(regions.size());
  buffers[0].data = reinterpret_cast<std::byte*>(codes.data());
  buffers[1].data = reinterpret_cast<std::byte*>(scale.data());
  RowError error;
  QUERN_RETURN_IF_ERROR(scheme->Encode(tile, ModuleInputs(), statistics.get(), NonfinitePolicy::kFail, buffers, absl::MakeSpan(&error, 1)));
  std::vector<uint8_t> expected;
  for (int i = 0; i < 4; ++i) expected.insert(expected.end(), golden.codes.begin(), golden.codes.end());
  if (codes == expected && scale == golden.scale) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("self-test of scheme \"", golden.spec, "\" on ", KernelTarget(), ": codes or scales are not those of the format"));
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

// Seeded bits: finite values of many magnitudes.
template <class D>
std::vector<typename D::Bits> Elements() {
  std::vector<typename D::Bits> elements;
  uint64_t state = 1;
  for (int64_t i = 0; i < kRows * kColumns; ++i) {
    state = state * 6364136223846793005 + 1442695040888963407;
    const float fraction = static_cast<float>(static_cast<int32_t>(state >> 32)) * 0x1p-31f;
    elements.push_back(D::FromFloat(fraction / static_cast<float>(1 << (state >> 29 & 7))));
  }
  return elements;
}

// Compares the active kernels with the scalar definition on one tile.
template <class D>
absl::Status Compare(absl::string_view dtype, ElementType element, const scalar::IntegerFormat& format, int64_t group) {
  const std::vector<typename D::Bits> elements = Elements<D>();
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

// Compares the searches of observers: ranges of integers, scales of NVFP4 blocks and their least errors, errors of FP8.
template <class D>
absl::Status CompareSearches(absl::string_view dtype, ElementType element) {
  const std::vector<typename D::Bits> elements = Elements<D>();
  const auto* const data = reinterpret_cast<const unsigned char*>(elements.data());
  const int64_t stride = kColumns * static_cast<int64_t>(sizeof elements[0]);
  std::vector<float> importance(kColumns);
  for (int64_t i = 0; i < kColumns; ++i) importance[i] = static_cast<float>(i % 7) * 0.25f;
  const auto differ = [&](absl::string_view what, scalar::SearchNorm norm) {
    return absl::InternalError(absl::StrCat("self-test on ", ActiveTarget(), ": ", what, " of ", dtype, ", searched for by norm ",
                                            static_cast<int>(norm), ", are not those of the definition"));
  };
  for (const scalar::SearchNorm norm : {scalar::SearchNorm::kPower24, scalar::SearchNorm::kWeightedCube, scalar::SearchNorm::kSquare}) {
    scalar::RangeSearch search;
    search.norm = norm;
    if (norm == scalar::SearchNorm::kWeightedCube) search.importance = importance.data();
    for (const bool symmetric : {true, false}) {
      if (norm == scalar::SearchNorm::kSquare) break;  // of NVFP4 only
      for (const int64_t group : {int64_t{32}, kColumns}) {
        IntegerTile tile;
        tile.format = {4, symmetric, false};
        tile.element = element;
        tile.rows = kRows;
        tile.columns = kColumns;
        tile.group = group;
        tile.elements = data;
        tile.element_stride = stride;
        scalar::Range expected[kRows * kColumns / 32], actual[kRows * kColumns / 32];
        SearchScalar(tile, search, expected);
        Search(tile, search, actual);
        if (std::memcmp(expected, actual, sizeof expected) != 0) return differ("ranges", norm);
      }
    }
    FloatTile tile;
    tile.format = {4, scalar::FloatScaling::kNvfp4, false, false};
    tile.element = element;
    tile.rows = kRows;
    tile.columns = kColumns;
    tile.group = 16;
    tile.set_scale = 2688;
    tile.elements = data;
    tile.element_stride = stride;
    std::vector<unsigned char> expected(kRows * kColumns / 16), actual(expected.size());
    tile.scale_stride = kColumns / 16;
    tile.scales = expected.data();
    SearchFloatScalesScalar(tile, search);
    tile.scales = actual.data();
    SearchFloatScales(tile, search);
    if (expected != actual) return differ("scales", norm);
    if (norm == scalar::SearchNorm::kSquare) break;
    tile.scales = nullptr;
    if (norm == scalar::SearchNorm::kPower24) {
      tile.rows = 1;
      constexpr int64_t kBlocks = kColumns / 16;
      float amax[kBlocks], expected_least[kBlocks], actual_least[kBlocks];
      for (int64_t i = 0; i < kBlocks; ++i) amax[i] = scalar::AmaxOfBlock<D>(data, i * 16, 16);
      LeastErrorsScalar(tile, amax, expected_least);
      LeastErrors(tile, amax, actual_least);
      if (std::memcmp(expected_least, actual_least, sizeof expected_least) != 0) return differ("least errors", norm);
      tile.rows = kRows;
    }
    tile.format = {8, scalar::FloatScaling::kGiven, false, true};
    const scalar::FloatScale scales[] = {{0x1p-9f, 0x1p-9f}, {0x1.2p-10f, 0x1.2p-10f}};
    double expected_errors[2], actual_errors[2];
    ErrorsOfScalesScalar(tile, search, scales, 2, 512, expected_errors);
    ErrorsOfScales(tile, search, scales, 2, 512, actual_errors);
    if (std::memcmp(expected_errors, actual_errors, sizeof expected_errors) != 0) return differ("errors", norm);
  }
  return absl::OkStatus();
}

// The same for the float formats.
template <class D>
absl::Status Compare(absl::string_view dtype, ElementType element, const scalar::FloatFormat& format) {
  const std::vector<typename D::Bits> elements = Elements<D>();
  FloatTile tile;
  tile.format = format;
  tile.element = element;
  tile.rows = kRows;
  tile.columns = kColumns;
  tile.elements = reinterpret_cast<const unsigned char*>(elements.data());
  tile.element_stride = kColumns * static_cast<int64_t>(sizeof elements[0]);
  tile.code_stride = kColumns;
  tile.scale_stride = kColumns;
  tile.set_scale = format.scaling == scalar::FloatScaling::kNvfp4 ? 2688.0f : 1 / 2688.0f;
  tile.group = format.scaling == scalar::FloatScaling::kGiven ? 128 : format.scaling == scalar::FloatScaling::kMx ? 32 : 16;
  const scalar::FloatScale given[] = {{0x1p-9f, 0x1p-9f}, {0x1.2p-9f, 0x1.22p-9f}};
  if (format.scaling == scalar::FloatScaling::kGiven) tile.given = given;
  Encoded expected, actual;
  const auto encode = [&](Encoded& encoded, auto function) {
    encoded.packed.assign(kRows * kColumns, 0);
    encoded.scales.assign(kRows * kColumns, 0);
    encoded.errors.assign(kRows, RowError());
    tile.codes = encoded.packed.data();
    tile.scales = encoded.scales.data();
    FloatOptions options;
    options.errors = encoded.errors.data();
    function(tile, options);
  };
  encode(expected, EncodeFloatsScalar);
  encode(actual, EncodeFloats);
  std::vector<typename D::Bits> expected_values(elements.size()), actual_values(elements.size());
  DecodeFloatsScalar(tile, reinterpret_cast<unsigned char*>(expected_values.data()), tile.element_stride);
  DecodeFloats(tile, reinterpret_cast<unsigned char*>(actual_values.data()), tile.element_stride);
  float amax[2 * kRows] = {}, actual_amax[2 * kRows] = {};
  tile.group = 128;
  ObserveAmaxScalar(tile, amax, 2);
  ObserveAmax(tile, actual_amax, 2);
  const auto differ = [&](absl::string_view what) {
    return absl::InternalError(absl::StrCat("self-test on ", ActiveTarget(), ": ", what, " of ", dtype, " to float", format.bits,
                                            ", scaling ", static_cast<int>(format.scaling), format.precise ? " precise" : "",
                                            " are not those of the definition"));
  };
  if (actual.packed != expected.packed) return differ("codes");
  if (actual.scales != expected.scales) return differ("scales");
  if (actual_values != expected_values) return differ("decoded values");
  if (std::memcmp(amax, actual_amax, sizeof amax) != 0) return differ("largest magnitudes");
  if (std::memcmp(actual.errors.data(), expected.errors.data(), kRows * sizeof(RowError)) != 0) return differ("error figures");
  return absl::OkStatus();
}

}  // namespace

absl::Status SelfTest() {
  for (const Golden& golden : kGolden) QUERN_RETURN_IF_ERROR(Check(golden));
  for (const FloatGolden& golden : FloatGoldens()) QUERN_RETURN_IF_ERROR(Check(golden));
  using scalar::FloatScaling;
  for (const bool precise : {true, false}) {
    for (const scalar::FloatFormat& format :
         {scalar::FloatFormat{8, FloatScaling::kGiven, precise, !precise}, scalar::FloatFormat{4, FloatScaling::kNvfp4, precise, false},
          scalar::FloatFormat{4, FloatScaling::kModelOptNvfp4, precise, false},
          scalar::FloatFormat{4, FloatScaling::kMx, precise, !precise}, scalar::FloatFormat{8, FloatScaling::kMx, precise, !precise}}) {
      QUERN_RETURN_IF_ERROR(Compare<scalar::Bf16>("BF16", ElementType::kBf16, format));
      QUERN_RETURN_IF_ERROR(Compare<scalar::F16>("F16", ElementType::kF16, format));
      QUERN_RETURN_IF_ERROR(Compare<scalar::F32>("F32", ElementType::kF32, format));
    }
  }
  QUERN_RETURN_IF_ERROR(CompareSearches<scalar::Bf16>("BF16", ElementType::kBf16));
  QUERN_RETURN_IF_ERROR(CompareSearches<scalar::F16>("F16", ElementType::kF16));
  QUERN_RETURN_IF_ERROR(CompareSearches<scalar::F32>("F32", ElementType::kF32));
  for (int bits = 2; bits <= 8; ++bits) {
    for (const bool symmetric : {true, false}) {
      for (const bool precise : {true, false}) {
        for (const int64_t group : {int64_t{32}, kColumns}) {
          scalar::IntegerFormat format = {bits, symmetric, precise};
          format.byte_codes = format.byte_zero_points = bits == 5;  // as `int-quantized` stores them
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
