#include "quant/float_scheme.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/status_matchers.h"
#include "quant/scheme.h"
#include "quant/test_weight.h"

namespace quern::quant {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kFp8Tensor[] = "float8 tensor symmetric observer=minmax numerics=reference";
constexpr char kFp8Channel[] = "float8 channel symmetric observer=minmax numerics=reference";
constexpr char kFp8Block[] = "float8 block=128 symmetric observer=minmax numerics=reference";
constexpr char kNvfp4[] = "float4 tensor_group=16 symmetric observer=minmax numerics=reference scale=e4m3";
constexpr char kMxfp4[] = "float4 group=32 symmetric observer=minmax numerics=reference scale=e8m0";
constexpr char kMxfp8[] = "float8 group=32 symmetric observer=minmax numerics=reference scale=e8m0";
constexpr char kModelOptFp8[] = "float8 tensor symmetric observer=minmax numerics=reference scale=f32 convention=modelopt";
constexpr char kModelOptChannel[] = "float8 channel symmetric observer=minmax numerics=reference scale=f32 convention=modelopt";
constexpr char kModelOptNvfp4[] = "float4 tensor_group=16 symmetric observer=minmax numerics=reference scale=e4m3 convention=modelopt";

std::vector<std::string> AllSpecs() {
  std::vector<std::string> specs;
  for (const char* spec : {kFp8Tensor, kFp8Channel, kFp8Block, kNvfp4, kMxfp4, kMxfp8, kModelOptFp8, kModelOptChannel, kModelOptNvfp4}) {
    specs.push_back(spec);
    specs.push_back(absl::StrCat(std::string(spec, std::strlen(spec)).replace(std::string(spec).find("reference"), 9, "precise")));
  }
  return specs;
}

const Scheme& SchemeOf(absl::string_view text) { return **Scheme::For(*SchemeSpec::Parse(text)); }

template <class D>
TestWeight WeightOf(DType dtype, Shape2D shape, const std::vector<float>& values) {
  TestWeight weight;
  weight.dtype = dtype;
  weight.shape = shape;
  for (int64_t i = 0; i < shape.rows * shape.cols; ++i) {
    const auto bits = D::FromFloat(values[static_cast<size_t>(i) % values.size()]);
    weight.bytes.append(reinterpret_cast<const char*>(&bits), sizeof bits);
  }
  return weight;
}

// The values of a weight's bytes.
std::vector<float> Values(DType dtype, const std::string& bytes) {
  std::vector<float> values;
  const auto* at = reinterpret_cast<const unsigned char*>(bytes.data());
  for (size_t i = 0; i < bytes.size() / static_cast<size_t>(BytesPerElement(dtype)); ++i) {
    const auto index = static_cast<int64_t>(i);
    values.push_back(dtype == DType::kBF16  ? scalar::Bf16::ToFloat(scalar::LoadElement<scalar::Bf16>(at, index))
                     : dtype == DType::kF16 ? scalar::F16::ToFloat(scalar::LoadElement<scalar::F16>(at, index))
                                            : scalar::F32::ToFloat(scalar::LoadElement<scalar::F32>(at, index)));
  }
  return values;
}

float F32Of(const std::string& bytes) {
  float value = std::nanf("");
  if (bytes.size() == sizeof value) std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

std::vector<std::string> Suffixes(const Scheme& scheme, DType dtype, Shape2D shape) {
  std::vector<std::string> names;
  const absl::StatusOr<std::vector<Region>> regions = scheme.Regions(dtype, shape);
  if (!regions.ok()) return names;
  for (const Region& region : *regions) {
    std::string text = absl::StrCat(region.suffix, " ", std::string(DTypeName(region.dtype)), " [");
    for (size_t i = 0; i < region.shape.size(); ++i) absl::StrAppend(&text, i == 0 ? "" : ",", region.shape[i]);
    absl::StrAppend(&text, "]", region.computed ? " computed" : "");
    names.push_back(text);
  }
  return names;
}

TEST(FloatSchemeTest, RegionsAreThoseOfTheFormat) {
  const Shape2D shape = {130, 192};
  EXPECT_THAT(Suffixes(SchemeOf(kFp8Tensor), DType::kBF16, shape),
              ElementsAre("weight F8_E4M3 [130,192]", "weight_scale BF16 [1] computed"));
  EXPECT_THAT(Suffixes(SchemeOf(kFp8Channel), DType::kF16, shape), ElementsAre("weight F8_E4M3 [130,192]", "weight_scale F16 [130,1]"));
  EXPECT_THAT(Suffixes(SchemeOf(kFp8Block), DType::kF32, shape), ElementsAre("weight F8_E4M3 [130,192]", "weight_scale F32 [2,2]"));
  EXPECT_THAT(Suffixes(SchemeOf(absl::StrCat(kFp8Tensor, " activations=fp8_static")), DType::kBF16, shape),
              ElementsAre("weight F8_E4M3 [130,192]", "weight_scale BF16 [1] computed", "input_scale BF16 [1] computed"));
  EXPECT_THAT(Suffixes(SchemeOf(kNvfp4), DType::kBF16, shape),
              ElementsAre("weight_packed U8 [130,96]", "weight_scale F8_E4M3 [130,12]", "weight_global_scale F32 [1] computed"));
  EXPECT_THAT(Suffixes(SchemeOf(absl::StrCat(kNvfp4, " activations=nvfp4_static")), DType::kBF16, shape),
              ElementsAre("weight_packed U8 [130,96]", "weight_scale F8_E4M3 [130,12]", "weight_global_scale F32 [1] computed",
                          "input_global_scale F32 [1] computed"));
  EXPECT_THAT(Suffixes(SchemeOf(kMxfp4), DType::kBF16, shape), ElementsAre("weight_packed U8 [130,96]", "weight_scale U8 [130,6]"));
  EXPECT_THAT(Suffixes(SchemeOf(kMxfp8), DType::kBF16, shape), ElementsAre("weight F8_E4M3 [130,192]", "weight_scale U8 [130,6]"));
  EXPECT_THAT(Suffixes(SchemeOf("float8 tensor symmetric observer=minmax numerics=reference scale=f32 activations=fp8_static "
                                "convention=modelopt"),
                       DType::kBF16, shape),
              ElementsAre("weight F8_E4M3 [130,192]", "weight_scale F32 [] computed", "input_scale F32 [] computed"));
  EXPECT_THAT(Suffixes(SchemeOf(kModelOptChannel), DType::kBF16, shape), ElementsAre("weight F8_E4M3 [130,192]", "weight_scale F32 [130]"));
  EXPECT_THAT(
      Suffixes(SchemeOf("float4 tensor_group=16 symmetric observer=minmax numerics=reference scale=e4m3 "
                        "activations=nvfp4_static convention=modelopt"),
               DType::kBF16, shape),
      ElementsAre("weight U8 [130,96]", "weight_scale F8_E4M3 [130,12]", "weight_scale_2 F32 [] computed", "input_scale F32 [] computed"));
}

TEST(FloatSchemeTest, RowsOfABlockShareARegionRow) {
  QUERN_ASSERT_OK_AND_ASSIGN(const std::vector<Region> regions, SchemeOf(kFp8Block).Regions(DType::kBF16, {300, 130}));
  EXPECT_EQ(regions[1].bytes_per_row, 4);
  EXPECT_EQ(regions[1].row_numerator, 1);
  EXPECT_EQ(regions[1].row_denominator, 128);
  EXPECT_TRUE(regions[1].accumulates);
  EXPECT_EQ(SchemeOf(kFp8Block).RowMultiple(), 128);
  EXPECT_EQ(SchemeOf(kFp8Block).ColumnMultiple(), 128);
}

TEST(FloatSchemeTest, PresetsAndTheirFormsInModelOptAreSupported) {
  for (const char* name : {"FP8", "FP8_DYNAMIC", "FP8_BLOCK", "FP8A16", "NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16", "MXFP8", "MXFP8A16"}) {
    QUERN_ASSERT_OK_AND_ASSIGN(const SchemeSpec spec, PresetScheme(name));
    QUERN_EXPECT_OK(Scheme::For(spec).status());
  }
  for (const char* name : {"FP8", "FP8_DYNAMIC", "NVFP4", "NVFP4A16"}) {
    QUERN_ASSERT_OK_AND_ASSIGN(const SchemeSpec spec, ToModelOpt(*PresetScheme(name)));
    QUERN_EXPECT_OK(Scheme::For(spec).status());
  }
}

TEST(FloatSchemeTest, UnsupportedSpecsSayWhy) {
  const auto why = [](absl::string_view text) { return Scheme::For(*SchemeSpec::Parse(text)).status(); };
  const struct {
    const char* text;
    const char* reason;
  } cases[] = {
      {"float8 channel asymmetric observer=minmax numerics=reference", "symmetric"},
      {"float8 channel symmetric observer=sweep numerics=reference", "observer"},
      {"float8 tensor symmetric observer=mse numerics=reference", "FP8_BLOCK"},
      {"float8 group=32 symmetric observer=mse numerics=reference scale=e8m0", "powers of two"},
      {"float6 channel symmetric observer=minmax numerics=reference", "4 or 8 bits"},
      {"float4 tensor_group=32 symmetric observer=minmax numerics=reference scale=e4m3", "16 columns"},
      {"float4 tensor_group=16 symmetric observer=minmax numerics=reference", "scale=e4m3"},
      {"float4 tensor_group=16 symmetric observer=minmax numerics=reference scale=e4m3 activations=mxfp4", "nvfp4_static"},
      {"float4 group=16 symmetric observer=minmax numerics=reference scale=e8m0", "32 columns"},
      {"float8 group=32 symmetric observer=minmax numerics=reference scale=e8m0 activations=mxfp4", "mxfp8"},
      {"float4 group=32 symmetric observer=minmax numerics=reference scale=e8m0 convention=modelopt", "FP8 and NVFP4"},
      {"float4 channel symmetric observer=minmax numerics=reference", "NVFP4"},
      {"float8 block=64 symmetric observer=minmax numerics=reference", "block of 128"},
      {"float8 channel symmetric observer=minmax numerics=reference scale=e8m0", "f32, bf16 or f16"},
      {"float8 block=128 symmetric observer=minmax numerics=reference activations=fp8_token", "fp8_group128"},
      {"float8 channel symmetric observer=minmax numerics=reference activations=mxfp8", "fp8_token"},
      {"float8 block=128 symmetric observer=minmax numerics=reference scale=f32 convention=modelopt", "tensor or a channel"},
      {"float8 tensor symmetric observer=minmax numerics=reference convention=modelopt", "scale=f32"},
      {"float8 tensor symmetric observer=minmax numerics=reference scale=f32 activations=fp8_token convention=modelopt", "fp8_static"},
  };
  for (const auto& [text, reason] : cases) {
    EXPECT_THAT(why(text), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(reason))) << text;
  }
}

TEST(FloatSchemeTest, WeightsThatDoNotFitAreRefused) {
  EXPECT_THAT(SchemeOf(kNvfp4).CheckWeight(DType::kBF16, {4, 40}),
              StatusIs(absl::StatusCode::kInvalidArgument, "40 columns are no multiple of the group size 16"));
  EXPECT_THAT(SchemeOf(kMxfp4).CheckWeight(DType::kBF16, {4, 48}),
              StatusIs(absl::StatusCode::kInvalidArgument, "48 columns are no multiple of the group size 32"));
  EXPECT_THAT(SchemeOf(kFp8Block).CheckWeight(DType::kF8E4M3, {4, 48}), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("F8_E4M3")));
  EXPECT_THAT(SchemeOf(kFp8Block).CheckWeight(DType::kBF16, {4, 0}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no elements")));
  for (const char* spec : {kFp8Tensor, kFp8Channel, kFp8Block}) QUERN_EXPECT_OK(SchemeOf(spec).CheckWeight(DType::kF32, {3, 13}));
}

TEST(FloatSchemeTest, EffectiveBitsCountScales) {
  EXPECT_EQ(SchemeOf(kNvfp4).EffectiveBits(DType::kBF16, {64, 128}), 4.5 + 32.0 / (64 * 128));
  EXPECT_EQ(SchemeOf(kModelOptNvfp4).EffectiveBits(DType::kBF16, {64, 128}), 4.5 + 32.0 / (64 * 128));
  EXPECT_EQ(SchemeOf(kMxfp4).EffectiveBits(DType::kBF16, {64, 128}), 4.25);
  EXPECT_EQ(SchemeOf(kMxfp8).EffectiveBits(DType::kBF16, {64, 128}), 8.25);
  EXPECT_EQ(SchemeOf(kFp8Tensor).EffectiveBits(DType::kBF16, {64, 128}), 8 + 16.0 / (64 * 128));
  EXPECT_EQ(SchemeOf(kFp8Channel).EffectiveBits(DType::kF32, {64, 128}), 8.25);
  EXPECT_EQ(SchemeOf(kFp8Block).EffectiveBits(DType::kBF16, {128, 128}), 8 + 16.0 / 128 / 128);
}

TEST(FloatSchemeTest, ScalesOfSetsTensorsAndCutGroupsNeedStatistics) {
  const Shape2D weight = {256, 512}, band = {128, 512}, segment = {1, 128};
  for (const char* spec : {kFp8Tensor, kNvfp4, kModelOptFp8, kModelOptNvfp4}) {
    EXPECT_TRUE(SchemeOf(spec).NeedsStatistics(weight, band)) << spec;
  }
  for (const char* spec : {kFp8Channel, kFp8Block, kModelOptChannel}) {
    EXPECT_FALSE(SchemeOf(spec).NeedsStatistics(weight, band)) << spec;
    EXPECT_TRUE(SchemeOf(spec).NeedsStatistics(weight, segment)) << spec;
  }
  // A segment that is a whole row is no block.
  EXPECT_TRUE(SchemeOf(kFp8Block).NeedsStatistics({57, 115}, {1, 115}));
  EXPECT_FALSE(SchemeOf(kFp8Block).NeedsStatistics({57, 115}, {57, 115}));
  EXPECT_FALSE(SchemeOf(kFp8Block).NeedsStatistics({1, 115}, {1, 115}));
  for (const char* spec : {kMxfp4, kMxfp8}) EXPECT_FALSE(SchemeOf(spec).NeedsStatistics(weight, segment)) << spec;
  for (const char* spec : {kNvfp4, kModelOptFp8, kModelOptNvfp4}) EXPECT_TRUE(SchemeOf(spec).SharesSetScale()) << spec;
  for (const char* spec : {kFp8Tensor, kFp8Channel, kFp8Block, kMxfp4, kModelOptChannel}) {
    EXPECT_FALSE(SchemeOf(spec).SharesSetScale()) << spec;
  }
}

TEST(FloatSchemeTest, AnyTilesGiveTheSameBytesValuesAndFigures) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const std::string& text : AllSpecs()) {
      const Scheme& scheme = SchemeOf(text);
      const bool any_columns = absl::StrContains(text, "float8") && !absl::StrContains(text, "group");
      const Shape2D shape = {259, any_columns ? 333 : absl::StrContains(text, "tensor_group") ? 336 : 352};
      SCOPED_TRACE(absl::StrCat(std::string(DTypeName(dtype)), " ", text));
      const TestWeight weight = RandomWeight(dtype, shape, 11);
      QUERN_ASSERT_OK_AND_ASSIGN(EncodedWeight whole, EncodeWeight(scheme, weight, {384, 0}));
      QUERN_ASSERT_OK_AND_ASSIGN(const std::string decoded, DecodeWeight(scheme, weight, whole, {384, 0}));
      for (const Tiling& tiling : {Tiling{128, 0}, Tiling{256, 0}, Tiling{0, 128}, Tiling{0, 256}}) {
        SCOPED_TRACE(absl::StrCat("bands of ", tiling.band_rows, ", segments of ", tiling.segment_columns));
        QUERN_ASSERT_OK_AND_ASSIGN(EncodedWeight tiled, EncodeWeight(scheme, weight, tiling));
        for (size_t i = 0; i < whole.data.size(); ++i) EXPECT_TRUE(tiled.data[i] == whole.data[i]) << whole.regions[i].suffix;
        EXPECT_TRUE(SameErrors(tiled.errors, whole.errors));
        QUERN_ASSERT_OK_AND_ASSIGN(const std::string again, DecodeWeight(scheme, weight, tiled, tiling));
        EXPECT_TRUE(again == decoded);
      }
      // Decoding takes bands that begin anywhere.
      QUERN_ASSERT_OK_AND_ASSIGN(const std::string odd, DecodeWeight(scheme, weight, whole, {96, 0}));
      EXPECT_TRUE(odd == decoded);
      std::vector<RowError> errors(259);
      Tile source;
      source.dtype = dtype;
      source.row_end = 259;
      source.col_end = shape.cols;
      source.data = reinterpret_cast<const std::byte*>(weight.bytes.data());
      source.row_stride = shape.cols * BytesPerElement(dtype);
      Scheme::AddErrors(source, reinterpret_cast<const std::byte*>(decoded.data()), source.row_stride, absl::MakeSpan(errors));
      EXPECT_TRUE(SameErrors(errors, whole.errors));
    }
  }
}

