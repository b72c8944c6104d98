#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/text_check.h"
#include "daemon/queue/names.h"
#include "daemon/rpc/services.h"
#include "daemon/rpc/status.h"

namespace quern::daemon {
namespace {

using quern::v1::Job;

constexpr int kDefaultPage = 50;
constexpr int kLargestPage = 1000;
constexpr int kFatesPerMessage = 1000;
constexpr absl::Duration kWatchTick = absl::Milliseconds(50);

int PageSize(int asked) { return asked <= 0 ? kDefaultPage : std::min(asked, kLargestPage); }

// Page tokens are the number of the last thing shown.
absl::StatusOr<uint64_t> ParsePageToken(const std::string& token) {
  uint64_t value = 0;
  if (token.empty() || absl::SimpleAtoi(token, &value)) return value;
  return absl::InvalidArgumentError(absl::StrCat("\"", token, "\" is no page token of this call"));
}

// Answers a unary call with a job.
JobQueue::JobCallback Answer(grpc::ServerUnaryReactor* reactor, Job* response) {
  return [reactor, response](absl::StatusOr<Job> job) {
    if (job.ok()) *response = *std::move(job);
    reactor->Finish(ToGrpcStatus(job.status()));
  };
}

// Calls `act` with the number of the job that a request names.
template <typename Act>
grpc::ServerUnaryReactor* WithJob(grpc::CallbackServerContext* context, const std::string& name, Act act) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  const absl::StatusOr<uint64_t> job = ParseJobName(name);
  if (job.ok()) {
    act(*job, reactor);
  } else {
    reactor->Finish(ToGrpcStatus(job.status()));
  }
  return reactor;
}

}  // namespace

// A stream of WatchJob. Tick looks whether there is news; one write is under way at a time.
class JobsService::Watcher : public grpc::ServerWriteReactor<Job> {
 public:
  Watcher(JobsService* service, grpc::CallbackServerContext* context, uint64_t job, absl::Duration interval)
      : service_(service), job_(job), interval_(interval), stream_(&service->stalled_writes_, context) {}

  void Tick(absl::Duration now) {
    {
      MutexLock lock(&mutex_);
      if (busy_ || finished_ || (wrote_ && now - last_write_ < interval_)) return;
      if (wrote_ && service_->coordinator_->queue()->Revision(job_) == last_revision_) return;
      busy_ = true;
      last_write_ = now;
    }
    service_->coordinator_->queue()->GetJob(job_, [this](absl::StatusOr<Job> job) { Send(std::move(job)); });
  }

  void Stop(const absl::Status& status) {
    MutexLock lock(&mutex_);
    stop_ = status;
    if (!busy_) FinishOnce(status);
  }

  void OnWriteDone(bool ok) override {
    stream_.Ended();
    MutexLock lock(&mutex_);
    busy_ = false;
    if (!ok) {
      FinishOnce(absl::CancelledError("the client is gone"));
    } else if (!stop_.ok()) {
      FinishOnce(stop_);
    } else if (ended_) {
      FinishOnce(absl::OkStatus());
    }
  }
  void OnCancel() override { Stop(absl::CancelledError("the client is gone")); }
  void OnDone() override {
    service_->Remove(this);
    // Whoever finished the call may still hold it.
    { MutexLock lock(&mutex_); }
    delete this;
  }

 private:
  void Send(absl::StatusOr<Job> job) {
    MutexLock lock(&mutex_);
    if (!job.ok() || !stop_.ok()) {
      busy_ = false;
      FinishOnce(!stop_.ok() ? stop_ : job.status());
      return;
    }
    message_ = *std::move(job);
    wrote_ = true;
    last_revision_ = message_.revision();
    ended_ = message_.state() == Job::SUCCEEDED || message_.state() == Job::FAILED || message_.state() == Job::CANCELLED;
    stream_.Began();
    StartWrite(&message_);
  }
  void FinishOnce(const absl::Status& status) QUERN_REQUIRES(mutex_) {
    if (finished_) return;
    finished_ = true;
    Finish(ToGrpcStatus(status));
  }

