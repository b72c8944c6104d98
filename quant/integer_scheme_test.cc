#include "quant/integer_scheme.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/status_matchers.h"
#include "hwy/targets.h"
#include "quant/scheme.h"
#include "quant/test_weight.h"

namespace quern::quant {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const Scheme& SchemeOf(int bits, int64_t group, bool symmetric, Numerics numerics = Numerics::kReference) {
  SchemeSpec spec;
  spec.num_bits = bits;
  spec.symmetric = symmetric;
  spec.strategy = group == 0 ? Strategy::kChannel : Strategy::kGroup;
  spec.group_size = group;
  spec.numerics = numerics;
  return **Scheme::For(spec);
}

TEST(IntegerSchemeTest, OneObjectASpec) {
  EXPECT_EQ(&SchemeOf(4, 32, true), &SchemeOf(4, 32, true));
  EXPECT_NE(&SchemeOf(4, 32, true), &SchemeOf(4, 32, false));
  SchemeSpec spec;
  spec.type = NumberType::kFloat;
  EXPECT_THAT(Scheme::For(spec), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("not supported")));
}

TEST(IntegerSchemeTest, RegionsInFileOrder) {
  QUERN_ASSERT_OK_AND_ASSIGN(const std::vector<Region> regions, SchemeOf(3, 32, false).Regions(DType::kBF16, {70, 96}));
  ASSERT_EQ(regions.size(), 4u);
  EXPECT_EQ(regions[0].suffix, "weight_packed");
  EXPECT_EQ(regions[0].dtype, DType::kI32);
  EXPECT_THAT(regions[0].shape, ElementsAre(70, 9));
  EXPECT_EQ(regions[0].bytes_per_row, 36);
  EXPECT_EQ(regions[1].suffix, "weight_scale");
  EXPECT_EQ(regions[1].dtype, DType::kBF16);
  EXPECT_THAT(regions[1].shape, ElementsAre(70, 3));
  EXPECT_EQ(regions[1].bytes_per_row, 6);
  EXPECT_EQ(regions[2].suffix, "weight_zero_point");
  EXPECT_THAT(regions[2].shape, ElementsAre(7, 3));
  EXPECT_EQ(regions[2].bytes_per_row, 12);
  EXPECT_EQ(regions[2].row_numerator, 3);
  EXPECT_EQ(regions[2].row_denominator, 32);
  EXPECT_TRUE(regions[2].accumulates);
  EXPECT_EQ(regions[3].suffix, "weight_shape");
  EXPECT_EQ(regions[3].dtype, DType::kI64);
  EXPECT_THAT(regions[3].shape, ElementsAre(2));
  EXPECT_EQ(regions[3].constant, std::string("\x46\0\0\0\0\0\0\0\x60\0\0\0\0\0\0\0", 16));
}

TEST(IntegerSchemeTest, SymmetricHasNoZeroPointAndChannelOneScaleARow) {
  QUERN_ASSERT_OK_AND_ASSIGN(const std::vector<Region> regions, SchemeOf(8, 0, true).Regions(DType::kF32, {4, 13}));
  ASSERT_EQ(regions.size(), 3u);
  EXPECT_THAT(regions[0].shape, ElementsAre(4, 4));
  EXPECT_EQ(regions[1].dtype, DType::kF32);
  EXPECT_THAT(regions[1].shape, ElementsAre(4, 1));
  QUERN_ASSERT_OK_AND_ASSIGN(const std::vector<Region> asymmetric, SchemeOf(4, 0, false).Regions(DType::kF16, {9, 64}));
  EXPECT_THAT(asymmetric[2].shape, ElementsAre(2, 1));
  EXPECT_EQ(asymmetric[2].row_numerator, 1);
  EXPECT_EQ(asymmetric[2].row_denominator, 8);
}