TEST(FloatSchemeTest, ZerosHaveFiniteScalesAndComeBackAsZeros) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const std::string& text : AllSpecs()) {
      SCOPED_TRACE(absl::StrCat(std::string(DTypeName(dtype)), " ", text));
      TestWeight weight;
      weight.dtype = dtype;
      weight.shape = {3, 64};
      weight.bytes.assign(3 * 64 * BytesPerElement(dtype), '\0');
      QUERN_ASSERT_OK_AND_ASSIGN(EncodedWeight encoded, EncodeWeight(SchemeOf(text), weight, {128, 0}));
      QUERN_ASSERT_OK_AND_ASSIGN(const std::string decoded, DecodeWeight(SchemeOf(text), weight, encoded, {128, 0}));
      EXPECT_TRUE(decoded == weight.bytes);
      for (const RowError& error : encoded.errors) EXPECT_EQ(error.SumSquaredError(), 0);
    }
  }
  const TestWeight zeros = WeightOf<scalar::Bf16>(DType::kBF16, {1, 32}, {0.0f});
  const auto encode = [&](absl::string_view text) { return *EncodeWeight(SchemeOf(text), zeros, {128, 0}); };
  EXPECT_EQ(encode(kNvfp4).data[1], "\x20\x20");  // 0.125
  EXPECT_EQ(F32Of(encode(kNvfp4).data[2]), 1.0f);
  EXPECT_EQ(encode(kModelOptNvfp4).data[1], "\x38\x38");  // 1
  EXPECT_EQ(F32Of(encode(kModelOptNvfp4).data[2]), 1.0f);
  EXPECT_EQ(F32Of(encode(kModelOptFp8).data[1]), 1.0f);
  EXPECT_EQ(F32Of(encode(kModelOptChannel).data[1]), 1.0f);
  EXPECT_EQ(encode(kFp8Channel).data[1], std::string("\x00\x3C", 2));  // 2^-7
  EXPECT_EQ(encode(kMxfp4).data[1], std::string(1, '\0'));
  const TestWeight half = WeightOf<scalar::F16>(DType::kF16, {1, 32}, {0.0f});
  QUERN_ASSERT_OK_AND_ASSIGN(const EncodedWeight mx, EncodeWeight(SchemeOf(kMxfp8), half, {128, 0}));
  EXPECT_EQ(mx.data[1], "\x7F");
}

