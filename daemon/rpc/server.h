// The gRPC server: where it listens, whom it lets in, and how it stops.
#ifndef QUERN_DAEMON_RPC_SERVER_H_
#define QUERN_DAEMON_RPC_SERVER_H_

#include <sys/types.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/byte_size.h"
#include "base/clock.h"
#include "base/metrics.h"
#include "base/tls_files.h"
#include "daemon/rpc/call_log.h"
#include "daemon/rpc/coordinator.h"
#include "daemon/rpc/data_service.h"
#include "daemon/rpc/guard.h"
#include "daemon/rpc/link_server.h"
#include "daemon/rpc/listener.h"
#include "daemon/rpc/log_limiter.h"
#include "daemon/rpc/services.h"
#include "daemon/rpc/thread_pool.h"
#include "daemon/rpc/tls_credentials.h"
#include "grpcpp/server.h"

namespace quern::daemon {

// What one client may take.
struct ServerLimits {
  int connections = 4096;                        // open at a time, of all clients
  int connections_per_peer = 0;                  // of one address (PeerOfConnection); 0: three quarters of `connections`
  int calls = 16384;                             // open at a time, of all clients
  int calls_per_caller = 12288;                  // of one token and certificate; workers of a farm may share both
  int calls_per_connection = 256;                // further ones wait at the client
  uint64_t buffers = 256 * kMiB;                 // bytes that have come and wait to be whole messages
  int data_connections = 2048;                   // of the data plane, open at a time; each has a thread
  absl::Duration handshake = absl::Seconds(10);  // until a connection has said what it is, and again until it has shown its certificate
  absl::Duration idle = absl::Minutes(5);        // a connection without calls is closed
  absl::Duration ping = absl::Seconds(30);       // a connection that answers none for as long again is closed
  StreamLimits streams;
};

struct ServerOptions {
  // unix:/path or host:port. Unix sockets and loopback addresses are open to this machine's users; others need `tls` and `token_file`.
  std::vector<std::string> addresses;
  mode_t socket_mode = 0660;
  TlsFiles tls;  // all or none; with them every TCP address speaks TLS
  std::string token_file;
  ServerLimits limits;
  Clock* clock = Clock::Real();
  LogLine log;
};

// INVALID_ARGUMENT for addresses that are none, and for what would let strangers in. Looks at no file.
absl::Status CheckServerOptions(const ServerOptions& options);

// Serves the coordinator's services, health checking and reflection.
class Server {
 public:
  // `coordinator` outlives the server. An address that cannot be listened on is told with the system's reason; files of TLS and tokens that
  // cannot be used, with theirs.
  static absl::StatusOr<std::unique_ptr<Server>> Start(Coordinator* coordinator, ServerOptions options);
  static absl::StatusOr<std::unique_ptr<Server>> Start(Coordinator* coordinator, const std::vector<std::string>& addresses);
  // Shutdown, if it was not called.
  ~Server();

  // Where it listens, with the port that was chosen in place of a 0.
  const std::vector<std::string>& addresses() const { return addresses_; }

  // What is going on now, and what has been counted since Start.
  struct Figures {
    int64_t open_calls = 0;
    std::map<std::string, uint64_t> refused_calls;  // by the name of the status code
    int connections = 0;
    uint64_t accepted = 0, not_accepted = 0;
    size_t data_connections = 0;
    uint64_t data_sent = 0, data_received = 0;
    Histogram::Snapshot synchronize_waiting, synchronize_prompt;
  };
  Figures figures();

  // Looks for new tokens now, rather than within a second. Blocks.
  void Reload() { guard_->Poll(); }

  // Ends waiting calls, waits a few seconds for others, removes unix sockets. Open connections without calls are no reason to wait. Blocks.
  void Shutdown();

 private:
  Server(Coordinator* coordinator, const ServerOptions& options);

  Coordinator* const coordinator_;
  std::unique_ptr<Guard> guard_;
  JobsService jobs_;
  WorkersService workers_;
  LinkServer links_;
  DataService data_;
  CallCounter calls_;
  Acceptor acceptor_;
  TlsWatch tls_watch_;
  std::unique_ptr<grpc::Server> server_;
  std::vector<std::string> addresses_;
  std::unique_ptr<Ticker> reload_;  // looks for new tokens and certificates
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_SERVER_H_
