#include "daemon/queue/group_commit.h"

#include <iterator>
#include <utility>

#include "absl/time/time.h"
#include "base/clock.h"

namespace quern::daemon {

GroupCommitter::GroupCommitter(Commit commit, StoreMetrics* metrics)
    : commit_(std::move(commit)), metrics_(metrics), thread_([this] { Run(); }) {}

GroupCommitter::~GroupCommitter() {
  {
    MutexLock lock(&mutex_);
    closing_ = true;
    arrived_.Signal();
  }
  thread_.join();
}

void GroupCommitter::Write(std::vector<StoreWrite> writes, std::function<void(absl::Status)> done) {
  MutexLock lock(&mutex_);
  pending_.push_back({std::move(writes), std::move(done)});
  arrived_.Signal();
}

void GroupCommitter::Run() {
  absl::Status broken;
  while (true) {
    std::vector<Request> batch;
    {
      MutexLock lock(&mutex_);
      while (pending_.empty() && !closing_) arrived_.Wait(&mutex_);
      if (pending_.empty()) return;
      batch.swap(pending_);
    }
    std::vector<StoreWrite> writes;
    for (Request& request : batch) {
      writes.insert(writes.end(), std::make_move_iterator(request.writes.begin()), std::make_move_iterator(request.writes.end()));
    }
    // After a failed commit nobody knows what is on disk: nothing later may be acknowledged.
    const absl::Duration began = Clock::Real()->Monotonic();
    if (broken.ok()) broken = commit_(std::move(writes));
    if (metrics_ != nullptr) {
      metrics_->commit_seconds.Observe(absl::ToDoubleSeconds(Clock::Real()->Monotonic() - began));
      metrics_->batch_writers.Observe(static_cast<double>(batch.size()));
    }
    for (Request& request : batch) request.done(broken);
  }
}

}  // namespace quern::daemon