  JobsService* const service_;
  const uint64_t job_;
  const absl::Duration interval_;
  StalledWrites::Stream stream_;
  Mutex mutex_;
  bool busy_ QUERN_GUARDED_BY(mutex_) = false;  // a snapshot or a write is under way
  bool wrote_ QUERN_GUARDED_BY(mutex_) = false;
  bool ended_ QUERN_GUARDED_BY(mutex_) = false;
  bool finished_ QUERN_GUARDED_BY(mutex_) = false;
  absl::Status stop_ QUERN_GUARDED_BY(mutex_);
  absl::Duration last_write_ QUERN_GUARDED_BY(mutex_);
  uint64_t last_revision_ QUERN_GUARDED_BY(mutex_) = 0;
  Job message_ QUERN_GUARDED_BY(mutex_);
};

JobsService::JobsService(Coordinator* coordinator, StreamLimits limits)
    : coordinator_(coordinator), limits_(limits), stalled_writes_(Clock::Real(), limits.stalled) {
  ticker_ = std::make_unique<Ticker>(kWatchTick, [this] { Tick(); });
}

JobsService::~JobsService() { ticker_.reset(); }

void JobsService::Tick() {
  stalled_writes_.Tick();
  const absl::Duration now = Clock::Real()->Monotonic();
  // Under the mutex: a watcher leaves the set before it is deleted.
  MutexLock lock(&mutex_);
  for (Watcher* watcher : watchers_) watcher->Tick(now);
}

void JobsService::Remove(Watcher* watcher) {
  MutexLock lock(&mutex_);
  watchers_.erase(watcher);
}

void JobsService::Shutdown() {
  MutexLock lock(&mutex_);
  shut_down_ = true;
  for (Watcher* watcher : watchers_) watcher->Stop(absl::UnavailableError("the coordinator is stopping"));
}

grpc::ServerUnaryReactor* JobsService::CreateJob(grpc::CallbackServerContext* context, const quern::v1::CreateJobRequest* request,
                                                 Job* response) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  coordinator_->CreateJob(*request, Answer(reactor, response));
  return reactor;
}

grpc::ServerUnaryReactor* JobsService::GetJob(grpc::CallbackServerContext* context, const quern::v1::GetJobRequest* request,
                                              Job* response) {
  return WithJob(context, request->name(),
                 [&](uint64_t job, grpc::ServerUnaryReactor* reactor) { coordinator_->GetJob(job, Answer(reactor, response)); });
}

grpc::ServerUnaryReactor* JobsService::ListJobs(grpc::CallbackServerContext* context, const quern::v1::ListJobsRequest* request,
                                                quern::v1::ListJobsResponse* response) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  const absl::StatusOr<uint64_t> after = ParsePageToken(request->page_token());
  if (!after.ok()) {
    reactor->Finish(ToGrpcStatus(after.status()));
    return reactor;
  }
  const int count = PageSize(request->page_size());
  coordinator_->queue()->ListJobs(*after, count + 1, [reactor, response, count](absl::StatusOr<std::vector<Job>> jobs) {
    if (jobs.ok()) {
      if (static_cast<int>(jobs->size()) > count) {
        jobs->pop_back();
        response->set_next_page_token(absl::StrCat(ParseJobName(jobs->back().name()).value_or(0)));
      }
      for (Job& job : *jobs) *response->add_jobs() = std::move(job);
    }
    reactor->Finish(ToGrpcStatus(jobs.status()));
  });
  return reactor;
}

grpc::ServerWriteReactor<Job>* JobsService::WatchJob(grpc::CallbackServerContext* context, const quern::v1::WatchJobRequest* request) {
  const absl::StatusOr<uint64_t> job = ParseJobName(request->name());
  const absl::Duration interval = absl::Seconds(request->interval().seconds()) + absl::Nanoseconds(request->interval().nanos());
  auto* const watcher = new Watcher(this, context, job.value_or(0), interval);
  MutexLock lock(&mutex_);
  watchers_.insert(watcher);
  if (!job.ok()) {
    watcher->Stop(job.status());
  } else if (shut_down_) {
    watcher->Stop(absl::UnavailableError("the coordinator is stopping"));
  }
  return watcher;
}

grpc::ServerUnaryReactor* JobsService::CancelJob(grpc::CallbackServerContext* context, const quern::v1::CancelJobRequest* request,
                                                 Job* response) {
  return WithJob(context, request->name(), [&](uint64_t job, grpc::ServerUnaryReactor* reactor) {
    coordinator_->queue()->CancelJob(job, Answer(reactor, response));
  });
}

