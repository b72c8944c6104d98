#include "worker/supervisor/grpc_transport.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <utility>

#include "base/channel/await_connected.h"
#include "base/channel/deadline.h"
#include "base/mutex.h"
#include "quern/v1/workers.grpc.pb.h"

namespace quern::worker {
namespace {

// A task's spec with thousands of tensors takes a few MiB; gRPC's own limit is 4 MiB.
constexpr int kMaxMessageSize = 64 << 20;

// How long a call waits for a connection that was lost.
constexpr absl::Duration kConnectPatience = absl::Seconds(2);

// Coordinators take a ping every five seconds.
constexpr int kKeepaliveMs = 10'000;

std::shared_ptr<grpc::Channel> NewChannel(const std::string& server, const ChannelSecurity& security) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageSize);
  arguments.SetMaxSendMessageSize(kMaxMessageSize);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  // A coordinator whose machine or network went away without a word: TCP alone would wait for a quarter of an hour.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // A proxy for web pages is no way to a coordinator.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return grpc::CreateCustomChannel(server, NewChannelCredentials(server, security), arguments);
}

// Calls block on the one thread: the callback API would start a pool of threads for a single call.
class GrpcTransport : public SyncTransport {
 public:
  GrpcTransport(const std::string& server, const ChannelSecurity& security)
      : channel_(NewChannel(server, security)), stub_(quern::v1::Workers::NewStub(channel_)), thread_([this] { Run(); }) {}

  ~GrpcTransport() override {
    {
      MutexLock lock(&mutex_);
      closing_ = true;
      if (call_ != nullptr) call_->Cancel();
      changed_.Signal();
    }
    thread_.join();
  }

  void Call(quern::v1::SynchronizeRequest request, absl::Duration timeout, Done done) override {
    auto call = std::make_unique<PendingCall>();
    call->request = std::move(request);
    call->timeout = timeout;
    call->done = std::move(done);
    call->context.set_deadline(DeadlineIn(timeout));
    MutexLock lock(&mutex_);
    call_ = std::move(call);
    changed_.Signal();
  }

  void Cancel() override {
    MutexLock lock(&mutex_);
    if (call_ != nullptr) call_->Cancel();
  }

 private:
  struct PendingCall {
    void Cancel() {
      cancelled = true;
      context.TryCancel();
    }
    grpc::ClientContext context;
    std::atomic<bool> cancelled = false;
    absl::Duration timeout;
    quern::v1::SynchronizeRequest request;
    Done done;
  };

  void Run() {
    while (true) {
      PendingCall* call;
      {
        MutexLock lock(&mutex_);
        while (call_ == nullptr && !closing_) changed_.Wait(&mutex_);
        if (call_ == nullptr) return;
        call = call_.get();
      }
      if (channel_->GetState(false) == GRPC_CHANNEL_TRANSIENT_FAILURE) {
        AwaitConnected(*channel_, std::min(kConnectPatience, call->timeout), [call] { return !call->cancelled; });
      }
      quern::v1::SynchronizeResponse response;
      const grpc::Status status = stub_->Synchronize(&call->context, call->request, &response);
      Done done = std::move(call->done);
      {
        // Before `done`, which may lead to the next call.
        MutexLock lock(&mutex_);
        call_.reset();
      }
      // The codes are the same numbers.
      done(absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message()), std::move(response));
    }
  }

  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<quern::v1::Workers::Stub> stub_;
  Mutex mutex_;
  CondVar changed_;
  std::unique_ptr<PendingCall> call_ QUERN_GUARDED_BY(mutex_);
  bool closing_ QUERN_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<SyncTransport> NewGrpcTransport(const std::string& server, const ChannelSecurity& security) {
  return std::make_unique<GrpcTransport>(server, security);
}

}  // namespace quern::worker
