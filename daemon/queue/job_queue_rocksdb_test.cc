// Random operations and crashes of a queue over RocksDB, against a model that says of each operation what it comes to. After each operation
// that was told, and after each reopening of the store, the queue must be in the model's state exactly; what the queue may choose (which
// task, for whom) is checked against the rules. job_queue_model_test.cc has long polls, ghosts and lost answers.
//
// QUERN_SEED: the first seed (default 1). QUERN_MODEL_RUNS: how many seeds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <compare>
#include <cstdlib>
#include <deque>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/status_matchers.h"
#include "daemon/queue/audit.h"
#include "daemon/queue/job_queue.h"
#include "daemon/queue/names.h"
#include "quern/v1/test_printer.h"

namespace quern::daemon {
namespace {

using quern::store::TaskRecord;
using quern::v1::AttemptStatus;
using quern::v1::Job;
using quern::v1::Purpose;
using quern::v1::SynchronizeRequest;
using quern::v1::SynchronizeResponse;
using quern::v1::Task;

constexpr absl::Duration kLease = absl::Seconds(30);
constexpr absl::Duration kBackoff = absl::Seconds(1);
constexpr absl::Duration kMaxBackoff = absl::Minutes(1);
constexpr absl::Duration kPatience = absl::Seconds(30);
constexpr uint32_t kMaxFailures = 3;
constexpr size_t kSlots = 2;

// RocksDB, with what was handed over kept back until the test lets it through, as a disk does until it is synced.
class HeldStore : public JobStore {
 public:
  explicit HeldStore(std::unique_ptr<JobStore> store) : store_(std::move(store)) {}

  void Write(std::vector<StoreWrite> writes, std::function<void(absl::Status)> done) override {
    MutexLock lock(&mutex_);
    pending_.push_back({std::move(writes), std::move(done)});
  }
  absl::StatusOr<std::string> Get(absl::string_view key) override { return store_->Get(key); }
  absl::Status Scan(absl::string_view prefix, std::function<absl::Status(absl::string_view, absl::string_view)> visit) override {
    return store_->Scan(prefix, std::move(visit));
  }

  void Sync() {
    for (std::optional<Batch> batch = Next(); batch.has_value(); batch = Next()) {
      batch->done(store_->WriteSync(std::move(batch->writes)));
    }
  }
  // The writes reach the disk or they do not; nobody hears of it either way.
  void Crash(bool written) {
    for (std::optional<Batch> batch = Next(); batch.has_value(); batch = Next()) {
      if (written) {
        EXPECT_THAT(store_->WriteSync(std::move(batch->writes)), IsOk());
      }
      batch->done(absl::UnavailableError("crashed"));
    }
  }
  std::vector<StoreWrite> Pending() {
    MutexLock lock(&mutex_);
    std::vector<StoreWrite> all;
    for (const Batch& batch : pending_) all.insert(all.end(), batch.writes.begin(), batch.writes.end());
    return all;
  }

 private:
  struct Batch {
    std::vector<StoreWrite> writes;
    std::function<void(absl::Status)> done;
  };
  std::optional<Batch> Next() {
    MutexLock lock(&mutex_);
    if (pending_.empty()) return std::nullopt;
    std::optional<Batch> batch(std::move(pending_.front()));
    pending_.pop_front();
    return batch;
  }

  const std::unique_ptr<JobStore> store_;
  Mutex mutex_;
  std::deque<Batch> pending_ QUERN_GUARDED_BY(mutex_);
};

struct Ref {
  uint64_t job;
  uint32_t task;
  uint32_t attempt;
  auto operator<=>(const Ref&) const = default;
};

// What the coordinator finds when a worker says that the source of a task changed.
bool IsChanged(const Ref& ref) { return (ref.task + ref.attempt) % 2 == 0; }

std::string DigestOf(uint64_t job, uint32_t task) { return absl::StrCat("bytes of ", job, "/", task); }

struct ModelAttempt {
  std::string worker, incarnation;
  Purpose purpose;
  bool granted = true;  // else lost
  bool stop = false;
  bool seen = true;
};

struct ModelTask {
  Task::State state = Task::PENDING;
  uint32_t next_attempt = 1;
  uint32_t failures = 0;
  uint32_t committed_attempt = 0;
  std::string committed_by, digest, audited_by;
  TaskRecord::Audit audit = TaskRecord::NONE;
  std::map<uint32_t, ModelAttempt> attempts;
  // Only in the memory of a coordinator.
  absl::Duration not_before = -absl::InfiniteDuration();
  absl::Duration due_since;
  std::set<std::string> failed_on, bad_input_on;

  bool HasGranted() const {
    return std::any_of(attempts.begin(), attempts.end(), [](const auto& entry) { return entry.second.granted; });
  }
  bool AuditWaits() const { return state == Task::COMMITTED && audit == TaskRecord::DUE && !HasGranted(); }
};

struct ModelJob {
  Job::State state = Job::QUEUED;
  int priority = 0;
  bool ever_granted = false;
  std::set<std::pair<std::string, std::string>> disputes;  // workers that came to different bytes; undecided
  std::vector<ModelTask> tasks;

