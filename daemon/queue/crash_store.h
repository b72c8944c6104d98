// A store for tests: what was written becomes durable only when the test says so, and a crash loses the rest.
#ifndef QUERN_DAEMON_QUEUE_CRASH_STORE_H_
#define QUERN_DAEMON_QUEUE_CRASH_STORE_H_

#include <deque>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "base/mutex.h"
#include "daemon/queue/job_store.h"

namespace quern::daemon {

class CrashStore : public JobStore {
 public:
  void Write(std::vector<StoreWrite> writes, std::function<void(absl::Status)> done) override {
    MutexLock lock(&mutex_);
    pending_.push_back({std::move(writes), std::move(done)});
  }

  absl::StatusOr<std::string> Get(absl::string_view key) override {
    MutexLock lock(&mutex_);
    const auto it = durable_.find(std::string(key));
    if (it == durable_.end()) return absl::NotFoundError("no such record");
    return it->second;
  }

  absl::Status Scan(absl::string_view prefix, std::function<absl::Status(absl::string_view, absl::string_view)> visit) override {
    std::map<std::string, std::string> found;
    {
      MutexLock lock(&mutex_);
      for (const auto& entry : durable_) {
        if (absl::StartsWith(entry.first, prefix)) found.insert(entry);
      }
    }
    for (const auto& [key, value] : found) {
      if (absl::Status status = visit(key, value); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // Makes the oldest batch durable and says so; false when there is none.
  bool SyncOne() {
    Batch batch;
    {
      MutexLock lock(&mutex_);
      if (pending_.empty()) return false;
      batch = std::move(pending_.front());
      pending_.pop_front();
      if (error_.ok()) Apply(batch);
    }
    batch.done(error_);
    return true;
  }
  // Until nothing is pending.
  void Sync() {
    while (SyncOne()) {
    }
  }
  // The oldest batch reaches the disk, and the crash comes before anybody hears of it.
  void ApplySilently() {
    MutexLock lock(&mutex_);
    if (!pending_.empty()) Apply(pending_.front());
  }
  // What a crash loses. The callbacks get an error, since the queue waits for them; nobody is left to hear it.
  void LosePending() {
    error_ = absl::UnavailableError("crashed");
    Sync();
    error_ = absl::OkStatus();
  }
  void FailWith(absl::Status error) { error_ = std::move(error); }

 private:
  struct Batch {
    std::vector<StoreWrite> writes;
    std::function<void(absl::Status)> done;
  };

  void Apply(const Batch& batch) QUERN_REQUIRES(mutex_) {
    for (const StoreWrite& write : batch.writes) {
      if (write.kind == StoreWrite::Kind::kPut) {
        durable_[write.key] = write.value;
      } else if (write.kind == StoreWrite::Kind::kDelete) {
        durable_.erase(write.key);
      } else {
        auto it = durable_.lower_bound(write.key);
        while (it != durable_.end() && absl::StartsWith(it->first, write.key)) it = durable_.erase(it);
      }
    }
  }

  Mutex mutex_;
  std::map<std::string, std::string> durable_ QUERN_GUARDED_BY(mutex_);
  std::deque<Batch> pending_ QUERN_GUARDED_BY(mutex_);
  absl::Status error_;  // set by the test's own thread
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_QUEUE_CRASH_STORE_H_
