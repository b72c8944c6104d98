#include "worker/executor/executor.h"

#include <sys/socket.h>

#include <string>
#include <thread>
#include <utility>

#include "base/mutex.h"
#include "base/status_matchers.h"
#include "worker/executor/framing.h"

namespace quern::worker {
namespace {

using quern::v1::AttemptStatus;

// Lets a test decide when a task goes on.
class Gate {
 public:
  void Open() {
    MutexLock lock(&mutex_);
    open_ = true;
    opened_.SignalAll();
  }
  void Wait() {
    MutexLock lock(&mutex_);
    while (!open_) opened_.Wait(&mutex_);
  }

 private:
  Mutex mutex_;
  CondVar opened_;
  bool open_ QUERN_GUARDED_BY(mutex_) = false;
};

class ExecutorTest : public ::testing::Test {
 protected:
  void Serve(std::function<absl::StatusOr<quern::v1::TaskResult>(const quern::v1::StartAttempt&, TaskControl*)> run) {
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    channel_ = UniqueFd(ends[0]);
    thread_ = std::thread([this, run = std::move(run), fd = ends[1]] {
      ExecutorHooks hooks;
      hooks.run = run;
      hooks.failure_of = [](const absl::Status& status) {
        quern::v1::Failure failure;
        failure.set_reason(quern::v1::IO_ERROR);
        failure.set_message(std::string(status.message()));
        return failure;
      };
      served_ = RunExecutor(UniqueFd(fd), hooks, absl::Milliseconds(1));
    });
  }
  void TearDown() override {
    channel_.Reset();
    if (thread_.joinable()) thread_.join();
  }

  void Start(uint32_t attempt, const std::string& label = "") {
    quern::v1::ExecutorCommand command;
    command.mutable_start()->mutable_id()->set_job("jobs/1");
    command.mutable_start()->mutable_id()->set_attempt(attempt);
    command.mutable_start()->mutable_spec()->set_label(label);
    command.mutable_start()->set_memory(77);
    command.mutable_start()->set_threads(3);
    command.mutable_start()->set_output_path("/out");
    QUERN_ASSERT_OK(WriteFrame(channel_.get(), command));
  }
  void Stop(uint32_t attempt) {
    quern::v1::ExecutorCommand command;
    command.mutable_stop()->mutable_id()->set_job("jobs/1");
    command.mutable_stop()->mutable_id()->set_attempt(attempt);
    QUERN_ASSERT_OK(WriteFrame(channel_.get(), command));
  }
  AttemptStatus Next() {
    quern::v1::ExecutorEvent event;
    EXPECT_THAT(ReadFrame(channel_.get(), &event), IsOkAndHolds(true));
    return event.status();
  }
  // Skips progress.
  AttemptStatus NextEnd() {
    AttemptStatus status;
    do {
      status = Next();
    } while (status.state() == AttemptStatus::RUNNING);
    return status;
  }