TEST(IntegerSchemeTest, WeightsThatDoNotFitAreRefused) {
  const Scheme& scheme = SchemeOf(4, 128, true);
  EXPECT_THAT(scheme.CheckWeight(DType::kBF16, {64, 192}),
              StatusIs(absl::StatusCode::kInvalidArgument, "192 columns are no multiple of the group size 128"));
  EXPECT_THAT(scheme.CheckWeight(DType::kBF16, {64, 64}), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no multiple")));
  EXPECT_THAT(scheme.CheckWeight(DType::kF8E4M3, {64, 128}), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("F8_E4M3")));
  EXPECT_THAT(scheme.CheckWeight(DType::kBF16, {0, 128}), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no elements")));
  EXPECT_THAT(scheme.CheckWeight(DType::kBF16, {4, 0}), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no elements")));
  QUERN_EXPECT_OK(scheme.CheckWeight(DType::kF16, {1, 256}));
  QUERN_EXPECT_OK(SchemeOf(3, 0, false).CheckWeight(DType::kF32, {1, 7}));
  EXPECT_THAT(scheme.Regions(DType::kBF16, {64, 192}), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("192")));
}

const Scheme& WithActivations(int bits, Strategy strategy, int64_t group, bool symmetric, Activations activations) {
  SchemeSpec spec;
  spec.num_bits = bits;
  spec.symmetric = symmetric;
  spec.strategy = strategy;
  spec.group_size = group;
  spec.activations = activations;
  return **Scheme::For(spec);
}

TEST(IntegerSchemeTest, QuantizedActivationsMeanOneByteACode) {
  QUERN_ASSERT_OK_AND_ASSIGN(const std::vector<Region> regions,
                             WithActivations(4, Strategy::kGroup, 32, false, Activations::kFp8Token).Regions(DType::kF16, {70, 96}));
  ASSERT_EQ(regions.size(), 3u);
  EXPECT_EQ(regions[0].suffix, "weight");
  EXPECT_EQ(regions[0].dtype, DType::kI8);
  EXPECT_THAT(regions[0].shape, ElementsAre(70, 96));
  EXPECT_EQ(regions[0].bytes_per_row, 96);
  EXPECT_EQ(regions[1].suffix, "weight_scale");
  EXPECT_EQ(regions[1].dtype, DType::kF16);
  EXPECT_THAT(regions[1].shape, ElementsAre(70, 3));
  EXPECT_EQ(regions[2].suffix, "weight_zero_point");
  EXPECT_EQ(regions[2].dtype, DType::kI8);
  EXPECT_THAT(regions[2].shape, ElementsAre(70, 3));
  EXPECT_EQ(regions[2].bytes_per_row, 3);
  EXPECT_FALSE(regions[2].accumulates);
  EXPECT_EQ(WithActivations(8, Strategy::kChannel, 0, true, Activations::kInt8Token).EffectiveBits(DType::kBF16, {64, 128}), 8.125);
}

TEST(IntegerSchemeTest, OneScaleForTheWholeWeightIsComputed) {
  for (const Activations activations : {Activations::kNone, Activations::kInt8Token}) {
    const Scheme& scheme = WithActivations(4, Strategy::kTensor, 0, false, activations);
    QUERN_ASSERT_OK_AND_ASSIGN(const std::vector<Region> regions, scheme.Regions(DType::kBF16, {70, 96}));
    ASSERT_EQ(regions.size(), activations == Activations::kNone ? 4u : 3u);
    for (const size_t i : {1, 2}) {
      EXPECT_THAT(regions[i].shape, ElementsAre(1));
      EXPECT_TRUE(regions[i].computed);
    }
    EXPECT_EQ(regions[2].dtype, DType::kI8);
    EXPECT_TRUE(scheme.NeedsStatistics({70, 96}, {70, 96}));
    EXPECT_FALSE(scheme.SharesSetScale());
    const TestWeight weight = RandomWeight(DType::kBF16, {70, 96}, 2);
    Tile tile;
    tile.dtype = DType::kBF16;
    tile.row_end = 1;
    tile.col_end = 96;
    tile.data = reinterpret_cast<const std::byte*>(weight.bytes.data());
    std::vector<RegionBuffer> buffers(regions.size());
    RowError error;
    EXPECT_THAT(scheme.Encode(tile, ModuleInputs(), nullptr, NonfinitePolicy::kFail, buffers, absl::MakeSpan(&error, 1)),
                StatusIs(absl::StatusCode::kInternal, HasSubstr("needs statistics")));
    EXPECT_THAT(scheme.ComputedRegions(DType::kBF16, {70, 96}, nullptr, ModuleInputs()),
                StatusIs(absl::StatusCode::kInternal, HasSubstr("needs statistics")));
  }
}

TEST(IntegerSchemeTest, EffectiveBitsCountScalesAndZeroPoints) {
  EXPECT_EQ(SchemeOf(4, 32, true).EffectiveBits(DType::kBF16, {64, 128}), 4.5);
  EXPECT_EQ(SchemeOf(4, 32, false).EffectiveBits(DType::kBF16, {64, 128}), 4.5 + 4.0 / 32);
  EXPECT_EQ(SchemeOf(8, 0, true).EffectiveBits(DType::kF32, {16, 64}), 8.5);
}

TEST(IntegerSchemeTest, OnlySegmentsOfRowsWithOneScaleNeedStatistics) {
  EXPECT_FALSE(SchemeOf(4, 32, true).NeedsStatistics({4, 64}, {1, 32}));
  EXPECT_FALSE(SchemeOf(4, 0, true).NeedsStatistics({4, 64}, {4, 64}));
  EXPECT_TRUE(SchemeOf(4, 0, true).NeedsStatistics({4, 64}, {1, 32}));
  EXPECT_EQ(SchemeOf(4, 0, true).ColumnMultiple(), 32);
  EXPECT_EQ(SchemeOf(4, 128, true).ColumnMultiple(), 128);
  EXPECT_EQ(SchemeOf(4, 24, true).ColumnMultiple(), 96);
}

TEST(IntegerSchemeTest, AnyTilesGiveTheSameBytesValuesAndFigures) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const int bits : {3, 4, 8}) {
      for (const bool symmetric : {true, false}) {
        for (const Numerics numerics : {Numerics::kReference, Numerics::kPrecise}) {
          for (const int64_t group : {0, 24, 32, 128}) {
            const Scheme& scheme = SchemeOf(bits, group, symmetric, numerics);
            SCOPED_TRACE(absl::StrCat(std::string(DTypeName(dtype)), " ", scheme.spec().ToString()));
            const TestWeight weight = RandomWeight(dtype, {75, group == 0 ? 333 : 384}, 100 + bits);
            QUERN_ASSERT_OK_AND_ASSIGN(EncodedWeight whole, EncodeWeight(scheme, weight, {96, 0}));
            QUERN_ASSERT_OK_AND_ASSIGN(const std::string decoded, DecodeWeight(scheme, weight, whole, {96, 0}));
            for (const Tiling& tiling :
                 {Tiling{32, 0}, Tiling{64, 0}, Tiling{0, scheme.ColumnMultiple()}, Tiling{0, 2 * scheme.ColumnMultiple()}}) {
              SCOPED_TRACE(absl::StrCat("bands of ", tiling.band_rows, ", segments of ", tiling.segment_columns));
              QUERN_ASSERT_OK_AND_ASSIGN(EncodedWeight tiled, EncodeWeight(scheme, weight, tiling));
              for (size_t i = 0; i < whole.data.size(); ++i) EXPECT_TRUE(tiled.data[i] == whole.data[i]) << whole.regions[i].suffix;
              EXPECT_TRUE(SameErrors(tiled.errors, whole.errors));
              QUERN_ASSERT_OK_AND_ASSIGN(const std::string again, DecodeWeight(scheme, weight, tiled, tiling));
              EXPECT_TRUE(again == decoded);
            }
            std::vector<RowError> errors(75);
            Tile source;
            source.dtype = dtype;
            source.row_end = 75;
            source.col_end = weight.shape.cols;
            source.data = reinterpret_cast<const std::byte*>(weight.bytes.data());
            source.row_stride = weight.shape.cols * BytesPerElement(dtype);
            Scheme::AddErrors(source, reinterpret_cast<const std::byte*>(decoded.data()), source.row_stride, absl::MakeSpan(errors));
            EXPECT_TRUE(SameErrors(errors, whole.errors));
          }
        }
      }
    }
  }
}

