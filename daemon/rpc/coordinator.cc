#include "daemon/rpc/coordinator.h"

#include <algorithm>
#include <future>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/byte_size.h"
#include "base/file.h"
#include "base/log_fields.h"
#include "base/status_macros.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/hub_cache.h"
#include "daemon/manifest/manifest.h"
#include "daemon/planner/source_evidence.h"
#include "daemon/publish/run_record.h"
#include "daemon/queue/audit.h"
#include "daemon/queue/names.h"
#include "daemon/recipe/recipe.h"
#include "daemon/rpc/commit_check.h"
#include "daemon/rpc/run_json.h"
#include "daemon/rpc/source_files.h"
#include "daemon/rpc/status.h"
#include "quant/numerics_version.h"

namespace quern::daemon {
namespace {

using quern::store::JobRecord;
using quern::v1::CreateJobRequest;
using quern::v1::Job;
using quern::v1::JobSpec;
using quern::v1::PlanSummary;

constexpr int kShortThreads = 4;
constexpr int kLongThreads = 4;
constexpr int kReadThreads = 2;
constexpr int kReadBackThreads = 1;  // of whole files: a disk reads one after the other best
constexpr absl::Duration kTick = absl::Milliseconds(50);
// A tick that comes later than this: the process was stopped, or the machine slept.
constexpr absl::Duration kLateTick = absl::Seconds(3);
constexpr absl::Duration kExpiry = absl::Minutes(1);
// A wall clock that ran so much further than the monotonic one has jumped. What is old is then not known for a while.
constexpr absl::Duration kWallJump = absl::Minutes(10);
constexpr absl::Duration kDistrust = absl::Hours(24);

bool WritesOutput(const JobSpec& spec) { return spec.operation() != quern::v1::VERIFY; }

bool Overwrites(const JobSpec& spec) {
  return spec.quantize().overwrite() || spec.dequantize().overwrite() || spec.synthesize().overwrite();
}

bool Unfinished(Job::State state) { return state == Job::QUEUED || state == Job::RUNNING || state == Job::PUBLISHING; }

bool Ended(Job::State state) { return state == Job::SUCCEEDED || state == Job::FAILED || state == Job::CANCELLED; }

// What of a request cannot be applied to the job that is there already.
std::string OtherSettings(const CreateJobRequest& request, double audit_fraction, std::optional<int32_t> priority) {
  std::vector<std::string> asked;
  if (request.audit_fraction() > audit_fraction) {
    asked.push_back(absl::StrCat("--audit ", request.audit_fraction() * 100, "%, and it has ", audit_fraction * 100, "%"));
  }
  if (priority.has_value() && request.priority() != 0 && request.priority() != *priority) {
    asked.push_back(absl::StrCat("--priority ", request.priority(), ", and it has ", *priority));
  }
  return absl::StrJoin(asked, "; ");
}

// Files that cannot be read or written, as opposed to files with something wrong in them.
bool MayPass(const absl::Status& status) { return absl::IsDataLoss(status) || absl::IsUnavailable(status) || absl::IsNotFound(status); }

absl::Status NoClaim(const absl::Status& status) {
  return absl::IsFailedPrecondition(status) ? WithReason(status, "OUTPUT_IN_USE") : status;
}

quern::v1::JobError ErrorOf(const absl::Status& status, absl::string_view otherwise) {
  quern::v1::JobError error;
  error.set_reason(ReasonOf(status));
  if (error.reason().empty()) {
    error.set_reason(absl::IsResourceExhausted(status) ? "DISK_FULL" : MayPass(status) ? "IO_ERROR" : std::string(otherwise));
  }
  error.set_message(std::string(status.message()));
  return error;
}

absl::Status CheckDetails(const JobSpec& spec) {
  const bool matches = (spec.operation() == quern::v1::QUANTIZE && spec.has_quantize()) ||
                       (spec.operation() == quern::v1::VERIFY && spec.has_verify()) ||
                       (spec.operation() == quern::v1::DEQUANTIZE && spec.has_dequantize()) ||
                       (spec.operation() == quern::v1::SYNTHESIZE && spec.has_synthesize());
  if (matches) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the operation ", quern::v1::Operation_Name(spec.operation()),
                   " is not known here, or its details are missing: known are QUANTIZE, DEQUANTIZE, VERIFY, SYNTHESIZE"));
}

// What a user of the command line has mistyped, told before anything is looked at. A mistake in the recipe's file is none of these.
absl::Status CheckOptions(const JobSpec& spec) {
  if (!spec.has_quantize()) return absl::OkStatus();
  const quern::v1::QuantizeSpec& quantize = spec.quantize();
  const absl::Status status = ParseRecipe(quantize.recipe(), ShorthandsOf(quantize)).status();
  if (status.ok() || (!quantize.recipe().empty() && !ParseRecipe(quantize.recipe(), {}).ok())) return absl::OkStatus();
  return WithReason(status, "BAD_OPTION");
}

bool IsWithin(const std::string& path, const std::string& directory) {
  return path == directory || absl::StartsWith(path, directory == "/" ? directory : absl::StrCat(directory, "/"));
}

// `source` (empty: none) and `output` are real paths. A result inside a checkpoint would become part of it, and the other way round.
absl::Status CheckApart(const std::string& source, const std::string& output) {
  if (!source.empty() && (IsWithin(output, source) || IsWithin(source, output))) {
    return absl::InvalidArgumentError(
        source == output           ? absl::StrCat("the output ", output, " is the source; choose another output")
        : IsWithin(output, source) ? absl::StrCat("the output ", output, " lies inside the source ", source, "; choose another output")
                                   : absl::StrCat("the source ", source, " lies inside the output ", output, "; choose another output"));
  }
  for (std::string parent = output; parent.size() > 1;) {
    parent = DirName(parent);
    if (parent.empty()) break;
    for (const char* sign : {kManifestName, ".quern/run.json", ".quern/owner.json"}) {
      if (!FileExists(JoinPath(parent, sign))) continue;
      return absl::InvalidArgumentError(absl::StrCat("the output ", output, " lies inside ", parent,
                                                     ", which is an output of Quern itself (it holds ", sign, "); choose another output"));
    }
  }
  return absl::OkStatus();
}