  bool Granting() const { return state == Job::QUEUED || state == Job::RUNNING; }
  bool UnderWay() const { return Granting() || state == Job::PAUSED; }
  bool HasGranted() const {
    return std::any_of(tasks.begin(), tasks.end(), [](const ModelTask& task) { return task.HasGranted(); });
  }
  bool Disputed(const std::string& worker) const {
    return std::any_of(disputes.begin(), disputes.end(), [&](const auto& pair) { return pair.first == worker || pair.second == worker; });
  }
  bool Complete() const {
    return std::all_of(tasks.begin(), tasks.end(),
                       [](const ModelTask& task) { return task.state == Task::COMMITTED && task.audit != TaskRecord::DUE; });
  }
};

// The rules, in the simplest form.
struct Model {
  std::map<uint64_t, ModelJob> jobs;
  std::set<std::string> cordoned;
  // Only in the memory of a coordinator: attempts that may have died, until when.
  std::map<std::string, std::vector<std::pair<absl::Duration, std::vector<Ref>>>> suspicions;
  std::set<std::string> here;  // called this coordinator less than a lease ago
  absl::Duration now;

  // Whether there is a worker for the task on which it has not failed.
  bool AnotherCouldTry(const ModelTask& task) const {
    return std::any_of(here.begin(), here.end(), [&](const std::string& name) {
      if (task.state == Task::COMMITTED && name == task.committed_by) return false;
      return cordoned.count(name) == 0 && task.failed_on.count(name) == 0;
    });
  }

  ModelAttempt* Find(const Ref& ref) {
    const auto job = jobs.find(ref.job);
    if (job == jobs.end() || ref.task >= job->second.tasks.size()) return nullptr;
    const auto attempt = job->second.tasks[ref.task].attempts.find(ref.attempt);
    return attempt == job->second.tasks[ref.task].attempts.end() ? nullptr : &attempt->second;
  }

  void Settle(ModelJob& job, bool may_be_ready) {
    if (may_be_ready && job.Granting() && job.Complete()) job.state = Job::PUBLISHING;
    if (job.state == Job::CANCELLING && !job.HasGranted()) job.state = Job::CANCELLED;
  }
  // An attempt is over, or lost.
  void End(const Ref& ref, bool lost = false) {
    ModelJob& job = jobs.at(ref.job);
    ModelTask& task = job.tasks[ref.task];
    const bool waited = task.AuditWaits();
    if (lost) {
      task.attempts.at(ref.attempt).granted = false;
    } else {
      task.attempts.erase(ref.attempt);
    }
    if (task.state == Task::RUNNING && !task.HasGranted()) task.state = Task::PENDING;
    if (!waited && task.AuditWaits()) task.due_since = now;
    Settle(job, false);
  }
  void FailJob(ModelJob& job) {
    if (job.state == Job::SUCCEEDED || job.state == Job::FAILED || job.state == Job::CANCELLED) return;
    StopAll(job);
    job.state = Job::FAILED;
  }
  static void StopAll(ModelJob& job) {
    for (ModelTask& task : job.tasks) {
      for (auto& [number, attempt] : task.attempts) attempt.stop = true;
    }
  }
  void FailTask(const Ref& ref) {
    ModelJob& job = jobs.at(ref.job);
    if (job.tasks[ref.task].state != Task::COMMITTED) job.tasks[ref.task].state = Task::FAILED;
    FailJob(job);
  }
  bool Counts(const Ref& ref) {
    const auto job = jobs.find(ref.job);
    if (job == jobs.end() || !job->second.UnderWay()) return false;
    const ModelTask& task = job->second.tasks[ref.task];
    if (task.state != Task::COMMITTED) return true;
    const ModelAttempt* const attempt = Find(ref);
    return attempt != nullptr && attempt->purpose == quern::v1::AUDIT && task.audit == TaskRecord::DUE;
  }
  void CountFailure(const Ref& ref) {
    if (++jobs.at(ref.job).tasks[ref.task].failures >= kMaxFailures) FailTask(ref);
  }
  // Whether it is a failure, should the worker have died.
  bool Lose(const Ref& ref) {
    const ModelAttempt& attempt = *Find(ref);
    const bool counts = attempt.seen && !attempt.stop && Counts(ref);
    End(ref, true);
    return counts;
  }

  std::vector<Ref> GrantedTo(const std::string& worker) const {
    std::vector<Ref> refs;
    for (const auto& [id, job] : jobs) {
      for (uint32_t task = 0; task < job.tasks.size(); ++task) {
        for (const auto& [number, attempt] : job.tasks[task].attempts) {
          if (attempt.granted && attempt.worker == worker) refs.push_back({id, task, number});
        }
      }
    }
    return refs;
  }

