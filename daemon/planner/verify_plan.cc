#include <sys/stat.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/digest.h"
#include "base/dtype.h"
#include "base/file.h"
#include "base/file_roots.h"
#include "base/status_macros.h"
#include "base/task_memory.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/family.h"
#include "daemon/manifest/manifest.h"
#include "daemon/planner/emitted_config.h"
#include "daemon/planner/minimum_memory.h"
#include "daemon/planner/modelopt_config.h"
#include "daemon/planner/plans.h"
#include "daemon/planner/shape_text.h"
#include "daemon/planner/shard_writer.h"
#include "daemon/planner/source_evidence.h"
#include "daemon/planner/source_modules.h"
#include "quant/numerics_version.h"
#include "quant/scheme.h"

namespace quern::daemon {
namespace {

using checkpoint::Checkpoint;
using checkpoint::TensorInfo;
using checkpoint::TensorLocation;
using quern::v1::PlanSummary;
using quern::v1::TaskSpec;
using quern::v1::ValueCheck;

constexpr char kPrivateDirectory[] = ".quern";
constexpr char kRecipeName[] = "quern_recipe.yaml";
constexpr uint64_t kMaxManifestBytes = uint64_t{1} << 30;
// Of one kind; a directory that differs in more is wrong as a whole.
constexpr int kMaxMismatches = 1000;

struct LoadedManifest {
  std::string text;
  Manifest manifest;
  absl::Status unreadable;  // why there is no manifest in `text`
};

absl::StatusOr<LoadedManifest> LoadManifest(const std::string& directory) {
  const std::string path = JoinPath(directory, kManifestName);
  LoadedManifest loaded;
  absl::StatusOr<std::string> text = ReadFileToString(path, kMaxManifestBytes);
  if (absl::IsNotFound(text.status())) {
    return absl::InvalidArgumentError(
        absl::StrCat(directory, " holds no ", kManifestName,
                     ": only a finished output of Quern can be verified; quern inspect shows what other checkpoints hold"));
  }
  QUERN_RETURN_IF_ERROR(text.status());
  loaded.text = *std::move(text);
  absl::StatusOr<Manifest> manifest = ParseManifest(loaded.text, path);
  // One of a newer Quern is no mismatch: it cannot be judged here.
  if (absl::IsFailedPrecondition(manifest.status())) return manifest.status();
  if (manifest.ok()) {
    loaded.manifest = *std::move(manifest);
  } else {
    loaded.unreadable = manifest.status();
  }
  return loaded;
}

// Regular files below `directory`, relative, without Quern's own directory.
absl::Status ListFiles(const std::string& directory, const std::string& below, std::set<std::string>& files) {
  QUERN_ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectory(JoinPath(directory, below)));
  for (const std::string& name : names) {
    const std::string relative = below.empty() ? name : JoinPath(below, name);
    if (relative == kPrivateDirectory) continue;
    struct stat info;
    if (ConfinedLstat(JoinPath(directory, relative), &info) == 0 && S_ISDIR(info.st_mode)) {
      QUERN_RETURN_IF_ERROR(ListFiles(directory, relative, files));
    } else {
      files.insert(relative);
    }
  }
  return absl::OkStatus();
}

class VerifyPlanner {
 public:
  VerifyPlanner(const quern::v1::VerifySpec& spec, std::string directory, Plan& plan)
      : spec_(spec), directory_(std::move(directory)), plan_(plan) {}

  absl::Status Run(const Manifest& manifest, bool with_fingerprints) {
    manifest_ = &manifest;
    QUERN_RETURN_IF_ERROR(CheckFiles());
    CheckHead();
    absl::StatusOr<Checkpoint> output = Checkpoint::Open(directory_);
    if (output.ok()) {
      output_.emplace(*std::move(output));
      plan_.summary.set_model_type(output_->config().model_type);
      CheckIndex();
      QUERN_RETURN_IF_ERROR(CheckModules());
      CheckCopies();
      QUERN_RETURN_IF_ERROR(CheckConfig());
    } else {
      AddMismatch(directory_, "", 0, output.status().message());
    }
    for (const ManifestFile& file : manifest.files) AddFileTask(file);
    if (!spec_.against().empty() && output_.has_value()) QUERN_RETURN_IF_ERROR(Compare(with_fingerprints));
    for (const TaskSpec& task : plan_.tasks) {
      plan_.summary.set_source_bytes(plan_.summary.source_bytes() + task.bytes_to_read());
      plan_.summary.set_minimum_memory(std::max<uint64_t>(plan_.summary.minimum_memory(), task.minimum_memory()));
    }
    return absl::OkStatus();
  }

