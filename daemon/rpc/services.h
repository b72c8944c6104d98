// The gRPC services, over the callback API: a call that waits holds no thread.
#ifndef QUERN_DAEMON_RPC_SERVICES_H_
#define QUERN_DAEMON_RPC_SERVICES_H_

#include <atomic>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "base/metrics.h"
#include "base/mutex.h"
#include "daemon/rpc/coordinator.h"
#include "daemon/rpc/stalled_writes.h"
#include "daemon/rpc/thread_pool.h"
#include "quern/v1/jobs.grpc.pb.h"
#include "quern/v1/workers.grpc.pb.h"

namespace quern::daemon {

// What streams of answers may hold.
struct StreamLimits {
  absl::Duration stalled = absl::Minutes(1);  // a client that takes nothing for so long has its call cancelled
  int plans = 16;                             // PlanJob calls at a time: each holds a whole plan
};

class JobsService : public quern::v1::Jobs::CallbackService {
 public:
  explicit JobsService(Coordinator* coordinator, StreamLimits limits = {});
  ~JobsService() override;

  // Ends the streams of WatchJob with UNAVAILABLE.
  void Shutdown();

  grpc::ServerUnaryReactor* CreateJob(grpc::CallbackServerContext*, const quern::v1::CreateJobRequest*, quern::v1::Job*) override;
  grpc::ServerUnaryReactor* GetJob(grpc::CallbackServerContext*, const quern::v1::GetJobRequest*, quern::v1::Job*) override;
  grpc::ServerUnaryReactor* ListJobs(grpc::CallbackServerContext*, const quern::v1::ListJobsRequest*,
                                     quern::v1::ListJobsResponse*) override;
  grpc::ServerWriteReactor<quern::v1::Job>* WatchJob(grpc::CallbackServerContext*, const quern::v1::WatchJobRequest*) override;
  grpc::ServerUnaryReactor* CancelJob(grpc::CallbackServerContext*, const quern::v1::CancelJobRequest*, quern::v1::Job*) override;
  grpc::ServerUnaryReactor* PauseJob(grpc::CallbackServerContext*, const quern::v1::PauseJobRequest*, quern::v1::Job*) override;
  grpc::ServerUnaryReactor* ResumeJob(grpc::CallbackServerContext*, const quern::v1::ResumeJobRequest*, quern::v1::Job*) override;
  grpc::ServerUnaryReactor* RetryJob(grpc::CallbackServerContext*, const quern::v1::RetryJobRequest*, quern::v1::Job*) override;
  grpc::ServerUnaryReactor* DeleteJob(grpc::CallbackServerContext*, const quern::v1::DeleteJobRequest*,
                                      quern::v1::DeleteJobResponse*) override;
  grpc::ServerUnaryReactor* ListTasks(grpc::CallbackServerContext*, const quern::v1::ListTasksRequest*,
                                      quern::v1::ListTasksResponse*) override;
  grpc::ServerUnaryReactor* ListWorkers(grpc::CallbackServerContext*, const quern::v1::ListWorkersRequest*,
                                        quern::v1::ListWorkersResponse*) override;
  grpc::ServerUnaryReactor* CordonWorker(grpc::CallbackServerContext*, const quern::v1::CordonWorkerRequest*, quern::v1::Worker*) override;
  grpc::ServerUnaryReactor* UncordonWorker(grpc::CallbackServerContext*, const quern::v1::UncordonWorkerRequest*,
                                           quern::v1::Worker*) override;
  grpc::ServerUnaryReactor* DrainWorker(grpc::CallbackServerContext*, const quern::v1::DrainWorkerRequest*, quern::v1::Worker*) override;
  grpc::ServerWriteReactor<quern::v1::PlanJobResponse>* PlanJob(grpc::CallbackServerContext*, const quern::v1::PlanJobRequest*) override;
  grpc::ServerUnaryReactor* InspectCheckpoint(grpc::CallbackServerContext*, const quern::v1::InspectCheckpointRequest*,
                                              quern::v1::InspectCheckpointResponse*) override;

 private:
  class Watcher;
  class PlanCall;
  void Remove(Watcher* watcher);
  void Tick();

  Coordinator* const coordinator_;
  const StreamLimits limits_;
  StalledWrites stalled_writes_;
  std::atomic<int> plans_{0};
  Mutex mutex_;
  std::set<Watcher*> watchers_ QUERN_GUARDED_BY(mutex_);
  bool shut_down_ QUERN_GUARDED_BY(mutex_) = false;
  std::unique_ptr<Ticker> ticker_;
};

class WorkersService : public quern::v1::Workers::CallbackService {
 public:
  // `principal_of`: as Guard::PrincipalOf.
  WorkersService(JobQueue* queue, std::function<std::string(grpc::ServerContextBase*)> principal_of)
      : queue_(queue), principal_of_(std::move(principal_of)) {}
  grpc::ServerUnaryReactor* Synchronize(grpc::CallbackServerContext*, const quern::v1::SynchronizeRequest*,
                                        quern::v1::SynchronizeResponse*) override;

  // How long calls took: those that may wait for news (long polls), and the others.
  const Histogram& seconds(bool may_wait) const { return may_wait ? waiting_seconds_ : prompt_seconds_; }

 private:
  JobQueue* const queue_;
  const std::function<std::string(grpc::ServerContextBase*)> principal_of_;
  Histogram waiting_seconds_{Histogram::Exponential(0.0001, 2, 20)};
  Histogram prompt_seconds_{Histogram::Exponential(0.0001, 2, 20)};
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_SERVICES_H_
