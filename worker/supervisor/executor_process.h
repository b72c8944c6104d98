// An executor child seen from its supervisor: the process, its channel, and what its death means.
#ifndef QUERN_WORKER_SUPERVISOR_EXECUTOR_PROCESS_H_
#define QUERN_WORKER_SUPERVISOR_EXECUTOR_PROCESS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file.h"
#include "base/subprocess.h"
#include "quern/v1/executor.pb.h"
#include "worker/supervisor/cgroup.h"

namespace quern::worker {

struct ExecutorDeath {
  ExitState exit;
  // It was killed with SIGKILL and the OOM killer has struck in its cgroup while it lived.
  bool out_of_memory = false;
};

// The failure of an attempt that ran with `memory` bytes when its executor died. `limit` is OomWatch::DescribeLimit().
quern::v1::Failure FailureOfDeath(const ExecutorDeath& death, uint64_t memory, const std::string& limit);

// Methods are called from one thread; callbacks come from another. The destructor kills the child and waits for its end.
class ExecutorProcess {
 public:
  struct Options {
    std::vector<std::string> argv;  // "--executor --channel-fd=N" is appended
    OomWatch oom;
    std::function<void(quern::v1::AttemptStatus)> on_event;
    // The last callback: the channel has closed, which the child's end (see Reap) follows soon. `why` is OK, or says what was wrong with
    // the channel.
    std::function<void(absl::Status why)> on_closed;
  };
  // Does not block on the child: what it cannot do shows as its death.
  static absl::StatusOr<std::unique_ptr<ExecutorProcess>> Spawn(Options options);
  ~ExecutorProcess();
  ExecutorProcess(const ExecutorProcess&) = delete;
  ExecutorProcess& operator=(const ExecutorProcess&) = delete;

  // Both block at most kSendTimeout, when the child does not read; it is to be killed then.
  static constexpr int kSendTimeoutSeconds = 5;
  absl::Status Start(quern::v1::StartAttempt start);
  absl::Status Stop(const quern::v1::AttemptId& id);
  // SIGKILL: its end comes as on_closed, then Reap.
  absl::Status Kill();
  pid_t pid() const { return child_.pid(); }
  // Whether the child has ended; fills `death` then, and must not be called again.
  absl::StatusOr<bool> Reap(ExecutorDeath* death);

 private:
  ExecutorProcess(Options options, Subprocess child, UniqueFd channel);
  void ReadEvents();

  const Options options_;
  const uint64_t oom_kills_before_;
  Subprocess child_;
  const UniqueFd channel_;
  std::thread reader_;
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_SUPERVISOR_EXECUTOR_PROCESS_H_
