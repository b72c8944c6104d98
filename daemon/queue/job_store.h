// Durable storage of jobs, behind an asynchronous contract: a write is acknowledged once the batch that it joined is synced.
#ifndef QUERN_DAEMON_QUEUE_JOB_STORE_H_
#define QUERN_DAEMON_QUEUE_JOB_STORE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace quern::daemon {

// Keys are fixed-width big-endian, so that a scan goes by (job, task, attempt):
//   'v'                          StoreVersion        'j' job            JobRecord
//   'p' job                      PlanSummary         's' job task       TaskSpec
//   't' job task                 TaskRecord          'a' job task att   AttemptRecord
//   'r' job task                 TaskResult          'n'                next job id (u64)
//   'w' name of a worker         WorkerRecord
// Do not renumber.
std::string JobKey(char kind, uint64_t job);
std::string TaskKey(char kind, uint64_t job, uint32_t task);
std::string AttemptKey(uint64_t job, uint32_t task, uint32_t attempt);

struct StoreMetrics;  // queue_figures.h

struct StoreWrite {
  enum class Kind { kPut, kDelete, kDeletePrefix };
  Kind kind;
  std::string key;
  std::string value;
};

// Thread-safe.
class JobStore {
 public:
  virtual ~JobStore() = default;

  // Atomic: all of `writes` or none. Writes are applied in the order of the calls. `done` runs on a thread of the store once they are
  // durable, or with the error that stopped them; after an error every later write fails alike. `done` must not block.
  virtual void Write(std::vector<StoreWrite> writes, std::function<void(absl::Status)> done) = 0;

  // Blocks until durable.
  absl::Status WriteSync(std::vector<StoreWrite> writes);

  // NOT_FOUND when there is none. Sees every write that was acknowledged.
  virtual absl::StatusOr<std::string> Get(absl::string_view key) = 0;
  // Calls `visit` for each key with the prefix in order, until it returns an error, which is returned.
  virtual absl::Status Scan(absl::string_view prefix,
                            std::function<absl::Status(absl::string_view key, absl::string_view value)> visit) = 0;
};

// Keeps everything in memory: for tests, and for jobs that are not worth resuming (verification).
// `metrics`, here and below, may be null, and outlives the store.
std::unique_ptr<JobStore> NewMemoryJobStore(StoreMetrics* metrics = nullptr);

// RocksDB in `directory`, made if absent; group commit: all writes that arrive while one sync runs share the next. A store with an older
// version is migrated (store_migration.h). FAILED_PRECONDITION for one with a newer version; UNAVAILABLE when another process has it open.
absl::StatusOr<std::unique_ptr<JobStore>> OpenRocksDbJobStore(const std::string& directory, StoreMetrics* metrics = nullptr);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_QUEUE_JOB_STORE_H_
