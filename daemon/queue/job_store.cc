#include "daemon/queue/job_store.h"

#include <map>
#include <utility>

#include "absl/strings/match.h"
#include "base/mutex.h"
#include "daemon/queue/group_commit.h"

namespace quern::daemon {
namespace {

void AppendBigEndian(uint64_t value, int bytes, std::string* out) {
  for (int shift = 8 * (bytes - 1); shift >= 0; shift -= 8) out->push_back(static_cast<char>(value >> shift));
}

class MemoryJobStore : public JobStore {
 public:
  explicit MemoryJobStore(StoreMetrics* metrics)
      : committer_([this](std::vector<StoreWrite> writes) { return Apply(std::move(writes)); }, metrics) {}

  void Write(std::vector<StoreWrite> writes, std::function<void(absl::Status)> done) override {
    committer_.Write(std::move(writes), std::move(done));
  }

  absl::StatusOr<std::string> Get(absl::string_view key) override {
    MutexLock lock(&mutex_);
    const auto it = values_.find(std::string(key));
    if (it == values_.end()) return absl::NotFoundError("no such record");
    return it->second;
  }

  absl::Status Scan(absl::string_view prefix, std::function<absl::Status(absl::string_view, absl::string_view)> visit) override {
    // A copy, so that `visit` may call the store.
    std::map<std::string, std::string> found;
    {
      MutexLock lock(&mutex_);
      for (auto it = values_.lower_bound(std::string(prefix)); it != values_.end() && absl::StartsWith(it->first, prefix); ++it) {
        found.insert(*it);
      }
    }
    for (const auto& [key, value] : found) {
      if (absl::Status status = visit(key, value); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Apply(std::vector<StoreWrite> writes) {
    MutexLock lock(&mutex_);
    for (StoreWrite& write : writes) {
      switch (write.kind) {
        case StoreWrite::Kind::kPut:
          values_[write.key] = std::move(write.value);
          break;
        case StoreWrite::Kind::kDelete:
          values_.erase(write.key);
          break;
        case StoreWrite::Kind::kDeletePrefix: {
          auto it = values_.lower_bound(write.key);
          while (it != values_.end() && absl::StartsWith(it->first, write.key)) it = values_.erase(it);
          break;
        }
      }
    }
    return absl::OkStatus();
  }

  Mutex mutex_;
  std::map<std::string, std::string> values_ QUERN_GUARDED_BY(mutex_);
  GroupCommitter committer_;  // last: its thread uses the others until it is destroyed
};

}  // namespace

std::string JobKey(char kind, uint64_t job) {
  std::string key(1, kind);
  AppendBigEndian(job, 8, &key);
  return key;
}

std::string TaskKey(char kind, uint64_t job, uint32_t task) {
  std::string key = JobKey(kind, job);
  AppendBigEndian(task, 4, &key);
  return key;
}

std::string AttemptKey(uint64_t job, uint32_t task, uint32_t attempt) {
  std::string key = TaskKey('a', job, task);
  AppendBigEndian(attempt, 4, &key);
  return key;
}

absl::Status JobStore::WriteSync(std::vector<StoreWrite> writes) {
  struct {
    Mutex mutex;
    CondVar changed;
    bool done QUERN_GUARDED_BY(mutex) = false;
    absl::Status status QUERN_GUARDED_BY(mutex);
  } state;
  Write(std::move(writes), [&state](absl::Status status) {
    MutexLock lock(&state.mutex);
    state.status = std::move(status);
    state.done = true;
    state.changed.Signal();
  });
  MutexLock lock(&state.mutex);
  while (!state.done) state.changed.Wait(&state.mutex);
  return state.status;
}

std::unique_ptr<JobStore> NewMemoryJobStore(StoreMetrics* metrics) { return std::make_unique<MemoryJobStore>(metrics); }

}  // namespace quern::daemon