// Buffers that hold only the bytes of one tile, at odd addresses: nothing else is touched.
TEST(IntegerSchemeTest, BuffersMayBeginAnywhere) {
  const Scheme& scheme = SchemeOf(3, 32, false);
  const TestWeight weight = RandomWeight(DType::kBF16, {96, 256}, 1);
  QUERN_ASSERT_OK_AND_ASSIGN(EncodedWeight whole, EncodeWeight(scheme, weight, {96, 0}));
  // Row 40, columns 64 to 128: code bytes 24 to 48, groups 2 and 3, zero points at bit 120, which straddles words 3 and 4.
  std::string packed(1 + 24 + 1, '\x5A'), scales(1 + 4 + 1, '\x5A'), zero_points(1 + 2 * 8 + 1, '\0');
  std::vector<RegionBuffer> buffers(4);
  buffers[0] = {reinterpret_cast<std::byte*>(packed.data() + 1), 40, 24, 24};
  buffers[1] = {reinterpret_cast<std::byte*>(scales.data() + 1), 40, 4, 4};
  buffers[2] = {reinterpret_cast<std::byte*>(zero_points.data() + 1), 3, 8, 8};
  Tile tile;
  tile.dtype = DType::kBF16;
  tile.row_begin = 40;
  tile.row_end = 41;
  tile.col_begin = 64;
  tile.col_end = 128;
  tile.data = reinterpret_cast<const std::byte*>(weight.bytes.data()) + (40 * 256 + 64) * 2;
  tile.row_stride = 512;
  RowError error;
  QUERN_ASSERT_OK(scheme.Encode(tile, ModuleInputs(), nullptr, NonfinitePolicy::kFail, buffers, absl::MakeSpan(&error, 1)));
  EXPECT_EQ(packed, absl::StrCat("\x5A", whole.data[0].substr(40 * 96 + 24, 24), "\x5A"));
  EXPECT_EQ(scales, absl::StrCat("\x5A", whole.data[1].substr(40 * 16 + 4, 4), "\x5A"));
  uint64_t expected[2] = {}, actual[2] = {};
  for (int group = 0; group < 2; ++group) {
    uint32_t words[2];
    std::memcpy(&words[0], whole.data[2].data() + 3 * 32 + (2 + group) * 4, 4);
    std::memcpy(&words[1], whole.data[2].data() + 4 * 32 + (2 + group) * 4, 4);
    expected[group] = ((uint64_t{words[1]} << 32 | words[0]) >> 24) & 7;
    std::memcpy(&words[0], zero_points.data() + 1 + group * 4, 4);
    std::memcpy(&words[1], zero_points.data() + 1 + 8 + group * 4, 4);
    actual[group] = (uint64_t{words[1]} << 32 | words[0]) >> 24;
  }
  EXPECT_EQ(actual[0], expected[0]);
  EXPECT_EQ(actual[1], expected[1]);
  std::string decoded(128, '\0');
  Tile out = tile;
  out.row_stride = 128;
  QUERN_ASSERT_OK(scheme.Decode(out, buffers, reinterpret_cast<std::byte*>(decoded.data())));
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string all, DecodeWeight(scheme, weight, whole, {96, 0}));
  EXPECT_EQ(decoded, all.substr((40 * 256 + 64) * 2, 128));
}