  void AddMismatch(absl::string_view file, absl::string_view tensor, uint64_t offset, absl::string_view what) {
    if (plan_.summary.mismatches_size() >= kMaxMismatches) return;
    quern::v1::Mismatch& mismatch = *plan_.summary.add_mismatches();
    mismatch.set_file(std::string(file));
    mismatch.set_tensor(std::string(tensor));
    mismatch.set_offset(offset);
    mismatch.set_what(std::string(what));
  }

 private:
  // What the manifest says of itself.
  void CheckHead() {
    if (manifest_->numerics_version == 0 || manifest_->numerics_version > quant::kNumericsVersion) {
      AddMismatch(kManifestName, "", 0,
                  absl::StrCat("numerics_version is ", manifest_->numerics_version, ", known are 1 to ", quant::kNumericsVersion));
    }
    constexpr uint64_t kMaxRecipeBytes = 16 * kMiB;
    const absl::StatusOr<std::string> recipe = ReadFileToString(JoinPath(directory_, kRecipeName), kMaxRecipeBytes);
    if (recipe.ok() && *recipe != manifest_->recipe) {
      AddMismatch(kManifestName, "", 0, absl::StrCat("its recipe is not the one in ", kRecipeName));
    }
    absl::flat_hash_set<std::string> sources;
    for (const ManifestFile& file : manifest_->source_files) sources.insert(file.name);
    const auto check_source = [&](const std::string& file, const std::string& tensor) {
      if (!sources.contains(file))
        AddMismatch(kManifestName, tensor, 0, absl::StrCat("source_file ", file, " is not among its source_files"));
    };
    for (const ManifestModule& module : manifest_->modules) check_source(module.source_file, module.module);
    for (const ManifestCopy& copy : manifest_->copied) check_source(copy.source_file, copy.tensor);
  }

  TaskSpec& AddTask(std::string label, uint64_t bytes_to_read) {
    TaskSpec& task = plan_.tasks.emplace_back();
    task.set_index(static_cast<uint32_t>(plan_.tasks.size() - 1));
    task.set_label(std::move(label));
    task.set_bytes_to_read(bytes_to_read);
    task.set_minimum_memory(kMinimumTaskMemory);
    return task;
  }

  absl::Status CheckFiles() {
    std::set<std::string> present;
    QUERN_RETURN_IF_ERROR(ListFiles(directory_, "", present));
    present.erase(kManifestName);
    for (const ManifestFile& file : manifest_->files) {
      if (present.erase(file.name) == 0) {
        AddMismatch(file.name, "", 0, "missing, but the manifest lists it");
        continue;
      }
      const absl::StatusOr<uint64_t> size = FileSize(JoinPath(directory_, file.name));
      QUERN_RETURN_IF_ERROR(size.status());
      if (*size != file.size) {
        AddMismatch(file.name, "", 0, absl::StrCat("has ", *size, " bytes, the manifest says ", file.size));
      } else {
        intact_.insert(file.name);
      }
    }
    for (const std::string& name : present) AddMismatch(name, "", 0, "not in the manifest");
    return absl::OkStatus();
  }

  void CheckIndex() {
    const auto& map = output_->index().weight_map;
    uint64_t total = 0;
    for (const TensorLocation& location : output_->tensors()) {
      total += location.info->bytes();
      if (!map.empty() && map.count(location.info->name) == 0) {
        AddMismatch(output_->shards()[location.shard].name, location.info->name, location.info->begin,
                    "the index does not name this tensor");
      }
    }
    if (output_->index().total_size.has_value() && *output_->index().total_size != total) {
      AddMismatch("model.safetensors.index.json", "", 0,
                  absl::StrCat("total_size is ", *output_->index().total_size, ", the tensors have ", total, " bytes"));
    }
  }

