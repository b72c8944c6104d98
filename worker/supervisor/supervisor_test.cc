// A supervisor with real executor children and a coordinator that the test plays.
#include "worker/supervisor/supervisor.h"

#include <signal.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/status_matchers.h"

namespace quern::worker {
namespace {

using quern::v1::AttemptStatus;
using quern::v1::SynchronizeRequest;
using quern::v1::SynchronizeResponse;
using ::testing::HasSubstr;

// Hands each request to the test and takes its answer; calls that the worker cancels end by themselves.
class Coordinator {
 public:
  struct CallRecord {
    SynchronizeRequest request;
    SyncTransport::Done done;
  };

  void Begin(SynchronizeRequest request, SyncTransport::Done done) {
    MutexLock lock(&mutex_);
    if (acknowledge_all_) {
      SynchronizeResponse response;
      for (const AttemptStatus& status : request.attempts()) *response.add_acknowledged() = status.id();
      done(absl::OkStatus(), response);
      return;
    }
    call_ = std::make_unique<CallRecord>(CallRecord{std::move(request), std::move(done)});
    changed_.SignalAll();
  }
  void Cancel() {
    std::unique_ptr<CallRecord> call;
    {
      MutexLock lock(&mutex_);
      call = std::move(call_);
      changed_.SignalAll();
    }
    if (call != nullptr) call->done(absl::CancelledError("cancelled"), {});
  }
  // From now on every end is acknowledged and no new call is left to the test.
  void AcknowledgeAll() {
    MutexLock lock(&mutex_);
    acknowledge_all_ = true;
  }
  // Answers calls with `response` until one satisfies `wanted`; that one is answered with nothing but what `last` says.
  SynchronizeRequest AnswerUntil(const std::function<bool(const SynchronizeRequest&)>& wanted, const SynchronizeResponse& response,
                                 absl::StatusOr<SynchronizeResponse> last) {
    while (true) {
      std::unique_ptr<CallRecord> call;
      {
        MutexLock lock(&mutex_);
        // A long poll stays open, as a coordinator's does, while there is nothing to say that was not said before.
        while (call_ == nullptr || (call_->request.may_wait() && !wanted(call_->request) && response.SerializeAsString() == said_)) {
          changed_.Wait(&mutex_);
        }
        said_ = wanted(call_->request) ? (last.ok() ? last->SerializeAsString() : "") : response.SerializeAsString();
        call = std::move(call_);
      }
      if (wanted(call->request)) {
        call->done(last.status(), last.ok() ? *last : SynchronizeResponse());
        return call->request;
      }
      call->done(absl::OkStatus(), response);
    }
  }
  std::unique_ptr<SyncTransport> NewTransport();

 private:
  Mutex mutex_;
  CondVar changed_;
  std::unique_ptr<CallRecord> call_ QUERN_GUARDED_BY(mutex_);
  std::string said_ QUERN_GUARDED_BY(mutex_);  // the last answer
  bool acknowledge_all_ QUERN_GUARDED_BY(mutex_) = false;
};

class FakeTransport : public SyncTransport {
 public:
  explicit FakeTransport(Coordinator* coordinator) : coordinator_(coordinator) {}
  ~FakeTransport() override { coordinator_->Cancel(); }
  void Call(SynchronizeRequest request, absl::Duration, Done done) override { coordinator_->Begin(std::move(request), std::move(done)); }
  void Cancel() override { coordinator_->Cancel(); }

 private:
  Coordinator* const coordinator_;
};

std::unique_ptr<SyncTransport> Coordinator::NewTransport() { return std::make_unique<FakeTransport>(this); }

bool Any(const SynchronizeRequest&) { return true; }

std::function<bool(const SynchronizeRequest&)> Lists(uint32_t attempt, AttemptStatus::State state) {
  return [=](const SynchronizeRequest& request) {
    for (const AttemptStatus& status : request.attempts()) {
      if (status.id().attempt() == attempt && status.state() == state) return true;
    }
    return false;
  };
}

class SupervisorTest : public ::testing::Test {
 protected:
  void Run(const std::function<void(SupervisorOptions*)>& change = [](SupervisorOptions*) {}) {
    SupervisorOptions options;
    options.info.name = "w";
    options.info.incarnation = "uuid";
    options.info.memory = 1 << 20;
    options.info.devices.emplace_back().set_self_test_passed(true);
    options.executor_argv = {QUERN_TEST_EXECUTOR};
    options.transport = coordinator_.NewTransport();
    options.oom = OomWatch("/nonexistent", std::nullopt);
    options.metrics = metrics_ = std::make_shared<WorkerMetrics>(options.info.slots, options.info.memory);
    options.log = [this](LogLevel, const std::string& line) {
      MutexLock lock(&log_mutex_);
      absl::StrAppend(&log_, line, "\n");
    };
    change(&options);
    supervisor_ = std::make_unique<Supervisor>(std::move(options));
    // Executors are children of this thread.
    thread_ = std::thread([this] { end_ = supervisor_->Run(); });
  }
  void TearDown() override {
    coordinator_.AcknowledgeAll();
    supervisor_->RequestStop();
    Join();
  }
  void Join() {
    if (thread_.joinable()) thread_.join();
  }

