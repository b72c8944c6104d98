#include "daemon/rpc/data_service.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/data_plane.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "daemon/manifest/manifest.h"
#include "daemon/publish/run_record.h"
#include "daemon/queue/names.h"
#include "daemon/rpc/data_streams.h"
#include "daemon/rpc/status.h"

namespace quern::daemon {
namespace {

using quern::v1::Job;
using quern::v1::ListResultResponse;

// They wait for disks, mostly.
constexpr int kThreads = 8;
constexpr absl::Duration kSweepInterval = absl::Seconds(5);
constexpr size_t kMostResults = 4;
// Two for each of a thousand workers, and some for clients; each holds a few megabytes at most.
constexpr size_t kMostStreams = 4096;
constexpr char kConfig[] = "config.json";
constexpr char kIndex[] = "model.safetensors.index.json";

// A directory without its config is no checkpoint, nor is one of several shards without its index.
int OrderOf(const std::string& name) { return name == kIndex ? 3 : name == kConfig ? 2 : name == kManifestName ? 1 : 0; }

absl::StatusOr<std::vector<ManifestFile>> FilesOfResult(const std::string& directory) {
  const std::string path = JoinPath(directory, kManifestName);
  absl::StatusOr<std::string> text = ReadFileToString(path);
  if (absl::IsNotFound(text.status())) {
    QUERN_ASSIGN_OR_RETURN(RunRecord record, ReadRunRecord(directory));
    if (record.files.empty()) return absl::NotFoundError(absl::StrCat(directory, " holds no finished result"));
    return std::move(record.files);
  }
  QUERN_RETURN_IF_ERROR(text.status());
  QUERN_ASSIGN_OR_RETURN(std::vector<ManifestFile> files, ParseManifestFiles(*text, path));
  files.push_back({kManifestName, text->size(), Sha256Of(*text)});
  return files;
}

}  // namespace

DataService::DataService(Coordinator* coordinator, StreamLimits limits)
    : coordinator_(coordinator), stalled_writes_(Clock::Real(), limits.stalled), work_(kThreads) {
  sweeper_ = std::make_unique<Ticker>(kSweepInterval, [this] {
    stalled_writes_.Tick();
    uploads_.Sweep(
        [this](const UploadKey& key) { return coordinator_->queue()->FindLiveAttempt(key.job, key.task, key.attempt).has_value(); });
  });
}

DataService::~DataService() { sweeper_.reset(); }

void DataService::Shutdown() {
  MutexLock lock(&mutex_);
  shut_down_ = true;
  for (DataStream* stream : streams_) stream->Stop(absl::UnavailableError("the coordinator is stopping"));
}

void DataService::Add(DataStream* stream) {
  MutexLock lock(&mutex_);
  streams_.insert(stream);
  if (shut_down_) stream->Stop(absl::UnavailableError("the coordinator is stopping"));
  if (streams_.size() > kMostStreams)
    stream->Stop(absl::ResourceExhaustedError("the coordinator has too many streams open: try again later"));
}

size_t DataService::OpenStreams() {
  MutexLock lock(&mutex_);
  return streams_.size();
}

void DataService::Remove(DataStream* stream) {
  MutexLock lock(&mutex_);
  streams_.erase(stream);
}

absl::StatusOr<JobQueue::LiveAttempt> DataService::FindAttempt(const quern::v1::AttemptId& id, UploadKey* key) {
  QUERN_ASSIGN_OR_RETURN(key->job, ParseJobName(id.job()));
  key->task = id.task();
  key->attempt = id.attempt();
  std::optional<JobQueue::LiveAttempt> attempt = coordinator_->queue()->FindLiveAttempt(key->job, key->task, key->attempt);
  if (attempt.has_value()) return *std::move(attempt);
  return WithReason(
      absl::FailedPreconditionError(absl::StrCat(TaskName(key->job, key->task), " attempt ", key->attempt, " is not wanted any more")),
      "FENCED");
}

absl::StatusOr<SourceFiles> DataService::FilesOf(const UploadKey& key) {
  QUERN_ASSIGN_OR_RETURN(const quern::v1::TaskSpec task, coordinator_->LoadTask(key.job, key.task));
  return SourceFiles(task, [this](const std::string& path) { return coordinator_->ResolvePath(path); });
}

absl::Status DataService::CheckUpload(const UploadKey& key, const std::string& path, uint64_t size) {
  QUERN_ASSIGN_OR_RETURN(const quern::v1::TaskSpec task, coordinator_->LoadTask(key.job, key.task));
  if (size != task.write_shard().file_size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(TaskName(key.job, key.task), " has a shard of ", task.write_shard().file_size(), " bytes, not of ", size));
  }
  return coordinator_->ResolvePath(path).status();
}