grpc::ServerUnaryReactor* JobsService::PauseJob(grpc::CallbackServerContext* context, const quern::v1::PauseJobRequest* request,
                                                Job* response) {
  return WithJob(context, request->name(),
                 [&](uint64_t job, grpc::ServerUnaryReactor* reactor) { coordinator_->queue()->PauseJob(job, Answer(reactor, response)); });
}

grpc::ServerUnaryReactor* JobsService::ResumeJob(grpc::CallbackServerContext* context, const quern::v1::ResumeJobRequest* request,
                                                 Job* response) {
  return WithJob(context, request->name(),
                 [&](uint64_t job, grpc::ServerUnaryReactor* reactor) { coordinator_->ResumeJob(job, Answer(reactor, response)); });
}

grpc::ServerUnaryReactor* JobsService::RetryJob(grpc::CallbackServerContext* context, const quern::v1::RetryJobRequest* request,
                                                Job* response) {
  return WithJob(context, request->name(),
                 [&](uint64_t job, grpc::ServerUnaryReactor* reactor) { coordinator_->ResumeJob(job, Answer(reactor, response)); });
}

grpc::ServerUnaryReactor* JobsService::DeleteJob(grpc::CallbackServerContext* context, const quern::v1::DeleteJobRequest* request,
                                                 quern::v1::DeleteJobResponse*) {
  return WithJob(context, request->name(), [&](uint64_t job, grpc::ServerUnaryReactor* reactor) {
    coordinator_->DeleteJob(job, [reactor](absl::Status status) { reactor->Finish(ToGrpcStatus(status)); });
  });
}

grpc::ServerUnaryReactor* JobsService::ListTasks(grpc::CallbackServerContext* context, const quern::v1::ListTasksRequest* request,
                                                 quern::v1::ListTasksResponse* response) {
  return WithJob(context, request->parent(), [&](uint64_t job, grpc::ServerUnaryReactor* reactor) {
    const absl::StatusOr<uint64_t> first = ParsePageToken(request->page_token());
    if (!first.ok() || *first > UINT32_MAX) {
      reactor->Finish(ToGrpcStatus(first.ok() ? absl::InvalidArgumentError("no page token of this call") : first.status()));
      return;
    }
    const int count = PageSize(request->page_size());
    coordinator_->queue()->ListTasks(job, static_cast<uint32_t>(*first), count + 1,
                                     [reactor, response, count, first = *first](absl::StatusOr<std::vector<quern::v1::Task>> tasks) {
                                       if (tasks.ok()) {
                                         if (static_cast<int>(tasks->size()) > count) {
                                           tasks->pop_back();
                                           response->set_next_page_token(absl::StrCat(first + count));
                                         }
                                         for (quern::v1::Task& task : *tasks) *response->add_tasks() = std::move(task);
                                       }
                                       reactor->Finish(ToGrpcStatus(tasks.status()));
                                     });
  });
}

grpc::ServerUnaryReactor* JobsService::ListWorkers(grpc::CallbackServerContext* context, const quern::v1::ListWorkersRequest* request,
                                                   quern::v1::ListWorkersResponse* response) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  // The token is the name of the last worker shown: their number changes between calls.
  const size_t count = PageSize(request->page_size());
  for (quern::v1::Worker& worker : coordinator_->queue()->ListWorkers()) {
    if (!request->page_token().empty() && worker.name() <= request->page_token()) continue;
    if (static_cast<size_t>(response->workers_size()) == count) {
      response->set_next_page_token(response->workers(response->workers_size() - 1).name());
      break;
    }
    *response->add_workers() = std::move(worker);
  }
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

namespace {

// Calls `act` with the name of the worker that a request names, and what answers the call.
template <typename Act>
grpc::ServerUnaryReactor* WithWorker(grpc::CallbackServerContext* context, const std::string& name, quern::v1::Worker* response, Act act) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  const absl::StatusOr<std::string> worker = ParseWorkerName(name);
  if (!worker.ok()) {
    reactor->Finish(ToGrpcStatus(worker.status()));
    return reactor;
  }
  act(*worker, [reactor, response](absl::StatusOr<quern::v1::Worker> answer) {
    if (answer.ok()) *response = *std::move(answer);
    reactor->Finish(ToGrpcStatus(answer.status()));
  });
  return reactor;
}

}  // namespace