// Publishing would refuse them too, but only after all the work.
absl::Status CheckForeignFilesOfPlan(const std::string& output, const PlanSummary& plan) {
  std::vector<std::string> shards;
  for (const quern::v1::ShardSummary& shard : plan.shards()) shards.push_back(shard.file());
  return WithReason(CheckForeignFiles(output, plan, std::move(shards)), "OUTPUT_IN_USE");
}

// One above the number of every attempt whose file lies there.
uint32_t FirstFreeAttempt(const std::string& output) {
  uint32_t next = 1;
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(AttemptDirectory(output));
  if (!names.ok()) return next;
  for (const std::string& name : *names) {
    const std::vector<std::string> parts = absl::StrSplit(name, '.');
    uint32_t attempt = 0;
    if (parts.size() == 2 && absl::SimpleAtoi(parts[1], &attempt)) next = std::max(next, attempt + 1);
  }
  return next;
}

}  // namespace

Coordinator::Coordinator(CoordinatorOptions options) : options_(std::move(options)) {}

absl::StatusOr<std::unique_ptr<Coordinator>> Coordinator::Start(CoordinatorOptions options) {
  std::unique_ptr<Coordinator> coordinator(new Coordinator(std::move(options)));
  Coordinator* const self = coordinator.get();
  self->short_work_ = std::make_unique<ThreadPool>(kShortThreads);
  self->long_work_ = std::make_unique<ThreadPool>(kLongThreads);
  JobQueueOptions queue;
  queue.store = self->options_.store;
  queue.clock = self->options_.clock;
  queue.numerics_version = quant::kNumericsVersion;
  queue.lease = self->options_.lease;
  queue.retry_backoff = self->options_.retry_backoff;
  queue.settle = self->options_.settle;
  queue.bad_input_witnesses = self->options_.bad_input_witnesses;
  queue.long_poll = self->options_.long_poll;
  queue.can_stream = [](const quern::v1::SynchronizeRequest& worker, uint64_t, quern::v1::SightChallenge::What) {
    return worker.data_plane();
  };
  queue.attempt_path = AttemptPath;
  queue.check_commit = [self](const quern::v1::TaskSpec& spec, const std::string& path, const quern::v1::TaskResult& result) {
    QUERN_RETURN_IF_ERROR(self->CheckStoredPath(path));
    return CheckCommit(spec, path, result, self->options_.file_patience);
  };
  queue.read_back = [self](const std::string& path, const std::string& sha256, std::function<void(absl::Status)> done) {
    self->read_backs_->Schedule([self, path, sha256, done] {
      absl::Status status = self->CheckStoredPath(path);
      if (status.ok()) status = CheckContent(path, sha256, [self] { return self->stopping(); });
      done(status);
    });
  };
  queue.confirm = [self](uint64_t job, uint32_t task, const quern::v1::Failure& reported, uint64_t bytes_left,
                         std::function<void(absl::Status)> done) {
    self->Schedule([self, job, task, reason = reported.reason(), bytes_left, done] { done(self->Confirm(job, task, reason, bytes_left)); },
                   done);
  };
  queue.run = [self](std::function<void()> work) { self->short_work_->Schedule(std::move(work)); };
  self->reads_ = std::make_unique<ThreadPool>(kReadThreads);
  self->read_backs_ = std::make_unique<ThreadPool>(kReadBackThreads);
  queue.run_reads = [self](std::function<void()> work) { self->reads_->Schedule(std::move(work)); };
  queue.remove_file = [self](const std::string& path) {
    if (const absl::Status removed = RemoveFile(path); !removed.ok() && self->options_.log) self->options_.log(removed.ToString());
  };
  queue.on_ready = [self](uint64_t job) { self->Schedule([self, job] { self->Publish(job); }, nullptr); };
  queue.on_broken = self->options_.on_broken;
  queue.on_event = self->options_.log;
  QUERN_ASSIGN_OR_RETURN(self->queue_, JobQueue::Open(std::move(queue)));
  for (uint64_t job : self->queue_->HeldJobs()) self->Schedule([self, job] { self->Recheck(job); }, nullptr);
  self->recheck_ticker_ = std::make_unique<Ticker>(self->options_.recheck_interval, [self] { self->RecheckWaiting(); });
  self->last_tick_ = self->options_.clock->Monotonic();
  self->next_expiry_ = self->last_tick_ + kExpiry;
  self->expiry_wall_ = self->options_.clock->Wall();
  self->ticker_ = std::make_unique<Ticker>(kTick, [self] { self->Tick(); });
  return coordinator;
}

Coordinator::~Coordinator() {
  Shutdown();
  ticker_.reset();
  recheck_ticker_.reset();
  long_work_.reset();
  queue_.reset();
  reads_.reset();
  read_backs_.reset();
  short_work_.reset();
}

void Coordinator::Tick() {
  const absl::Duration now = options_.clock->Monotonic();
  if (now - last_tick_ > kLateTick) {
    if (options_.log) {
      options_.log(absl::StrCat("this coordinator did not run for ", absl::FormatDuration(now - last_tick_), ": leases begin anew"));
    }
    queue_->GrantGrace();
  }
  last_tick_ = now;
  queue_->Tick();
  PublishAgain();
  if (now < next_expiry_) return;
  const absl::Time wall = options_.clock->Wall();
  if (absl::AbsDuration((wall - expiry_wall_) - (now - next_expiry_ + kExpiry)) > kWallJump) {
    ages_untrusted_until_ = now + kDistrust;
    if (options_.log) options_.log("the wall clock has jumped: for a day no job is deleted for its age");
  }
  expiry_wall_ = wall;
  next_expiry_ = now + kExpiry;
  const absl::Time before = now < ages_untrusted_until_ ? absl::InfinitePast() : wall - options_.keep_jobs_for;
  std::vector<uint64_t> expired = queue_->ExpiredJobs(before, options_.keep_jobs);
  if (!expired.empty()) Schedule([this, expired = std::move(expired)] { Expire(expired); }, nullptr);
}

void Coordinator::Expire(const std::vector<uint64_t>& jobs) {
  for (const uint64_t id : jobs) {
    const std::optional<JobRecord> record = queue_->Record(id);
    if (!record.has_value() || !BeginWork(record->spec().output()).ok()) continue;
    const std::optional<JobRecord> now = queue_->Record(id);
    if (now.has_value() && Ended(now->state())) {
      const absl::Status deleted = Delete(id);
      if (options_.log) {
        options_.log(deleted.ok() ? absl::StrCat("job event=expired job=", JobName(id))
                                  : absl::StrCat("job event=not_deleted job=", JobName(id), MessageField(deleted.ToString())));
      }
    }
    EndWork(record->spec().output());
  }
}

