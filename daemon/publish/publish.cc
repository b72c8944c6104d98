#include "daemon/publish/publish.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/byte_size.h"
#include "base/digest.h"
#include "base/file_roots.h"
#include "base/status_macros.h"
#include "checkpoint/family.h"
#include "checkpoint/index.h"
#include "checkpoint/model_config.h"
#include "checkpoint/safetensors.h"
#include "daemon/manifest/manifest.h"
#include "daemon/publish/run_record.h"

namespace quern::daemon {
namespace {

constexpr char kIndexName[] = "model.safetensors.index.json";
constexpr char kConfigName[] = "config.json";
constexpr char kRecipeName[] = "quern_recipe.yaml";
constexpr char kHfQuantConfigName[] = "hf_quant_config.json";
constexpr char kSingleShardName[] = "model.safetensors";
// A config or index larger than this is no config or index.
constexpr uint64_t kDescriptionLimit = 256 * kMiB;
// Manifest text of one tensor, for the estimate of a full disk's message.
constexpr uint64_t kManifestBytesPerTensor = 640;

// Writes one file of the output: under a name of its own first, in its place only when it is whole and durable.
class FileWriter {
 public:
  static absl::StatusOr<FileWriter> Create(std::string temporary) {
    QUERN_ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(temporary, O_WRONLY | O_CREAT | O_TRUNC));
    return FileWriter(std::move(temporary), std::move(fd));
  }

  absl::Status Append(absl::string_view data) {
    QUERN_RETURN_IF_ERROR(WriteExactly(fd_.get(), size_, data.data(), data.size(), temporary_));
    sha_->Update(data);
    size_ += data.size();
    return absl::OkStatus();
  }

  // Renames to `path`; the caller syncs the directory. Size and SHA-256 are the content's.
  absl::StatusOr<ManifestFile> Place(const std::string& path) {
    if (fsync(fd_.get()) != 0) return ErrnoToStatus(errno, "fsync", temporary_);
    QUERN_RETURN_IF_ERROR(fd_.Close(temporary_));
    QUERN_RETURN_IF_ERROR(RenameFile(temporary_, path));
    return ManifestFile{"", size_, sha_->Finish()};
  }

 private:
  FileWriter(std::string temporary, UniqueFd fd) : temporary_(std::move(temporary)), fd_(std::move(fd)), sha_(std::make_unique<Sha256>()) {}

  std::string temporary_;
  UniqueFd fd_;
  uint64_t size_ = 0;
  std::unique_ptr<Sha256> sha_;
};

// Every name in OUT that publishing writes or removes, whether or not it is there.
std::vector<std::string> NamesToWrite(const quern::v1::PlanSummary& plan, std::vector<std::string> shards) {
  std::vector<std::string> names = std::move(shards);
  for (const char* name : {kIndexName, kConfigName, kRecipeName, kManifestName}) names.push_back(name);
  if (!plan.hf_quant_config().empty()) names.push_back(kHfQuantConfigName);
  names.insert(names.end(), plan.side_files().begin(), plan.side_files().end());
  return names;
}

// A shard as its task committed it.
struct CommittedShard {
  std::string name;
  uint64_t size = 0;
  std::string sha256;
  std::string header_sha256;
  uint32_t attempt = 0;
};

class Publisher {
 public:
  explicit Publisher(const PublishRequest& request)
      : request_(request),
        plan_(*request.plan),
        output_(request.spec->output()),
        quern_(JoinPath(output_, ".quern")),
        temporary_(JoinPath(quern_, "publish")),
        synthesize_(request.spec->operation() == quern::v1::SYNTHESIZE),
        dequantize_(request.spec->operation() == quern::v1::DEQUANTIZE) {}

