// What the queue and its store tell of themselves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <string>
#include <vector>

#include "base/log_fields.h"
#include "daemon/queue/group_commit.h"
#include "daemon/queue/job_queue_fixture.h"

namespace quern::daemon {
namespace {

using quern::v1::Attempt;
using testing::Contains;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::Pair;
using testing::SizeIs;

class FiguresTest : public JobQueueTest {
 protected:
  using Fields = std::vector<std::pair<std::string, std::string>>;

  void SetUp() override {
    set_options_ = [this](JobQueueOptions* options) { options->on_event = [this](const std::string& line) { lines_.push_back(line); }; };
    Start();
  }

  // The pairs of the last line about that event.
  Fields LastLine(const std::string& event) {
    Fields last;
    for (const std::string& line : lines_) {
      Fields fields = ParseLogFields(line);
      if (!fields.empty() && fields[0] == std::pair<std::string, std::string>("event", event)) last = std::move(fields);
    }
    return last;
  }

  std::vector<std::string> lines_;
};

TEST_F(FiguresTest, ACommitIsCountedWithWhatItMoved) {
  const uint64_t job = AddTasks(2);
  const quern::v1::AttemptId id = Granted(Worker("w"));
  QueueFigures figures = queue_->Figures();
  EXPECT_EQ(figures.jobs[Job::RUNNING], 1u);
  EXPECT_EQ(figures.tasks[Task::RUNNING], 1u);
  EXPECT_EQ(figures.tasks[Task::PENDING], 1u);
  EXPECT_EQ(figures.running_attempts, 1u);
  EXPECT_EQ(figures.counts.grants[quern::v1::WORK], 1u);
  ASSERT_THAT(figures.live_jobs, SizeIs(1));
  EXPECT_EQ(figures.live_jobs[0].id, job);
  EXPECT_EQ(figures.live_jobs[0].tasks[Task::RUNNING], 1u);
  EXPECT_THAT(figures.workers, ElementsAre(Pair("ready", 1)));

  SynchronizeRequest request = With(Worker("w"), id, AttemptStatus::COMPLETED);
  quern::v1::StageTimes& times = *request.mutable_attempts(0)->mutable_result()->mutable_times();
  times.set_read_seconds(3);
  times.set_write_stall_seconds(0.5);
  times.set_hash_seconds(-1);
  times.set_wall_seconds(4);
  request.set_slots(0);
  Sync(request);
  figures = queue_->Figures();
  EXPECT_EQ(figures.counts.commits, 1u);
  EXPECT_EQ(figures.counts.bytes_read, 4000u);
  EXPECT_EQ(figures.counts.bytes_written, 1000u);
  EXPECT_EQ(figures.counts.times.read_seconds(), 3);
  EXPECT_EQ(figures.counts.times.write_stall_seconds(), 0.5);
  EXPECT_EQ(figures.counts.times.hash_seconds(), 0) << "what a worker says is no amount";
  EXPECT_THAT(figures.counts.attempts_ended, ElementsAre(Pair(Pair(Attempt::COMMITTED, ""), 1)));
  EXPECT_EQ(figures.task_seconds.sum, 4);
  EXPECT_EQ(figures.tasks[Task::COMMITTED], 1u);
  EXPECT_THAT(LastLine("committed"), ElementsAre(Pair("event", "committed"), Pair("job", JobName(job)), Pair("task", "0"),
                                                 Pair("attempt", "1"), Pair("worker", "w"), Pair("label", "shard 0")));
}

TEST_F(FiguresTest, FailuresAreCountedByReasonAndLogged) {
  const uint64_t job = AddTasks(1);
  quern::v1::AttemptId id = Granted(Worker("w"));
  id = Granted(WithFailure(Worker("w"), id, quern::v1::IO_ERROR, "cannot read \"/x\"\nattempt=9"));
  EXPECT_THAT(queue_->Figures().counts.attempts_ended, ElementsAre(Pair(Pair(Attempt::FAILED, "IO_ERROR"), 1)));
  EXPECT_THAT(LastLine("ended"),
              ElementsAre(Pair("event", "ended"), Pair("job", JobName(job)), Pair("task", "0"), Pair("attempt", "1"), Pair("worker", "w"),
                          Pair("state", "FAILED"), Pair("reason", "IO_ERROR"), Pair("message", "cannot read \"/x\" attempt=9")));
  // A reason that only a newer worker knows makes no label of its own.
  Granted(WithFailure(Worker("w"), id, static_cast<quern::v1::FailureReason>(12345)));
  EXPECT_THAT(queue_->Figures().counts.attempts_ended, Contains(Pair(Pair(Attempt::FAILED, "FAILURE_REASON_UNSPECIFIED"), 1)));
}

TEST_F(FiguresTest, LeasesThatRunOutAreCounted) {
  AddTasks(1);
  Granted(Worker("w"));
  clock_.Advance(absl::Seconds(31));
  queue_->Tick();
  store_.Sync();
  const QueueFigures figures = queue_->Figures();
  EXPECT_EQ(figures.counts.lease_expiries, 1u);
  EXPECT_THAT(figures.counts.attempts_ended, ElementsAre(Pair(Pair(Attempt::LOST, "WORKER_LOST"), 1)));
  EXPECT_THAT(figures.workers, ElementsAre(Pair("lost", 1)));
  EXPECT_EQ(figures.running_attempts, 0u);
  EXPECT_THAT(LastLine("lost"), ElementsAre(Pair("event", "lost"), Pair("worker", "w")));
}

TEST_F(FiguresTest, EndedJobsAreNoLiveOnes) {
  const uint64_t job = AddTasks(1);
  clock_.Advance(absl::Seconds(40));
  Complete(Worker("w"), Granted(Worker("w")));
  queue_->FinishJob(job, {}, nullptr);
  store_.Sync();
  const QueueFigures figures = queue_->Figures();
  EXPECT_EQ(figures.jobs[Job::SUCCEEDED], 1u);
  EXPECT_EQ(figures.counts.jobs_ended[Job::SUCCEEDED], 1u);
  EXPECT_THAT(figures.live_jobs, IsEmpty());
  EXPECT_EQ(figures.tasks[Task::COMMITTED], 0u);
  EXPECT_NEAR(figures.job_seconds.sum, 40, 1);
  EXPECT_THAT(LastLine("state"), ElementsAre(Pair("event", "state"), Pair("job", JobName(job)), Pair("state", "SUCCEEDED")));
}

TEST_F(FiguresTest, ManyLiveJobsMakeNoEndlessList) {
  for (size_t i = 0; i < kMostLiveJobs + 5; ++i) Add(MakeJob(1, absl::StrCat("/out", i)));
  const QueueFigures figures = queue_->Figures();
  EXPECT_THAT(figures.live_jobs, SizeIs(kMostLiveJobs));
  EXPECT_EQ(figures.tasks[Task::PENDING], kMostLiveJobs + 5);
}

TEST_F(FiguresTest, AuditsAndMismatchesAreCounted) {
  NewJob add = MakeJob(1);
  add.audit_fraction = 1;
  const uint64_t job = Add(std::move(add));
  SynchronizeRequest done = With(Worker("first"), Granted(Worker("first")), AttemptStatus::COMPLETED);
  done.set_slots(0);
  Sync(done);
  EXPECT_EQ(queue_->Figures().audits_due, 1u);
  const quern::v1::AttemptId audit = Granted(Worker("second"));
  EXPECT_THAT(LastLine("audit"), ElementsAre(Pair("event", "audit"), Pair("job", JobName(job)), Pair("task", "0"), Pair("attempt", "2"),
                                             Pair("worker", "second")));
  SynchronizeRequest other = With(Worker("second"), audit, AttemptStatus::COMPLETED);
  other.mutable_attempts(0)->mutable_result()->set_sha256("other");
  Sync(other);
  const QueueFigures figures = queue_->Figures();
  EXPECT_EQ(figures.counts.grants[quern::v1::AUDIT], 1u);
  EXPECT_EQ(figures.counts.mismatches, 1u);
  EXPECT_EQ(figures.counts.audits_passed, 0u);
  EXPECT_EQ(figures.counts.jobs_ended[Job::FAILED], 1u);
  EXPECT_THAT(LastLine("data_loss"), Contains(Pair("worker", "second")));
}

TEST(StoreMetricsTest, CommitsAreCountedWithTheirWriters) {
  StoreMetrics metrics;
  {
    std::promise<void> first_runs, go_on;
    bool first = true;
    GroupCommitter committer(
        [&](std::vector<StoreWrite>) {
          if (std::exchange(first, false)) {
            first_runs.set_value();
            go_on.get_future().wait();
          }
          return absl::OkStatus();
        },
        &metrics);
    committer.Write({}, [](absl::Status) {});
    first_runs.get_future().wait();
    for (int i = 0; i < 3; ++i) committer.Write({}, [](absl::Status) {});
    go_on.set_value();
  }
  const Histogram::Snapshot writers = metrics.batch_writers.Read();
  EXPECT_EQ(writers.sum, 4);
  EXPECT_EQ(writers.counts[0], 1u) << "one of one";
  EXPECT_EQ(writers.counts[2], 1u) << "one of three, up to four";
  uint64_t commits = 0;
  for (const uint64_t count : metrics.commit_seconds.Read().counts) commits += count;
  EXPECT_EQ(commits, 2u);
}

}  // namespace
}  // namespace quern::daemon