void Coordinator::Shutdown() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    work_ended_.SignalAll();
  }
  if (queue_ != nullptr) queue_->Shutdown();
}

bool Coordinator::stopping() {
  MutexLock lock(&mutex_);
  return stopping_;
}

void Coordinator::Schedule(std::function<void()> work, std::function<void(absl::Status)> refuse) {
  const absl::Status stopped = absl::UnavailableError("the coordinator is stopping");
  {
    // Under the mutex: after Shutdown nothing reaches the pool any more.
    MutexLock lock(&mutex_);
    if (!stopping_) {
      long_work_->Schedule([this, work = std::move(work), refuse, stopped] {
        if (!stopping()) return work();
        if (refuse) refuse(stopped);
      });
      return;
    }
  }
  if (refuse) refuse(stopped);
}

absl::StatusOr<Job> Coordinator::Await(std::function<void(JobCallback)> call) {
  std::promise<absl::StatusOr<Job>> result;
  call([&result](absl::StatusOr<Job> job) { result.set_value(std::move(job)); });
  return result.get_future().get();
}

absl::Status Coordinator::BeginWork(const std::string& output) {
  MutexLock lock(&mutex_);
  while (busy_.count(output) > 0 && !stopping_) work_ended_.Wait(&mutex_);
  if (stopping_) return absl::UnavailableError("the coordinator is stopping");
  busy_.insert(output);
  return absl::OkStatus();
}

void Coordinator::EndWork(const std::string& output) {
  MutexLock lock(&mutex_);
  busy_.erase(output);
  work_ended_.SignalAll();
}

// ---- What may be touched ----

absl::StatusOr<std::string> Coordinator::CheckSource(const std::string& source) const {
  const PathPolicy& paths = options_.paths;
  // Before anything is looked at: whether something exists outside of the roots is no client's business.
  const bool hub = !paths.everything() && checkpoint::IsHubName(source);
  if (hub && !paths.Resolve(checkpoint::HubCacheDirectory()).ok()) {
    return WithReason(absl::PermissionDeniedError(absl::StrCat("source ", source,
                                                               ": the Hugging Face cache is not part of what this "
                                                               "coordinator may touch; give a directory, or start quernd with an "
                                                               "--allow-root that holds the cache")),
                      "PATH_NOT_ALLOWED");
  }
  if (!paths.everything() && !hub) QUERN_RETURN_IF_ERROR(Annotate(paths.Resolve(source).status(), "source"));
  const absl::StatusOr<std::string> directory = checkpoint::ResolveSource(source);
  absl::StatusOr<std::string> real = directory.ok() ? paths.Resolve(*directory) : directory.status();
  if (hub && (absl::IsPermissionDenied(real.status()) || absl::IsNotFound(real.status()))) {
    return absl::NotFoundError(
        absl::StrCat("the Hugging Face cache of the coordinator has no ", source, "; download it there: hf download"));
  }
  if (!real.ok() && directory.ok()) return Annotate(real.status(), "source");
  return real;
}

absl::StatusOr<std::string> Coordinator::CheckInputs(JobSpec& spec) const {
  if (spec.has_verify()) {
    if (!spec.verify().against().empty()) QUERN_RETURN_IF_ERROR(CheckSource(spec.verify().against()).status());
    return std::string();
  }
  if (spec.has_dequantize()) return CheckSource(spec.dequantize().source());
  if (!spec.has_quantize()) return std::string();
  quern::v1::QuantizeSpec& quantize = *spec.mutable_quantize();
  const auto resolve = [this](const char* what, std::string* path) -> absl::Status {
    if (path->empty()) return absl::OkStatus();
    absl::StatusOr<std::string> resolved = options_.paths.Resolve(*path);
    if (!resolved.ok()) return Annotate(resolved.status(), what);
    *path = *std::move(resolved);
    return absl::OkStatus();
  };
  QUERN_RETURN_IF_ERROR(resolve("activation scales", quantize.mutable_activation_scales()));
  QUERN_RETURN_IF_ERROR(resolve("importance", quantize.mutable_importance()));
  return CheckSource(quantize.source());
}

absl::StatusOr<JobSpec> Coordinator::CheckSpec(const JobSpec& spec) const {
  QUERN_RETURN_IF_ERROR(CheckDetails(spec));
  QUERN_RETURN_IF_ERROR(CheckOptions(spec));
  JobSpec checked = spec;
  absl::StatusOr<std::string> output = options_.paths.Resolve(spec.output());
  if (!output.ok()) return Annotate(output.status(), "output");
  checked.set_output(*std::move(output));
  QUERN_ASSIGN_OR_RETURN(const std::string source, CheckInputs(checked));
  if (WritesOutput(spec)) QUERN_RETURN_IF_ERROR(CheckApart(source, checked.output()));
  return checked;
}

absl::Status Coordinator::CheckSourceFiles(const PlanSummary& plan) const {
  for (const quern::v1::SourceFile& file : plan.source_files()) {
    QUERN_RETURN_IF_ERROR(Annotate(options_.paths.Resolve(file.path()).status(), "source file"));
  }
  for (const quern::v1::SourceFile& file : plan.input_files()) {
    QUERN_RETURN_IF_ERROR(Annotate(options_.paths.Resolve(file.path()).status(), "file of module inputs"));
  }
  for (const std::string& name : plan.side_files()) {
    QUERN_RETURN_IF_ERROR(Annotate(options_.paths.Resolve(JoinPath(plan.source(), name)).status(), "side file of the source"));
  }
  return absl::OkStatus();
}

absl::Status Coordinator::CheckStoredPath(const std::string& path) const {
  return options_.paths.everything() ? absl::OkStatus() : ResolvePath(path).status();
}

absl::Status Coordinator::CheckStoredOutput(const JobSpec& spec) const { return Annotate(CheckStoredPath(spec.output()), "output"); }

absl::Status Coordinator::CheckStoredPaths(const JobSpec& spec, const PlanSummary& plan) const {
  if (options_.paths.everything()) return absl::OkStatus();
  QUERN_RETURN_IF_ERROR(CheckStoredOutput(spec));
  JobSpec inputs = spec;
  QUERN_RETURN_IF_ERROR(CheckInputs(inputs).status());
  return CheckSourceFiles(plan);
}

