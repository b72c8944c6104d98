// Plans back to plain weights of families whose experts loaders know as stacks only.
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/dtype.h"
#include "base/status_matchers.h"
#include "checkpoint/checkpoint.h"
#include "daemon/planner/planner.h"
#include "daemon/planner/test_checkpoint.h"
#include "quern/v1/test_printer.h"

namespace quern::daemon {
namespace {

using quern::v1::OutputTensor;
using quern::v1::QuantizeUnit;
using quern::v1::StackPlace;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr uint64_t kExperts = 11;  // so that the order of numbers is not that of their text

// FP8 with one scale a row.
void AddCodes(TestCheckpoint& source, const std::string& module, uint64_t rows, uint64_t cols) {
  source.Add({module + ".weight", {rows, cols}, DType::kF8E4M3});
  source.Add({module + ".weight_scale", {rows, 1}, DType::kF32});
}

void AddExperts(TestCheckpoint& source, const std::string& experts, uint64_t hidden, uint64_t inner, uint64_t count = kExperts) {
  for (uint64_t e = 0; e < count; ++e) {
    AddCodes(source, absl::StrCat(experts, ".", e, ".down_proj"), hidden, inner);
    AddCodes(source, absl::StrCat(experts, ".", e, ".gate_proj"), inner, hidden);
    AddCodes(source, absl::StrCat(experts, ".", e, ".up_proj"), inner, hidden);
  }
}

// The units of a plan by the tensor that they write, in its order.
std::map<std::string, std::vector<QuantizeUnit>> UnitsOfOutputs(const Plan& plan) {
  std::map<std::string, std::vector<QuantizeUnit>> units;
  for (const auto& task : plan.tasks) {
    for (const auto& unit : task.write_shard().units()) {
      if (unit.has_quantize()) units[unit.quantize().outputs(0).name()].push_back(unit.quantize());
    }
  }
  return units;
}

// Byte of element (row, col) in the stack.
int64_t At(const QuantizeUnit& unit, int64_t row, int64_t col) {
  const StackPlace& place = unit.place();
  return static_cast<int64_t>(place.offset()) + row * place.row_stride() + col * place.col_stride();
}

std::vector<uint64_t> Shape(const QuantizeUnit& unit) { return {unit.outputs(0).shape().begin(), unit.outputs(0).shape().end()}; }

TEST(StackExperts, HalvesTurnedOver) {
  TestCheckpoint source("llama4_text");
  const std::string experts = "model.layers.1.feed_forward.experts";
  AddExperts(source, experts, 64, 48);
  AddCodes(source, "model.layers.1.feed_forward.shared_expert.up_proj", 48, 64);
  source.Add("model.layers.1.feed_forward.router.weight", {kExperts, 64});
  source.Write();
  QUERN_ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(DequantizeJob(source.path()), true));
  auto units = UnitsOfOutputs(plan);
  EXPECT_EQ(units.size(), 3u);
  EXPECT_FALSE(units.at("model.layers.1.feed_forward.shared_expert.up_proj.weight")[0].has_place());
  const std::vector<QuantizeUnit>& gate_up = units.at(experts + ".gate_up_proj");
  ASSERT_EQ(gate_up.size(), 2 * kExperts);
  for (uint64_t i = 0; i < gate_up.size(); ++i) {
    EXPECT_EQ(gate_up[i].module(), absl::StrCat(experts, ".", i / 2, i % 2 == 0 ? ".gate_proj" : ".up_proj"));
    EXPECT_THAT(Shape(gate_up[i]), ElementsAre(kExperts, 64, 96));
    EXPECT_EQ(gate_up[i].outputs(0).offset(), gate_up[0].outputs(0).offset());
    EXPECT_EQ(gate_up[i].outputs(0).size(), kExperts * 64 * 96 * 2);
    EXPECT_EQ(At(gate_up[i], 5, 7), static_cast<int64_t>(2 * ((i / 2 * 64 + 7) * 96 + i % 2 * 48 + 5)));
    EXPECT_EQ(gate_up[i].weight().rows(), 48u);
    EXPECT_THAT(gate_up[i].weight().decode_scheme(), HasSubstr("float8"));
  }
  const std::vector<QuantizeUnit>& down = units.at(experts + ".down_proj");
  ASSERT_EQ(down.size(), kExperts);
  EXPECT_THAT(Shape(down[0]), ElementsAre(kExperts, 48, 64));
  EXPECT_EQ(At(down[10], 5, 7), 2 * ((10 * 48 + 7) * 64 + 5));
  EXPECT_THAT(plan.summary.warnings(), IsEmpty());