  void Failed(const Ref& ref, quern::v1::FailureReason reason) {
    const ModelAttempt attempt = *Find(ref);
    ModelTask& task = jobs.at(ref.job).tasks[ref.task];
    const bool counts = attempt.granted && Counts(ref);
    bool is_so = reason == quern::v1::SOURCE_CHANGED && IsChanged(ref);
    bool old_news = false;
    if (counts && !is_so) {
      old_news = task.failed_on.count(attempt.worker) > 0 && AnotherCouldTry(task);
      absl::Duration wait = kBackoff;
      for (uint32_t i = 0; i < task.failures; ++i) wait *= 2;
      task.not_before = now + std::min(wait, kMaxBackoff);
      task.failed_on.insert(attempt.worker);
      if (reason == quern::v1::BAD_INPUT) {
        task.bad_input_on.insert(attempt.worker);
        is_so = task.bad_input_on.size() > 1;
      }
    }
    End(ref);
    if (!counts || reason == quern::v1::LINK_LOST) return;
    if (is_so) {
      FailTask(ref);
    } else if (!old_news) {
      CountFailure(ref);
    }
  }

  void Uncommit(uint64_t id, uint32_t index, Task::State state) {
    ModelTask& task = jobs.at(id).tasks[index];
    while (!task.attempts.empty()) End({id, index, task.attempts.begin()->first});
    task.state = state;
    task.committed_attempt = 0;
    task.committed_by.clear();
    task.digest.clear();
    task.audited_by.clear();
    if (task.audit == TaskRecord::PASSED) task.audit = TaskRecord::DUE;
  }

  void Mismatch(const Ref& ref, const std::string& worker) {
    ModelJob& job = jobs.at(ref.job);
    if (job.state == Job::SUCCEEDED) return;
    job.disputes.insert(std::minmax(worker, job.tasks[ref.task].committed_by));
    Uncommit(ref.job, ref.task, Task::FAILED);
    FailJob(job);
  }

  void SettleDisputes(uint64_t id) {
    ModelJob& job = jobs.at(id);
    if (job.disputes.empty()) return;
    std::set<std::string> wrong;
    for (const auto& [a, b] : job.disputes) {
      for (const std::string& name : {a, b}) {
        if (cordoned.count(name) > 0) wrong.insert(name);
      }
    }
    std::erase_if(job.disputes, [&](const auto& pair) { return wrong.count(pair.first) > 0 || wrong.count(pair.second) > 0; });
    for (uint32_t i = 0; i < job.tasks.size(); ++i) {
      ModelTask& task = job.tasks[i];
      std::vector<uint32_t> theirs;
      for (const auto& [number, attempt] : task.attempts) {
        if (wrong.count(attempt.worker) > 0) theirs.push_back(number);
      }
      for (const uint32_t number : theirs) End({id, i, number});
      if (task.state != Task::COMMITTED || (!task.audited_by.empty() && task.audited_by != task.committed_by)) continue;
      if (wrong.count(task.committed_by) > 0) {
        Uncommit(id, i, Task::PENDING);
      } else if (job.Disputed(task.committed_by) && task.audit != TaskRecord::DUE) {
        task.audit = TaskRecord::DUE;
        task.audited_by.clear();
        task.due_since = now;
      }
    }
  }

  void Completed(const Ref& ref, const std::string& digest) {
    ModelJob& job = jobs.at(ref.job);
    ModelTask& task = job.tasks[ref.task];
    if (Find(ref)->purpose == quern::v1::AUDIT) {
      if (digest != task.digest) {
        const std::string worker = Find(ref)->worker;
        End(ref);
        return Mismatch(ref, worker);
      }
      task.audited_by = Find(ref)->worker;
      task.attempts.clear();
      task.audit = TaskRecord::PASSED;
    } else {
      task.committed_by = Find(ref)->worker;
      task.committed_attempt = ref.attempt;
      task.digest = digest;
      task.attempts.clear();
      task.state = Task::COMMITTED;
      task.due_since = now;
      if (job.Disputed(task.committed_by)) task.audit = TaskRecord::DUE;
    }
    task.not_before = -absl::InfiniteDuration();
    task.failed_on.clear();
    task.bad_input_on.clear();
    Settle(job, true);
  }