  absl::Status Run() {
    QUERN_RETURN_IF_ERROR(CheckPaths());
    QUERN_RETURN_IF_ERROR(LoadShards());
    QUERN_RETURN_IF_ERROR(LoadSourceDescriptions());
    const absl::Status status = Publish();
    if (status.ok()) return status;
    // What is half-written only takes space; another try starts over with it.
    RemoveTree(temporary_).IgnoreError();
    if (absl::IsResourceExhausted(status) && absl::StrContains(status.message(), "disk full")) return WithBytesNeeded(status);
    return status;
  }

 private:
  absl::Status Publish() {
    QUERN_RETURN_IF_ERROR(Annotate(RemoveOldDescriptions(), "publish, step 1"));
    QUERN_RETURN_IF_ERROR(Annotate(PlaceShards(), "publish, step 2"));
    if (!synthesize_) QUERN_RETURN_IF_ERROR(Annotate(CopySideFiles(), "publish, step 3"));
    QUERN_RETURN_IF_ERROR(Annotate(WriteDescriptions(), "publish, step 4"));
    return Annotate(CleanUp(), "publish, step 5");
  }

  // A job never writes where it reads from.
  absl::Status CheckPaths() {
    if (!absl::StartsWith(output_, "/")) return absl::InvalidArgumentError(absl::StrCat("output ", output_, " is no absolute path"));
    if (request_.tasks == 0)
      return absl::InvalidArgumentError(absl::StrCat("output ", output_, ": a job without shards cannot be published"));
    struct stat source, output;
    if (synthesize_ || ConfinedStat(plan_.source(), &source) != 0 || ConfinedStat(output_, &output) != 0) return absl::OkStatus();
    if (source.st_dev != output.st_dev || source.st_ino != output.st_ino) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("output ", output_, " is the source itself; choose another output"));
  }

  absl::StatusOr<CommittedTask> LoadTask(uint32_t index) {
    QUERN_ASSIGN_OR_RETURN(CommittedTask task, request_.load_task(index));
    if (task.spec.has_write_shard()) return task;
    return absl::InternalError(absl::StrCat("task ", index, " (", task.spec.label(), ") wrote no shard"));
  }

  absl::Status LoadShards() {
    for (uint32_t i = 0; i < request_.tasks; ++i) {
      QUERN_ASSIGN_OR_RETURN(const CommittedTask task, LoadTask(i));
      const std::string& name = task.spec.label();
      if (name.find('/') != std::string::npos || !IsPlainRelativePath(name) || !absl::EndsWith(name, ".safetensors") ||
          !own_names_.insert(name).second) {
        return absl::InternalError(absl::StrCat("task ", i, ": \"", name, "\" cannot be the name of its shard"));
      }
      shards_.push_back({name, task.result.file_size(), task.result.sha256(), task.result.header_sha256(), task.attempt});
      for (const quern::v1::ShardUnit& unit : task.spec.write_shard().units()) {
        ++units_;
        switch (unit.kind_case()) {
          case quern::v1::ShardUnit::kCopy:
            AddToIndex(unit.copy().output(), name);
            break;
          case quern::v1::ShardUnit::kQuantize:
            for (const quern::v1::OutputTensor& tensor : unit.quantize().outputs()) AddToIndex(tensor, name);
            break;
          case quern::v1::ShardUnit::kGenerate:
            AddToIndex(unit.generate().output(), name);
            break;
          case quern::v1::ShardUnit::KIND_NOT_SET:
            return absl::InternalError(absl::StrCat("task ", i, " (", name, ") has a unit of an unknown kind"));
        }
      }
    }
    for (const char* name : {kIndexName, kConfigName, kRecipeName, kHfQuantConfigName, kManifestName}) own_names_.insert(name);
    return absl::OkStatus();
  }

  void AddToIndex(const quern::v1::OutputTensor& tensor, const std::string& shard) {
    // Units that fill one tensor all name it.
    if (!index_.weight_map.emplace(tensor.name(), shard).second) return;
    index_.total_size = index_.total_size.value_or(0) + tensor.size();
  }

