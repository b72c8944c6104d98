#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/byte_size.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/status_matchers.h"
#include "base/task_memory.h"
#include "checkpoint/checkpoint.h"
#include "daemon/planner/disk_estimate.h"
#include "daemon/planner/planner.h"
#include "daemon/planner/test_checkpoint.h"

namespace quern::daemon {
namespace {

using quern::v1::JobSpec;
using quern::v1::TensorFate;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

constexpr char kMicro[] = "tests/data/laguna-micro";

std::map<std::string, TensorFate> FatesByName(const Plan& plan) {
  std::map<std::string, TensorFate> fates;
  for (const TensorFate& fate : TensorFates(plan)) EXPECT_TRUE(fates.emplace(fate.tensor(), fate).second) << fate.tensor() << " twice";
  return fates;
}

// What every plan of a checkpoint must keep: each tensor once, headers that read back, units without holes, figures that add up.
void CheckInvariants(const Plan& plan, const std::string& source) {
  QUERN_ASSERT_OK_AND_ASSIGN(const checkpoint::Checkpoint checkpoint, checkpoint::Checkpoint::Open(source));
  std::set<std::string> names;
  for (const checkpoint::TensorLocation& location : checkpoint.tensors()) names.insert(location.info->name);
  for (const auto& [name, fate] : FatesByName(plan)) {
    EXPECT_EQ(names.erase(name), 1u) << name;
    EXPECT_FALSE(fate.reason().empty()) << name;
    EXPECT_FALSE(fate.role().empty()) << name;
  }
  EXPECT_THAT(names, IsEmpty());
  uint64_t sum = 0;
  std::set<std::string> made;
  for (size_t i = 0; i < plan.tasks.size(); ++i) {
    const quern::v1::TaskSpec& task = plan.tasks[i];
    const quern::v1::WriteShard& work = task.write_shard();
    EXPECT_EQ(task.index(), i);
    EXPECT_EQ(task.bytes_to_write(), work.file_size());
    EXPECT_EQ(task.minimum_memory(), kMinimumTaskMemory);
    EXPECT_EQ(work.header().size() % 4096, 0u);
    QUERN_ASSERT_OK_AND_ASSIGN(
        const checkpoint::SafetensorsHeader header,
        checkpoint::ParseSafetensorsHeader(absl::string_view(work.header()).substr(8), work.file_size(), task.label()));
    std::map<std::string, const checkpoint::TensorInfo*> infos;
    for (const checkpoint::TensorInfo& info : header.tensors) infos[info.name] = &info;
    uint64_t next = work.header().size(), to_read = 0;
    size_t tensors = 0;
    const auto check_output = [&](const quern::v1::OutputTensor& output) {
      EXPECT_TRUE(made.insert(output.name()).second) << output.name();
      EXPECT_EQ(output.offset(), next) << output.name();
      next += output.size();
      ++tensors;
      ASSERT_EQ(infos.count(output.name()), 1u) << output.name();
      EXPECT_EQ(infos[output.name()]->begin + header.data_start, output.offset());
      EXPECT_EQ(infos[output.name()]->bytes(), output.size());
      EXPECT_EQ(DTypeName(infos[output.name()]->dtype), output.dtype());
    };
    // A view of plain elements or of a region lies inside its tensor; returns the bytes that reading it takes.
    const auto check_view = [&](const quern::v1::TensorView& view) -> uint64_t {
      const checkpoint::TensorLocation* location = checkpoint.Find(view.tensor());
      if (location == nullptr) {
        ADD_FAILURE() << view.tensor();
        return 0;
      }
      const checkpoint::Shard& shard = checkpoint.shards()[location->shard];
      EXPECT_LT(view.file(), static_cast<uint32_t>(task.source_files_size()));
      EXPECT_EQ(task.source_files(static_cast<int>(view.file())).path(), shard.path);
      const uint64_t width = static_cast<uint64_t>(BytesPerElement(*ParseDType(view.dtype())));
      const uint64_t begin = shard.header.data_start + location->info->begin;
      EXPECT_GE(view.offset(), begin) << view.tensor();
      if (view.rows() > 0 && view.cols() > 0) {
        const uint64_t last = view.offset() + (view.rows() - 1) * static_cast<uint64_t>(view.row_stride()) +
                              (view.cols() - 1) * static_cast<uint64_t>(view.col_stride());
        EXPECT_LE(last + width, begin + location->info->bytes()) << view.tensor();
      }
      return view.rows() * view.cols() * width;
    };
    const auto check_weight = [&](const quern::v1::TensorView& view) {
      if (view.decode_scheme().empty()) return check_view(view);
      EXPECT_GT(view.decode_size(), 0) << view.tensor();
      uint64_t bytes = 0;
      for (const quern::v1::DecodeInput& region : view.decode()) {
        EXPECT_EQ(region.view().dtype(), "U8");
        bytes += check_view(region.view());
      }
      return bytes;
    };
    std::set<std::string> observed;
    for (const quern::v1::ShardUnit& unit : work.units()) {
      if (unit.has_copy()) {
        const quern::v1::TensorView& view = unit.copy().source();
        check_output(unit.copy().output());
        EXPECT_EQ(view.dtype(), "U8");
        const checkpoint::TensorLocation* location = checkpoint.Find(view.tensor());
        ASSERT_NE(location, nullptr) << view.tensor();
        EXPECT_EQ(view.cols(), location->info->bytes());
        to_read += check_view(view);
      } else {
        const quern::v1::QuantizeUnit& quantize = unit.quantize();
        for (const quern::v1::OutputTensor& output : quantize.outputs()) check_output(output);
        to_read += check_weight(quantize.weight());
        const bool first = observed.insert(quantize.statistics_key()).second;
        bool among_them = quantize.statistics_set().empty();
        for (const quern::v1::TensorView& member : quantize.statistics_set()) {
          const uint64_t bytes = check_weight(member);
          if (first) to_read += bytes;
          among_them = among_them || member.SerializeAsString() == quantize.weight().SerializeAsString();
        }
        EXPECT_TRUE(among_them) << quantize.module();
      }
    }
    EXPECT_EQ(next, work.file_size());
    EXPECT_EQ(tensors, infos.size());
    EXPECT_LE(tensors, 8192u);
    EXPECT_EQ(to_read, task.bytes_to_read());
    EXPECT_EQ(plan.summary.shards(static_cast<int>(i)).file(), task.label());
    EXPECT_EQ(plan.summary.shards(static_cast<int>(i)).size(), work.file_size());
    EXPECT_EQ(plan.summary.shards(static_cast<int>(i)).tensors(), tensors);
    sum += work.file_size();
  }
  EXPECT_EQ(plan.summary.output_bytes(), sum);
  uint64_t side = 0;
  for (const std::string& name : plan.summary.side_files()) side += *FileSize(JoinPath(source, name));
  // Index and manifest are estimated; the job store alone wants 4 MiB.
  checkpoint::ShardIndex index;
  for (const quern::v1::TaskSpec& task : plan.tasks) {
    for (const std::string& name : made) index.weight_map[name] = task.label();
  }
  const uint64_t texts = plan.tasks.size() > 1 ? checkpoint::BuildShardIndex(index).size() : 0;
  EXPECT_GE(plan.summary.disk_needed(), sum + side + texts + 4 * kMiB);
  EXPECT_LE(plan.summary.disk_needed(), sum + side + texts + 4 * kMiB + 64 * kKiB + 8 * kKiB * made.size());
}

Plan PlanOf(const std::string& source, absl::string_view recipe, uint64_t max_shard_size = 0) {
  JobSpec job = QuantizeJob(source, recipe);
  job.mutable_quantize()->set_max_shard_size(max_shard_size);
  absl::StatusOr<Plan> plan = MakePlan(job, true);
  EXPECT_THAT(plan, IsOk());
  if (!plan.ok()) return {};
  CheckInvariants(*plan, source);
  return *std::move(plan);
}

TEST(EstimateSpillTest, CountsWhatDoesNotFitInItsShareOfThePool) {
  Plan plan;
  const auto add = [&](quern::v1::TaskSpec& task, uint64_t scales, uint64_t zeros) {
    quern::v1::QuantizeUnit& unit = *task.mutable_write_shard()->add_units()->mutable_quantize();
    unit.add_outputs()->set_size(kGiB);
    unit.add_outputs()->set_size(scales);
    unit.add_outputs()->set_size(zeros);
  };
  plan.tasks.resize(2);
  add(plan.tasks[0], 6 * kMiB, 2 * kMiB);
  add(plan.tasks[0], 6 * kMiB, 2 * kMiB + 1);
  add(plan.tasks[0], 10 * kMiB, 0);
  add(plan.tasks[1], 11 * kMiB, 0);
  EXPECT_EQ(EstimateSpill(plan, 512 * kMiB), 0u);
  // Two files at a time, of one shard; what fits exactly is held in memory.
  EXPECT_EQ(EstimateSpill(plan, 64 * kMiB), 18 * kMiB + 64);
  EXPECT_EQ(EstimateSpill(plan, 80 * kMiB), 11 * kMiB);
}

TEST(QuantizePlan, TrainedCheckpoint) {
  const Plan plan = PlanOf(kMicro, "{scheme: W4A16_ASYM, group_size: 32, targets: [routed_experts]}");
  const auto fates = FatesByName(plan);
  const TensorFate& expert = fates.at("model.layers.1.mlp.experts.7.down_proj.weight");
  EXPECT_EQ(expert.fate(), TensorFate::QUANTIZED);
  EXPECT_EQ(expert.reason(), "routed_experts");
  EXPECT_EQ(expert.scheme(), "int4 group=32 asymmetric observer=minmax numerics=reference");
  EXPECT_EQ(expert.shard(), "model.safetensors");
  EXPECT_EQ(fates.at("model.layers.1.mlp.gate.weight").reason(), "router");
  EXPECT_EQ(fates.at("lm_head.weight").reason(), "lm_head");
  EXPECT_EQ(fates.at("model.embed_tokens.weight").reason(), "embeddings");
  EXPECT_EQ(fates.at("model.norm.weight").reason(), "norm, not a 2-D weight: shape [128]");
  EXPECT_EQ(fates.at("model.layers.0.self_attn.q_proj.weight").reason(), "no target matches");
  EXPECT_EQ(plan.summary.quantized_tensors(), 3u * 8 * 3);
  EXPECT_THAT(plan.tasks[0].layers(), ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(plan.summary.patterns(0).matches(), 72u);
  EXPECT_EQ(plan.summary.patterns(0).examples_size(), 3);
  for (const quern::v1::RoleBits& bits : plan.summary.effective_bits()) {
    if (bits.role() == "routed_experts") {
      EXPECT_EQ(bits.bits(), 4 + 16.0 / 32 + 4.0 / 32);
    }
    if (bits.role() == "attention") {
      EXPECT_EQ(bits.bits(), 16);
    }
  }
  EXPECT_EQ(plan.summary.peak_memory(), 512 * kMiB);
  EXPECT_EQ(plan.summary.minimum_memory(), kMinimumTaskMemory);
  EXPECT_THAT(plan.summary.side_files(), ElementsAre("generation_config.json", "tokenizer.json", "tokenizer_config.json"));
}

TEST(QuantizePlan, MemoryThatIsTooLittleIsRefusedWithWhatIsEnough) {
  TestCheckpoint source("llama");
  source.Add("model.layers.0.mlp.up_proj.weight", {256, 64});
  source.Add("model.layers.0.mlp.down_proj.weight", {256, 30016});
  source.Write();
  JobSpec job = QuantizeJob(source.path(), "{scheme: FP8_BLOCK, observer: mse}");
  QUERN_ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(job, false));
  const uint64_t least = plan.summary.minimum_memory();
  ASSERT_NE(least % kMiB, 0);
  job.mutable_quantize()->set_memory(kMinimumTaskMemory);
  const std::string size = absl::StrCat(least / kMiB + 1, "MiB");
  EXPECT_THAT(MakePlan(job, false), StatusIs(absl::StatusCode::kResourceExhausted,
                                             AllOf(HasSubstr("model.layers.0.mlp.down_proj.weight [256, 30016]"),
                                                   HasSubstr(absl::StrCat("give --memory ", size)), HasSubstr("observer: minmax"))));
  job.mutable_quantize()->set_memory(ParseByteSize(size).value());
  EXPECT_THAT(MakePlan(job, false), IsOk());
}

TEST(QuantizePlan, SmallShardsHoldSmallPartsOfLayers) {
  const uint64_t limit = 300'000;
  const Plan plan = PlanOf(kMicro, "{scheme: W4A16_ASYM, group_size: 32, targets: [routed_experts]}", limit);
  ASSERT_GT(plan.tasks.size(), 3u);
  for (const quern::v1::TaskSpec& task : plan.tasks) {
    const quern::v1::WriteShard& work = task.write_shard();
    EXPECT_TRUE(absl::StartsWith(task.label(), "model-0"));
    EXPECT_LE(work.file_size(), limit) << task.label();
  }
  std::map<std::string, std::set<std::string>> of_expert;
  for (const auto& [name, fate] : FatesByName(plan)) {
    if (fate.role() == "routed_experts") of_expert[name.substr(0, name.rfind(".", name.size() - 8))].insert(fate.shard());
    if (absl::StrContains(name, "self_attn.q_proj")) {
      EXPECT_EQ(fate.shard(), FatesByName(plan).at(name.substr(0, name.find("q_proj")) + "k_proj.weight").shard());
    }
  }
  EXPECT_EQ(of_expert.size(), 24u);
  for (const auto& [expert, shards] : of_expert) EXPECT_EQ(shards.size(), 1u) << expert;
}

TEST(QuantizePlan, EqualInputsGiveEqualPlans) {
  const Plan one = PlanOf(kMicro, "{scheme: W4A16, group_size: 32}", 500'000);
  const Plan two = PlanOf(kMicro, "{scheme: W4A16, group_size: 32}", 500'000);
  ASSERT_EQ(one.tasks.size(), two.tasks.size());
  for (size_t i = 0; i < one.tasks.size(); ++i) EXPECT_EQ(one.tasks[i].SerializeAsString(), two.tasks[i].SerializeAsString());
  EXPECT_EQ(one.summary.SerializeAsString(), two.summary.SerializeAsString());
}

TEST(QuantizePlan, IgnoredLayerOneLeavesTenAndEleven) {
  TestCheckpoint source("llama");
  for (int layer = 0; layer < 12; ++layer) source.AddDenseLayer(layer, 64, 128);
  source.AddOuter(100, 64);
  source.Write();
  const Plan whole = PlanOf(source.path(), "{scheme: W4A16, group_size: 32, ignore: [model.layers.1]}");
  EXPECT_THAT(Warnings(whole), ElementsAre(AllOf(HasSubstr("\"model.layers.1\" matches no module"), HasSubstr("model.layers.1.*"))));
  EXPECT_EQ(whole.summary.quantized_tensors(), 12u * 7);
  EXPECT_EQ(whole.summary.patterns(0).kind(), "ignore");
  EXPECT_EQ(whole.summary.patterns(0).matches(), 0u);

  const Plan below = PlanOf(source.path(), "{scheme: W4A16, group_size: 32, ignore: [model.layers.1.*]}");
  EXPECT_EQ(below.summary.quantized_tensors(), 11u * 7);
  EXPECT_THAT(Warnings(below), IsEmpty());
  const auto fates = FatesByName(below);
  EXPECT_EQ(fates.at("model.layers.1.mlp.up_proj.weight").reason(), "ignored by model.layers.1.*");
  EXPECT_EQ(fates.at("model.layers.10.mlp.up_proj.weight").fate(), TensorFate::QUANTIZED);
  EXPECT_EQ(fates.at("model.layers.11.mlp.up_proj.weight").fate(), TensorFate::QUANTIZED);
  EXPECT_EQ(below.summary.patterns(0).matches(), 9u) << "seven weights and two norms";
  EXPECT_EQ(below.summary.patterns(1).matches(), 11u * 7);
}

TEST(QuantizePlan, GroupThatDoesNotDivideIsListedWhole) {
  TestCheckpoint source("llama");
  for (int layer = 0; layer < 3; ++layer) source.AddDenseLayer(layer, 128, 192);
  source.Add("model.extra.weight", {64, 192});
  source.AddOuter(100, 128);
  source.Write();
  EXPECT_THAT(MakePlan(QuantizeJob(source.path(), "{scheme: W4A16, group_size: 128}"), false),
              StatusIs(kInvalid, AllOf(HasSubstr("model.layers.{0-2}.mlp.down_proj (3 modules) [128, 192]: 192 columns"),
                                       HasSubstr("model.extra [64, 192]: 192 columns"), HasSubstr("non_divisible: keep"))));
  const Plan kept = PlanOf(source.path(), "{scheme: W4A16, group_size: 128, non_divisible: keep}");
  EXPECT_EQ(kept.summary.quantized_tensors(), 3u * 6);
  EXPECT_THAT(Ignored(kept), AllOf(Contains("model.layers.2.mlp.down_proj"), Contains("model.extra")));
  EXPECT_THAT(FatesByName(kept).at("model.extra.weight").reason(), HasSubstr("kept: [64, 192]: 192 columns"));
  EXPECT_THAT(Warnings(kept), ElementsAre(HasSubstr("kept in the source's dtype")));
}

TEST(QuantizePlan, KeptExpertKeepsItsLayer) {
  TestCheckpoint source("qwen3_moe");
  for (int layer = 0; layer < 2; ++layer) {
    for (int expert = 0; expert < 2; ++expert) {
      const std::string prefix = absl::StrCat("model.layers.", layer, ".mlp.experts.", expert, ".");
      source.Add(prefix + "gate_proj.weight", {96, 128});
      source.Add(prefix + "up_proj.weight", {96, 128});
      source.Add(prefix + "down_proj.weight", {128, layer == 0 ? 96u : 128u});
    }
  }
  source.Write();
  const Plan plan = PlanOf(source.path(), "{scheme: W4A16, group_size: 128, non_divisible: keep, targets: [routed_experts]}");
  EXPECT_EQ(plan.summary.quantized_tensors(), 6u);
  EXPECT_THAT(FatesByName(plan).at("model.layers.0.mlp.experts.1.up_proj.weight").reason(), HasSubstr("used as one with"));
  EXPECT_THAT(Warnings(plan), Contains(HasSubstr("it takes one scheme for all of them")));
}

TEST(QuantizePlan, NeverQuantizedByDefault) {
  TestCheckpoint source("qwen2_moe");
  source.Add("model.layers.0.mlp.gate.weight", {8, 64});
  source.Add("model.layers.0.linear_attn.conv1d.weight", {64, 1, 4});
  source.Add("model.layers.0.mlp.shared_expert_gate.weight", {1, 64});
  source.Add("model.layers.0.linear_attn.A_log", {64});
  source.Add("model.layers.0.self_attn.q_proj.weight", {64, 64});
  source.Add("model.layers.0.self_attn.q_proj.bias", {64});
  source.Add("model.layers.0.empty.weight", {0, 64});
  source.Add("model.layers.0.other_empty", {4, 0});
  source.Add("model.layers.0.table", {4, 64});
  source.AddOuter(100, 64);
  source.Write();
  const Plan plan = PlanOf(source.path(), "{scheme: W4A16, group_size: 32, targets: [Linear, 're:.*']}");
  EXPECT_EQ(plan.summary.quantized_tensors(), 1u);
  const auto fates = FatesByName(plan);
  EXPECT_EQ(fates.at("model.layers.0.mlp.gate.weight").reason(), "router");
  EXPECT_EQ(fates.at("model.layers.0.mlp.shared_expert_gate.weight").reason(), "router");
  EXPECT_EQ(fates.at("model.layers.0.linear_attn.conv1d.weight").reason(), "not a 2-D weight: shape [64, 1, 4]");
  EXPECT_EQ(fates.at("model.layers.0.linear_attn.A_log").reason(), "not a 2-D weight: shape [64]");
  EXPECT_EQ(fates.at("model.layers.0.self_attn.q_proj.bias").reason(), "not a weight: shape [64]");
  EXPECT_EQ(fates.at("model.layers.0.empty.weight").reason(), "empty: shape [0, 64]");
  EXPECT_EQ(fates.at("model.layers.0.table").reason(), "not the .weight of a module: shape [4, 64]");
  EXPECT_EQ(fates.at("model.embed_tokens.weight").reason(), "embeddings");
}

TEST(QuantizePlan, ExactNamesAndRolesWinOverTheDefaultIgnore) {
  TestCheckpoint source("llama");
  source.AddDenseLayer(0, 64, 128);
  source.AddOuter(96, 64);
  source.Write();
  Plan plan = PlanOf(source.path(), "{scheme: W4A16, group_size: 32, targets: [lm_head, model.embed_tokens]}");
  EXPECT_EQ(plan.summary.quantized_tensors(), 2u);
  plan = PlanOf(source.path(), "{scheme: W4A16, group_size: 32, targets: [Linear, lm_head], ignore: [lm_head]}");
  EXPECT_EQ(FatesByName(plan).at("lm_head.weight").reason(), "ignored by lm_head");
  EXPECT_THAT(Warnings(plan), ElementsAre(HasSubstr("target \"lm_head\" quantizes nothing")));
  EXPECT_THAT(MakePlan(QuantizeJob(source.path(), "{scheme: W4A16, group_size: 32, targets: ['re:lm_.*', Linear]}"), false),
              StatusIs(kInvalid, HasSubstr("matches only what is not quantized by default, for example lm_head (lm_head)")));
}

TEST(QuantizePlan, FirstMatchingGroupWins) {
  TestCheckpoint source("llama");
  source.AddDenseLayer(0, 64, 128);
  source.AddDenseLayer(1, 64, 128);
  source.Write();
  const Plan plan =
      PlanOf(source.path(),
             "{groups: [{targets: ['model.layers.1.*'], scheme: W8A16, group_size: channel}, {targets: [attention], scheme: W3A16, "
             "group_size: 64}], scheme: W4A16, group_size: 32}");
  const auto fates = FatesByName(plan);
  EXPECT_THAT(fates.at("model.layers.1.self_attn.q_proj.weight").scheme(), HasSubstr("int8"));
  EXPECT_THAT(fates.at("model.layers.0.self_attn.q_proj.weight").scheme(), HasSubstr("int3"));
  EXPECT_THAT(fates.at("model.layers.0.mlp.up_proj.weight").scheme(), HasSubstr("int4"));
  ASSERT_EQ(plan.summary.patterns_size(), 3);
  EXPECT_EQ(plan.summary.patterns(0).matches(), 7u);
  EXPECT_EQ(plan.summary.patterns(1).matches(), 4u);
  EXPECT_EQ(plan.summary.patterns(2).matches(), 3u);
}

TEST(QuantizePlan, TargetsThatMatchNothingAreRefusedWithAHint) {
  TestCheckpoint source("llama");
  source.AddDenseLayer(0, 64, 128);
  source.Write();
  const auto plan = [&](absl::string_view target) {
    return MakePlan(QuantizeJob(source.path(), absl::StrCat("{scheme: W4A16, group_size: 32, targets: ['", target, "', Linear]}")), false);
  };
  EXPECT_THAT(plan("model.layers.0.mlp"), StatusIs(kInvalid, HasSubstr("everything below it is \"model.layers.0.mlp.*\"")));
  EXPECT_THAT(plan("up_proj"), StatusIs(kInvalid, HasSubstr("\"*.up_proj\"")));
  EXPECT_THAT(plan("model.layers.0.mlp.up_proj.weight"), StatusIs(kInvalid, HasSubstr("have no \".weight\"")));
  EXPECT_THAT(plan("routed_experts"), StatusIs(kInvalid, HasSubstr("this checkpoint has the roles attention, mlp, norms")));
  EXPECT_THAT(plan("re:up_proj"), StatusIs(kInvalid, HasSubstr("names are like")));
}

TEST(QuantizePlan, NothingLeftIsRefused) {
  TestCheckpoint source("llama");
  source.AddDenseLayer(0, 64, 128);
  source.Write();
  EXPECT_THAT(MakePlan(QuantizeJob(source.path(), "{scheme: W4A16, group_size: 32, ignore: ['*']}"), false),
              StatusIs(kInvalid, HasSubstr("nothing to quantize")));
}

TEST(QuantizePlan, FusedSetsMustAgree) {
  TestCheckpoint source("qwen3_moe");
  source.AddDenseLayer(0, 64, 128);
  for (int expert = 0; expert < 3; ++expert) {
    for (const char* leaf : {"gate_proj", "up_proj", "down_proj"})
      source.Add(absl::StrCat("model.layers.1.mlp.experts.", expert, ".", leaf, ".weight"), {64, 64});
  }
  source.Write();
  EXPECT_THAT(MakePlan(QuantizeJob(source.path(), "{scheme: W4A16, group_size: 32, ignore: ['*.q_proj', '*.experts.1.*']}"), false),
              StatusIs(kInvalid, AllOf(HasSubstr("model.layers.0.self_attn.q_proj: not quantized (ignore"),
                                       HasSubstr("model.layers.0.self_attn.k_proj"), HasSubstr("model.layers.1.mlp.experts.1.gate_proj"),
                                       HasSubstr("model.layers.1.mlp.experts.{0,2}.up_proj"))));
}

TEST(QuantizePlan, StacksOfExpertsAreRefusedWhenTargeted) {
  TestCheckpoint source("some_new_moe");
  source.AddDenseLayer(0, 64, 128);
  source.Add("model.layers.0.mlp.experts.gate_up_proj", {4, 128, 64});
  source.Add("model.layers.0.mlp.experts.down_proj", {4, 64, 64});
  source.Write();
  for (const char* targets : {"[routed_experts]", "['re:.*experts.*']", "[model.layers.0.mlp.experts.down_proj]"}) {
    EXPECT_THAT(MakePlan(QuantizeJob(source.path(), absl::StrCat("{scheme: W4A16, group_size: 32, targets: ", targets, "}")), false),
                StatusIs(kInvalid, AllOf(HasSubstr("some_new_moe"), HasSubstr("layout is not known"), HasSubstr("experts.down_proj"))))
        << targets;
  }
  const Plan plan = PlanOf(source.path(), "{scheme: W4A16, group_size: 32}");
  EXPECT_THAT(FatesByName(plan).at("model.layers.0.mlp.experts.down_proj").reason(),
              HasSubstr("a stack of experts in one tensor, shape [4, 64, 64]"));
  EXPECT_THAT(Warnings(plan), Contains(HasSubstr("stacks of experts are copied")));
  EXPECT_THAT(Warnings(plan), Contains(HasSubstr("model_type \"some_new_moe\" is not known")));
}

TEST(QuantizePlan, CheckpointWithoutTensorsSaysSo) {
  TestCheckpoint source("llama");
  source.EndShard("model.safetensors");
  WriteText(JoinPath(source.path(), "config.json"), "{\"model_type\": \"llama\"}");
  EXPECT_THAT(MakePlan(QuantizeJob(source.path(), "scheme: W4A16"), false), StatusIs(kInvalid, HasSubstr("holds no tensors")));
}

TEST(QuantizePlan, OldConfigIsReplaced) {
  TestCheckpoint source("llama");
  source.set_config("{\"model_type\": \"llama\", \"quantization_config\": {\"quant_method\": \"fp8\"}}");
  source.AddDenseLayer(0, 64, 128);
  source.Write();
  const Plan plan = PlanOf(source.path(), "{scheme: W4A16, group_size: 32}");
  EXPECT_THAT(Warnings(plan), ElementsAre(HasSubstr("quantization_config is replaced")));
}

TEST(QuantizePlan, ScalesThatBelongToNoWeightAreNamed) {
  TestCheckpoint source("llama");
  source.AddDenseLayer(0, 64, 128);
  source.Add({"model.layers.0.self_attn.k_proj.k_scale", {1}, DType::kF32});
  source.Add({"model.layers.0.self_attn.v_scale", {1}, DType::kF32});
  source.Add({"model.layers.0.mlp.up_proj.output_scale", {1}, DType::kF32});
  source.Add({"model.layers.0.mlp.gone_proj.weight_scale", {128, 1}, DType::kBF16});
  source.Add({"model.layers.0.mlp.gone_proj.weight.absmax", {128}, DType::kF32});
  source.Add("model.layers.0.mlp.scale", {64});  // nobody's
  source.Write();
  const Plan plan = PlanOf(source.path(), "{scheme: W4A16, group_size: 32}");
  EXPECT_THAT(Warnings(plan),
              UnorderedElementsAre(AllOf(HasSubstr("KV cache"), HasSubstr("k_proj.k_scale"), HasSubstr("self_attn.v_scale")),
                                   AllOf(HasSubstr("left over"), HasSubstr("gone_proj.weight_scale"), HasSubstr("gone_proj.weight.absmax"),
                                         HasSubstr("up_proj.output_scale"), Not(HasSubstr("mlp.scale")))));
  EXPECT_EQ(FatesByName(plan).at("model.layers.0.mlp.gone_proj.weight_scale").fate(), TensorFate::COPIED);
}

// Whoever reads the result would take them for a part of what lies beside them: the new format of a weight, or a plain one.
TEST(QuantizePlan, DescriptionsBesidePlainWeightsAreDropped) {
  static constexpr const char* kStrays[] = {"weight_scale",
                                            "weight_scale_inv",
                                            "weight_scale_2",
                                            "weight_zero_point",
                                            "weight_g_idx",
                                            "weight_global_scale",
                                            "weight_shape",
                                            "input_scale",
                                            "input_zero_point",
                                            "input_global_scale",
                                            "activation_scale",
                                            "g_idx",
                                            "SCB",
                                            "weight.absmax",
                                            "weight.quant_state.bitsandbytes__nf4"};
  TestCheckpoint source("llama");
  source.AddDenseLayer(0, 64, 128);
  source.AddOuter(32, 64);
  std::vector<std::string> strays;
  // Beside a weight that is quantized, one that is not, and one that is no matrix.
  for (const char* module : {"model.layers.0.mlp.up_proj", "lm_head", "model.norm"}) {
    for (const char* stray : kStrays) strays.push_back(absl::StrCat(module, ".", stray));
  }
  for (const std::string& name : strays) source.Add({name, {3}, DType::kF32});
  source.Write();
  const Plan plan = PlanOf(source.path(), "{scheme: W4A16, group_size: 32}");
  ASSERT_THAT(Warnings(plan), ElementsAre(AllOf(HasSubstr("are dropped"), HasSubstr("up_proj.weight_g_idx"))));
  const auto fates = FatesByName(plan);
  for (const std::string& name : strays) {
    EXPECT_EQ(fates.at(name).fate(), TensorFate::DROPPED) << name;
    EXPECT_THAT(fates.at(name).reason(), HasSubstr("the one beside it is plain")) << name;
  }
}

TEST(QuantizePlan, WeightsOfBitsandbytesAreRefusedByName) {
  TestCheckpoint source("llama");
  source.AddDenseLayer(0, 64, 128);
  source.AddOuter(32, 64);
  source.Add({"model.layers.0.mlp.other_proj.weight", {4096, 1}, DType::kU8});
  source.Add({"model.layers.0.mlp.other_proj.weight.absmax", {128}, DType::kF32});
  source.Add({"model.layers.0.mlp.other_proj.weight.quant_state.bitsandbytes__nf4", {90}, DType::kU8});
  source.Write();
  EXPECT_THAT(MakePlan(QuantizeJob(source.path(), "{scheme: W4A16, group_size: 32}"), false),
              StatusIs(kInvalid, AllOf(HasSubstr("other_proj"), HasSubstr("bitsandbytes"))));
}

TEST(QuantizePlan, DescriptionsBesidePlainStacksAreDroppedAndOthersKept) {
  for (const char* targets : {"attention", "routed_experts"}) {
    TestCheckpoint source("granitemoe");
    source.set_config("{\"model_type\": \"granitemoe\", \"hidden_size\": 64, \"intermediate_size\": 32}");
    source.AddDenseLayer(0, 64, 128);
    source.Add("model.layers.0.block_sparse_moe.input_linear.weight", {4, 64, 64});
    source.Add("model.layers.0.block_sparse_moe.output_linear.weight", {4, 64, 32});
    source.Add({"model.layers.0.block_sparse_moe.input_linear.weight_scale", {4, 1}, DType::kF32});
    source.Add("model.layers.0.block_sparse_moe.output_linear.bias", {4, 64});
    source.Write();
    const Plan plan = PlanOf(source.path(), absl::StrCat("{scheme: W4A16, group_size: 32, targets: [", targets, "]}"));
    EXPECT_THAT(Warnings(plan), Contains(AllOf(HasSubstr("are dropped"), HasSubstr("input_linear.weight_scale"))));
    const auto fates = FatesByName(plan);
    EXPECT_EQ(fates.at("model.layers.0.block_sparse_moe.input_linear.weight_scale").fate(), TensorFate::DROPPED);
    EXPECT_EQ(fates.at("model.layers.0.block_sparse_moe.output_linear.bias").fate(), TensorFate::COPIED);
  }
}

TEST(QuantizePlan, ExpertsThatAreInAStackAndApartAreRefused) {
  TestCheckpoint source("qwen3_moe");
  source.set_config("{\"model_type\": \"qwen3_moe\", \"hidden_size\": 64, \"moe_intermediate_size\": 32}");
  source.Add("model.layers.0.mlp.experts.gate_up_proj", {4, 64, 64});
  source.Add("model.layers.0.mlp.experts.down_proj", {4, 64, 32});
  source.Add("model.layers.0.mlp.experts.1.up_proj.weight", {32, 64});
  source.Write();
  EXPECT_THAT(MakePlan(QuantizeJob(source.path(), "{scheme: W4A16, group_size: 32, targets: [routed_experts]}"), false),
              StatusIs(kInvalid, AllOf(HasSubstr("experts.1.up_proj"), HasSubstr("tensors of its own besides"))));
}

TEST(QuantizePlan, WeightsThatAreStoredTwiceAreRefused) {
  for (const bool packed : {true, false}) {
    TestCheckpoint source("llama");
    source.AddDenseLayer(0, 64, 128);
    if (packed) {
      source.Add({"model.layers.0.mlp.up_proj.weight_packed", {128, 32}, DType::kU8});
      source.Add({"model.layers.0.mlp.up_proj.weight_scale", {128, 2}, DType::kU8});
    } else {
      source.Add({"model.layers.1.mlp.up_proj.weight", {128, 64}, DType::kF8E4M3});
      source.Add({"model.layers.1.mlp.up_proj.weight_scale", {128, 1}, DType::kF32});
      source.Add({"model.layers.1.mlp.up_proj.weight_scale_inv", {128, 1}, DType::kF32});
    }
    source.Write();
    EXPECT_THAT(MakePlan(QuantizeJob(source.path(), "{scheme: W4A16, group_size: 32}"), false),
                StatusIs(kInvalid, AllOf(HasSubstr("mlp.up_proj"), HasSubstr("which one counts"))));
  }
}

TEST(QuantizePlan, UnknownTypesKeepWhatIsNoLinearModule) {
  TestCheckpoint source("nobody_knows");
  source.set_config("{\"model_type\": \"nobody_knows\", \"hidden_size\": 128, \"intermediate_size\": 256, \"vocab_size\": 96}");
  const char* const kKept[] = {"transformer.wte",
                               "transformer.wpe",
                               "transformer.token_type_embeddings",
                               "transformer.tok",
                               "lm_out",
                               "transformer.blocks.0.ffn.router.layer",
                               "transformer.blocks.0.ffn.experts.mlp"};
  for (const char* name : kKept) {
    if (!absl::EndsWith(name, ".mlp")) source.Add(absl::StrCat(name, ".weight"), {96, 128});
  }
  source.Add("transformer.blocks.0.ffn.experts.mlp.w1", {256, 128});  // of DBRX: the experts below each other
  source.Add("transformer.blocks.0.attn.Wqkv.weight", {384, 128});
  source.Add("transformer.blocks.0.attn.k_proj.weight", {96, 128});  // as many rows as tokens, by chance
  source.Add("transformer.blocks.0.attn.Wqkv.bias", {384});
  source.Add("transformer.blocks.0.ffn.w1.weight", {256, 128});
  source.Write();
  const Plan plan = PlanOf(source.path(), "{scheme: W4A16, group_size: 32}");
  for (const auto& [name, fate] : FatesByName(plan)) {
    const bool linear = name == "transformer.blocks.0.attn.Wqkv.weight" || absl::EndsWith(name, "k_proj.weight") ||
                        name == "transformer.blocks.0.ffn.w1.weight";
    EXPECT_EQ(fate.fate(), linear ? TensorFate::QUANTIZED : TensorFate::COPIED) << name;
  }
  EXPECT_THAT(Warnings(plan), UnorderedElementsAre(HasSubstr("not known"), AllOf(HasSubstr("stacks"), HasSubstr("experts.mlp.w1"))));
  EXPECT_THAT(MakePlan(QuantizeJob(source.path(), "{scheme: W4A16, group_size: 32, targets: [Linear, routed_experts]}"), false),
              StatusIs(kInvalid, AllOf(HasSubstr("layout is not known"), HasSubstr("experts.mlp.w1"))));
}

TEST(QuantizePlan, WeightsStoredTransposedAreRefused) {
  for (const char* type : {"gpt2", "nobody_knows"}) {
    TestCheckpoint source(type);
    source.Add("wte.weight", {64, 128});
    source.Add("h.0.attn.c_attn.weight", {128, 384});
    source.Add("h.0.attn.c_attn.bias", {384});
    source.Add("h.0.mlp.other.weight", {384, 128});
    source.Add("h.0.mlp.other.bias", {384});
    source.Write();
    const auto plan_without = [&](absl::string_view ignore) {
      return MakePlan(QuantizeJob(source.path(), absl::StrCat("{scheme: W4A16, group_size: 32, ignore: [", ignore, "]}")), false);
    };
    const bool known = type == absl::string_view("gpt2");
    const absl::Status status = plan_without("").status();
    EXPECT_THAT(status, StatusIs(kInvalid, AllOf(HasSubstr("[in, out]"), HasSubstr("h.0.attn.c_attn"), Not(HasSubstr("wte")))));
    EXPECT_EQ(absl::StrContains(status.message(), "mlp.other"), known);
    EXPECT_EQ(plan_without("'re:.*c_attn'").ok(), !known) << type;
  }
}

TEST(QuantizePlan, EffectiveBitsCountGlobalScales) {
  TestCheckpoint source("llama");
  source.Add("model.layers.0.mlp.down_proj.weight", {64, 128});
  source.Write();
  const Plan plan = PlanOf(source.path(), "{scheme: NVFP4A16}");
  ASSERT_EQ(plan.summary.effective_bits_size(), 2);
  EXPECT_EQ(plan.summary.effective_bits(0).bits(), 4.5 + 32.0 / (64 * 128));
}

TEST(QuantizePlan, TensorSchemesSayWhichObserversThereAre) {
  TestCheckpoint source("llama");
  source.AddDenseLayer(0, 64, 128);
  source.Write();
  quern::v1::JobSpec job = QuantizeJob(source.path(), "");
  job.mutable_quantize()->set_observer("MSE");
  job.mutable_quantize()->set_scheme("FP8_BLOCK");
  EXPECT_THAT(MakePlan(job, false), IsOk());
  job.mutable_quantize()->set_scheme("MXFP4A16");
  EXPECT_THAT(MakePlan(job, false), StatusIs(kInvalid, AllOf(HasSubstr("is minmax"), HasSubstr("NVFP4"))));
  QUERN_EXPECT_OK(MakePlan(QuantizeJob(source.path(), "{scheme: W4A16, group_size: 32, observer: Memoryless_MSE}"), false));
  EXPECT_THAT(MakePlan(QuantizeJob(source.path(), "weights: {num_bits: 8, type: float, strategy: tensor, observer: mse}"), false),
              StatusIs(kInvalid, AllOf(HasSubstr("is minmax"), HasSubstr("FP8_BLOCK"))));
}

TEST(QuantizePlan, MixtralKeepsItsNames) {
  TestCheckpoint source("mixtral");
  for (int expert = 0; expert < 2; ++expert) {
    for (const char* leaf : {"w1", "w2", "w3"})
      source.Add(absl::StrCat("model.layers.0.block_sparse_moe.experts.", expert, ".", leaf, ".weight"), {64, 64});
  }
  source.Add("model.layers.0.block_sparse_moe.gate.weight", {2, 64});
  source.Write();
  const Plan plan = PlanOf(source.path(), "{scheme: W4A16, group_size: 32, targets: [routed_experts]}");
  EXPECT_THAT(plan.summary.quantization_config(), HasSubstr("re:.*\\\\.block_sparse_moe\\\\.experts\\\\.\\\\d+\\\\.("));
  EXPECT_THAT(Ignored(plan), ElementsAre("model.layers.0.block_sparse_moe.gate", "model.layers.0.mlp.gate"));
  EXPECT_EQ(plan.tasks[0].write_shard().units(0).quantize().outputs(0).name(),
            "model.layers.0.block_sparse_moe.experts.0.w1.weight_packed");
}

TEST(QuantizePlan, OtherDTypesPassThrough) {
  TestCheckpoint source("llama");
  source.AddDenseLayer(0, 64, 128);
  source.Add({"model.a", {3}, DType::kF8E8M0});
  source.Add({"model.b", {2, 8}, DType::kF4});
  source.Add({"model.c", {}, DType::kI64});
  source.Add({"model.d", {5}, DType::kBool});
  source.Write();
  PlanOf(source.path(), "{scheme: W4A16, group_size: 32}");
}

TEST(QuantizePlan, OddShapes) {
  TestCheckpoint source("llama");
  source.Add("model.layers.0.a.weight", {1, 96});
  source.Add("model.layers.0.b.weight", {3, 256});
  source.Add({"model.layers.0.c.weight", {5, 32}, DType::kF32});
  source.Add({"model.layers.0.d.weight", {5, 32}, DType::kF16});
  source.Write();
  PlanOf(source.path(), "{scheme: W3A16_ASYM, group_size: 32}");
  PlanOf(source.path(), "{scheme: W5A16_ASYM, group_size: channel}");
}

TEST(QuantizePlan, GitLfsPointerIsToldAtSubmit) {
  TestCheckpoint source("llama");
  source.AddDenseLayer(0, 64, 128);
  source.Write();
  WriteText(JoinPath(source.path(), "model.safetensors"),
            "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize "
            "12345\n");
  EXPECT_THAT(MakePlan(QuantizeJob(source.path(), "{scheme: W4A16, group_size: 32}"), true),
              StatusIs(kInvalid, HasSubstr("Git-LFS pointer")));
  EXPECT_THAT(MakeIdentity(QuantizeJob(source.path(), "{scheme: W4A16, group_size: 32}")),
              StatusIs(kInvalid, HasSubstr("Git-LFS pointer")));
}

TEST(QuantizePlan, EveryMissingFileAndTensorIsListed) {
  TestCheckpoint source("llama");
  source.AddDenseLayer(0, 64, 128);
  source.EndShard("one.safetensors");
  source.AddDenseLayer(1, 64, 128);
  source.EndShard("two.safetensors");
  source.Write();
  const std::string index = JoinPath(source.path(), "model.safetensors.index.json");
  QUERN_ASSERT_OK_AND_ASSIGN(std::string text, ReadFileToString(index));
  text.replace(text.find("\"model.layers.0.input_layernorm.weight\""), 1, "\"x");
  WriteText(index, text);
  QUERN_ASSERT_OK(RemoveFile(JoinPath(source.path(), "two.safetensors")));
  EXPECT_THAT(MakePlan(QuantizeJob(source.path(), "{scheme: W4A16, group_size: 32}"), false),
              StatusIs(kInvalid, AllOf(HasSubstr("two.safetensors"), HasSubstr("xmodel.layers.0.input_layernorm.weight"))));
}

TEST(QuantizePlan, BadRequests) {
  EXPECT_THAT(MakePlan(JobSpec(), false), StatusIs(absl::StatusCode::kUnimplemented));
  JobSpec job;
  job.set_operation(quern::v1::QUANTIZE);
  EXPECT_THAT(MakePlan(job, false), StatusIs(kInvalid));
  EXPECT_THAT(MakePlan(QuantizeJob("/nonexistent/x", "scheme: W4A16"), false), StatusIs(absl::StatusCode::kNotFound));
  job = QuantizeJob(kMicro, "scheme: W4A16");
  job.mutable_quantize()->set_export_format("gguf");
  EXPECT_THAT(MakePlan(job, false), StatusIs(kInvalid, HasSubstr("gguf")));
}

TEST(Identity, SaysWhatChanged) {
  TestCheckpoint source("llama");
  source.AddDenseLayer(0, 64, 128);
  source.Write();
  WriteText(JoinPath(source.path(), "tokenizer.json"), "{}");
  JobSpec job = QuantizeJob(source.path(), "{scheme: W4A16, group_size: 32}");
  QUERN_ASSERT_OK_AND_ASSIGN(const quern::v1::PlanSummary first, MakeIdentity(job));
  QUERN_ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(job, true));
  EXPECT_EQ(plan.summary.identity(), first.identity());
  EXPECT_EQ(IdentityDifference(plan.summary, first), "");
  EXPECT_EQ(first.identity().size(), 32u);

  job.mutable_quantize()->set_memory(kGiB);
  job.mutable_quantize()->set_reader("mmap");
  job.mutable_quantize()->set_verify_source(true);
  QUERN_ASSERT_OK_AND_ASSIGN(quern::v1::PlanSummary now, MakeIdentity(job));
  EXPECT_EQ(now.identity(), first.identity()) << "what may change on resume";
  // The weights are to be compared as a whole: that needs digests on both sides.
  EXPECT_THAT(IdentityDifference(first, now), HasSubstr("recorded no digests of the whole source"));
  EXPECT_EQ(IdentityDifference(now, now), "");
  EXPECT_EQ(IdentityDifference(now, first), "");

  const auto difference = [&](const JobSpec& other) {
    const absl::StatusOr<quern::v1::PlanSummary> identity = MakeIdentity(other);
    EXPECT_THAT(identity, IsOk());
    EXPECT_NE(identity->identity(), first.identity());
    return IdentityDifference(first, *identity);
  };
  EXPECT_THAT(difference(QuantizeJob(source.path(), "{scheme: W4A16, group_size: 64}")), HasSubstr("recipe changed"));
  JobSpec shards = QuantizeJob(source.path(), "{scheme: W4A16, group_size: 32}");
  shards.mutable_quantize()->set_max_shard_size(kGiB);
  EXPECT_THAT(difference(shards), HasSubstr("max_shard_size changed from 2 GiB to 1 GiB"));

  const JobSpec same = QuantizeJob(source.path(), "{scheme: W4A16, group_size: 32}");
  WriteText(JoinPath(source.path(), "tokenizer.json"), "{ }");
  EXPECT_THAT(difference(same), HasSubstr("copied beside the weights changed"));
  WriteText(JoinPath(source.path(), "tokenizer.json"), "{}");

  // Other weights, the same header and size.
  const std::string shard = JoinPath(source.path(), "model.safetensors");
  QUERN_ASSERT_OK_AND_ASSIGN(std::string bytes, ReadFileToString(shard));
  for (size_t i = bytes.size() / 2; i < bytes.size(); ++i) bytes[i] = 1;
  WriteText(shard, bytes);
  EXPECT_THAT(difference(same), AllOf(HasSubstr("source model.safetensors changed"), Not(HasSubstr("recipe"))));
}

TEST(SynthesizePlan, SizesAreExact) {
  JobSpec job;
  job.set_operation(quern::v1::SYNTHESIZE);
  quern::v1::SynthesizeSpec& spec = *job.mutable_synthesize();
  spec.set_family("laguna");
  spec.set_layers(3);
  spec.set_experts(8);
  spec.set_hidden(256);
  spec.set_intermediate(64);
  spec.set_vocab(512);
  spec.set_seed(7);
  spec.set_max_shard_size(kMiB);
  QUERN_ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(job, false));
  EXPECT_GT(plan.tasks.size(), 1u);
  EXPECT_THAT(plan.summary.synthetic_config(), HasSubstr("\"laguna\""));
  uint64_t sum = 0;
  for (const quern::v1::TaskSpec& task : plan.tasks) {
    const quern::v1::WriteShard& work = task.write_shard();
    QUERN_EXPECT_OK(checkpoint::ParseSafetensorsHeader(absl::string_view(work.header()).substr(8), work.file_size(), task.label()));
    uint64_t next = work.header().size();
    for (const quern::v1::ShardUnit& unit : work.units()) {
      ASSERT_TRUE(unit.has_generate());
      EXPECT_EQ(unit.generate().output().offset(), next);
      next += unit.generate().output().size();
      EXPECT_EQ(unit.generate().seed(), 7u);
      EXPECT_THAT(unit.generate().distribution(), AnyOf("normal", "ones", "zeros"));
    }
    EXPECT_EQ(next, work.file_size());
    sum += work.file_size();
  }
  EXPECT_EQ(plan.summary.output_bytes(), sum);
  QUERN_ASSERT_OK_AND_ASSIGN(const quern::v1::PlanSummary identity, MakeIdentity(job));
  EXPECT_EQ(identity.identity(), plan.summary.identity());
  spec.set_seed(8);
  QUERN_ASSERT_OK_AND_ASSIGN(const quern::v1::PlanSummary other, MakeIdentity(job));
  EXPECT_NE(other.identity(), identity.identity());
  spec.set_dtype("I8");
  EXPECT_THAT(MakePlan(job, false), StatusIs(kInvalid, HasSubstr("BF16, F16 or F32")));
  spec.set_dtype("BF16");
  spec.set_family("gpt");
  EXPECT_THAT(MakePlan(job, false), StatusIs(kInvalid, HasSubstr("laguna")));
}

TEST(Inspect, CountsWhatIsThere) {
  QUERN_ASSERT_OK_AND_ASSIGN(const quern::v1::InspectCheckpointResponse response, Inspect(kMicro));
  EXPECT_EQ(response.model_type(), "laguna");
  EXPECT_EQ(response.files(), 3u);
  EXPECT_EQ(response.quantization(), "");
  ASSERT_EQ(response.layers_size(), 5);
  EXPECT_EQ(response.layers(0).key(), "");
  EXPECT_EQ(response.layers(4).key(), "3");
  ASSERT_EQ(response.dtypes_size(), 1);
  EXPECT_EQ(response.dtypes(0).parameters(), response.parameters());
  uint64_t tensors = 0, bytes = 0;
  for (const auto& role : response.roles()) {
    tensors += role.tensors();
    bytes += role.bytes();
  }
  EXPECT_EQ(tensors, response.tensors());
  EXPECT_EQ(bytes, 2 * response.parameters());
}

TEST(Inspect, WhatSaysHowWeightsAreStoredIsNoParameter) {
  TestCheckpoint source("deepseek_v4");
  source.Add({"layers.0.attn.wq_b.weight", {256, 128}, DType::kF8E4M3});
  source.Add({"layers.0.attn.wq_b.scale", {2, 1}, DType::kF8E8M0});
  source.Add({"layers.0.attn.wo.weight", {256, 128}, DType::kI8});
  for (const char* name : {"SCB", "pre_quant_scale", "input_zero_point", "output_scale"}) {
    source.Add({absl::StrCat("layers.0.attn.wo.", name), {256}, DType::kF32});
  }
  source.Add("layers.0.ffn.gate.scale", {64});  // one that the model learned
  source.Write();
  QUERN_ASSERT_OK_AND_ASSIGN(const quern::v1::InspectCheckpointResponse response, Inspect(source.path()));
  EXPECT_EQ(response.parameters(), 2u * 256 * 128 + 64);
}

TEST(Inspect, UnknownTypesAndSkippedFilesAreTold) {
  TestCheckpoint source("some_new_model");
  source.AddDenseLayer(0, 64, 128);
  source.Write();
  WriteText(JoinPath(source.path(), "other.safetensors"), "x");
  QUERN_ASSERT_OK_AND_ASSIGN(const quern::v1::InspectCheckpointResponse response, Inspect(source.path()));
  EXPECT_THAT(response.warnings(), ElementsAre(HasSubstr("some_new_model"), HasSubstr("other.safetensors")));
}

}  // namespace
}  // namespace quern::daemon
