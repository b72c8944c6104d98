#include "base/endpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/status_matchers.h"

namespace quern {
namespace {

Endpoint Parse(const char* text) {
  const absl::StatusOr<Endpoint> endpoint = ParseEndpoint(text);
  EXPECT_THAT(endpoint, IsOk()) << text;
  return endpoint.value_or(Endpoint());
}

TEST(EndpointTest, KindsAreTold) {
  EXPECT_EQ(Parse("unix:/run/q.sock").kind, Endpoint::Kind::kUnix);
  EXPECT_EQ(Parse("unix:///run/q.sock").path, "/run/q.sock");
  for (const char* text : {"127.0.0.1:7450", "127.1.2.3:0", "localhost:7450", "[::1]:7450"}) {
    EXPECT_EQ(Parse(text).kind, Endpoint::Kind::kLoopback) << text;
  }
  for (const char* text : {"0.0.0.0:7450", "[::]:7450", ":7450", "node1:7450", "127.example.org:7450", "[::127.0.0.1]:1", "10.0.0.1:1"}) {
    EXPECT_EQ(Parse(text).kind, Endpoint::Kind::kRemote) << text;
  }
  EXPECT_EQ(Parse("[fe80::1]:65535").host, "fe80::1");
  EXPECT_EQ(Parse("[fe80::1]:65535").port, 65535);
}

TEST(EndpointTest, OthersAreRefused) {
  for (const char* text :
       {"", "host", "host:", "host:x", "host:65536", "host:-1", "host: 7", "unix:relative", "unix:", "::1:7450", "[::1:7450",
        "http://host:80/", "host name:1", "host\n:1", "[]:1", "[::1 ]:1", "a/b:1", "h\xc3\xb6st:1", "1.2.3.4:99999"}) {
    EXPECT_THAT(ParseEndpoint(text).status(), StatusIs(absl::StatusCode::kInvalidArgument)) << text;
  }
}

TEST(EndpointTest, AServerHasAHostAndAPort) {
  for (const char* text : {"unix:/run/q.sock", "node_1.example-farm.org:1", "10.0.0.1:65535", "[fe80::1%eth0]:7450"}) {
    EXPECT_THAT(ParseServerAddress(text), IsOk()) << text;
  }
  for (const char* text : {":7450", "[::]:0", "node1:0", "node1:65536", "1.2.3.4:99999", "unix:rel", "host name:1"}) {
    EXPECT_THAT(ParseServerAddress(text).status(), StatusIs(absl::StatusCode::kInvalidArgument)) << text;
  }
}

}  // namespace
}  // namespace quern