  static SynchronizeResponse Wanting(uint32_t attempt, const std::string& label) {
    SynchronizeResponse response;
    quern::v1::DesiredAttempt* desired = response.add_attempts();
    desired->mutable_id()->set_job("jobs/1");
    desired->mutable_id()->set_attempt(attempt);
    desired->mutable_spec()->set_label(label);
    desired->set_memory(5000);
    return response;
  }
  static SynchronizeResponse Acknowledging(uint32_t attempt) {
    SynchronizeResponse response;
    quern::v1::AttemptId* id = response.add_acknowledged();
    id->set_job("jobs/1");
    id->set_attempt(attempt);
    return response;
  }
  // Grants the attempt and waits until it is told to run; returns the executor's process, which its progress shows to be up.
  void StartAttempt(uint32_t attempt, const std::string& label) {
    const SynchronizeResponse wanting = Wanting(attempt, label);
    coordinator_.AnswerUntil(Any, {}, wanting);
    coordinator_.AnswerUntil(
        [&](const SynchronizeRequest& request) {
          return Lists(attempt, AttemptStatus::RUNNING)(request) && request.attempts(0).bytes_read() > 0;
        },
        wanting, wanting);
  }
  const AttemptStatus EndOf(uint32_t attempt, AttemptStatus::State state, const std::string& label) {
    const SynchronizeRequest request = coordinator_.AnswerUntil(Lists(attempt, state), Wanting(attempt, label), Acknowledging(attempt));
    for (const AttemptStatus& status : request.attempts()) {
      if (status.id().attempt() == attempt) return status;
    }
    return {};
  }
  std::string Log() {
    MutexLock lock(&log_mutex_);
    return log_;
  }
  pid_t ExecutorPid() {
    const std::string log = Log();
    const size_t at = log.rfind("executor ", log.rfind(" started"));
    return at == std::string::npos ? -1 : std::stoi(log.substr(at + 9));
  }

