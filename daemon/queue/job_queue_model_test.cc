// Random operations, lost messages and crashes against what a client and a worker may rely on:
//   - an attempt is granted to one incarnation of one worker only, and attempts of a task have ever larger numbers;
//   - a task whose completion was acknowledged is never granted again, also after a crash that lost all that was not synced;
//   - an incarnation that a newer one has replaced is told to stop, and gets nothing;
//   - a stranger is refused the name of a worker that is there, and what it says of others' attempts changes nothing;
//   - in the end every job gets done.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/clock.h"
#include "base/status_matchers.h"
#include "daemon/queue/crash_store.h"
#include "daemon/queue/job_queue.h"
#include "daemon/queue/names.h"

namespace quern::daemon {
namespace {

using quern::v1::AttemptStatus;
using quern::v1::Job;
using quern::v1::SynchronizeResponse;

class Model {
 public:
  explicit Model(uint64_t seed) : random_(seed) {
    Open();
    for (int i = 0; i < 3; ++i) NewIncarnation(i);
  }

  void Run(int steps) {
    for (int i = 0; i < steps && !testing::Test::HasFailure(); ++i) Step();
    Finish();
  }

  int grants() const { return static_cast<int>(grants_.size()); }
  int commits() const { return static_cast<int>(acknowledged_.size()); }
  int crashes() const { return crashes_; }
  int ghost_calls() const { return ghost_calls_; }
  int strangers() const { return strangers_; }
  int audits() const { return audits_; }

 private:
  using TaskId = std::pair<std::string, uint32_t>;
  using AttemptId = std::tuple<std::string, uint32_t, uint32_t>;
  struct Worker {
    std::string incarnation;
    bool leaving = false;
    std::vector<AttemptStatus> attempts;
  };

  struct Ghost {
    int index;
    bool superseded;  // the coordinator knows it
    Worker worker;
  };

  uint32_t Below(uint32_t n) { return std::uniform_int_distribution<uint32_t>(0, n - 1)(random_); }
  bool Chance(uint32_t percent) { return Below(100) < percent; }

  void Open() {
    JobQueueOptions options;
    options.store = &store_;
    options.clock = &clock_;
    options.numerics_version = 1;
    options.attempt_path = [](const std::string& output, uint32_t task, uint32_t attempt) {
      return absl::StrCat(output, "/", task, ".", attempt);
    };
    options.check_commit = [this](const quern::v1::TaskSpec&, const std::string&, const quern::v1::TaskResult&) {
      return !calm_ && Chance(5) ? absl::DataLossError("wrong size") : absl::OkStatus();
    };
    options.read_back = [](const std::string&, const std::string&, std::function<void(absl::Status)> done) { done(absl::OkStatus()); };
    options.confirm = [this](uint64_t, uint32_t, const quern::v1::Failure&, uint64_t, std::function<void(absl::Status)> done) {
      done(Chance(50) ? absl::FailedPreconditionError("so it is") : absl::OkStatus());
    };
    options.run = [](std::function<void()> work) { work(); };
    options.on_ready = [this](uint64_t job) { ready_.insert(job); };
    auto queue = JobQueue::Open(std::move(options));
    ASSERT_THAT(queue, IsOk());
    queue_ = *std::move(queue);
    for (uint64_t job : queue_->HeldJobs()) queue_->Release(job, {});
    // Also those that were stored just before nobody could be told.
    queue_->ListJobs(0, 100, [this](absl::StatusOr<std::vector<Job>> jobs) {
      if (!jobs.ok()) return;
      for (const Job& job : *jobs) jobs_.insert(ParseJobName(job.name()).value());
    });
  }

  void Crash() {
    ++crashes_;
    // Some of what was handed over may have reached the disk.
    if (Chance(50)) store_.ApplySilently();
    store_.LosePending();
    queue_.reset();
    ready_.clear();
    ghosts_.clear();
    known_.clear();
    Open();
  }

  void NewIncarnation(int worker) {
    if (!workers_[worker].incarnation.empty()) ghosts_.push_back({worker, false, workers_[worker]});
    workers_[worker].incarnation = absl::StrCat("incarnation ", ++incarnations_);
    workers_[worker].leaving = false;
    workers_[worker].attempts.clear();
  }

