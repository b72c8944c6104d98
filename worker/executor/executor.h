// The child process that does the work of a worker: it runs one attempt at a time and tells its supervisor how it goes. It dies alone: an
// OOM kill, a SIGBUS or a bug ends this process and not the supervisor, which reports it and starts another.
#ifndef QUERN_WORKER_EXECUTOR_EXECUTOR_H_
#define QUERN_WORKER_EXECUTOR_EXECUTOR_H_

#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "quern/v1/executor.pb.h"
#include "worker/pipeline/run_task.h"

namespace quern::worker {

// What an executor does with an attempt. Called on the attempt's own thread.
struct ExecutorHooks {
  // Blocks until the task has ended; watches control->stop and counts the bytes.
  std::function<absl::StatusOr<quern::v1::TaskResult>(const quern::v1::StartAttempt& start, TaskControl* control)> run;
  std::function<quern::v1::Failure(const absl::Status&)> failure_of;
};

// Serves commands from `channel` until the other end closes it, then returns OK; an error says what was wrong with the channel. A RUNNING
// event follows each start at once and then about every `progress_interval`; one COMPLETED, FAILED or STOPPED event is the last of an
// attempt. A start while an attempt runs is answered with FAILED. When the channel closes while an attempt runs, the process ends at once
// with status 0: nobody is left to hear of it, and the coordinator removes what it leaves. Blocks.
absl::Status RunExecutor(UniqueFd channel, const ExecutorHooks& hooks, absl::Duration progress_interval = absl::Milliseconds(200));

// What the process of an executor does first: makes itself the first choice of the OOM killer of all processes beside it, and outlives no
// supervisor. SIGTERM and SIGINT are ignored: the supervisor decides when it ends, and a service manager signals every process of a
// service.
void PrepareExecutorProcess();

}  // namespace quern::worker

#endif  // QUERN_WORKER_EXECUTOR_EXECUTOR_H_