  // The tensor of the output if it is where the manifest says, with a mismatch otherwise.
  const TensorLocation* FindIn(const std::string& shard, const std::string& tensor) {
    accounted_.insert(tensor);
    const TensorLocation* location = output_->Find(tensor);
    if (location == nullptr || output_->shards()[location->shard].name != shard) {
      AddMismatch(shard, tensor, 0, "missing, but the manifest lists it");
      return nullptr;
    }
    return location;
  }

  struct Regions {
    const quant::Scheme* scheme = nullptr;
    DType dtype = DType::kBF16;
    quant::Shape2D shape;
    std::vector<quant::Region> regions;
  };

  absl::StatusOr<Regions> RegionsOf(const ManifestModule& module) const {
    Regions result;
    QUERN_ASSIGN_OR_RETURN(const quant::SchemeSpec spec, quant::SchemeSpec::Parse(module.scheme));
    QUERN_ASSIGN_OR_RETURN(result.scheme, quant::Scheme::For(spec));
    QUERN_ASSIGN_OR_RETURN(result.dtype, ParseDType(module.source_dtype));
    if (module.source_shape.size() != 2)
      return absl::InvalidArgumentError(absl::StrCat("its source shape is ", ShapeText(module.source_shape)));
    result.shape = {static_cast<int64_t>(module.source_shape[0]), static_cast<int64_t>(module.source_shape[1])};
    QUERN_ASSIGN_OR_RETURN(result.regions, result.scheme->Regions(result.dtype, result.shape));
    return result;
  }

  quern::v1::OutputTensor ToOutput(const TensorLocation& location) const {
    quern::v1::OutputTensor tensor;
    tensor.set_name(location.info->name);
    tensor.set_dtype(std::string(DTypeName(location.info->dtype)));
    tensor.mutable_shape()->Add(location.info->shape.begin(), location.info->shape.end());
    tensor.set_offset(output_->shards()[location.shard].header.data_start + location.info->begin);
    tensor.set_size(location.info->bytes());
    return tensor;
  }

  absl::Status CheckModules() {
    for (const ManifestModule& module : manifest_->modules) {
      const absl::StatusOr<Regions> regions = RegionsOf(module);
      if (!regions.ok()) {
        AddMismatch(kManifestName, module.module, 0, regions.status().message());
        continue;
      }
      if (module.stack.has_value()) {
        CheckStacked(module, *regions);
        continue;
      }
      for (const quant::Region& region : regions->regions) {
        const TensorLocation* location = FindIn(module.shard, absl::StrCat(module.module, ".", region.suffix));
        if (location == nullptr) continue;
        if (location->info->dtype != region.dtype || location->info->shape != region.shape) {
          AddMismatch(module.shard, location->info->name, location->info->begin,
                      absl::StrCat("is ", DTypeName(location->info->dtype), " ", ShapeText(location->info->shape), ", its scheme stores ",
                                   DTypeName(region.dtype), " ", ShapeText(region.shape)));
          continue;
        }
        AddCheck(module.shard, region, *regions, *location);
      }
    }
    return absl::OkStatus();
  }

  // Whether the module's values lie in the tensor as the manifest says.
  static bool Holds(const TensorInfo& info, const ManifestModule& module, const Regions& regions) {
    if (regions.regions.size() != 1 || regions.regions[0].dtype != info.dtype || BitsPerElement(info.dtype) % 8 != 0) return false;
    const ManifestStack& stack = *module.stack;
    const auto element = static_cast<uint64_t>(BytesPerElement(info.dtype));
    const uint64_t bytes = info.bytes();
    if (stack.row_stride < element || stack.row_stride > bytes || stack.col_stride < element || stack.col_stride > bytes) return false;
    const __int128 last = __int128{regions.shape.rows - 1} * stack.row_stride + __int128{regions.shape.cols - 1} * stack.col_stride;
    return last + element + stack.offset <= bytes;
  }

  void CheckStacked(const ManifestModule& module, const Regions& regions) {
    const std::string& tensor = module.stack->tensor;
    const bool first = !accounted_.contains(tensor);
    const TensorLocation* location = first ? FindIn(module.shard, tensor) : output_->Find(tensor);
    if (location == nullptr) return;
    if (!Holds(*location->info, module, regions)) {
      AddMismatch(module.shard, tensor, location->info->begin,
                  absl::StrCat("is ", DTypeName(location->info->dtype), " ", ShapeText(location->info->shape), " and does not hold ",
                               module.module, " ", ShapeText(module.source_shape), " where the manifest says"));
      return;
    }
    if (first) AddCheck(module.shard, regions.regions[0], regions, *location);
  }