// ---- Claims and files ----

absl::Status Coordinator::Claim(uint64_t job, const JobSpec& spec) {
  if (!WritesOutput(spec)) return absl::OkStatus();
  {
    MutexLock lock(&mutex_);
    if (claims_.count(job) > 0) return absl::OkStatus();
  }
  absl::StatusOr<OutputClaim> claim = OutputClaim::Acquire(spec.output(), options_.owner, JobName(job));
  if (!claim.ok()) return NoClaim(claim.status());
  MutexLock lock(&mutex_);
  claims_.emplace(job, *std::move(claim));
  return absl::OkStatus();
}

void Coordinator::ReleaseClaim(uint64_t job) {
  MutexLock lock(&mutex_);
  claims_.erase(job);
}

absl::Status Coordinator::RemoveLeftovers(const std::string& output) {
  QUERN_RETURN_IF_ERROR(RemoveTree(AttemptDirectory(output)));
  QUERN_RETURN_IF_ERROR(RemoveTree(JoinPath(output, ".quern/publish")));
  return RemoveFile(SightPath(output));
}

absl::StatusOr<PlanSummary> Coordinator::LoadPlan(uint64_t job) {
  QUERN_ASSIGN_OR_RETURN(const std::string text, options_.store->Get(JobKey('p', job)));
  PlanSummary plan;
  if (!plan.ParseFromString(text)) return absl::DataLossError(absl::StrCat("job store: unreadable plan of ", JobName(job)));
  return plan;
}

absl::StatusOr<quern::v1::TaskSpec> Coordinator::LoadTask(uint64_t job, uint32_t index) {
  QUERN_ASSIGN_OR_RETURN(const std::string text, options_.store->Get(TaskKey('s', job, index)));
  quern::v1::TaskSpec task;
  if (!task.ParseFromString(text)) return absl::DataLossError(absl::StrCat("job store: unreadable plan of ", TaskName(job, index)));
  return task;
}

absl::StatusOr<std::vector<SightProbe>> Coordinator::SightOf(const JobRecord& record, const PlanSummary& plan) {
  if (record.tasks() == 0) return std::vector<SightProbe>();
  QUERN_ASSIGN_OR_RETURN(const quern::v1::TaskSpec task, LoadTask(record.id(), 0));
  return MakeSightProbes(record.spec(), plan, &task);
}

absl::StatusOr<quern::v1::TaskResult> Coordinator::LoadResult(uint64_t job, uint32_t index) {
  QUERN_ASSIGN_OR_RETURN(const std::string text, options_.store->Get(TaskKey('r', job, index)));
  quern::v1::TaskResult result;
  if (!result.ParseFromString(text)) return absl::DataLossError(absl::StrCat("job store: unreadable result of ", TaskName(job, index)));
  return result;
}

absl::Status Coordinator::BadReport(uint64_t job, const quern::v1::TaskSpec& task, const absl::Status& what) {
  QUERN_ASSIGN_OR_RETURN(const std::string text, options_.store->Get(TaskKey('t', job, task.index())));
  quern::store::TaskRecord record;
  if (!record.ParseFromString(text)) return absl::DataLossError(absl::StrCat("job store: unreadable ", TaskName(job, task.index())));
  return absl::InternalError(absl::StrCat(TaskName(job, task.index()), ", which worker ", record.committed_by(), " (attempt ",
                                          record.committed_attempt(), ") has committed: ", what.message(), "; quern retry ", JobName(job),
                                          " does that task again"));
}

// Publishing renames an attempt's file to its label, so it may be in either place.
absl::StatusOr<std::vector<uint32_t>> Coordinator::LostTasks(const JobRecord& record) {
  std::vector<uint32_t> lost;
  const std::string& output = record.spec().output();
  for (const JobQueue::CommittedAttempt& committed : queue_->CommittedAttempts(record.id())) {
    // Publishing has failed for it, if it was committed unseen.
    if (record.state() == Job::FAILED) {
      QUERN_ASSIGN_OR_RETURN(const quern::v1::TaskSpec task, LoadTask(record.id(), committed.task));
      QUERN_ASSIGN_OR_RETURN(const quern::v1::TaskResult result, LoadResult(record.id(), committed.task));
      if (const absl::Status fits = CheckReport(task, result); !fits.ok()) {
        if (options_.log) {
          options_.log(
              absl::StrCat("task event=bad_report job=", JobName(record.id()), " task=", committed.task, MessageField(fits.message())));
        }
        lost.push_back(committed.task);
        continue;
      }
    }
    const absl::StatusOr<uint64_t> here = FileSize(AttemptPath(output, committed.task, committed.attempt));
    if (here.ok() && *here == committed.size) continue;
    const absl::StatusOr<uint64_t> placed = FileSize(JoinPath(output, committed.label));
    if (placed.ok() && *placed == committed.size) continue;
    lost.push_back(committed.task);
  }
  return lost;
}

absl::Status Coordinator::CheckIdentity(const JobSpec& spec, const PlanSummary& plan) {
  const absl::StatusOr<PlanSummary> now = MakeIdentity(spec);
  if (!now.ok()) {
    // It was a checkpoint when the job was planned.
    const bool changed = absl::IsInvalidArgument(now.status()) && ReasonOf(now.status()).empty();
    return changed ? WithReason(now.status(), "SOURCE_CHANGED") : now.status();
  }
  const std::string difference = IdentityDifference(plan, *now);
  if (difference.empty()) return absl::OkStatus();
  return WithReason(absl::FailedPreconditionError(difference), "SOURCE_CHANGED");
}

absl::Status Coordinator::Confirm(uint64_t job, uint32_t index, quern::v1::FailureReason reason, uint64_t bytes_left) {
  if (reason == quern::v1::DISK_FULL) {
    const std::optional<JobRecord> record = queue_->Record(job);
    if (!record.has_value()) return absl::OkStatus();
    QUERN_ASSIGN_OR_RETURN(const uint64_t free, options_.free_disk_space(record->spec().output()));
    if (free >= bytes_left) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(record->spec().output(), " has ", FormatByteSize(free), " left"));
  }
  QUERN_ASSIGN_OR_RETURN(const quern::v1::TaskSpec task, LoadTask(job, index));
  SourceFiles files(task, [this](const std::string& path) { return ResolvePath(path); });
  for (const quern::v1::SourceFile& file : task.source_files()) {
    QUERN_RETURN_IF_ERROR(files.Check(file.path(), /*header=*/true).status());
  }
  return absl::OkStatus();
}

