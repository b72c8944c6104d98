#include "quant/scheme_spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/status_matchers.h"

namespace quern::quant {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(SchemeSpecTest, CanonicalTextIsStable) {
  SchemeSpec spec;
  spec.group_size = 32;
  spec.symmetric = false;
  EXPECT_EQ(spec.ToString(), "int4 group=32 asymmetric observer=minmax numerics=reference");
  spec = SchemeSpec();
  spec.num_bits = 8;
  spec.strategy = Strategy::kChannel;
  spec.group_size = 0;
  spec.numerics = Numerics::kPrecise;
  EXPECT_EQ(spec.ToString(), "int8 channel symmetric observer=minmax numerics=precise");
}

TEST(SchemeSpecTest, TextOfEverySpecParsesBack) {
  for (const NumberType type : {NumberType::kInt, NumberType::kFloat}) {
    for (const Strategy strategy : {Strategy::kTensor, Strategy::kChannel, Strategy::kGroup, Strategy::kBlock, Strategy::kTensorGroup}) {
      for (const Observer observer : {Observer::kMinMax, Observer::kMse, Observer::kImportance}) {
        for (const bool symmetric : {true, false}) {
          for (const Numerics numerics : {Numerics::kReference, Numerics::kPrecise}) {
            SchemeSpec spec;
            spec.num_bits = 5;
            spec.type = type;
            spec.strategy = strategy;
            spec.group_size = strategy == Strategy::kTensor || strategy == Strategy::kChannel ? 0 : 64;
            spec.symmetric = symmetric;
            spec.observer = observer;
            spec.numerics = numerics;
            EXPECT_THAT(SchemeSpec::Parse(spec.ToString()), IsOkAndHolds(spec));
          }
        }
      }
    }
  }
}

TEST(SchemeSpecTest, MalformedTextIsRefused) {
  for (const char* text :
       {"", "int4", "int4 group=32 asymmetric observer=minmax", "int4 group asymmetric observer=minmax numerics=reference",
        "int4 group=0 asymmetric observer=minmax numerics=reference", "int4 group=32x symmetric observer=minmax numerics=reference",
        "int04 group=32 symmetric observer=minmax numerics=reference", "int4 channel=7 symmetric observer=minmax numerics=reference",
        "nf4 group=32 symmetric observer=minmax numerics=reference", "int99 channel symmetric observer=minmax numerics=reference",
        "int4 rows symmetric observer=minmax numerics=reference", "int4 channel odd observer=minmax numerics=reference",
        "int4 channel symmetric minmax numerics=reference", "int4 channel symmetric observer=minmax numerics=exact",
        "int4  group=32 symmetric observer=minmax numerics=reference"}) {
    EXPECT_THAT(SchemeSpec::Parse(text), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("expected for example"))) << text;
  }
}

TEST(SchemeSpecTest, PresetsAreFoundInAnyCase) {
  QUERN_ASSERT_OK_AND_ASSIGN(SchemeSpec spec, PresetScheme("w4a16_asym"));
  EXPECT_EQ(spec.ToString(), "int4 group=128 asymmetric observer=minmax numerics=reference");
  QUERN_ASSERT_OK_AND_ASSIGN(spec, PresetScheme("W8A16"));
  EXPECT_EQ(spec.ToString(), "int8 group=128 symmetric observer=minmax numerics=reference");
  for (const std::string& name : PresetNames()) {
    QUERN_ASSERT_OK_AND_ASSIGN(spec, PresetScheme(name));
    EXPECT_THAT(SchemeSpec::Parse(spec.ToString()), IsOkAndHolds(spec)) << name;
  }
  EXPECT_THAT(PresetNames(), Contains("NVFP4A16"));
  EXPECT_THAT(PresetScheme("W4"), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("W4A16, W4A16_ASYM")));
}

TEST(SchemeSpecTest, FormatsHaveCompressedTensorsNames) {
  const auto format = [](absl::string_view preset) { return std::string(FormatName(*PresetScheme(preset))); };
  EXPECT_EQ(format("W4A16"), "pack-quantized");
  EXPECT_EQ(format("W8A8"), "int-quantized");
  EXPECT_EQ(format("FP8_DYNAMIC"), "float-quantized");
  EXPECT_EQ(format("FP8A16"), "naive-quantized");
  EXPECT_EQ(format("NVFP4A16"), "nvfp4-pack-quantized");
  EXPECT_EQ(format("MXFP4"), "mxfp4-pack-quantized");
  EXPECT_EQ(format("MXFP8"), "mxfp8-quantized");
}

TEST(SchemeSpecTest, OnlySomeSchemesExistInModelOpt) {
  QUERN_ASSERT_OK_AND_ASSIGN(const SchemeSpec spec, ToModelOpt(*PresetScheme("FP8_DYNAMIC")));
  EXPECT_EQ(spec.ToString(),
            "float8 channel symmetric observer=minmax numerics=reference scale=f32 activations=fp8_token convention=modelopt");
  EXPECT_THAT(ToModelOpt(*PresetScheme("W4A16")), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("NVFP4A16")));
}

TEST(SchemeSpecTest, IntegerPresetsAreSupported) {
  for (const char* name : {"W4A16", "W3A16_ASYM", "W8A8", "W4A8", "W2A8", "W4AFP8"}) QUERN_EXPECT_OK(CheckSupported(*PresetScheme(name)));
}

TEST(SchemeSpecTest, UnsupportedSpecsSayWhy) {
  const auto why = [](auto change) {
    SchemeSpec spec;
    change(spec);
    return CheckSupported(spec);
  };
  EXPECT_THAT(why([](SchemeSpec& s) { s.type = NumberType::kFloat; }), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("integer")));
  EXPECT_THAT(why([](SchemeSpec& s) { s.activations = Activations::kMxfp4; }),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("int8_token or fp8_token")));
  EXPECT_THAT(why([](SchemeSpec& s) { s.scale = ScaleType::kF32; }),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("of the weight's dtype")));
  EXPECT_THAT(why([](SchemeSpec& s) { s.convention = Convention::kModelOpt; }),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("compressed-tensors only")));
  EXPECT_THAT(why([](SchemeSpec& s) { s.num_bits = 1; }), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("2 to 8 bits")));
  EXPECT_THAT(why([](SchemeSpec& s) { s.num_bits = 9; }), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("2 to 8 bits")));
  EXPECT_THAT(why([](SchemeSpec& s) { s.strategy = Strategy::kBlock; }),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("strategies")));
  EXPECT_THAT(why([](SchemeSpec& s) { s.group_size = 0; }), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("65536 columns")));
  EXPECT_THAT(why([](SchemeSpec& s) { s.group_size = 1 << 17; }), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("65536 columns")));
  EXPECT_THAT(why([](SchemeSpec& s) { s.strategy = Strategy::kChannel; }),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no group size")));
  EXPECT_THAT(why([](SchemeSpec& s) { s.observer = Observer::kSweep; }), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("NVFP4")));
  EXPECT_THAT(why([](SchemeSpec& s) {
                s.observer = Observer::kMse;
                s.strategy = Strategy::kTensor;
                s.group_size = 0;
              }),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("the observer is minmax")));
}

}  // namespace
}  // namespace quern::quant