  bool HasIndex() const { return shards_.size() > 1 || shards_.front().name != kSingleShardName; }

  // All that is read of the source but its side files, before anything in OUT is touched.
  absl::Status LoadSourceDescriptions() {
    if (synthesize_) {
      config_text_ = plan_.synthetic_config();
    } else {
      const std::string path = JoinPath(plan_.source(), kConfigName);
      QUERN_ASSIGN_OR_RETURN(const std::string text, ReadFileToString(path, kDescriptionLimit));
      QUERN_ASSIGN_OR_RETURN(config_, checkpoint::ParseModelConfig(text, path));
      if (dequantize_) {
        QUERN_ASSIGN_OR_RETURN(config_text_, checkpoint::WithoutQuantizationConfig(config_));
      } else {
        QUERN_ASSIGN_OR_RETURN(config_text_, checkpoint::WithQuantizationConfig(config_, plan_.quantization_config()));
      }
      const std::string index_path = JoinPath(plan_.source(), kIndexName);
      if (FileExists(index_path)) {
        QUERN_ASSIGN_OR_RETURN(const std::string index_text, ReadFileToString(index_path, kDescriptionLimit));
        QUERN_ASSIGN_OR_RETURN(const checkpoint::ShardIndex source_index, checkpoint::ParseShardIndex(index_text, index_path));
        index_.total_parameters = source_index.total_parameters;
      }
    }
    if (HasIndex()) index_text_ = checkpoint::BuildShardIndex(index_);
    index_ = {};
    return absl::OkStatus();
  }

  // --- step 1

  absl::Status RemoveOldDescriptions() {
    QUERN_RETURN_IF_ERROR(MakeDirectories(quern_));
    // Read first: when it cannot be read nothing has been removed yet.
    const std::string manifest_path = JoinPath(output_, kManifestName);
    std::vector<ManifestFile> old_files;
    const bool has_manifest = FileExists(manifest_path);
    if (has_manifest) {
      QUERN_ASSIGN_OR_RETURN(const std::string text, ReadFileToString(manifest_path));
      QUERN_ASSIGN_OR_RETURN(old_files, ParseManifestFiles(text, manifest_path));
    }
    std::vector<std::string> shards;
    for (const CommittedShard& shard : shards_) shards.push_back(shard.name);
    QUERN_RETURN_IF_ERROR(CheckForeignFiles(output_, plan_, shards));
    QUERN_ASSIGN_OR_RETURN(RunRecord record, ReadRunRecord(output_));
    old_files.insert(old_files.end(), record.files.begin(), record.files.end());
    // Names of an earlier publishing stay: what it has written may lie there still.
    std::set<std::string> names(record.names.begin(), record.names.end());
    for (std::string& name : NamesToWrite(plan_, std::move(shards))) names.insert(std::move(name));
    record.names.assign(names.begin(), names.end());
    QUERN_RETURN_IF_ERROR(RemoveTree(temporary_));
    QUERN_RETURN_IF_ERROR(MakeDirectories(temporary_));
    QUERN_RETURN_IF_ERROR(WriteRunJson(PublishingJson(record)));
    QUERN_RETURN_IF_ERROR(RemoveFile(JoinPath(output_, kIndexName)));
    QUERN_RETURN_IF_ERROR(RemoveFile(JoinPath(output_, kConfigName)));
    QUERN_RETURN_IF_ERROR(SyncDirectory(output_));
    if (old_files.empty() && !has_manifest) return absl::OkStatus();
    for (const ManifestFile& file : old_files) {
      if (!IsPlacedShard(file)) QUERN_RETURN_IF_ERROR(RemoveOldFile(file.name));
    }
    QUERN_RETURN_IF_ERROR(SyncDirectory(output_));
    if (has_manifest) {
      QUERN_RETURN_IF_ERROR(RemoveFile(manifest_path));
      QUERN_RETURN_IF_ERROR(SyncDirectory(output_));
    }
    if (record.files.empty()) return absl::OkStatus();
    // Before a new file takes one of their names.
    record.files.clear();
    return WriteRunJson(PublishingJson(record));
  }

