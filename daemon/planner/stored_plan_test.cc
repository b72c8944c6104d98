// Plans of checkpoints whose weights are not simply tensors of their own: stacks of experts, weights in a quantized format, sets with one
// scale, and the way back to plain weights.
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_matchers.h"
#include "checkpoint/checkpoint.h"
#include "daemon/planner/planner.h"
#include "daemon/planner/test_checkpoint.h"
#include "quern/v1/test_printer.h"

namespace quern::daemon {
namespace {

using quern::v1::QuantizeUnit;
using quern::v1::TensorFate;
using quern::v1::TensorView;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr char kInt4[] = "{scheme: W4A16, group_size: 32}";

Plan StoredPlanOf(const std::string& source, absl::string_view recipe) {
  absl::StatusOr<Plan> plan = MakePlan(QuantizeJob(source, recipe), false);
  EXPECT_THAT(plan, IsOk());
  return plan.ok() ? *std::move(plan) : Plan();
}

std::map<std::string, QuantizeUnit> Units(const Plan& plan) {
  std::map<std::string, QuantizeUnit> units;
  for (const auto& task : plan.tasks) {
    for (const auto& unit : task.write_shard().units()) {
      if (unit.has_quantize()) units[unit.quantize().module()] = unit.quantize();
    }
  }
  return units;
}

std::set<std::string> OutputNames(const Plan& plan) {
  std::set<std::string> names;
  const auto add = [&](const quern::v1::OutputTensor& output) { EXPECT_TRUE(names.insert(output.name()).second) << output.name(); };
  for (const auto& task : plan.tasks) {
    for (const auto& unit : task.write_shard().units()) {
      if (unit.has_copy()) add(unit.copy().output());
      for (const auto& output : unit.quantize().outputs()) add(output);
    }
  }
  return names;
}

std::map<std::string, TensorFate> Fates(const Plan& plan) {
  std::map<std::string, TensorFate> fates;
  for (const TensorFate& fate : TensorFates(plan)) EXPECT_TRUE(fates.emplace(fate.tensor(), fate).second) << fate.tensor();
  return fates;
}

// Where the elements of a tensor begin in its file.
uint64_t Begin(const std::string& source, const std::string& tensor) {
  const absl::StatusOr<checkpoint::Checkpoint> checkpoint = checkpoint::Checkpoint::Open(source);
  EXPECT_THAT(checkpoint, IsOk());
  const checkpoint::TensorLocation* location = checkpoint->Find(tensor);
  EXPECT_NE(location, nullptr) << tensor;
  return checkpoint->shards()[location->shard].header.data_start + location->info->begin;
}

uint64_t OffsetOf(const TensorView& view, uint64_t row, uint64_t col) {
  return view.offset() + row * static_cast<uint64_t>(view.row_stride()) + col * static_cast<uint64_t>(view.col_stride());
}

std::string MoeConfig(absl::string_view model_type, int hidden, int intermediate, int experts) {
  return absl::StrCat("{\"model_type\": \"", model_type, "\", \"hidden_size\": ", hidden, ", \"moe_intermediate_size\": ", intermediate,
                      ", \"num_experts\": ", experts, ", \"num_hidden_layers\": 2}");
}

// ---- Stacks of experts.

TEST(StoredPlan, StraightStackBecomesModules) {
  TestCheckpoint source("");
  source.set_config(MoeConfig("qwen3_5_moe", 64, 96, 3));
  const std::string prefix = "model.language_model.layers.0.mlp.experts";
  source.Add(prefix + ".gate_up_proj", {3, 192, 64});
  source.Add(prefix + ".down_proj", {3, 64, 96});
  source.Add("model.language_model.layers.0.mlp.gate.weight", {3, 64});
  source.Write();
  const Plan plan = StoredPlanOf(source.path(), "{scheme: W4A16, group_size: 32, targets: [routed_experts]}");
  const auto units = Units(plan);
  ASSERT_EQ(units.size(), 9u);
  const TensorView& up = units.at(prefix + ".2.up_proj").weight();
  const uint64_t begin = Begin(source.path(), prefix + ".gate_up_proj");
  EXPECT_EQ(up.rows(), 96u);
  EXPECT_EQ(up.cols(), 64u);
  for (uint64_t r : {0, 95}) {
    for (uint64_t c : {0, 63}) EXPECT_EQ(OffsetOf(up, r, c), begin + 2 * ((2 * 192 + 96 + r) * 64 + c));
  }
  EXPECT_EQ(units.at(prefix + ".1.down_proj").weight().rows(), 64u);
  EXPECT_EQ(plan.summary.quantized_tensors(), 9u);
  EXPECT_THAT(OutputNames(plan), Contains(prefix + ".2.up_proj.weight_packed"));
  EXPECT_THAT(OutputNames(plan), Not(Contains(prefix + ".gate_up_proj")));
  EXPECT_EQ(Fates(plan).at(prefix + ".gate_up_proj").fate(), TensorFate::QUANTIZED);
  EXPECT_THAT(plan.summary.quantization_config(), HasSubstr("experts\\\\.\\\\d+\\\\.("));
  EXPECT_THAT(Ignored(plan), ElementsAre("model.language_model.layers.0.mlp.gate"));
}

TEST(StoredPlan, TransposedAndInterleavedStacks) {
  TestCheckpoint source("");
  source.set_config(MoeConfig("qwen3_vl_moe", 64, 32, 2));
  const std::string prefix = "model.language_model.layers.0.mlp.experts";
  source.Add(prefix + ".gate_up_proj", {2, 64, 64});  // hidden_size is twice the intermediate size: the type decides
  source.Add(prefix + ".down_proj", {2, 32, 64});
  source.Write();
  const auto units = Units(StoredPlanOf(source.path(), kInt4));
  const TensorView& up = units.at(prefix + ".1.up_proj").weight();
  EXPECT_EQ(up.rows(), 32u);
  EXPECT_EQ(up.cols(), 64u);
  const uint64_t begin = Begin(source.path(), prefix + ".gate_up_proj");
  for (uint64_t r : {0, 31}) {
    for (uint64_t c : {0, 63}) EXPECT_EQ(OffsetOf(up, r, c), begin + 2 * ((64 + c) * 64 + 32 + r));
  }
  const TensorView& down = units.at(prefix + ".1.down_proj").weight();
  EXPECT_EQ(down.rows(), 64u);
  EXPECT_EQ(down.cols(), 32u);

  // The same sizes as transformers 5 saves them: the other tensor of the layer tells.
  TestCheckpoint saved("");
  saved.set_config(MoeConfig("qwen3_vl_moe", 64, 32, 2));
  saved.Add(prefix + ".gate_up_proj", {2, 64, 64});
  saved.Add(prefix + ".down_proj", {2, 64, 32});
  saved.Write();
  const TensorView straight = Units(StoredPlanOf(saved.path(), kInt4)).at(prefix + ".1.up_proj").weight();
  EXPECT_EQ(OffsetOf(straight, 3, 5), Begin(saved.path(), prefix + ".gate_up_proj") + 2 * ((64 + 32 + 3) * 64 + 5));

  TestCheckpoint oss("");
  oss.set_config("{\"model_type\": \"gpt_oss\", \"hidden_size\": 64, \"intermediate_size\": 64, \"num_local_experts\": 2}");
  oss.Add("model.layers.0.mlp.experts.gate_up_proj", {2, 64, 128});
  oss.Add("model.layers.0.mlp.experts.gate_up_proj_bias", {2, 128});
  oss.Add("model.layers.0.mlp.experts.down_proj", {2, 64, 64});
  oss.Add("model.layers.0.mlp.experts.down_proj_bias", {2, 64});
  oss.Write();
  const Plan plan = StoredPlanOf(oss.path(), kInt4);
  const TensorView gate = Units(plan).at("model.layers.0.mlp.experts.1.gate_proj").weight();
  const TensorView other = Units(plan).at("model.layers.0.mlp.experts.1.up_proj").weight();
  const uint64_t start = Begin(oss.path(), "model.layers.0.mlp.experts.gate_up_proj");
  for (uint64_t r : {0, 63}) {
    for (uint64_t c : {0, 63}) {
      EXPECT_EQ(OffsetOf(gate, r, c), start + 2 * ((64 + c) * 128 + 2 * r));
      EXPECT_EQ(OffsetOf(other, r, c), start + 2 * ((64 + c) * 128 + 2 * r + 1));
    }
  }
  EXPECT_EQ(Fates(plan).at("model.layers.0.mlp.experts.gate_up_proj_bias").fate(), TensorFate::COPIED);
  EXPECT_THAT(Warnings(plan), Contains(HasSubstr("vLLM 0.33")));
}

TEST(StoredPlan, NamesOfStacksMatchAndUntouchedStacksStay) {
  TestCheckpoint source("");
  source.set_config(MoeConfig("qwen3_moe", 64, 96, 2));
  for (int layer = 0; layer < 2; ++layer) {
    source.Add(absl::StrCat("model.layers.", layer, ".mlp.experts.gate_up_proj"), {2, 192, 64});
    source.Add(absl::StrCat("model.layers.", layer, ".mlp.experts.down_proj"), {2, 64, 96});
    source.Add(absl::StrCat("model.layers.", layer, ".self_attn.o_proj.weight"), {64, 64});
  }
  source.Write();
  const Plan plan = StoredPlanOf(
      source.path(),
      "{scheme: W4A16, group_size: 32, targets: [model.layers.1.mlp.experts.gate_up_proj, model.layers.1.mlp.experts.down_proj]}");
  EXPECT_EQ(Units(plan).size(), 6u);
  EXPECT_THAT(OutputNames(plan), Contains("model.layers.0.mlp.experts.gate_up_proj"));
  EXPECT_EQ(Fates(plan).at("model.layers.0.mlp.experts.gate_up_proj").reason(), "no target matches");
  // vLLM looks the first expert of a layer up.
  EXPECT_THAT(Ignored(plan), AllOf(Contains("model.layers.0.mlp.experts.0.gate_proj"), Contains("model.layers.0.mlp.experts.0.down_proj"),
                                   Not(Contains("model.layers.0.mlp.experts.1.gate_proj"))));
  EXPECT_THAT(plan.summary.quantization_config(), HasSubstr("layers\\\\.1\\\\.mlp"));
  EXPECT_THAT(MakePlan(QuantizeJob(source.path(), "{scheme: W4A16, group_size: 32, ignore: ['*.experts.1.*']}"), false),
              StatusIs(kInvalid, AllOf(HasSubstr("use as one"), HasSubstr("model.layers.0.mlp.experts.1.down_proj"))));
  EXPECT_THAT(MakePlan(QuantizeJob(source.path(), "{scheme: W4A16, group_size: 32, ignore: ['*.down_proj']}"), false),
              StatusIs(kInvalid, HasSubstr("use as one")));
}

TEST(StoredPlan, UnfusedAndOtherwiseNamedStacks) {
  TestCheckpoint step("");
  step.set_config("{\"model_type\": \"step3p5\", \"hidden_size\": 64, \"moe_intermediate_size\": 32, \"moe_num_experts\": 2}");
  step.Add("model.layers.3.moe.gate_proj.weight", {2, 32, 64});
  step.Add("model.layers.3.moe.up_proj.weight", {2, 32, 64});
  step.Add("model.layers.3.moe.down_proj.weight", {2, 64, 32});
  step.Add("model.layers.3.moe.gate.weight", {2, 64});
  step.Add("model.layers.3.moe.router_bias", {2});
  step.Write();
  EXPECT_EQ(Units(StoredPlanOf(step.path(), kInt4)).count("model.layers.3.moe.experts.1.up_proj"), 1u);

  TestCheckpoint granite("");
  granite.set_config("{\"model_type\": \"granitemoe\", \"hidden_size\": 64, \"intermediate_size\": 32, \"num_local_experts\": 2}");
  granite.Add("model.layers.3.block_sparse_moe.input_linear.weight", {2, 64, 64});
  granite.Add("model.layers.3.block_sparse_moe.output_linear.weight", {2, 64, 32});
  granite.Add("model.layers.3.block_sparse_moe.router.layer.weight", {2, 64});
  granite.Write();
  const auto units = Units(StoredPlanOf(granite.path(), kInt4));
  EXPECT_EQ(units.size(), 6u);
  EXPECT_EQ(units.count("model.layers.3.block_sparse_moe.experts.1.down_proj"), 1u);
}

TEST(StoredPlan, StacksThatDoNotFitTheConfigAreRefusedWhenTargeted) {
  TestCheckpoint source("");
  source.set_config(MoeConfig("qwen3_moe", 64, 48, 2));
  source.Add("model.layers.0.mlp.experts.gate_up_proj", {2, 192, 64});
  source.Add("model.layers.0.mlp.experts.down_proj", {2, 64, 96});
  source.Add("model.layers.0.self_attn.o_proj.weight", {64, 64});
  source.Write();
  EXPECT_THAT(MakePlan(QuantizeJob(source.path(), kInt4), false), IsOk());  // the role of a stack is no linear
  EXPECT_THAT(MakePlan(QuantizeJob(source.path(), "{scheme: W4A16, group_size: 32, targets: [routed_experts]}"), false),
              StatusIs(kInvalid, AllOf(HasSubstr("[experts, 96, 64] is expected"), HasSubstr("mlp.experts.gate_up_proj"))));
}

TEST(StoredPlan, StacksOfOneLayerHoldTheSameExperts) {
  TestCheckpoint source("");
  source.set_config(MoeConfig("qwen3_moe", 64, 96, 2));
  source.Add("model.layers.0.mlp.experts.gate_up_proj", {2, 192, 64});
  source.Add("model.layers.0.mlp.experts.down_proj", {3, 64, 96});
  source.Write();
  EXPECT_THAT(MakePlan(QuantizeJob(source.path(), "{scheme: W4A16, group_size: 32, targets: [routed_experts]}"), false),
              StatusIs(kInvalid, HasSubstr("holds 3 experts")));
}

// ---- Weights in a quantized format.

void AddFp8(TestCheckpoint& source, const std::string& module, uint64_t rows, uint64_t cols, const char* scale = "weight_scale_inv") {
  source.Add({module + ".weight", {rows, cols}, DType::kF8E4M3});
  source.Add({absl::StrCat(module, ".", scale), {(rows + 127) / 128, (cols + 127) / 128}, DType::kF32});
}

// Codes without what says what they mean would pass for weights.
TEST(StoredPlan, CodesWithoutAScaleAreRefusedWhetherTargetedOrNot) {
  for (const DType dtype : {DType::kF8E4M3, DType::kF8E5M2, DType::kI8, DType::kU8}) {
    TestCheckpoint source("");
    source.set_config("{\"model_type\": \"deepseek_v3\"}");
    AddFp8(source, "model.layers.0.mlp.down_proj", 128, 128);
    source.Add({"model.layers.0.mlp.up_proj.weight", {128, 128}, dtype});
    source.Add("model.layers.0.self_attn.o_proj.weight", {128, 128});
    source.Write();
    EXPECT_THAT(MakePlan(QuantizeJob(source.path(), "{scheme: FP8_DYNAMIC, targets: [attention]}"), false),
                StatusIs(kInvalid, HasSubstr("model.layers.0.mlp.up_proj")));
    EXPECT_THAT(MakePlan(DequantizeJob(source.path()), false), StatusIs(kInvalid, HasSubstr("model.layers.0.mlp.up_proj")));
  }
}

TEST(StoredPlan, StacksOfCodesThatCannotBeReadAreRefused) {
  TestCheckpoint source("");
  source.set_config("{\"model_type\": \"foo_moe\", \"hidden_size\": 64}");
  source.Add({"model.layers.0.mlp.experts.gate_up_proj_blocks", {2, 128, 2, 16}, DType::kU8});
  source.Add({"model.layers.0.mlp.experts.gate_up_proj_scales", {2, 128, 2}, DType::kU8});
  source.Add("model.layers.0.self_attn.o_proj.weight", {64, 64});
  source.Write();
  EXPECT_THAT(MakePlan(QuantizeJob(source.path(), "{scheme: FP8_DYNAMIC, targets: [attention]}"), false),
              StatusIs(kInvalid, HasSubstr("gate_up_proj_blocks")));
}

// Without the quantization_config that spoke of them they would pass for values.
TEST(StoredPlan, CodesUnderNamesThatNoRuleKnowsAreRefusedWhereTheSourceIsQuantized) {
  const struct {
    const char* model;
    const char* name;
    std::vector<uint64_t> shape;
    DType dtype;
  } kCases[] = {{"dbrx", "model.layers.0.ffn.experts.mlp.w1", {256, 128}, DType::kF8E4M3},
                {"dbrx", "model.layers.0.ffn.experts.mlp.w1", {256, 64}, DType::kU8},
                {"llama", "model.layers.0.mlp.proj.kernel", {128, 128}, DType::kF8E5M2},
                {"qwen3_moe", "model.layers.0.mlp.other.gate_up_proj", {4, 128, 128}, DType::kF8E4M3},
                {"llama", "model.layers.0.mlp.up_proj.weight", {128, 16}, DType::kI32},
                {"llama", "model.layers.0.mlp.up_proj.weight", {128, 128}, DType::kF4}};
  for (const auto& c : kCases) {
    for (const bool by_config : {true, false}) {
      TestCheckpoint source("");
      source.set_config(absl::StrCat("{\"model_type\": \"", c.model, "\", \"hidden_size\": 128",
                                     by_config ? ", \"quantization_config\": {\"quant_method\": \"fp8\"}" : "", "}"));
      if (!by_config) AddFp8(source, "model.layers.0.mlp.down_proj", 128, 128);
      source.Add("model.layers.0.self_attn.o_proj.weight", {128, 128});
      source.Add({c.name, c.shape, c.dtype});
      source.Write();
      EXPECT_THAT(MakePlan(QuantizeJob(source.path(), "{scheme: FP8_DYNAMIC, targets: [attention]}"), false),
                  StatusIs(kInvalid, HasSubstr(c.name)));
      EXPECT_THAT(MakePlan(DequantizeJob(source.path()), false), StatusIs(kInvalid, HasSubstr(c.name)));
    }
  }
}

TEST(StoredPlan, StacksOfCodesAreCalledThatTargetedOrNot) {
  TestCheckpoint source("mystery_moe");
  source.Add({"model.layers.0.mlp.experts.gate_up_proj", {4, 64, 64}, DType::kF8E4M3});
  source.Add("model.layers.0.self_attn.o_proj.weight", {64, 64});
  source.Write();
  for (const char* target : {"routed_experts", "attention"}) {
    EXPECT_THAT(
        MakePlan(QuantizeJob(source.path(), absl::StrCat("{scheme: FP8_DYNAMIC, targets: [", target, "]}")), false),
        StatusIs(kInvalid, AllOf(HasSubstr("in a quantized format that cannot be read (codes of several experts in one tensor of F8_E4M3"),
                                 Not(HasSubstr("cannot be cut")))))
        << target;
  }
}

TEST(StoredPlan, WhatDescribesAStackThatIsPlainIsDropped) {
  for (const char* suffix : {"scale", "scales", "weight_scale", "scale_inv"}) {
    TestCheckpoint source("");
    source.set_config("{\"model_type\": \"qwen3_moe\", \"hidden_size\": 64, \"moe_intermediate_size\": 32}");
    source.Add("model.layers.0.mlp.experts.gate_up_proj", {4, 64, 64});
    source.Add("model.layers.0.mlp.experts.down_proj", {4, 64, 32});
    const std::string stray = absl::StrCat("model.layers.0.mlp.experts.gate_up_proj_", suffix);
    source.Add({stray, {4, 1, 1}, DType::kF32});
    source.Add("model.layers.0.self_attn.o_proj.weight", {64, 64});
    source.Write();
    for (const char* targets : {"routed_experts", "attention"}) {
      const absl::StatusOr<Plan> plan =
          MakePlan(QuantizeJob(source.path(), absl::StrCat("{scheme: W4A16, group_size: 32, targets: [", targets, "]}")), false);
      QUERN_ASSERT_OK(plan.status());
      ASSERT_EQ(plan->summary.dropped_size(), 1) << suffix;
      EXPECT_THAT(Warnings(*plan), Contains(AllOf(HasSubstr("are dropped"), HasSubstr(stray))));
    }
  }
}

TEST(StoredPlan, WhatChangesTheMeaningOfWeightsIsRefused) {
  TestCheckpoint scaled("");
  scaled.set_config("{\"model_type\": \"llama\"}");
  AddFp8(scaled, "model.layers.0.mlp.up_proj", 128, 128);
  scaled.Add({"model.layers.0.mlp.up_proj.pre_quant_scale", {128}, DType::kBF16});
  scaled.Write();
  EXPECT_THAT(MakePlan(DequantizeJob(scaled.path()), false), StatusIs(kInvalid, HasSubstr("pre_quant_scale")));
  for (const char* member : {"\"transform_config\": {\"config_groups\": {\"u\": {}}}",
                             "\"sparsity_config\": {\"format\": \"sparse-24-bitmask\"}", "\"format\": \"marlin-24\""}) {
    TestCheckpoint source("");
    source.set_config(
        absl::StrCat("{\"model_type\": \"llama\", \"quantization_config\": {\"quant_method\": \"compressed-tensors\", ", member, "}}"));
    AddFp8(source, "model.layers.0.mlp.up_proj", 128, 128);
    source.Write();
    EXPECT_THAT(MakePlan(DequantizeJob(source.path()), false), StatusIs(kInvalid, HasSubstr("quantization_config"))) << member;
  }
}

// "FP8 weight + weight_scale_inv, once targeted, once ignored; config.json that already has quantization_config"
TEST(StoredPlanCases, Fp8BlocksTargetedAndIgnored) {
  TestCheckpoint source("");
  source.set_config(
      "{\"model_type\": \"deepseek_v3\", \"quantization_config\": {\"quant_method\": \"fp8\", \"weight_block_size\": [128, 128]}}");
  AddFp8(source, "model.layers.0.mlp.gate_proj", 192, 320);
  source.Add({"model.layers.0.mlp.up_proj.weight", {192, 320}, DType::kF8E4M3});
  AddFp8(source, "model.layers.0.mlp.down_proj", 320, 192);
  source.EndShard("one.safetensors");
  source.Add({"model.layers.0.mlp.up_proj.weight_scale_inv", {2, 3}, DType::kF32});  // in another shard
  AddFp8(source, "model.layers.0.self_attn.o_proj", 320, 128);
  source.Add("model.norm.weight", {320});
  source.Write();
  const Plan plan = StoredPlanOf(source.path(), "{scheme: W4A16, group_size: 32, targets: [mlp]}");
  const auto units = Units(plan);
  const TensorView& up = units.at("model.layers.0.mlp.up_proj").weight();
  EXPECT_EQ(up.decode_scheme(), "float8 block=128 symmetric observer=minmax numerics=reference scale=f32");
  EXPECT_EQ(up.dtype(), "BF16");
  EXPECT_EQ(up.rows(), 192u);
  EXPECT_EQ(up.cols(), 320u);
  ASSERT_EQ(up.decode_size(), 2);
  EXPECT_EQ(up.decode(0).role(), "weight");
  EXPECT_EQ(up.decode(0).view().cols(), 320u);
  EXPECT_EQ(up.decode(1).role(), "weight_scale");
  EXPECT_EQ(up.decode(1).view().tensor(), "model.layers.0.mlp.up_proj.weight_scale_inv");
  EXPECT_EQ(up.decode(1).view().rows(), 2u);
  EXPECT_EQ(up.decode(1).view().cols(), 12u);
  EXPECT_NE(up.decode(0).view().file(), up.decode(1).view().file());

  const QuantizeUnit& plain = units.at("model.layers.0.self_attn.o_proj");
  EXPECT_THAT(plain.scheme(), HasSubstr("plain16"));
  ASSERT_EQ(plain.outputs_size(), 1);
  EXPECT_EQ(plain.outputs(0).name(), "model.layers.0.self_attn.o_proj.weight");
  EXPECT_EQ(plain.outputs(0).dtype(), "BF16");
  EXPECT_EQ(plain.outputs(0).size(), 2u * 320 * 128);
  EXPECT_THAT(Ignored(plan), ElementsAre("model.layers.0.self_attn.o_proj"));
  EXPECT_EQ(plan.summary.quantized_tensors(), 3u);
  EXPECT_THAT(Warnings(plan), Contains(AllOf(HasSubstr("written as BF16"), HasSubstr("self_attn.o_proj"))));
  const auto fates = Fates(plan);
  EXPECT_EQ(fates.size(), 9u);
  EXPECT_EQ(fates.at("model.layers.0.mlp.up_proj.weight_scale_inv").fate(), TensorFate::DROPPED);
  EXPECT_THAT(fates.at("model.layers.0.mlp.up_proj.weight_scale_inv").reason(),
              HasSubstr("says how model.layers.0.mlp.up_proj was stored"));
  EXPECT_EQ(fates.at("model.layers.0.self_attn.o_proj.weight").fate(), TensorFate::COPIED);
  EXPECT_THAT(fates.at("model.layers.0.self_attn.o_proj.weight").reason(), HasSubstr("dequantized: no target matches"));
  EXPECT_THAT(OutputNames(plan), Each(Not(HasSubstr("_inv"))));
  // Weights and scales of three, and those of the plain one; the norm.
  EXPECT_EQ(plan.tasks[0].bytes_to_read(), 3u * (192 * 320 + 24) + (320 * 128 + 12) + 640);
}

TEST(StoredPlan, Fp8ScalesOfOtherForms) {
  TestCheckpoint source("llama");
  const auto add = [&](const std::string& name, std::vector<uint64_t> scale, DType dtype, const char* parameter = "weight_scale") {
    source.Add({absl::StrCat("model.layers.0.", name, ".weight"), {256, 128}, DType::kF8E4M3});
    source.Add({absl::StrCat("model.layers.0.", name, ".", parameter), std::move(scale), dtype});
  };
  add("a", {}, DType::kF32);
  add("b", {1}, DType::kBF16, "weight_scale_inv");
  add("c", {256, 1}, DType::kF32);
  add("d", {256}, DType::kF16);
  add("e", {2, 1}, DType::kF8E8M0, "scale");
  add("f", {256, 4}, DType::kU8);
  source.Add({"model.layers.0.a.input_scale", {}, DType::kF32});
  source.Write();
  const Plan plan = StoredPlanOf(source.path(), kInt4);
  const auto units = Units(plan);
  const auto scheme = [&](const char* name) {
    const TensorView& view = units.at(absl::StrCat("model.layers.0.", name)).weight();
    return absl::StrCat(view.decode_scheme().substr(0, view.decode_scheme().find(" symm")), " ",
                        view.decode_scheme().substr(view.decode_scheme().find("reference") + 9), " ", view.dtype());
  };
  EXPECT_EQ(scheme("a"), "float8 tensor  scale=f32 BF16");
  EXPECT_EQ(scheme("b"), "float8 tensor  scale=bf16 BF16");
  EXPECT_EQ(scheme("c"), "float8 channel  scale=f32 BF16");
  EXPECT_EQ(scheme("d"), "float8 channel  scale=f16 F16");
  EXPECT_EQ(scheme("e"), "float8 block=128  scale=e8m0 BF16");
  EXPECT_EQ(scheme("f"), "float8 group=32  scale=e8m0 BF16");
  EXPECT_EQ(Fates(plan).at("model.layers.0.a.input_scale").fate(), TensorFate::DROPPED);

  // Plain values are rounded once, from the product to what they are written as.
  for (const auto& [written, decoded] : {std::pair("BF16", "BF16"), std::pair("F16", "F32"), std::pair("F32", "F32")}) {
    QUERN_ASSERT_OK_AND_ASSIGN(const Plan plain, MakePlan(DequantizeJob(source.path(), written), false));
    for (const char* const name : {"a", "b", "c", "d", "e"}) {
      EXPECT_EQ(Units(plain).at(absl::StrCat("model.layers.0.", name)).weight().dtype(), decoded) << name << " " << written;
    }
  }
  const auto others = Units(StoredPlanOf(source.path(), "{scheme: W4A16, group_size: 32, targets: [model.layers.0.a]}"));
  EXPECT_EQ(others.at("model.layers.0.d").weight().dtype(), "BF16");
}

TEST(StoredPlan, ScalesUnderTwoNamesAreRefused) {
  TestCheckpoint source("llama");
  source.Add({"model.layers.0.a.weight", {256, 128}, DType::kF8E4M3});
  source.Add({"model.layers.0.a.weight_scale", {2, 1}, DType::kF32});
  source.Add({"model.layers.0.a.weight_scale_inv", {2, 1}, DType::kF32});
  source.Write();
  const auto both = AllOf(HasSubstr("model.layers.0.a.weight_scale_inv"), HasSubstr("model.layers.0.a.weight_scale"), HasSubstr("remove"));
  EXPECT_THAT(MakePlan(QuantizeJob(source.path(), kInt4), false), StatusIs(kInvalid, both));
  EXPECT_THAT(MakePlan(DequantizeJob(source.path()), false), StatusIs(kInvalid, both));
}

TEST(StoredPlan, Fp8OfModelOptDecodesByItsConvention) {
  TestCheckpoint source("");
  source.set_config("{\"model_type\": \"llama\", \"quantization_config\": {\"quant_method\": \"modelopt\", \"quant_algo\": \"FP8\"}}");
  source.Add({"model.layers.0.a.weight", {256, 128}, DType::kF8E4M3});
  source.Add({"model.layers.0.a.weight_scale", {}, DType::kF32});
  source.Add({"model.layers.0.b.weight", {256, 128}, DType::kF8E4M3});
  source.Add({"model.layers.0.b.weight_scale", {256}, DType::kF32});
  source.Write();
  const auto units = Units(StoredPlanOf(source.path(), kInt4));
  for (const char* const name : {"model.layers.0.a", "model.layers.0.b"}) {
    EXPECT_THAT(units.at(name).weight().decode_scheme(), testing::EndsWith("scale=f32 convention=modelopt")) << name;
    EXPECT_EQ(units.at(name).weight().dtype(), "BF16") << name;
    // Its scale is rounded to the dtype that is asked for.
    for (const char* const dtype : {"BF16", "F16", "F32"}) {
      QUERN_ASSERT_OK_AND_ASSIGN(const Plan plain, MakePlan(DequantizeJob(source.path(), dtype), false));
      EXPECT_EQ(Units(plain).at(name).weight().dtype(), dtype) << name;
    }
  }
}

TEST(StoredPlan, Fp8ThatSaysTooLittleIsRefused) {
  TestCheckpoint source("llama");
  source.Add({"model.layers.0.a.weight", {256, 128}, DType::kF8E4M3});
  source.Add({"model.layers.0.b.weight", {256, 128}, DType::kF8E4M3});
  source.Add({"model.layers.0.b.weight_scale_inv", {3, 1}, DType::kF32});
  source.Add("model.layers.0.c.weight", {64, 64});
  source.Write();
  EXPECT_THAT(MakePlan(QuantizeJob(source.path(), kInt4), false),
              StatusIs(kInvalid, AllOf(HasSubstr("without weight_scale"), HasSubstr("model.layers.0.b"), HasSubstr("[3, 1]"))));
}

// gpt-oss: gate and up alternate along the rows.
TEST(StoredPlan, Mxfp4BlocksOfStacks) {
  TestCheckpoint source("");
  source.set_config(
      "{\"model_type\": \"gpt_oss\", \"hidden_size\": 64, \"intermediate_size\": 96, \"num_local_experts\": 2, \"quantization_config\": "
      "{\"quant_method\": \"mxfp4\"}}");
  const std::string prefix = "model.layers.0.mlp.experts";
  source.Add({prefix + ".gate_up_proj_blocks", {2, 192, 2, 16}, DType::kU8});
  source.Add({prefix + ".gate_up_proj_scales", {2, 192, 2}, DType::kU8});
  source.Add(prefix + ".gate_up_proj_bias", {2, 192});
  source.Add({prefix + ".down_proj_blocks", {2, 64, 3, 16}, DType::kU8});
  source.Add({prefix + ".down_proj_scales", {2, 64, 3}, DType::kU8});
  source.Add("model.layers.0.self_attn.o_proj.weight", {64, 64});
  source.Write();
  const Plan plan = StoredPlanOf(source.path(), "{scheme: W4A16, group_size: 32}");
  const TensorView up = Units(plan).at(prefix + ".1.up_proj").weight();
  EXPECT_EQ(up.decode_scheme(), "float4 group=32 symmetric observer=minmax numerics=reference scale=e8m0");
  EXPECT_EQ(up.rows(), 96u);
  EXPECT_EQ(up.cols(), 64u);
  const TensorView& blocks = up.decode(0).view();
  const TensorView& scales = up.decode(1).view();
  const uint64_t begin = Begin(source.path(), prefix + ".gate_up_proj_blocks");
  EXPECT_EQ(blocks.rows(), 96u);
  EXPECT_EQ(blocks.cols(), 32u);
  EXPECT_EQ(OffsetOf(blocks, 5, 7), begin + (192 + 2 * 5 + 1) * 32 + 7);
  EXPECT_EQ(OffsetOf(scales, 5, 1), Begin(source.path(), prefix + ".gate_up_proj_scales") + (192 + 2 * 5 + 1) * 2 + 1);
  EXPECT_EQ(Fates(plan).at(prefix + ".gate_up_proj_scales").fate(), TensorFate::DROPPED);
  EXPECT_EQ(Fates(plan).at(prefix + ".gate_up_proj_blocks").fate(), TensorFate::QUANTIZED);

  // Left alone they would be read by a config that does not describe them.
  const Plan attention = StoredPlanOf(source.path(), "{scheme: W4A16, group_size: 32, targets: [attention]}");
  EXPECT_THAT(Units(attention).at(prefix + ".1.up_proj").scheme(), HasSubstr("plain16"));
  EXPECT_EQ(attention.summary.quantized_tensors(), 1u);

  QUERN_ASSERT_OK_AND_ASSIGN(const Plan plain, MakePlan(DequantizeJob(source.path()), true));
  EXPECT_EQ(Units(plain).size(), 6u);
  EXPECT_EQ(plain.summary.quantization_config(), "");
  EXPECT_EQ(Units(plain).at(prefix + ".1.up_proj").outputs(0).name(), prefix + ".gate_up_proj");
}

TEST(StoredPlan, DeepseekV4Experts) {
  TestCheckpoint source("deepseek_v4");
  source.Add({"layers.0.ffn.experts.0.w1.weight", {64, 32}, DType::kI8});
  source.Add({"layers.0.ffn.experts.0.w1.scale", {64, 2}, DType::kF8E8M0});
  source.Add({"layers.0.ffn.experts.0.w3.weight", {64, 32}, DType::kI8});
  source.Add({"layers.0.ffn.experts.0.w3.scale", {64, 2}, DType::kF8E8M0});
  source.Add({"layers.0.attn.wq_b.weight", {256, 128}, DType::kF8E4M3});
  source.Add({"layers.0.attn.wq_b.scale", {2, 1}, DType::kF8E8M0});
  source.Write();
  const auto units = Units(StoredPlanOf(source.path(), kInt4));
  EXPECT_EQ(units.at("layers.0.ffn.experts.0.w1").weight().cols(), 64u);
  EXPECT_THAT(units.at("layers.0.ffn.experts.0.w1").weight().decode_scheme(), HasSubstr("float4 group=32"));
  EXPECT_THAT(units.at("layers.0.attn.wq_b").weight().decode_scheme(), HasSubstr("float8 block=128"));
}

std::string PackedConfig(absl::string_view weights) {
  return absl::StrCat(
      "{\"model_type\": \"kimi_k2\", \"quantization_config\": {\"quant_method\": \"compressed-tensors\", \"config_groups\": {",
      "\"group_0\": {\"targets\": [\"Linear\"], \"weights\": ", weights, "}}, \"ignore\": []}}");
}

// The two numbers of a weight_shape.
std::string ShapeBytes(int64_t rows, int64_t cols) {
  std::string bytes;
  for (const int64_t side : {rows, cols}) bytes.append(reinterpret_cast<const char*>(&side), sizeof side);
  return bytes;
}

void AddPacked(TestCheckpoint& source, const std::string& module, uint64_t rows, uint64_t cols, bool zero_points) {
  source.Add({module + ".weight_packed", {rows, cols / 8}, DType::kI32});
  source.Add(module + ".weight_scale", {rows, cols / 32});
  source.Add({module + ".weight_shape", {2}, DType::kI64, ShapeBytes(static_cast<int64_t>(rows), static_cast<int64_t>(cols))});
  if (zero_points) source.Add({module + ".weight_zero_point", {rows / 8, cols / 32}, DType::kI32});
}

TEST(StoredPlan, PackedIntegersAreQuantizedAnewOnlyWhenAllowed) {
  TestCheckpoint source("");
  source.set_config(PackedConfig("{\"num_bits\": 4, \"type\": \"int\", \"strategy\": \"group\", \"group_size\": 32, \"symmetric\": true}"));
  for (const char* leaf : {"gate_proj", "up_proj", "down_proj"}) {
    AddPacked(source, absl::StrCat("model.layers.0.mlp.experts.0.", leaf), 64, 64, false);
  }
  source.Add("model.layers.0.self_attn.o_proj.weight", {64, 64});
  source.Write();
  quern::v1::JobSpec job = QuantizeJob(source.path(), "{scheme: W8A16, group_size: 32, targets: [routed_experts]}");
  EXPECT_THAT(MakePlan(job, false), StatusIs(kInvalid, AllOf(HasSubstr("--allow-requantize"), HasSubstr("experts.0.up_proj"))));
  job.mutable_quantize()->set_allow_requantize(true);
  QUERN_ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(job, false));
  const TensorView view = Units(plan).at("model.layers.0.mlp.experts.0.up_proj").weight();
  EXPECT_EQ(view.decode_scheme(), "int4 group=32 symmetric observer=minmax numerics=reference");
  ASSERT_EQ(view.decode_size(), 2);
  EXPECT_EQ(view.decode(0).view().cols(), 32u);
  EXPECT_EQ(view.decode(1).view().cols(), 4u);
  EXPECT_EQ(Fates(plan).at("model.layers.0.mlp.experts.0.up_proj.weight_shape").fate(), TensorFate::DROPPED);

