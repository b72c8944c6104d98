#include "daemon/rpc/stalled_writes.h"

namespace quern::daemon {

StalledWrites::Stream::Stream(StalledWrites* all, grpc::CallbackServerContext* context) : all_(all), context_(context) {
  MutexLock lock(&all_->mutex_);
  all_->streams_.insert(this);
}

StalledWrites::Stream::~Stream() {
  MutexLock lock(&all_->mutex_);
  all_->streams_.erase(this);
}

void StalledWrites::Stream::Began() {
  const absl::Duration now = all_->clock_->Monotonic();
  MutexLock lock(&all_->mutex_);
  since_ = now;
}

void StalledWrites::Stream::Ended() {
  MutexLock lock(&all_->mutex_);
  since_ = absl::InfiniteDuration();
}

void StalledWrites::Tick() {
  const absl::Duration now = clock_->Monotonic();
  MutexLock lock(&mutex_);
  for (Stream* stream : streams_) {
    if (now - stream->since_ < patience_) continue;
    stream->since_ = absl::InfiniteDuration();
    // Its reactions run on threads of gRPC, never on this one under the mutex.
    stream->context_->TryCancel();
  }
}

size_t StalledWrites::streams() {
  MutexLock lock(&mutex_);
  return streams_.size();
}

}  // namespace quern::daemon