  // Each tensor stands once in the file, and the file has no holes.
  const auto& work = plan.tasks[0].write_shard();
  std::map<uint64_t, uint64_t> ends;
  for (const auto& unit : work.units()) {
    const OutputTensor& output = unit.has_copy() ? unit.copy().output() : unit.quantize().outputs(0);
    ends[output.offset()] = output.offset() + output.size();
  }
  uint64_t end = work.header().size();
  for (const auto& [begin, stop] : ends) {
    EXPECT_EQ(begin, end);
    end = stop;
  }
  EXPECT_EQ(end, work.file_size());
  EXPECT_EQ(plan.summary.shards(0).tensors(), ends.size());
  EXPECT_EQ(plan.summary.shards(0).size(), work.file_size());
}

TEST(StackExperts, FamiliesHaveTheirOwnOrder) {
  struct Case {
    const char* model_type;
    const char* experts;
    const char* gate_up;
    const char* down;
    std::vector<uint64_t> shape;
    uint64_t up_at;  // element [5, 7] of the second expert's up_proj
  };
  const Case cases[] = {
      {"gpt_oss", "mlp.experts", "mlp.experts.gate_up_proj", "mlp.experts.down_proj", {kExperts, 64, 96}, (64 + 7) * 96 + 2 * 5 + 1},
      {"qwen3_vl_moe_text", "mlp.experts", "mlp.experts.gate_up_proj", "mlp.experts.down_proj", {kExperts, 64, 96}, (64 + 7) * 96 + 48 + 5},
      {"gemma4_text", "experts", "experts.gate_up_proj", "experts.down_proj", {kExperts, 96, 64}, (96 + 48 + 5) * 64 + 7},
      {"granitemoe",
       "block_sparse_moe.experts",
       "block_sparse_moe.input_linear.weight",
       "block_sparse_moe.output_linear.weight",
       {kExperts, 96, 64},
       (96 + 48 + 5) * 64 + 7},
      {"step3p5", "moe.experts", "moe.up_proj.weight", "moe.down_proj.weight", {kExperts, 48, 64}, (48 + 5) * 64 + 7},
  };
  for (const Case& family : cases) {
    SCOPED_TRACE(family.model_type);
    TestCheckpoint source(family.model_type);
    const std::string layer = "model.layers.0.";
    AddExperts(source, layer + family.experts, 64, 48);
    source.Add(absl::StrCat(layer, family.experts, ".gate_up_proj_bias"), {kExperts, 96});
    source.Write();
    QUERN_ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(DequantizeJob(source.path(), "F32"), true));
    auto units = UnitsOfOutputs(plan);
    EXPECT_EQ(units.size(), family.model_type == std::string("step3p5") ? 3u : 2u);
    EXPECT_EQ(units.count(layer + family.down), 1u);
    bool found = false;
    for (const QuantizeUnit& unit : units[layer + family.gate_up]) {
      if (unit.module() != absl::StrCat(layer, family.experts, ".1.up_proj")) continue;
      found = true;
      EXPECT_THAT(Shape(unit), testing::ElementsAreArray(family.shape));
      EXPECT_EQ(unit.outputs(0).dtype(), "F32");
      EXPECT_EQ(At(unit, 5, 7), static_cast<int64_t>(4 * family.up_at));
    }
    EXPECT_TRUE(found);
    EXPECT_THAT(plan.summary.warnings(), IsEmpty());
  }
}

// A square tensor is never turned over as it is loaded, so that its layer is stored as it is used.
TEST(StackExperts, ALayerWithASquareStackIsStoredStraight) {
  TestCheckpoint source("qwen3_vl_moe_text");
  AddExperts(source, "model.layers.0.mlp.experts", 96, 48);
  source.Write();
  QUERN_ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(DequantizeJob(source.path()), true));
  auto units = UnitsOfOutputs(plan);
  EXPECT_THAT(Shape(units.at("model.layers.0.mlp.experts.gate_up_proj")[0]), ElementsAre(kExperts, 96, 96));
  EXPECT_EQ(At(units.at("model.layers.0.mlp.experts.gate_up_proj")[1], 5, 7), 2 * ((48 + 5) * 96 + 7));
  EXPECT_THAT(Shape(units.at("model.layers.0.mlp.experts.down_proj")[0]), ElementsAre(kExperts, 96, 48));
}