grpc::ServerUnaryReactor* DataService::CheckSource(grpc::CallbackServerContext* context, const quern::v1::CheckSourceRequest* request,
                                                   quern::v1::CheckSourceResponse* response) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  Schedule([this, reactor, request, response] {
    const auto check = [&]() -> absl::Status {
      UploadKey key;
      QUERN_RETURN_IF_ERROR(FindAttempt(request->attempt(), &key).status());
      QUERN_ASSIGN_OR_RETURN(SourceFiles files, FilesOf(key));
      for (const std::string& path : request->paths()) {
        QUERN_ASSIGN_OR_RETURN(const uint64_t size, files.Check(path, request->headers()));
        response->add_sizes(size);
      }
      return absl::OkStatus();
    };
    reactor->Finish(ToGrpcStatus(check()));
  });
  return reactor;
}

grpc::ServerBidiReactor<quern::v1::ReadSourceRequest, quern::v1::ReadSourceResponse>* DataService::ReadSource(
    grpc::CallbackServerContext* context) {
  return NewReadSourceStream(this, context);
}

grpc::ServerBidiReactor<quern::v1::WriteShardRequest, quern::v1::WriteShardResponse>* DataService::WriteShard(
    grpc::CallbackServerContext* context) {
  return NewWriteShardStream(this, context);
}

grpc::ServerUnaryReactor* DataService::ListResult(grpc::CallbackServerContext* context, const quern::v1::ListResultRequest* request,
                                                  ListResultResponse* response) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  Schedule([this, reactor, request, response] {
    const auto result = FindResult(request->job());
    if (result.ok()) *response = (*result)->list;
    reactor->Finish(ToGrpcStatus(result.status()));
  });
  return reactor;
}

grpc::ServerWriteReactor<quern::v1::ReadResultResponse>* DataService::ReadResult(grpc::CallbackServerContext* context,
                                                                                 const quern::v1::ReadResultRequest* request) {
  return NewReadResultStream(this, context, *request);
}

absl::StatusOr<DataService::Result> DataService::LoadResult(uint64_t job) {
  const std::optional<quern::store::JobRecord> record = coordinator_->queue()->Record(job);
  if (!record.has_value()) return absl::NotFoundError(absl::StrCat("there is no ", JobName(job)));
  if (record->spec().operation() == quern::v1::VERIFY) {
    return absl::FailedPreconditionError(absl::StrCat(JobName(job), " is a verification: it has no files"));
  }
  if (record->state() != Job::SUCCEEDED) {
    return absl::FailedPreconditionError(
        absl::StrCat(JobName(job), " is ", Job::State_Name(record->state()), ": only a finished result can be fetched"));
  }
  Result result;
  QUERN_ASSIGN_OR_RETURN(result.directory, coordinator_->ResolvePath(record->spec().output()));
  QUERN_ASSIGN_OR_RETURN(std::vector<ManifestFile> files, FilesOfResult(result.directory));
  std::stable_sort(files.begin(), files.end(),
                   [](const ManifestFile& a, const ManifestFile& b) { return OrderOf(a.name) < OrderOf(b.name); });
  for (const ManifestFile& file : files) {
    ListResultResponse::File& listed = *result.list.add_files();
    listed.set_name(file.name);
    listed.set_size(file.size);
    listed.set_sha256(file.sha256);
  }
  return result;
}

absl::StatusOr<std::shared_ptr<const DataService::Result>> DataService::FindResult(const std::string& job) {
  QUERN_ASSIGN_OR_RETURN(const uint64_t id, ParseJobName(job));
  // A job that was deleted has no result any more.
  if (coordinator_->queue()->Record(id).has_value()) {
    MutexLock lock(&mutex_);
    if (const auto known = results_.find(id); known != results_.end()) return known->second;
  }
  QUERN_ASSIGN_OR_RETURN(Result loaded, LoadResult(id));
  auto result = std::make_shared<const Result>(std::move(loaded));
  MutexLock lock(&mutex_);
  if (results_.size() >= kMostResults) results_.erase(results_.begin());
  results_[id] = result;
  return result;
}

}  // namespace quern::daemon