TEST(IntegerSchemeTest, NonfiniteElementsFailNamingThePlaceOrAreReplaced) {
  for (const int64_t group : {0, 32}) {
    const Scheme& scheme = SchemeOf(4, group, true);
    TestWeight weight = RandomWeight(DType::kBF16, {70, 96}, 2);
    const uint16_t nan = 0x7FC0, inf = 0xFF80;
    std::memcpy(weight.bytes.data() + (67 * 96 + 41) * 2, &nan, 2);
    std::memcpy(weight.bytes.data() + (69 * 96 + 2) * 2, &inf, 2);
    for (const Tiling& tiling : {Tiling{32, 0}, Tiling{0, 32}}) {
      EXPECT_THAT(EncodeWeight(scheme, weight, tiling),
                  StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("row 67, column 41 is NaN")));
    }
    QUERN_ASSERT_OK_AND_ASSIGN(const EncodedWeight bands, EncodeWeight(scheme, weight, {32, 0}, NonfinitePolicy::kClamp));
    QUERN_ASSERT_OK_AND_ASSIGN(const EncodedWeight segments, EncodeWeight(scheme, weight, {0, 32}, NonfinitePolicy::kClamp));
    EXPECT_EQ(DigestOf(bands), DigestOf(segments));
    EXPECT_EQ(bands.errors[67].nonfinite, 1u);
    EXPECT_EQ(bands.errors[69].nonfinite, 1u);
    EXPECT_EQ(bands.errors[66].nonfinite, 0u);
    // The same as a weight that holds the replacements.
    TestWeight repaired = weight;
    const uint16_t zero = 0, lowest = 0xFEFF;
    std::memcpy(repaired.bytes.data() + (67 * 96 + 41) * 2, &zero, 2);
    std::memcpy(repaired.bytes.data() + (69 * 96 + 2) * 2, &lowest, 2);
    QUERN_ASSERT_OK_AND_ASSIGN(const EncodedWeight expected, EncodeWeight(scheme, repaired, {32, 0}));
    EXPECT_EQ(bands.data, expected.data);
    EXPECT_EQ(bands.errors[69].SumSquaredError(), expected.errors[69].SumSquaredError());
    std::memcpy(weight.bytes.data() + (67 * 96 + 41) * 2, &zero, 2);
    EXPECT_THAT(EncodeWeight(scheme, weight, {32, 0}),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("row 69, column 2 is infinite")));
  }
}

