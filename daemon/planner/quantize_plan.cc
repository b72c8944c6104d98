#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/byte_size.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "base/task_memory.h"
#include "daemon/planner/disk_estimate.h"
#include "daemon/planner/emitted_config.h"
#include "daemon/planner/loader_notes.h"
#include "daemon/planner/minimum_memory.h"
#include "daemon/planner/modelopt_config.h"
#include "daemon/planner/module_names.h"
#include "daemon/planner/plans.h"
#include "daemon/planner/selection.h"
#include "daemon/planner/shard_layout.h"
#include "daemon/planner/shard_writer.h"
#include "daemon/planner/source_evidence.h"
#include "daemon/planner/source_modules.h"

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
  absl::StatusOr<const StoredForm*> Get(const quant::Scheme* scheme, const SourceWeight& weight) {
    const auto key = std::make_tuple(scheme, weight.dtype, weight.rows, weight.cols);
    const auto found = forms_.find(key);
    if (found != forms_.end()) return &found->second;
    const quant::Shape2D shape{static_cast<int64_t>(weight.rows), static_cast<int64_t>(weight.cols)};
    StoredForm form;
    QUERN_ASSIGN_OR_RETURN(form.regions, scheme->Regions(weight.dtype, shape));
    for (const quant::Region& region : form.regions) form.region_bytes.push_back(TensorBytes(region.dtype, region.shape));
    form.bits = scheme->EffectiveBits(weight.dtype, shape);
    form.two_passes = scheme->NeedsStatistics(shape, {std::min(shape.rows, scheme->RowMultiple()), shape.cols});
    return &forms_.emplace(key, std::move(form)).first->second;
  }

 private:
  std::map<std::tuple<const quant::Scheme*, DType, uint64_t, uint64_t>, StoredForm> forms_;
};

struct Bits {
  uint64_t weights = 0;
  double bits = 0;
};

// Tasks and summary of a selection. What a plan of quantization and one back to plain weights have in common.
class QuantizePlanner {
 public:
  QuantizePlanner(const checkpoint::Checkpoint& checkpoint, Selection selection, Plan& plan)
      : checkpoint_(checkpoint), selection_(std::move(selection)), plan_(plan) {}

  // `inputs` is null for plain weights.
  absl::Status Run(QuantizeInputs* inputs, uint64_t memory) {
    inputs_ = inputs;
    GatherSets();
    QUERN_RETURN_IF_ERROR(MakeBlocks());
    const std::vector<std::vector<size_t>> shards = LayOutShards(blocks_, summary().max_shard_size());
    plan_.tasks.reserve(shards.size());
    for (size_t i = 0; i < shards.size(); ++i) {
      QUERN_RETURN_IF_ERROR(MakeTask(shards[i], ShardName(i, shards.size())));
    }
    std::vector<std::string> missing;
    for (const auto& [problem, modules] : without_inputs_) {
      missing.push_back(absl::StrCat(problem, " ", modules.size(), " modules:\n  ", absl::StrJoin(SummarizeNames(modules), "\n  ")));
    }
    if (!missing.empty()) return absl::InvalidArgumentError(absl::StrJoin(missing, "\n"));
    AddDropped();
    if (inputs_ != nullptr) QUERN_RETURN_IF_ERROR(EmitConfig());
    return Summarize(memory);
  }

 private:
  const checkpoint::Checkpoint& checkpoint() const { return checkpoint_; }
  const TensorInfo& Info(size_t tensor) const { return *checkpoint().tensors()[tensor].info; }
  PlanSummary& summary() { return plan_.summary; }

  // Modules whose scale is that of a set, by the set. Their other tensors by name.
  void GatherSets() {
    for (size_t m = 0; m < selection_.modules.size(); ++m) {
      SelectedModule& module = selection_.modules[m];
      std::sort(module.tensors.begin(), module.tensors.end(), [&](size_t a, size_t b) { return Info(a).name < Info(b).name; });
      if (module.scheme != nullptr && module.scheme->SharesSetScale()) sets_[SetOf(module)].push_back(m);
    }
  }

