// The coordinator's side of data connections: lets them in by tickets and serves them, each on a thread of its own.
#ifndef QUERN_DAEMON_RPC_LINK_SERVER_H_
#define QUERN_DAEMON_RPC_LINK_SERVER_H_

#include <cstddef>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/link/connection.h"
#include "base/link/tls_context.h"
#include "base/mutex.h"
#include "base/tls_files.h"
#include "daemon/rpc/log_limiter.h"

namespace quern::daemon {

struct LinkServerOptions {
  TlsFiles tls;
  absl::Duration handshake = absl::Seconds(10);  // from the greeting to the ticket
  absl::Duration ticket = absl::Seconds(30);     // after so long a ticket lets nobody in
  absl::Duration stalled = kLinkPatience;        // a peer that moves nothing for so long is given up
  size_t most = 2048;                            // tickets that nobody has used yet, and as many connections
  Clock* clock = Clock::Real();
  LogLine log;
};

// Thread-safe. A connection costs a thread only when it names a ticket that is good, and nothing is done for it before it has shown the
// whole ticket, by TLS where the listener speaks it. A ticket lets one connection in.
class LinkServer {
 public:
  // What a connection is for: blocks on it, and stops when it fails or Shutdown of it is called. Its error is told to the peer.
  using Serve = std::function<absl::Status(LinkConnection&)>;

  explicit LinkServer(LinkServerOptions options);
  ~LinkServer();  // Shutdown, if it was not called

  // A ticket for one connection that `serve` is called with, from another thread. RESOURCE_EXHAUSTED when there are too many, or when
  // `principal` has three quarters of them; UNAVAILABLE after Shutdown.
  absl::StatusOr<std::string> Admit(const std::string& principal, Serve serve);

  // Takes a connection whose greeting has been read and names the ticket `name`. Does not block. `peer` is for the log.
  void Take(UniqueFd socket, const std::string& name, bool speaks_tls, const std::string& peer);

  size_t open_connections();

  // Ends all connections, and waits for their threads. Nobody is let in any more.
  void Shutdown();

 private:
  struct Admitted {
    std::string principal;
    std::string ticket;
    Serve serve;
    absl::Duration until;
  };
  struct Open {
    std::string principal;
    std::unique_ptr<LinkConnection> connection;
    std::thread thread;
    bool over = false;
  };

  void Run(LinkConnection& connection, const std::string& name, bool speaks_tls, const std::string& peer);
  absl::StatusOr<Serve> LetIn(LinkConnection& connection, const std::string& name, bool speaks_tls);
  // Nothing when there is none of that name and content.
  Serve Redeem(const std::string& name, const std::string& ticket);
  // What is over, to be destroyed without the mutex: threads are joined, files closed.
  struct Over {
    std::vector<Admitted> tickets;
    std::list<Open> connections;
    ~Over();
  };
  void TakeOver(Over* over) QUERN_REQUIRES(mutex_);
  // Whether one more of `all`, of which the principal has `own`, is too many.
  bool IsFull(size_t all, size_t own) const;
  size_t OpenOf(const std::string& principal) const QUERN_REQUIRES(mutex_);
  void Refuse(const std::string& peer, absl::string_view reason);

  const LinkServerOptions options_;
  TlsContexts contexts_;
  LogLimiter refused_;
  Mutex mutex_;
  bool shut_down_ QUERN_GUARDED_BY(mutex_) = false;
  std::map<std::string, Admitted> tickets_ QUERN_GUARDED_BY(mutex_);  // by name
  std::list<Open> open_ QUERN_GUARDED_BY(mutex_);
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_LINK_SERVER_H_