  bool IsPlacedShard(const ManifestFile& file) const {
    return std::any_of(shards_.begin(), shards_.end(), [&file](const CommittedShard& shard) {
      return shard.name == file.name && shard.size == file.size && shard.sha256 == file.sha256;
    });
  }

  // `name` is a plain relative path (ParseManifestFiles saw to it). A link among its directories would lead to files that are not ours.
  absl::Status RemoveOldFile(const std::string& name) {
    for (size_t slash = name.find('/'); slash != std::string::npos; slash = name.find('/', slash + 1)) {
      struct stat info;
      if (ConfinedLstat(JoinPath(output_, name.substr(0, slash)), &info) != 0 || !S_ISDIR(info.st_mode)) return absl::OkStatus();
    }
    QUERN_RETURN_IF_ERROR(RemoveFile(JoinPath(output_, name)));
    // Directories go with their last file; one that holds anything else stays.
    for (std::string parent = DirName(name); parent != "."; parent = DirName(parent)) {
      const std::string path = JoinPath(output_, parent);
      if (ConfinedRmdir(path) != 0) return SyncDirectory(path);
    }
    return absl::OkStatus();
  }

  // --- step 2

  absl::Status PlaceShards() {
    for (uint32_t i = 0; i < shards_.size(); ++i) {
      const CommittedShard& shard = shards_[i];
      const std::string attempt_path = AttemptPath(output_, i, shard.attempt);
      const std::string path = JoinPath(output_, shard.name);
      const absl::StatusOr<uint64_t> size = FileSize(attempt_path);
      if (size.ok()) {
        if (*size != shard.size) return WrongSize(attempt_path, *size, shard);
        QUERN_RETURN_IF_ERROR(RenameFile(attempt_path, path));
      } else if (absl::IsNotFound(size.status())) {
        QUERN_RETURN_IF_ERROR(CheckPlaced(path, attempt_path, shard));
      } else {
        return size.status();
      }
      files_.push_back({shard.name, shard.size, shard.sha256});
    }
    QUERN_RETURN_IF_ERROR(SyncDirectory(output_));
    const std::string attempts = AttemptDirectory(output_);
    return FileExists(attempts) ? SyncDirectory(attempts) : absl::OkStatus();
  }

  static absl::Status WrongSize(const std::string& path, uint64_t size, const CommittedShard& shard) {
    return absl::DataLossError(absl::StrCat("shard ", shard.name, ": ", path, " has ", size, " bytes, ", shard.size, " were committed"));
  }

  // Without its attempt's file a shard must have been renamed by an earlier try.
  static absl::Status CheckPlaced(const std::string& path, const std::string& attempt_path, const CommittedShard& shard) {
    const absl::StatusOr<uint64_t> size = FileSize(path);
    if (absl::IsNotFound(size.status())) {
      return absl::DataLossError(absl::StrCat("shard ", shard.name, " is gone: neither ", attempt_path, " nor ", path, " exists"));
    }
    QUERN_RETURN_IF_ERROR(size.status());
    if (*size != shard.size) return WrongSize(path, *size, shard);
    const absl::StatusOr<checkpoint::SafetensorsHeader> header = checkpoint::ReadSafetensorsHeader(path);
    if (header.ok() && header->sha256 == shard.header_sha256) return absl::OkStatus();
    return absl::DataLossError(
        absl::StrCat("shard ", shard.name, ": ", path, " has another header than the one committed, and ", attempt_path, " is gone"));
  }

  // --- step 3

