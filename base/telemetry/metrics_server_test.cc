#include "base/telemetry/metrics_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace quern {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

using Kind = MetricFamily::Kind;

// The whole answer of a server on this machine.
std::string Get(const std::string& address, const std::string& path) {
  int port = 0;
  EXPECT_TRUE(absl::SimpleAtoi(address.substr(address.rfind(':') + 1), &port)) << address;
  const UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in to = {};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(port));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd.get(), reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0) << address;
  const std::string request = absl::StrCat("GET ", path, " HTTP/1.0\r\n\r\n");
  EXPECT_EQ(write(fd.get(), request.data(), request.size()), static_cast<ssize_t>(request.size()));
  std::string answer;
  char part[4096];
  ssize_t got = 0;
  while ((got = read(fd.get(), part, sizeof(part))) > 0) answer.append(part, static_cast<size_t>(got));
  return answer;
}

MetricsServer::Health Healthy() {
  return {.live = [] { return absl::OkStatus(); }, .ready = [] { return absl::OkStatus(); }};
}

std::vector<MetricFamily> Some() {
  std::vector<MetricFamily> families;
  families.emplace_back(Kind::kCounter, "quern_a_total", "What a is").Add(3, {{"reason", "a \"b\"\n"}}).Add(4, {{"reason", "c"}});
  families.emplace_back(Kind::kGauge, "quern_b", "What b is").Add(0.5);
  Histogram histogram({1, 2});
  for (const double value : {0.5, 1.5, 5.0}) histogram.Observe(value);
  families.emplace_back(Kind::kHistogram, "quern_c_seconds", "What c is").Add(histogram.Read());
  families.emplace_back(Kind::kGauge, "quern_none", "Has no sample now");
  return families;
}

TEST(MetricsServer, ServesWhatIsCollectedInPrometheusText) {
  const auto server = MetricsServer::Start("127.0.0.1:0", Some, Healthy());
  QUERN_ASSERT_OK(server.status());
  EXPECT_THAT((*server)->address(), AllOf(StartsWith("127.0.0.1:"), Not("127.0.0.1:0")));
  const std::string answer = Get((*server)->address(), "/metrics");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200"));
  for (const char* line :
       {"# HELP quern_a_total What a is\n", "# TYPE quern_a_total counter\n", "quern_a_total{reason=\"a \\\"b\\\"\\n\"} 3\n",
        "quern_a_total{reason=\"c\"} 4\n", "# TYPE quern_b gauge\nquern_b 0.5\n", "# TYPE quern_c_seconds histogram\n",
        "quern_c_seconds_count 3\n", "quern_c_seconds_sum 7\n", "quern_c_seconds_bucket{le=\"1\"} 1\n",
        "quern_c_seconds_bucket{le=\"2\"} 2\n", "quern_c_seconds_bucket{le=\"+Inf\"} 3\n", "# TYPE quern_none gauge\n"}) {
    EXPECT_THAT(answer, HasSubstr(line));
  }
  EXPECT_THAT(Get((*server)->address(), "/etc/passwd"), HasSubstr(" 404 Not Found\r\n"));
}

TEST(MetricsServer, HealthIsWhatIsFoundAtEachRequest) {
  absl::Status live, ready = absl::UnavailableError("not yet");
  const auto server = MetricsServer::Start("127.0.0.1:0", Some, {.live = [&live] { return live; }, .ready = [&ready] { return ready; }});
  QUERN_ASSERT_OK(server.status());
  const std::string& address = (*server)->address();
  EXPECT_THAT(Get(address, "/healthz"), AllOf(StartsWith("HTTP/1.1 200 OK\r\n"), EndsWith("\r\n\r\nok\n")));
  EXPECT_THAT(Get(address, "/readyz"), AllOf(StartsWith("HTTP/1.1 503 "), EndsWith("\r\n\r\nnot yet\n")));
  live = absl::InternalError("stuck");
  ready = absl::OkStatus();
  EXPECT_THAT(Get(address, "/healthz"), AllOf(StartsWith("HTTP/1.1 503 "), EndsWith("stuck\n")));
  EXPECT_THAT(Get(address, "/readyz"), StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(Get(address, "/"), HasSubstr(" 404 Not Found\r\n"));
}

TEST(MetricsServer, SaysWhenOthersCanReadIt) {
  const auto here = MetricsServer::Start("127.0.0.1:0", Some, Healthy());
  QUERN_ASSERT_OK(here.status());
  EXPECT_EQ((*here)->Describe(), absl::StrCat("metrics on http://", (*here)->address(), "/metrics"));
  for (const char* address : {"0.0.0.0:0", ":0"}) {
    const auto everywhere = MetricsServer::Start(address, Some, Healthy());
    QUERN_ASSERT_OK(everywhere.status());
    EXPECT_THAT((*everywhere)->Describe(), HasSubstr("other machines can read them"));
    EXPECT_THAT(Get((*everywhere)->address(), "/metrics"), HasSubstr("quern_b 0.5\n"));
  }
}

TEST(MetricsServer, EachRequestAsksAnew) {
  int asked = 0;
  const auto server = MetricsServer::Start(
      "localhost:0",
      [&asked] {
        std::vector<MetricFamily> families;
        families.emplace_back(Kind::kGauge, "quern_asked", "").Add(++asked);
        return families;
      },
      Healthy());
  QUERN_ASSERT_OK(server.status());
  EXPECT_THAT(Get((*server)->address(), "/metrics"), HasSubstr("quern_asked 1\n"));
  EXPECT_THAT(Get((*server)->address(), "/metrics"), HasSubstr("quern_asked 2\n"));
}

TEST(MetricsServer, AddressesThatCannotBeHadAreToldWithTheReason) {
  const auto first = MetricsServer::Start("127.0.0.1:0", Some, Healthy());
  QUERN_ASSERT_OK(first.status());
  const auto second = MetricsServer::Start((*first)->address(), Some, Healthy());
  EXPECT_FALSE(second.ok());
  EXPECT_THAT(std::string(second.status().message()), AllOf(HasSubstr((*first)->address()), HasSubstr("Address already in use")));
  EXPECT_THAT(std::string(MetricsServer::Start("192.0.2.1:0", Some, Healthy()).status().message()), HasSubstr("192.0.2.1:0"));
  EXPECT_THAT(std::string(MetricsServer::Start("unix:/x.sock", Some, Healthy()).status().message()), HasSubstr("host:port"));
  EXPECT_FALSE(ParseMetricsAddress("9450").ok());
  EXPECT_FALSE(ParseMetricsAddress("").ok());
}

}  // namespace
}  // namespace quern