  static bool IsScale(const std::string& suffix) {
    for (const char* const scale : {"weight_scale", "weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale"}) {
      if (suffix == scale) return true;
    }
    return false;
  }

  void AddCheck(const std::string& shard, const quant::Region& region, const Regions& module, const TensorLocation& location) {
    ValueCheck check;
    if (!region.constant.empty()) {
      check.set_kind(ValueCheck::EQUALS);
      check.set_expected(region.constant);
    } else if (IsScale(region.suffix)) {
      check.set_kind(ValueCheck::FINITE_NONZERO);
    } else if (region.suffix == "weight" && region.dtype != DType::kI8 && region.dtype != DType::kU8) {
      check.set_kind(ValueCheck::FINITE);
    } else if ((region.suffix == "weight_packed" || region.suffix == "weight_zero_point") && region.dtype == DType::kI32) {
      const bool along_rows = region.suffix == "weight_zero_point";
      check.set_kind(ValueCheck::ZERO_TAIL_BITS);
      check.set_num_bits(static_cast<uint32_t>(module.scheme->spec().num_bits));
      check.set_packed_dim(along_rows ? 0 : 1);
      check.set_elements(static_cast<uint64_t>(along_rows ? module.shape.rows : module.shape.cols));
    } else {
      return;
    }
    *check.mutable_tensor() = ToOutput(location);
    checks_[shard].push_back(std::move(check));
  }

  void CheckCopies() {
    for (const ManifestCopy& copy : manifest_->copied) FindIn(copy.shard, copy.tensor);
    for (const TensorLocation& location : output_->tensors()) {
      if (!accounted_.contains(location.info->name)) {
        AddMismatch(output_->shards()[location.shard].name, location.info->name, location.info->begin,
                    "the manifest does not account for this tensor");
      }
    }
  }