  absl::Status CopySideFiles() {
    std::set<std::string> directories = {output_};
    for (const std::string& name : plan_.side_files()) {
      if (!IsPlainRelativePath(name) || absl::StartsWith(name, ".quern/")) {
        return absl::InternalError(absl::StrCat("side file \"", name, "\" is no plain relative path"));
      }
      // A source that is an output of ours: this job writes its own.
      if (own_names_.count(name) > 0) continue;
      const std::string path = JoinPath(output_, name);
      QUERN_RETURN_IF_ERROR(MakeDirectories(DirName(path)));
      for (std::string directory = DirName(path); directories.insert(directory).second;) directory = DirName(directory);
      QUERN_ASSIGN_OR_RETURN(ManifestFile file, CopyFile(JoinPath(plan_.source(), name), path));
      file.name = name;
      files_.push_back(std::move(file));
    }
    if (!dequantize_) {
      QUERN_ASSIGN_OR_RETURN(ManifestFile recipe, WriteWhole(kRecipeName, plan_.resolved_recipe()));
      files_.push_back(std::move(recipe));
    }
    if (!plan_.hf_quant_config().empty()) {
      QUERN_ASSIGN_OR_RETURN(ManifestFile config, WriteWhole(kHfQuantConfigName, plan_.hf_quant_config()));
      files_.push_back(std::move(config));
    }
    for (const std::string& directory : directories) QUERN_RETURN_IF_ERROR(SyncDirectory(directory));
    return absl::OkStatus();
  }

  absl::StatusOr<ManifestFile> CopyFile(const std::string& from, const std::string& to) {
    absl::StatusOr<UniqueFd> source = OpenFile(from, O_RDONLY);
    if (!source.ok()) return Annotate(source.status(), "side file of the source");
    struct stat info;
    if (fstat(source->get(), &info) != 0) return ErrnoToStatus(errno, "stat", from);
    QUERN_ASSIGN_OR_RETURN(FileWriter writer, NewFile());
    std::string buffer(std::min<uint64_t>(kMiB, info.st_size), '\0');
    const uint64_t size = info.st_size;
    for (uint64_t offset = 0; offset < size;) {
      const size_t piece = std::min<uint64_t>(buffer.size(), size - offset);
      QUERN_RETURN_IF_ERROR(ReadExactly(source->get(), offset, buffer.data(), piece, from));
      QUERN_RETURN_IF_ERROR(writer.Append(absl::string_view(buffer.data(), piece)));
      offset += piece;
    }
    return writer.Place(to);
  }

  // --- step 4

  absl::Status WriteDescriptions() {
    if (!synthesize_) {
      QUERN_RETURN_IF_ERROR(WriteManifest());
      QUERN_RETURN_IF_ERROR(SyncDirectory(output_));
    }
    QUERN_RETURN_IF_ERROR(WriteWhole(kConfigName, config_text_).status());
    QUERN_RETURN_IF_ERROR(SyncDirectory(output_));
    if (!HasIndex()) return absl::OkStatus();
    QUERN_RETURN_IF_ERROR(WriteWhole(kIndexName, index_text_).status());
    return SyncDirectory(output_);
  }

  Manifest ManifestHead() {
    Manifest head;
    head.numerics_version = plan_.numerics_version();
    head.recipe = plan_.resolved_recipe();
    head.export_format = dequantize_ ? "plain" : request_.spec->quantize().export_format();
    if (head.export_format.empty()) head.export_format = "compressed-tensors";
    head.max_shard_size = plan_.max_shard_size();
    for (const quern::v1::SourceFile& file : plan_.source_files()) {
      head.source_files.push_back({SourceName(file), file.size(), file.header_sha256()});
    }
    for (const quern::v1::SourceFile& file : plan_.input_files()) {
      head.inputs.push_back({BaseName(file.path()), file.size(), file.content_sha256()});
    }
    head.files = AllFiles();
    return head;
  }

