#include "worker/supervisor/grpc_transport.h"

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "base/mutex.h"
#include "quern/v1/workers.grpc.pb.h"

namespace quern::worker {
namespace {

// A task's spec with thousands of tensors takes a few MiB; gRPC's own limit is 4 MiB.
constexpr int kMaxMessageSize = 64 << 20;

std::shared_ptr<grpc::Channel> NewChannel(const std::string& server, const ChannelSecurity& security) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageSize);
  arguments.SetMaxSendMessageSize(kMaxMessageSize);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  // A proxy for web pages is no way to a coordinator.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return grpc::CreateCustomChannel(server, NewChannelCredentials(server, security), arguments);
}

// Calls block on the one thread: the callback API would start a pool of threads for a single call.
class GrpcTransport : public SyncTransport {
 public:
  GrpcTransport(const std::string& server, const ChannelSecurity& security)
      : stub_(quern::v1::Workers::NewStub(NewChannel(server, security))), thread_([this] { Run(); }) {}

  ~GrpcTransport() override {
    {
      MutexLock lock(&mutex_);
      closing_ = true;
      if (call_ != nullptr) call_->context.TryCancel();
      changed_.Signal();
    }
    thread_.join();
  }

  void Call(quern::v1::SynchronizeRequest request, absl::Duration timeout, Done done) override {
    auto call = std::make_unique<PendingCall>();
    call->request = std::move(request);
    call->done = std::move(done);
    call->context.set_deadline(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(timeout));
    MutexLock lock(&mutex_);
    call_ = std::move(call);
    changed_.Signal();
  }

  void Cancel() override {
    MutexLock lock(&mutex_);
    if (call_ != nullptr) call_->context.TryCancel();
  }

 private:
  struct PendingCall {
    grpc::ClientContext context;
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
