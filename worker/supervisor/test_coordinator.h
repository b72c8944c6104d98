// A coordinator for tests: a real gRPC server whose wishes the test states, with long polls that end when the wishes change.
#ifndef QUERN_WORKER_SUPERVISOR_TEST_COORDINATOR_H_
#define QUERN_WORKER_SUPERVISOR_TEST_COORDINATOR_H_

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/mutex.h"
#include "quern/v1/workers.grpc.pb.h"

namespace quern::worker {

class TestCoordinator : public quern::v1::Workers::Service {
 public:
  // Serves on a unix socket; one left by an earlier server is replaced.
  explicit TestCoordinator(const std::string& socket_path) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix:" + socket_path, grpc::InsecureServerCredentials());
    builder.SetMaxReceiveMessageSize(64 << 20);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~TestCoordinator() override { server_->Shutdown(std::chrono::system_clock::now()); }

  bool serving() const { return server_ != nullptr; }

  // Wants `attempt` to run until it ends or Unwant.
  void Want(quern::v1::DesiredAttempt attempt) {
    MutexLock lock(&mutex_);
    wanted_.push_back(std::move(attempt));
    Change();
  }
  void Unwant(uint32_t attempt) {
    MutexLock lock(&mutex_);
    std::erase_if(wanted_, [&](const quern::v1::DesiredAttempt& wanted) { return wanted.id().attempt() == attempt; });
    Change();
  }
  // Fails every call from now on, until `status` is OK.
  void FailWith(grpc::Status status) {
    MutexLock lock(&mutex_);
    fail_with_ = std::move(status);
    Change();
  }
  // Tells every worker to stop from now on.
  void StopWorkers(const std::string& reason) {
    MutexLock lock(&mutex_);
    stop_reason_ = reason;
    Change();
  }
  // Blocks until a request satisfies `wanted`, and returns it.
  quern::v1::SynchronizeRequest WaitFor(const std::function<bool(const quern::v1::SynchronizeRequest&)>& wanted) {
    MutexLock lock(&mutex_);
    while (!wanted(last_)) changed_.Wait(&mutex_);
    return last_;
  }
  // Blocks until a request lists the attempt as ended, and returns how.
  quern::v1::AttemptStatus WaitForEnd(uint32_t attempt) {
    MutexLock lock(&mutex_);
    while (true) {
      for (const quern::v1::AttemptStatus& end : ends_) {
        if (end.id().attempt() == attempt) return end;
      }
      changed_.Wait(&mutex_);
    }
  }
  uint64_t calls() {
    MutexLock lock(&mutex_);
    return calls_;
  }

  grpc::Status Synchronize(grpc::ServerContext* context, const quern::v1::SynchronizeRequest* request,
                           quern::v1::SynchronizeResponse* response) override {
    MutexLock lock(&mutex_);
    ++calls_;
    last_ = *request;
    for (const quern::v1::AttemptStatus& status : request->attempts()) {
      if (status.state() == quern::v1::AttemptStatus::RUNNING) continue;
      ends_.push_back(status);
      *response->add_acknowledged() = status.id();
      std::erase_if(wanted_, [&](const quern::v1::DesiredAttempt& wanted) { return wanted.id().attempt() == status.id().attempt(); });
    }
    changed_.SignalAll();
    const uint64_t change = changes_;
    // The synchronous API tells of a cancellation only when asked.
    while (request->may_wait() && changes_ == change && !context->IsCancelled()) changed_.WaitFor(&mutex_, absl::Milliseconds(5));
    if (!fail_with_.ok()) return fail_with_;
    if (!stop_reason_.empty()) {
      response->set_desired_state(quern::v1::STOP);
      response->set_stop_reason(stop_reason_);
      return grpc::Status::OK;
    }
    for (const quern::v1::DesiredAttempt& wanted : wanted_) *response->add_attempts() = wanted;
    return grpc::Status::OK;
  }

 private:
  void Change() QUERN_REQUIRES(mutex_) {
    ++changes_;
    changed_.SignalAll();
  }

  std::unique_ptr<grpc::Server> server_;
  Mutex mutex_;
  CondVar changed_;
  uint64_t changes_ QUERN_GUARDED_BY(mutex_) = 0;
  uint64_t calls_ QUERN_GUARDED_BY(mutex_) = 0;
  std::vector<quern::v1::DesiredAttempt> wanted_ QUERN_GUARDED_BY(mutex_);
  std::string stop_reason_ QUERN_GUARDED_BY(mutex_);
  grpc::Status fail_with_ QUERN_GUARDED_BY(mutex_);
  quern::v1::SynchronizeRequest last_ QUERN_GUARDED_BY(mutex_);
  std::vector<quern::v1::AttemptStatus> ends_ QUERN_GUARDED_BY(mutex_);
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_SUPERVISOR_TEST_COORDINATOR_H_