// ---- Creating and resuming ----

void Coordinator::CreateJob(const CreateJobRequest& request, JobCallback done) {
  const std::string& id = request.request_id();
  if (id.empty()) {
    Schedule([this, request, done] { done(Create(request)); }, done);
    return;
  }
  {
    MutexLock lock(&mutex_);
    std::vector<JobCallback>& callers = creating_[id];
    callers.push_back(std::move(done));
    if (callers.size() > 1) return;
  }
  const auto answer = [this, id](const absl::StatusOr<Job>& job) {
    std::vector<JobCallback> callers;
    {
      MutexLock lock(&mutex_);
      callers = std::move(creating_[id]);
      creating_.erase(id);
    }
    for (JobCallback& caller : callers) caller(job);
  };
  Schedule([this, request, answer] { answer(Create(request)); }, answer);
}

absl::StatusOr<Job> Coordinator::Create(const CreateJobRequest& request) {
  if (const std::optional<uint64_t> same = queue_->FindByRequestId(request.request_id()); same.has_value()) {
    return Await([&](JobCallback done) { queue_->GetJob(*same, std::move(done)); });
  }
  QUERN_RETURN_IF_ERROR(WithReason(CheckAuditFraction(request.audit_fraction()), "BAD_OPTION"));
  if (request.audit_fraction() > 0 && !WritesOutput(request.spec())) {
    return WithReason(absl::InvalidArgumentError("a verification writes nothing that could be audited"), "BAD_OPTION");
  }
  QUERN_ASSIGN_OR_RETURN(const JobSpec spec, CheckSpec(request.spec()));
  if (!WritesOutput(spec)) return Add(request, spec, 1);
  QUERN_RETURN_IF_ERROR(BeginWork(spec.output()));
  absl::StatusOr<Job> job = CreateForOutput(request, spec);
  EndWork(spec.output());
  return job;
}

absl::StatusOr<Job> Coordinator::CreateForOutput(const CreateJobRequest& request, const JobSpec& spec) {
  const std::optional<uint64_t> existing = queue_->FindByOutput(spec.output());
  std::optional<JobRecord> record;
  if (existing.has_value()) record = queue_->Record(*existing);
  uint32_t first_attempt = 1;
  if (record.has_value() && record->state() != Job::SUCCEEDED) {
    QUERN_ASSIGN_OR_RETURN(const PlanSummary plan, LoadPlan(*existing));
    absl::Status same = absl::OkStatus();
    if (record->spec().operation() != spec.operation()) {
      same = absl::FailedPreconditionError("another operation");
    } else {
      same = CheckIdentity(spec, plan);
    }
    if (same.ok()) return Resume(*existing, &request, spec);
    if (!absl::IsFailedPrecondition(same)) return same;
    if (!Overwrites(spec)) {
      return WithReason(
          absl::FailedPreconditionError(absl::StrCat(spec.output(), " belongs to ", JobName(*existing), ", which is ",
                                                     Job::State_Name(record->state()), " and does not fit this request: ", same.message(),
                                                     ". Run it with the inputs and options it had, or use --overwrite to start over")),
          "IDENTITY_CHANGED");
    }
    first_attempt = queue_->NextAttempt(*existing);
    QUERN_RETURN_IF_ERROR(Delete(*existing));
  } else {
    QUERN_ASSIGN_OR_RETURN(std::optional<Job> finished, FindFinished(request, spec, existing));
    if (finished.has_value()) return *std::move(finished);
  }
  return Add(request, spec, first_attempt);
}

absl::StatusOr<std::optional<Job>> Coordinator::FindFinished(const CreateJobRequest& request, const JobSpec& spec,
                                                             std::optional<uint64_t> existing) {
  if (Overwrites(spec)) return std::optional<Job>();
  const absl::StatusOr<std::string> finished = FinishedIdentity(spec.output());
  if (absl::IsNotFound(finished.status())) return std::optional<Job>();
  QUERN_RETURN_IF_ERROR(finished.status());
  QUERN_ASSIGN_OR_RETURN(PlanSummary now, MakeIdentity(spec));
  QUERN_ASSIGN_OR_RETURN(const PlanSummary then, ParseRunJson(JoinPath(spec.output(), ".quern/run.json")));
  if (const std::string difference = IdentityDifference(then, now); !difference.empty()) {
    return WithReason(absl::FailedPreconditionError(absl::StrCat("output ", spec.output(),
                                                                 " holds a finished result that does not fit this request: ", difference,
                                                                 "; use --overwrite to start over, or choose another output")),
                      "IDENTITY_CHANGED");
  }
  double audited = 0;
  if (existing.has_value()) {
    QUERN_ASSIGN_OR_RETURN(const PlanSummary plan, LoadPlan(*existing));
    const std::optional<JobRecord> record = queue_->Record(*existing);
    if (record.has_value() && plan.identity() == now.identity()) audited = record->audit_fraction();
  }
  // The priority of what is done does not matter any more.
  if (const std::string others = OtherSettings(request, audited, std::nullopt); !others.empty()) {
    return WithReason(absl::FailedPreconditionError(
                          absl::StrCat("output ", spec.output(), " holds the finished result, but the request asks for ", others,
                                       existing.has_value() ? absl::StrCat(" (", JobName(*existing), ")") : " as far as is known",
                                       ". What is published cannot be audited any more: leave --audit out to take it as it is, check it "
                                       "with quern verify --against the source, or use --overwrite to do it again with audits")),
                      "SETTINGS_DIFFER");
  }
  // A crash after the last step of publishing leaves the claim's files.
  {
    absl::StatusOr<OutputClaim> claim = OutputClaim::Acquire(spec.output(), options_.owner, "");
    if (!claim.ok()) return NoClaim(claim.status());
    QUERN_RETURN_IF_ERROR(RemoveLeftovers(spec.output()));
  }
  absl::StatusOr<Job> job = absl::NotFoundError("");
  if (existing.has_value()) {
    QUERN_ASSIGN_OR_RETURN(const PlanSummary plan, LoadPlan(*existing));
    if (plan.identity() == now.identity()) job = Await([&](JobCallback done) { queue_->GetJob(*existing, std::move(done)); });
  }
  if (absl::IsNotFound(job.status())) {
    NewJob add;
    add.id = queue_->ReserveId();
    add.request_id = request.request_id();
    add.spec = spec;
    add.priority = request.priority();
    add.plan = std::move(now);
    add.finished = true;
    job = Await([&](JobCallback done) { queue_->AddJob(std::move(add), std::move(done)); });
  }
  QUERN_RETURN_IF_ERROR(job.status());
  job->set_already_done(true);
  return std::optional<Job>(*std::move(job));
}

