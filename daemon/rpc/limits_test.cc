// What one client may take of a server, with real connections and calls.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/status_matchers.h"
#include "daemon/queue/job_store.h"
#include "daemon/rpc/coordinator.h"
#include "daemon/rpc/server.h"
#include "grpcpp/grpcpp.h"
#include "quant/numerics_version.h"
#include "quern/v1/jobs.grpc.pb.h"
#include "quern/v1/workers.grpc.pb.h"

namespace quern::daemon {
namespace {

using testing::HasSubstr;

class LimitsTest : public testing::Test {
 protected:
  void Start(ServerOptions options) {
    CoordinatorOptions coordinator;
    coordinator.store = store_.get();
    coordinator.clock = Clock::Real();
    coordinator.log = options.log = [this](const std::string& line) {
      MutexLock lock(&log_mutex_);
      absl::StrAppend(&log_, line, "\n");
    };
    auto started = Coordinator::Start(std::move(coordinator));
    ASSERT_THAT(started, IsOk());
    coordinator_ = *std::move(started);
    auto server = Server::Start(coordinator_.get(), std::move(options));
    ASSERT_THAT(server, IsOk());
    server_ = *std::move(server);
  }
  void TearDown() override {
    server_.reset();
    coordinator_.reset();
  }
  std::string Log() {
    MutexLock lock(&log_mutex_);
    return log_;
  }

