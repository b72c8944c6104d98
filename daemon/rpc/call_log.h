// Sees every call that the guard let through: counts it, and writes the audit log of those that change something.
#ifndef QUERN_DAEMON_RPC_CALL_LOG_H_
#define QUERN_DAEMON_RPC_CALL_LOG_H_

#include <memory>

#include "absl/time/time.h"
#include "base/mutex.h"
#include "daemon/rpc/guard.h"
#include "daemon/rpc/log_limiter.h"
#include "grpcpp/support/server_interceptor.h"

namespace quern::daemon {

// Calls that are under way. Thread-safe.
class CallCounter {
 public:
  void Begin();
  void End();
  // Blocks until there are none, or until `patience` is over.
  void AwaitNone(absl::Duration patience);

 private:
  Mutex mutex_;
  CondVar none_;
  int count_ QUERN_GUARDED_BY(mutex_) = 0;
};

// A line has the form
//   audit event=call who=token:ci certificate=laptop from=ipv4:10.0.0.7:4711 method=CancelJob target=jobs/7 result=OK
// where `who` is a token's name, or the origin of the connection where there are no tokens. Calls that only look are written when they were
// refused (PERMISSION_DENIED). `guard` and `counter` outlive the server; the counter counts the calls of Quern's own services.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> NewCallLog(Guard* guard, CallCounter* counter, LogLine log);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_CALL_LOG_H_
