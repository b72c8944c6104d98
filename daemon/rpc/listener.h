// Where the coordinator listens, and who is let in.
//
// Quern accepts connections itself and hands them to gRPC. gRPC's own listeners take any number of connections, stop for good when the
// process runs out of descriptors, and do not tell who is at the other end of a unix socket. And the data plane has connections at the same
// addresses: the first bytes tell which is which.
#ifndef QUERN_DAEMON_RPC_LISTENER_H_
#define QUERN_DAEMON_RPC_LISTENER_H_

#include <sys/types.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/endpoint.h"
#include "base/file.h"
#include "base/metrics.h"
#include "daemon/rpc/connection_counts.h"
#include "daemon/rpc/log_limiter.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server_builder.h"

namespace quern::daemon {

// Makes way for a unix socket at `path`: removes one that nobody listens on. FAILED_PRECONDITION when somebody does, or when the path is
// something else than a socket; NOT_FOUND when its directory does not exist; INVALID_ARGUMENT when it is too long for a socket.
absl::Status PrepareUnixSocket(const std::string& path);

// Bound and listening; a unix socket is removed with it. Connections wait until somebody accepts them.
class ListeningSocket {
 public:
  // A unix socket gets `mode`. An address that cannot be had is told with the system's reason.
  static absl::StatusOr<ListeningSocket> Open(const std::string& address, mode_t mode);
  ~ListeningSocket();
  ListeningSocket(ListeningSocket&&) = default;
  ListeningSocket& operator=(ListeningSocket&&) = delete;

  const Endpoint& endpoint() const { return endpoint_; }
  // With the port that was chosen in place of a 0.
  const std::string& address() const { return address_; }
  const std::vector<UniqueFd>& fds() const { return fds_; }  // one for each address that the host's name stands for

 private:
  ListeningSocket() = default;
  absl::Status OpenUnix(mode_t mode);
  absl::Status OpenTcp(const std::string& text);

  Endpoint endpoint_;
  std::string address_;
  std::vector<UniqueFd> fds_;
};

// Lets connections in, at most so many at a time, and so many of one peer (PeerOfConnection). Connections have the descriptors above a mark
// and everything else those below, so that neither takes the other's.
class Acceptor {
 public:
  // Credentials for the connections of one door; `origin` tells whose they are.
  using MakeCredentials = std::function<std::shared_ptr<grpc::ServerCredentials>(const Endpoint&, std::function<std::string()> origin)>;

  struct Options {
    int most = 4096;
    int most_of_a_peer = 0;                      // 0: three quarters of all
    absl::Duration opening = absl::Seconds(10);  // after so long without a first word a connection is closed
    Clock* clock = Clock::Real();
    LogLine log;
    // Takes the connections of the data plane (LinkServer::Take). Does not block.
    std::function<void(UniqueFd, const std::string& ticket_name, const Endpoint&, const std::string& peer)> take_data;
  };
  explicit Acceptor(Options options);
  ~Acceptor();  // Stop, if it was not called

  // Before the server is built. A unix socket has a door for each of the first users that come, so that the log can name them.
  void Add(ListeningSocket socket, grpc::ServerBuilder& builder, const MakeCredentials& make_credentials);
  // After the server is built.
  absl::Status Start();
  // Nobody is let in any more, and the sockets are gone. Connections stay.
  void Stop();

  // Since Start.
  uint64_t accepted() const { return accepted_.value(); }
  uint64_t not_accepted() const { return not_accepted_.value(); }
  // Looks at every descriptor of the process.
  int OpenConnections() const;

 private:
  struct Door {
    std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> way;
    std::shared_ptr<std::atomic<int64_t>> user;  // -1: nobody yet
  };
  struct Port {
    ListeningSocket socket;
    std::vector<Door> doors;
  };

  // A connection that has not said yet what it is.
  struct Silent {
    Port* port = nullptr;
    int listener = -1;
    absl::Duration until;
    UniqueFd socket;
  };

  void Run();
  // False when there is no descriptor left to accept with.
  bool AcceptFrom(Port& port, int listener);
  // Hands the connection on, if its first bytes have come.
  void Judge(int connection);
  void CloseSilent();
  static Door& DoorFor(Port& port, int connection);

  const Options options_;
  LogLimiter log_;
  LogLimiter refused_;  // apart: a flood of those that are let in is not to hide them
  Counter accepted_, not_accepted_;
  int first_ = 0;  // the mark
  int most_ = 0;
  std::unique_ptr<ConnectionCounts> peers_;
  std::vector<Port> ports_;
  UniqueFd wake_, events_;
  // Of the thread, as long as it runs.
  std::map<int, Silent> silent_;
  absl::Duration next_check_;
  std::thread thread_;
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_LISTENER_H_