TEST(FloatSchemeTest, SignsOfZeros) {
  std::vector<float> values(32, 0.0f);
  values[0] = 6;
  values[1] = -0.0f;
  values[2] = -0.001f;  // rounds to zero
  const TestWeight weight = WeightOf<scalar::Bf16>(DType::kBF16, {1, 32}, values);
  for (const char* text : {kNvfp4, kMxfp4, kModelOptNvfp4}) {
    QUERN_ASSERT_OK_AND_ASSIGN(EncodedWeight encoded, EncodeWeight(SchemeOf(text), weight, {128, 0}));
    EXPECT_EQ(encoded.data[0].substr(0, 2), std::string("\x07\x08", 2)) << text;
    QUERN_ASSERT_OK_AND_ASSIGN(const std::string decoded, DecodeWeight(SchemeOf(text), weight, encoded, {128, 0}));
    EXPECT_EQ(std::signbit(Values(DType::kBF16, decoded)[2]), std::string(text) != kModelOptNvfp4) << text;
  }
  for (const char* text : {kFp8Channel, kMxfp8}) {
    QUERN_ASSERT_OK_AND_ASSIGN(const EncodedWeight encoded, EncodeWeight(SchemeOf(text), weight, {128, 0}));
    EXPECT_EQ(encoded.data[0][1], '\x80') << text;
  }
}