  Coordinator coordinator_;
  Mutex log_mutex_;
  std::string log_ QUERN_GUARDED_BY(log_mutex_);
  std::shared_ptr<WorkerMetrics> metrics_;
  std::unique_ptr<Supervisor> supervisor_;
  std::thread thread_;
  absl::Status end_ = absl::UnknownError("Run has not returned");  // of Run, after Join
};

TEST_F(SupervisorTest, RunsAnAttemptAndReportsItsResult) {
  Run();
  coordinator_.AnswerUntil(Any, {}, Wanting(1, "direct"));
  const AttemptStatus end = EndOf(1, AttemptStatus::COMPLETED, "direct");
  EXPECT_EQ(end.result().reader(), "direct");
  EXPECT_EQ(end.result().file_size(), 5000u);
  EXPECT_EQ(end.memory(), 5000u);
  // Forgotten once it is acknowledged.
  EXPECT_EQ(coordinator_.AnswerUntil(Any, {}, SynchronizeResponse()).attempts_size(), 0);
}

TEST_F(SupervisorTest, FailureOfATaskIsReported) {
  Run();
  coordinator_.AnswerUntil(Any, {}, Wanting(1, "fail"));
  const AttemptStatus end = EndOf(1, AttemptStatus::FAILED, "fail");
  EXPECT_EQ(end.failure().reason(), quern::v1::IO_ERROR);
  EXPECT_EQ(end.failure().message(), "failed as told");
}

TEST_F(SupervisorTest, KilledExecutorFailsItsAttemptAndTheNextOneGetsAFreshExecutor) {
  Run();
  StartAttempt(1, "wait");
  const pid_t first = ExecutorPid();
  ASSERT_EQ(kill(first, SIGKILL), 0);
  const AttemptStatus end = EndOf(1, AttemptStatus::FAILED, "wait");
  EXPECT_EQ(end.failure().reason(), quern::v1::EXECUTOR_DIED);
  EXPECT_EQ(end.failure().signal(), SIGKILL);
  EXPECT_EQ(end.memory(), 5000u);
  coordinator_.AnswerUntil(Any, {}, Wanting(2, "direct"));
  EndOf(2, AttemptStatus::COMPLETED, "direct");
  EXPECT_NE(ExecutorPid(), first);
}

TEST_F(SupervisorTest, MetricsTellOfAttemptsAndExecutors) {
  Run();
  StartAttempt(1, "wait");
  ASSERT_EQ(kill(ExecutorPid(), SIGKILL), 0);
  EndOf(1, AttemptStatus::FAILED, "wait");
  coordinator_.AnswerUntil(Any, {}, Wanting(2, "direct"));
  EndOf(2, AttemptStatus::COMPLETED, "direct");
  std::map<std::string, double> values;
  for (const MetricFamily& family : metrics_->Collect()) {
    for (const MetricFamily::Sample& sample : family.samples) {
      std::string name = family.name;
      for (const auto& [label, value] : sample.labels) absl::StrAppend(&name, " ", value);
      values[name] = sample.value;
    }
  }
  EXPECT_EQ(values["quern_worker_attempts_started_total"], 2);
  EXPECT_EQ(values["quern_worker_attempts_running"], 0);
  EXPECT_EQ(values["quern_worker_attempts_ended_total failed executor_died"], 1);
  EXPECT_EQ(values["quern_worker_attempts_ended_total completed "], 1);
  EXPECT_EQ(values["quern_worker_executor_starts_total"], 2);
  EXPECT_EQ(values["quern_worker_executor_deaths_total signal"], 1);
  EXPECT_EQ(values["quern_worker_executor_deaths_total out_of_memory"], 0);
  EXPECT_EQ(values["quern_worker_coordinator_reachable"], 1);
  EXPECT_GT(values["quern_worker_executor_resident_bytes"], 0);
  EXPECT_THAT(Log(), HasSubstr("attempt event=executor_died job=jobs/1 task="));
  EXPECT_THAT(Log(), HasSubstr("reason=EXECUTOR_DIED message="));
}

TEST_F(SupervisorTest, ExecutorThatDiedIdleIsReplaced) {
  Run();
  coordinator_.AnswerUntil(Any, {}, Wanting(1, "direct"));
  EndOf(1, AttemptStatus::COMPLETED, "direct");
  ASSERT_EQ(kill(ExecutorPid(), SIGKILL), 0);
  while (!absl::StrContains(Log(), "died idle")) std::this_thread::yield();
  coordinator_.AnswerUntil(Any, {}, Wanting(2, "direct"));
  EndOf(2, AttemptStatus::COMPLETED, "direct");
}

TEST_F(SupervisorTest, OneExecutorRunsManyAttempts) {
  Run();
  for (uint32_t attempt = 1; attempt <= 5; ++attempt) {
    coordinator_.AnswerUntil(Any, {}, Wanting(attempt, "direct"));
    EndOf(attempt, AttemptStatus::COMPLETED, "direct");
  }
  const std::string log = Log();
  EXPECT_EQ(log.find(" started"), log.rfind(" started"));
}

TEST_F(SupervisorTest, UnlistedAttemptIsStopped) {
  Run();
  StartAttempt(1, "wait");
  const SynchronizeRequest request = coordinator_.AnswerUntil(Lists(1, AttemptStatus::STOPPED), {}, Acknowledging(1));
  EXPECT_EQ(request.attempts_size(), 1);
}

TEST_F(SupervisorTest, AttemptThatDoesNotStopIsKilledAtTheEnd) {
  Run();
  StartAttempt(1, "deaf");
  const pid_t pid = ExecutorPid();
  supervisor_->RequestStop();
  const SynchronizeRequest request = coordinator_.AnswerUntil(Lists(1, AttemptStatus::STOPPED), Wanting(1, "deaf"), Acknowledging(1));
  EXPECT_TRUE(request.draining());
  Join();
  EXPECT_EQ(kill(pid, 0), -1);
}

TEST_F(SupervisorTest, AttemptSurvivesACoordinatorThatIsAway) {
  Run();
  StartAttempt(1, "wait");
  for (int i = 0; i < 3; ++i) {
    coordinator_.AnswerUntil(Any, {}, absl::UnavailableError("connection refused"));
  }
  const SynchronizeRequest request = coordinator_.AnswerUntil(Any, {}, Wanting(1, "wait"));
  EXPECT_TRUE(Lists(1, AttemptStatus::RUNNING)(request));
  coordinator_.AnswerUntil([](const SynchronizeRequest& request) { return !request.may_wait(); }, {}, Wanting(1, "wait"));
  const std::string log = Log();
  EXPECT_THAT(log, HasSubstr("connection refused"));
  EXPECT_EQ(log.find("does not answer"), log.rfind("does not answer")) << "said once, not at every retry:\n" << log;
  EXPECT_THAT(log, HasSubstr("answers again"));
}

TEST_F(SupervisorTest, DrainFinishesReportsAndLeaves) {
  Run();
  StartAttempt(1, "wait");
  supervisor_->RequestDrain();
  coordinator_.AnswerUntil([](const SynchronizeRequest& request) { return request.draining(); }, Wanting(1, "wait"), Wanting(1, "wait"));
  // The coordinator ends it, since this task never ends by itself.
  coordinator_.AnswerUntil(Lists(1, AttemptStatus::STOPPED), {}, Acknowledging(1));
  Join();
}

TEST_F(SupervisorTest, IdleWorkerLeavesAfterOneLastCall) {
  Run();
  coordinator_.AnswerUntil(Any, {}, SynchronizeResponse());
  supervisor_->RequestDrain();
  coordinator_.AnswerUntil([](const SynchronizeRequest& request) { return request.draining(); }, {}, SynchronizeResponse());
  Join();
  EXPECT_THAT(end_, IsOk());
}

TEST_F(SupervisorTest, WorkerThatTheCoordinatorDrainsFinishesAndLeaves) {
  Run();
  StartAttempt(1, "wait");
  SynchronizeResponse drain = Wanting(1, "wait");
  drain.set_desired_state(quern::v1::DRAIN);
  coordinator_.AnswerUntil([](const SynchronizeRequest& request) { return request.draining(); }, drain, drain);
  coordinator_.AnswerUntil(Lists(1, AttemptStatus::STOPPED), {}, Acknowledging(1));
  Join();
  EXPECT_THAT(end_, IsOk());
  EXPECT_THAT(Log(), HasSubstr("the coordinator drains this worker"));
}

TEST_F(SupervisorTest, IdleWorkerWithoutACoordinatorLeavesAtOnce) {
  ManualClock clock;
  Run([&](SupervisorOptions* options) { options->clock = &clock; });
  coordinator_.AnswerUntil(Any, {}, absl::UnavailableError("connection refused"));
  while (!absl::StrContains(Log(), "connection refused")) std::this_thread::yield();
  // No time passes, and no call is answered.
  supervisor_->RequestDrain();
  Join();
  EXPECT_THAT(end_, IsOk());
}

TEST_F(SupervisorTest, FailureThatNobodyHearsOfHoldsUpNoDrain) {
  ManualClock clock;
  Run([&](SupervisorOptions* options) { options->clock = &clock; });
  coordinator_.AnswerUntil(Any, {}, Wanting(1, "fail"));
  coordinator_.AnswerUntil(Lists(1, AttemptStatus::FAILED), Wanting(1, "fail"), absl::UnavailableError("connection refused"));
  while (!absl::StrContains(Log(), "connection refused")) std::this_thread::yield();
  supervisor_->RequestDrain();
  Join();
  EXPECT_THAT(Log(), HasSubstr("has not acknowledged"));
}

TEST_F(SupervisorTest, DrainReportsItsResultToACoordinatorThatComesBack) {
  Run();
  coordinator_.AnswerUntil(Any, {}, Wanting(1, "direct"));
  coordinator_.AnswerUntil(Lists(1, AttemptStatus::COMPLETED), Wanting(1, "direct"), absl::UnavailableError("connection refused"));
  supervisor_->RequestDrain();
  for (int i = 0; i < 3; ++i) coordinator_.AnswerUntil(Any, {}, absl::UnavailableError("connection refused"));
  const SynchronizeRequest request = coordinator_.AnswerUntil(Any, {}, Acknowledging(1));
  EXPECT_TRUE(Lists(1, AttemptStatus::COMPLETED)(request));
  EXPECT_TRUE(request.draining());
  Join();
  EXPECT_THAT(end_, IsOk());
}

TEST_F(SupervisorTest, DrainGivesUpAResultThatNobodyTakes) {
  ManualClock clock;
  Run([&](SupervisorOptions* options) { options->clock = &clock; });
  coordinator_.AnswerUntil(Any, {}, Wanting(1, "direct"));
  coordinator_.AnswerUntil(Lists(1, AttemptStatus::COMPLETED), Wanting(1, "direct"), absl::UnavailableError("connection refused"));
  while (!absl::StrContains(Log(), "connection refused")) std::this_thread::yield();
  supervisor_->RequestDrain();
  clock.Advance(Supervisor::kFarewell - absl::Seconds(1));
  coordinator_.AnswerUntil(Any, {}, absl::UnavailableError("still refused"));
  while (!absl::StrContains(Log(), "still refused")) std::this_thread::yield();
  clock.Advance(absl::Seconds(2 * 60));
  Join();
  EXPECT_THAT(Log(), HasSubstr("has not acknowledged"));
}

TEST_F(SupervisorTest, CoordinatorTellsTheWorkerToStop) {
  Run();
  StartAttempt(1, "wait");
  SynchronizeResponse stop;
  stop.set_desired_state(quern::v1::STOP);
  stop.set_stop_reason("another worker with the name w started");
  coordinator_.AnswerUntil([](const SynchronizeRequest& request) { return !request.may_wait(); }, {}, stop);
  coordinator_.AnswerUntil(Lists(1, AttemptStatus::STOPPED), {}, Acknowledging(1));
  Join();
  EXPECT_THAT(end_, StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("another worker with the name w started")));
  EXPECT_THAT(Log(), HasSubstr("another worker with the name w started"));
}

TEST_F(SupervisorTest, DrainingWorkerThatIsToldToStopStops) {
  Run();
  StartAttempt(1, "wait");
  supervisor_->RequestDrain();
  SynchronizeResponse stop;
  stop.set_desired_state(quern::v1::STOP);
  coordinator_.AnswerUntil([](const SynchronizeRequest& request) { return request.draining(); }, Wanting(1, "wait"), stop);
  coordinator_.AnswerUntil(Lists(1, AttemptStatus::STOPPED), {}, Acknowledging(1));
  Join();
  EXPECT_THAT(end_, IsOk());
}

TEST_F(SupervisorTest, AnswersSightChallenges) {
  QUERN_ASSERT_OK_AND_ASSIGN(const TempDir dir, TempDir::Make("supervisor_test"));
  const std::string path = JoinPath(dir.path(), "f");
  QUERN_ASSERT_OK(WriteFileDurably(path, "content"));
  Run();
  SynchronizeResponse response;
  quern::v1::SightChallenge* challenge = response.add_challenges();
  challenge->set_path(path);
  challenge->set_size(7);
  challenge->add_offsets(0);
  challenge->set_nonce("n");
  const SynchronizeRequest request =
      coordinator_.AnswerUntil([](const SynchronizeRequest& request) { return request.sight_size() > 0; }, response, SynchronizeResponse());
  EXPECT_TRUE(request.sight(0).seen());
  EXPECT_EQ(request.sight(0).digest(), Sha256Of("ncontent"));
}

TEST_F(SupervisorTest, ExecutorThatCannotBeSpawnedFailsTheAttempt) {
  Run([](SupervisorOptions* options) { options->executor_argv = {"/nonexistent/quern-worker"}; });
  coordinator_.AnswerUntil(Any, {}, Wanting(1, "direct"));
  const AttemptStatus end = EndOf(1, AttemptStatus::FAILED, "direct");
  EXPECT_EQ(end.failure().reason(), quern::v1::INTERNAL);
  EXPECT_THAT(end.failure().message(), HasSubstr("/nonexistent/quern-worker"));
}

TEST_F(SupervisorTest, OutOfMemoryIsReportedWithTheMemoryItRanWith) {
  QUERN_ASSERT_OK_AND_ASSIGN(const TempDir dir, TempDir::Make("supervisor_test"));
  const std::string counter = JoinPath(dir.path(), "memory.events");
  QUERN_ASSERT_OK(WriteFileDurably(counter, "oom_kill 0\n"));
  Run([&](SupervisorOptions* options) { options->oom = OomWatch(counter, std::nullopt); });
  StartAttempt(1, "wait");
  QUERN_ASSERT_OK(WriteFileDurably(counter, "oom_kill 1\n"));
  ASSERT_EQ(kill(ExecutorPid(), SIGKILL), 0);
  const AttemptStatus end = EndOf(1, AttemptStatus::FAILED, "wait");
  EXPECT_EQ(end.failure().reason(), quern::v1::OUT_OF_MEMORY);
  EXPECT_EQ(end.memory(), 5000u);
}

}  // namespace
}  // namespace quern::worker