TEST(IntegerSchemeTest, ReplacedElementsDecodeToFiniteValues) {
  for (const int bits : {2, 3, 4, 8}) {
    for (const bool symmetric : {true, false}) {
      for (const uint16_t sign : {0x0000, 0x8000}) {
        TestWeight weight = RandomWeight(DType::kF16, {2, 64}, 2);
        const uint16_t inf = 0x7C00 | sign;
        std::memcpy(weight.bytes.data() + 7 * 2, &inf, 2);
        QUERN_ASSERT_OK_AND_ASSIGN(const EncodedWeight encoded,
                                   EncodeWeight(SchemeOf(bits, 32, symmetric), weight, Tiling(), NonfinitePolicy::kClamp));
        EXPECT_TRUE(std::isfinite(encoded.errors[0].max_abs)) << bits << " bits, symmetric " << symmetric;
      }
    }
  }
}

TEST(IntegerSchemeTest, ARangeThatOverflowsFailsNamingTheGroup) {
  TestWeight weight = RandomWeight(DType::kF16, {1, 96}, 2);
  const uint16_t ends[] = {0x7B00, 0xFB00};
  std::memcpy(weight.bytes.data() + 70 * 2, ends, sizeof ends);
  EXPECT_THAT(EncodeWeight(SchemeOf(4, 32, false), weight, Tiling()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("row 0, columns 64 to 95: the difference")));
  QUERN_ASSERT_OK_AND_ASSIGN(const EncodedWeight clamped, EncodeWeight(SchemeOf(4, 32, false), weight, Tiling(), NonfinitePolicy::kClamp));
  uint16_t scale;
  std::memcpy(&scale, clamped.data[1].data() + 4, 2);
  EXPECT_TRUE(scalar::F16::IsFinite(scale));
  // The least value of F16 is rounded to a multiple of that scale beyond it.
  TestWeight largest = weight;
  const uint16_t farther[] = {0x7BFF, 0xFBFF};
  std::memcpy(largest.bytes.data() + 70 * 2, farther, sizeof farther);
  EXPECT_THAT(EncodeWeight(SchemeOf(4, 32, false), largest, Tiling(), NonfinitePolicy::kClamp),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("row 0: under scheme")));
  QUERN_EXPECT_OK(EncodeWeight(SchemeOf(4, 32, false, Numerics::kPrecise), weight, Tiling()));
  EXPECT_THAT(EncodeWeight(WithActivations(4, Strategy::kTensor, 0, false, Activations::kNone), weight, Tiling()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("the whole weight: the difference")));
}

TEST(IntegerSchemeTest, MisplacedTilesAreRefused) {
  const Scheme& scheme = SchemeOf(4, 32, true);
  const TestWeight weight = RandomWeight(DType::kBF16, {64, 96}, 2);
  QUERN_ASSERT_OK_AND_ASSIGN(EncodedWeight encoded, EncodeWeight(scheme, weight, Tiling()));
  const std::vector<RegionBuffer> buffers = BuffersOf(encoded);
  const auto encode = [&](int64_t row_begin, int64_t row_end, int64_t col_begin, int64_t col_end, size_t rows, const Scheme& with) {
    Tile tile;
    tile.dtype = DType::kBF16;
    tile.row_begin = row_begin;
    tile.row_end = row_end;
    tile.col_begin = col_begin;
    tile.col_end = col_end;
    tile.data = reinterpret_cast<const std::byte*>(weight.bytes.data());
    tile.row_stride = 192;
    std::vector<RowError> errors(rows);
    return with.Encode(tile, ModuleInputs(), nullptr, NonfinitePolicy::kFail, buffers, absl::MakeSpan(errors));
  };
  QUERN_EXPECT_OK(encode(0, 32, 0, 96, 32, scheme));
  EXPECT_THAT(encode(1, 33, 0, 96, 32, scheme), StatusIs(absl::StatusCode::kInternal, HasSubstr("no valid tile")));
  EXPECT_THAT(encode(0, 0, 0, 96, 0, scheme), StatusIs(absl::StatusCode::kInternal, HasSubstr("no valid tile")));
  EXPECT_THAT(encode(0, 1, 16, 48, 1, scheme), StatusIs(absl::StatusCode::kInternal, HasSubstr("no valid tile")));
  EXPECT_THAT(encode(0, 1, 0, 40, 1, scheme), StatusIs(absl::StatusCode::kInternal, HasSubstr("cuts a group")));
  EXPECT_THAT(encode(0, 32, 0, 96, 31, scheme), StatusIs(absl::StatusCode::kInternal, HasSubstr("31 row errors")));
  EXPECT_THAT(encode(0, 32, 0, 96, 32, SchemeOf(4, 32, false)), StatusIs(absl::StatusCode::kInternal, HasSubstr("4 regions")));
  EXPECT_THAT(encode(0, 1, 32, 64, 1, SchemeOf(4, 0, true)), StatusIs(absl::StatusCode::kInternal, HasSubstr("needs statistics")));
}