  // Ignored, they become plain without being asked for.
  const Plan attention = StoredPlanOf(source.path(), "{scheme: W8A16, group_size: 32, targets: [attention]}");
  EXPECT_THAT(Units(attention).at("model.layers.0.mlp.experts.0.up_proj").scheme(), HasSubstr("plain16"));
}

TEST(StoredPlan, DequantizePackedIntegers) {
  TestCheckpoint source("");
  source.set_config(
      PackedConfig("{\"num_bits\": 4, \"type\": \"int\", \"strategy\": \"group\", \"group_size\": 32, \"symmetric\": false}"));
  AddPacked(source, "model.layers.0.mlp.up_proj", 64, 64, true);
  source.Add("model.layers.0.mlp.up_proj.bias", {64});
  source.Add("model.norm.weight", {64});
  source.Write();
  QUERN_ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(DequantizeJob(source.path(), "F32"), true));
  EXPECT_THAT(OutputNames(plan), ElementsAre("model.layers.0.mlp.up_proj.bias", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"));
  const QuantizeUnit unit = Units(plan).at("model.layers.0.mlp.up_proj");
  EXPECT_THAT(unit.scheme(), HasSubstr("plain32"));
  EXPECT_EQ(unit.outputs(0).dtype(), "F32");
  EXPECT_EQ(unit.weight().decode_size(), 3);
  EXPECT_EQ(plan.summary.quantization_config(), "");
  EXPECT_EQ(plan.summary.quantized_tensors(), 0u);
  EXPECT_GT(plan.summary.minimum_memory(), 0u);
  EXPECT_GT(plan.tasks[0].bytes_to_read(), 0u);

  QUERN_ASSERT_OK_AND_ASSIGN(const quern::v1::PlanSummary identity, MakeIdentity(DequantizeJob(source.path(), "F32")));
  EXPECT_EQ(identity.identity(), plan.summary.identity());
  QUERN_ASSERT_OK_AND_ASSIGN(const quern::v1::PlanSummary other, MakeIdentity(DequantizeJob(source.path())));
  EXPECT_NE(IdentityDifference(plan.summary, other), "");
  EXPECT_THAT(MakePlan(DequantizeJob(source.path(), "I8"), false), StatusIs(kInvalid, HasSubstr("BF16, F16 or F32")));
}

TEST(StoredPlan, WeightShapeMustBeThatOfTheOtherTensors) {
  for (const std::string& said : {ShapeBytes(64, 60), ShapeBytes(63, 64), ShapeBytes(0, 0), ShapeBytes(64, -64)}) {
    TestCheckpoint source("");
    source.set_config(
        PackedConfig("{\"num_bits\": 4, \"type\": \"int\", \"strategy\": \"group\", \"group_size\": 32, \"symmetric\": true}"));
    source.Add({"model.layers.0.mlp.up_proj.weight_packed", {64, 8}, DType::kI32});
    source.Add("model.layers.0.mlp.up_proj.weight_scale", {64, 2});
    source.Add({"model.layers.0.mlp.up_proj.weight_shape", {2}, DType::kI64, said});
    source.Write();
    EXPECT_THAT(MakePlan(DequantizeJob(source.path()), false),
                StatusIs(kInvalid, HasSubstr(said == ShapeBytes(64, -64) ? "weight_shape says [64, -64]" : "weight_shape says [")));
  }
}

TEST(StoredPlan, MissingGlobalScaleIsNamed) {
  for (const bool modelopt : {false, true}) {
    TestCheckpoint source("llama");
    source.Add({absl::StrCat("model.layers.0.mlp.up_proj.", modelopt ? "weight" : "weight_packed"), {64, 32}, DType::kU8});
    source.Add({"model.layers.0.mlp.up_proj.weight_scale", {64, 4}, DType::kF8E4M3});
    source.Write();
    EXPECT_THAT(MakePlan(DequantizeJob(source.path()), false),
                StatusIs(kInvalid, HasSubstr(modelopt ? "without its weight_scale_2" : "without its weight_global_scale")));
  }
}

// Engines would apply such scales to other rows than the ones that they were made for.
TEST(StoredPlan, BlocksOfAnotherSizeThanTheTensorsAreRefused) {
  const std::string group =
      "\"config_groups\": {\"g\": {\"targets\": [\"Linear\"], \"weights\": {\"num_bits\": 8, \"type\": \"float\", "
      "\"strategy\": \"block\", \"block_structure\": [64, 128]}}}";
  for (const std::string& config : {std::string("\"quant_method\": \"fp8\", \"weight_block_size\": [64, 128]"),
                                    absl::StrCat("\"quant_method\": \"compressed-tensors\", ", group)}) {
    TestCheckpoint source("");
    source.set_config(absl::StrCat("{\"model_type\": \"llama\", \"quantization_config\": {", config, "}}"));
    AddFp8(source, "model.layers.0.mlp.up_proj", 256, 256, "weight_scale");
    source.Write();
    EXPECT_THAT(MakePlan(DequantizeJob(source.path()), false), StatusIs(kInvalid, HasSubstr("FP8 blocks of 64 x 128"))) << config;
  }
}

TEST(StoredPlan, ConfigUnderItsOldNameIsRead) {
  TestCheckpoint source("");
  source.set_config(
      "{\"model_type\": \"llama\", \"compression_config\": {\"config_groups\": {\"g\": {\"targets\": [\"Linear\"], \"weights\": "
      "{\"num_bits\": 4, \"type\": \"int\", \"strategy\": \"group\", \"group_size\": 32, \"symmetric\": true}}}}}");
  AddPacked(source, "model.layers.0.mlp.up_proj", 64, 64, false);
  source.Write();
  QUERN_ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(DequantizeJob(source.path()), false));
  EXPECT_THAT(Units(plan).at("model.layers.0.mlp.up_proj").weight().decode_scheme(), HasSubstr("int4 group=32"));
}

// What a member is taken for decides how every weight is read.
TEST(StoredPlan, MembersOfTheConfigAreNotConverted) {
  const auto problem = [](const std::string& config) {
    TestCheckpoint source("");
    source.set_config(config);
    AddPacked(source, "model.layers.0.mlp.up_proj", 64, 64, false);
    source.Write();
    return MakePlan(DequantizeJob(source.path()), false).status();
  };
  const auto args = [](absl::string_view members) { return absl::StrCat("{\"type\": \"int\", \"strategy\": \"group\", ", members, "}"); };
  const std::string place = "config.json: quantization_config: config_groups: \"group_0\": weights: ";
  QUERN_EXPECT_OK(problem(PackedConfig(args("\"num_bits\": 4, \"group_size\": 32"))));
  QUERN_EXPECT_OK(
      problem(PackedConfig("{\"num_bits\": 4, \"type\": \"INT\", \"strategy\": \"Group\", \"group_size\": 32, \"symmetric\": null}")));
  for (const auto& [value, found] :
       std::map<std::string, std::string>{{"4.9", "4.9"},
                                          {"4.0", "4.0"},
                                          {"4294967300", "4294967300"},
                                          {"18446744073709551620", "1.8446744073709552e+19"},
                                          {"18446744073709551612", "18446744073709551612"},
                                          {"1" + std::string(30, '0'), "1e+30"},
                                          {"true", "true"},
                                          {"null", "null"},
                                          {"\"4\"", "\"4\""},
                                          {"-4", "-4"},
                                          {"0", "0"},
                                          {"9", "9"},
                                          {"[4]", "[4]"},
                                          {"\"" + std::string(100, '4') + "\"", std::string(59, '4') + "..."}}) {
    EXPECT_THAT(problem(PackedConfig(args(absl::StrCat("\"num_bits\": ", value, ", \"group_size\": 32")))),
                StatusIs(kInvalid, AllOf(HasSubstr(absl::StrCat(place, "num_bits is ")),
                                         HasSubstr(absl::StrCat(found, "; it must be an integer from 2 to 8")))))
        << value;
  }
  EXPECT_THAT(problem(PackedConfig(args("\"group_size\": 32"))), StatusIs(kInvalid, HasSubstr(place + "num_bits is missing")));
  EXPECT_THAT(problem(PackedConfig(args("\"num_bits\": 4"))), StatusIs(kInvalid, HasSubstr(place + "group_size is missing")));
  for (const char* value : {"32.7", "-32", "\"32\"", "true", "4294967328", "0", "-1", "{}"}) {
    EXPECT_THAT(problem(PackedConfig(args(absl::StrCat("\"num_bits\": 4, \"group_size\": ", value)))),
                StatusIs(kInvalid, AllOf(HasSubstr(absl::StrCat(place, "group_size is ", value, "; it must be an integer from")))));
  }
  // Without a strategy it would be one scale for all.
  EXPECT_THAT(problem(PackedConfig("{\"num_bits\": 4, \"group_size\": 0}")), StatusIs(kInvalid, HasSubstr("group_size is 0;")));
  for (const auto& [member, why] : std::map<std::string, std::string>{
           {"\"symmetric\": \"false\"", "symmetric is \"false\"; it must be true or false"},
           {"\"symmetric\": 0", "symmetric is 0; it must be true or false"},
           {"\"type\": 3", "type is 3; it must be a text"},
           {"\"strategy\": 1", "strategy is 1; it must be a text"},
           {"\"strategy\": \"block\"", "strategy is \"block\"; it must be group, channel or tensor"},
           {"\"block_structure\": [128.5, 128]", "block_structure is [128.5,128]; it must be two integers"}}) {
    EXPECT_THAT(problem(PackedConfig(absl::StrCat("{\"num_bits\": 4, \"group_size\": 32, ", member, "}"))),
                StatusIs(kInvalid, HasSubstr(absl::StrCat(place, why))));
  }
  const std::string root = "config.json: quantization_config";
  const std::string weights = "{\"num_bits\": 4, \"group_size\": 32}";
  for (const auto& [members, why] : std::map<std::string, std::string>{
           {"[]", " is []; it must be an object"},
           {"{\"quant_method\": 1}", ": quant_method is 1; it must be a text"},
           {"{\"quant_method\": \"compressed-tensors\", \"format\": [1]}", ": format is [1]; it must be a text"},
           {"{\"sparsity_config\": {\"format\": 7}}", ": sparsity_config: format is 7; it must be a text"},
           {"{\"transform_config\": [1]}", ": transform_config is [1]; it must be an object"},
           {"{\"weight_block_size\": [128, \"128\"]}", ": weight_block_size is [128,\"128\"]; it must be two integers"},
           {"{\"weight_block_size\": [128]}", ": weight_block_size is [128]; it must be two integers"},
           {"{\"weight_block_size\": [128, 0]}", ": weight_block_size is [128,0]; it must be two integers"},
           {"{\"weight_block_size\": 128}", ": weight_block_size is 128; it must be two integers"},
           {"{\"config_groups\": [1]}", ": config_groups is [1]; it must be an object"},
           {"{\"config_groups\": {\"a\\u0001\": 1}}", ": config_groups: \"a\\u0001\" is 1; it must be an object"},
           {"{\"config_groups\": {\"g\": {\"weights\": 4}}}", ": config_groups: \"g\": weights is 4; it must be an object"},
           {absl::StrCat("{\"config_groups\": {\"g\": {\"targets\": \"Linear\", \"weights\": ", weights, "}}}"),
            ": config_groups: \"g\": targets is \"Linear\"; it must be a list"},
           {absl::StrCat("{\"config_groups\": {\"g\": {\"targets\": [5], \"weights\": ", weights, "}}}"),
            ": config_groups: \"g\": targets: 5 is no text"},
           {absl::StrCat("{\"quant_method\": \"compressed-tensors\", \"config_groups\": {\"g\": {\"format\": \"marlin-24\", \"weights\": ",
                         weights, "}}}"),
            ": config_groups: \"g\": the format \"marlin-24\" cannot be read"}}) {
    EXPECT_THAT(problem(absl::StrCat("{\"model_type\": \"llama\", \"quantization_config\": ", members, "}")),
                StatusIs(kInvalid, HasSubstr(root + why)));
  }
}

// What Python writes and JSON does not know must not hide the rest.
TEST(StoredPlan, InfinityInTheConfigHidesNothing) {
  const auto plan = [](absl::string_view member) {
    TestCheckpoint source("");
    source.set_config(absl::StrCat("{\"model_type\": \"llama\", \"quantization_config\": {\"a \\\" NaN\": [-Infinity, NaN], ", member,
                                   ", \"bound\": Infinity}}"));
    AddPacked(source, "model.layers.0.mlp.up_proj", 64, 64, false);
    source.Write();
    return MakePlan(DequantizeJob(source.path()), false).status();
  };
  const std::string groups = "\"config_groups\": {\"g\": {\"weights\": {\"num_bits\": 4, \"group_size\": 32}}}";
  QUERN_EXPECT_OK(plan(groups));
  EXPECT_THAT(plan(absl::StrCat(groups, ", \"transform_config\": {\"u\": {}}")), StatusIs(kInvalid, HasSubstr("transform_config changes")));
  EXPECT_THAT(plan(absl::StrCat(groups, ", \"x\": 1e999")), StatusIs(kInvalid, HasSubstr("1e999")));
}

TEST(StoredPlan, BlocksAsEarlyVersionsWroteThem) {
  for (const auto& [block, why] : std::map<std::string, std::string>{{"64x128", "FP8 blocks of 64 x 128"},
                                                                     {"128x128x1", "must be two integers"},
                                                                     {"128.5x128", "must be two integers"},
                                                                     {"128x", "must be two integers"}}) {
    TestCheckpoint source("");
    source.set_config(PackedConfig(absl::StrCat("{\"num_bits\": 8, \"type\": \"float\", \"block_structure\": \"", block, "\"}")));
    AddFp8(source, "model.layers.0.mlp.up_proj", 256, 256, "weight_scale");
    source.Write();
    EXPECT_THAT(MakePlan(DequantizeJob(source.path()), false), StatusIs(kInvalid, HasSubstr(why))) << block;
  }
}

// What compressed-tensors does with other shapes is an error or, where they happen to fit, another weight.
TEST(StoredPlan, ScalesHaveTheShapeOfTheirReader) {
  using Shape = std::vector<uint64_t>;
  const auto problem = [](absl::string_view method, absl::string_view args, const TestTensor& weight, DType dtype, const Shape& scale) {
    TestCheckpoint source("");
    source.set_config(absl::StrCat("{\"model_type\": \"llama\", \"quantization_config\": {\"quant_method\": \"", method,
                                   "\", \"config_groups\": {\"g\": {\"targets\": [\"Linear\"], \"weights\": {", args, "}}}}}"));
    source.Add(weight);
    source.Add({"model.layers.0.mlp.up_proj.weight_scale", scale, dtype});
    if (absl::EndsWith(weight.name, "packed")) {
      source.Add({"model.layers.0.mlp.up_proj.weight_shape", {2}, DType::kI64, ShapeBytes(64, 128)});
    }
    source.Write();
    return MakePlan(DequantizeJob(source.path()), false).status();
  };
  const TestTensor bytes{"model.layers.0.mlp.up_proj.weight", {64, 128}, DType::kI8};
  const TestTensor packed{"model.layers.0.mlp.up_proj.weight_packed", {64, 16}, DType::kI32};
  const TestTensor fp8{"model.layers.0.mlp.up_proj.weight", {64, 128}, DType::kF8E4M3};
  const TestTensor mx{"model.layers.0.mlp.up_proj.weight_packed", {64, 64}, DType::kU8};
  const char ct[] = "compressed-tensors";
  struct Case {
    const char* method;
    const char* args;
    const TestTensor& weight;
    DType dtype;
    std::vector<Shape> good, bad;
  };
  const std::vector<Shape> one = {{}, {1}, {1, 1}};
  for (const Case& c : {
           Case{ct, "\"num_bits\": 8, \"strategy\": \"channel\"", bytes, DType::kBF16, {{64, 1}}, {{64}, {1, 64}, {64, 1, 1}}},
           Case{ct, "\"num_bits\": 8, \"strategy\": \"group\", \"group_size\": 32", bytes, DType::kBF16, {{64, 4}}, {{4, 64}, {256}}},
           Case{ct, "\"num_bits\": 8, \"strategy\": \"tensor\"", bytes, DType::kBF16, one, {}},
           Case{ct, "\"num_bits\": 4, \"strategy\": \"channel\"", packed, DType::kBF16, {{64, 1}}, {{64}, {1, 64}}},
           Case{ct, "\"num_bits\": 8, \"type\": \"float\"", fp8, DType::kBF16, {{64, 1}, {}, {1}, {1, 1}}, {{64}, {1, 64}}},
           Case{"modelopt", "\"num_bits\": 8, \"type\": \"float\"", fp8, DType::kF32, {{64}, {64, 1}, {}, {1}}, {{1, 64}}},
           Case{"fp8", "\"num_bits\": 8, \"type\": \"float\"", fp8, DType::kBF16, {{64}, {64, 1}, {}, {1}}, {{1, 64}}},
           Case{ct, "\"num_bits\": 4, \"type\": \"float\"", mx, DType::kU8, {{64, 4}}, {{4, 64}, {256}}},
       }) {
    for (const Shape& shape : c.good) QUERN_EXPECT_OK(problem(c.method, c.args, c.weight, c.dtype, shape));
    for (const Shape& shape : c.bad) {
      EXPECT_THAT(problem(c.method, c.args, c.weight, c.dtype, shape),
                  StatusIs(kInvalid, HasSubstr(absl::StrCat("[", absl::StrJoin(shape, ", "), "]"))))
          << c.method << " " << c.args;
    }
  }
}

TEST(StoredPlan, NothingToDequantizeIsSaid) {
  TestCheckpoint source("llama");
  source.AddDenseLayer(0, 64, 128);
  source.Write();
  EXPECT_THAT(MakePlan(DequantizeJob(source.path()), false), StatusIs(kInvalid, HasSubstr("nothing to dequantize")));
}

TEST(StoredPlan, FormatsOfFourBitsAreRecognised) {
  TestCheckpoint source("llama");
  const auto add = [&](const char* name, const char* packed, DType scale, uint64_t groups, const char* global) {
    const std::string module = absl::StrCat("model.layers.0.", name, ".");
    source.Add({module + packed, {64, 32}, DType::kU8});
    source.Add({module + "weight_scale", {64, groups}, scale});
    if (global != nullptr) source.Add({module + global, {}, DType::kF32});
  };
  add("nvfp4", "weight_packed", DType::kF8E4M3, 4, "weight_global_scale");
  source.Add({"model.layers.0.nvfp4.input_global_scale", {1}, DType::kF32});
  add("modelopt", "weight", DType::kF8E4M3, 4, "weight_scale_2");
  add("mxfp4", "weight_packed", DType::kU8, 2, nullptr);
  source.Write();
  QUERN_ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(DequantizeJob(source.path()), false));
  const auto units = Units(plan);
  const auto decode = [&](const char* name) { return units.at(absl::StrCat("model.layers.0.", name)).weight().decode_scheme(); };
  EXPECT_EQ(decode("nvfp4"), "float4 tensor_group=16 symmetric observer=minmax numerics=reference scale=e4m3");
  EXPECT_EQ(decode("modelopt"), "float4 tensor_group=16 symmetric observer=minmax numerics=reference scale=e4m3 convention=modelopt");
  EXPECT_EQ(decode("mxfp4"), "float4 group=32 symmetric observer=minmax numerics=reference scale=e8m0");
  EXPECT_EQ(units.at("model.layers.0.nvfp4").weight().decode(2).view().cols(), 4u);
}

