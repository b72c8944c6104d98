// The gRPC server: where it listens and how it stops.
#ifndef QUERN_DAEMON_RPC_SERVER_H_
#define QUERN_DAEMON_RPC_SERVER_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "daemon/rpc/coordinator.h"
#include "daemon/rpc/data_service.h"
#include "daemon/rpc/services.h"
#include "grpcpp/server.h"

namespace quern::daemon {

// Whether `address` (unix:/path or host:port) may be listened on: INVALID_ARGUMENT for anything but a unix socket or a loopback address,
// since there is no TLS.
absl::Status CheckListenAddress(const std::string& address);

// Makes way for a unix socket at `path`: removes one that nobody listens on. FAILED_PRECONDITION when somebody does, or when the path is
// something else than a socket; NOT_FOUND when its directory does not exist; INVALID_ARGUMENT when it is too long for a socket.
absl::Status PrepareUnixSocket(const std::string& path);

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

// Serves the coordinator's services, health checking and reflection.
class Server {
 public:
  // `coordinator` outlives the server. An address that cannot be listened on is told with the system's reason.
  static absl::StatusOr<std::unique_ptr<Server>> Start(Coordinator* coordinator, const std::vector<std::string>& addresses);
  // Shutdown, if it was not called.
  ~Server();

  // Where it listens, with the port that was chosen in place of a 0.
  const std::vector<std::string>& addresses() const { return addresses_; }

  // Ends waiting calls, waits a few seconds for others, removes unix sockets. Open connections without calls are no reason to wait. Blocks.
  void Shutdown();

 private:
  explicit Server(Coordinator* coordinator);

  Coordinator* const coordinator_;
  JobsService jobs_;
  WorkersService workers_;
  DataService data_;
  CallCounter calls_;
  std::unique_ptr<grpc::Server> server_;
  std::vector<std::string> addresses_;
  std::vector<std::string> sockets_;
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_SERVER_H_