  absl::Status CheckConfig() {
    const std::string& config = output_->config().quantization_config;
    if (manifest_->export_format == kPlain) {
      if (!config.empty()) AddMismatch("config.json", "", 0, "has a quantization_config, but the weights are plain");
      return absl::OkStatus();
    }
    std::vector<quant::SchemeSpec> schemes;
    std::map<std::string, int> numbers;
    std::vector<ConfigModule> modules;
    const checkpoint::Family& family = checkpoint::Family::For(output_->config());
    const auto add_tensor = [&](absl::string_view tensor, int scheme) {
      const checkpoint::ModuleIdentity identity = family.Identify(tensor, output_->config());
      modules.push_back({identity.module, identity.transformers_name, identity.role, identity.expert.has_value(), scheme});
    };
    const auto add = [&](const ManifestModule& module, int scheme) { add_tensor(absl::StrCat(module.module, ".weight"), scheme); };
    for (const ManifestModule& module : manifest_->modules) {
      // Values that were only dequantized are not described.
      if (absl::StartsWith(module.scheme, "plain")) {
        add(module, -1);
        continue;
      }
      const auto [number, added] = numbers.try_emplace(module.scheme, static_cast<int>(schemes.size()));
      if (added) {
        const absl::StatusOr<quant::SchemeSpec> spec = quant::SchemeSpec::Parse(module.scheme);
        if (!spec.ok()) return absl::OkStatus();  // told by CheckModules
        schemes.push_back(*spec);
      }
      add(module, number->second);
    }
    for (const ManifestCopy& copy : manifest_->copied) {
      const TensorLocation* location = output_->Find(copy.tensor);
      if (location != nullptr && location->info->shape.size() == 2 && absl::EndsWith(copy.tensor, ".weight")) add_tensor(copy.tensor, -1);
    }
    if (config.empty()) {
      if (!schemes.empty()) AddMismatch("config.json", "", 0, "has no quantization_config");
      return absl::OkStatus();
    }
    const absl::StatusOr<std::vector<std::string>> differences = CompareConfigs(config, schemes, modules);
    if (!differences.ok()) {
      AddMismatch("config.json", "", 0, differences.status().message());
      return absl::OkStatus();
    }
    for (const std::string& difference : *differences) AddMismatch("config.json", "", 0, difference);
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<std::string>> CompareConfigs(const std::string& config, const std::vector<quant::SchemeSpec>& schemes,
                                                          const std::vector<ConfigModule>& modules) const {
    if (manifest_->export_format == kCompressedTensors) return CheckQuantizationConfig(config, schemes, modules, kMaxMismatches);
    if (manifest_->export_format != kModelOpt) {
      return absl::InvalidArgumentError(absl::StrCat("the manifest's export_format \"", manifest_->export_format, "\" is not known here"));
    }
    QUERN_ASSIGN_OR_RETURN(const std::string file, ReadFileToString(JoinPath(directory_, kHfQuantConfigName), kMaxManifestBytes));
    return CheckModelOptConfigs(file, config, schemes, modules, kMaxMismatches);
  }

  void AddFileTask(const ManifestFile& file) {
    if (!intact_.contains(file.name)) return;
    TaskSpec& task = AddTask(file.name, file.size);
    quern::v1::VerifyFile& work = *task.mutable_verify_file();
    work.set_path(JoinPath(directory_, file.name));
    work.set_size(file.size);
    work.set_sha256(file.sha256);
    for (ValueCheck& check : checks_[file.name]) *work.add_checks() = std::move(check);
  }

  absl::Status Compare(bool with_fingerprints) {
    QUERN_ASSIGN_OR_RETURN(const std::string directory, checkpoint::ResolveSource(spec_.against()));
    QUERN_ASSIGN_OR_RETURN(const Checkpoint source, Checkpoint::Open(directory));
    plan_.summary.set_source(source.directory());
    plan_.summary.set_source_name(spec_.against());
    QUERN_RETURN_IF_ERROR(AddSourceFiles(source, {.samples = with_fingerprints, .whole_content = false}, plan_.summary));
    CheckSourceFiles(source);
    QUERN_ASSIGN_OR_RETURN(const SourceModules modules, GatherSourceModules(source));
    Weights weights;
    for (const SourceModule& module : modules.modules) {
      if (module.weight.has_value()) weights.emplace(module.identity.module, &module);
    }
    FindSets(weights);
    std::map<std::string, std::pair<std::vector<const ManifestModule*>, std::vector<const ManifestCopy*>>> shards;
    for (const ManifestModule& module : manifest_->modules) shards[module.shard].first.push_back(&module);
    for (const ManifestCopy& copy : manifest_->copied) shards[copy.shard].second.push_back(&copy);
    for (const auto& [shard, units] : shards) {
      if (!intact_.contains(shard)) continue;
      TaskSpec& task = AddTask(absl::StrCat("compare ", shard), 0);
      task.mutable_compare_shard()->set_path(JoinPath(directory_, shard));
      TaskSources sources(source, plan_.summary, task);
      uint64_t to_read = 0;
      for (const ManifestModule* module : units.first) AddComparison(*module, source, weights, sources, task, to_read);
      for (const ManifestCopy* copy : units.second) AddComparison(*copy, source, sources, task, to_read);
      task.set_bytes_to_read(to_read);
      task.set_minimum_memory(MinimumMemory(task));
    }
    return absl::OkStatus();
  }

  void CheckSourceFiles(const Checkpoint& source) {
    absl::flat_hash_map<std::string, const checkpoint::Shard*> shards;
    for (const checkpoint::Shard& shard : source.shards()) shards[shard.name] = &shard;
    for (const ManifestFile& file : manifest_->source_files) {
      const auto found = shards.find(file.name);
      if (found == shards.end()) {
        AddMismatch(file.name, "", 0,
                    absl::StrCat("the source ", source.directory(), " does not have this file, which the output was made from"));
      } else if (found->second->size != file.size || found->second->header.sha256 != file.sha256) {
        AddMismatch(file.name, "", 0,
                    absl::StrCat("the source ", source.directory(), " has another size or header than what the output was made from"));
      }
    }
  }

  void CheckSourceFile(const std::string& tensor, const std::string& said, const std::string& found) {
    if (said != found) AddMismatch(kManifestName, tensor, 0, absl::StrCat("source_file is ", said, ", the source has it in ", found));
  }

  using Weights = absl::flat_hash_map<std::string, const SourceModule*>;  // of the source, by module

  static const std::string& SetOf(const SourceModule& module) {
    return module.identity.scale_set.empty() ? module.identity.module : module.identity.scale_set;
  }

  // Weights that share a scale: those of a set that have the same scheme.
  void FindSets(const Weights& weights) {
    for (const ManifestModule& module : manifest_->modules) {
      const absl::StatusOr<Regions> regions = RegionsOf(module);
      const auto found = weights.find(module.module);
      if (!regions.ok() || found == weights.end() || !regions->scheme->SharesSetScale()) continue;
      sets_[{SetOf(*found->second), module.scheme}].push_back(&*found->second->weight);
    }
  }

  void AddComparison(const ManifestModule& module, const Checkpoint& source, const Weights& weights, TaskSources& sources, TaskSpec& task,
                     uint64_t& to_read) {
    const absl::StatusOr<Regions> regions = RegionsOf(module);
    if (!regions.ok()) return;  // told by CheckModules
    const auto found = weights.find(module.module);
    const SourceWeight* weight = found == weights.end() ? nullptr : &*found->second->weight;
    SourceWeight plain;
    if (weight != nullptr && regions->scheme->spec().type == quant::NumberType::kPlain && weight->DecodesToAnyDType()) {
      plain = *weight;
      plain.dtype = regions->dtype;
      weight = &plain;
    }
    if (weight == nullptr || source.tensors()[weight->tensor].info->name != module.source_tensor || weight->dtype != regions->dtype ||
        module.source_shape != std::vector<uint64_t>{weight->rows, weight->cols}) {
      AddMismatch(module.shard, module.source_tensor, 0,
                  "the source does not have this tensor in the dtype and shape that the manifest says");
      return;
    }
    CheckSourceFile(module.source_tensor, module.source_file, source.shards()[source.tensors()[weight->tensor].shard].name);
    quern::v1::QuantizeUnit unit;
    uint64_t bytes = weight->bytes();
    for (const quant::Region& region : regions->regions) {
      const bool stacked = module.stack.has_value();
      const TensorLocation* location = output_->Find(stacked ? module.stack->tensor : absl::StrCat(module.module, ".", region.suffix));
      if (location == nullptr || (stacked ? !Holds(*location->info, module, *regions) : location->info->shape != region.shape) ||
          location->info->dtype != region.dtype || output_->shards()[location->shard].name != module.shard) {
        return;  // told by CheckModules
      }
      *unit.add_outputs() = ToOutput(*location);
      bytes += TensorBytes(region.dtype, region.shape);
      if (!stacked) continue;
      unit.mutable_place()->set_offset(module.stack->offset);
      unit.mutable_place()->set_row_stride(static_cast<int64_t>(module.stack->row_stride));
      unit.mutable_place()->set_col_stride(static_cast<int64_t>(module.stack->col_stride));
    }
    unit.set_module(module.module);
    *unit.mutable_weight() = sources.Weight(*weight);
    unit.set_scheme(module.scheme);
    if (regions->scheme->SharesSetScale()) {
      const std::string& set = SetOf(*found->second);
      unit.set_statistics_key(set);
      for (const SourceWeight* const member : sets_.at({set, module.scheme})) *unit.add_statistics_set() = sources.Weight(*member);
      bytes += weight->bytes();
    }
    unit.set_nonfinite(module.error.nonfinite() > 0 ? "clamp" : "fail");
    unit.set_reason(module.reason);
    unit.set_role(module.role);
    quern::v1::CompareUnit& compare = *task.mutable_compare_shard()->add_units();
    *compare.mutable_quantize() = std::move(unit);
    *compare.mutable_expected() = module.error;
    to_read += bytes;
  }

  void AddComparison(const ManifestCopy& copy, const Checkpoint& source, TaskSources& sources, TaskSpec& task, uint64_t& to_read) {
    const TensorLocation* made = output_->Find(copy.tensor);
    if (made == nullptr || output_->shards()[made->shard].name != copy.shard) return;  // told by CheckCopies
    const TensorLocation* original = source.Find(copy.tensor);
    if (original == nullptr || original->info->dtype != made->info->dtype || original->info->shape != made->info->shape) {
      AddMismatch(copy.shard, copy.tensor, made->info->begin, "the source does not have this tensor in the same dtype and shape");
      return;
    }
    CheckSourceFile(copy.tensor, copy.source_file, source.shards()[original->shard].name);
    quern::v1::CopyUnit& unit = *task.mutable_compare_shard()->add_units()->mutable_copy();
    *unit.mutable_source() = sources.Bytes(*original);
    *unit.mutable_output() = ToOutput(*made);
    unit.set_reason(copy.reason);
    unit.set_role(copy.role);
    to_read += 2 * made->info->bytes();
  }

  const quern::v1::VerifySpec& spec_;
  const std::string directory_;
  Plan& plan_;
  const Manifest* manifest_ = nullptr;
  std::optional<Checkpoint> output_;
  absl::flat_hash_set<std::string> intact_;  // files of the manifest that are there with the right size
  std::map<std::pair<std::string, std::string>, std::vector<const SourceWeight*>> sets_;  // by set and scheme
  absl::flat_hash_set<std::string> accounted_;                                            // tensors that the manifest lists
  absl::flat_hash_map<std::string, std::vector<ValueCheck>> checks_;                      // of shards
};

PlanSummary StartSummary(const quern::v1::VerifySpec& spec, const LoadedManifest& loaded) {
  PlanSummary summary;
  summary.set_resolved_recipe(loaded.manifest.recipe);
  summary.set_max_shard_size(loaded.manifest.max_shard_size);
  summary.set_numerics_version(quant::kNumericsVersion);
  summary.set_identity(IdentityOf(summary, absl::StrCat("verify ", HexDigest(Sha256Of(loaded.text)), " ", spec.against())));
  return summary;
}

}  // namespace

absl::StatusOr<PlanSummary> VerifyIdentity(const quern::v1::VerifySpec& spec, const std::string& directory) {
  QUERN_ASSIGN_OR_RETURN(const LoadedManifest loaded, LoadManifest(directory));
  return StartSummary(spec, loaded);
}

std::vector<quern::v1::Mismatch> SourceDigestMismatches(const Manifest& manifest, const TaskSpec& task,
                                                        const quern::v1::TaskResult& result) {
  // By module, since modules that are cut from one tensor have its name in common.
  absl::flat_hash_map<std::string, const std::string*> of_modules, of_copies;
  for (const ManifestModule& module : manifest.modules) of_modules[module.module] = &module.source_digest;
  for (const ManifestCopy& copy : manifest.copied) of_copies[copy.tensor] = &copy.source_digest;
  std::vector<quern::v1::Mismatch> mismatches;
  // Digests come in the order of the units.
  for (int i = 0; i < task.compare_shard().units_size() && i < result.source_digests_size(); ++i) {
    const quern::v1::CompareUnit& unit = task.compare_shard().units(i);
    const std::string& tensor = unit.has_quantize() ? unit.quantize().weight().tensor() : unit.copy().source().tensor();
    const auto& expected = unit.has_quantize() ? of_modules : of_copies;
    const auto then = expected.find(unit.has_quantize() ? unit.quantize().module() : tensor);
    const std::string& now = result.source_digests(i).digest();
    if (then == expected.end() || result.source_digests(i).tensor() != tensor || *then->second == now) continue;
    quern::v1::Mismatch& mismatch = mismatches.emplace_back();
    mismatch.set_file(kManifestName);
    mismatch.set_tensor(unit.has_quantize() ? unit.quantize().module() : tensor);
    mismatch.set_what(absl::StrCat("source_digest is ", HexDigest(*then->second), ", the source's is ", HexDigest(now)));
  }
  return mismatches;
}

absl::StatusOr<Plan> PlanVerify(const quern::v1::VerifySpec& spec, const std::string& directory, bool with_fingerprints) {
  QUERN_ASSIGN_OR_RETURN(const LoadedManifest loaded, LoadManifest(directory));
  Plan plan;
  plan.summary = StartSummary(spec, loaded);
  VerifyPlanner planner(spec, directory, plan);
  if (!loaded.unreadable.ok()) {
    planner.AddMismatch(kManifestName, "", 0, loaded.unreadable.message());
    return plan;
  }
  QUERN_RETURN_IF_ERROR(planner.Run(loaded.manifest, with_fingerprints));
  return plan;
}

}  // namespace quern::daemon
