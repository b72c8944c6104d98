#include "client/plan_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace quern::client {
namespace {

using quern::v1::PlanJobResponse;
using quern::v1::TensorFate;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

void Add(PlanJobResponse& plan, const std::string& name, TensorFate::Fate fate, const std::string& reason,
         std::vector<uint64_t> shape = {8, 4}) {
  TensorFate* added = plan.add_fates();
  added->set_tensor(name);
  added->set_fate(fate);
  added->set_reason(reason);
  added->set_dtype("BF16");
  for (const uint64_t dimension : shape) added->add_shape(dimension);
}

TEST(PlanReportTest, ExpertsOfAllLayersAreOneLine) {
  PlanJobResponse plan;
  for (int layer = 1; layer < 48; ++layer) {
    for (int expert = 0; expert < 256; ++expert) {
      Add(plan, absl::StrCat("model.layers.", layer, ".mlp.experts.", expert, ".up_proj.weight"), TensorFate::QUANTIZED, "routed_experts");
    }
  }
  const std::vector<FateGroup> groups = GroupFates(plan.fates());
  ASSERT_EQ(groups.size(), 1);
  EXPECT_EQ(groups[0].name, "model.layers.{1-47}.mlp.experts.{0-255}.up_proj.weight");
  EXPECT_EQ(groups[0].count, 47 * 256);
  EXPECT_EQ(groups[0].shape, "[8, 4]");
}

TEST(PlanReportTest, OtherReasonIsAnotherLineInTheOrderOfTheFile) {
  PlanJobResponse plan;
  Add(plan, "model.layers.0.mlp.up_proj.weight", TensorFate::QUANTIZED, "mlp");
  Add(plan, "model.layers.1.mlp.up_proj.weight", TensorFate::COPIED, "ignored by re:.*layers\\.1\\..*");
  Add(plan, "model.layers.2.mlp.up_proj.weight", TensorFate::QUANTIZED, "mlp", {16, 4});
  Add(plan, "model.norm.weight", TensorFate::COPIED, "no 2-D linear weight", {4});
  const std::vector<FateGroup> groups = GroupFates(plan.fates());
  ASSERT_EQ(groups.size(), 3);
  EXPECT_EQ(groups[0].name, "model.layers.{0, 2}.mlp.up_proj.weight");
  EXPECT_EQ(groups[0].shape, "various");
  EXPECT_EQ(groups[1].name, "model.layers.1.mlp.up_proj.weight");
  EXPECT_EQ(groups[2].name, "model.norm.weight");
}

TEST(PlanReportTest, SchemesWithWhatChoseThem) {
  PlanJobResponse plan;
  plan.mutable_summary()->set_quantization_config("{\"quant_method\": \"compressed-tensors\", \"format\": \"mixed-precision\"}");
  Add(plan, "a.weight", TensorFate::QUANTIZED, "mlp", {100, 50});
  Add(plan, "b.weight", TensorFate::QUANTIZED, "attention", {7, 3});
  Add(plan, "c.weight", TensorFate::QUANTIZED, "re:.*c", {10, 1});
  Add(plan, "norm.weight", TensorFate::COPIED, "norm");
  plan.mutable_fates(0)->set_scheme("scheme one");
  plan.mutable_fates(1)->set_scheme("scheme two");
  plan.mutable_fates(2)->set_scheme("scheme one");
  const std::string text = FormatPlan(plan, false);
  EXPECT_THAT(text, HasSubstr("format  compressed-tensors mixed-precision\n"));
  EXPECT_THAT(text, testing::ContainsRegex("scheme one +2 +5,010 +mlp, re:.*c\n"));
  EXPECT_THAT(text, testing::ContainsRegex("scheme two +1 +21 +attention\n"));
}

TEST(PlanReportTest, NumbersWithLeadingZerosAreNames) {
  PlanJobResponse plan;
  Add(plan, "blocks.007.weight", TensorFate::COPIED, "other");
  EXPECT_EQ(GroupFates(plan.fates())[0].name, "blocks.007.weight");
}

TEST(PlanReportTest, ReportHasExactSizesAndTheirSum) {
  PlanJobResponse plan;
  Add(plan, "model.layers.0.mlp.up_proj.weight", TensorFate::QUANTIZED, "mlp");
  Add(plan, "model.layers.1.mlp.up_proj.weight", TensorFate::QUANTIZED, "mlp");
  auto* summary = plan.mutable_summary();
  summary->set_source("/models/laguna");
  summary->set_output_bytes(3000);
  summary->set_disk_needed(4096);
  summary->set_minimum_memory(16 << 20);
  summary->set_peak_memory(512 << 20);
  for (const uint64_t size : {1000, 2000}) {
    auto* shard = summary->add_shards();
    shard->set_file(absl::StrCat("model-", size, ".safetensors"));
    shard->set_size(size);
    shard->add_layers(0);
    shard->add_layers(1);
  }
  auto* bits = summary->add_effective_bits();
  bits->set_weights(64);
  bits->set_bits(4.5);
  auto* pattern = summary->add_patterns();
  pattern->set_kind("ignore");
  pattern->set_pattern("re:nothing");
  summary->add_warnings("the ignore re:nothing matches no module");
  const std::string text = FormatPlan(plan, /*all=*/false);
  EXPECT_THAT(text, AllOf(HasSubstr("1,000 B"), HasSubstr("2,000 B"), HasSubstr("3,000 B"), HasSubstr("4.500"), HasSubstr("whole model"),
                          HasSubstr("0, 1"), HasSubstr("512 MiB"), HasSubstr("16 MiB"), HasSubstr("re:nothing")));
  EXPECT_THAT(text, AllOf(HasSubstr("layers.{0, 1}.mlp"), Not(HasSubstr("layers.1.mlp")), HasSubstr("warning: ")));
  EXPECT_THAT(FormatPlan(plan, /*all=*/true), HasSubstr("layers.1.mlp"));
}

}  // namespace
}  // namespace quern::client