TEST(FloatSchemeTest, GlobalScaleIsTheReciprocalTimesTheRange) {
  // From the reciprocal, rounded to BF16: a division would give 12736.
  const TestWeight weight = WeightOf<scalar::Bf16>(DType::kBF16, {1, 16}, {scalar::Bf16::ToFloat(0x3E58)});
  QUERN_ASSERT_OK_AND_ASSIGN(EncodedWeight encoded, EncodeWeight(SchemeOf(kNvfp4), weight, {128, 0}));
  EXPECT_EQ(F32Of(encoded.data[2]), 12800.0f);
  // Of F16 weights below 0.041 it would overflow: 1.
  const TestWeight half = WeightOf<scalar::F16>(DType::kF16, {1, 16}, {0.02f});
  QUERN_ASSERT_OK_AND_ASSIGN(encoded, EncodeWeight(SchemeOf(kNvfp4), half, {128, 0}));
  EXPECT_EQ(F32Of(encoded.data[2]), 1.0f);
  QUERN_ASSERT_OK_AND_ASSIGN(
      encoded, EncodeWeight(SchemeOf("float4 tensor_group=16 symmetric observer=minmax numerics=precise scale=e4m3"), half, {128, 0}));
  EXPECT_EQ(F32Of(encoded.data[2]), 2688.0f / scalar::F16::Round(0.02f));
}