  const TempDir dir_ = TempDir::Make("quern-limits-test").value();
  const std::unique_ptr<JobStore> store_ = NewMemoryJobStore();
  Mutex log_mutex_;
  std::string log_ QUERN_GUARDED_BY(log_mutex_);
  std::unique_ptr<Coordinator> coordinator_;
  std::unique_ptr<Server> server_;
};

class ConnectionLimitsTest : public LimitsTest {
 protected:
  // From `host` of this machine, with the first words of an HTTP/2 client.
  UniqueFd Connect(const char* host) {
    UniqueFd fd = ConnectSilently(host);
    constexpr absl::string_view kOpening("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 24 + 9);
    // One that is refused may be closed already.
    send(fd.get(), kOpening.data(), kOpening.size(), MSG_NOSIGNAL);
    return fd;
  }
  UniqueFd ConnectSilently(const char* host) {
    int port = 0;
    const std::string& address = server_->addresses()[0];
    EXPECT_TRUE(absl::SimpleAtoi(address.substr(address.rfind(':') + 1), &port));
    UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in from = {};
    from.sin_family = AF_INET;
    EXPECT_EQ(inet_pton(AF_INET, host, &from.sin_addr), 1);
    EXPECT_EQ(bind(fd.get(), reinterpret_cast<sockaddr*>(&from), sizeof(from)), 0);
    sockaddr_in to = {};
    to.sin_family = AF_INET;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    to.sin_port = htons(static_cast<uint16_t>(port));
    EXPECT_EQ(connect(fd.get(), reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
    return fd;
  }
  // HTTP/2 begins with a frame of the server's; one that is refused is closed. Waits for either.
  static bool IsServed(const UniqueFd& fd) {
    char byte;
    return recv(fd.get(), &byte, 1, 0) == 1;
  }
};

TEST_F(ConnectionLimitsTest, OneAddressTakesSoManyAndOthersAreServed) {
  ServerOptions options;
  options.addresses = {"127.0.0.1:0"};
  options.limits.connections_per_peer = 2;
  Start(std::move(options));
  UniqueFd first = Connect("127.0.0.2");
  const UniqueFd second = Connect("127.0.0.2");
  EXPECT_TRUE(IsServed(first));
  EXPECT_TRUE(IsServed(second));
  EXPECT_FALSE(IsServed(Connect("127.0.0.2")));
  EXPECT_TRUE(IsServed(Connect("127.0.0.3")));
  EXPECT_THAT(Log(), testing::AllOf(HasSubstr("event=not_accepted"), HasSubstr("there are 2 connections of 127.0.0.2")));
  // One that is closed makes way, once gRPC has noticed.
  first.Reset();
  while (!IsServed(Connect("127.0.0.2"))) {
  }
}

TEST_F(ConnectionLimitsTest, SilentConnectionsAreClosed) {
  ServerOptions options;
  options.addresses = {"127.0.0.1:0"};
  options.limits.handshake = absl::Milliseconds(100);
  Start(std::move(options));
  EXPECT_FALSE(IsServed(ConnectSilently("127.0.0.2")));
  // Also those that begin like the data plane and go no further.
  const UniqueFd half = ConnectSilently("127.0.0.2");
  ASSERT_EQ(send(half.get(), "quern-data", 10, MSG_NOSIGNAL), 10);
  EXPECT_FALSE(IsServed(half));
  EXPECT_TRUE(IsServed(Connect("127.0.0.2")));
}

class CallLimitsTest : public LimitsTest {
 protected:
  void SetUp() override {
    const std::string tokens = JoinPath(dir_.path(), "tokens");
    QUERN_ASSERT_OK(WriteFileDurably(tokens, absl::StrCat("greedy admin ", greedy_, "\nmodest admin ", modest_, "\n")));
    ASSERT_EQ(chmod(tokens.c_str(), 0600), 0);
    ServerOptions options;
    options.addresses = {absl::StrCat("unix:", JoinPath(dir_.path(), "s.sock"))};
    options.token_file = tokens;
    options.limits.calls_per_caller = 2;
    Start(std::move(options));
    channel_ = grpc::CreateChannel(absl::StrCat("unix:", JoinPath(dir_.path(), "s.sock")), grpc::InsecureChannelCredentials());
  }

  grpc::Status List(const std::string& token) {
    grpc::ClientContext context;
    context.AddMetadata("authorization", absl::StrCat("Bearer ", token));
    quern::v1::ListJobsResponse response;
    return quern::v1::Jobs::NewStub(channel_)->ListJobs(&context, {}, &response);
  }

  const std::string greedy_ = std::string(40, 'g');
  const std::string modest_ = std::string(40, 'm');
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(CallLimitsTest, NameOfAWorkerBelongsToTheTokenThatItCameWith) {
  const auto workers = quern::v1::Workers::NewStub(channel_);
  const auto call = [&](const std::string& token, const std::string& incarnation) {
    grpc::ClientContext context;
    context.AddMetadata("authorization", absl::StrCat("Bearer ", token));
    quern::v1::SynchronizeRequest request;
    request.set_worker("node7");
    request.set_incarnation(incarnation);
    request.set_host(absl::StrCat("host of ", incarnation));
    quern::v1::SynchronizeResponse response;
    return workers->Synchronize(&context, request, &response);
  };
  EXPECT_TRUE(call(greedy_, "first").ok());
  const grpc::Status refused = call(modest_, "second");
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_THAT(refused.error_message(), HasSubstr("the name node7 belongs to a worker on host of first"));
  EXPECT_THAT(Log(), HasSubstr("audit event=worker_name_refused worker=node7 who=token:modest"));
  EXPECT_THAT(Log(), HasSubstr("holder=token:greedy"));
  EXPECT_TRUE(call(greedy_, "third").ok()) << "its own successor";
}

TEST_F(CallLimitsTest, OneTokenTakesSoManyCallsAndOthersAreServed) {
  const auto workers = quern::v1::Workers::NewStub(channel_);
  grpc::CompletionQueue queue;
  struct Waiting {
    grpc::ClientContext context;
    quern::v1::SynchronizeResponse response;
    grpc::Status status;
    std::unique_ptr<grpc::ClientAsyncResponseReader<quern::v1::SynchronizeResponse>> reader;
  };
  // Idle workers, whose calls wait for work.
  std::vector<Waiting> waiting(2);
  for (size_t i = 0; i < waiting.size(); ++i) {
    quern::v1::SynchronizeRequest request;
    request.set_worker(absl::StrCat("w", i));
    request.set_incarnation("first");
    request.set_host("host");
    request.set_version("1");
    request.set_numerics_version(quant::kNumericsVersion);
    request.set_slots(1);
    request.set_memory(uint64_t{1} << 30);
    request.set_may_wait(true);
    waiting[i].context.AddMetadata("authorization", absl::StrCat("Bearer ", greedy_));
    waiting[i].reader = workers->AsyncSynchronize(&waiting[i].context, request, &queue);
    waiting[i].reader->Finish(&waiting[i].response, &waiting[i].status, &waiting[i]);
  }
  // Until both are open.
  grpc::Status refused;
  do {
    refused = List(greedy_);
  } while (refused.ok());
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("token:greedy has 2 calls open"));
  EXPECT_TRUE(List(modest_).ok());
  EXPECT_THAT(Log(), testing::AllOf(HasSubstr("event=refused who=token:greedy"), HasSubstr("token:greedy has 2 calls open")));
  for (Waiting& call : waiting) call.context.TryCancel();
  for (size_t i = 0; i < waiting.size(); ++i) {
    void* tag;
    bool ok;
    ASSERT_TRUE(queue.Next(&tag, &ok));
  }
  // Until the server has ended them too.
  while (!List(greedy_).ok()) {
  }
}

}  // namespace
}  // namespace quern::daemon
