#include "worker/supervisor/executor_process.h"

#include <errno.h>
#include <signal.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/file.h"
#include "base/mutex.h"
#include "base/status_matchers.h"

namespace quern::worker {
namespace {

using quern::v1::AttemptStatus;
using ::testing::HasSubstr;

// A real child, whose tasks do what their labels say.
class ExecutorProcessTest : public ::testing::Test {
 protected:
  void Spawn(OomWatch oom = OomWatch("/nonexistent", std::nullopt)) {
    ExecutorProcess::Options options{{QUERN_TEST_EXECUTOR}, std::move(oom), nullptr, nullptr};
    options.on_event = [this](AttemptStatus status) {
      MutexLock lock(&mutex_);
      events_.push_back(std::move(status));
      changed_.SignalAll();
    };
    options.on_closed = [this](absl::Status why) {
      MutexLock lock(&mutex_);
      closed_ = std::move(why);
      changed_.SignalAll();
    };
    absl::StatusOr<std::unique_ptr<ExecutorProcess>> process = ExecutorProcess::Spawn(std::move(options));
    QUERN_ASSERT_OK(process);
    process_ = *std::move(process);
  }
  void Start(const std::string& label) {
    quern::v1::StartAttempt start;
    start.mutable_id()->set_attempt(1);
    start.mutable_spec()->set_label(label);
    start.set_memory(1000);
    QUERN_ASSERT_OK(process_->Start(std::move(start)));
  }
  AttemptStatus WaitEvent(AttemptStatus::State state) {
    MutexLock lock(&mutex_);
    while (true) {
      for (const AttemptStatus& event : events_) {
        if (event.state() == state) return event;
      }
      changed_.Wait(&mutex_);
    }
  }
  ExecutorDeath WaitDeath() {
    {
      MutexLock lock(&mutex_);
      while (!closed_.has_value()) changed_.Wait(&mutex_);
    }
    ExecutorDeath death;
    while (true) {
      const absl::StatusOr<bool> ended = process_->Reap(&death);
      EXPECT_THAT(ended, IsOk());
      if (!ended.ok() || *ended) return death;
      std::this_thread::yield();
    }
  }

  Mutex mutex_;
  CondVar changed_;
  std::vector<AttemptStatus> events_ QUERN_GUARDED_BY(mutex_);
  std::optional<absl::Status> closed_ QUERN_GUARDED_BY(mutex_);
  std::unique_ptr<ExecutorProcess> process_;
};

TEST_F(ExecutorProcessTest, RunsAndStops) {
  Spawn();
  Start("wait");
  EXPECT_EQ(WaitEvent(AttemptStatus::RUNNING).memory(), 1000u);
  quern::v1::AttemptId id;
  id.set_attempt(1);
  QUERN_ASSERT_OK(process_->Stop(id));
  WaitEvent(AttemptStatus::STOPPED);
}

TEST_F(ExecutorProcessTest, SigkillIsADeathThatNamesItsSignal) {
  Spawn();
  Start("wait");
  WaitEvent(AttemptStatus::RUNNING);
  ASSERT_EQ(kill(process_->pid(), SIGKILL), 0);
  const ExecutorDeath death = WaitDeath();
  EXPECT_TRUE(death.exit.signaled);
  EXPECT_EQ(death.exit.code, SIGKILL);
  EXPECT_FALSE(death.out_of_memory);
  const quern::v1::Failure failure = FailureOfDeath(death, 1 << 20, "the machine's memory");
  EXPECT_EQ(failure.reason(), quern::v1::EXECUTOR_DIED);
  EXPECT_EQ(failure.signal(), SIGKILL);
  EXPECT_THAT(failure.message(), HasSubstr("signal 9 (Killed)"));
}

TEST_F(ExecutorProcessTest, SigkillWithAnOomKillInTheCgroupIsOutOfMemory) {
  QUERN_ASSERT_OK_AND_ASSIGN(const TempDir dir, TempDir::Make("executor_process_test"));
  const std::string counter = JoinPath(dir.path(), "memory.events");
  QUERN_ASSERT_OK(WriteFileDurably(counter, "oom_kill 3\n"));
  Spawn(OomWatch(counter, std::nullopt));
  Start("wait");
  WaitEvent(AttemptStatus::RUNNING);
  QUERN_ASSERT_OK(WriteFileDurably(counter, "oom_kill 4\n"));
  QUERN_ASSERT_OK(process_->Kill());
  const ExecutorDeath death = WaitDeath();
  EXPECT_TRUE(death.out_of_memory);
  const quern::v1::Failure failure = FailureOfDeath(death, 512 << 20, "the memory limit of 300 MiB of cgroup /x");
  EXPECT_EQ(failure.reason(), quern::v1::OUT_OF_MEMORY);
  EXPECT_EQ(failure.signal(), SIGKILL);
  EXPECT_THAT(failure.message(), HasSubstr("buffer pool of 512 MiB under the memory limit of 300 MiB of cgroup /x"));
  EXPECT_THAT(failure.message(), HasSubstr("--memory"));
}

TEST_F(ExecutorProcessTest, CrashIsNoOutOfMemoryEvenIfTheKillerStruckBesideIt) {
  QUERN_ASSERT_OK_AND_ASSIGN(const TempDir dir, TempDir::Make("executor_process_test"));
  const std::string counter = JoinPath(dir.path(), "memory.events");
  QUERN_ASSERT_OK(WriteFileDurably(counter, "oom_kill 3\n"));
  Spawn(OomWatch(counter, std::nullopt));
  QUERN_ASSERT_OK(WriteFileDurably(counter, "oom_kill 4\n"));
  Start("abort");
  const ExecutorDeath death = WaitDeath();
  EXPECT_EQ(death.exit.code, SIGABRT);
  EXPECT_FALSE(death.out_of_memory);
}

TEST_F(ExecutorProcessTest, ExitStatusIsKept) {
  Spawn();
  Start("exit");
  const ExecutorDeath death = WaitDeath();
  EXPECT_FALSE(death.exit.signaled);
  EXPECT_EQ(death.exit.code, 7);
}

TEST_F(ExecutorProcessTest, ProgramThatIsMissingIsAnError) {
  ExecutorProcess::Options options{{"/nonexistent/quern-worker"}, OomWatch("/nonexistent", std::nullopt), nullptr, nullptr};
  options.on_event = [](AttemptStatus) {};
  options.on_closed = [](absl::Status) {};
  EXPECT_THAT(ExecutorProcess::Spawn(std::move(options)), StatusIs(absl::StatusCode::kNotFound, HasSubstr("/nonexistent/quern-worker")));
}

TEST_F(ExecutorProcessTest, DestructorLeavesNoProcess) {
  Spawn();
  Start("deaf");
  WaitEvent(AttemptStatus::RUNNING);
  const pid_t pid = process_->pid();
  process_.reset();
  EXPECT_EQ(kill(pid, 0), -1);
  EXPECT_EQ(errno, ESRCH);
}

TEST_F(ExecutorProcessTest, IsTheFirstChoiceOfTheOomKiller) {
  Spawn();
  Start("wait");
  WaitEvent(AttemptStatus::RUNNING);
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string ours, ReadKernelFile("/proc/self/oom_score_adj"));
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string theirs, ReadKernelFile("/proc/" + std::to_string(process_->pid()) + "/oom_score_adj"));
  EXPECT_EQ(std::stoi(theirs), std::min(1000, std::stoi(ours) + 500));
}

}  // namespace
}  // namespace quern::worker
