#include "quant/plain_scheme.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "hwy/targets.h"
#include "quant/test_weight.h"

namespace quern::quant {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr DType kPlainDTypes[] = {DType::kBF16, DType::kF16, DType::kF32};

const Scheme& To(DType dtype) { return **Scheme::For(*PlainSpec(dtype)); }

TestWeight Weight(const std::vector<float>& values, int64_t cols) {
  TestWeight weight;
  weight.dtype = DType::kF32;
  weight.shape = {static_cast<int64_t>(values.size()) / cols, cols};
  weight.bytes.assign(reinterpret_cast<const char*>(values.data()), values.size() * 4);
  return weight;
}

template <class T>
std::vector<T> ValuesOf(const std::string& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

TEST(PlainSchemeTest, TextsAreCanonical) {
  for (const DType dtype : kPlainDTypes) {
    QUERN_ASSERT_OK_AND_ASSIGN(const SchemeSpec spec, PlainSpec(dtype));
    EXPECT_EQ(PlainDType(spec), dtype);
    QUERN_ASSERT_OK_AND_ASSIGN(const SchemeSpec parsed, SchemeSpec::Parse(spec.ToString()));
    EXPECT_EQ(parsed, spec);
    EXPECT_EQ(FormatName(spec), "dense");
  }
  EXPECT_EQ(PlainSpec(DType::kBF16)->ToString(), "plain16 tensor symmetric observer=minmax numerics=reference scale=bf16");
  EXPECT_EQ(PlainSpec(DType::kF16)->ToString(), "plain16 tensor symmetric observer=minmax numerics=reference");
  EXPECT_EQ(PlainSpec(DType::kF32)->ToString(), "plain32 tensor symmetric observer=minmax numerics=reference");
  EXPECT_THAT(PlainSpec(DType::kF64), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("not F64")));
  for (const char* text :
       {"plain8 tensor symmetric observer=minmax numerics=reference", "plain16 channel symmetric observer=minmax numerics=reference",
        "plain32 tensor symmetric observer=minmax numerics=reference scale=bf16"}) {
    QUERN_ASSERT_OK_AND_ASSIGN(const SchemeSpec spec, SchemeSpec::Parse(text));
    EXPECT_THAT(CheckSupported(spec), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("plain values of that dtype"))) << text;
  }
}

TEST(PlainSchemeTest, OneRegionWithTheWeightsShape) {
  QUERN_ASSERT_OK_AND_ASSIGN(const std::vector<Region> regions, To(DType::kF32).Regions(DType::kBF16, {3, 7}));
  ASSERT_EQ(regions.size(), 1u);
  EXPECT_EQ(regions[0].suffix, "weight");
  EXPECT_EQ(regions[0].dtype, DType::kF32);
  EXPECT_THAT(regions[0].shape, ElementsAre(3, 7));
  EXPECT_EQ(regions[0].bytes_per_row, 28);
  EXPECT_EQ(To(DType::kBF16).EffectiveBits(DType::kF32, {3, 7}), 16);
  EXPECT_THAT(To(DType::kF16).CheckWeight(DType::kI8, {3, 7}), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("I8")));
  EXPECT_THAT(To(DType::kF16).CheckWeight(DType::kF16, {0, 7}), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no elements")));
}

TEST(PlainSchemeTest, ValuesAreRoundedToNearestEven) {
  const TestWeight weight = Weight({1.0f, 0x1.01p0f, 0x1.03p0f, -0.0f, 0x1p-133f, 0x1.8p-134f, 1e-40f, 0x1.fep127f}, 8);
  QUERN_ASSERT_OK_AND_ASSIGN(const EncodedWeight bf16, EncodeWeight(To(DType::kBF16), weight, Tiling()));
  EXPECT_THAT(ValuesOf<uint16_t>(bf16.data[0]), ElementsAre(0x3F80, 0x3F80, 0x3F82, 0x8000, 0x0001, 0x0001, 0x0001, 0x7F7F));
  const TestWeight small = Weight({1.0f, 0x1.002p0f, 0x1.006p0f, -0.0f, 0x1p-24f, 0x1p-25f, 0x1.8p-25f, 65519.0f}, 8);
  QUERN_ASSERT_OK_AND_ASSIGN(const EncodedWeight f16, EncodeWeight(To(DType::kF16), small, Tiling()));
  EXPECT_THAT(ValuesOf<uint16_t>(f16.data[0]), ElementsAre(0x3C00, 0x3C00, 0x3C02, 0x8000, 0x0001, 0x0000, 0x0001, 0x7BFF));
  EXPECT_EQ(f16.errors[0].max_abs, 15);
}

TEST(PlainSchemeTest, TheSameDTypeKeepsEveryBit) {
  for (const DType dtype : kPlainDTypes) {
    const TestWeight weight = RandomWeight(dtype, {35, 77}, 5);
    QUERN_ASSERT_OK_AND_ASSIGN(const EncodedWeight encoded, EncodeWeight(To(dtype), weight, Tiling()));
    EXPECT_TRUE(encoded.data[0] == weight.bytes);
    for (const RowError& error : encoded.errors) EXPECT_EQ(error.SumSquaredError(), 0);
  }
}