  // Gives back what it runs, and starts anew once that is acknowledged.
  void Leave(int worker) {
    workers_[worker].leaving = true;
    for (AttemptStatus& attempt : workers_[worker].attempts) {
      if (attempt.state() == AttemptStatus::RUNNING) attempt.set_state(AttemptStatus::STOPPED);
    }
  }

  void AddJob() {
    NewJob job;
    job.id = queue_->ReserveId();
    job.request_id = absl::StrCat("request ", ++requests_);
    job.spec.set_output(absl::StrCat("/out", requests_));
    job.audit_fraction = Chance(30) ? 1 : 0;
    const uint32_t tasks = 1 + Below(5);
    for (uint32_t i = 0; i < tasks; ++i) {
      quern::v1::TaskSpec& task = job.tasks.emplace_back();
      task.set_index(i);
      task.mutable_write_shard();
      task.set_minimum_memory(16 * kMiB);
    }
    queue_->AddJob(std::move(job), [this](absl::StatusOr<Job> added) {
      if (added.ok()) jobs_.insert(ParseJobName(added->name()).value());
    });
  }

  void Synchronize(int index) {
    Worker& worker = workers_[index];
    quern::v1::SynchronizeRequest request;
    request.set_worker(absl::StrCat("worker-", index));
    request.set_incarnation(worker.incarnation);
    request.set_numerics_version(1);
    request.set_machine(index < 2 ? "both" : "own");
    request.set_slots(2);
    request.set_memory(256 * kMiB);
    for (const AttemptStatus& attempt : worker.attempts) *request.add_attempts() = attempt;
    request.set_may_wait(!calm_ && Chance(20));
    request.set_draining(worker.leaving);
    auto answer = std::make_shared<std::optional<absl::StatusOr<SynchronizeResponse>>>();
    queue_->Synchronize(request, Principal(index), ++tickets_,
                        [answer](absl::StatusOr<SynchronizeResponse> response) { *answer = std::move(response); });
    // From now on this coordinator knows that the older ones that it has heard of are replaced.
    for (Ghost& ghost : ghosts_) ghost.superseded |= ghost.index == index && known_.count(ghost.worker.incarnation) > 0;
    known_.insert(worker.incarnation);
    if (!calm_ && Chance(10)) return Crash();
    store_.Sync();
    if (!answer->has_value() || !(*answer)->ok()) return;
    Learn(index, request, ***answer);
    if (worker.leaving && worker.attempts.empty()) NewIncarnation(index);
  }

  // A process that was replaced but lives on, as one of two with the same name does.
  void SynchronizeGhost() {
    const Ghost& ghost = ghosts_[Below(ghosts_.size())];
    if (!ghost.superseded) return;
    quern::v1::SynchronizeRequest request;
    request.set_worker(absl::StrCat("worker-", ghost.index));
    request.set_incarnation(ghost.worker.incarnation);
    request.set_numerics_version(1);
    request.set_slots(2);
    request.set_memory(256 * kMiB);
    for (const AttemptStatus& attempt : ghost.worker.attempts) *request.add_attempts() = attempt;
    request.set_may_wait(Chance(20));
    std::optional<absl::StatusOr<SynchronizeResponse>> answer;
    queue_->Synchronize(request, Principal(ghost.index), ++tickets_,
                        [&](absl::StatusOr<SynchronizeResponse> response) { answer = std::move(response); });
    store_.Sync();
    ASSERT_TRUE(answer.has_value()) << "it waits";
    ASSERT_THAT(*answer, IsOk());
    ++ghost_calls_;
    EXPECT_EQ((*answer)->desired_state(), quern::v1::STOP);
    for (const quern::v1::DesiredAttempt& desired : (*answer)->attempts()) EXPECT_TRUE(desired.stop());
  }

  static std::string Principal(int worker) { return absl::StrCat("token:", worker); }

