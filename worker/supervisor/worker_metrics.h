// What a worker counts of itself, from what its executors and the coordinator tell its supervisor anyway. docs/operations.md, "Read the
// metrics", has the table of the names, and a test holds the two together.
#ifndef QUERN_WORKER_SUPERVISOR_WORKER_METRICS_H_
#define QUERN_WORKER_SUPERVISOR_WORKER_METRICS_H_

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/metrics.h"
#include "base/mutex.h"
#include "quern/v1/workers.pb.h"
#include "worker/supervisor/executor_process.h"

namespace quern::worker {

// Thread-safe.
class WorkerMetrics {
 public:
  // `memory`: bytes of buffer pool of each of the slots.
  WorkerMetrics(int slots, uint64_t memory);

  // From the supervisor. `slot` is its number.
  void CallEnded(bool answered, absl::Duration took, bool may_wait);
  void Draining();
  void ExecutorStarted(size_t slot, pid_t pid);
  void ExecutorEnded(size_t slot, const ExecutorDeath& death);
  void AttemptStarted(size_t slot, uint64_t memory);
  // Progress of the slot's attempt; bytes are counted as they move.
  void AttemptMoved(size_t slot, uint64_t bytes_read, uint64_t bytes_written);
  // What it ends with; its bytes are counted here too.
  void AttemptEnded(size_t slot, const quern::v1::AttemptStatus& status);
  // It ends without a word of its executor.
  void AttemptDied(size_t slot, quern::v1::AttemptStatus::State state, quern::v1::FailureReason reason);

  // It counts still.
  absl::Status Live() const;
  // The coordinator has answered the last call, and the worker is not about to leave: UNAVAILABLE says what is not so.
  absl::Status Ready() const;

  // As they are now. Looks at /proc for the memory of executors.
  std::vector<MetricFamily> Collect() const;

 private:
  struct Slot {
    pid_t executor = 0;  // 0: none
    bool busy = false;
    uint64_t memory = 0;                         // of the attempt
    uint64_t bytes_read = 0, bytes_written = 0;  // of it, that are counted
  };

  void CountEnd(size_t slot, quern::v1::AttemptStatus::State state, quern::v1::FailureReason reason) QUERN_REQUIRES(mutex_);
  void CountBytes(Slot& slot, uint64_t bytes_read, uint64_t bytes_written) QUERN_REQUIRES(mutex_);

  const uint64_t memory_;
  Histogram waiting_seconds_{Histogram::Exponential(0.001, 2, 17)};
  Histogram prompt_seconds_{Histogram::Exponential(0.001, 2, 17)};
  Histogram attempt_seconds_{Histogram::Exponential(0.125, 2, 18)};

  mutable Mutex mutex_;
  std::vector<Slot> slots_ QUERN_GUARDED_BY(mutex_);
  bool reachable_ QUERN_GUARDED_BY(mutex_) = false;
  bool draining_ QUERN_GUARDED_BY(mutex_) = false;
  uint64_t failed_calls_ QUERN_GUARDED_BY(mutex_) = 0;
  uint64_t executor_starts_ QUERN_GUARDED_BY(mutex_) = 0;
  std::map<std::string, uint64_t> executor_deaths_ QUERN_GUARDED_BY(mutex_);  // by cause
  uint64_t started_ QUERN_GUARDED_BY(mutex_) = 0;
  std::map<std::pair<std::string, std::string>, uint64_t> ended_ QUERN_GUARDED_BY(mutex_);  // by state and reason
  uint64_t bytes_read_ QUERN_GUARDED_BY(mutex_) = 0;
  uint64_t bytes_written_ QUERN_GUARDED_BY(mutex_) = 0;
  quern::v1::StageTimes times_ QUERN_GUARDED_BY(mutex_);
  uint64_t peak_resident_ QUERN_GUARDED_BY(mutex_) = 0;  // of executors, in bytes, as results told
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_SUPERVISOR_WORKER_METRICS_H_
