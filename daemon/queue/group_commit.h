// The writer thread of a store: all writes that arrive while one commit runs share the next.
#ifndef QUERN_DAEMON_QUEUE_GROUP_COMMIT_H_
#define QUERN_DAEMON_QUEUE_GROUP_COMMIT_H_

#include <functional>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "base/mutex.h"
#include "daemon/queue/job_store.h"
#include "daemon/queue/queue_figures.h"

namespace quern::daemon {

// Thread-safe. The destructor commits what was handed over, then returns.
class GroupCommitter {
 public:
  // Makes the writes durable, all or none, in their order. Runs on the writer thread and may block.
  using Commit = std::function<absl::Status(std::vector<StoreWrite>)>;

  // `metrics` may be null, and outlives the committer.
  explicit GroupCommitter(Commit commit, StoreMetrics* metrics = nullptr);
  ~GroupCommitter();
  GroupCommitter(const GroupCommitter&) = delete;
  GroupCommitter& operator=(const GroupCommitter&) = delete;

  // As JobStore::Write.
  void Write(std::vector<StoreWrite> writes, std::function<void(absl::Status)> done);

 private:
  struct Request {
    std::vector<StoreWrite> writes;
    std::function<void(absl::Status)> done;
  };
  void Run();

  const Commit commit_;
  StoreMetrics* const metrics_;
  Mutex mutex_;
  CondVar arrived_;
  std::vector<Request> pending_ QUERN_GUARDED_BY(mutex_);
  bool closing_ QUERN_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_QUEUE_GROUP_COMMIT_H_
