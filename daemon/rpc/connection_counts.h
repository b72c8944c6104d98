// How many connections each peer has, although nobody says when one is closed: gRPC owns them.
#ifndef QUERN_DAEMON_RPC_CONNECTION_COUNTS_H_
#define QUERN_DAEMON_RPC_CONNECTION_COUNTS_H_

#include <functional>
#include <map>
#include <set>
#include <string>

#include "absl/time/time.h"
#include "base/clock.h"

namespace quern::daemon {

// Who is at the other end of a connected socket, as far as limits are concerned: an IPv4 address, the first 64 bits of an IPv6 address (a
// client has all of the rest), or "uid:N" at a unix socket.
std::string PeerOfConnection(int connection);

// Not thread-safe.
class ConnectionCounts {
 public:
  // `is_open` says whether a descriptor that was added is in use still.
  ConnectionCounts(size_t most, Clock* clock, std::function<bool(int)> is_open);

  // Whether `peer` may have one more. Connections that are closed are found when it has as many as it may have, and not at every call.
  bool Admits(const std::string& peer);
  // Descriptors are used again: one that is known has been closed.
  void Add(const std::string& peer, int connection);

  size_t most() const { return most_; }

 private:
  struct Peer {
    std::set<int> connections;
    absl::Duration looked_at = -absl::InfiniteDuration();
  };
  void Remove(int connection);

  const size_t most_;
  Clock* const clock_;
  const std::function<bool(int)> is_open_;
  std::map<std::string, Peer> peers_;
  std::map<int, std::string> owners_;
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_CONNECTION_COUNTS_H_
