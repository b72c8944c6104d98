// What the queue and its store tell of themselves for the metrics.
#ifndef QUERN_DAEMON_QUEUE_QUEUE_FIGURES_H_
#define QUERN_DAEMON_QUEUE_QUEUE_FIGURES_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/metrics.h"
#include "quern/v1/jobs.pb.h"
#include "quern/v1/plan.pb.h"
#include "quern/v1/workers.pb.h"

namespace quern::daemon {

// Counted since this coordinator started.
struct QueueCounts {
  uint64_t grants[quern::v1::Purpose_ARRAYSIZE] = {};
  // By state and reason. The reasons are those that the code names, so there are few.
  std::map<std::pair<quern::v1::Attempt::State, std::string>, uint64_t> attempts_ended;
  uint64_t commits = 0;
  uint64_t lease_expiries = 0;
  uint64_t audits_passed = 0;
  uint64_t mismatches = 0;  // other bytes from the same input
  uint64_t workers_set_aside = 0;
  uint64_t jobs_ended[quern::v1::Job::State_ARRAYSIZE] = {};
  // Of attempts that were committed or passed an audit.
  uint64_t bytes_read = 0, bytes_written = 0;
  quern::v1::StageTimes times;
};

struct QueueFigures {
  QueueCounts counts;
  uint64_t jobs[quern::v1::Job::State_ARRAYSIZE] = {};    // all that are kept
  uint64_t tasks[quern::v1::Task::State_ARRAYSIZE] = {};  // of jobs that have not ended
  uint64_t delayed_tasks = 0;                             // of the pending ones: they wait after a failure
  uint64_t audits_due = 0;
  uint64_t running_attempts = 0;
  std::map<std::string, uint64_t> workers;  // by state, as ListWorkers has it
  uint64_t waiting_calls = 0;
  struct LiveJob {
    uint64_t id = 0;
    uint64_t tasks[quern::v1::Task::State_ARRAYSIZE] = {};
  };
  std::vector<LiveJob> live_jobs;    // that have not ended: the oldest, at most kMostLiveJobs
  Histogram::Snapshot job_seconds;   // from creation to each end
  Histogram::Snapshot task_seconds;  // of committed attempts
};

// More would make more time series than a Prometheus likes.
inline constexpr size_t kMostLiveJobs = 100;

// Of a store's writer. Thread-safe.
struct StoreMetrics {
  Histogram commit_seconds{Histogram::Exponential(0.0001, 2, 16)};  // of one batch, until it is durable
  Histogram batch_writers{Histogram::Exponential(1, 2, 12)};        // how many transitions shared it
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_QUEUE_QUEUE_FIGURES_H_
