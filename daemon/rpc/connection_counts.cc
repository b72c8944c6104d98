#include "daemon/rpc/connection_counts.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace quern::daemon {
namespace {

// To look at a few thousand descriptors takes less than a millisecond; a flood is not to cost that for each of its connections.
constexpr absl::Duration kRecount = absl::Milliseconds(50);
constexpr size_t kPrefixBytes = 8;

std::string Text(int family, const void* address) {
  char text[INET6_ADDRSTRLEN] = "";
  return inet_ntop(family, address, text, sizeof(text)) != nullptr ? text : "unknown";
}

}  // namespace

std::string PeerOfConnection(int connection) {
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  if (getpeername(connection, reinterpret_cast<sockaddr*>(&address), &size) != 0) return "unknown";
  if (address.ss_family == AF_INET) return Text(AF_INET, &reinterpret_cast<const sockaddr_in&>(address).sin_addr);
  if (address.ss_family == AF_INET6) {
    in6_addr ip = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
    if (IN6_IS_ADDR_V4MAPPED(&ip)) return Text(AF_INET, ip.s6_addr + 12);
    memset(ip.s6_addr + kPrefixBytes, 0, sizeof(ip.s6_addr) - kPrefixBytes);
    return absl::StrCat(Text(AF_INET6, &ip), "/64");
  }
  ucred user = {};
  size = sizeof(user);
  if (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &user, &size) != 0) return "unknown";
  return absl::StrCat("uid:", user.uid);
}

ConnectionCounts::ConnectionCounts(size_t most, Clock* clock, std::function<bool(int)> is_open)
    : most_(most), clock_(clock), is_open_(std::move(is_open)) {}

bool ConnectionCounts::Admits(const std::string& name) {
  const auto found = peers_.find(name);
  if (found == peers_.end()) return most_ > 0;
  Peer& peer = found->second;
  if (peer.connections.size() < most_) return true;
  const absl::Duration now = clock_->Monotonic();
  if (now - peer.looked_at < kRecount) return false;
  peer.looked_at = now;
  const std::vector<int> connections(peer.connections.begin(), peer.connections.end());
  size_t left = connections.size();
  for (const int connection : connections) {
    if (is_open_(connection)) continue;
    Remove(connection);  // the last one takes its peer along
    --left;
  }
  return left < most_;
}

void ConnectionCounts::Add(const std::string& peer, int connection) {
  Remove(connection);
  owners_[connection] = peer;
  peers_[peer].connections.insert(connection);
}

void ConnectionCounts::Remove(int connection) {
  const auto owner = owners_.find(connection);
  if (owner == owners_.end()) return;
  const auto peer = peers_.find(owner->second);
  peer->second.connections.erase(connection);
  if (peer->second.connections.empty()) peers_.erase(peer);
  owners_.erase(owner);
}

}  // namespace quern::daemon