TEST(PlainSchemeTest, AnyTilesAndTargetsGiveWhatTheDefinitionGives) {
  for (const DType from : kPlainDTypes) {
    for (const DType to : kPlainDTypes) {
      SCOPED_TRACE(absl::StrCat(std::string(DTypeName(from)), " to ", std::string(DTypeName(to))));
      const Scheme& scheme = To(to);
      const TestWeight weight = RandomWeight(from, {67, 333}, 7);
      std::string expected(67 * 333 * BytesPerElement(to), '\0');
      std::vector<RowError> errors(67);
      PlainTile tile;
      tile.element = from == DType::kBF16 ? ElementType::kBf16 : from == DType::kF16 ? ElementType::kF16 : ElementType::kF32;
      tile.plain = to == DType::kBF16 ? ElementType::kBf16 : to == DType::kF16 ? ElementType::kF16 : ElementType::kF32;
      tile.rows = 67;
      tile.columns = 333;
      tile.elements = reinterpret_cast<const unsigned char*>(weight.bytes.data());
      tile.element_stride = 333 * BytesPerElement(from);
      tile.values = reinterpret_cast<unsigned char*>(expected.data());
      tile.value_stride = 333 * BytesPerElement(to);
      ASSERT_EQ(EncodePlainScalar(tile, false, errors.data()).kind, scalar::Problem::kNone);
      std::string decoded(weight.bytes.size(), '\0');
      DecodePlainScalar(tile, reinterpret_cast<unsigned char*>(decoded.data()), tile.element_stride);
      for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
        hwy::SetSupportedTargetsForTest(target);
        SCOPED_TRACE(KernelTarget());
        for (const Tiling& tiling : {Tiling{96, 0}, Tiling{32, 0}, Tiling{0, 64}, Tiling{0, 320}}) {
          QUERN_ASSERT_OK_AND_ASSIGN(EncodedWeight encoded, EncodeWeight(scheme, weight, tiling));
          EXPECT_TRUE(encoded.data[0] == expected);
          EXPECT_TRUE(SameErrors(encoded.errors, errors));
          QUERN_ASSERT_OK_AND_ASSIGN(const std::string back, DecodeWeight(scheme, weight, encoded, tiling));
          EXPECT_TRUE(back == decoded);
        }
      }
      hwy::SetSupportedTargetsForTest(0);
    }
  }
}

TEST(PlainSchemeTest, WhatCannotBeHeldFailsNamingThePlaceOrIsReplaced) {
  std::vector<float> values(3 * 70, 0.5f);
  values[2 * 70 + 66] = -65520;
  QUERN_EXPECT_OK(EncodeWeight(To(DType::kBF16), Weight(values, 70), Tiling()));
  for (const Tiling& tiling : {Tiling{32, 0}, Tiling{0, 32}}) {
    EXPECT_THAT(EncodeWeight(To(DType::kF16), Weight(values, 70), tiling),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("row 2, column 66 is too large for F16")));
    QUERN_ASSERT_OK_AND_ASSIGN(const EncodedWeight encoded,
                               EncodeWeight(To(DType::kF16), Weight(values, 70), tiling, NonfinitePolicy::kClamp));
    EXPECT_EQ(ValuesOf<uint16_t>(encoded.data[0])[2 * 70 + 66], 0xFBFF);
    EXPECT_EQ(encoded.errors[2].nonfinite, 1u);
    EXPECT_EQ(encoded.errors[2].max_abs, 16);
  }
  values[2 * 70 + 66] = 0.5f;
  values[70 + 3] = std::numeric_limits<float>::quiet_NaN();
  values[70 + 4] = std::numeric_limits<float>::infinity();
  for (const DType dtype : kPlainDTypes) {
    EXPECT_THAT(EncodeWeight(To(dtype), Weight(values, 70), Tiling()),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("row 1, column 3 is NaN")));
    QUERN_ASSERT_OK_AND_ASSIGN(EncodedWeight encoded, EncodeWeight(To(dtype), Weight(values, 70), Tiling(), NonfinitePolicy::kClamp));
    EXPECT_EQ(encoded.errors[1].nonfinite, 2u);
    QUERN_ASSERT_OK_AND_ASSIGN(const std::string decoded, DecodeWeight(To(dtype), Weight(values, 70), encoded, Tiling()));
    const std::vector<float> back = ValuesOf<float>(decoded);
    EXPECT_EQ(back[70 + 3], 0);
    EXPECT_TRUE(std::isfinite(back[70 + 4])) << DTypeName(dtype);
  }
  values[70 + 3] = 0;
  EXPECT_THAT(EncodeWeight(To(DType::kF32), Weight(values, 70), Tiling()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("row 1, column 4 is infinite")));
  // Above the middle between the largest BF16 value and the next power of two.
  values[70 + 4] = std::numeric_limits<float>::max();
  EXPECT_THAT(EncodeWeight(To(DType::kBF16), Weight(values, 70), Tiling()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("too large for BF16")));
}

TEST(PlainSchemeTest, MisplacedTilesAreRefused) {
  const TestWeight weight = RandomWeight(DType::kBF16, {64, 96}, 2);
  QUERN_ASSERT_OK_AND_ASSIGN(EncodedWeight encoded, EncodeWeight(To(DType::kF32), weight, Tiling()));
  const std::vector<RegionBuffer> buffers = BuffersOf(encoded);
  Tile tile;
  tile.dtype = DType::kBF16;
  tile.row_end = 1;
  tile.col_begin = 16;
  tile.col_end = 48;
  tile.data = reinterpret_cast<const std::byte*>(weight.bytes.data());
  tile.row_stride = 192;
  RowError error;
  const auto encode = [&](absl::Span<const RegionBuffer> regions) {
    return To(DType::kF32).Encode(tile, ModuleInputs(), nullptr, NonfinitePolicy::kFail, regions, absl::MakeSpan(&error, 1));
  };
  EXPECT_THAT(encode(buffers), StatusIs(absl::StatusCode::kInternal, HasSubstr("no valid tile")));
  tile.col_begin = 32;
  QUERN_EXPECT_OK(encode(buffers));
  EXPECT_THAT(encode({}), StatusIs(absl::StatusCode::kInternal, HasSubstr("1 region")));
}

}  // namespace
}  // namespace quern::quant