  // Somebody who wants to be a worker that is there, and claims to have done all that it does.
  void Impersonate(int index) {
    const std::string name = absl::StrCat("worker-", index);
    bool there = false;
    for (const quern::v1::Worker& worker : queue_->ListWorkers()) {
      there |= worker.name() == WorkerName(name) && worker.incarnation() == workers_[index].incarnation && worker.state() != "lost";
    }
    if (!there) return;
    quern::v1::SynchronizeRequest request;
    request.set_worker(name);
    request.set_incarnation(Chance(50) ? workers_[index].incarnation : "stranger");
    request.set_numerics_version(1);
    request.set_slots(2);
    request.set_memory(256 * kMiB);
    for (AttemptStatus attempt : workers_[index].attempts) {
      attempt.set_state(AttemptStatus::COMPLETED);
      attempt.mutable_result()->set_sha256("made up");
      *request.add_attempts() = attempt;
    }
    std::optional<absl::StatusOr<SynchronizeResponse>> answer;
    const auto done = [&](absl::StatusOr<SynchronizeResponse> response) { answer = std::move(response); };
    queue_->Synchronize(request, "token:stranger", ++tickets_, done);
    ASSERT_TRUE(answer.has_value());
    EXPECT_THAT(*answer, StatusIs(absl::StatusCode::kPermissionDenied, testing::_));
    ++strangers_;
    // Under a name of its own it is heard, and not believed.
    const size_t committed = AllCommitted();
    request.set_worker("stranger");
    request.set_slots(0);
    queue_->Synchronize(request, "token:stranger", ++tickets_, done);
    store_.Sync();
    EXPECT_EQ(AllCommitted(), committed);
  }

  size_t AllCommitted() {
    size_t count = 0;
    for (const uint64_t job : jobs_) count += queue_->CommittedAttempts(job).size();
    return count;
  }

  // What the coordinator has said is true whether or not the worker hears it.
  void Learn(int index, const quern::v1::SynchronizeRequest& request, const SynchronizeResponse& response) {
    Worker& worker = workers_[index];
    const bool heard = calm_ || !Chance(15);
    for (const quern::v1::AttemptId& id : response.acknowledged()) {
      for (const AttemptStatus& listed : request.attempts()) {
        const bool same = listed.id().job() == id.job() && listed.id().task() == id.task() && listed.id().attempt() == id.attempt();
        if (same && listed.state() == AttemptStatus::COMPLETED && Committed(id)) acknowledged_.insert({id.job(), id.task()});
      }
      if (!heard) continue;
      std::erase_if(worker.attempts, [&](const AttemptStatus& a) {
        return a.id().job() == id.job() && a.id().task() == id.task() && a.id().attempt() == id.attempt();
      });
    }
    for (const quern::v1::DesiredAttempt& desired : response.attempts()) {
      const auto& id = desired.id();
      if (desired.stop()) {
        if (!heard) continue;
        for (AttemptStatus& attempt : worker.attempts) {
          if (attempt.id().task() == id.task() && attempt.id().job() == id.job() && attempt.id().attempt() == id.attempt() &&
              attempt.state() == AttemptStatus::RUNNING) {
            attempt.set_state(AttemptStatus::STOPPED);
          }
        }
        continue;
      }
      if (!desired.has_spec()) continue;
      const std::string holder = absl::StrCat(index, " ", worker.incarnation);
      const auto [it, inserted] = grants_.insert({{id.job(), id.task(), id.attempt()}, holder});
      EXPECT_EQ(it->second, holder) << "one attempt was granted twice";
      if (inserted) {
        uint32_t& highest = highest_[{id.job(), id.task()}];
        EXPECT_GT(id.attempt(), highest) << "the number of an attempt went back";
        highest = id.attempt();
      }
      const bool audit = desired.purpose() == quern::v1::AUDIT;
      audits_ += audit;
      EXPECT_TRUE(audit || acknowledged_.count({id.job(), id.task()}) == 0) << "a finished task was granted again: " << id.DebugString();
      if (!heard) continue;
      AttemptStatus& attempt = worker.attempts.emplace_back();
      *attempt.mutable_id() = id;
      attempt.set_state(AttemptStatus::RUNNING);
    }
  }

  // A completion that failed the look at its file is acknowledged too, as the failure that it is.
  bool Committed(const quern::v1::AttemptId& id) {
    for (const auto& committed : queue_->CommittedAttempts(ParseJobName(id.job()).value())) {
      if (committed.task == id.task()) return true;
    }
    return false;
  }

  void Work(int index) {
    for (AttemptStatus& attempt : workers_[index].attempts) {
      if (attempt.state() != AttemptStatus::RUNNING) continue;
      if (calm_ || Chance(40)) {
        attempt.set_state(AttemptStatus::COMPLETED);
        attempt.mutable_result()->set_sha256(absl::StrCat(attempt.id().job(), "/", attempt.id().task()));
      } else if (Chance(15)) {
        attempt.set_state(AttemptStatus::FAILED);
        const quern::v1::FailureReason reasons[] = {quern::v1::IO_ERROR,  quern::v1::OUT_OF_MEMORY, quern::v1::DISK_FULL,
                                                    quern::v1::BAD_INPUT, quern::v1::EXECUTOR_DIED, quern::v1::SOURCE_CHANGED};
        attempt.mutable_failure()->set_reason(reasons[Below(6)]);
      } else if (Chance(5)) {
        attempt.set_state(AttemptStatus::STOPPED);
      }
    }
  }

