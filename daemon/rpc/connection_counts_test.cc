#include "daemon/rpc/connection_counts.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <set>

#include "absl/strings/str_cat.h"
#include "base/file.h"

namespace quern::daemon {
namespace {

class ConnectionCountsTest : public testing::Test {
 protected:
  void Open(const std::string& peer, int connection) {
    ASSERT_TRUE(counts_.Admits(peer));
    open_.insert(connection);
    counts_.Add(peer, connection);
  }

  ManualClock clock_;
  std::set<int> open_;
  ConnectionCounts counts_{2, &clock_, [this](int connection) { return open_.count(connection) > 0; }};
};

TEST_F(ConnectionCountsTest, EachPeerMayHaveSoMany) {
  Open("a", 10);
  Open("a", 11);
  EXPECT_FALSE(counts_.Admits("a"));
  Open("b", 12);
  Open("b", 13);
  EXPECT_FALSE(counts_.Admits("b"));
}

TEST_F(ConnectionCountsTest, ClosedOnesAreFoundWhenTheyMatter) {
  Open("a", 10);
  Open("a", 11);
  open_.erase(10);
  Open("a", 12);
  EXPECT_FALSE(counts_.Admits("a"));
  // Looked at just now.
  open_.clear();
  EXPECT_FALSE(counts_.Admits("a"));
  clock_.Advance(absl::Seconds(1));
  EXPECT_TRUE(counts_.Admits("a"));
}

TEST_F(ConnectionCountsTest, DescriptorThatIsUsedAgainBelongsToItsNewPeer) {
  Open("a", 10);
  Open("a", 11);
  Open("b", 11);
  Open("a", 12);
  EXPECT_FALSE(counts_.Admits("a"));
  Open("b", 13);
  EXPECT_FALSE(counts_.Admits("b"));
}

TEST(PeerOfConnectionTest, AddressesAndUsers) {
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
  const UniqueFd one(pair[0]), other(pair[1]);
  EXPECT_EQ(PeerOfConnection(one.get()), absl::StrCat("uid:", getuid()));

  // Both ends of a connection to a listener of both families.
  const UniqueFd listener(socket(AF_INET6, SOCK_STREAM, 0));
  sockaddr_in6 any = {};
  any.sin6_family = AF_INET6;
  any.sin6_addr = in6addr_any;
  socklen_t size = sizeof(any);
  if (!listener || bind(listener.get(), reinterpret_cast<sockaddr*>(&any), size) != 0) GTEST_SKIP() << "no IPv6 on this machine";
  ASSERT_EQ(listen(listener.get(), 1), 0);
  ASSERT_EQ(getsockname(listener.get(), reinterpret_cast<sockaddr*>(&any), &size), 0);
  const UniqueFd client(socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = any.sin6_port;
  ASSERT_EQ(connect(client.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  const UniqueFd accepted(accept(listener.get(), nullptr, nullptr));
  EXPECT_EQ(PeerOfConnection(accepted.get()), "127.0.0.1");
  EXPECT_EQ(PeerOfConnection(client.get()), "127.0.0.1");

  const UniqueFd client6(socket(AF_INET6, SOCK_STREAM, 0));
  any.sin6_addr = in6addr_loopback;
  if (connect(client6.get(), reinterpret_cast<sockaddr*>(&any), sizeof(any)) != 0) GTEST_SKIP() << "no IPv6 loopback";
  EXPECT_EQ(PeerOfConnection(client6.get()), "::/64");
}

}  // namespace
}  // namespace quern::daemon
