#include <algorithm>
#include <set>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/task_memory.h"
#include "checkpoint/family.h"
#include "checkpoint/model_config.h"
#include "checkpoint/synthetic.h"
#include "daemon/planner/disk_estimate.h"
#include "daemon/planner/module_names.h"
#include "daemon/planner/plans.h"
#include "daemon/planner/shard_layout.h"
#include "daemon/planner/shard_writer.h"
#include "daemon/planner/source_evidence.h"
#include "quant/numerics_version.h"

namespace quern::daemon {
namespace {

absl::StatusOr<checkpoint::SyntheticOptions> OptionsOf(const quern::v1::SynthesizeSpec& spec) {
  checkpoint::SyntheticOptions options;
  options.family = spec.family();
  options.layers = spec.layers();
  options.experts = spec.experts();
  options.hidden = spec.hidden();
  options.intermediate = spec.intermediate();
  options.vocab = spec.vocab();
  if (!spec.dtype().empty()) {
    QUERN_ASSIGN_OR_RETURN(options.dtype, ParseDType(spec.dtype()));
    if (options.dtype != DType::kBF16 && options.dtype != DType::kF16 && options.dtype != DType::kF32) {
      return absl::InvalidArgumentError(absl::StrCat("synthetic weights are BF16, F16 or F32, not ", spec.dtype()));
    }
  }
  return options;
}

}  // namespace

absl::StatusOr<quern::v1::PlanSummary> SynthesizeIdentity(const quern::v1::SynthesizeSpec& spec) {
  QUERN_ASSIGN_OR_RETURN(const checkpoint::SyntheticOptions options, OptionsOf(spec));
  quern::v1::PlanSummary summary;
  summary.set_max_shard_size(spec.max_shard_size() > 0 ? spec.max_shard_size() : kDefaultMaxShardSize);
  summary.set_numerics_version(quant::kNumericsVersion);
  summary.set_identity(
      IdentityOf(summary, absl::StrCat("synthesize ", options.family, " layers=", options.layers, " experts=", options.experts,
                                       " hidden=", options.hidden, " intermediate=", options.intermediate, " vocab=", options.vocab,
                                       " dtype=", DTypeName(options.dtype), " seed=", spec.seed())));
  return summary;
}

absl::StatusOr<Plan> PlanSynthesize(const quern::v1::SynthesizeSpec& spec) {
  Plan plan;
  QUERN_ASSIGN_OR_RETURN(plan.summary, SynthesizeIdentity(spec));
  QUERN_ASSIGN_OR_RETURN(const checkpoint::SyntheticOptions options, OptionsOf(spec));
  QUERN_ASSIGN_OR_RETURN(const checkpoint::SyntheticModel model, checkpoint::DescribeSynthetic(options));
  QUERN_ASSIGN_OR_RETURN(const checkpoint::ModelConfig config, checkpoint::ParseModelConfig(model.config, "config.json"));
  const checkpoint::Family& family = checkpoint::Family::For(config);
  plan.summary.set_model_type(config.model_type);
  plan.summary.set_synthetic_config(model.config);

  std::vector<LayoutBlock> blocks;
  std::vector<std::vector<std::pair<std::string, size_t>>> members;  // of blocks: (natural key, tensor)
  absl::flat_hash_map<std::string, size_t> by_set;
  for (size_t i = 0; i < model.tensors.size(); ++i) {
    const checkpoint::SyntheticTensor& tensor = model.tensors[i];
    const checkpoint::ModuleIdentity identity = family.Identify(tensor.name, config);
    const std::string& set = identity.fused_set.empty() ? identity.module : identity.fused_set;
    const size_t index = by_set.try_emplace(set, blocks.size()).first->second;
    std::string key = NaturalKey(tensor.name);
    if (index == blocks.size()) {
      blocks.emplace_back();
      members.emplace_back();
      blocks.back().place = PlaceOf(identity, config);
      blocks.back().natural_key = key;
    }
    LayoutBlock& block = blocks[index];
    if (key < block.natural_key) block.natural_key = key;
    members[index].emplace_back(std::move(key), i);
    block.bytes += TensorBytes(tensor.dtype, tensor.shape);
    block.tensors += 1;
    block.header_bytes += HeaderEntryBound(tensor.name, tensor.shape.size());
  }

  const std::vector<std::vector<size_t>> shards = LayOutShards(blocks, plan.summary.max_shard_size());
  plan.tasks.reserve(shards.size());
  for (size_t s = 0; s < shards.size(); ++s) {
    quern::v1::TaskSpec& task = plan.tasks.emplace_back();
    task.set_index(static_cast<uint32_t>(s));
    task.set_label(ShardName(s, shards.size()));
    ShardWriter writer(task);
    std::set<uint32_t> layers;
    for (size_t b : shards[s]) {
      if (blocks[b].place.phase == Phase::kLayer) layers.insert(blocks[b].place.layer);
      std::sort(members[b].begin(), members[b].end());
      for (const auto& [key, i] : members[b]) {
        const checkpoint::SyntheticTensor& tensor = model.tensors[i];
        quern::v1::GenerateUnit& unit = *writer.AddUnit()->mutable_generate();
        unit.set_seed(spec.seed());
        unit.set_distribution(tensor.distribution);
        unit.set_standard_deviation(tensor.standard_deviation);
        writer.Place({tensor.name, tensor.dtype, tensor.shape, TensorBytes(tensor.dtype, tensor.shape)}, unit.mutable_output());
      }
    }
    task.mutable_layers()->Add(layers.begin(), layers.end());
    const uint64_t tensors = writer.Finish();
    quern::v1::ShardSummary& shard = *plan.summary.add_shards();
    shard.set_file(task.label());
    shard.set_size(task.bytes_to_write());
    *shard.mutable_layers() = task.layers();
    shard.set_tensors(tensors);
    plan.summary.set_output_bytes(plan.summary.output_bytes() + task.bytes_to_write());
  }
  plan.summary.set_minimum_memory(kMinimumTaskMemory);
  plan.summary.set_disk_needed(plan.summary.output_bytes() + EstimateDiskBesideFiles(plan, model.config.size()));
  return plan;
}

}  // namespace quern::daemon
