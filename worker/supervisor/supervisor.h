// The small process that speaks with the coordinator and keeps executor children at work. It survives them.
#ifndef QUERN_WORKER_SUPERVISOR_SUPERVISOR_H_
#define QUERN_WORKER_SUPERVISOR_SUPERVISOR_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/path_map.h"
#include "worker/supervisor/cgroup.h"
#include "worker/supervisor/executor_process.h"
#include "worker/supervisor/sync_transport.h"
#include "worker/supervisor/worker_metrics.h"
#include "worker/supervisor/worker_state.h"

namespace quern::worker {

enum class LogLevel { kInfo, kWarning, kError };

struct SupervisorOptions {
  WorkerInfo info;
  PathMap paths;                           // from the coordinator's paths to those here
  std::vector<std::string> executor_argv;  // see ExecutorProcess::Options
  std::unique_ptr<SyncTransport> transport;
  Clock* clock = Clock::Real();
  OomWatch oom = OomWatch::ForThisProcess();
  std::shared_ptr<WorkerMetrics> metrics;                                                       // that are kept; null: nobody asks
  std::function<void(LogLevel, const std::string&)> log = [](LogLevel, const std::string&) {};  // from Run's thread
};

class Supervisor {
 public:
  // After a drain, results that the coordinator has not acknowledged are offered to it for so long, should it be away.
  static constexpr absl::Duration kFarewell = absl::Seconds(60);
  // The last call of a worker that has nothing to tell but that it leaves, or that stops at once. None is made when the one before
  // failed.
  static constexpr absl::Duration kShortFarewell = absl::Seconds(1);
  // An executor that was asked to stop is killed after this; at once means sooner.
  static constexpr absl::Duration kStopGrace = absl::Seconds(10);
  static constexpr absl::Duration kShortStopGrace = absl::Seconds(2);
  // An executor whose channel has closed is killed after this.
  static constexpr absl::Duration kExitGrace = absl::Seconds(1);

  explicit Supervisor(SupervisorOptions options);
  ~Supervisor();

  // Blocks until the worker has left: after RequestDrain, RequestStop, or when the coordinator says STOP. Executors are children of the
  // calling thread and die with it. Coordinators that are away are waited for without end, unless the worker leaves. FAILED_PRECONDITION
  // when it left because the coordinator said STOP, with its reason.
  absl::Status Run();

  // From any thread. Drain: what runs is finished and told, then Run returns.
  void RequestDrain();
  // What runs is stopped, the coordinator is told if it answers within a second, then Run returns.
  void RequestStop();

 private:
  class Inbox;
  struct Slot {
    std::unique_ptr<ExecutorProcess> process;
    int generation = 0;  // of the process: events of an older one are dropped
    bool closed = false;
    absl::Status closed_why;
    bool busy = false;
    bool stop = false;             // the attempt was asked to stop
    quern::v1::AttemptId attempt;  // when busy
    uint64_t memory = 0;           // of the attempt
    absl::Duration kill_at = absl::InfiniteDuration();
  };

  void Post(std::function<void()> event);
  void StepCall(absl::Duration now);
  void OnAnswer(const absl::Status& status, quern::v1::SynchronizeResponse response);
  void AnswerChallenges(std::vector<quern::v1::SightChallenge> challenges);
  void StartAttempt(quern::v1::StartAttempt start);
  absl::Status EnsureProcess(Slot* slot);
  void StopAttempts(const std::vector<quern::v1::AttemptId>& ids, absl::Duration grace);
  void OnExecutorEvent(size_t slot, int generation, quern::v1::AttemptStatus status);
  void OnExecutorClosed(size_t slot, int generation, absl::Status why);
  void StepExecutors(absl::Duration now);
  // When StepCall, StepExecutors or Left have something to do next.
  absl::Duration NextStep() const;
  bool Left(absl::Duration now);

  const std::shared_ptr<Inbox> inbox_;  // first: threads of the transport and of executors post to it until they are gone
  SupervisorOptions options_;
  WorkerState state_;
  std::vector<Slot> slots_;
  bool leaving_ = false;
  bool stopping_ = false;
  bool cancelled_ = false;  // the call that is out has been cancelled
  absl::Duration call_began_;
  bool call_waits_ = false;
  absl::Duration leave_by_ = absl::InfiniteDuration();
  std::string last_call_error_;  // empty: the last call was answered
  absl::Status end_;             // of Run
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_SUPERVISOR_SUPERVISOR_H_
