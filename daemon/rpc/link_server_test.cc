// Tickets: who gets one, how long it is good, and how many there are.
#include "daemon/rpc/link_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/link/frame.h"
#include "base/link/ticket.h"
#include "base/mutex.h"
#include "base/status_matchers.h"

namespace quern::daemon {
namespace {

using testing::HasSubstr;

class LinkServerTest : public testing::Test {
 protected:
  LinkServerOptions Options() {
    LinkServerOptions options;
    options.most = 8;
    options.clock = &clock_;
    options.log = [this](const std::string& line) {
      MutexLock lock(&mutex_);
      log_ += line + "\n";
    };
    return options;
  }
  std::string Log() {
    MutexLock lock(&mutex_);
    return log_;
  }
  // A connection that shows a ticket after its greeting was read.
  static std::unique_ptr<LinkConnection> Greet(LinkServer& server, const std::string& ticket) {
    int fds[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    auto client = std::make_unique<LinkConnection>(UniqueFd(fds[0]));
    server.Take(UniqueFd(fds[1]), NameOfTicket(ticket), /*speaks_tls=*/false, "somebody");
    return client;
  }
  static std::unique_ptr<LinkConnection> Connect(LinkServer& server, const std::string& ticket) {
    std::unique_ptr<LinkConnection> client = Greet(server, ticket);
    client->Write(ticket.data(), ticket.size()).IgnoreError();
    return client;
  }
  static LinkServer::Serve Says(const std::string& word) {
    return [word](LinkConnection& connection) { return connection.Write(word.data(), word.size()); };
  }
  // What comes before the last frame; nothing of one that is refused.
  static std::string Hear(LinkConnection& connection, size_t size) {
    std::string word(size, '\0');
    return connection.Read(word.data(), size).value_or(false) ? word : "";
  }

  ManualClock clock_;
  Mutex mutex_;
  std::string log_ QUERN_GUARDED_BY(mutex_);
};

TEST_F(LinkServerTest, TicketIsGoodOnceAndForAWhile) {
  LinkServer server(Options());
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string first, server.Admit("worker", Says("one")));
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string second, server.Admit("worker", Says("two")));
  const auto one = Connect(server, first);
  EXPECT_EQ(Hear(*one, 3), "one");
  EXPECT_EQ(Hear(*Connect(server, first), 3), "");
  clock_.Advance(absl::Seconds(31));
  EXPECT_EQ(Hear(*Connect(server, second), 3), "");
  EXPECT_THAT(Log(), HasSubstr("audit event=data_connection_refused from=somebody reason=\"there is no such ticket\""));
}

TEST_F(LinkServerTest, EndSaysHowItWent) {
  LinkServer server(Options());
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string ticket,
                             server.Admit("worker", [](LinkConnection&) { return absl::DataLossError("the disk is bad"); }));
  const auto client = Connect(server, ticket);
  QUERN_ASSERT_OK_AND_ASSIGN(const auto end, ReadFrameHead(*client));
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->kind, LinkFrame::Kind::kEnd);
  EXPECT_THAT(Hear(*client, end->size), HasSubstr("the disk is bad"));
  QUERN_ASSERT_OK_AND_ASSIGN(const auto more, ReadFrameHead(*client));
  EXPECT_FALSE(more.has_value());
}

TEST_F(LinkServerTest, OnePrincipalLeavesSomeToOthers) {
  LinkServer server(Options());
  std::vector<std::string> tickets;
  for (int i = 0; i < 6; ++i) {
    QUERN_ASSERT_OK_AND_ASSIGN(tickets.emplace_back(), server.Admit("greedy", Says("x")));
  }
  EXPECT_THAT(server.Admit("greedy", Says("x")).status(), StatusIs(absl::StatusCode::kResourceExhausted));
  QUERN_EXPECT_OK(server.Admit("modest", Says("x")).status());
  QUERN_EXPECT_OK(server.Admit("modest", Says("x")).status());
  EXPECT_THAT(server.Admit("modest", Says("x")).status(), StatusIs(absl::StatusCode::kResourceExhausted)) << "there are eight";
  EXPECT_EQ(Hear(*Connect(server, tickets[0]), 1), "x");
  QUERN_EXPECT_OK(server.Admit("greedy", Says("x")).status());
  clock_.Advance(absl::Seconds(31));
  QUERN_EXPECT_OK(server.Admit("greedy", Says("x")).status());
}

TEST_F(LinkServerTest, ConnectionsThatAreOverMakeWay) {
  LinkServerOptions options = Options();
  options.most = 1;
  LinkServer server(std::move(options));
  for (int i = 0; i < 5; ++i) {
    QUERN_ASSERT_OK_AND_ASSIGN(const std::string ticket, server.Admit("worker", Says("x")));
    const auto client = Connect(server, ticket);
    EXPECT_EQ(Hear(*client, 1), "x");
    client->Shutdown();
    while (server.open_connections() > 0) std::this_thread::yield();
  }
}

TEST_F(LinkServerTest, OneTicketTakesNoMoreConnectionsThanItsPrincipalMayHave) {
  LinkServerOptions options = Options();
  options.most = 4;
  LinkServer server(std::move(options));
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string ticket, server.Admit("greedy", Says("x")));
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string other, server.Admit("modest", Says("y")));
  std::vector<std::unique_ptr<LinkConnection>> silent;
  for (int i = 0; i < 6; ++i) silent.push_back(Greet(server, ticket));
  EXPECT_EQ(server.open_connections(), 3);
  EXPECT_EQ(Hear(*Connect(server, other), 1), "y");
}

TEST_F(LinkServerTest, ShutdownEndsConnectionsAndAdmitsNobody) {
  LinkServer server(Options());
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string ticket, server.Admit("worker", [](LinkConnection& connection) {
    char byte = 'r';
    absl::Status status = connection.Write(&byte, 1);
    return status.ok() ? connection.Read(&byte, 1).status() : status;
  }));
  QUERN_ASSERT_OK_AND_ASSIGN(const std::string unused, server.Admit("worker", Says("x")));
  const auto client = Connect(server, ticket);
  EXPECT_EQ(Hear(*client, 1), "r");
  EXPECT_EQ(server.open_connections(), 1);
  server.Shutdown();
  EXPECT_EQ(Hear(*client, 1), "");
  EXPECT_EQ(Hear(*Connect(server, unused), 1), "");
  EXPECT_THAT(server.Admit("worker", Says("x")).status(), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_EQ(server.open_connections(), 0);
}

}  // namespace
}  // namespace quern::daemon