absl::StatusOr<Job> Coordinator::Add(const CreateJobRequest& request, const JobSpec& spec, uint32_t first_attempt) {
  if (WritesOutput(spec)) QUERN_RETURN_IF_ERROR(CheckOutputUsable(spec.output(), Overwrites(spec)));
  absl::StatusOr<Plan> made = MakePlan(spec, /*with_fingerprints=*/true);
  // All that there is to a synthetic checkpoint are its options.
  if (spec.has_synthesize() && absl::IsInvalidArgument(made.status())) return WithReason(made.status(), "BAD_OPTION");
  QUERN_RETURN_IF_ERROR(made.status());
  Plan& plan = *made;
  QUERN_RETURN_IF_ERROR(CheckSourceFiles(plan.summary));
  if (WritesOutput(spec)) QUERN_RETURN_IF_ERROR(CheckForeignFilesOfPlan(spec.output(), plan.summary));
  NewJob add;
  add.id = queue_->ReserveId();
  QUERN_RETURN_IF_ERROR(Claim(add.id, spec));
  const uint64_t id = add.id;
  const auto store = [&]() -> absl::StatusOr<Job> {
    if (WritesOutput(spec)) {
      first_attempt = std::max(first_attempt, FirstFreeAttempt(spec.output()));
      QUERN_RETURN_IF_ERROR(RemoveLeftovers(spec.output()));
      QUERN_RETURN_IF_ERROR(MakeDirectories(AttemptDirectory(spec.output())));
    }
    QUERN_ASSIGN_OR_RETURN(add.sight, MakeSightProbes(spec, plan.summary, plan.tasks.empty() ? nullptr : plan.tasks.data()));
    add.request_id = request.request_id();
    add.spec = spec;
    add.priority = request.priority();
    add.audit_fraction = request.audit_fraction();
    add.plan = std::move(plan.summary);
    add.tasks = std::move(plan.tasks);
    add.first_attempt = first_attempt;
    return Await([&](JobCallback done) { queue_->AddJob(std::move(add), std::move(done)); });
  };
  absl::StatusOr<Job> job = store();
  if (!job.ok()) {
    if (WritesOutput(spec)) RemoveLeftovers(spec.output()).IgnoreError();  // the first error is the one to tell
    ReleaseClaim(id);
  }
  return job;
}

void Coordinator::GetJob(uint64_t id, JobCallback done) {
  queue_->GetJob(id, [this, id, done = std::move(done)](absl::StatusOr<Job> job) {
    if (!job.ok()) return done(std::move(job));
    Schedule(
        [this, id, done, job = *std::move(job)]() mutable {
          absl::StatusOr<PlanSummary> plan = LoadPlan(id);
          if (!plan.ok()) return done(plan.status());
          *job.mutable_plan() = *std::move(plan);
          done(std::move(job));
        },
        done);
  });
}

absl::StatusOr<Job> Coordinator::Resume(uint64_t id, const CreateJobRequest* request, std::optional<JobSpec> spec) {
  std::optional<JobRecord> record = queue_->Record(id);
  if (!record.has_value()) return absl::NotFoundError(absl::StrCat("there is no ", JobName(id)));
  if (Unfinished(record->state()) && !queue_->IsHeld(id)) {
    const std::string others = request == nullptr ? "" : OtherSettings(*request, record->audit_fraction(), record->priority());
    if (!others.empty()) {
      const std::string name = JobName(id);
      return WithReason(
          absl::FailedPreconditionError(absl::StrCat(
              name, " does this already, with other settings: the request asks for ", others, ". ",
              record->state() == Job::PUBLISHING
                  ? "It is being published, too late to change them: leave them out"
                  : absl::StrCat("Leave them out to follow it as it is; to change them, quern pause ", name, " and submit this again"))),
          "SETTINGS_DIFFER");
    }
    return Await([&](JobCallback done) { queue_->GetJob(id, std::move(done)); });
  }
  // Nothing is taken for what the queue refuses.
  if (record->state() == Job::SUCCEEDED) {
    return Await([&](JobCallback done) { queue_->ResumeJob(id, {}, std::move(done)); });
  }
  // What is done already would not fit what is still to be done.
  if (record->numerics_version() != quant::kNumericsVersion) {
    return WithReason(absl::FailedPreconditionError(absl::StrCat(
                          JobName(id), " was begun with numerics version ", record->numerics_version(), ", this coordinator has ",
                          quant::kNumericsVersion,
                          ": start over with --overwrite. The version of Quern that began it can finish it only with a copy of --state-dir "
                          "that was made before the upgrade")),
                      "NUMERICS_CHANGED");
  }
  const bool held = queue_->IsHeld(id);
  QUERN_ASSIGN_OR_RETURN(const PlanSummary plan, LoadPlan(id));
  QUERN_RETURN_IF_ERROR(CheckStoredPaths(spec.has_value() ? *spec : record->spec(), plan));
  // With a spec the caller has looked already.
  if (!spec.has_value()) QUERN_RETURN_IF_ERROR(CheckIdentity(record->spec(), plan));
  if (WritesOutput(record->spec())) QUERN_RETURN_IF_ERROR(CheckForeignFilesOfPlan(record->spec().output(), plan));
  QUERN_RETURN_IF_ERROR(Claim(id, record->spec()));
  ResumeOptions options;
  QUERN_ASSIGN_OR_RETURN(options.lost_tasks, LostTasks(*record));
  if (WritesOutput(record->spec())) QUERN_RETURN_IF_ERROR(MakeDirectories(AttemptDirectory(record->spec().output())));
  QUERN_ASSIGN_OR_RETURN(options.sight, SightOf(*record, plan));
  options.spec = std::move(spec);
  if (request != nullptr) {
    if (request->has_audit_fraction()) options.audit_fraction = request->audit_fraction();
    if (request->priority() != 0) options.priority = request->priority();
    options.identity = plan.identity();
  }
  // To look at many files takes a while. A job that was paused or cancelled meanwhile is not to go on.
  if (held && !queue_->IsHeld(id)) {
    return Await([&](JobCallback done) { queue_->GetJob(id, std::move(done)); });
  }
  return Await([&](JobCallback done) { queue_->ResumeJob(id, std::move(options), std::move(done)); });
}