  // A call of a worker, up to what it is granted.
  void Call(const SynchronizeRequest& request, const std::set<Ref>& bad_files) {
    const std::string& worker = request.worker();
    here.insert(worker);
    std::vector<Ref> suspects;
    for (const Ref& ref : GrantedTo(worker)) {
      if (Find(ref)->incarnation != request.incarnation() && Lose(ref)) suspects.push_back(ref);
    }
    if (!suspects.empty()) suspicions[worker].push_back({now + kLease, suspects});
    // What is looked at first: digests of files, and empty ones for reports that the source changed.
    std::vector<std::pair<Ref, std::string>> checked;
    std::set<Ref> listed;
    for (const AttemptStatus& status : request.attempts()) {
      const Ref ref{ParseJobName(status.id().job()).value(), status.id().task(), status.id().attempt()};
      listed.insert(ref);
      const auto job = jobs.find(ref.job);
      if (job == jobs.end()) continue;
      ModelTask& task = job->second.tasks[ref.task];
      ModelAttempt* const attempt = Find(ref);
      if (status.state() == AttemptStatus::COMPLETED) {
        const bool audit = attempt != nullptr && attempt->purpose == quern::v1::AUDIT;
        if (task.state == Task::COMMITTED && !audit) {
          if (task.digest != status.result().sha256()) Mismatch(ref, worker);
        } else if (attempt != nullptr) {
          checked.emplace_back(ref, status.result().sha256());
        }
      } else if (attempt == nullptr) {
        continue;
      } else if (status.state() == AttemptStatus::FAILED) {
        if (status.failure().reason() == quern::v1::SOURCE_CHANGED && attempt->granted && Counts(ref)) {
          checked.emplace_back(ref, "");
        } else {
          Failed(ref, status.failure().reason());
        }
      } else if (status.state() == AttemptStatus::STOPPED) {
        if (attempt->stop || !attempt->seen) {
          End(ref);
        } else {
          Failed(ref, quern::v1::INTERNAL);
        }
      } else if (!attempt->granted) {
        // Nobody else has begun: it goes on.
        if (attempt->purpose == quern::v1::AUDIT ? task.AuditWaits() : task.state == Task::PENDING) {
          attempt->granted = true;
          if (attempt->purpose != quern::v1::AUDIT) task.state = Task::RUNNING;
        }
      }
    }
    for (const Ref& ref : GrantedTo(worker)) {
      if (Find(ref)->stop && listed.count(ref) == 0) {
        End(ref);
      } else {
        Find(ref)->seen = true;
      }
    }
    for (const auto& [ref, digest] : checked) {
      if (Find(ref) == nullptr) continue;
      if (digest.empty()) {
        Failed(ref, quern::v1::SOURCE_CHANGED);
      } else if (bad_files.count(ref) > 0) {
        Failed(ref, quern::v1::IO_ERROR);
      } else {
        Completed(ref, digest);
      }
    }
  }

  // Time passes, and nobody calls.
  void Tick(absl::Duration time, const std::vector<std::string>& workers, std::map<std::string, absl::Duration>* last_call) {
    now = time;
    for (const std::string& worker : workers) {
      for (const Ref& ref : GrantedTo(worker)) {
        if ((*last_call)[worker] + kLease <= now && Lose(ref)) CountFailure(ref);
      }
      if (now - (*last_call)[worker] >= kLease) here.erase(worker);
      for (auto& [until, refs] : suspicions[worker]) {
        if (until > now) continue;
        for (const Ref& ref : std::exchange(refs, {})) {
          if (Counts(ref)) CountFailure(ref);
        }
      }
    }
  }

  void Resume(uint64_t id) {
    ModelJob& job = jobs.at(id);
    if (job.state == Job::SUCCEEDED || job.state == Job::PUBLISHING) return;
    SettleDisputes(id);
    if (!job.Granting()) {
      for (ModelTask& task : job.tasks) {
        task.failures = 0;
        task.not_before = -absl::InfiniteDuration();
        task.failed_on.clear();
        task.bad_input_on.clear();
        if (task.state == Task::FAILED) task.state = task.HasGranted() ? Task::RUNNING : Task::PENDING;
      }
      for (auto& [worker, list] : suspicions) {
        for (auto& [until, refs] : list) std::erase_if(refs, [&](const Ref& ref) { return ref.job == id; });
      }
    }
    job.state = job.Complete() ? Job::PUBLISHING : job.ever_granted ? Job::RUNNING : Job::QUEUED;
  }

  // What a new coordinator makes of the same records.
  void Reopen(absl::Duration time) {
    now = time;
    suspicions.clear();
    here.clear();
    for (auto& [id, job] : jobs) {
      const bool stopping = job.state == Job::CANCELLING || job.state == Job::CANCELLED || job.state == Job::FAILED;
      for (ModelTask& task : job.tasks) {
        task.not_before = -absl::InfiniteDuration();
        task.failed_on.clear();
        task.bad_input_on.clear();
        task.due_since = now;
        for (auto& [number, attempt] : task.attempts) {
          attempt.seen = false;
          attempt.stop = stopping;
        }
      }
      Settle(job, true);
    }
  }
};

class ModelRun {
 public:
  explicit ModelRun(uint64_t seed) : random_(seed) {
    auto made = TempDir::Make("quern-model-test");
    EXPECT_THAT(made, IsOk());
    directory_ = std::make_unique<TempDir>(*std::move(made));
    Open();
    for (const std::string& name : names_) workers_[name].incarnation = absl::StrCat(name, " 1");
  }

  void Steps(int steps) {
    for (int i = 0; i < steps && !testing::Test::HasFailure(); ++i) {
      SCOPED_TRACE(absl::StrCat("step ", i));
      Step();
    }
    if (!testing::Test::HasFailure()) Finish();
  }

  int crashes = 0, grants = 0, audits = 0, ended = 0, settled = 0;

 private:
  struct Worker {
    std::string incarnation;
    std::map<Ref, AttemptStatus> attempts;
  };

  uint32_t Below(uint32_t n) { return std::uniform_int_distribution<uint32_t>(0, n - 1)(random_); }
  bool Chance(uint32_t percent) { return Below(100) < percent; }