TEST(IntegerSchemeTest, TheCpuBackendRunsInline) {
  const Scheme& scheme = SchemeOf(4, 32, true);
  const TestWeight weight = RandomWeight(DType::kBF16, {2, 64}, 2);
  QUERN_ASSERT_OK_AND_ASSIGN(const EncodedWeight expected, EncodeWeight(scheme, weight, Tiling()));
  EncodedWeight encoded = expected;
  for (size_t i = 0; i < 2; ++i) encoded.data[i].assign(encoded.data[i].size(), '\0');
  std::vector<RowError> errors(2);
  const std::vector<RegionBuffer> buffers = BuffersOf(encoded);
  EncodeBackend::Request request;
  request.scheme = &scheme;
  request.tile.dtype = DType::kBF16;
  request.tile.row_end = 2;
  request.tile.col_end = 64;
  request.tile.data = reinterpret_cast<const std::byte*>(weight.bytes.data());
  request.tile.row_stride = 128;
  request.regions = buffers;
  request.errors = absl::MakeSpan(errors);
  int calls = 0;
  EncodeBackend::Cpu()->Submit(request, [&](absl::Status status) {
    QUERN_EXPECT_OK(status);
    ++calls;
  });
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(encoded.data, expected.data);
  EXPECT_TRUE(SameErrors(errors, expected.errors));
}

// Bytes and figures of seeded weights, the same on every machine and target. A change here is a change of the numerics version.
TEST(IntegerSchemeTest, DigestsAreThoseOfEveryOtherMachine) {
  const std::map<std::string, std::string> expected = {
      {"BF16 symmetric reference", "c3ff44a03033668d93e0b441ba4580b5"}, {"BF16 asymmetric reference", "34933d6bf1f88b282c4f3a0838de9f2f"},
      {"BF16 symmetric precise", "1f0f20a019ed5cecc313ffba817c3bd8"},   {"BF16 asymmetric precise", "f86cb3f2edc0319e97218ae85796e2ab"},
      {"F16 symmetric reference", "3d9c2ea6264b7929815730bc3a0fa10e"},  {"F16 asymmetric reference", "3925ed0e164b967c457013082d1ca111"},
      {"F16 symmetric precise", "a512a90f85c2ac7924086d462354749e"},    {"F16 asymmetric precise", "d8aea1cec6560c6f742c5f9db935522e"},
      {"F32 symmetric reference", "6a013eaa7aecda5fd60b049914fa9f06"},  {"F32 asymmetric reference", "db7ed834698595f91fd8cb706c658d8a"},
      {"F32 symmetric precise", "6a013eaa7aecda5fd60b049914fa9f06"},    {"F32 asymmetric precise", "db7ed834698595f91fd8cb706c658d8a"},
  };
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      for (const Numerics numerics : {Numerics::kReference, Numerics::kPrecise}) {
        for (const bool symmetric : {true, false}) {
          Sha256 digest;
          for (int bits = 2; bits <= 8; ++bits) {
            for (const int64_t group : {0, 32, 128}) {
              const TestWeight weight = RandomWeight(dtype, {37, group == 0 ? 333 : 384}, 1000 + bits);
              QUERN_ASSERT_OK_AND_ASSIGN(const EncodedWeight encoded,
                                         EncodeWeight(SchemeOf(bits, group, symmetric, numerics), weight, {64, 0}));
              digest.Update(DigestOf(encoded));
            }
          }
          const std::string name = absl::StrCat(std::string(DTypeName(dtype)), symmetric ? " symmetric" : " asymmetric",
                                                numerics == Numerics::kPrecise ? " precise" : " reference");
          const auto found = expected.find(name);
          EXPECT_EQ(HexDigest(digest.Finish()).substr(0, 32), found == expected.end() ? "" : found->second)
              << name << " on " << KernelTarget();
        }
      }
    }
  }
  hwy::SetSupportedTargetsForTest(0);
}

}  // namespace
}  // namespace quern::quant
