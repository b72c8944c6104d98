#include "checkpoint/expert_stack.h"

#include <vector>

#include "base/status_matchers.h"
#include "checkpoint/family.h"

namespace quern::checkpoint {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

ModelConfig Config(absl::string_view model_type, uint64_t hidden, uint64_t intermediate) {
  ModelConfig config;
  config.model_type = std::string(model_type);
  config.hidden_size = hidden;
  config.moe_intermediate_size = intermediate;
  return config;
}

struct Found {
  ExpertStack stack;
  absl::StatusOr<StackAxes> axes;
};

Found Find(const ModelConfig& config, absl::string_view tensor, const std::vector<uint64_t>& shape) {
  const std::optional<ExpertStack> stack = Family::For(config).FindStack(tensor);
  EXPECT_TRUE(stack.has_value()) << tensor;
  if (!stack.has_value()) return {{}, absl::NotFoundError("no stack")};
  return {*stack, ResolveStackAxes(*stack, shape, config)};
}

// Elements of a slice in a tensor that holds 0, 1, 2, ...: of its corners.
std::vector<uint64_t> Corners(const StackSlice& s) {
  return {s.first, s.first + (s.cols - 1) * s.col_stride, s.first + (s.rows - 1) * s.row_stride,
          s.first + (s.rows - 1) * s.row_stride + (s.cols - 1) * s.col_stride};
}

TEST(ExpertStack, HalvesInBothOrders) {
  const ModelConfig config = Config("qwen3_5_moe", 64, 48);
  const std::string name = "model.language_model.layers.2.mlp.experts.gate_up_proj";
  Found straight = Find(config, name, {4, 96, 64});
  QUERN_ASSERT_OK(straight.axes);
  EXPECT_EQ(straight.stack.experts, "model.language_model.layers.2.mlp.experts");
  EXPECT_THAT(straight.stack.names, ElementsAre("gate_proj", "up_proj"));
  EXPECT_FALSE(straight.axes->transposed);
  const StackSlice gate = SliceOfStack(straight.stack, *straight.axes, 1, 0);
  const StackSlice up = SliceOfStack(straight.stack, *straight.axes, 1, 1);
  EXPECT_EQ(gate.rows, 48u);
  EXPECT_EQ(gate.cols, 64u);
  EXPECT_THAT(Corners(gate), ElementsAre(96 * 64, 96 * 64 + 63, 96 * 64 + 47 * 64, 96 * 64 + 47 * 64 + 63));
  EXPECT_THAT(Corners(up), ElementsAre(96 * 64 + 48 * 64, 96 * 64 + 48 * 64 + 63, 2 * 96 * 64 - 64, 2 * 96 * 64 - 1));

  Found turned = Find(config, name + ".weight", {4, 64, 96});
  QUERN_ASSERT_OK(turned.axes);
  EXPECT_TRUE(turned.axes->transposed);
  const StackSlice turned_up = SliceOfStack(turned.stack, *turned.axes, 0, 1);
  EXPECT_EQ(turned_up.rows, 48u);
  EXPECT_EQ(turned_up.cols, 64u);
  EXPECT_THAT(Corners(turned_up), ElementsAre(48, 48 + 63 * 96, 95, 95 + 63 * 96));
}

// "fused gate_up_proj [4,128,64]; gpt-oss interleaved; square down_proj": split by model type, never by shape alone
TEST(ExpertStackCases, SquareStacksGoByTheModelType) {
  for (const char* type : {"qwen3_moe", "qwen3_5_moe", "deepseek_v3"}) {
    const ModelConfig config = Config(type, 64, 64);
    EXPECT_FALSE(Find(config, "model.layers.0.mlp.experts.down_proj", {4, 64, 64}).axes->transposed) << type;
    EXPECT_FALSE(Find(config, "model.layers.0.mlp.experts.gate_up_proj", {4, 128, 64}).axes->transposed) << type;
  }
  EXPECT_TRUE(Find(Config("qwen3_vl_moe", 64, 64), "model.language_model.layers.0.mlp.experts.down_proj", {4, 64, 64}).axes->transposed);
  // hidden_size is twice the intermediate size.
  EXPECT_TRUE(Find(Config("qwen3_vl_moe", 64, 32), "model.language_model.layers.0.mlp.experts.gate_up_proj", {4, 64, 64}).axes->transposed);
  EXPECT_FALSE(Find(Config("qwen3_5_moe", 64, 32), "model.language_model.layers.0.mlp.experts.gate_up_proj", {4, 64, 64}).axes->transposed);
  EXPECT_TRUE(Find(Config("llama4", 64, 64), "language_model.model.layers.0.feed_forward.experts.down_proj", {4, 64, 64}).axes->transposed);
  EXPECT_FALSE(Family::For(Config("new_moe", 64, 32)).FindStack("model.layers.0.mlp.experts.gate_up_proj").has_value());
}

TEST(ExpertStackCases, GptOssAlternatesGateAndUp) {
  const ModelConfig config = Config("gpt_oss", 64, 64);
  const Found values = Find(config, "model.layers.0.mlp.experts.gate_up_proj", {2, 64, 128});
  QUERN_ASSERT_OK(values.axes);
  const StackSlice up = SliceOfStack(values.stack, *values.axes, 1, 1);
  EXPECT_EQ(up.first, 64u * 128 + 1);
  EXPECT_EQ(up.row_stride, 2u);
  EXPECT_EQ(up.col_stride, 128u);
  EXPECT_EQ(up.rows, 64u);

  const Found blocks = Find(config, "model.layers.0.mlp.experts.gate_up_proj_blocks", {2, 128, 2, 16});
  QUERN_ASSERT_OK(blocks.axes);
  EXPECT_EQ(blocks.stack.base, "model.layers.0.mlp.experts.gate_up_proj");
  EXPECT_EQ(blocks.axes->in, 64u);
  const StackSlice gate = SliceOfStack(blocks.stack, *blocks.axes, 0, 0);
  EXPECT_EQ(gate.first, 0u);
  EXPECT_EQ(gate.row_stride, 128u);
  EXPECT_EQ(gate.col_stride, 1u);
  EXPECT_EQ(Find(config, "model.layers.0.mlp.experts.gate_up_proj_bias", {2, 128}).stack.form, ExpertStack::Form::kBias);
}

TEST(ExpertStack, UnfusedAndNamedOtherwise) {
  const Found step = Find(Config("step3p5", 64, 32), "model.layers.5.moe.gate_proj.weight", {4, 32, 64});
  QUERN_ASSERT_OK(step.axes);
  EXPECT_EQ(step.stack.experts, "model.layers.5.moe.experts");
  EXPECT_THAT(step.stack.names, ElementsAre("gate_proj"));
  const Found granite = Find(Config("granitemoe", 64, 32), "model.layers.5.block_sparse_moe.input_linear.weight", {4, 64, 64});
  QUERN_ASSERT_OK(granite.axes);
  EXPECT_FALSE(granite.axes->transposed);
  EXPECT_THAT(granite.stack.names, ElementsAre("gate_proj", "up_proj"));
  const Found mixtral = Find(Config("mixtral", 64, 32), "model.layers.5.block_sparse_moe.experts.down_proj", {4, 64, 32});
  EXPECT_THAT(mixtral.stack.names, ElementsAre("w2"));
}

TEST(ExpertStack, ShapesThatDoNotFitAreRefused) {
  EXPECT_THAT(Find(Config("qwen3_moe", 64, 32), "model.layers.0.mlp.experts.gate_up_proj", {4, 96, 64}).axes,
              StatusIs(kInvalid, HasSubstr("[experts, 64, 64] is expected")));
  EXPECT_THAT(Find(Config("llama4", 64, 48), "language_model.model.layers.0.feed_forward.experts.down_proj", {4, 64, 48}).axes,
              StatusIs(kInvalid, HasSubstr("[experts, 48, 64] is expected")));
  EXPECT_THAT(Find(Config("qwen3_moe", 64, 32), "model.layers.0.mlp.experts.gate_up_proj", {4, 64}).axes, StatusIs(kInvalid));
  EXPECT_THAT(Find(Config("gpt_oss", 64, 64), "model.layers.0.mlp.experts.down_proj_blocks", {4, 64, 2, 8}).axes, StatusIs(kInvalid));
  ModelConfig unsized;
  unsized.model_type = "qwen3_moe";
  EXPECT_THAT(Find(unsized, "model.layers.0.mlp.experts.gate_up_proj", {4, 5, 64}).axes, StatusIs(kInvalid, HasSubstr("halved")));
  EXPECT_THAT(Find(unsized, "model.layers.0.mlp.experts.gate_up_proj", {0, 4, 64}).axes, StatusIs(kInvalid, HasSubstr("empty")));
}

}  // namespace
}  // namespace quern::checkpoint
