// The gRPC server: where it listens and how it stops.
#ifndef QUERN_DAEMON_RPC_SERVER_H_
#define QUERN_DAEMON_RPC_SERVER_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/rpc/coordinator.h"
#include "daemon/rpc/services.h"
#include "grpcpp/server.h"

namespace quern::daemon {

// Whether `address` (unix:/path or host:port) may be listened on: INVALID_ARGUMENT for anything but a unix socket or a loopback address,
// since there is no TLS.
absl::Status CheckListenAddress(const std::string& address);

// Makes way for a unix socket at `path`: removes one that nobody listens on. FAILED_PRECONDITION when somebody does, or when the path is
// something else than a socket; NOT_FOUND when its directory does not exist; INVALID_ARGUMENT when it is too long for a socket.
absl::Status PrepareUnixSocket(const std::string& path);

// Serves the coordinator's services, health checking and reflection.
class Server {
 public:
  // `coordinator` outlives the server.
  static absl::StatusOr<std::unique_ptr<Server>> Start(Coordinator* coordinator, const std::vector<std::string>& addresses);
  // Shutdown, if it was not called.
  ~Server();

  // Ends waiting calls, waits a few seconds for others, removes unix sockets. Blocks.
  void Shutdown();

 private:
  explicit Server(Coordinator* coordinator);

  Coordinator* const coordinator_;
  JobsService jobs_;
  WorkersService workers_;
  std::unique_ptr<grpc::Server> server_;
  std::vector<std::string> sockets_;
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_SERVER_H_