  void Step() {
    const uint32_t what = Below(100);
    const int worker = static_cast<int>(Below(3));
    if (what < 3 || jobs_.empty()) {
      if (jobs_.size() < 4) AddJob();
    } else if (what < 60) {
      Synchronize(worker);
    } else if (what < 80) {
      Work(worker);
    } else if (what < 83) {
      NewIncarnation(worker);
    } else if (what < 85) {
      Leave(worker);
    } else if (what < 87) {
      if (!ghosts_.empty()) SynchronizeGhost();
    } else if (what < 88) {
      Impersonate(worker);
    } else if (what < 90) {
      clock_.Advance(absl::Seconds(1 + Below(40)));
      queue_->Tick();
    } else if (what < 93) {
      Crash();
    } else {
      const uint64_t job = *std::next(jobs_.begin(), Below(jobs_.size()));
      const auto ignore = [](absl::StatusOr<Job>) {};
      if (what < 94) {
        queue_->PauseJob(job, ignore);
      } else if (what < 95) {
        queue_->CancelJob(job, ignore);
      } else {
        queue_->ResumeJob(job, {}, ignore);
      }
    }
    if (Chance(90)) store_.Sync();
  }

  void Finish() {
    calm_ = true;
    store_.Sync();
    for (int round = 0; round < 200 && !testing::Test::HasFailure(); ++round) {
      for (uint64_t job : jobs_) {
        const auto record = queue_->Record(job);
        ASSERT_TRUE(record.has_value());
        if (record->state() != Job::PUBLISHING) queue_->ResumeJob(job, {}, [](absl::StatusOr<Job>) {});
      }
      store_.Sync();
      for (int worker = 0; worker < 3; ++worker) {
        Work(worker);
        Synchronize(worker);
        // Those that failed too often are well again.
        queue_->UncordonWorker(absl::StrCat("worker-", worker), [](absl::StatusOr<quern::v1::Worker>) {});
      }
      clock_.Advance(absl::Seconds(2));
      queue_->Tick();
      store_.Sync();
    }
    for (uint64_t job : jobs_) {
      const auto record = queue_->Record(job);
      EXPECT_EQ(record->state(), Job::PUBLISHING) << JobName(job) << record->error().message();
      EXPECT_EQ(queue_->CommittedAttempts(job).size(), record->tasks());
    }
    EXPECT_EQ(ready_, jobs_);
  }

  std::mt19937_64 random_;
  ManualClock clock_;
  CrashStore store_;
  bool calm_ = false;
  int crashes_ = 0, ghost_calls_ = 0, strangers_ = 0, audits_ = 0, incarnations_ = 0, requests_ = 0;
  uint64_t tickets_ = 0;
  std::set<uint64_t> jobs_;   // that we were told of
  std::set<uint64_t> ready_;  // since the last crash
  std::map<int, Worker> workers_;
  std::vector<Ghost> ghosts_;    // since the last crash
  std::set<std::string> known_;  // incarnations that have called since the last crash
  std::map<AttemptId, std::string> grants_;
  std::map<TaskId, uint32_t> highest_;
  std::set<TaskId> acknowledged_;
  std::unique_ptr<JobQueue> queue_;  // first to go
};

TEST(JobQueueModel, RandomOperationsAndCrashes) {
  int grants = 0, commits = 0, crashes = 0, ghost_calls = 0, strangers = 0, audits = 0;
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    Model model(seed);
    model.Run(400);
    grants += model.grants();
    commits += model.commits();
    crashes += model.crashes();
    ghost_calls += model.ghost_calls();
    strangers += model.strangers();
    audits += model.audits();
    if (HasFailure()) return;
  }
  // The operations did reach what they are meant to test.
  EXPECT_GT(grants, 1000);
  EXPECT_GT(commits, 500);
  EXPECT_GT(crashes, 500);
  EXPECT_GT(ghost_calls, 100);
  EXPECT_GT(strangers, 100);
  EXPECT_GT(audits, 100);
}

}  // namespace
}  // namespace quern::daemon
