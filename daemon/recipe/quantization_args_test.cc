#include "daemon/recipe/quantization_args.h"

#include <string>

#include "base/status_matchers.h"

namespace quern::daemon {
namespace {

using quant::SchemeSpec;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(QuantizationArgs, EveryPresetReadsBack) {
  for (const std::string& name : quant::PresetNames()) {
    for (const char* observer : {"memoryless_minmax", "memoryless_mse", "imatrix_mse", "nvfp4_sweep"}) {
      QUERN_ASSERT_OK_AND_ASSIGN(SchemeSpec spec, quant::PresetScheme(name));
      QUERN_ASSERT_OK_AND_ASSIGN(spec.observer, ParseObserver(observer));
      QUERN_ASSERT_OK_AND_ASSIGN(const QuantizationArgs weights, WeightArgs(spec));
      EXPECT_EQ(weights.observer, observer);
      QUERN_ASSERT_OK_AND_ASSIGN(SchemeSpec back, SpecOf(weights));
      if (const auto inputs = InputArgs(spec.activations); inputs.has_value()) {
        QUERN_ASSERT_OK_AND_ASSIGN(back.activations, ActivationsOf(*inputs));
      }
      EXPECT_EQ(back, spec) << name;
      EXPECT_EQ(quant::PresetScheme(PresetOf(spec))->ToString(), quant::PresetScheme(name)->ToString());
    }
  }
}

TEST(QuantizationArgs, ScalesOfTheFormatMayBeLeftOut) {
  QuantizationArgs args;
  args.num_bits = 4;
  args.type = "float";
  args.strategy = "tensor_group";
  args.group_size = 16;
  EXPECT_EQ(*SpecOf(args), *quant::PresetScheme("NVFP4A16"));
  args.strategy = "group";
  args.group_size = 32;
  EXPECT_EQ(*SpecOf(args), *quant::PresetScheme("MXFP4A16"));
  args.num_bits = 8;
  EXPECT_THAT(SpecOf(args), StatusIs(kInvalid, HasSubstr("torch.uint8")));
  args.scale_dtype = "torch.uint8";
  EXPECT_EQ(*SpecOf(args), *quant::PresetScheme("MXFP8A16"));
}

TEST(QuantizationArgs, WhatDoesNotExistIsRefused) {
  const auto refused = [](auto change, absl::string_view why) {
    QuantizationArgs args = *WeightArgs(*quant::PresetScheme("FP8_DYNAMIC"));
    change(args);
    EXPECT_THAT(SpecOf(args), StatusIs(kInvalid, HasSubstr(std::string(why)))) << why;
  };
  refused([](QuantizationArgs& args) { args.symmetric = false; }, "symmetric");
  refused([](QuantizationArgs& args) { args.num_bits = 6; }, "4 bits");
  refused([](QuantizationArgs& args) { args.dynamic = QuantizationArgs::Dynamic::kTrue; }, "dynamic");
  refused([](QuantizationArgs& args) { args.strategy = "token"; }, "unknown strategy");
  refused([](QuantizationArgs& args) { args.strategy = "block"; }, "block_structure");
  refused([](QuantizationArgs& args) { args.block_rows = args.block_columns = 128; }, "does not go with");
  refused(
      [](QuantizationArgs& args) {
        args.strategy = "block";
        args.block_rows = 128;
        args.block_columns = 64;
      },
      "as many rows");
  refused([](QuantizationArgs& args) { args.scale_dtype = "torch.uint8"; }, "scale_dtype");
  refused([](QuantizationArgs& args) { args.group_size = 16; }, "does not go with");
  refused([](QuantizationArgs& args) { args.observer = "nvfp4_expanded_mse"; }, "nvfp4_sweep");
  QuantizationArgs inputs = *InputArgs(quant::Activations::kFp8Token);
  inputs.symmetric = false;
  EXPECT_THAT(ActivationsOf(inputs), StatusIs(kInvalid, AllOf(HasSubstr("asymmetric"), HasSubstr("token"))));
  EXPECT_THAT(WeightArgs(*quant::ToModelOpt(*quant::PresetScheme("NVFP4A16"))), StatusIs(kInvalid));
}

TEST(QuantizationArgs, StaticSchemesHaveADataFreeOne) {
  EXPECT_TRUE(HasStaticActivations(*quant::PresetScheme("FP8")));
  EXPECT_EQ(DataFreePreset(*quant::PresetScheme("FP8")), "FP8_DYNAMIC");
  EXPECT_EQ(DataFreePreset(*quant::PresetScheme("NVFP4")), "NVFP4A16");
  for (const char* name : {"W4A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "MXFP4", "MXFP8"}) {
    EXPECT_FALSE(HasStaticActivations(*quant::PresetScheme(name))) << name;
  }
}

TEST(QuantizationArgs, ShortNames) {
  SchemeSpec spec = *quant::PresetScheme("W4A16_ASYM");
  spec.group_size = 32;
  EXPECT_EQ(ShortName(spec), "W4A16_ASYM g32");
  spec.strategy = quant::Strategy::kChannel;
  spec.group_size = 0;
  spec.observer = quant::Observer::kMse;
  EXPECT_EQ(ShortName(spec), "W4A16_ASYM channel memoryless_mse");
  EXPECT_EQ(ShortName(*quant::ToModelOpt(*quant::PresetScheme("FP8_DYNAMIC"))), "FP8_DYNAMIC");
  EXPECT_EQ(ShortName(*quant::PresetScheme("MXFP8")), "MXFP8");
}

}  // namespace
}  // namespace quern::daemon