  // Modules that an engine loads as one matrix have the same input, and the engine keeps one scale of it.
  void WarnOfActivationRanges() {
    std::vector<std::string> sets;
    for (const auto& [set, range] : activation_ranges_) {
      if (range.first != range.second) sets.push_back(set);
    }
    if (sets.empty()) return;
    std::sort(sets.begin(), sets.end());
    summary().add_warnings(
        absl::StrCat("--activation-scales has different magnitudes for modules that an engine loads as one matrix, with one input; vLLM "
                     "keeps the largest scale it finds (of compressed-tensors' NVFP4 that is the smallest magnitude, which cuts larger "
                     "values off). Give each of these the largest of its set:\n  ",
                     absl::StrJoin(SummarizeNames(sets), "\n  ")));
  }

  // Scales that belong to no weight: of a KV cache, or left over from another format.
  void WarnOfOrphans() {
    std::vector<std::string> cache, left_over, strays;
    for (const SelectedModule& module : selection_.modules) {
      for (const size_t tensor : module.tensors) {
        const std::string& name = Info(tensor).name;
        absl::string_view parameter = name;
        if (!absl::ConsumePrefix(&parameter, absl::StrCat(module.identity.module, "."))) parameter.remove_prefix(name.rfind('.') + 1);
        if (IsCacheScale(parameter)) {
          cache.push_back(name);
        } else if (checkpoint::IsStorageParameter(parameter) && (parameter != "scale" || module.weight.has_value())) {
          left_over.push_back(name);
        }
      }
    }
    for (const size_t tensor : selection_.strays) strays.push_back(Info(tensor).name);
    const auto warn = [&](absl::string_view what, const std::vector<std::string>& names) {
      if (!names.empty()) summary().add_warnings(absl::StrCat(what, ":\n  ", absl::StrJoin(SummarizeNames(names), "\n  ")));
    };
    warn("scales of a KV cache or of attention are copied as they are, but the new quantization_config says nothing of them", cache);
    warn("scales that no weight is stored with are copied as they are; remove those that are left over, engines may use them", left_over);
    warn("tensors that say how weights in a quantized format are stored are dropped: the weights beside them are plain", strays);
  }

  static bool IsCacheScale(absl::string_view parameter) {
    static constexpr absl::string_view kNames[] = {"k_scale",    "v_scale",           "q_scale",      "kv_scale",
                                                   "prob_scale", "prob_output_scale", "k_zero_point", "v_zero_point"};
    return std::find(std::begin(kNames), std::end(kNames), parameter) != std::end(kNames);
  }

  static const std::string& SetOf(const SelectedModule& module) {
    return module.identity.scale_set.empty() ? module.identity.module : module.identity.scale_set;
  }