TEST(FloatSchemeTest, MembersOfASetShareItsGlobalScale) {
  const TestWeight small = WeightOf<scalar::Bf16>(DType::kBF16, {2, 32}, {1.0f, -0.5f});
  const TestWeight large = WeightOf<scalar::Bf16>(DType::kBF16, {5, 64}, {-10.0f, 2.0f});
  for (const char* text : {kNvfp4, kModelOptNvfp4, kModelOptFp8}) {
    const Scheme& scheme = SchemeOf(text);
    QUERN_ASSERT_OK_AND_ASSIGN(EncodedWeight a, EncodeWeight(scheme, small, {128, 0}, NonfinitePolicy::kFail, {}, {&large, 1}));
    QUERN_ASSERT_OK_AND_ASSIGN(EncodedWeight b, EncodeWeight(scheme, large, {128, 0}, NonfinitePolicy::kFail, {}, {&small, 1}));
    EXPECT_EQ(a.data.back(), b.data.back()) << text;
    QUERN_ASSERT_OK_AND_ASSIGN(EncodedWeight alone, EncodeWeight(scheme, small, {128, 0}));
    EXPECT_NE(a.data.back(), alone.data.back()) << text;
  }
}

TEST(FloatSchemeTest, MembersOfASetShareItsGlobalScaleWhateverTheirDtypes) {
  // Its reciprocal and the product are rounded otherwise in each dtype.
  const TestWeight a = WeightOf<scalar::Bf16>(DType::kBF16, {2, 32}, {1.0f, -0.5f});
  const TestWeight b = WeightOf<scalar::F32>(DType::kF32, {5, 64}, {-10.123f, 2.0f});
  const TestWeight c = WeightOf<scalar::F16>(DType::kF16, {3, 48}, {0.3f, 5.3f});
  ModuleInputs inputs;
  inputs.activation_amax = 3.7f;
  const std::string searched = "float4 tensor_group=16 symmetric observer=mse numerics=reference scale=e4m3";
  for (const std::string& text : {std::string(kNvfp4), searched, absl::StrCat(kNvfp4, " activations=nvfp4_static"),
                                  std::string(kModelOptNvfp4), std::string(kModelOptFp8)}) {
    const Scheme& scheme = SchemeOf(text);
    std::vector<std::vector<std::string>> computed;
    for (const auto& [weight, first, second] : {std::tuple(&a, &b, &c), std::tuple(&b, &a, &c), std::tuple(&c, &b, &a)}) {
      const TestWeight others[] = {*first, *second};
      QUERN_ASSERT_OK_AND_ASSIGN(EncodedWeight encoded, EncodeWeight(scheme, *weight, {128, 0}, NonfinitePolicy::kFail, inputs, others));
      computed.emplace_back();
      for (size_t i = 0; i < encoded.data.size(); ++i) {
        if (encoded.regions[i].computed) computed.back().push_back(encoded.data[i]);
      }
    }
    EXPECT_EQ(computed[0], computed[1]) << text;
    EXPECT_EQ(computed[0], computed[2]) << text;
  }
}

