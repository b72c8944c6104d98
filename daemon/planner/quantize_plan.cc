#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/byte_size.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "base/task_memory.h"
#include "daemon/planner/disk_estimate.h"
#include "daemon/planner/emitted_config.h"
#include "daemon/planner/module_names.h"
#include "daemon/planner/plans.h"
#include "daemon/planner/selection.h"
#include "daemon/planner/shard_layout.h"
#include "daemon/planner/shard_writer.h"
#include "daemon/planner/source_evidence.h"

namespace quern::daemon {
namespace {

using checkpoint::Role;
using checkpoint::RoleName;
using checkpoint::TensorInfo;
using quern::v1::PlanSummary;

constexpr uint64_t kDefaultMemory = 512 * kMiB;
constexpr size_t kRoles = static_cast<size_t>(Role::kOther) + 1;

// What a scheme stores for a weight of one dtype and shape.
struct StoredForm {
  std::vector<quant::Region> regions;
  std::vector<uint64_t> region_bytes;
  double bits = 0;          // a weight
  bool two_passes = false;  // even in bands of whole rows
};

class StoredForms {
 public:
  explicit StoredForms(std::string export_format) : export_format_(std::move(export_format)) {}

  absl::StatusOr<const StoredForm*> Get(const quant::Scheme* scheme, const TensorInfo& info) {
    const auto key = std::make_tuple(scheme, info.dtype, info.shape[0], info.shape[1]);
    const auto found = forms_.find(key);
    if (found != forms_.end()) return &found->second;
    const quant::Shape2D shape{static_cast<int64_t>(info.shape[0]), static_cast<int64_t>(info.shape[1])};
    StoredForm form;
    QUERN_ASSIGN_OR_RETURN(form.regions, scheme->Regions(info.dtype, shape, export_format_));
    for (const quant::Region& region : form.regions) form.region_bytes.push_back(TensorBytes(region.dtype, region.shape));
    form.bits = scheme->EffectiveBits(info.dtype, shape);
    form.two_passes = scheme->NeedsStatistics(shape, {std::min<int64_t>(shape.rows, 32), shape.cols});
    return &forms_.emplace(key, std::move(form)).first->second;
  }

 private:
  std::string export_format_;
  std::map<std::tuple<const quant::Scheme*, DType, uint64_t, uint64_t>, StoredForm> forms_;
};

struct Bits {
  uint64_t weights = 0;
  double bits = 0;
};

class QuantizePlanner {
 public:
  QuantizePlanner(QuantizeInputs inputs, Plan& plan) : inputs_(std::move(inputs)), plan_(plan), forms_(inputs_.export_format) {}

  absl::Status Run(uint64_t memory) {
    QUERN_ASSIGN_OR_RETURN(selection_, SelectModules(checkpoint(), inputs_.recipe));
    SortTensorsOfModules();
    QUERN_RETURN_IF_ERROR(MakeBlocks());
    const std::vector<std::vector<size_t>> shards = LayOutShards(blocks_, inputs_.max_shard_size);
    plan_.tasks.reserve(shards.size());
    for (size_t i = 0; i < shards.size(); ++i) {
      QUERN_RETURN_IF_ERROR(Annotate(MakeTask(shards[i], ShardName(i, shards.size())), ShardName(i, shards.size())));
    }
    QUERN_RETURN_IF_ERROR(EmitConfig());
    return Summarize(memory);
  }

 private:
  const checkpoint::Checkpoint& checkpoint() const { return inputs_.checkpoint; }
  const TensorInfo& Info(size_t tensor) const { return *checkpoint().tensors()[tensor].info; }
  PlanSummary& summary() { return plan_.summary; }

  // A weight comes first, then its module's other tensors by name.
  void SortTensorsOfModules() {
    for (SelectedModule& module : selection_.modules) {
      if (module.tensors.size() < 2) continue;
      std::sort(module.tensors.begin(), module.tensors.end(), [&](size_t a, size_t b) {
        const bool a_first = a == module.matrix, b_first = b == module.matrix;
        return a_first != b_first ? a_first : Info(a).name < Info(b).name;
      });
    }
  }