  void Open() {
    auto store = OpenRocksDbJobStore(JoinPath(directory_->path(), "state"));
    ASSERT_THAT(store, IsOk());
    store_ = std::make_unique<HeldStore>(*std::move(store));
    JobQueueOptions options;
    options.store = store_.get();
    options.clock = &clock_;
    options.numerics_version = 1;
    options.lease = kLease;
    options.retry_backoff = kBackoff;
    options.max_retry_backoff = kMaxBackoff;
    options.audit_patience = kPatience;
    options.max_failures = kMaxFailures;
    options.set_aside_after = 0;
    options.attempt_path = [](const std::string& output, uint32_t task, uint32_t attempt) {
      return absl::StrCat(output, "/", task, ".", attempt);
    };
    options.check_commit = [this](const quern::v1::TaskSpec&, const std::string& path, const quern::v1::TaskResult&) {
      return bad_paths_.count(path) > 0 ? absl::DataLossError("wrong size") : absl::OkStatus();
    };
    options.read_back = [](const std::string&, const std::string&, std::function<void(absl::Status)> done) { done(absl::OkStatus()); };
    options.confirm = [](uint64_t job, uint32_t task, const quern::v1::Failure& failure, uint64_t, std::function<void(absl::Status)> done) {
      uint32_t attempt = 0;
      ASSERT_TRUE(absl::SimpleAtoi(failure.message(), &attempt));
      done(IsChanged({job, task, attempt}) ? absl::FailedPreconditionError("it changed") : absl::OkStatus());
    };
    options.run = [](std::function<void()> work) { work(); };
    options.on_ready = [](uint64_t) {};
    auto queue = JobQueue::Open(std::move(options));
    ASSERT_THAT(queue, IsOk());
    queue_ = *std::move(queue);
    for (uint64_t job : queue_->HeldJobs()) queue_->Release(job, {});
    store_->Sync();
    model_.Reopen(clock_.Monotonic());
    for (const std::string& name : names_) last_call_[name] = clock_.Monotonic();
  }

  // The end of an operation that is in `model_` already; `before` is the model without it. Returns whether it was told.
  bool Conclude(const Model& before) {
    if (Chance(calm_ ? 0 : 8)) {
      ++crashes;
      const bool written = Chance(50);
      store_->Crash(written);
      if (!written) model_ = before;
      queue_.reset();
      store_.reset();
      Open();
      Compare();
      return false;
    }
    store_->Sync();
    Compare();
    return true;
  }

  void Compare() {
    if (testing::Test::HasFailure()) return;
    std::vector<Job> jobs;
    queue_->ListJobs(0, 1000, [&](absl::StatusOr<std::vector<Job>> list) { jobs = *std::move(list); });
    ASSERT_EQ(jobs.size(), model_.jobs.size());
    for (const Job& job : jobs) {
      const uint64_t id = ParseJobName(job.name()).value();
      SCOPED_TRACE(job.name());
      ASSERT_EQ(model_.jobs.count(id), 1);
      const ModelJob& expected = model_.jobs.at(id);
      EXPECT_EQ(Job::State_Name(job.state()), Job::State_Name(expected.state));
      std::vector<Task> tasks;
      queue_->ListTasks(id, 0, 1000, [&](absl::StatusOr<std::vector<Task>> list) { tasks = *std::move(list); });
      ASSERT_EQ(tasks.size(), expected.tasks.size());
      uint32_t done = 0, running = 0, failed = 0, audited = 0, to_audit = 0;
      std::map<uint32_t, uint32_t> committed;
      for (const auto& attempt : queue_->CommittedAttempts(id)) committed[attempt.task] = attempt.attempt;
      for (uint32_t i = 0; i < tasks.size(); ++i) {
        SCOPED_TRACE(absl::StrCat("task ", i));
        const ModelTask& task = expected.tasks[i];
        EXPECT_EQ(Task::State_Name(tasks[i].state()), Task::State_Name(task.state));
        EXPECT_EQ(tasks[i].failures(), task.failures);
        ASSERT_EQ(tasks[i].attempts_size(), task.next_attempt - 1) << "each is kept as history";
        for (const quern::v1::Attempt& attempt : tasks[i].attempts()) {
          const auto live = task.attempts.find(attempt.attempt());
          const bool granted = live != task.attempts.end() && live->second.granted;
          EXPECT_EQ(attempt.state() == quern::v1::Attempt::GRANTED, granted) << attempt.attempt();
          if (live == task.attempts.end() || granted) continue;
          EXPECT_EQ(attempt.state(), quern::v1::Attempt::LOST);
        }
        EXPECT_EQ(committed.count(i) > 0 ? committed[i] : 0, task.committed_attempt);
        done += task.state == Task::COMMITTED;
        running += task.state == Task::RUNNING;
        failed += task.state == Task::FAILED;
        audited += task.audit == TaskRecord::PASSED;
        to_audit += task.audit != TaskRecord::NONE;
      }
      EXPECT_EQ(job.progress().tasks_done(), done);
      EXPECT_EQ(job.progress().tasks_running(), running);
      EXPECT_EQ(job.progress().tasks_failed(), failed);
      EXPECT_EQ(job.progress().tasks_audited(), audited);
      EXPECT_EQ(job.progress().tasks_to_audit(), to_audit);
    }
    for (const quern::v1::Worker& worker : queue_->ListWorkers()) {
      const std::string name = worker.name().substr(8);
      if (worker.state() != "lost") {
        EXPECT_EQ(worker.state() == "cordoned", model_.cordoned.count(name) > 0) << name;
      }
    }
  }