// The numbers are those of compressed-tensors' calculate_qparams and generate_gparam, and of ModelOpt's quantizers.
TEST(FloatSchemeTest, ScalesOfActivationsAreThoseOfTheLibraries) {
  ModuleInputs inputs;
  inputs.activation_amax = 3.7f;
  const auto scale = [&](absl::string_view text, DType dtype) {
    TestWeight weight = RandomWeight(dtype, {2, 32}, 1);
    const absl::StatusOr<EncodedWeight> encoded = EncodeWeight(SchemeOf(text), weight, {128, 0}, NonfinitePolicy::kFail, inputs);
    if (!encoded.ok()) return std::nanf("");
    return encoded->data.back().size() == 4 ? F32Of(encoded->data.back()) : Values(dtype, encoded->data.back())[0];
  };
  const std::string nvfp4 = absl::StrCat(kNvfp4, " activations=nvfp4_static");
  EXPECT_EQ(scale(nvfp4, DType::kBF16), 724.0f);
  EXPECT_EQ(scale(nvfp4, DType::kF16), 726.5f);
  EXPECT_EQ(scale(nvfp4, DType::kF32), 0x1.6b3e44p+9f);
  const std::string fp8 = absl::StrCat(kFp8Tensor, " activations=fp8_static");
  EXPECT_EQ(scale(fp8, DType::kBF16), 0x1.0ep-7f);
  EXPECT_EQ(scale(fp8, DType::kF16), 0x1.0e8p-7f);
  EXPECT_EQ(scale(fp8, DType::kF32), 0x1.0ea0eap-7f);
  const std::string modelopt = "numerics=reference scale=e4m3 activations=nvfp4_static convention=modelopt";
  EXPECT_EQ(scale(absl::StrCat("float4 tensor_group=16 symmetric observer=minmax ", modelopt), DType::kBF16), 0x1.68d68ep-10f);
  EXPECT_EQ(scale("float8 tensor symmetric observer=minmax numerics=reference scale=f32 activations=fp8_static convention=modelopt",
                  DType::kBF16),
            0x1.0ea0eap-7f);
}

TEST(FloatSchemeTest, MagnitudesOfActivationsThatGiveNoScaleAreRefused) {
  const TestWeight weight = RandomWeight(DType::kF16, {2, 32}, 1);
  const auto encode = [&](const std::string& text, const ModuleInputs& inputs) {
    return EncodeWeight(SchemeOf(text), weight, {128, 0}, NonfinitePolicy::kFail, inputs).status();
  };
  const std::string nvfp4 = absl::StrCat(kNvfp4, " activations=nvfp4_static");
  EXPECT_TRUE(SchemeOf(nvfp4).NeedsActivationAmax());
  EXPECT_FALSE(SchemeOf(kNvfp4).NeedsActivationAmax());
  EXPECT_THAT(encode(nvfp4, {}), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("none of their magnitudes")));
  ModuleInputs inputs;
  for (const float amax : {-1.0f, 0.0f, std::nanf("")}) {
    inputs.activation_amax = amax;
    EXPECT_THAT(encode(nvfp4, inputs), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("finite number above 0")));
  }
  inputs.activation_amax = 70000;
  EXPECT_THAT(encode(nvfp4, inputs), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("overflows F16")));
}