  absl::Status MakeBlocks() {
    absl::flat_hash_map<std::string, size_t> by_set;
    for (size_t m = 0; m < selection_.modules.size(); ++m) {
      const SelectedModule& module = selection_.modules[m];
      size_t index = blocks_.size();
      if (!module.identity.fused_set.empty()) index = by_set.try_emplace(module.identity.fused_set, index).first->second;
      std::string key = NaturalKey(module.identity.module);
      if (index == blocks_.size()) {
        blocks_.emplace_back();
        members_.emplace_back();
        blocks_.back().place = PlaceOf(module.identity, checkpoint().config());
        blocks_.back().natural_key = key;
      }
      LayoutBlock& block = blocks_[index];
      if (key < block.natural_key) block.natural_key = key;
      members_[index].emplace_back(std::move(key), m);
      for (size_t tensor : module.tensors) {
        const TensorInfo& info = Info(tensor);
        if (module.scheme == nullptr || tensor != module.matrix) {
          block.bytes += info.bytes();
          block.tensors += 1;
          block.header_bytes += HeaderEntryBound(info.name, info.shape.size());
          continue;
        }
        absl::StatusOr<const StoredForm*> form = forms_.Get(module.scheme, info);
        if (!form.ok()) return Annotate(form.status(), info.name);
        for (size_t r = 0; r < (*form)->regions.size(); ++r) {
          const quant::Region& region = (*form)->regions[r];
          block.bytes += (*form)->region_bytes[r];
          block.tensors += 1;
          block.header_bytes += HeaderEntryBound(module.identity.module, region.shape.size()) + 1 + region.suffix.size();
        }
      }
    }
    for (auto& members : members_) std::sort(members.begin(), members.end());
    return absl::OkStatus();
  }

  absl::Status MakeTask(const std::vector<size_t>& blocks, const std::string& label) {
    quern::v1::TaskSpec& task = plan_.tasks.emplace_back();
    task.set_index(static_cast<uint32_t>(plan_.tasks.size() - 1));
    task.set_label(label);
    TaskSources sources(checkpoint(), summary(), task);
    ShardWriter writer(task);
    std::set<uint32_t> layers;
    uint64_t to_read = 0;
    for (size_t block : blocks) {
      if (blocks_[block].place.phase == Phase::kLayer) layers.insert(blocks_[block].place.layer);
      for (const auto& [key, m] : members_[block]) {
        const SelectedModule& module = selection_.modules[m];
        for (size_t tensor : module.tensors) {
          if (module.scheme != nullptr && tensor == module.matrix) {
            QUERN_RETURN_IF_ERROR(AddQuantized(module, sources, writer, to_read));
          } else {
            AddCopied(module, tensor, sources, writer);
            to_read += Info(tensor).bytes();
          }
        }
      }
    }
    task.mutable_layers()->Add(layers.begin(), layers.end());
    task.set_bytes_to_read(to_read);
    const uint64_t tensors = writer.Finish();
    quern::v1::ShardSummary& shard = *summary().add_shards();
    shard.set_file(label);
    shard.set_size(task.write_shard().file_size());
    *shard.mutable_layers() = task.layers();
    shard.set_tensors(tensors);
    return absl::OkStatus();
  }

  absl::Status AddQuantized(const SelectedModule& module, TaskSources& sources, ShardWriter& writer, uint64_t& to_read) {
    const TensorInfo& info = Info(*module.matrix);
    QUERN_ASSIGN_OR_RETURN(const StoredForm* const form, forms_.Get(module.scheme, info));
    quern::v1::QuantizeUnit& unit = *writer.AddUnit()->mutable_quantize();
    unit.set_module(module.identity.module);
    *unit.mutable_weight() = sources.Matrix(checkpoint().tensors()[*module.matrix]);
    unit.set_scheme(SchemeText(module.scheme));
    unit.set_export_format(inputs_.export_format);
    for (size_t r = 0; r < form->regions.size(); ++r) {
      const quant::Region& region = form->regions[r];
      writer.Place({absl::StrCat(module.identity.module, ".", region.suffix), region.dtype, region.shape, form->region_bytes[r]},
                   unit.add_outputs());
    }
    unit.set_nonfinite(inputs_.recipe.nonfinite == NonfinitePolicy::kClamp ? "clamp" : "fail");
    unit.set_reason(module.reason);
    unit.set_role(std::string(RoleName(module.identity.role)));
    to_read += info.bytes() * (form->two_passes ? 2 : 1);
    Count(module.identity.role, info.elements(), form->bits);
    summary().set_quantized_tensors(summary().quantized_tensors() + 1);
    return absl::OkStatus();
  }

  void AddCopied(const SelectedModule& module, size_t tensor, TaskSources& sources, ShardWriter& writer) {
    const TensorInfo& info = Info(tensor);
    quern::v1::CopyUnit& unit = *writer.AddUnit()->mutable_copy();
    *unit.mutable_source() = sources.Bytes(checkpoint().tensors()[tensor]);
    writer.Place({info.name, info.dtype, info.shape, info.bytes()}, unit.mutable_output());
    const bool beside = module.scheme != nullptr || (module.matrix.has_value() && tensor != module.matrix);
    unit.set_reason(beside ? absl::StrCat("not a weight: shape [", absl::StrJoin(info.shape, ", "), "]") : module.reason);
    unit.set_role(std::string(RoleName(module.identity.role)));
    Count(module.identity.role, info.elements(), BitsPerElement(info.dtype));
    summary().set_copied_tensors(summary().copied_tensors() + 1);
  }

  void Count(Role role, uint64_t weights, double bits) {
    for (Bits* sum : {&bits_[static_cast<size_t>(role)], &all_bits_}) {
      sum->weights += weights;
      sum->bits += bits * static_cast<double>(weights);
    }
  }