  void Create() {
    NewJob add;
    add.id = queue_->ReserveId();
    add.request_id = absl::StrCat("request ", add.id);
    add.spec.set_output(absl::StrCat("/out", add.id));
    add.priority = static_cast<int32_t>(Below(2));
    add.plan.set_identity(absl::StrCat("identity ", add.id));
    add.audit_fraction = Chance(50) ? 0.5 : 0;
    const Model before = model_;
    ModelJob& job = model_.jobs[add.id];
    job.priority = add.priority;
    const uint32_t tasks = 1 + Below(4);
    for (uint32_t i = 0; i < tasks; ++i) {
      quern::v1::TaskSpec& task = add.tasks.emplace_back();
      task.set_index(i);
      task.mutable_write_shard();
      task.set_minimum_memory((16 + Below(2)) * kMiB);
      if (ChosenForAudit(add.plan.identity(), i, add.audit_fraction))
        job.tasks.emplace_back().audit = TaskRecord::DUE;
      else
        job.tasks.emplace_back();
    }
    queue_->AddJob(std::move(add), nullptr);
    Conclude(before);
  }

  // Of the records that are on their way: what was granted.
  void LearnGrants(const std::string& name, const SynchronizeRequest& request) {
    for (const StoreWrite& write : store_->Pending()) {
      if (write.kind != StoreWrite::Kind::kPut || write.key[0] != 'a') continue;
      quern::store::AttemptRecord record;
      ASSERT_TRUE(record.ParseFromString(write.value));
      const auto number = [&](size_t at, size_t size) {
        uint64_t value = 0;
        for (size_t i = at; i < at + size; ++i) value = value << 8 | static_cast<unsigned char>(write.key[i]);
        return value;
      };
      const Ref ref{number(1, 8), static_cast<uint32_t>(number(9, 4)), static_cast<uint32_t>(number(13, 4))};
      if (record.state() != quern::v1::Attempt::GRANTED || model_.Find(ref) != nullptr) continue;
      SCOPED_TRACE(absl::StrCat(TaskName(ref.job, ref.task), " attempt ", ref.attempt));
      ASSERT_EQ(model_.jobs.count(ref.job), 1);
      ModelJob& job = model_.jobs.at(ref.job);
      ModelTask& task = job.tasks[ref.task];
      EXPECT_EQ(record.worker(), name);
      EXPECT_EQ(record.incarnation(), request.incarnation());
      EXPECT_TRUE(job.Granting()) << Job::State_Name(job.state);
      EXPECT_EQ(ref.attempt, task.next_attempt);
      EXPECT_EQ(model_.cordoned.count(name), 0);
      EXPECT_LT(Busy(name, request), kSlots);
      EXPECT_LE(task.not_before, model_.now);
      if (record.purpose() == quern::v1::AUDIT) {
        ++audits;
        EXPECT_TRUE(task.AuditWaits());
        if (task.committed_by == name) {
          EXPECT_GE(model_.now - task.due_since, kPatience);
          EXPECT_FALSE(job.Disputed(name)) << "its own word is no proof";
        }
      } else {
        EXPECT_EQ(record.purpose(), quern::v1::WORK);
        EXPECT_EQ(task.state, Task::PENDING);
        task.state = Task::RUNNING;
      }
      for (const auto& [id, other] : model_.jobs) EXPECT_FALSE(other.priority > job.priority && HasWorkFor(other, name)) << JobName(id);
      job.state = Job::RUNNING;
      job.ever_granted = true;
      ++task.next_attempt;
      task.attempts[ref.attempt] = {name, request.incarnation(), record.purpose()};
      ++grants;
    }
    const bool room = model_.cordoned.count(name) == 0 && Busy(name, request) < kSlots;
    for (const auto& [id, job] : model_.jobs) EXPECT_FALSE(room && HasWorkFor(job, name)) << name << " is idle beside " << JobName(id);
  }

  // Surely: a task that failed on the worker may be kept for others.
  bool HasWorkFor(const ModelJob& job, const std::string& name) const {
    return job.Granting() && std::any_of(job.tasks.begin(), job.tasks.end(), [&](const ModelTask& task) {
             if (task.not_before > model_.now || task.failed_on.count(name) > 0) return false;
             return task.state == Task::PENDING || (task.AuditWaits() && task.committed_by != name);
           });
  }

  size_t Busy(const std::string& name, const SynchronizeRequest& request) {
    std::set<Ref> busy;
    for (const Ref& ref : model_.GrantedTo(name)) busy.insert(ref);
    for (const AttemptStatus& status : request.attempts()) {
      const Ref ref{ParseJobName(status.id().job()).value(), status.id().task(), status.id().attempt()};
      if (status.state() == AttemptStatus::RUNNING) busy.insert(ref);
    }
    return busy.size();
  }