TEST(FloatSchemeTest, RangeOfMagnitudesOfActivations) {
  const std::string nvfp4 = absl::StrCat(kNvfp4, " activations=nvfp4_static");
  const std::string precise = absl::StrReplaceAll(nvfp4, {{"numerics=reference", "numerics=precise"}});
  const std::string fp8 = absl::StrCat(kFp8Tensor, " activations=fp8_static");
  const std::string modelopt_nvfp4 =
      "float4 tensor_group=16 symmetric observer=minmax numerics=reference scale=e4m3 activations=nvfp4_static convention=modelopt";
  const std::string modelopt_fp8 =
      "float8 tensor symmetric observer=minmax numerics=reference scale=f32 activations=fp8_static convention=modelopt";
  struct Case {
    std::string scheme;
    DType dtype;
    float least, below, largest, above;  // good, refused, good, refused
  };
  constexpr float kLargest = std::numeric_limits<float>::max(), kInfinity = std::numeric_limits<float>::infinity();
  for (const Case& c :
       {Case{nvfp4, DType::kF16, 0x1.508p-5f, 0x1.4f8p-5f, 65519, 65520},
        Case{nvfp4, DType::kBF16, 0x1p-116f, 0x1p-117f, 0x1.FEp127f, 3.4e38f},
        Case{precise, DType::kF16, 0x1p-116f, 0x1p-117f, kLargest, kInfinity}, Case{fp8, DType::kF16, 0x1p-15f, 0x1p-17f, 65519, 65520},
        Case{fp8, DType::kBF16, 0x1p-124f, 0x1p-126f, 0x1.FEp127f, 3.4e38f},
        Case{modelopt_nvfp4, DType::kBF16, 0x1p-137f, 0x1p-140f, kLargest, kInfinity},
        Case{modelopt_fp8, DType::kF16, 0x1p-140f, 0x1p-143f, kLargest, kInfinity}}) {
    SCOPED_TRACE(absl::StrCat(c.scheme, " ", DTypeName(c.dtype)));
    const Scheme& scheme = SchemeOf(c.scheme);
    QUERN_EXPECT_OK(scheme.CheckActivationAmax(c.dtype, c.least));
    QUERN_EXPECT_OK(scheme.CheckActivationAmax(c.dtype, c.largest));
    EXPECT_THAT(scheme.CheckActivationAmax(c.dtype, c.below), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("too little")));
    EXPECT_THAT(scheme.CheckActivationAmax(c.dtype, c.above), StatusIs(absl::StatusCode::kInvalidArgument));
  }
}

TEST(FloatSchemeTest, NonfiniteElementsFailNamingThePlaceOrAreReplaced) {
  for (const std::string& text : AllSpecs()) {
    SCOPED_TRACE(text);
    TestWeight weight = RandomWeight(DType::kBF16, {200, 160}, 2);
    const uint16_t nan = 0x7FC0, inf = 0xFF80;
    std::memcpy(weight.bytes.data() + (150 * 160 + 141) * 2, &nan, 2);
    std::memcpy(weight.bytes.data() + (199 * 160 + 2) * 2, &inf, 2);
    for (const Tiling& tiling : {Tiling{128, 0}, Tiling{0, 128}}) {
      EXPECT_THAT(EncodeWeight(SchemeOf(text), weight, tiling),
                  StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("row 150, column 141 is NaN")));
      QUERN_ASSERT_OK_AND_ASSIGN(EncodedWeight encoded, EncodeWeight(SchemeOf(text), weight, tiling, NonfinitePolicy::kClamp));
      EXPECT_EQ(encoded.errors[150].nonfinite, 1u);
      EXPECT_EQ(encoded.errors[199].nonfinite, 1u);
      QUERN_ASSERT_OK_AND_ASSIGN(const std::string decoded, DecodeWeight(SchemeOf(text), weight, encoded, tiling));
      for (const float value : Values(DType::kBF16, decoded)) ASSERT_TRUE(std::isfinite(value));
    }
  }
}

// What others publish: FP8 in blocks whose scales are F32, BF16 or E8M0, edge blocks cut short; one rounding, to BF16.
TEST(FloatSchemeTest, ValuesThatWouldDecodeToInfinityAreRefused) {
  // 65504 / 448 in F16 is 146.25, of which 448 are 65520.
  const TestWeight weight = WeightOf<scalar::F16>(DType::kF16, {2, 32}, {65504.0f, 1.0f});
  for (const char* spec : {kFp8Channel, kFp8Tensor, kFp8Block, "int4 group=32 symmetric observer=minmax numerics=reference"}) {
    const bool integers = spec[0] == 'i';
    const TestWeight& used = integers ? WeightOf<scalar::F16>(DType::kF16, {2, 32}, {-65504.0f, 1.0f}) : weight;
    for (const NonfinitePolicy policy : {NonfinitePolicy::kFail, NonfinitePolicy::kClamp}) {
      EXPECT_THAT(EncodeWeight(SchemeOf(spec), used, Tiling(), policy),
                  StatusIs(absl::StatusCode::kInvalidArgument, AllOf(HasSubstr("row 0"), HasSubstr("decode to infinity"))))
          << spec;
    }
  }
  const TestWeight smaller = WeightOf<scalar::F16>(DType::kF16, {2, 32}, {60000.0f, 1.0f});
  QUERN_EXPECT_OK(EncodeWeight(SchemeOf(kFp8Channel), smaller, Tiling()));
}