grpc::ServerUnaryReactor* JobsService::CordonWorker(grpc::CallbackServerContext* context, const quern::v1::CordonWorkerRequest* request,
                                                    quern::v1::Worker* response) {
  return WithWorker(context, request->name(), response, [&](const std::string& worker, JobQueue::WorkerCallback done) {
    if (absl::Status reason = CheckCordonReason(request->reason()); !reason.ok()) return done(std::move(reason));
    coordinator_->queue()->CordonWorker(worker, request->reason(), std::move(done));
  });
}

grpc::ServerUnaryReactor* JobsService::UncordonWorker(grpc::CallbackServerContext* context, const quern::v1::UncordonWorkerRequest* request,
                                                      quern::v1::Worker* response) {
  return WithWorker(context, request->name(), response, [&](const std::string& worker, JobQueue::WorkerCallback done) {
    coordinator_->queue()->UncordonWorker(worker, std::move(done));
  });
}

grpc::ServerUnaryReactor* JobsService::DrainWorker(grpc::CallbackServerContext* context, const quern::v1::DrainWorkerRequest* request,
                                                   quern::v1::Worker* response) {
  return WithWorker(context, request->name(), response, [&](const std::string& worker, JobQueue::WorkerCallback done) {
    coordinator_->queue()->DrainWorker(worker, std::move(done));
  });
}

class JobsService::PlanCall : public grpc::ServerWriteReactor<quern::v1::PlanJobResponse> {
 public:
  PlanCall(JobsService* service, grpc::CallbackServerContext* context, const quern::v1::JobSpec& spec)
      : service_(service), stream_(&service->stalled_writes_, context) {
    if (service_->plans_.fetch_add(1) >= service_->limits_.plans) {
      Finish(grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED,
                          absl::StrCat("this coordinator makes ", service_->limits_.plans, " plans for clients at a time: try again")));
      return;
    }
    service_->coordinator_->PlanJob(spec, [this](absl::StatusOr<Plan> plan) {
      if (!plan.ok()) {
        Finish(ToGrpcStatus(plan.status()));
        return;
      }
      plan_ = *std::move(plan);
      *message_.mutable_summary() = plan_.summary;
      stream_.Began();
      StartWrite(&message_);
    });
  }

  void OnWriteDone(bool ok) override {
    stream_.Ended();
    if (!ok) {
      Finish(grpc::Status(grpc::StatusCode::CANCELLED, "the client is gone"));
      return;
    }
    message_.Clear();  // keeps the fates' memory for the next ones
    while (message_.fates_size() < kFatesPerMessage) {
      if (reader_.Next(message_.add_fates())) continue;
      message_.mutable_fates()->RemoveLast();
      break;
    }
    if (message_.fates_size() == 0) {
      Finish(grpc::Status::OK);
    } else {
      stream_.Began();
      StartWrite(&message_);
    }
  }
  void OnDone() override {
    service_->plans_.fetch_sub(1);
    delete this;
  }

 private:
  JobsService* const service_;
  StalledWrites::Stream stream_;
  quern::v1::PlanJobResponse message_;
  Plan plan_;
  FateReader reader_{&plan_};
};

grpc::ServerWriteReactor<quern::v1::PlanJobResponse>* JobsService::PlanJob(grpc::CallbackServerContext* context,
                                                                           const quern::v1::PlanJobRequest* request) {
  return new PlanCall(this, context, request->spec());
}

grpc::ServerUnaryReactor* JobsService::InspectCheckpoint(grpc::CallbackServerContext* context,
                                                         const quern::v1::InspectCheckpointRequest* request,
                                                         quern::v1::InspectCheckpointResponse* response) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  coordinator_->Inspect(request->path(), [reactor, response](absl::StatusOr<quern::v1::InspectCheckpointResponse> inspected) {
    if (inspected.ok()) *response = *std::move(inspected);
    reactor->Finish(ToGrpcStatus(inspected.status()));
  });
  return reactor;
}

}  // namespace quern::daemon