TEST(StoredPlan, ForeignFormatsAreRefused) {
  TestCheckpoint source("llama");
  source.Add({"model.layers.0.mlp.up_proj.qweight", {8, 64}, DType::kI32});
  source.Add({"model.layers.0.mlp.up_proj.qzeros", {2, 8}, DType::kI32});
  source.Add({"model.layers.0.mlp.up_proj.scales", {2, 64}, DType::kF16});
  source.Add("model.layers.0.self_attn.o_proj.weight", {64, 64});
  source.Write();
  EXPECT_THAT(MakePlan(QuantizeJob(source.path(), kInt4), false), StatusIs(kInvalid, HasSubstr("GPTQ, AWQ")));
  EXPECT_THAT(MakePlan(DequantizeJob(source.path()), false), StatusIs(kInvalid, HasSubstr("GPTQ, AWQ")));
}

// ---- Sets with one scale.

// "q amax 1 in shard 1, k amax 10 in shard 2; v_proj absent"
TEST(StoredPlanCases, OneScaleOverASetWhateverTheShard) {
  TestCheckpoint source("laguna");
  source.Add("model.layers.0.self_attn.q_proj.weight", {64, 64});
  source.Add("model.layers.0.mlp.experts.0.gate_proj.weight", {32, 64});
  source.Add("model.layers.0.mlp.experts.0.down_proj.weight", {64, 32});
  source.EndShard("one.safetensors");
  source.Add("model.layers.0.self_attn.k_proj.weight", {32, 64});
  source.Add("model.layers.0.mlp.experts.0.up_proj.weight", {32, 64});
  source.Write();
  const Plan plan = StoredPlanOf(source.path(), "{scheme: NVFP4A16}");
  const auto units = Units(plan);
  const QuantizeUnit& k = units.at("model.layers.0.self_attn.k_proj");
  ASSERT_EQ(k.statistics_set_size(), 2);
  EXPECT_EQ(k.statistics_key(), units.at("model.layers.0.self_attn.q_proj").statistics_key());
  std::set<std::string> members;
  for (const TensorView& view : k.statistics_set()) members.insert(view.tensor());
  EXPECT_THAT(members, ElementsAre("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.q_proj.weight"));
  EXPECT_EQ(units.at("model.layers.0.mlp.experts.0.gate_proj").statistics_set_size(), 2);
  EXPECT_EQ(units.at("model.layers.0.mlp.experts.0.down_proj").statistics_set_size(), 1);
  EXPECT_NE(units.at("model.layers.0.mlp.experts.0.down_proj").statistics_key(),
            units.at("model.layers.0.mlp.experts.0.gate_proj").statistics_key());
  // Everything twice.
  EXPECT_EQ(plan.tasks[0].bytes_to_read(), 2u * 2 * (64 * 64 + 32 * 64 + 2 * 32 * 64 + 64 * 32));
  EXPECT_THAT(Units(StoredPlanOf(source.path(), "{scheme: MXFP4A16}")).at("model.layers.0.self_attn.k_proj").statistics_set(), IsEmpty());
}

}  // namespace
}  // namespace quern::daemon