  // Of the output but the manifest, by name.
  std::vector<ManifestFile> AllFiles() const {
    std::vector<ManifestFile> files = files_;
    files.push_back({kConfigName, config_text_.size(), Sha256Of(config_text_)});
    if (HasIndex()) files.push_back({kIndexName, index_text_.size(), Sha256Of(index_text_)});
    std::sort(files.begin(), files.end(), [](const ManifestFile& a, const ManifestFile& b) { return a.name < b.name; });
    return files;
  }

  // Relative to the source: where a checkpoint lies is no part of the result.
  std::string SourceName(const quern::v1::SourceFile& file) const {
    absl::string_view name = file.path();
    if (absl::ConsumePrefix(&name, plan_.source()) && absl::ConsumePrefix(&name, "/")) return std::string(name);
    return BaseName(file.path());
  }

  absl::Status WriteManifest() {
    QUERN_ASSIGN_OR_RETURN(FileWriter file, NewFile());
    std::string buffer;
    ManifestWriter writer([&](absl::string_view piece) {
      absl::StrAppend(&buffer, piece);
      if (buffer.size() < kMiB) return absl::OkStatus();
      const absl::Status status = file.Append(buffer);
      buffer.clear();
      return status;
    });
    QUERN_RETURN_IF_ERROR(writer.Begin(ManifestHead()));
    // The lists stand one after the other, so the tasks are gone through once for each.
    for (uint32_t i = 0; i < request_.tasks; ++i) {
      QUERN_ASSIGN_OR_RETURN(const CommittedTask task, LoadTask(i));
      QUERN_RETURN_IF_ERROR(AddModules(task, &writer));
    }
    for (uint32_t i = 0; i < request_.tasks; ++i) {
      QUERN_ASSIGN_OR_RETURN(const CommittedTask task, LoadTask(i));
      QUERN_RETURN_IF_ERROR(AddCopies(task, &writer));
    }
    for (const quern::v1::TensorFate& fate : plan_.dropped()) {
      QUERN_RETURN_IF_ERROR(writer.Add(ManifestDropped{fate.tensor(), fate.reason()}));
    }
    QUERN_RETURN_IF_ERROR(writer.Finish());
    QUERN_RETURN_IF_ERROR(file.Append(buffer));
    return file.Place(JoinPath(output_, kManifestName)).status();
  }

  // What a task reported of its views. Slices of one stack have the same name; their digests come in the order of the units.
  class Reported {
   public:
    explicit Reported(const CommittedTask& task) : task_(task) {
      for (const quern::v1::ViewDigest& digest : task.result.source_digests()) digests_[digest.tensor()].push_back(&digest.digest());
      for (const quern::v1::ModuleError& error : task.result.errors()) errors_[error.module()] = &error;
    }

    absl::StatusOr<std::string> NextDigest(const quern::v1::TensorView& view) {
      const auto it = digests_.find(view.tensor());
      size_t& next = next_[view.tensor()];
      if (it == digests_.end() || next >= it->second.size()) {
        return absl::InternalError(absl::StrCat("shard ", task_.spec.label(), ": its task reported no digest of ", view.tensor()));
      }
      return *it->second[next++];
    }

    absl::StatusOr<const quern::v1::ModuleError*> Error(const std::string& module) {
      const auto it = errors_.find(module);
      if (it != errors_.end()) return it->second;
      return absl::InternalError(absl::StrCat("shard ", task_.spec.label(), ": its task reported no error figures of ", module));
    }

   private:
    const CommittedTask& task_;
    absl::flat_hash_map<std::string, std::vector<const std::string*>> digests_;
    absl::flat_hash_map<std::string, size_t> next_;
    absl::flat_hash_map<std::string, const quern::v1::ModuleError*> errors_;
  };

  absl::StatusOr<std::string> SourceFileOf(const CommittedTask& task, const quern::v1::TensorView& view) {
    if (view.file() < static_cast<uint32_t>(task.spec.source_files_size())) return SourceName(task.spec.source_files(view.file()));
    return absl::InternalError(absl::StrCat("shard ", task.spec.label(), ": ", view.tensor(), " is in a file that its task does not have"));
  }

