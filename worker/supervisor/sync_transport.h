// How a supervisor's calls reach a coordinator.
#ifndef QUERN_WORKER_SUPERVISOR_SYNC_TRANSPORT_H_
#define QUERN_WORKER_SUPERVISOR_SYNC_TRANSPORT_H_

#include <functional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "quern/v1/workers.pb.h"

namespace quern::worker {

// One call at a time. Thread-safe. The destructor cancels a call that is out, and its `done` has run when it returns.
class SyncTransport {
 public:
  using Done = std::function<void(absl::Status status, quern::v1::SynchronizeResponse response)>;
  virtual ~SyncTransport() = default;
  // Returns at once; `done` runs later on a thread of the transport and must not block. After `timeout` the call ends with
  // DEADLINE_EXCEEDED.
  virtual void Call(quern::v1::SynchronizeRequest request, absl::Duration timeout, Done done) = 0;
  // The call that is out, if any, ends soon: with CANCELLED, or with the answer that was on its way.
  virtual void Cancel() = 0;
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_SUPERVISOR_SYNC_TRANSPORT_H_
