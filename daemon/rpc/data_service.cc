#include "daemon/rpc/data_service.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "daemon/manifest/manifest.h"
#include "daemon/publish/run_record.h"
#include "daemon/queue/names.h"
#include "daemon/rpc/data_transfers.h"
#include "daemon/rpc/status.h"

namespace quern::daemon {
namespace {

using quern::v1::Job;
using quern::v1::ListResultResponse;

// They wait for disks, mostly.
constexpr int kThreads = 8;
constexpr absl::Duration kSweepInterval = absl::Seconds(5);
constexpr size_t kMostResults = 4;
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

DataService::DataService(Coordinator* coordinator, LinkServer* links, PrincipalOf principal_of)
    : coordinator_(coordinator), links_(links), principal_of_(std::move(principal_of)), work_(kThreads) {
  sweeper_ = std::make_unique<Ticker>(kSweepInterval, [this] {
    uploads_.Sweep(
        [this](const UploadKey& key) { return coordinator_->queue()->FindLiveAttempt(key.job, key.task, key.attempt).has_value(); });
  });
}

DataService::~DataService() { sweeper_.reset(); }

grpc::ServerUnaryReactor* DataService::Answer(grpc::CallbackServerContext* context,
                                              std::function<absl::Status(const std::string& principal)> call) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  work_.Schedule([reactor, call = std::move(call), principal = principal_of_(context)] { reactor->Finish(ToGrpcStatus(call(principal))); });
  return reactor;
}

absl::StatusOr<JobQueue::LiveAttempt> DataService::FindOwnAttempt(const quern::v1::AttemptId& id, const std::string& principal,
                                                                  UploadKey* key) {
  QUERN_ASSIGN_OR_RETURN(JobQueue::LiveAttempt attempt, FindAttempt(id, key));
  if (principal.empty() || attempt.principal.empty() || principal == attempt.principal) return attempt;
  return absl::PermissionDeniedError(
      absl::StrCat(TaskName(key->job, key->task), " attempt ", key->attempt, " is of a worker with another token or certificate"));
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
  return Answer(context, [this, request, response](const std::string& principal) -> absl::Status {
    UploadKey key;
    QUERN_RETURN_IF_ERROR(FindOwnAttempt(request->attempt(), principal, &key).status());
    QUERN_ASSIGN_OR_RETURN(SourceFiles files, FilesOf(key));
    for (const std::string& path : request->paths()) {
      QUERN_ASSIGN_OR_RETURN(const uint64_t size, files.Check(path, request->headers()));
      response->add_sizes(size);
    }
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* DataService::ReadSource(grpc::CallbackServerContext* context, const quern::v1::ReadSourceRequest* request,
                                                  quern::v1::ReadSourceResponse* response) {
  return Answer(context, [this, request, response](const std::string& principal) -> absl::Status {
    UploadKey key;
    QUERN_RETURN_IF_ERROR(FindOwnAttempt(request->attempt(), principal, &key).status());
    QUERN_ASSIGN_OR_RETURN(*response->mutable_ticket(),
                           links_->Admit(principal, [this, attempt = request->attempt()](LinkConnection& connection) {
                             return SendSource(*this, attempt, connection);
                           }));
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* DataService::WriteShard(grpc::CallbackServerContext* context, const quern::v1::WriteShardRequest* request,
                                                  quern::v1::WriteShardResponse* response) {
  return Answer(context, [this, request, response](const std::string& principal) { return BeginUpload(*request, principal, response); });
}

absl::Status DataService::BeginUpload(const quern::v1::WriteShardRequest& request, const std::string& principal,
                                      quern::v1::WriteShardResponse* response) {
  UploadTurn turn;
  turn.attempt = request.attempt();
  QUERN_ASSIGN_OR_RETURN(const JobQueue::LiveAttempt attempt, FindOwnAttempt(turn.attempt, principal, &turn.key));
  if (!attempt.sends_output) return absl::InvalidArgumentError("the attempt writes its file itself, or has none");
  QUERN_RETURN_IF_ERROR(CheckUpload(turn.key, attempt.path, request.size()));
  turn.upload = uploads_.Find(turn.key, attempt.path);
  turn.size = request.size();
  turn.sync_every = std::max<uint64_t>(request.sync_every(), 1);
  QUERN_ASSIGN_OR_RETURN(turn.turn, turn.upload->Open(request.size(), request.durable(), &turn.durable));
  response->set_durable(turn.durable);
  QUERN_ASSIGN_OR_RETURN(*response->mutable_ticket(), links_->Admit(principal, [this, turn = std::move(turn)](LinkConnection& connection) {
    return TakeShard(*this, turn, connection);
  }));
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* DataService::ListResult(grpc::CallbackServerContext* context, const quern::v1::ListResultRequest* request,
                                                  ListResultResponse* response) {
  return Answer(context, [this, request, response](const std::string&) -> absl::Status {
    QUERN_ASSIGN_OR_RETURN(const auto result, FindResult(request->job()));
    *response = result->list;
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* DataService::ReadResult(grpc::CallbackServerContext* context, const quern::v1::ReadResultRequest* request,
                                                  quern::v1::ReadResultResponse* response) {
  return Answer(context, [this, request, response](const std::string& principal) { return BeginResult(*request, principal, response); });
}

absl::Status DataService::BeginResult(const quern::v1::ReadResultRequest& request, const std::string& principal,
                                      quern::v1::ReadResultResponse* response) {
  QUERN_ASSIGN_OR_RETURN(const auto result, FindResult(request.job()));
  const auto& files = result->list.files();
  const auto file = std::find_if(files.begin(), files.end(), [&request](const auto& file) { return file.name() == request.name(); });
  if (file == files.end()) return absl::NotFoundError(absl::StrCat(request.job(), " has no file ", request.name()));
  const std::string path = JoinPath(result->directory, file->name());
  if (request.offset() > file->size()) return absl::OutOfRangeError(absl::StrCat(path, " has ", file->size(), " bytes"));
  QUERN_ASSIGN_OR_RETURN(*response->mutable_ticket(),
                         links_->Admit(principal, [this, path, offset = request.offset(), size = file->size()](LinkConnection& connection) {
                           return SendResult(*this, path, offset, size, connection);
                         }));
  return absl::OkStatus();
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