void Coordinator::ResumeJob(uint64_t id, JobCallback done) {
  Schedule(
      [this, id, done] {
        const std::optional<JobRecord> record = queue_->Record(id);
        if (!record.has_value()) return done(absl::NotFoundError(absl::StrCat("there is no ", JobName(id))));
        const std::string& output = record->spec().output();
        if (absl::Status begun = BeginWork(output); !begun.ok()) return done(begun);
        absl::StatusOr<Job> job = Resume(id, nullptr, std::nullopt);
        EndWork(output);
        done(std::move(job));
      },
      done);
}

void Coordinator::Recheck(uint64_t id) {
  const std::optional<JobRecord> record = queue_->Record(id);
  if (!record.has_value() || !BeginWork(record->spec().output()).ok()) return;
  if (queue_->IsHeld(id)) {
    const absl::StatusOr<Job> job = Resume(id, nullptr, std::nullopt);
    if (!WaitsForFiles(id, job.status()) && !job.ok()) queue_->FailJob(id, ErrorOf(job.status(), "IO_ERROR"), nullptr);
  }
  EndWork(record->spec().output());
}

bool Coordinator::WaitsForFiles(uint64_t id, const absl::Status& status) {
  const absl::Duration now = options_.clock->Monotonic();
  MutexLock lock(&mutex_);
  if (MayPass(status)) {
    const auto [waiting, is_new] = waiting_for_files_.try_emplace(id, now + options_.recheck_patience);
    if (now < waiting->second) {
      if (is_new && options_.log) options_.log(absl::StrCat("job event=waits_for_files job=", JobName(id), MessageField(status.message())));
      return true;
    }
  }
  waiting_for_files_.erase(id);
  return false;
}

void Coordinator::RecheckWaiting() {
  std::vector<uint64_t> jobs;
  {
    MutexLock lock(&mutex_);
    for (const auto& [job, until] : waiting_for_files_) jobs.push_back(job);
  }
  for (const uint64_t job : jobs) {
    if (queue_->IsHeld(job)) {
      Schedule([this, job] { Recheck(job); }, nullptr);
    } else {
      MutexLock lock(&mutex_);
      waiting_for_files_.erase(job);
    }
  }
}

absl::Status Coordinator::Delete(uint64_t id) {
  const std::optional<JobRecord> record = queue_->Record(id);
  if (!record.has_value()) return absl::NotFoundError(absl::StrCat("there is no ", JobName(id)));
  const JobSpec& spec = record->spec();
  bool claimed = false;  // before
  {
    MutexLock lock(&mutex_);
    claimed = claims_.count(id) > 0;
  }
  const auto remove = [&]() -> absl::Status {
    // The files first: while there are any the job is known, and deleting it may be asked for again.
    if (WritesOutput(spec) && record->state() != Job::SUCCEEDED) {
      QUERN_RETURN_IF_ERROR(CheckStoredOutput(spec));
      // Another coordinator may be at work there by now.
      QUERN_RETURN_IF_ERROR(Claim(id, spec));
      QUERN_RETURN_IF_ERROR(RemovePlacedShards(*record));
      QUERN_RETURN_IF_ERROR(RemoveLeftovers(spec.output()));
    }
    std::promise<absl::Status> deleted;
    queue_->DeleteJob(id, [&deleted](absl::Status status) { deleted.set_value(std::move(status)); });
    return deleted.get_future().get();
  };
  const absl::Status status = remove();
  if (status.ok() || !claimed) ReleaseClaim(id);
  return status;
}

// Shards that an unfinished publishing has put into place: without a manifest nobody else would know of them.
absl::Status Coordinator::RemovePlacedShards(const JobRecord& record) {
  const std::string& output = record.spec().output();
  if (FileExists(JoinPath(output, kManifestName))) return absl::OkStatus();
  QUERN_ASSIGN_OR_RETURN(const RunRecord publishing, ReadRunRecord(output));
  for (const JobQueue::CommittedAttempt& shard : queue_->CommittedAttempts(record.id())) {
    const std::string placed = JoinPath(output, shard.label);
    const absl::StatusOr<uint64_t> size = FileSize(placed);
    const bool ours = std::find(publishing.names.begin(), publishing.names.end(), shard.label) != publishing.names.end();
    if (!ours || FileExists(AttemptPath(output, shard.task, shard.attempt)) || !size.ok() || *size != shard.size) continue;
    QUERN_RETURN_IF_ERROR(RemoveFile(placed));
  }
  return absl::OkStatus();
}

void Coordinator::DeleteJob(uint64_t id, std::function<void(absl::Status)> done) {
  Schedule(
      [this, id, done] {
        const std::optional<JobRecord> record = queue_->Record(id);
        if (!record.has_value()) return done(absl::NotFoundError(absl::StrCat("there is no ", JobName(id))));
        const std::string& output = record->spec().output();
        if (absl::Status begun = BeginWork(output); !begun.ok()) return done(begun);
        // Again, now that nothing else is at work there.
        const std::optional<JobRecord> now = queue_->Record(id);
        absl::Status status = absl::OkStatus();
        if (now.has_value() && !Ended(now->state())) {
          status = absl::FailedPreconditionError(
              absl::StrCat(JobName(id), " is ", Job::State_Name(now->state()), ": cancel it before it is deleted"));
        } else {
          status = Delete(id);
        }
        EndWork(output);
        done(status);
      },
      done);
}

// ---- The end of a job ----

