// Jobs, storage and the rules by which attempts end. job_queue_workers.cc has the protocol of workers.
#include "daemon/queue/job_queue.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/byte_size.h"
#include "base/digest.h"
#include "base/log_fields.h"
#include "base/status_macros.h"
#include "base/task_memory.h"
#include "base/text_check.h"
#include "daemon/queue/audit.h"
#include "daemon/queue/names.h"

namespace quern::daemon {
namespace {

using quern::store::AttemptRecord;
using quern::store::JobRecord;
using quern::store::TaskRecord;
using quern::v1::Job;
using quern::v1::JobError;
using quern::v1::Task;

constexpr char kNextJobKey[] = "n";
constexpr char kMismatch[] = "DATA_LOSS";  // of an error: two workers came to different bytes
// Bytes of specs in one write. Those of a job that a crash kept from being added are written over by the next one, which has its number.
constexpr size_t kSpecsAtOnce = 4 << 20;

void SetTimestamp(int64_t ns, google::protobuf::Timestamp* timestamp) {
  timestamp->set_seconds(ns / 1'000'000'000);
  timestamp->set_nanos(static_cast<int32_t>(ns % 1'000'000'000));
}

// Numbers in keys: big-endian, as JobKey writes them.
uint64_t ReadBigEndian(absl::string_view bytes) {
  uint64_t value = 0;
  for (char c : bytes) value = value << 8 | static_cast<unsigned char>(c);
  return value;
}

bool Terminal(Job::State state) { return state == Job::SUCCEEDED || state == Job::FAILED || state == Job::CANCELLED; }

TaskRecord MakeTaskRecord(const quern::v1::TaskSpec& spec, uint32_t first_attempt) {
  TaskRecord record;
  record.set_state(Task::PENDING);
  record.set_next_attempt(first_attempt);
  record.set_label(spec.label());
  *record.mutable_layers() = spec.layers();
  record.set_bytes_to_read(spec.bytes_to_read());
  record.set_bytes_to_write(spec.bytes_to_write());
  record.set_minimum_memory(spec.minimum_memory());
  record.set_has_output(spec.has_write_shard());
  return record;
}

}  // namespace

std::string SightDigest(absl::string_view nonce, absl::string_view samples) {
  Sha256 sha;
  sha.Update(nonce);
  sha.Update(samples);
  return sha.Finish();
}

// ---- Sections and storage ----

JobQueue::Section::Section(JobQueue* queue) : queue_(queue) { queue_->mutex_.Lock(); }

// The analysis does not follow a mutex through a pointer of the section.
JobQueue::Section::~Section() QUERN_NO_THREAD_SAFETY_ANALYSIS {
  queue_->AnswerWaiters();
  queue_->Flush();
  std::vector<std::function<void()>> run;
  run.swap(queue_->after_unlock_);
  queue_->mutex_.Unlock();
  for (auto& f : run) f();
}

JobQueue::JobQueue(JobQueueOptions options) : options_(std::move(options)), random_(std::random_device{}()) {}

JobQueue::~JobQueue() {
  Shutdown();
  MutexLock lock(&mutex_);
  while (outside_ > 0) idle_.Wait(&mutex_);
}

void JobQueue::Say(std::function<void(absl::Status)> what) { to_say_.push_back(std::move(what)); }

void JobQueue::Put(std::string key, std::string value) { writes_.push_back({StoreWrite::Kind::kPut, std::move(key), std::move(value)}); }

void JobQueue::PutJob(JobState& job) { Put(JobKey('j', job.record.id()), job.record.SerializeAsString()); }

void JobQueue::PutTask(JobState& job, uint32_t task) {
  Put(TaskKey('t', job.record.id(), task), job.tasks[task].record.SerializeAsString());
}

void JobQueue::PutAttempt(const AttemptRef& ref, const AttemptRecord& record) {
  Put(AttemptKey(ref.job, ref.task, ref.attempt), record.SerializeAsString());
}

void JobQueue::Flush() {
  if (!writes_.empty()) {
    const uint64_t sequence = ++handed_over_;
    ++outside_;
    // Under the mutex, so that batches reach the store in the order of the changes.
    options_.store->Write(std::move(writes_), [this, sequence](absl::Status status) { OnStored(sequence, std::move(status)); });
    writes_.clear();
  }
  for (auto& what : to_say_) {
    if (broken_.ok() && durable_ != handed_over_) {
      unsaid_.emplace(handed_over_, std::move(what));
    } else {
      after_unlock_.push_back([what = std::move(what), status = broken_] { what(status); });
    }
  }
  to_say_.clear();
}

void JobQueue::OnStored(uint64_t sequence, absl::Status status) {
  {
    Section section(this);
    durable_ = sequence;
    if (!status.ok() && broken_.ok()) {
      broken_ = status;
      if (options_.on_broken) after_unlock_.push_back([this, status] { options_.on_broken(status); });
      // What waits for nothing but time must hear of it too.
      news_for_all_ = true;
    }
    while (!unsaid_.empty() && (unsaid_.begin()->first <= sequence || !broken_.ok())) {
      after_unlock_.push_back([what = std::move(unsaid_.begin()->second), status = broken_] { what(status); });
      unsaid_.erase(unsaid_.begin());
    }
  }
  RunDone();
}

void JobQueue::Run(std::function<void()> work) {
  ++outside_;
  after_unlock_.push_back([this, work = std::move(work)] {
    options_.run([this, work] {
      work();
      RunDone();
    });
  });
}

void JobQueue::RunReads(std::function<void()> work) {
  if (!options_.run_reads) return Run(std::move(work));
  ++outside_;
  after_unlock_.push_back([this, work = std::move(work)] {
    options_.run_reads([this, work] {
      work();
      RunDone();
    });
  });
}

void JobQueue::RunDone() {
  MutexLock lock(&mutex_);
  --outside_;
  idle_.SignalAll();
}

void JobQueue::Log(std::string line) {
  if (options_.on_event) after_unlock_.push_back([this, line = std::move(line)] { options_.on_event(line); });
}

absl::StatusOr<std::unique_ptr<JobQueue>> JobQueue::Open(JobQueueOptions options) {
  std::unique_ptr<JobQueue> queue(new JobQueue(std::move(options)));
  QUERN_RETURN_IF_ERROR(queue->Load());
  return queue;
}

absl::Status JobQueue::Load() {
  MutexLock lock(&mutex_);
  JobStore* const store = options_.store;
  // Revisions must grow over restarts, and are not stored.
  revision_ = static_cast<uint64_t>(absl::ToUnixMicros(options_.clock->Wall()));
  const absl::StatusOr<std::string> next = store->Get(kNextJobKey);
  if (next.ok()) {
    next_job_ = ReadBigEndian(*next);
  } else if (!absl::IsNotFound(next.status())) {
    return next.status();
  }
  const absl::Duration now = options_.clock->Monotonic();
  // Job records first: the visitor must not scan while it is called.
  QUERN_RETURN_IF_ERROR(store->Scan("j", [&](absl::string_view key, absl::string_view value) QUERN_NO_THREAD_SAFETY_ANALYSIS {
    const uint64_t id = ReadBigEndian(key.substr(1));
    JobState& job = jobs_[id];
    if (!job.record.ParseFromArray(value.data(), static_cast<int>(value.size())) || job.record.id() != id) {
      return absl::DataLossError(absl::StrCat("job store: unreadable record of ", JobName(id)));
    }
    job.revision = ++revision_;
    return absl::OkStatus();
  }));
  for (auto& [id, job] : jobs_) {
    QUERN_RETURN_IF_ERROR(store->Scan(JobKey('t', id), [&, &job = job](absl::string_view, absl::string_view value) {
      TaskRecord record;
      if (!record.ParseFromArray(value.data(), static_cast<int>(value.size())) || !Task::State_IsValid(record.state())) {
        return absl::DataLossError(absl::StrCat("job store: unreadable record of ", TaskName(job.record.id(), job.tasks.size())));
      }
      AddTask(job, std::move(record));
      return absl::OkStatus();
    }));
    if (job.tasks.size() != job.record.tasks()) {
      return absl::DataLossError(
          absl::StrCat("job store: ", JobName(id), " has ", job.tasks.size(), " task records of ", job.record.tasks()));
    }
    const Job::State state = job.record.state();
    if (!Terminal(state)) active_.insert(id);
    job.held = state == Job::QUEUED || state == Job::RUNNING || state == Job::PUBLISHING;
    if (job.held) settled_at_ = now + options_.settle;
    const bool stopping = state == Job::CANCELLING || state == Job::CANCELLED || state == Job::FAILED;
    const auto load_attempt = [&, &job = job](absl::string_view key, absl::string_view value) QUERN_NO_THREAD_SAFETY_ANALYSIS {
      const AttemptRef ref{job.record.id(), static_cast<uint32_t>(ReadBigEndian(key.substr(9, 4))),
                           static_cast<uint32_t>(ReadBigEndian(key.substr(13, 4)))};
      Attempt attempt;
      if (key.size() != 17 || ref.task >= job.tasks.size() ||
          !attempt.record.ParseFromArray(value.data(), static_cast<int>(value.size()))) {
        return absl::DataLossError(absl::StrCat("job store: unreadable attempt of ", JobName(ref.job)));
      }
      job.next_sequence = std::max({job.next_sequence, attempt.record.grant_sequence() + 1, attempt.record.commit_sequence() + 1});
      TaskState& task = job.tasks[ref.task];
      const bool audit = attempt.record.purpose() == quern::v1::AUDIT;
      if (task.record.state() == Task::COMMITTED && !(audit && task.record.audit() == TaskRecord::DUE)) return absl::OkStatus();
      const bool granted = attempt.record.state() == quern::v1::Attempt::GRANTED;
      if (!granted && attempt.record.state() != quern::v1::Attempt::LOST) return absl::OkStatus();
      attempt.deadline = now + options_.lease;
      attempt.granted_at = now;
      attempt.stop = stopping;
      if (stopping) attempt.stop_reason = "the job was stopped";
      if (granted) {
        ++job.granted;
        WorkerState& worker = workers_[attempt.record.worker()];
        worker.info.set_worker(attempt.record.worker());
        worker.info.set_incarnation(attempt.record.incarnation());
        worker.info.set_host(attempt.record.host());
        worker.info.set_machine(attempt.record.machine());
        if (attempt.record.has_principal()) worker.principal = attempt.record.principal();
        worker.last_seen = now;
        worker.last_seen_wall = absl::FromUnixNanos(attempt.record.grant_time_ns());
        worker.granted.insert(ref);
      }
      task.attempts.emplace(ref.attempt, std::move(attempt));
      job.live.insert(ref.task);
      return absl::OkStatus();
    };
    QUERN_RETURN_IF_ERROR(store->Scan(JobKey('a', id), load_attempt));
    if (job.audits_left > 0) {
      for (uint32_t task = 0; task < job.tasks.size(); ++task) IndexAudit(job, task);
    }
  }
  return store->Scan("w", [&](absl::string_view key, absl::string_view value) QUERN_NO_THREAD_SAFETY_ANALYSIS {
    quern::store::WorkerRecord record;
    if (!record.ParseFromArray(value.data(), static_cast<int>(value.size())) || record.name() != key.substr(1)) {
      return absl::DataLossError("job store: unreadable record of a worker");
    }
    const auto [it, inserted] = workers_.try_emplace(record.name());
    WorkerState& worker = it->second;
    worker.standing = std::move(record);
    if (inserted) {
      worker.info.set_worker(it->first);
      worker.last_seen = now;
      worker.lost = true;
    }
    return absl::OkStatus();
  });
}

// ---- Small things ----

JobQueue::JobState* JobQueue::FindJob(uint64_t id) {
  const auto it = jobs_.find(id);
  return it == jobs_.end() ? nullptr : &it->second;
}

JobQueue::Attempt* JobQueue::FindAttempt(const AttemptRef& ref) {
  JobState* const job = FindJob(ref.job);
  if (job == nullptr || ref.task >= job->tasks.size()) return nullptr;
  auto& attempts = job->tasks[ref.task].attempts;
  const auto it = attempts.find(ref.attempt);
  return it == attempts.end() ? nullptr : &it->second;
}

bool JobQueue::Schedulable(const JobState& job) {
  return !job.held && (job.record.state() == Job::QUEUED || job.record.state() == Job::RUNNING);
}

bool JobQueue::HasGranted(const TaskState& task) {
  return std::any_of(task.attempts.begin(), task.attempts.end(),
                     [](const auto& entry) { return entry.second.record.state() == quern::v1::Attempt::GRANTED; });
}

bool JobQueue::Complete(const JobState& job) { return job.count[Task::COMMITTED] == job.tasks.size() && job.audits_left == 0; }

void JobQueue::NewsFor(const std::string& worker) { news_for_.insert(worker); }

void JobQueue::AddTask(JobState& job, TaskRecord record) {
  const auto task = static_cast<uint32_t>(job.tasks.size());
  ++job.count[record.state()];
  if (record.state() == Task::PENDING) job.pending.Insert(task, record.minimum_memory());
  job.audits_left += record.audit() == TaskRecord::DUE;
  job.audits_passed += record.audit() == TaskRecord::PASSED;
  job.totals.to_read += record.bytes_to_read();
  job.totals.to_write += record.bytes_to_write();
  if (record.state() == Task::COMMITTED) AddToTotals(record, &job.totals);
  job.tasks.emplace_back().record = std::move(record);
}

void JobQueue::AddToTotals(const TaskRecord& task, Totals* totals) {
  totals->read += task.bytes_read();
  totals->written += task.bytes_written();
  totals->sum_squared_error += task.sum_squared_error();
  totals->sum_squares += task.sum_squares();
  totals->max_abs_error = std::max(totals->max_abs_error, task.max_abs_error());
  if (task.worst_relative_error() > totals->worst_relative_error) {
    totals->worst_relative_error = task.worst_relative_error();
    totals->worst_module = task.worst_module();
  }
}

void JobQueue::CountTotals(JobState& job) {
  const uint64_t to_read = job.totals.to_read, to_write = job.totals.to_write;
  job.totals = Totals();
  job.totals.to_read = to_read;
  job.totals.to_write = to_write;
  for (const TaskState& task : job.tasks) {
    if (task.record.state() == Task::COMMITTED) AddToTotals(task.record, &job.totals);
  }
}

void JobQueue::MoveTask(JobState& job, uint32_t task, Task::State state) {
  TaskRecord& record = job.tasks[task].record;
  const auto trouble = job.trouble.find(task);
  if (record.state() == Task::PENDING) {
    job.pending.Erase(task, record.minimum_memory());
    if (trouble != job.trouble.end()) job.delayed.erase({trouble->second.not_before, task});
  }
  --job.count[record.state()];
  record.set_state(state);
  ++job.count[state];
  job.stragglers.erase(task);
  if (state != Task::PENDING) return;
  if (trouble != job.trouble.end() && trouble->second.not_before > options_.clock->Monotonic()) {
    job.delayed.insert({trouble->second.not_before, task});
  } else {
    job.pending.Insert(task, record.minimum_memory());
    work_arrived_ = true;
  }
}

void JobQueue::SetAttemptState(JobState& job, Attempt& attempt, quern::v1::Attempt::State state) {
  job.granted -= attempt.record.state() == quern::v1::Attempt::GRANTED;
  job.granted += state == quern::v1::Attempt::GRANTED;
  attempt.record.set_state(state);
}

void JobQueue::SetAudit(JobState& job, uint32_t task, TaskRecord::Audit audit) {
  TaskRecord& record = job.tasks[task].record;
  job.audits_left -= record.audit() == TaskRecord::DUE;
  job.audits_passed -= record.audit() == TaskRecord::PASSED;
  record.set_audit(audit);
  job.audits_left += audit == TaskRecord::DUE;
  job.audits_passed += audit == TaskRecord::PASSED;
  IndexAudit(job, task);
}

void JobQueue::IndexAudit(JobState& job, uint32_t task) {
  const TaskState& state = job.tasks[task];
  if (state.record.state() != Task::COMMITTED || state.record.audit() != TaskRecord::DUE || HasGranted(state)) {
    job.audits.erase(task);
  } else if (job.audits.try_emplace(task, options_.clock->Monotonic()).second) {
    work_arrived_ = true;
  }
}

void JobQueue::Uncommit(JobState& job, uint32_t task, Task::State state) {
  std::vector<AttemptRef> audits;
  for (const auto& [number, attempt] : job.tasks[task].attempts) audits.push_back({job.record.id(), task, number});
  for (const AttemptRef& ref : audits) EndAttempt(ref, quern::v1::Attempt::STOPPED, "FENCED", "what it was to audit is done anew");
  TaskRecord& record = job.tasks[task].record;
  record.clear_committed_attempt();
  record.clear_committed_by();
  record.clear_committed_on();
  record.clear_audited_by();
  record.clear_audited_on();
  record.clear_sha256();
  MoveTask(job, task, state);
  SetAudit(job, task, record.audit() == TaskRecord::PASSED ? TaskRecord::DUE : record.audit());
  PutTask(job, task);
  writes_.push_back({StoreWrite::Kind::kDelete, TaskKey('r', job.record.id(), task), ""});
}

void JobQueue::Changed(JobState& job) { job.revision = ++revision_; }

quern::v1::Job JobQueue::Snapshot(const JobState& job) const {
  const JobRecord& record = job.record;
  Job out;
  out.set_name(JobName(record.id()));
  *out.mutable_spec() = record.spec();
  out.set_state(record.state());
  if (record.has_error()) *out.mutable_error() = record.error();
  SetTimestamp(record.create_time_ns(), out.mutable_create_time());
  if (record.end_time_ns() != 0) SetTimestamp(record.end_time_ns(), out.mutable_end_time());
  *out.mutable_mismatches() = record.mismatches();
  out.set_priority(record.priority());
  out.set_revision(job.revision);
  out.set_audit_fraction(record.audit_fraction());
  out.set_numerics_version(record.numerics_version());
  out.set_waits_for(WaitsFor(job));
  quern::v1::Progress& progress = *out.mutable_progress();
  progress.set_tasks_total(static_cast<uint32_t>(job.tasks.size()));
  progress.set_tasks_done(job.count[Task::COMMITTED]);
  progress.set_tasks_running(job.count[Task::RUNNING]);
  progress.set_tasks_failed(job.count[Task::FAILED]);
  progress.set_tasks_to_audit(job.audits_left + job.audits_passed);
  progress.set_tasks_audited(job.audits_passed);
  uint64_t read = job.totals.read, written = job.totals.written;
  for (const uint32_t index : job.live) {
    const TaskState& task = job.tasks[index];
    if (task.record.state() == Task::COMMITTED) continue;
    // Of several tries only the farthest counts.
    uint64_t attempt_read = 0, attempt_written = 0;
    for (const auto& [number, attempt] : task.attempts) {
      if (attempt.record.state() != quern::v1::Attempt::GRANTED) continue;
      attempt_read = std::max(attempt_read, attempt.bytes_read);
      attempt_written = std::max(attempt_written, attempt.bytes_written);
    }
    read += attempt_read;
    written += attempt_written;
  }
  progress.set_bytes_read(read);
  progress.set_bytes_written(written);
  progress.set_bytes_to_read(job.totals.to_read);
  progress.set_bytes_to_write(job.totals.to_write);
  progress.set_sum_squared_error(job.totals.sum_squared_error);
  progress.set_sum_squares(job.totals.sum_squares);
  progress.set_max_abs_error(job.totals.max_abs_error);
  progress.set_worst_module(job.totals.worst_module);
  progress.set_worst_relative_error(job.totals.worst_relative_error);
  return out;
}

void JobQueue::SayJob(const JobState& job, JobCallback done) {
  if (!done) return;
  Say([done = std::move(done), snapshot = Snapshot(job)](absl::Status status) {
    if (status.ok()) {
      done(snapshot);
    } else {
      done(status);
    }
  });
}

void JobQueue::SayError(absl::Status status, JobCallback done) {
  if (!done) return;
  Say([done = std::move(done), status = std::move(status)](absl::Status stored) { done(stored.ok() ? status : stored); });
}

namespace {
absl::Status NoSuchJob(uint64_t job) { return absl::NotFoundError(absl::StrCat("there is no ", JobName(job))); }
}  // namespace

// ---- Changes of jobs ----

void JobQueue::SetState(JobState& job, Job::State state) {
  job.record.set_state(state);
  job.record.set_end_time_ns(Terminal(state) ? absl::ToUnixNanos(options_.clock->Wall()) : 0);
  if (Terminal(state)) {
    active_.erase(job.record.id());
  } else {
    active_.insert(job.record.id());
  }
  PutJob(job);
  Changed(job);
  work_arrived_ = true;
  if (Terminal(state)) {
    ++counts_.jobs_ended[state];
    job_seconds_.Observe(static_cast<double>(job.record.end_time_ns() - job.record.create_time_ns()) * 1e-9);
  }
  const JobError& error = job.record.error();
  Log(absl::StrCat("job event=state job=", JobName(job.record.id()), " state=", Job::State_Name(state),
                   error.reason().empty() ? "" : absl::StrCat(" reason=", LogValue(error.reason())), MessageField(error.message())));
}

void JobQueue::MakeReady(JobState& job) {
  SetState(job, Job::PUBLISHING);
  Say([this, id = job.record.id()](absl::Status status) {
    if (status.ok()) options_.on_ready(id);
  });
}

void JobQueue::StopAttempts(JobState& job, const std::string& reason) {
  for (const uint32_t task : job.live) {
    for (auto& [number, attempt] : job.tasks[task].attempts) {
      if (attempt.stop) continue;
      attempt.stop = true;
      attempt.stop_reason = reason;
      NewsFor(attempt.record.worker());
    }
  }
}

void JobQueue::Fail(JobState& job, JobError error) {
  const Job::State state = job.record.state();
  // The first error is the one that says what to do.
  if (state == Job::SUCCEEDED || state == Job::FAILED || state == Job::CANCELLED) return;
  *job.record.mutable_error() = std::move(error);
  StopAttempts(job, "the job failed");
  SetState(job, Job::FAILED);
}

void JobQueue::FailTask(JobState& job, uint32_t task, const std::string& reason, const std::string& message) {
  const TaskRecord& record = job.tasks[task].record;
  const bool audit = record.state() == Task::COMMITTED;
  if (!audit) {
    MoveTask(job, task, Task::FAILED);
    PutTask(job, task);
  }
  JobError error;
  error.set_reason(reason);
  error.set_message(absl::StrCat(audit ? "audit of task " : "task ", task, " (", record.label(), "): ", message));
  error.set_task(TaskName(job.record.id(), task));
  Fail(job, std::move(error));
}

uint64_t JobQueue::BytesLeft(const JobState& job) {
  uint64_t bytes = 0;
  for (const TaskState& task : job.tasks) {
    if (task.record.state() != Task::COMMITTED) bytes += task.record.bytes_to_write();
  }
  return bytes;
}

void JobQueue::FailFullDisk(JobState& job, uint32_t task, const quern::v1::Failure& failure) {
  const uint64_t needed = std::max(BytesLeft(job), failure.bytes_needed());
  JobError error;
  error.set_reason("DISK_FULL");
  error.set_task(TaskName(job.record.id(), task));
  error.set_message(absl::StrCat("disk full: ", job.record.spec().output(), " needs ", needed, " bytes (", FormatByteSize(needed),
                                 ") more; free them and run the job again, finished shards are kept (", failure.message(), ")"));
  Fail(job, std::move(error));
}

void JobQueue::EndAttempt(const AttemptRef& ref, quern::v1::Attempt::State state, const std::string& reason, const std::string& message) {
  JobState& job = *FindJob(ref.job);
  TaskState& task = job.tasks[ref.task];
  const auto it = task.attempts.find(ref.attempt);
  AttemptRecord& record = it->second.record;
  SetAttemptState(job, it->second, state);
  record.set_end_time_ns(absl::ToUnixNanos(options_.clock->Wall()));
  record.set_reason(reason);
  record.set_message(message);
  PutAttempt(ref, record);
  CountEnd(state, reason);
  Log(absl::StrCat("attempt event=ended ", AttemptFields(JobName(ref.job), ref.task, ref.attempt), " worker=", LogValue(record.worker()),
                   " state=", quern::v1::Attempt::State_Name(state), " reason=", LogValue(reason), MessageField(message)));
  if (const auto worker = workers_.find(record.worker()); worker != workers_.end()) worker->second.granted.erase(ref);
  NewsFor(record.worker());
  // A lost one may still commit.
  if (state != quern::v1::Attempt::LOST) task.attempts.erase(it);
  if (task.attempts.empty()) job.live.erase(ref.task);
  if (task.record.state() == Task::RUNNING && !HasGranted(task)) {
    MoveTask(job, ref.task, Task::PENDING);
    PutTask(job, ref.task);
  }
  job.stragglers.erase(ref.task);
  IndexAudit(job, ref.task);
  Changed(job);
  if (job.record.state() == Job::CANCELLING && job.granted == 0) SetState(job, Job::CANCELLED);
}

bool JobQueue::HalveMemory(TaskState& task, uint64_t used) {
  const uint64_t next = std::max(used / 2, task.record.minimum_memory());
  if (next >= used) return false;
  task.record.set_memory_limit(next);
  return true;
}

void JobQueue::CountFailure(JobState& job, uint32_t task, const std::string& reason, const std::string& message) {
  TaskRecord& record = job.tasks[task].record;
  record.set_failures(record.failures() + 1);
  PutTask(job, task);
  if (record.failures() >= job.record.max_failures()) {
    FailTask(job, task, reason, absl::StrCat("failed ", record.failures(), " times, the last time with: ", message));
  }
}

namespace {
// Failures of a job that is being stopped are not counted: its attempts were told to end.
bool IsUnderWay(Job::State state) { return state == Job::QUEUED || state == Job::RUNNING || state == Job::PAUSED; }
}  // namespace

bool JobQueue::CountsFailures(const AttemptRef& ref) {
  const JobState* const job = FindJob(ref.job);
  if (job == nullptr || !IsUnderWay(job->record.state())) return false;
  const TaskRecord& task = job->tasks[ref.task].record;
  if (task.state() != Task::COMMITTED) return true;
  const Attempt* const attempt = FindAttempt(ref);
  return attempt != nullptr && attempt->record.purpose() == quern::v1::AUDIT && task.audit() == TaskRecord::DUE;
}

bool JobQueue::LoseAttempt(const AttemptRef& ref, const std::string& message) {
  const Attempt& attempt = FindJob(ref.job)->tasks[ref.task].attempts.at(ref.attempt);
  const auto worker = workers_.find(attempt.record.worker());
  const bool leaving = worker != workers_.end() && worker->second.info.draining();
  const bool counts = attempt.seen_alive && !leaving && !attempt.stop && CountsFailures(ref);
  if (leaving) NoteGivenBack(ref);
  EndAttempt(ref, quern::v1::Attempt::LOST, "WORKER_LOST", message);
  return counts;
}

absl::Duration JobQueue::RetryWait(uint32_t failures) const {
  absl::Duration wait = options_.retry_backoff;
  for (uint32_t i = 1; i < failures && wait < options_.max_retry_backoff; ++i) wait *= 2;
  return std::min(wait, options_.max_retry_backoff);
}

void JobQueue::NoteTrouble(JobState& job, uint32_t task, const Runner& runner, uint32_t failures) {
  const absl::Duration now = options_.clock->Monotonic();
  const TaskRecord& record = job.tasks[task].record;
  Trouble& trouble = job.trouble[task];
  const bool pending = record.state() == Task::PENDING;
  if (pending) {
    job.pending.Erase(task, record.minimum_memory());
    job.delayed.erase({trouble.not_before, task});
  }
  trouble.not_before = now + RetryWait(failures);
  trouble.avoid_until = trouble.not_before + options_.lease;
  trouble.failed_on.insert(runner);
  if (pending) MoveTask(job, task, Task::PENDING);
}

void JobQueue::NoteGivenBack(const AttemptRef& ref) {
  const Attempt& attempt = *FindAttempt(ref);
  if (attempt.stop || !attempt.seen_alive || attempt.record.state() == quern::v1::Attempt::LOST || !CountsFailures(ref)) return;
  JobState& job = *FindJob(ref.job);
  Trouble& trouble = job.trouble[ref.task];
  const Runner runner = RunnerOf(attempt.record);
  // When a worker is drained others have its task at once. One that comes and goes may have another name each time.
  if (trouble.given_back_by.insert(runner.machine.empty() ? runner.worker : runner.machine).second) return;
  NoteTrouble(job, ref.task, runner, ++trouble.given_back);
}

void JobQueue::HandleFailure(const AttemptRef& ref, const quern::v1::Failure& failure) {
  const Attempt& attempt = *FindAttempt(ref);
  const bool look = failure.reason() == quern::v1::SOURCE_CHANGED || failure.reason() == quern::v1::DISK_FULL;
  if (!look || attempt.record.state() == quern::v1::Attempt::LOST || !CountsFailures(ref)) {
    EndFailed(ref, failure, false);
    return;
  }
  const JobState& job = *FindJob(ref.job);
  const TaskRecord& task = job.tasks[ref.task].record;
  const uint64_t left = BytesLeft(job) + (task.state() == Task::COMMITTED ? task.bytes_to_write() : 0);
  checking_.insert(ref);
  ++outside_;
  after_unlock_.push_back([this, ref, failure, left] {
    options_.confirm(ref.job, ref.task, failure, left, [this, ref, failure](const absl::Status& found) {
      FinishLook(ref, failure, found);
      RunDone();
    });
  });
}

void JobQueue::HandleFailure(const AttemptRef& ref, quern::v1::FailureReason reason, std::string message) {
  quern::v1::Failure failure;
  failure.set_reason(reason);
  failure.set_message(std::move(message));
  HandleFailure(ref, failure);
}

void JobQueue::FinishLook(const AttemptRef& ref, quern::v1::Failure failure, const absl::Status& found) {
  Section section(this);
  checking_.erase(ref);
  const Attempt* const attempt = FindAttempt(ref);
  if (attempt == nullptr) return;
  NewsFor(attempt->record.worker());
  const bool is_so = absl::IsFailedPrecondition(found);
  if (!is_so) {
    failure.set_message(absl::StrCat("worker ", attempt->record.worker(), ": ", failure.message(), "; this coordinator, however, ",
                                     found.ok() ? "finds nothing of that kind" : "cannot tell: ", found.message()));
  } else if (failure.reason() == quern::v1::SOURCE_CHANGED) {
    failure.set_message(std::string(found.message()));
  }
  EndFailed(ref, failure, is_so);
}

void JobQueue::EndFailed(const AttemptRef& ref, const quern::v1::Failure& failure, bool is_so) {
  JobState& job = *FindJob(ref.job);
  TaskState& task = job.tasks[ref.task];
  const AttemptRecord attempt = task.attempts.at(ref.attempt).record;
  const uint64_t used = attempt.memory();
  const std::string& worker = attempt.worker();
  const std::string reason = quern::v1::FailureReason_Name(
      quern::v1::FailureReason_IsValid(failure.reason()) ? failure.reason() : quern::v1::FAILURE_REASON_UNSPECIFIED);
  // The loss of a lost one was counted already.
  const bool counts = attempt.state() != quern::v1::Attempt::LOST && CountsFailures(ref);
  // Ends by itself, and is not counted.
  const bool halved = counts && failure.reason() == quern::v1::OUT_OF_MEMORY && HalveMemory(task, used);
  std::string message = failure.message();
  bool old_news = false;
  if (counts && !halved && !is_so) {
    old_news = FailedNear(job, ref.task, RunnerOf(attempt));
    NoteTrouble(job, ref.task, RunnerOf(attempt), task.record.failures() + 1);
    if (failure.reason() == quern::v1::BAD_INPUT) {
      std::set<Runner>& said = job.trouble[ref.task].bad_input_on;
      said.insert(RunnerOf(attempt));
      std::set<std::string> names, machines;
      for (const Runner& runner : said) {
        names.insert(runner.worker);
        machines.insert(runner.machine.empty() ? runner.worker : runner.machine);
      }
      is_so = machines.size() >= options_.bad_input_witnesses ||
              (names.size() >= options_.bad_input_witnesses && !FartherCouldRun(job, ref.task, said, Distance::kSameMachine));
      if (names.size() > 1) absl::StrAppend(&message, " (found on workers ", absl::StrJoin(names, " and "), ")");
    }
  }
  if (attempt.purpose() == quern::v1::STRAGGLER) job.trouble[ref.task].second_try_failed = true;
  EndAttempt(ref, quern::v1::Attempt::FAILED, reason, message);
  if (!counts) return;
  if (halved) {
    PutTask(job, ref.task);
    return;
  }
  // Says nothing of the task.
  if (failure.reason() == quern::v1::LINK_LOST) return;
  if (is_so) {
    if (failure.reason() == quern::v1::DISK_FULL) return FailFullDisk(job, ref.task, failure);
    return FailTask(job, ref.task, reason, message);
  }
  if (failure.reason() == quern::v1::OUT_OF_MEMORY) {
    message =
        absl::StrCat("out of memory on ", worker, " with a buffer pool of ", FormatByteSize(used), ", the least that the task can use (",
                     FormatLeastMemory(task.record.minimum_memory()),
                     "): raise the memory limit of that worker's machine, container or cgroup, then run the job again (", message, ")");
  }
  WorkerFailed(worker, ref, message);
  if (old_news) return;
  // The source is not what is wrong: to begin anew would not help.
  CountFailure(job, ref.task, failure.reason() == quern::v1::SOURCE_CHANGED ? "IO_ERROR" : reason, message);
}

void JobQueue::HandleCompletion(const AttemptRef& ref, const quern::v1::SynchronizeRequest& worker, const quern::v1::TaskResult& result) {
  JobState* const job = FindJob(ref.job);
  if (job == nullptr || ref.task >= job->tasks.size() || checking_.count(ref) > 0) return;
  TaskState& task = job->tasks[ref.task];
  const Attempt* const attempt = FindAttempt(ref);
  const auto ran_it = [name = worker.worker(), incarnation = worker.incarnation()](const AttemptRecord& record) {
    return record.worker() == name && record.incarnation() == incarnation;
  };
  if (attempt == nullptr) {
    if (task.record.state() != Task::COMMITTED || task.record.sha256() == result.sha256() || !task.record.has_output()) return;
    // That it has run this attempt only the store can tell.
    checking_.insert(ref);
    Run([this, ref, ran_it, name = worker.worker(), sha256 = result.sha256()] {
      const absl::StatusOr<std::string> text = options_.store->Get(AttemptKey(ref.job, ref.task, ref.attempt));
      AttemptRecord record;
      const bool ran = text.ok() && record.ParseFromString(*text) && ran_it(record);
      Section section(this);
      checking_.erase(ref);
      NewsFor(name);
      if (ran) FinishContradiction(ref, RunnerOf(record), sha256);
    });
    return;
  }
  if (!ran_it(attempt->record)) return;
  if (!task.record.has_output()) {
    Commit(ref, result, result.SerializeAsString());
    return;
  }
  checking_.insert(ref);
  const std::string path = options_.attempt_path(job->record.spec().output(), ref.task, ref.attempt);
  Run([this, ref, name = worker.worker(), path, result] {
    absl::StatusOr<quern::v1::TaskSpec> spec = LoadSpec(ref);
    const absl::Status status = spec.ok() ? options_.check_commit(*spec, path, result) : spec.status();
    FinishCheck(ref, name, result, result.SerializeAsString(), status);
  });
}

void JobQueue::FinishContradiction(const AttemptRef& ref, const Runner& runner, const std::string& sha256) {
  JobState* const job = FindJob(ref.job);
  if (job == nullptr) return;
  const TaskRecord& task = job->tasks[ref.task].record;
  if (task.state() != Task::COMMITTED || task.sha256() == sha256) return;
  if (task.committed_attempt() != ref.attempt) {
    FailMismatch(*job, ref.task, ref.attempt, runner, sha256);
    return;
  }
  JobError error;
  error.set_reason(kMismatch);
  error.set_task(TaskName(ref.job, ref.task));
  error.set_message(absl::StrCat("task ", ref.task, " (", task.label(), ") attempt ", ref.attempt, ": ", runner.worker,
                                 " reported SHA-256 ", HexDigest(sha256), " after ", HexDigest(task.sha256()),
                                 " was committed: check the memory and disk of that machine, verify the output, or start over"));
  ++counts_.mismatches;
  Log(absl::StrCat("attempt event=data_loss ", AttemptFields(JobName(ref.job), ref.task, ref.attempt), " worker=", LogValue(runner.worker),
                   MessageField(error.message())));
  if (job->record.state() != Job::SUCCEEDED) AddDispute(*job, runner, runner);
  Fail(*job, std::move(error));
}

void JobQueue::FinishCheck(const AttemptRef& ref, const std::string& worker, const quern::v1::TaskResult& result, std::string result_text,
                           const absl::Status& status) {
  Section section(this);
  checking_.erase(ref);
  NewsFor(worker);
  const Attempt* const attempt = FindAttempt(ref);
  if (attempt == nullptr) return;  // another attempt was faster, or the job is gone
  if (status.ok()) {
    if (attempt->record.purpose() == quern::v1::AUDIT) {
      CompareAudit(ref, result);
    } else {
      Commit(ref, result, std::move(result_text));
    }
    return;
  }
  HandleFailure(ref, quern::v1::IO_ERROR, std::string(status.message()));
}

void JobQueue::EndAttempts(const AttemptRef& winner, const quern::v1::TaskResult& result, uint64_t commit_sequence) {
  JobState& job = *FindJob(winner.job);
  TaskState& task = job.tasks[winner.task];
  const int64_t now = absl::ToUnixNanos(options_.clock->Wall());
  for (auto& [number, attempt] : task.attempts) {
    const AttemptRef ref{winner.job, winner.task, number};
    AttemptRecord& record = attempt.record;
    if (const auto worker = workers_.find(record.worker()); worker != workers_.end()) worker->second.granted.erase(ref);
    NewsFor(record.worker());
    if (number == winner.attempt) {
      SetAttemptState(job, attempt, quern::v1::Attempt::COMMITTED);
      record.clear_reason();
      record.clear_message();
      record.set_commit_sequence(commit_sequence);
      *record.mutable_times() = result.times();
      record.set_peak_rss(result.peak_rss());
      CountResult(result);
    } else if (record.state() == quern::v1::Attempt::GRANTED) {
      SetAttemptState(job, attempt, quern::v1::Attempt::STOPPED);
      record.set_reason("FENCED");
      record.set_message(absl::StrCat("attempt ", winner.attempt, " committed first"));
      Log(absl::StrCat("attempt event=ended ", AttemptFields(JobName(ref.job), ref.task, ref.attempt),
                       " worker=", LogValue(record.worker()), " state=STOPPED reason=FENCED", MessageField(record.message())));
    } else {
      continue;
    }
    CountEnd(record.state(), record.reason());
    record.set_end_time_ns(now);
    PutAttempt(ref, record);
  }
  task.attempts.clear();
  job.live.erase(winner.task);
}

void JobQueue::Commit(const AttemptRef& ref, const quern::v1::TaskResult& result, std::string result_text) {
  JobState& job = *FindJob(ref.job);
  TaskState& task = job.tasks[ref.task];
  TaskRecord& record = task.record;
  const Runner committer = RunnerOf(task.attempts.at(ref.attempt).record);
  record.set_committed_by(committer.worker);
  record.set_committed_on(committer.machine);
  if (record.has_output() && IsDisputed(job, committer)) SetAudit(job, ref.task, TaskRecord::DUE);
  EndAttempts(ref, result, job.next_sequence++);
  record.set_committed_attempt(ref.attempt);
  record.set_sha256(result.sha256());
  record.set_bytes_read(result.bytes_read());
  record.set_bytes_written(result.bytes_written());
  record.set_sum_squared_error(0);
  record.set_sum_squares(0);
  record.set_max_abs_error(0);
  record.set_worst_relative_error(0);
  record.clear_worst_module();
  for (const quern::v1::ModuleError& error : result.errors()) {
    record.set_sum_squared_error(record.sum_squared_error() + error.sum_squared_error());
    record.set_sum_squares(record.sum_squares() + error.sum_squares());
    record.set_max_abs_error(std::max(record.max_abs_error(), error.max_abs_error()));
    const double relative = error.sum_squares() > 0 ? error.sum_squared_error() / error.sum_squares() : 0;
    if (relative > record.worst_relative_error()) {
      record.set_worst_relative_error(relative);
      record.set_worst_module(OneLine(error.module()));
    }
  }
  MoveTask(job, ref.task, Task::COMMITTED);
  job.trouble.erase(ref.task);
  AddToTotals(record, &job.totals);
  IndexAudit(job, ref.task);
  PutTask(job, ref.task);
  Put(TaskKey('r', ref.job, ref.task), std::move(result_text));
  ++commits_;
  ++counts_.commits;
  WorkerSucceeded(record.committed_by(), ref, result);
  Changed(job);
  Log(absl::StrCat("attempt event=committed ", AttemptFields(JobName(ref.job), ref.task, ref.attempt),
                   " worker=", LogValue(record.committed_by()), " label=", LogValue(record.label())));
  EndOfAttempts(job);
}

void JobQueue::EndOfAttempts(JobState& job) {
  const Job::State state = job.record.state();
  if (Complete(job) && !job.held && (state == Job::QUEUED || state == Job::RUNNING)) MakeReady(job);
  if (state == Job::CANCELLING && job.granted == 0) SetState(job, Job::CANCELLED);
}

void JobQueue::CompareAudit(const AttemptRef& ref, const quern::v1::TaskResult& result) {
  JobState& job = *FindJob(ref.job);
  const TaskRecord& record = job.tasks[ref.task].record;
  if (result.sha256() != record.sha256()) {
    const Runner auditor = RunnerOf(FindAttempt(ref)->record);
    EndAttempt(ref, quern::v1::Attempt::FAILED, "DATA_LOSS",
               absl::StrCat("SHA-256 ", HexDigest(result.sha256()), ", not ", HexDigest(record.sha256()), " as committed"));
    FailMismatch(job, ref.task, ref.attempt, auditor, result.sha256());
    return;
  }
  checking_.insert(ref);
  ++outside_;
  const std::string path = options_.attempt_path(job.record.spec().output(), ref.task, record.committed_attempt());
  after_unlock_.push_back([this, ref, result, path, sha256 = record.sha256()] {
    options_.read_back(path, sha256, [this, ref, result](const absl::Status& stored) {
      FinishReadBack(ref, result, stored);
      RunDone();
    });
  });
}

void JobQueue::FinishReadBack(const AttemptRef& ref, const quern::v1::TaskResult& result, const absl::Status& stored) {
  Section section(this);
  checking_.erase(ref);
  const Attempt* const attempt = FindAttempt(ref);
  if (attempt == nullptr) return;  // the job is gone, or its task done anew
  const std::string worker = attempt->record.worker();
  NewsFor(worker);
  if (stored.ok()) {
    PassAudit(ref, result);
  } else if (absl::IsFailedPrecondition(stored)) {
    EndRightAudit(ref, result);
    FailStored(*FindJob(ref.job), ref.task, worker, stored);
  } else if (!absl::IsCancelled(stored)) {
    // Of the task, and not of the worker, which has done its part.
    const std::string message = absl::StrCat("this coordinator cannot read the committed file back: ", stored.message());
    JobState& job = *FindJob(ref.job);
    const bool counts = attempt->record.state() != quern::v1::Attempt::LOST && CountsFailures(ref);
    if (counts) NoteTrouble(job, ref.task, RunnerOf(attempt->record), job.tasks[ref.task].record.failures() + 1);
    EndAttempt(ref, quern::v1::Attempt::FAILED, "IO_ERROR", message);
    if (counts) CountFailure(job, ref.task, "IO_ERROR", message);
  }
}

void JobQueue::EndRightAudit(const AttemptRef& ref, const quern::v1::TaskResult& result) {
  const TaskRecord& task = FindJob(ref.job)->tasks[ref.task].record;
  AttemptRecord& record = FindAttempt(ref)->record;
  const std::string worker = record.worker();
  *record.mutable_times() = result.times();
  record.set_peak_rss(result.peak_rss());
  CountResult(result);
  EndAttempt(
      ref, quern::v1::Attempt::COMMITTED, "",
      absl::StrCat("it came to the bytes that attempt ", task.committed_attempt(), " reported; those that that one stored are others"));
  WorkerSucceeded(worker, ref, result);
}

void JobQueue::PassAudit(const AttemptRef& ref, const quern::v1::TaskResult& result) {
  JobState& job = *FindJob(ref.job);
  TaskState& task = job.tasks[ref.task];
  const Runner auditor = RunnerOf(task.attempts.at(ref.attempt).record);
  const std::string& worker = auditor.worker;
  EndAttempts(ref, result, 0);
  SetAudit(job, ref.task, TaskRecord::PASSED);
  task.record.set_audited_by(worker);
  task.record.set_audited_on(auditor.machine);
  job.trouble.erase(ref.task);
  PutTask(job, ref.task);
  WorkerSucceeded(worker, ref, result);
  Changed(job);
  ++counts_.audits_passed;
  Log(absl::StrCat("attempt event=audit_passed ", AttemptFields(JobName(ref.job), ref.task, ref.attempt), " worker=", LogValue(worker),
                   " committed_by=", LogValue(task.record.committed_by()), " label=", LogValue(task.record.label())));
  if (options_.remove_file) {
    Say([this, path = options_.attempt_path(job.record.spec().output(), ref.task, ref.attempt)](absl::Status status) {
      if (!status.ok()) return;
      {
        MutexLock lock(&mutex_);
        ++outside_;
      }
      options_.run([this, path] {
        options_.remove_file(path);
        RunDone();
      });
    });
  }
  EndOfAttempts(job);
}

void JobQueue::FailMismatch(JobState& job, uint32_t task, uint32_t attempt, const Runner& runner, const std::string& sha256) {
  const TaskRecord& record = job.tasks[task].record;
  const std::string& output = job.record.spec().output();
  FailForDataLoss(
      job, task, attempt, runner, CommitterOf(record),
      absl::StrCat("worker ", runner.worker, " (attempt ", attempt, ") came to SHA-256 ", HexDigest(sha256), ", worker ",
                   record.committed_by(), " (attempt ", record.committed_attempt(), ") to ", HexDigest(record.sha256()),
                   " from the same input: one of the two machines computes wrongly. Compare ", options_.attempt_path(output, task, attempt),
                   " and ", options_.attempt_path(output, task, record.committed_attempt())));
}

void JobQueue::FailStored(JobState& job, uint32_t task, const std::string& auditor, const absl::Status& stored) {
  const TaskRecord& record = job.tasks[task].record;
  const Runner committer = CommitterOf(record);
  FailForDataLoss(job, task, record.committed_attempt(), committer, committer,
                  absl::StrCat("what worker ", committer.worker, " (attempt ", record.committed_attempt(),
                               ") has stored is not what it reported, which worker ", auditor, " has confirmed: ", stored.message(),
                               ". A disk, or the memory of the machine that wrote the file, loses bytes: look at it"));
}

void JobQueue::FailForDataLoss(JobState& job, uint32_t task, uint32_t attempt, const Runner& worker, const Runner& other,
                               const std::string& what) {
  JobError error;
  error.set_reason(kMismatch);
  error.set_task(TaskName(job.record.id(), task));
  error.set_message(absl::StrCat("task ", task, " (", job.tasks[task].record.label(), "): ", what,
                                 ", take that machine out (quern cordon), then run the job again (quern retry): this task is done anew. ",
                                 DescribeDispute(job, task, worker.worker, other.worker)));
  ++counts_.mismatches;
  Log(absl::StrCat("attempt event=data_loss ", AttemptFields(JobName(job.record.id()), task, attempt), " worker=", LogValue(worker.worker),
                   MessageField(error.message())));
  if (job.record.state() == Job::SUCCEEDED) return;
  AddDispute(job, worker, other);
  Uncommit(job, task, Task::FAILED);
  CountTotals(job);
  Fail(job, std::move(error));
}

// ---- Calls of clients ----

std::vector<uint64_t> JobQueue::HeldJobs() {
  MutexLock lock(&mutex_);
  std::vector<uint64_t> held;
  for (const auto& [id, job] : jobs_) {
    if (job.held) held.push_back(id);
  }
  return held;
}

void JobQueue::Release(uint64_t id, std::vector<SightProbe> sight) {
  Section section(this);
  JobState* const job = FindJob(id);
  if (job == nullptr || !job->held) return;
  job->held = false;
  job->sight = std::move(sight);
  work_arrived_ = true;
  const Job::State state = job->record.state();
  if (state == Job::PUBLISHING || ((state == Job::QUEUED || state == Job::RUNNING) && Complete(*job))) MakeReady(*job);
}

uint64_t JobQueue::ReserveId() {
  MutexLock lock(&mutex_);
  return next_job_++;
}

void JobQueue::AddJob(NewJob add, JobCallback done) {
  auto adding = std::make_shared<Adding>();
  const uint64_t id = add.id;
  JobRecord& record = adding->job.record;
  record.set_id(id);
  record.set_request_id(add.request_id);
  *record.mutable_spec() = std::move(add.spec);
  record.set_create_time_ns(absl::ToUnixNanos(options_.clock->Wall()));
  record.set_tasks(static_cast<uint32_t>(add.tasks.size()));
  record.set_priority(add.priority);
  record.set_max_failures(options_.max_failures);
  record.set_numerics_version(add.plan.numerics_version() != 0 ? add.plan.numerics_version() : options_.numerics_version);
  record.set_audit_fraction(add.audit_fraction);
  adding->job.sight = std::move(add.sight);
  adding->job.tasks.reserve(add.tasks.size());
  adding->add = std::move(add);
  adding->done = std::move(done);
  AddSpecs(std::move(adding));
}

void JobQueue::AddSpecs(std::shared_ptr<Adding> adding) {
  NewJob& add = adding->add;
  JobState& made = adding->job;
  std::vector<StoreWrite> writes;
  size_t bytes = 0;
  // All of this is outside of the mutex: others are not kept waiting for a hundred thousand tasks.
  while (made.tasks.size() < add.tasks.size() && bytes < kSpecsAtOnce) {
    const auto i = static_cast<uint32_t>(made.tasks.size());
    quern::v1::TaskSpec spec;
    spec.Swap(&add.tasks[i]);  // a large plan must not be in memory twice
    TaskRecord task = MakeTaskRecord(spec, add.first_attempt);
    if (task.has_output() && ChosenForAudit(add.plan.identity(), i, add.audit_fraction)) task.set_audit(TaskRecord::DUE);
    adding->records.push_back({StoreWrite::Kind::kPut, TaskKey('t', add.id, i), task.SerializeAsString()});
    writes.push_back({StoreWrite::Kind::kPut, TaskKey('s', add.id, i), spec.SerializeAsString()});
    bytes += writes.back().value.size();
    AddTask(made, std::move(task));
  }
  if (made.tasks.size() < add.tasks.size()) {
    {
      MutexLock lock(&mutex_);
      ++outside_;
    }
    options_.store->Write(std::move(writes), [this, adding](absl::Status status) {
      if (status.ok()) {
        AddSpecs(adding);
      } else if (adding->done) {
        adding->done(status);
      }
      RunDone();
    });
    return;
  }
  writes.insert(writes.end(), std::make_move_iterator(adding->records.begin()), std::make_move_iterator(adding->records.end()));
  writes.push_back({StoreWrite::Kind::kPut, JobKey('p', add.id), add.plan.SerializeAsString()});
  Section section(this);
  writes_ = std::move(writes);
  Put(kNextJobKey, JobKey('n', next_job_).substr(1));
  JobState& job = jobs_[add.id];
  job = std::move(made);
  if (add.finished) {
    SetState(job, Job::SUCCEEDED);
  } else {
    SetState(job, Job::QUEUED);
    if (job.tasks.empty()) MakeReady(job);
  }
  SayJob(job, std::move(adding->done));
}

void JobQueue::GetJob(uint64_t id, JobCallback done) {
  Section section(this);
  const JobState* const job = FindJob(id);
  if (job == nullptr) return SayError(NoSuchJob(id), std::move(done));
  SayJob(*job, std::move(done));
}

void JobQueue::ListJobs(uint64_t after, int count, std::function<void(absl::StatusOr<std::vector<Job>>)> done) {
  Section section(this);
  std::vector<Job> jobs;
  for (auto it = jobs_.upper_bound(after); it != jobs_.end() && static_cast<int>(jobs.size()) < count; ++it) {
    jobs.push_back(Snapshot(it->second));
  }
  Say([done = std::move(done), jobs = std::move(jobs)](absl::Status status) {
    if (status.ok()) {
      done(jobs);
    } else {
      done(status);
    }
  });
}

void JobQueue::PauseJob(uint64_t id, JobCallback done) {
  Section section(this);
  JobState* const job = FindJob(id);
  if (job == nullptr) return SayError(NoSuchJob(id), std::move(done));
  const Job::State state = job->record.state();
  if (state == Job::QUEUED || state == Job::RUNNING) {
    job->held = false;  // whoever resumes it looks at its source
    SetState(*job, Job::PAUSED);
  } else if (state != Job::PAUSED) {
    return SayError(absl::FailedPreconditionError(absl::StrCat(JobName(id), " is ", Job::State_Name(state), " and cannot be paused")),
                    std::move(done));
  }
  SayJob(*job, std::move(done));
}

void JobQueue::CancelJob(uint64_t id, JobCallback done) {
  Section section(this);
  JobState* const job = FindJob(id);
  if (job == nullptr) return SayError(NoSuchJob(id), std::move(done));
  const Job::State state = job->record.state();
  if (state == Job::PUBLISHING || state == Job::SUCCEEDED) {
    return SayError(absl::FailedPreconditionError(absl::StrCat(JobName(id), " is ", Job::State_Name(state), " and cannot be cancelled")),
                    std::move(done));
  }
  if (state != Job::CANCELLING && state != Job::CANCELLED) {
    job->held = false;
    StopAttempts(*job, "the job was cancelled");
    SetState(*job, job->granted == 0 ? Job::CANCELLED : Job::CANCELLING);
  }
  SayJob(*job, std::move(done));
}

void JobQueue::ResumeJob(uint64_t id, ResumeOptions options, JobCallback done) {
  Section section(this);
  JobState* const job = FindJob(id);
  if (job == nullptr) return SayError(NoSuchJob(id), std::move(done));
  const Job::State state = job->record.state();
  if (state == Job::SUCCEEDED) {
    return SayError(absl::FailedPreconditionError(absl::StrCat(JobName(id), " has succeeded: there is nothing to resume")),
                    std::move(done));
  }
  if (state == Job::PUBLISHING && !job->held) return SayJob(*job, std::move(done));
  if (options.spec.has_value()) *job->record.mutable_spec() = *std::move(options.spec);
  job->sight = std::move(options.sight);
  for (uint32_t task : options.lost_tasks) {
    if (task >= job->tasks.size() || job->tasks[task].record.state() != Task::COMMITTED) continue;
    Uncommit(*job, task, Task::PENDING);
    Log(absl::StrCat("task event=again ", TaskFields(JobName(id), task), " message=\"its file is gone\""));
  }
  CountTotals(*job);
  if (options.priority.has_value()) job->record.set_priority(*options.priority);
  if (options.audit_fraction.has_value()) {
    job->record.set_audit_fraction(*options.audit_fraction);
    for (uint32_t i = 0; i < job->tasks.size(); ++i) {
      const TaskRecord& record = job->tasks[i].record;
      const bool chosen = record.has_output() && ChosenForAudit(options.identity, i, *options.audit_fraction);
      if (record.audit() == TaskRecord::PASSED || chosen == (record.audit() == TaskRecord::DUE)) continue;
      SetAudit(*job, i, chosen ? TaskRecord::DUE : TaskRecord::NONE);
      PutTask(*job, i);
    }
  }
  SettleDisputes(*job);
  job->held = false;
  if (state != Job::QUEUED && state != Job::RUNNING && state != Job::PUBLISHING) {
    for (const auto& [time, task] : job->delayed) job->pending.Insert(task, job->tasks[task].record.minimum_memory());
    job->delayed.clear();
    job->trouble.clear();
    for (uint32_t i = 0; i < job->tasks.size(); ++i) {
      TaskRecord& record = job->tasks[i].record;
      if (record.failures() == 0 && record.state() != Task::FAILED && record.memory_limit() == 0) continue;
      record.set_failures(0);
      // The memory that was too much then may be there now.
      record.set_memory_limit(0);
      if (record.state() == Task::FAILED) MoveTask(*job, i, HasGranted(job->tasks[i]) ? Task::RUNNING : Task::PENDING);
      PutTask(*job, i);
    }
    for (auto& [name, worker] : workers_) {
      for (Superseded& old : worker.superseded) {
        std::erase_if(old.suspicions, [&](const Suspicion& suspicion) { return suspicion.ref.job == id; });
      }
    }
    job->record.clear_error();
  }
  if (Complete(*job)) {
    MakeReady(*job);
  } else {
    SetState(*job, job->next_sequence > 1 ? Job::RUNNING : Job::QUEUED);
  }
  SayJob(*job, std::move(done));
}

void JobQueue::FailJob(uint64_t id, JobError error, JobCallback done) {
  Section section(this);
  JobState* const job = FindJob(id);
  if (job == nullptr) return SayError(NoSuchJob(id), std::move(done));
  job->held = false;
  Fail(*job, std::move(error));
  SayJob(*job, std::move(done));
}

void JobQueue::FinishJob(uint64_t id, std::vector<quern::v1::Mismatch> mismatches, JobCallback done) {
  Section section(this);
  JobState* const job = FindJob(id);
  if (job == nullptr) return SayError(NoSuchJob(id), std::move(done));
  if (job->record.state() != Job::PUBLISHING) {
    return SayError(absl::FailedPreconditionError(absl::StrCat(JobName(id), " is ", Job::State_Name(job->record.state()),
                                                               ", not PUBLISHING, and cannot be finished")),
                    std::move(done));
  }
  job->record.mutable_mismatches()->Assign(mismatches.begin(), mismatches.end());
  SetState(*job, Job::SUCCEEDED);
  SayJob(*job, std::move(done));
}

void JobQueue::DeleteJob(uint64_t id, std::function<void(absl::Status)> done) {
  Section section(this);
  JobState* const job = FindJob(id);
  if (job == nullptr) {
    Say([done = std::move(done), id](absl::Status stored) { done(stored.ok() ? NoSuchJob(id) : stored); });
    return;
  }
  for (const uint32_t task : job->live) {
    for (const auto& [number, attempt] : job->tasks[task].attempts) NewsFor(attempt.record.worker());
  }
  active_.erase(id);
  jobs_.erase(id);
  for (auto& [name, worker] : workers_) {
    for (auto it = worker.granted.begin(); it != worker.granted.end();) it = it->job == id ? worker.granted.erase(it) : std::next(it);
    worker.sight.erase(worker.sight.lower_bound({id, 0}), worker.sight.lower_bound({id + 1, 0}));
  }
  for (char kind : {'j', 'p', 's', 't', 'a', 'r'}) writes_.push_back({StoreWrite::Kind::kDeletePrefix, JobKey(kind, id), ""});
  Say(std::move(done));
}

void JobQueue::ListTasks(uint64_t id, uint32_t first, int count, std::function<void(absl::StatusOr<std::vector<Task>>)> done) {
  Section section(this);
  const JobState* const job = FindJob(id);
  if (job == nullptr) {
    Say([done = std::move(done), id](absl::Status stored) { done(stored.ok() ? NoSuchJob(id) : stored); });
    return;
  }
  std::vector<Task> tasks;
  for (uint64_t i = first; i < job->tasks.size() && static_cast<int>(tasks.size()) < count; ++i) {
    const TaskRecord& record = job->tasks[i].record;
    Task& task = tasks.emplace_back();
    task.set_name(TaskName(id, static_cast<uint32_t>(i)));
    task.set_state(record.state());
    task.set_label(record.label());
    *task.mutable_layers() = record.layers();
    task.set_failures(record.failures());
    task.set_bytes_to_read(record.bytes_to_read());
    task.set_bytes_to_write(record.bytes_to_write());
    task.set_minimum_memory(record.minimum_memory());
  }
  RunReads([this, id, first, tasks = std::move(tasks), done = std::move(done)]() mutable {
    for (uint32_t i = 0; i < tasks.size(); ++i) {
      const absl::Status scanned = options_.store->Scan(TaskKey('a', id, first + i), [&](absl::string_view key, absl::string_view value) {
        AttemptRecord record;
        if (!record.ParseFromArray(value.data(), static_cast<int>(value.size()))) {
          return absl::DataLossError(absl::StrCat("job store: unreadable attempt of ", tasks[i].name()));
        }
        quern::v1::Attempt& attempt = *tasks[i].add_attempts();
        attempt.set_attempt(static_cast<uint32_t>(ReadBigEndian(key.substr(13))));
        attempt.set_state(record.state());
        attempt.set_worker(record.worker());
        SetTimestamp(record.grant_time_ns(), attempt.mutable_grant_time());
        if (record.end_time_ns() != 0) SetTimestamp(record.end_time_ns(), attempt.mutable_end_time());
        attempt.set_message(record.message());
        attempt.set_reason(record.reason());
        attempt.set_memory(record.memory());
        *attempt.mutable_times() = record.times();
        attempt.set_peak_rss(record.peak_rss());
        attempt.set_purpose(absl::AsciiStrToLower(
            quern::v1::Purpose_Name(record.purpose() == quern::v1::PURPOSE_UNSPECIFIED ? quern::v1::WORK : record.purpose())));
        attempt.set_host(record.host());
        attempt.set_device(record.device());
        return absl::OkStatus();
      });
      if (!scanned.ok()) return done(scanned);
    }
    done(std::move(tasks));
  });
}

uint64_t JobQueue::Revision(uint64_t id) {
  MutexLock lock(&mutex_);
  const JobState* const job = FindJob(id);
  return job == nullptr ? 0 : job->revision;
}

std::optional<JobRecord> JobQueue::Record(uint64_t id) {
  MutexLock lock(&mutex_);
  const JobState* const job = FindJob(id);
  if (job == nullptr) return std::nullopt;
  return job->record;
}

bool JobQueue::IsHeld(uint64_t id) {
  MutexLock lock(&mutex_);
  const JobState* const job = FindJob(id);
  return job != nullptr && job->held;
}

std::optional<uint64_t> JobQueue::FindByRequestId(const std::string& request_id) {
  MutexLock lock(&mutex_);
  std::optional<uint64_t> found;
  for (const auto& [id, job] : jobs_) {
    if (!request_id.empty() && job.record.request_id() == request_id) found = id;
  }
  return found;
}

std::optional<uint64_t> JobQueue::FindByOutput(const std::string& output) {
  MutexLock lock(&mutex_);
  std::optional<uint64_t> found;
  for (const auto& [id, job] : jobs_) {
    // A verification only reads.
    if (job.record.spec().operation() != quern::v1::VERIFY && job.record.spec().output() == output) found = id;
  }
  return found;
}

std::vector<JobQueue::CommittedAttempt> JobQueue::CommittedAttempts(uint64_t id) {
  MutexLock lock(&mutex_);
  std::vector<CommittedAttempt> out;
  const JobState* const job = FindJob(id);
  if (job == nullptr) return out;
  for (uint32_t i = 0; i < job->tasks.size(); ++i) {
    const TaskRecord& record = job->tasks[i].record;
    if (record.state() != Task::COMMITTED || !record.has_output()) continue;
    out.push_back({i, record.committed_attempt(), record.label(), record.bytes_to_write()});
  }
  return out;
}

std::optional<JobQueue::LiveAttempt> JobQueue::FindLiveAttempt(uint64_t id, uint32_t task, uint32_t number) {
  MutexLock lock(&mutex_);
  const Attempt* const attempt = FindAttempt({id, task, number});
  if (attempt == nullptr || attempt->stop) return std::nullopt;
  const JobState& job = *FindJob(id);
  LiveAttempt live;
  if (job.tasks[task].record.has_output()) live.path = options_.attempt_path(job.record.spec().output(), task, number);
  live.sends_output = attempt->record.send_output();
  live.principal = attempt->record.principal();
  return live;
}

std::vector<uint64_t> JobQueue::ExpiredJobs(absl::Time before, size_t count) {
  MutexLock lock(&mutex_);
  std::vector<std::pair<int64_t, uint64_t>> ended;
  for (const auto& [id, job] : jobs_) {
    if (Terminal(job.record.state())) ended.emplace_back(job.record.end_time_ns(), id);
  }
  std::sort(ended.begin(), ended.end());
  std::vector<uint64_t> expired;
  for (size_t i = 0; i < ended.size(); ++i) {
    if (absl::FromUnixNanos(ended[i].first) < before || ended.size() - i > count) expired.push_back(ended[i].second);
  }
  return expired;
}

uint32_t JobQueue::NextAttempt(uint64_t id) {
  MutexLock lock(&mutex_);
  uint32_t next = 1;
  const JobState* const job = FindJob(id);
  if (job == nullptr) return next;
  for (const TaskState& task : job->tasks) next = std::max(next, task.record.next_attempt());
  return next;
}

}  // namespace quern::daemon