  void Synchronize(const std::string& name) {
    Worker& worker = workers_[name];
    SynchronizeRequest request;
    request.set_worker(name);
    request.set_incarnation(worker.incarnation);
    request.set_version("1");
    request.set_numerics_version(1);
    request.set_slots(kSlots);
    request.set_memory(256 * kMiB);
    for (const auto& [ref, status] : worker.attempts) *request.add_attempts() = status;
    std::set<Ref> bad_files;
    bad_paths_.clear();
    for (const auto& [ref, status] : worker.attempts) {
      if (calm_ || status.state() != AttemptStatus::COMPLETED || !Chance(5)) continue;
      bad_files.insert(ref);
      bad_paths_.insert(absl::StrCat("/out", ref.job, "/", ref.task, ".", ref.attempt));
    }
    const Model before = model_;
    model_.Call(request, bad_files);
    last_call_[name] = clock_.Monotonic();
    std::optional<absl::StatusOr<SynchronizeResponse>> answer;
    queue_->Synchronize(request, "", ++tickets_, [&answer](absl::StatusOr<SynchronizeResponse> response) { answer = std::move(response); });
    LearnGrants(name, request);
    if (testing::Test::HasFailure() || !Conclude(before)) return;
    ASSERT_TRUE(answer.has_value());
    ASSERT_THAT(*answer, IsOk());
    const SynchronizeResponse& response = **answer;
    // Everything that runs here is listed, and what the worker has not heard of comes whole.
    std::set<Ref> told, expected;
    for (const auto& desired : response.attempts()) {
      const Ref ref{ParseJobName(desired.id().job()).value(), desired.id().task(), desired.id().attempt()};
      if (desired.has_spec()) told.insert(ref);
    }
    for (const Ref& ref : model_.GrantedTo(name)) {
      if (!model_.Find(ref)->stop && worker.attempts.count(ref) == 0) expected.insert(ref);
    }
    EXPECT_EQ(told, expected);
    if (!calm_ && Chance(10)) return;  // the answer is lost
    for (const auto& id : response.acknowledged()) worker.attempts.erase({ParseJobName(id.job()).value(), id.task(), id.attempt()});
    for (const auto& desired : response.attempts()) {
      const Ref ref{ParseJobName(desired.id().job()).value(), desired.id().task(), desired.id().attempt()};
      if (desired.stop()) {
        if (const auto it = worker.attempts.find(ref); it != worker.attempts.end() && it->second.state() == AttemptStatus::RUNNING) {
          it->second.set_state(AttemptStatus::STOPPED);
        }
      } else if (desired.has_spec()) {
        AttemptStatus& status = worker.attempts[ref];
        *status.mutable_id() = desired.id();
        status.set_purpose(desired.purpose());
        status.set_state(AttemptStatus::RUNNING);
      }
    }
  }

  void Work(const std::string& name) {
    for (auto& [ref, status] : workers_[name].attempts) {
      if (status.state() != AttemptStatus::RUNNING) continue;
      if (calm_ || Chance(45)) {
        status.set_state(AttemptStatus::COMPLETED);
        // One machine is much worse than the others.
        const bool flipped = !calm_ && Chance(name == "c" ? 40 : 4);
        status.mutable_result()->set_sha256(flipped ? absl::StrCat("flipped by ", name) : DigestOf(ref.job, ref.task));
      } else if (Chance(15)) {
        const quern::v1::FailureReason reasons[] = {quern::v1::IO_ERROR,  quern::v1::EXECUTOR_DIED, quern::v1::IO_ERROR,
                                                    quern::v1::LINK_LOST, quern::v1::BAD_INPUT,     quern::v1::SOURCE_CHANGED};
        status.set_state(AttemptStatus::FAILED);
        status.mutable_failure()->set_reason(reasons[Below(Chance(40) ? 6 : 4)]);
        status.mutable_failure()->set_message(absl::StrCat(ref.attempt));
      } else if (Chance(5)) {
        status.set_state(AttemptStatus::STOPPED);
      }
    }
  }

  void Advance() {
    const Model before = model_;
    clock_.Advance(absl::Seconds(Chance(60) ? 1 + Below(10) : 31));
    model_.Tick(clock_.Monotonic(), names_, &last_call_);
    queue_->Tick();
    Conclude(before);
  }

  void ChangeJob() {
    const uint64_t id = std::next(model_.jobs.begin(), Below(model_.jobs.size()))->first;
    const Model before = model_;
    ModelJob& job = model_.jobs.at(id);
    std::optional<absl::Status> told;
    const auto tell = [&told](absl::StatusOr<Job> answer) { told = answer.status(); };
    bool allowed = true;
    switch (Below(8)) {
      case 0:
        allowed = job.UnderWay();
        if (allowed) job.state = Job::PAUSED;
        queue_->PauseJob(id, tell);
        break;
      case 1:
        allowed = job.state != Job::PUBLISHING && job.state != Job::SUCCEEDED;
        if (allowed && job.state != Job::CANCELLING && job.state != Job::CANCELLED) {
          Model::StopAll(job);
          job.state = job.HasGranted() ? Job::CANCELLING : Job::CANCELLED;
        }
        queue_->CancelJob(id, tell);
        break;
      case 2:
      case 3:
        allowed = job.state == Job::PUBLISHING;
        if (allowed) job.state = Job::SUCCEEDED;
        queue_->FinishJob(id, {}, tell);
        break;
      case 4:
        if (job.state == Job::SUCCEEDED) {
          ++ended;
          model_.jobs.erase(id);
          queue_->DeleteJob(id, [&told](absl::Status status) { told = std::move(status); });
          break;
        }
        [[fallthrough]];
      default:
        allowed = job.state != Job::SUCCEEDED;
        settled += !job.disputes.empty();
        model_.Resume(id);
        queue_->ResumeJob(id, {}, tell);
    }
    if (!Conclude(before)) return;
    ASSERT_TRUE(told.has_value());
    EXPECT_EQ(told->ok(), allowed) << *told;
  }

