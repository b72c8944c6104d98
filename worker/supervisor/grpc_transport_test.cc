#include "worker/supervisor/grpc_transport.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/file.h"
#include "base/mutex.h"
#include "base/status_matchers.h"
#include "worker/supervisor/test_coordinator.h"

namespace quern::worker {
namespace {

using ::testing::HasSubstr;

// The end of one call.
class Outcome {
 public:
  SyncTransport::Done Done() {
    return [this](absl::Status status, quern::v1::SynchronizeResponse response) {
      MutexLock lock(&mutex_);
      response_ = std::move(response);
      status_ = std::move(status);
      ended_.SignalAll();
    };
  }
  absl::Status Wait() {
    MutexLock lock(&mutex_);
    while (!status_.has_value()) ended_.Wait(&mutex_);
    return *status_;
  }
  bool ended() {
    MutexLock lock(&mutex_);
    return status_.has_value();
  }
  quern::v1::SynchronizeResponse response() {
    MutexLock lock(&mutex_);
    return response_;
  }

 private:
  Mutex mutex_;
  CondVar ended_;
  std::optional<absl::Status> status_ QUERN_GUARDED_BY(mutex_);
  quern::v1::SynchronizeResponse response_ QUERN_GUARDED_BY(mutex_);
};

class GrpcTransportTest : public ::testing::Test {
 protected:
  void SetUp() override { QUERN_ASSERT_OK(dir_); }
  std::string socket_path() const { return JoinPath(dir_->path(), "s"); }
  void Serve() {
    server_ = std::make_unique<TestCoordinator>(socket_path());
    ASSERT_TRUE(server_->serving());
  }
  std::unique_ptr<SyncTransport> Connect() { return NewGrpcTransport("unix:" + socket_path()); }
  static quern::v1::SynchronizeRequest Request(bool may_wait) {
    quern::v1::SynchronizeRequest request;
    request.set_worker("w");
    request.set_may_wait(may_wait);
    return request;
  }
  static bool FromW(const quern::v1::SynchronizeRequest& request) { return request.worker() == "w"; }

  absl::StatusOr<TempDir> dir_ = TempDir::Make("grpc_transport");
  std::unique_ptr<TestCoordinator> server_;
};

TEST_F(GrpcTransportTest, CallIsAnswered) {
  Serve();
  quern::v1::DesiredAttempt wanted;
  wanted.mutable_id()->set_attempt(3);
  server_->Want(wanted);
  const std::unique_ptr<SyncTransport> transport = Connect();
  for (int i = 0; i < 3; ++i) {
    Outcome outcome;
    transport->Call(Request(false), absl::Seconds(60), outcome.Done());
    QUERN_EXPECT_OK(outcome.Wait());
    ASSERT_EQ(outcome.response().attempts_size(), 1);
    EXPECT_EQ(outcome.response().attempts(0).id().attempt(), 3u);
  }
}

TEST_F(GrpcTransportTest, SpecAboveGrpcsOwnLimitArrives) {
  Serve();
  quern::v1::DesiredAttempt wanted;
  wanted.mutable_spec()->mutable_write_shard()->set_header(std::string(20 << 20, 'h'));
  server_->Want(wanted);
  const std::unique_ptr<SyncTransport> transport = Connect();
  Outcome outcome;
  transport->Call(Request(false), absl::Seconds(60), outcome.Done());
  QUERN_EXPECT_OK(outcome.Wait());
  EXPECT_EQ(outcome.response().attempts(0).spec().write_shard().header().size(), size_t{20} << 20);
}

TEST_F(GrpcTransportTest, CancelEndsALongPoll) {
  Serve();
  const std::unique_ptr<SyncTransport> transport = Connect();
  Outcome outcome;
  transport->Call(Request(true), absl::Seconds(60), outcome.Done());
  server_->WaitFor(FromW);
  transport->Cancel();
  EXPECT_THAT(outcome.Wait(), StatusIs(absl::StatusCode::kCancelled));
}

TEST_F(GrpcTransportTest, CancelBeforeTheCallIsOnItsWayEndsIt) {
  Serve();
  const std::unique_ptr<SyncTransport> transport = Connect();
  for (int i = 0; i < 20; ++i) {
    Outcome outcome;
    transport->Call(Request(true), absl::Seconds(60), outcome.Done());
    transport->Cancel();
    EXPECT_THAT(outcome.Wait(), StatusIs(absl::StatusCode::kCancelled));
  }
}

TEST_F(GrpcTransportTest, CancelWithoutACallDoesNothing) {
  Serve();
  const std::unique_ptr<SyncTransport> transport = Connect();
  transport->Cancel();
  Outcome outcome;
  transport->Call(Request(false), absl::Seconds(60), outcome.Done());
  QUERN_EXPECT_OK(outcome.Wait());
}

TEST_F(GrpcTransportTest, CallEndsAtItsTimeout) {
  Serve();
  const std::unique_ptr<SyncTransport> transport = Connect();
  Outcome outcome;
  transport->Call(Request(true), absl::Milliseconds(50), outcome.Done());
  EXPECT_THAT(outcome.Wait(), StatusIs(absl::StatusCode::kDeadlineExceeded));
}

TEST_F(GrpcTransportTest, ServersErrorKeepsItsCodeAndMessage) {
  Serve();
  server_->FailWith(grpc::Status(grpc::StatusCode::FAILED_PRECONDITION, "not today"));
  const std::unique_ptr<SyncTransport> transport = Connect();
  Outcome outcome;
  transport->Call(Request(false), absl::Seconds(60), outcome.Done());
  EXPECT_THAT(outcome.Wait(), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("not today")));
}

TEST_F(GrpcTransportTest, ServerThatIsAwayAndComes) {
  const std::unique_ptr<SyncTransport> transport = Connect();
  Outcome away;
  transport->Call(Request(false), absl::Seconds(60), away.Done());
  EXPECT_THAT(away.Wait(), StatusIs(absl::StatusCode::kUnavailable));
  Serve();
  // The very next call waits for the connection.
  Outcome outcome;
  transport->Call(Request(false), absl::Seconds(60), outcome.Done());
  QUERN_EXPECT_OK(outcome.Wait());
}

TEST_F(GrpcTransportTest, CancelEndsTheWaitForAConnection) {
  const std::unique_ptr<SyncTransport> transport = Connect();
  Outcome away;
  transport->Call(Request(false), absl::Seconds(60), away.Done());
  EXPECT_THAT(away.Wait(), StatusIs(absl::StatusCode::kUnavailable));
  Outcome outcome;
  transport->Call(Request(false), absl::Seconds(60), outcome.Done());
  transport->Cancel();
  EXPECT_THAT(outcome.Wait(), StatusIs(absl::StatusCode::kCancelled));
}

TEST_F(GrpcTransportTest, DestructorEndsTheCallThatIsOut) {
  Serve();
  std::unique_ptr<SyncTransport> transport = Connect();
  Outcome outcome;
  transport->Call(Request(true), absl::Seconds(60), outcome.Done());
  server_->WaitFor(FromW);
  transport.reset();
  EXPECT_TRUE(outcome.ended());
}

}  // namespace
}  // namespace quern::worker