void Coordinator::Publish(uint64_t id) {
  const std::optional<JobRecord> found = queue_->Record(id);
  if (!found.has_value() || found->state() != Job::PUBLISHING) {
    MutexLock lock(&mutex_);
    publish_tries_.erase(id);
    return;
  }
  if (!BeginWork(found->spec().output()).ok()) return;
  const std::optional<JobRecord> record = queue_->Record(id);
  if (record.has_value() && record->state() == Job::PUBLISHING) {
    std::vector<quern::v1::Mismatch> mismatches;
    const absl::Duration began = options_.clock->Monotonic();
    absl::Status status = PublishOrVerify(*record, &mismatches);
    publish_metrics_.seconds.Observe(absl::ToDoubleSeconds(options_.clock->Monotonic() - began));
    const bool again = WillPublishAgain(*record, &status);
    (status.ok() ? publish_metrics_.succeeded : publish_metrics_.failed).Add();
    if (status.ok()) {
      const absl::StatusOr<Job> job = Await([&](JobCallback done) { queue_->FinishJob(id, std::move(mismatches), std::move(done)); });
      if (job.ok()) ReleaseClaim(id);
    } else if (!again) {
      queue_->FailJob(id, ErrorOf(status, "IO_ERROR"), nullptr);
    }
  }
  EndWork(found->spec().output());
}

bool Coordinator::WillPublishAgain(const JobRecord& record, absl::Status* status) {
  // What has a reason of its own, and a full disk, need somebody to do something.
  const bool may_pass = !status->ok() && MayPass(*status) && ReasonOf(*status).empty();
  std::string wait;
  {
    MutexLock lock(&mutex_);
    PublishTries& tries = publish_tries_[record.id()];
    const uint32_t failures = ++tries.failures;
    if (!may_pass || failures >= record.max_failures()) {
      publish_tries_.erase(record.id());
      if (may_pass) *status = Annotate(*status, absl::StrCat("failed ", failures, " times, the last time with"));
      return false;
    }
    const absl::Duration pause = queue_->RetryWait(failures);
    tries.next = options_.clock->Monotonic() + pause;
    wait = absl::FormatDuration(pause);
  }
  if (options_.log) {
    options_.log(absl::StrCat("job event=publish_again job=", JobName(record.id()), " wait=", wait, MessageField(status->message())));
  }
  return true;
}

void Coordinator::PublishAgain() {
  const absl::Duration now = options_.clock->Monotonic();
  std::vector<uint64_t> due;
  {
    MutexLock lock(&mutex_);
    for (auto& [job, tries] : publish_tries_) {
      if (tries.next > now) continue;
      tries.next = absl::InfiniteDuration();
      due.push_back(job);
    }
  }
  for (const uint64_t job : due) Schedule([this, job] { Publish(job); }, nullptr);
}

absl::Status Coordinator::PublishOrVerify(const JobRecord& record, std::vector<quern::v1::Mismatch>* mismatches) {
  const uint64_t id = record.id();
  QUERN_ASSIGN_OR_RETURN(const PlanSummary plan, LoadPlan(id));
  QUERN_RETURN_IF_ERROR(CheckStoredPaths(record.spec(), plan));
  if (!WritesOutput(record.spec())) {
    mismatches->assign(plan.mismatches().begin(), plan.mismatches().end());
    Manifest manifest;
    if (!record.spec().verify().against().empty()) {
      const std::string path = JoinPath(record.spec().output(), kManifestName);
      QUERN_ASSIGN_OR_RETURN(const std::string text, ReadFileToString(path));
      // One that cannot be read is among the plan's mismatches.
      if (absl::StatusOr<Manifest> parsed = ParseManifest(text, path); parsed.ok()) manifest = *std::move(parsed);
    }
    for (uint32_t task = 0; task < record.tasks(); ++task) {
      QUERN_ASSIGN_OR_RETURN(const quern::v1::TaskResult result, LoadResult(id, task));
      mismatches->insert(mismatches->end(), result.mismatches().begin(), result.mismatches().end());
      if (manifest.modules.empty() && manifest.copied.empty()) continue;
      QUERN_ASSIGN_OR_RETURN(const quern::v1::TaskSpec spec, LoadTask(id, task));
      for (quern::v1::Mismatch& mismatch : SourceDigestMismatches(manifest, spec, result)) mismatches->push_back(std::move(mismatch));
    }
    return absl::OkStatus();
  }
  QUERN_RETURN_IF_ERROR(CheckIdentity(record.spec(), plan));
  QUERN_RETURN_IF_ERROR(RemoveFile(SightPath(record.spec().output())));
  std::map<uint32_t, uint32_t> attempts;
  for (const JobQueue::CommittedAttempt& committed : queue_->CommittedAttempts(id)) attempts[committed.task] = committed.attempt;
  std::vector<bool> checked(record.tasks());  // each is loaded several times
  PublishRequest request;
  request.spec = &record.spec();
  request.plan = &plan;
  request.tasks = record.tasks();
  request.load_task = [&](uint32_t task) -> absl::StatusOr<CommittedTask> {
    CommittedTask committed;
    QUERN_ASSIGN_OR_RETURN(committed.spec, LoadTask(id, task));
    QUERN_ASSIGN_OR_RETURN(committed.result, LoadResult(id, task));
    if (!checked[task]) {
      if (const absl::Status fits = CheckReport(committed.spec, committed.result); !fits.ok()) return BadReport(id, committed.spec, fits);
      checked[task] = true;
    }
    committed.attempt = attempts[task];
    return committed;
  };
  QUERN_ASSIGN_OR_RETURN(request.run_json, BuildRunJson(options_.store, record, plan));
  return options_.publish(request);
}

// ---- Calls without a job ----

void Coordinator::PlanJob(const JobSpec& spec, std::function<void(absl::StatusOr<Plan>)> done) {
  Schedule(
      [this, spec, done] {
        JobSpec resolved = spec;
        const absl::Status checked = [&]() -> absl::Status {
          QUERN_RETURN_IF_ERROR(CheckDetails(spec));
          // A plan needs no output; where there is one it must do. To verify means to verify one.
          if (!spec.output().empty() || spec.has_verify()) {
            QUERN_ASSIGN_OR_RETURN(resolved, CheckSpec(spec));
            resolved.set_output(spec.output());  // as it was written, which the plan shows
            return absl::OkStatus();
          }
          QUERN_RETURN_IF_ERROR(CheckOptions(spec));
          return CheckInputs(resolved).status();
        }();
        done(checked.ok() ? MakePlan(resolved, /*with_fingerprints=*/false) : checked);
      },
      done);
}

void Coordinator::Inspect(const std::string& path, std::function<void(absl::StatusOr<quern::v1::InspectCheckpointResponse>)> done) {
  Schedule(
      [this, path, done] {
        const absl::Status checked = CheckSource(path).status();
        done(checked.ok() ? daemon::Inspect(path) : checked);
      },
      done);
}

}  // namespace quern::daemon