TEST(FloatSchemeTest, DecodesBlocksUnderScalesOfAnyDtype) {
  const Shape2D shape = {130, 200};
  std::string codes;
  for (int64_t i = 0; i < shape.rows * shape.cols; ++i) codes.push_back(static_cast<char>(i * 7 % 127 | (i % 3 == 0 ? 0x80 : 0)));
  // 1.1 * 2^-7 rounds to BF16, as a scale of that dtype.
  const float scales[] = {0x1.199999999p-7f, 3.0f, 0x1p-20f, 1e-3f};
  for (const std::string kind : {"f32", "bf16", "f16", "e8m0"}) {
    EncodedWeight encoded;
    encoded.data = {codes, ""};
    std::vector<float> stored;
    for (const float scale : scales) {
      if (kind == "f32") {
        encoded.data[1].append(reinterpret_cast<const char*>(&scale), 4);
        stored.push_back(scale);
      } else if (kind == "bf16") {
        const uint16_t bits = scalar::Bf16::FromFloat(scale);
        encoded.data[1].append(reinterpret_cast<const char*>(&bits), 2);
        stored.push_back(scalar::Bf16::ToFloat(bits));
      } else if (kind == "f16") {
        const uint16_t bits = scalar::F16::FromFloat(scale);
        encoded.data[1].append(reinterpret_cast<const char*>(&bits), 2);
        stored.push_back(scalar::F16::ToFloat(bits));
      } else {
        encoded.data[1].push_back(static_cast<char>(127 + std::ilogb(scale)));
        stored.push_back(std::ldexp(1.0f, std::ilogb(scale)));
      }
    }
    const Scheme& scheme = SchemeOf(absl::StrCat(kFp8Block, " scale=", kind));
    QUERN_ASSERT_OK_AND_ASSIGN(encoded.regions, scheme.Regions(DType::kBF16, shape));
    EXPECT_EQ(encoded.data[1].size(), static_cast<size_t>(2 * encoded.regions[1].bytes_per_row));
    TestWeight weight;
    weight.shape = shape;
    weight.bytes.assign(shape.rows * shape.cols * 2, '\0');
    for (const Tiling& tiling : {Tiling{128, 0}, Tiling{32, 0}, Tiling{0, 128}}) {
      QUERN_ASSERT_OK_AND_ASSIGN(const std::string decoded, DecodeWeight(scheme, weight, encoded, tiling));
      const std::vector<float> values = Values(DType::kBF16, decoded);
      for (int64_t r = 0; r < shape.rows; ++r) {
        for (int64_t c = 0; c < shape.cols; ++c) {
          const auto i = static_cast<size_t>(r * shape.cols + c);
          const float scale = stored[static_cast<size_t>(r / 128 * 2 + c / 128)];
          ASSERT_EQ(values[i], scalar::Bf16::Round(scalar::E4m3::ToFloat(static_cast<uint8_t>(codes[i])) * scale)) << kind << " " << i;
        }
      }
    }
  }
}

TEST(FloatSchemeTest, BlocksUnderE8m0ScalesCannotBeEncoded) {
  const TestWeight weight = RandomWeight(DType::kBF16, {4, 128}, 1);
  EXPECT_THAT(EncodeWeight(SchemeOf(absl::StrCat(kFp8Block, " scale=e8m0")), weight, {128, 0}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("can be decoded only")));
}

// gpt-oss and DeepSeek V4 store what compressed-tensors does: the even column in the low half, a power of two for 32 columns.
TEST(FloatSchemeTest, DecodesMxfp4OfOtherPublishers) {
  EncodedWeight encoded;
  const Scheme& scheme = SchemeOf(kMxfp4);
  QUERN_ASSERT_OK_AND_ASSIGN(encoded.regions, scheme.Regions(DType::kBF16, {1, 32}));
  encoded.data = {std::string("\x10\x32\x54\x76\x98\xBA\xDC\xFE", 8), "\x7E"};  // codes 0 .. 15, and 2^-1
  encoded.data[0] += encoded.data[0];
  TestWeight weight;
  weight.shape = {1, 32};
  weight.bytes.assign(64, '\0');
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string decoded, DecodeWeight(scheme, weight, encoded, {32, 0}));
  const std::vector<float> values = Values(DType::kBF16, decoded);
  const float expected[] = {0, 0.25f, 0.5f, 0.75f, 1, 1.5f, 2, 3};
  for (size_t i = 0; i < 32; ++i) EXPECT_EQ(values[i], i % 16 < 8 ? expected[i % 8] : -expected[i % 8]);
}

TEST(FloatSchemeTest, TilesThatBeginInsideABlockAreRefused) {
  const TestWeight weight = RandomWeight(DType::kBF16, {256, 256}, 1);
  EXPECT_THAT(EncodeWeight(SchemeOf(kFp8Block), weight, {32, 0}), StatusIs(absl::StatusCode::kInternal, HasSubstr("no valid tile")));
  EXPECT_THAT(EncodeWeight(SchemeOf(kFp8Block), weight, {0, 32}), StatusIs(absl::StatusCode::kInternal, HasSubstr("no valid tile")));
}

}  // namespace
}  // namespace quern::quant