  void ChangeWorker() {
    const std::string& name = names_[Below(names_.size())];
    const Model before = model_;
    std::optional<absl::Status> told;
    const auto tell = [&told](absl::StatusOr<quern::v1::Worker> answer) { told = answer.status(); };
    bool known = false;
    for (const quern::v1::Worker& worker : queue_->ListWorkers()) known |= worker.name() == WorkerName(name);
    if (Chance(35)) {
      if (known) model_.cordoned.insert(name);
      queue_->CordonWorker(name, "why", tell);
    } else {
      if (known) model_.cordoned.erase(name);
      queue_->UncordonWorker(name, tell);
    }
    if (!Conclude(before)) return;
    ASSERT_TRUE(told.has_value());
    EXPECT_EQ(told->ok(), known);
  }

  void Step() {
    const uint32_t what = Below(100);
    const std::string& name = names_[Below(names_.size())];
    if (model_.jobs.empty() || (what < 6 && model_.jobs.size() < 4)) {
      Create();
    } else if (what < 55) {
      Synchronize(name);
    } else if (what < 75) {
      Work(name);
    } else if (what < 78) {
      workers_[name].incarnation = absl::StrCat(name, " ", ++incarnations_);
      workers_[name].attempts.clear();
    } else if (what < 84) {
      Advance();
    } else if (what < 87) {
      ChangeWorker();
    } else {
      ChangeJob();
    }
  }

  // Without faults everything gets done.
  void Finish() {
    calm_ = true;
    for (const std::string& name : names_) {
      Synchronize(name);
      queue_->UncordonWorker(name, [](absl::StatusOr<quern::v1::Worker>) {});
      model_.cordoned.erase(name);
      store_->Sync();
    }
    for (int round = 0; round < 60 && !testing::Test::HasFailure(); ++round) {
      bool all = true;
      for (auto& [id, job] : model_.jobs) {
        if (job.state == Job::PUBLISHING || job.state == Job::SUCCEEDED) continue;
        all = false;
        model_.Resume(id);
        queue_->ResumeJob(id, {}, nullptr);
      }
      store_->Sync();
      if (all) break;
      for (const std::string& name : names_) {
        Work(name);
        Synchronize(name);
      }
      clock_.Advance(absl::Seconds(2));
      model_.Tick(clock_.Monotonic(), names_, &last_call_);
      queue_->Tick();
      store_->Sync();
      Compare();
    }
    for (const auto& [id, job] : model_.jobs) EXPECT_TRUE(job.state == Job::PUBLISHING || job.state == Job::SUCCEEDED) << JobName(id);
  }

  const std::vector<std::string> names_ = {"a", "b", "c"};
  std::mt19937_64 random_;
  ManualClock clock_;
  std::unique_ptr<TempDir> directory_;
  bool calm_ = false;
  int incarnations_ = 1;
  uint64_t tickets_ = 0;
  Model model_;
  std::map<std::string, Worker> workers_;
  std::map<std::string, absl::Duration> last_call_;
  std::set<std::string> bad_paths_;
  std::unique_ptr<HeldStore> store_;
  std::unique_ptr<JobQueue> queue_;  // first to go
};

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  uint64_t value = 0;
  return text != nullptr && absl::SimpleAtoi(text, &value) ? value : otherwise;
}

TEST(JobQueueOverRocksDb, IsInTheStateOfTheModelAfterRandomOperationsAndCrashes) {
  const uint64_t first = FromEnvironment("QUERN_SEED", 1), runs = FromEnvironment("QUERN_MODEL_RUNS", 6);
  int crashes = 0, grants = 0, audits = 0, ended = 0, settled = 0;
  for (uint64_t seed = first; seed < first + runs; ++seed) {
    SCOPED_TRACE(absl::StrCat("QUERN_SEED=", seed));
    ModelRun run(seed);
    run.Steps(250);
    crashes += run.crashes;
    grants += run.grants;
    audits += run.audits;
    ended += run.ended;
    settled += run.settled;
    if (HasFailure()) break;
  }
  std::cout << "seeds " << first << " to " << first + runs - 1 << ": " << crashes << " crashes, " << grants << " grants, " << audits
            << " audits, " << ended << " jobs done and deleted, " << settled << " resumed with a dispute\n";
  // The operations did reach what they are meant to test.
  EXPECT_GT(crashes, 5 * runs);
  EXPECT_GT(grants, 20 * runs);
  EXPECT_GT(audits, runs);
  EXPECT_GT(settled, 0);
}

}  // namespace
}  // namespace quern::daemon