  absl::Status AddModules(const CommittedTask& task, ManifestWriter* writer) {
    Reported reported(task);
    for (const quern::v1::ShardUnit& unit : task.spec.write_shard().units()) {
      if (!unit.has_quantize()) continue;
      const quern::v1::QuantizeUnit& quantize = unit.quantize();
      const quern::v1::TensorView& weight = quantize.weight();
      ManifestModule module;
      module.module = quantize.module();
      module.scheme = quantize.scheme();
      module.source_tensor = weight.tensor();
      module.source_dtype = weight.dtype();
      module.source_shape = {weight.rows(), weight.cols()};
      module.shard = task.spec.label();
      module.role = quantize.role();
      module.reason = quantize.reason();
      if (quantize.has_place()) {
        const quern::v1::StackPlace& place = quantize.place();
        module.stack = {quantize.outputs(0).name(), place.offset(), static_cast<uint64_t>(place.row_stride()),
                        static_cast<uint64_t>(place.col_stride())};
      }
      QUERN_ASSIGN_OR_RETURN(module.source_file, SourceFileOf(task, weight));
      QUERN_ASSIGN_OR_RETURN(module.source_digest, reported.NextDigest(weight));
      QUERN_ASSIGN_OR_RETURN(const quern::v1::ModuleError* error, reported.Error(quantize.module()));
      module.error = *error;
      QUERN_RETURN_IF_ERROR(writer->Add(module));
    }
    return absl::OkStatus();
  }

  absl::Status AddCopies(const CommittedTask& task, ManifestWriter* writer) {
    Reported reported(task);
    const checkpoint::Family& family = checkpoint::Family::For(config_);
    for (const quern::v1::ShardUnit& unit : task.spec.write_shard().units()) {
      if (!unit.has_copy()) continue;
      const quern::v1::CopyUnit& source = unit.copy();
      ManifestCopy copy;
      copy.tensor = source.output().name();
      copy.shard = task.spec.label();
      copy.role = std::string(checkpoint::RoleName(family.Identify(copy.tensor, config_).role));
      copy.reason = source.reason();
      QUERN_ASSIGN_OR_RETURN(copy.source_file, SourceFileOf(task, source.source()));
      QUERN_ASSIGN_OR_RETURN(copy.source_digest, reported.NextDigest(source.source()));
      QUERN_RETURN_IF_ERROR(writer->Add(copy));
    }
    return absl::OkStatus();
  }

  // --- step 5

  absl::Status CleanUp() {
    QUERN_RETURN_IF_ERROR(RemoveTree(AttemptDirectory(output_)));
    if (synthesize_) {
      QUERN_ASSIGN_OR_RETURN(const std::string run_json, WithFiles(request_.run_json, AllFiles()));
      QUERN_RETURN_IF_ERROR(WriteRunJson(run_json));
    } else {
      QUERN_RETURN_IF_ERROR(WriteRunJson(request_.run_json));
    }
    QUERN_RETURN_IF_ERROR(RemoveTree(temporary_));
    return SyncDirectory(quern_);
  }

  // --- all steps

  absl::StatusOr<FileWriter> NewFile() { return FileWriter::Create(JoinPath(temporary_, absl::StrCat(temporaries_++))); }

  absl::Status WriteRunJson(absl::string_view text) {
    QUERN_ASSIGN_OR_RETURN(FileWriter writer, NewFile());
    QUERN_RETURN_IF_ERROR(writer.Append(text));
    QUERN_RETURN_IF_ERROR(writer.Place(JoinPath(quern_, "run.json")).status());
    return SyncDirectory(quern_);
  }