  const std::string& SchemeText(const quant::Scheme* scheme) {
    std::string& text = scheme_texts_[scheme];
    if (text.empty()) text = scheme->spec().ToString();
    return text;
  }

  absl::Status EmitConfig() {
    std::vector<quant::SchemeSpec> schemes;
    absl::flat_hash_map<const quant::Scheme*, int> numbers;
    for (const RecipeGroup& group : inputs_.recipe.groups) {
      const auto used = [&](const SelectedModule& module) { return module.scheme != nullptr && module.scheme->spec() == group.scheme; };
      if (std::find(schemes.begin(), schemes.end(), group.scheme) != schemes.end()) continue;
      if (std::any_of(selection_.modules.begin(), selection_.modules.end(), used)) schemes.push_back(group.scheme);
    }
    std::vector<ConfigModule> modules;
    std::set<int> of_experts;
    for (const SelectedModule& module : selection_.modules) {
      if (!module.matrix.has_value()) continue;
      ConfigModule entry{module.identity.module, module.identity.transformers_name, module.identity.role,
                         module.identity.expert.has_value(), -1};
      if (module.scheme != nullptr) {
        const auto [number, added] = numbers.try_emplace(module.scheme, 0);
        if (added) {
          number->second = static_cast<int>(std::find(schemes.begin(), schemes.end(), module.scheme->spec()) - schemes.begin());
        }
        entry.scheme = number->second;
      }
      if (module.identity.role == Role::kRoutedExperts) of_experts.insert(entry.scheme);
      modules.push_back(std::move(entry));
    }
    if (of_experts.size() > 1) {
      summary().add_warnings(
          "routed experts differ in their scheme between layers: vLLM loads that, transformers takes one scheme for all of them and does "
          "not");
    }
    QUERN_ASSIGN_OR_RETURN(*summary().mutable_quantization_config(), BuildQuantizationConfig(schemes, modules));
    return absl::OkStatus();
  }

  absl::Status Summarize(uint64_t memory) {
    PlanSummary& out = summary();
    for (const quern::v1::PatternMatch& pattern : selection_.patterns) *out.add_patterns() = pattern;
    for (const std::string& warning : selection_.warnings) out.add_warnings(warning);
    for (const auto& [name, why] : checkpoint().skipped_files()) {
      if (absl::EndsWith(name, ".index.json")) continue;  // an output has its own
      out.add_warnings(absl::StrCat("not copied: ", name, " (", why, ")"));
    }
    for (const std::string& name : checkpoint().side_files()) {
      out.add_side_files(name);
      QUERN_ASSIGN_OR_RETURN(const uint64_t size, FileSize(JoinPath(checkpoint().directory(), name)));
      out.set_disk_needed(out.disk_needed() + size);
    }
    for (const checkpoint::Shard& shard : checkpoint().shards()) out.set_source_bytes(out.source_bytes() + shard.size);
    for (const quern::v1::TaskSpec& task : plan_.tasks) {
      out.set_output_bytes(out.output_bytes() + task.bytes_to_write());
      out.set_minimum_memory(std::max<uint64_t>(out.minimum_memory(), task.minimum_memory()));
    }
    out.set_peak_memory(memory > 0 ? memory : kDefaultMemory);
    out.set_disk_needed(out.disk_needed() + out.output_bytes() + EstimateDiskBesideFiles(plan_, checkpoint().config().text.size()) +
                        EstimateSpill(plan_, out.peak_memory()));
    for (size_t role = 0; role < kRoles; ++role) {
      if (bits_[role].weights > 0) AddBits(std::string(RoleName(static_cast<Role>(role))), bits_[role]);
    }
    if (all_bits_.weights > 0) AddBits("", all_bits_);
    return absl::OkStatus();
  }

  void AddBits(std::string role, const Bits& bits) {
    quern::v1::RoleBits& entry = *summary().add_effective_bits();
    entry.set_role(std::move(role));
    entry.set_weights(bits.weights);
    entry.set_bits(bits.bits / static_cast<double>(bits.weights));
  }

  QuantizeInputs inputs_;
  Plan& plan_;
  StoredForms forms_;
  Selection selection_;
  std::vector<LayoutBlock> blocks_;
  std::vector<std::vector<std::pair<std::string, size_t>>> members_;  // of blocks: (natural key, module)
  absl::flat_hash_map<const quant::Scheme*, std::string> scheme_texts_;
  std::array<Bits, kRoles> bits_;
  Bits all_bits_;
};

}  // namespace

absl::StatusOr<Plan> PlanQuantize(const quern::v1::QuantizeSpec& spec, bool with_fingerprints) {
  Plan plan;
  QUERN_ASSIGN_OR_RETURN(QuantizeInputs inputs, OpenQuantize(spec, with_fingerprints, plan.summary));
  QUERN_RETURN_IF_ERROR(QuantizePlanner(std::move(inputs), plan).Run(spec.memory()));
  return plan;
}

}  // namespace quern::daemon