TEST(StackExperts, BlocksOfAStackBecomeTheStackOfValues) {
  TestCheckpoint source("");
  source.set_config("{\"model_type\": \"gpt_oss\", \"hidden_size\": 64, \"intermediate_size\": 96, \"num_local_experts\": 2}");
  const std::string experts = "model.layers.0.mlp.experts";
  source.Add({experts + ".gate_up_proj_blocks", {2, 192, 2, 16}, DType::kU8});
  source.Add({experts + ".gate_up_proj_scales", {2, 192, 2}, DType::kU8});
  source.Add(experts + ".gate_up_proj_bias", {2, 192});
  source.Add({experts + ".down_proj_blocks", {2, 64, 3, 16}, DType::kU8});
  source.Add({experts + ".down_proj_scales", {2, 64, 3}, DType::kU8});
  source.Write();
  QUERN_ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(DequantizeJob(source.path()), true));
  auto units = UnitsOfOutputs(plan);
  EXPECT_EQ(units.size(), 2u);
  EXPECT_THAT(Shape(units.at(experts + ".gate_up_proj")[3]), ElementsAre(2, 64, 192));
  EXPECT_EQ(At(units.at(experts + ".gate_up_proj")[3], 5, 7), 2 * ((64 + 7) * 192 + 2 * 5 + 1));
  EXPECT_THAT(plan.summary.warnings(), Not(Contains(HasSubstr("modules of their own"))));
}

TEST(StackExperts, PlainExpertsOfAnotherLayerAreStackedToo) {
  TestCheckpoint source("llama4_text");
  AddExperts(source, "model.layers.0.feed_forward.experts", 64, 48);
  for (uint64_t e = 0; e < 2; ++e) {
    for (const char* name : {"gate_proj", "up_proj"})
      source.Add(absl::StrCat("model.layers.1.feed_forward.experts.", e, ".", name, ".weight"), {48, 64});
    source.Add(absl::StrCat("model.layers.1.feed_forward.experts.", e, ".down_proj.weight"), {64, 48});
  }
  source.Write();
  QUERN_ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(DequantizeJob(source.path()), true));
  auto units = UnitsOfOutputs(plan);
  ASSERT_EQ(units.at("model.layers.1.feed_forward.experts.gate_up_proj").size(), 4u);
  EXPECT_EQ(units.at("model.layers.1.feed_forward.experts.gate_up_proj")[0].weight().decode_scheme(), "");
}

TEST(StackExperts, IncompleteLayersStayAsTheyAreAndAreNamed) {
  TestCheckpoint source("gpt_oss");
  AddExperts(source, "model.layers.0.mlp.experts", 64, 48, 2);
  AddExperts(source, "model.layers.1.mlp.experts", 64, 48, 2);
  AddCodes(source, "model.layers.1.mlp.experts.3.gate_proj", 48, 64);
  AddExperts(source, "model.layers.2.mlp.experts", 64, 48, 2);
  AddCodes(source, "model.layers.2.mlp.experts.2.down_proj", 64, 48);
  AddExperts(source, "model.layers.3.mlp.experts", 64, 48, 2);
  source.Add("model.layers.3.mlp.experts.1.up_proj.bias", {48});
  AddExperts(source, "model.layers.4.mlp.experts", 64, 48, 2);
  AddCodes(source, "model.layers.4.mlp.experts.2.gate_proj", 40, 64);
  AddCodes(source, "model.layers.4.mlp.experts.2.up_proj", 40, 64);
  AddCodes(source, "model.layers.4.mlp.experts.2.down_proj", 64, 48);
  source.Write();
  QUERN_ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(DequantizeJob(source.path()), true));
  auto units = UnitsOfOutputs(plan);
  EXPECT_EQ(units.count("model.layers.0.mlp.experts.gate_up_proj"), 1u);
  for (int layer = 1; layer <= 4; ++layer) {
    EXPECT_EQ(units.count(absl::StrCat("model.layers.", layer, ".mlp.experts.gate_up_proj")), 0u);
    EXPECT_EQ(units.count(absl::StrCat("model.layers.", layer, ".mlp.experts.1.gate_proj.weight")), 1u);
  }
  EXPECT_THAT(plan.summary.warnings(), Contains(AllOf(HasSubstr("written one by one"), HasSubstr("gpt_oss"),
                                                      HasSubstr("there is no 2.gate_proj"), HasSubstr("model.layers.{1-4}.mlp.experts"))));
}

TEST(StackExperts, FamiliesThatLoadExpertsOneByOneKeepThem) {
  TestCheckpoint source("qwen3_moe");
  AddExperts(source, "model.layers.0.mlp.experts", 64, 48, 2);
  source.Write();
  QUERN_ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(DequantizeJob(source.path()), true));
  EXPECT_EQ(UnitsOfOutputs(plan).size(), 6u);
  EXPECT_THAT(plan.summary.warnings(), IsEmpty());
}

TEST(StackExperts, MemoryIsEnoughForAStrip) {
  TestCheckpoint source("llama4_text");
  AddExperts(source, "model.layers.0.feed_forward.experts", 256, 65536, 1);
  source.Write();
  QUERN_ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(DequantizeJob(source.path()), true));
  // 32 rows of the gathered down_proj, and of the stack: 32 columns of gate and up.
  EXPECT_GE(plan.summary.minimum_memory(), 8u * 32 * 2 * 65536 * 2);
}

}  // namespace
}  // namespace quern::daemon