  // A small file of OUT whose text is known. The caller syncs the directory.
  absl::StatusOr<ManifestFile> WriteWhole(const char* name, absl::string_view text) {
    QUERN_ASSIGN_OR_RETURN(FileWriter writer, NewFile());
    QUERN_RETURN_IF_ERROR(writer.Append(text));
    QUERN_ASSIGN_OR_RETURN(ManifestFile file, writer.Place(JoinPath(output_, name)));
    file.name = name;
    return file;
  }

  absl::Status WithBytesNeeded(const absl::Status& status) {
    uint64_t needed = config_text_.size() + index_text_.size() + request_.run_json.size() + plan_.resolved_recipe().size() +
                      plan_.hf_quant_config().size();
    if (!synthesize_) needed += units_ * kManifestBytesPerTensor;
    for (const std::string& name : plan_.side_files()) needed += FileSize(JoinPath(plan_.source(), name)).value_or(0);
    const absl::StatusOr<uint64_t> free = FreeDiskSpace(output_);
    return absl::ResourceExhaustedError(
        absl::StrCat(status.message(), "; publishing needs about ", needed, " bytes (", FormatByteSize(needed), ") beside the shards",
                     free.ok() ? absl::StrCat(", ", *free, " are free") : "", ": free some space and run it again, nothing is lost"));
  }

  const PublishRequest& request_;
  const quern::v1::PlanSummary& plan_;
  const std::string output_;
  const std::string quern_;
  const std::string temporary_;
  const bool synthesize_;
  const bool dequantize_;

  std::vector<CommittedShard> shards_;
  std::set<std::string> own_names_;  // what this job writes, apart from side files
  uint64_t units_ = 0;
  checkpoint::ShardIndex index_;  // empty once index_text_ is made
  std::string index_text_;
  checkpoint::ModelConfig config_;
  std::string config_text_;
  std::vector<ManifestFile> files_;
  uint64_t temporaries_ = 0;
};

}  // namespace

std::string AttemptDirectory(const std::string& output) { return JoinPath(output, ".quern/attempts"); }

std::string AttemptPath(const std::string& output, uint32_t task, uint32_t attempt) {
  return JoinPath(AttemptDirectory(output), absl::StrCat(task, ".", attempt));
}

absl::Status CheckForeignFiles(const std::string& output, const quern::v1::PlanSummary& plan, std::vector<std::string> shards) {
  QUERN_ASSIGN_OR_RETURN(const RunRecord record, ReadRunRecord(output));
  std::set<std::string> ours(record.names.begin(), record.names.end());
  for (const ManifestFile& file : record.files) ours.insert(file.name);
  const std::string manifest_path = JoinPath(output, kManifestName);
  const absl::StatusOr<std::string> text = ReadFileToString(manifest_path);
  if (text.ok()) {
    QUERN_ASSIGN_OR_RETURN(const std::vector<ManifestFile> files, ParseManifestFiles(*text, manifest_path));
    for (const ManifestFile& file : files) ours.insert(file.name);
    ours.insert(kManifestName);
  } else if (!absl::IsNotFound(text.status())) {
    return text.status();
  }
  for (const std::string& name : NamesToWrite(plan, std::move(shards))) {
    struct stat info;
    const std::string path = JoinPath(output, name);
    if (ours.count(name) > 0 || ConfinedLstat(path, &info) != 0) continue;
    return absl::AlreadyExistsError(absl::StrCat(path,
                                                 " was not written by Quern and would be replaced; move it away and run again, or "
                                                 "choose another output"));
  }
  return absl::OkStatus();
}

absl::Status PublishJob(const PublishRequest& request) {
  switch (request.spec->operation()) {
    case quern::v1::VERIFY:
      return absl::OkStatus();
    case quern::v1::QUANTIZE:
    case quern::v1::DEQUANTIZE:
    case quern::v1::SYNTHESIZE:
      return Publisher(request).Run();
    default:
      return absl::UnimplementedError(
          absl::StrCat("publishing the result of ", quern::v1::Operation_Name(request.spec->operation()), " is not known here"));
  }
}

}  // namespace quern::daemon