  UniqueFd channel_;
  std::thread thread_;
  absl::Status served_;
};

TEST_F(ExecutorTest, RunsATaskWithItsOptionsAndReportsTheResult) {
  quern::v1::StartAttempt seen;
  Serve([&](const quern::v1::StartAttempt& start, TaskControl* control) {
    seen = start;
    control->bytes_read = 10;
    control->bytes_written = 20;
    quern::v1::TaskResult result;
    result.set_sha256(start.spec().label());
    result.mutable_times()->set_wall_seconds(1.5);
    return result;
  });
  Start(1, "shard");
  const AttemptStatus end = NextEnd();
  EXPECT_EQ(end.state(), AttemptStatus::COMPLETED);
  EXPECT_EQ(end.result().sha256(), "shard");
  EXPECT_EQ(end.times().wall_seconds(), 1.5);
  EXPECT_EQ(end.bytes_read(), 10u);
  EXPECT_EQ(end.bytes_written(), 20u);
  EXPECT_EQ(end.memory(), 77u);
  EXPECT_EQ(end.id().job(), "jobs/1");
  EXPECT_EQ(seen.memory(), 77u);
  EXPECT_EQ(seen.threads(), 3u);
  EXPECT_EQ(seen.output_path(), "/out");
}

TEST_F(ExecutorTest, ReportsProgressWhileItRuns) {
  Gate gate;
  Serve([&](const quern::v1::StartAttempt&, TaskControl* control) {
    control->bytes_read = 5;
    gate.Wait();
    return quern::v1::TaskResult();
  });
  Start(1);
  AttemptStatus status;
  do {
    status = Next();
    ASSERT_EQ(status.state(), AttemptStatus::RUNNING);
  } while (status.bytes_read() != 5);
  gate.Open();
  EXPECT_EQ(NextEnd().state(), AttemptStatus::COMPLETED);
}

TEST_F(ExecutorTest, FailureIsThatOfTheStatus) {
  Serve([](const quern::v1::StartAttempt&, TaskControl*) { return absl::DataLossError("bad sector"); });
  Start(1);
  const AttemptStatus end = NextEnd();
  EXPECT_EQ(end.state(), AttemptStatus::FAILED);
  EXPECT_EQ(end.failure().reason(), quern::v1::IO_ERROR);
  EXPECT_EQ(end.failure().message(), "bad sector");
}

absl::StatusOr<quern::v1::TaskResult> WaitForStop(const quern::v1::StartAttempt&, TaskControl* control) {
  while (!control->stop) std::this_thread::yield();
  return absl::CancelledError("stopped");
}

TEST_F(ExecutorTest, StopEndsTheAttempt) {
  Serve(WaitForStop);
  Start(1);
  Stop(1);
  EXPECT_EQ(NextEnd().state(), AttemptStatus::STOPPED);
}

TEST_F(ExecutorTest, StopOfAnotherAttemptIsIgnored) {
  Gate gate;
  Serve([&](const quern::v1::StartAttempt&, TaskControl* control) -> absl::StatusOr<quern::v1::TaskResult> {
    gate.Wait();
    if (control->stop) return absl::CancelledError("stopped");
    return quern::v1::TaskResult();
  });
  Start(2);
  Stop(1);
  // Commands are served in order: the answer to this one shows that the stop has been served.
  Start(3);
  EXPECT_EQ(NextEnd().id().attempt(), 3u);
  gate.Open();
  const AttemptStatus end = NextEnd();
  EXPECT_EQ(end.id().attempt(), 2u);
  EXPECT_EQ(end.state(), AttemptStatus::COMPLETED);
}

TEST_F(ExecutorTest, CancelledWithoutAStopIsAFailure) {
  Serve([](const quern::v1::StartAttempt&, TaskControl*) { return absl::CancelledError("who?"); });
  Start(1);
  EXPECT_EQ(NextEnd().state(), AttemptStatus::FAILED);
}

TEST_F(ExecutorTest, SecondStartWhileOneRunsFailsAlone) {
  Serve(WaitForStop);
  Start(1);
  Start(2);
  const AttemptStatus second = NextEnd();
  EXPECT_EQ(second.id().attempt(), 2u);
  EXPECT_EQ(second.state(), AttemptStatus::FAILED);
  Stop(1);
  EXPECT_EQ(NextEnd().id().attempt(), 1u);
}

TEST_F(ExecutorTest, RunsOneAttemptAfterTheOther) {
  Serve([](const quern::v1::StartAttempt&, TaskControl*) { return quern::v1::TaskResult(); });
  for (uint32_t attempt = 1; attempt <= 20; ++attempt) {
    Start(attempt);
    const AttemptStatus end = NextEnd();
    EXPECT_EQ(end.id().attempt(), attempt);
    EXPECT_EQ(end.state(), AttemptStatus::COMPLETED);
  }
}

TEST_F(ExecutorTest, EndsWellWhenTheChannelCloses) {
  Serve(WaitForStop);
  channel_.Reset();
  thread_.join();
  QUERN_EXPECT_OK(served_);
}

TEST_F(ExecutorTest, GarbageOnTheChannelIsAnError) {
  Serve(WaitForStop);
  ASSERT_EQ(send(channel_.get(), "\xff\xff\xff\xff", 4, 0), 4);
  thread_.join();
  EXPECT_THAT(served_, StatusIs(absl::StatusCode::kDataLoss));
}

}  // namespace
}  // namespace quern::worker