  absl::Status MakeBlocks() {
    absl::flat_hash_map<std::string, size_t> by_set;
    for (size_t m = 0; m < selection_.modules.size(); ++m) {
      const SelectedModule& module = selection_.modules[m];
      size_t index = blocks_.size();
      const std::string& set = module.stack != nullptr ? module.stack->block : module.identity.fused_set;
      if (!set.empty()) index = by_set.try_emplace(set, index).first->second;
      std::string key = NaturalKey(module.stack != nullptr ? module.stack->module : module.identity.module);
      if (index == blocks_.size()) {
        blocks_.emplace_back();
        members_.emplace_back();
        blocks_.back().place = PlaceOf(module.identity, checkpoint().config());
        blocks_.back().natural_key = key;
      }
      LayoutBlock& block = blocks_[index];
      if (key < block.natural_key) block.natural_key = key;
      members_[index].emplace_back(std::move(key), m);
      const auto add_copy = [&](size_t tensor) {
        const TensorInfo& info = Info(tensor);
        block.bytes += info.bytes();
        block.tensors += 1;
        block.header_bytes += HeaderEntryBound(info.name, info.shape.size());
      };
      for (size_t tensor : module.tensors) add_copy(tensor);
      if (!module.weight.has_value()) continue;
      if (module.scheme == nullptr) {
        add_copy(module.weight->tensor);
        continue;
      }
      absl::StatusOr<const StoredForm*> form = forms_.Get(module.scheme, *module.weight);
      if (!form.ok()) return Annotate(form.status(), module.identity.module);
      for (size_t r = 0; r < (*form)->regions.size(); ++r) {
        const quant::Region& region = (*form)->regions[r];
        block.bytes += (*form)->region_bytes[r];
        if (module.stack != nullptr) {
          if (module.slice.first != 0) continue;  // counted with the first of the stack
          block.header_bytes += HeaderEntryBound(module.stack->tensor, module.stack->shape.size());
          block.tensors += 1;
          continue;
        }
        block.tensors += 1;
        block.header_bytes += HeaderEntryBound(module.identity.module, region.shape.size()) + 1 + region.suffix.size();
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
    std::set<std::string> observed;  // sets whose statistics this task gathers
    uint64_t to_read = 0;
    for (size_t block : blocks) {
      if (blocks_[block].place.phase == Phase::kLayer) layers.insert(blocks_[block].place.layer);
      for (const auto& [key, m] : members_[block]) {
        const SelectedModule& module = selection_.modules[m];
        if (module.weight.has_value()) {
          if (module.scheme != nullptr) {
            QUERN_RETURN_IF_ERROR(AddQuantized(module, sources, task, writer, observed, to_read));
          } else {
            AddCopied(module, module.weight->tensor, sources, writer, to_read);
          }
        }
        for (size_t tensor : module.tensors) AddCopied(module, tensor, sources, writer, to_read);
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

  absl::Status AddQuantized(const SelectedModule& module, TaskSources& sources, quern::v1::TaskSpec& task, ShardWriter& writer,
                            std::set<std::string>& observed, uint64_t& to_read) {
    const SourceWeight& weight = *module.weight;
    const absl::StatusOr<const StoredForm*> found = forms_.Get(module.scheme, weight);
    if (!found.ok()) return Annotate(found.status(), module.identity.module);
    const StoredForm* const form = *found;
    quern::v1::QuantizeUnit& unit = *writer.AddUnit()->mutable_quantize();
    unit.set_module(module.identity.module);
    *unit.mutable_weight() = sources.Weight(weight);
    unit.set_scheme(SchemeText(module.scheme));
    for (size_t r = 0; r < form->regions.size(); ++r) {
      const quant::Region& region = form->regions[r];
      if (module.stack != nullptr) {
        AddToStack(module, region.dtype, writer, unit);
        continue;
      }
      writer.Place({absl::StrCat(module.identity.module, ".", region.suffix), region.dtype, region.shape, form->region_bytes[r]},
                   unit.add_outputs());
    }
    const bool clamp = inputs_ != nullptr && inputs_->recipe.nonfinite == NonfinitePolicy::kClamp;
    unit.set_nonfinite(clamp ? "clamp" : "fail");
    unit.set_reason(module.reason);
    unit.set_role(std::string(RoleName(module.identity.role)));
    to_read += weight.bytes();
    if (module.scheme->SharesSetScale()) {
      const std::vector<size_t>& members = sets_.at(SetOf(module));
      const bool first = observed.insert(SetOf(module)).second;
      unit.set_statistics_key(SetOf(module));
      for (size_t m : members) {
        const SourceWeight& member = *selection_.modules[m].weight;
        *unit.add_statistics_set() = sources.Weight(member);
        if (first) to_read += member.bytes();
      }
    } else if (form->two_passes) {
      to_read += weight.bytes();
    }
    Count(module.identity.role, weight.elements(), form->bits);
    if (module.dequantized) {
      summary().set_copied_tensors(summary().copied_tensors() + 1);
      return absl::OkStatus();
    }
    summary().set_quantized_tensors(summary().quantized_tensors() + 1);
    const absl::Status added = inputs_->module_inputs.AddTo(
        {module.identity.module, module.identity.transformers_name, weight.cols, weight.dtype}, *module.scheme, task, unit);
    if (added.ok() && unit.has_activation_amax()) {
      const auto [range, first] = activation_ranges_.try_emplace(SetOf(module), unit.activation_amax(), unit.activation_amax());
      range->second = std::minmax({range->second.first, range->second.second, unit.activation_amax()});
    }
    if (absl::IsNotFound(added)) {
      without_inputs_[std::string(added.message())].push_back(module.identity.module);
      return absl::OkStatus();
    }
    return added;
  }

  void AddToStack(const SelectedModule& module, DType dtype, ShardWriter& writer, quern::v1::QuantizeUnit& unit) {
    const StackedOutput& stack = *module.stack;
    if (module.slice.first == 0) {
      writer.Place({stack.tensor, dtype, stack.shape, TensorBytes(dtype, stack.shape)}, unit.add_outputs());
    } else {
      writer.PlaceAgain(unit.add_outputs());
    }
    const auto element = static_cast<uint64_t>(BytesPerElement(dtype));
    quern::v1::StackPlace& place = *unit.mutable_place();
    place.set_offset(module.slice.first * element);
    place.set_row_stride(static_cast<int64_t>(module.slice.row_stride * element));
    place.set_col_stride(static_cast<int64_t>(module.slice.col_stride * element));
  }

  void AddCopied(const SelectedModule& module, size_t tensor, TaskSources& sources, ShardWriter& writer, uint64_t& to_read) {
    const TensorInfo& info = Info(tensor);
    quern::v1::CopyUnit& unit = *writer.AddUnit()->mutable_copy();
    *unit.mutable_source() = sources.Bytes(checkpoint().tensors()[tensor]);
    writer.Place({info.name, info.dtype, info.shape, info.bytes()}, unit.mutable_output());
    const bool beside = module.weight.has_value() && tensor != module.weight->tensor;
    unit.set_reason(beside ? absl::StrCat("not a weight: shape [", absl::StrJoin(info.shape, ", "), "]") : module.reason);
    unit.set_role(std::string(RoleName(module.identity.role)));
    to_read += info.bytes();
    Count(module.identity.role, info.elements(), BitsPerElement(info.dtype));
    summary().set_copied_tensors(summary().copied_tensors() + 1);
  }

  // Tensors that say how a weight was stored, where it is stored anew.
  void AddDropped() {
    std::map<size_t, std::string> dropped;
    std::set<size_t> first;  // tensors that a plan's units name
    for (const SelectedModule& module : selection_.modules) {
      if (module.scheme != nullptr) first.insert(module.weight->tensor);
    }
    for (const SelectedModule& module : selection_.modules) {
      if (module.scheme == nullptr || module.weight->decoder == nullptr) continue;
      const std::string reason = absl::StrCat("says how ", module.identity.module, " was stored (",
                                              module.weight->decoder->spec().ToString(), "), which is stored anew");
      for (size_t tensor : module.storage) dropped.emplace(tensor, reason);
      for (const SourceRegion& region : module.weight->regions) {
        if (first.count(region.tensor) == 0) dropped.emplace(region.tensor, reason);
      }
    }
    for (const size_t tensor : selection_.strays) {
      dropped.emplace(tensor, "says how a weight in a quantized format is stored, and the one beside it is plain");
    }
    for (const auto& [tensor, reason] : dropped) {
      const TensorInfo& info = Info(tensor);
      quern::v1::TensorFate& fate = *summary().add_dropped();
      fate.set_tensor(info.name);
      fate.set_fate(quern::v1::TensorFate::DROPPED);
      fate.set_reason(reason);
      fate.set_dtype(std::string(DTypeName(info.dtype)));
      fate.mutable_shape()->Add(info.shape.begin(), info.shape.end());
      fate.set_role(std::string(RoleName(checkpoint::Family::For(checkpoint().config()).Identify(info.name, checkpoint().config()).role)));
    }
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
    for (const RecipeGroup& group : inputs_->recipe.groups) {
      const auto used = [&](const SelectedModule& module) { return module.quantized() && module.scheme->spec() == group.scheme; };
      if (std::find(schemes.begin(), schemes.end(), group.scheme) != schemes.end()) continue;
      if (std::any_of(selection_.modules.begin(), selection_.modules.end(), used)) schemes.push_back(group.scheme);
    }
    std::vector<ConfigModule> modules;
    const auto add = [&](const checkpoint::ModuleIdentity& identity, int scheme) {
      modules.push_back({identity.module, identity.transformers_name, identity.role, identity.expert.has_value(), scheme});
    };
    for (const SelectedModule& module : selection_.modules) {
      if (!module.weight.has_value()) continue;
      if (!module.quantized()) {
        add(module.identity, -1);
        continue;
      }
      const auto [number, added] = numbers.try_emplace(module.scheme, 0);
      if (added) {
        number->second = static_cast<int>(std::find(schemes.begin(), schemes.end(), module.scheme->spec()) - schemes.begin());
      }
      add(module.identity, number->second);
    }
    for (const checkpoint::ModuleIdentity& identity : selection_.unnamed) add(identity, -1);
    for (std::string& note : LoaderNotes(schemes, modules)) summary().add_warnings(std::move(note));
    for (std::string& warning : inputs_->module_inputs.Warnings()) summary().add_warnings(std::move(warning));
    WarnOfActivationRanges();
    if (inputs_->export_format == kModelOpt) {
      QUERN_ASSIGN_OR_RETURN(ModelOptConfigs configs, BuildModelOptConfigs(schemes, modules));
      summary().set_quantization_config(std::move(configs.quantization_config));
      summary().set_hf_quant_config(std::move(configs.hf_quant_config));
      return absl::OkStatus();
    }
    QUERN_ASSIGN_OR_RETURN(*summary().mutable_quantization_config(), BuildQuantizationConfig(schemes, modules));
    return absl::OkStatus();
  }

  absl::Status Summarize(uint64_t memory) {
    WarnOfOrphans();
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
    if (memory > 0 && memory < out.minimum_memory()) return TooLittleMemory(memory);
    out.set_peak_memory(memory > 0 ? memory : kDefaultMemory);
    out.set_disk_needed(out.disk_needed() + out.output_bytes() + EstimateDiskBesideFiles(plan_, checkpoint().config().text.size()) +
                        EstimateSpill(plan_, out.peak_memory()));
    for (size_t role = 0; role < kRoles; ++role) {
      if (bits_[role].weights > 0) AddBits(std::string(RoleName(static_cast<Role>(role))), bits_[role]);
    }
    if (all_bits_.weights > 0) AddBits("", all_bits_);
    return absl::OkStatus();
  }

  // Names the weight that needs the most.
  absl::Status TooLittleMemory(uint64_t memory) const {
    const quern::v1::QuantizeUnit* neediest = nullptr;
    uint64_t most = 0;
    for (const quern::v1::TaskSpec& task : plan_.tasks) {
      for (const quern::v1::ShardUnit& unit : task.write_shard().units()) {
        if (!unit.has_quantize() || MinimumMemory(unit.quantize()) <= most) continue;
        neediest = &unit.quantize();
        most = MinimumMemory(*neediest);
      }
    }
    if (neediest == nullptr) {
      return absl::ResourceExhaustedError(absl::StrCat("no task runs with less than ", FormatLeastMemory(kMinimumTaskMemory)));
    }
    std::string size = FormatLeastMemory(most);
    size.erase(std::remove(size.begin(), size.end(), ' '), size.end());
    return absl::ResourceExhaustedError(
        absl::StrCat("tensor ", neediest->weight().tensor(), " [", neediest->weight().rows(), ", ", neediest->weight().cols(), "] under \"",
                     neediest->scheme(), "\" needs a buffer pool of at least ", FormatLeastMemory(most), ", and --memory is ",
                     FormatByteSize(memory), ": give --memory ", size,
                     MinimumMemory(*neediest, /*encoded=*/false) < most ? ", or choose observer: minmax or scales for groups" : ""));
  }

  void AddBits(std::string role, const Bits& bits) {
    quern::v1::RoleBits& entry = *summary().add_effective_bits();
    entry.set_role(std::move(role));
    entry.set_weights(bits.weights);
    entry.set_bits(bits.bits / static_cast<double>(bits.weights));
  }

  const checkpoint::Checkpoint& checkpoint_;
  Selection selection_;
  Plan& plan_;
  QuantizeInputs* inputs_ = nullptr;
  std::map<std::string, std::vector<std::string>> without_inputs_;  // modules whose scheme needs what a file has not, by what is missing
  absl::flat_hash_map<std::string, std::pair<float, float>> activation_ranges_;  // by set: the smallest and the largest
  StoredForms forms_;
  absl::flat_hash_map<std::string, std::vector<size_t>> sets_;  // modules that share a scale
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
  QUERN_ASSIGN_OR_RETURN(Selection selection, SelectModules(inputs.checkpoint, inputs.recipe, spec.allow_requantize()));
  QUERN_RETURN_IF_ERROR(QuantizePlanner(inputs.checkpoint, std::move(selection), plan).Run(&inputs, spec.memory()));
  return plan;
}

absl::StatusOr<Plan> PlanDequantize(const quern::v1::DequantizeSpec& spec, bool with_fingerprints) {
  Plan plan;
  QUERN_ASSIGN_OR_RETURN(DequantizeInputs inputs, OpenDequantize(spec, with_fingerprints, plan.summary));
  QUERN_ASSIGN_OR_RETURN(Selection selection, SelectStored(inputs.checkpoint, inputs.dtype));
  QUERN_RETURN_IF_ERROR(QuantizePlanner(inputs.checkpoint, std::move(selection), plan).Run(nullptr, spec.memory()));
  return plan;
}

}  // namespace quern::daemon
