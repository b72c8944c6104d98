// Ends streams whose client takes nothing: what waits to be sent holds memory for as long as the call lives.
#ifndef QUERN_DAEMON_RPC_STALLED_WRITES_H_
#define QUERN_DAEMON_RPC_STALLED_WRITES_H_

#include <set>

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "grpcpp/server_context.h"

namespace quern::daemon {

// Thread-safe. Outlives its streams.
class StalledWrites {
 public:
  StalledWrites(Clock* clock, absl::Duration patience) : clock_(clock), patience_(patience) {}

  // One call. Made in its reactor, and gone with it: `context` must live until then.
  class Stream {
   public:
    Stream(StalledWrites* all, grpc::CallbackServerContext* context);
    ~Stream();
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
    // Around each write: before StartWrite, in OnWriteDone.
    void Began();
    void Ended();

   private:
    friend class StalledWrites;
    StalledWrites* const all_;
    grpc::CallbackServerContext* const context_;
    absl::Duration since_ = absl::InfiniteDuration();  // guarded by all_->mutex_
  };

  // Cancels the calls whose write is under way for longer than `patience`. To be called now and then.
  void Tick();
  size_t streams();

 private:
  Clock* const clock_;
  const absl::Duration patience_;
  Mutex mutex_;
  std::set<Stream*> streams_ QUERN_GUARDED_BY(mutex_);
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_STALLED_WRITES_H_
