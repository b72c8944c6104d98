// The queue over a store that the test syncs, with a clock that the test moves and a test that plays the workers.
#ifndef QUERN_DAEMON_QUEUE_JOB_QUEUE_FIXTURE_H_
#define QUERN_DAEMON_QUEUE_JOB_QUEUE_FIXTURE_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/clock.h"
#include "base/status_matchers.h"
#include "daemon/queue/crash_store.h"
#include "daemon/queue/job_queue.h"
#include "daemon/queue/names.h"
#include "quern/v1/test_printer.h"

namespace quern::daemon {

class JobQueueTest : public testing::Test {
 protected:
  using AttemptStatus = quern::v1::AttemptStatus;
  using Job = quern::v1::Job;
  using SynchronizeRequest = quern::v1::SynchronizeRequest;
  using SynchronizeResponse = quern::v1::SynchronizeResponse;
  using Task = quern::v1::Task;
  // What a call came to; empty while it waits.
  using Answer = std::shared_ptr<std::optional<absl::StatusOr<SynchronizeResponse>>>;

  void SetUp() override { Start(); }

  void Start() {
    JobQueueOptions options;
    options.store = &store_;
    options.clock = &clock_;
    options.numerics_version = 1;
    options.attempt_path = [](const std::string& output, uint32_t task, uint32_t attempt) {
      return absl::StrCat(output, "/", task, ".", attempt);
    };
    options.check_commit = [this](const quern::v1::TaskSpec&, const std::string& path, const quern::v1::TaskResult&) {
      checked_.push_back(path);
      return check_result_;
    };
    options.read_back = [this](const std::string& path, const std::string&, std::function<void(absl::Status)> done) {
      read_back_.push_back(path);
      done(stored_);
    };
    options.confirm = [this](uint64_t, uint32_t, const quern::v1::Failure&, uint64_t bytes_left, std::function<void(absl::Status)> done) {
      bytes_left_ = bytes_left;
      done(confirmed_);
    };
    options.run = [](std::function<void()> work) { work(); };
    options.on_ready = [this](uint64_t job) { ready_.push_back(job); };
    options.on_broken = [this](absl::Status status) { broken_ = std::move(status); };
    options.retry_backoff = absl::ZeroDuration();
    options.remove_file = [this](const std::string& path) { removed_.push_back(path); };
    if (set_options_) set_options_(&options);
    auto queue = JobQueue::Open(std::move(options));
    ASSERT_THAT(queue, IsOk());
    queue_ = *std::move(queue);
  }

  // A coordinator that dies now and another that takes over.
  void Restart(bool release = true) {
    store_.LosePending();
    queue_.reset();
    ready_.clear();
    Start();
    if (!release) return;
    for (uint64_t job : queue_->HeldJobs()) queue_->Release(job, {});
    store_.Sync();
  }

  NewJob MakeJob(int tasks, const std::string& output = "/out") {
    NewJob job;
    job.request_id = absl::StrCat("request ", ++requests_);
    job.spec.set_operation(quern::v1::QUANTIZE);
    job.spec.set_output(output);
    for (int i = 0; i < tasks; ++i) {
      quern::v1::TaskSpec& task = job.tasks.emplace_back();
      task.set_index(i);
      task.set_label(absl::StrCat("shard ", i));
      task.mutable_write_shard()->set_file_size(1000);
      task.set_bytes_to_read(4000);
      task.set_bytes_to_write(1000);
      task.set_minimum_memory(16 * kMiB);
    }
    return job;
  }

  uint64_t Add(NewJob job) {
    std::optional<absl::StatusOr<Job>> added;
    job.id = queue_->ReserveId();
    queue_->AddJob(std::move(job), [&](absl::StatusOr<Job> result) { added = std::move(result); });
    EXPECT_FALSE(added.has_value()) << "told before it was stored";
    store_.Sync();
    EXPECT_TRUE(added.has_value());
    return ParseJobName((*added)->name()).value();
  }
  uint64_t AddTasks(int tasks) { return Add(MakeJob(tasks)); }

  Job Get(uint64_t id) {
    Job job;
    queue_->GetJob(id, [&](absl::StatusOr<Job> result) {
      EXPECT_THAT(result, IsOk());
      if (result.ok()) job = *std::move(result);
    });
    store_.Sync();
    return job;
  }

  std::vector<Task> Tasks(uint64_t id) {
    std::vector<Task> tasks;
    queue_->ListTasks(id, 0, 1000, [&](absl::StatusOr<std::vector<Task>> result) {
      EXPECT_THAT(result, IsOk());
      if (result.ok()) tasks = *std::move(result);
    });
    store_.Sync();
    return tasks;
  }

  absl::StatusOr<Job> Call(void (JobQueue::*method)(uint64_t, JobQueue::JobCallback), uint64_t id) {
    absl::StatusOr<Job> job = absl::InternalError("not called");
    (queue_.get()->*method)(id, [&](absl::StatusOr<Job> result) { job = std::move(result); });
    store_.Sync();
    return job;
  }
  absl::StatusOr<Job> Resume(uint64_t id, ResumeOptions options = {}) {
    absl::StatusOr<Job> job = absl::InternalError("not called");
    queue_->ResumeJob(id, std::move(options), [&](absl::StatusOr<Job> result) { job = std::move(result); });
    store_.Sync();
    return job;
  }

  static SynchronizeRequest Worker(const std::string& name, uint32_t slots = 1, const std::string& incarnation = "first") {
    SynchronizeRequest request;
    request.set_worker(name);
    request.set_incarnation(incarnation);
    request.set_host("host");
    request.set_version("1");
    request.set_numerics_version(1);
    request.set_slots(slots);
    request.set_memory(512 * kMiB);
    return request;
  }

  static AttemptStatus* List(SynchronizeRequest* request, const quern::v1::AttemptId& id, AttemptStatus::State state) {
    AttemptStatus* const status = request->add_attempts();
    *status->mutable_id() = id;
    status->set_purpose(quern::v1::WORK);
    status->set_state(state);
    if (state == AttemptStatus::COMPLETED) {
      status->mutable_result()->set_file_size(1000);
      status->mutable_result()->set_sha256("digest");
      status->mutable_result()->set_bytes_read(4000);
      status->mutable_result()->set_bytes_written(1000);
    }
    return status;
  }
  static SynchronizeRequest WithFailure(SynchronizeRequest request, const quern::v1::AttemptId& id, quern::v1::FailureReason reason,
                                        const std::string& message = "why") {
    AttemptStatus* const status = List(&request, id, AttemptStatus::FAILED);
    status->mutable_failure()->set_reason(reason);
    status->mutable_failure()->set_message(message);
    return request;
  }
  static SynchronizeRequest With(SynchronizeRequest request, const quern::v1::AttemptId& id, AttemptStatus::State state) {
    List(&request, id, state);
    return request;
  }

  Answer Begin(const SynchronizeRequest& request) {
    Answer answer = std::make_shared<std::optional<absl::StatusOr<SynchronizeResponse>>>();
    queue_->Synchronize(request, principal_, ++tickets_, [answer](absl::StatusOr<SynchronizeResponse> response) {
      EXPECT_FALSE(answer->has_value()) << "answered twice";
      *answer = std::move(response);
    });
    return answer;
  }
  // A call that is answered at once.
  SynchronizeResponse Sync(const SynchronizeRequest& request) {
    const Answer answer = Begin(request);
    store_.Sync();
    EXPECT_TRUE(answer->has_value()) << "the call waits";
    if (!answer->has_value()) return {};
    EXPECT_THAT(**answer, IsOk());
    return answer->value().value_or(SynchronizeResponse());
  }
  // The only attempt that a call grants.
  quern::v1::AttemptId Granted(const SynchronizeRequest& request) {
    const SynchronizeResponse response = Sync(request);
    for (const auto& attempt : response.attempts()) {
      if (attempt.has_spec()) return attempt.id();
    }
    ADD_FAILURE() << "nothing was granted: " << response.DebugString();
    return {};
  }
  void Complete(const SynchronizeRequest& worker, const quern::v1::AttemptId& id) {
    const SynchronizeResponse response = Sync(With(worker, id, AttemptStatus::COMPLETED));
    EXPECT_THAT(response.acknowledged(), testing::SizeIs(1));
  }

  ManualClock clock_;
  CrashStore store_;
  std::vector<uint64_t> ready_;
  std::vector<std::string> checked_;
  std::vector<std::string> removed_;
  std::vector<std::string> read_back_;
  absl::Status stored_;                                // of what is read back
  std::function<void(JobQueueOptions*)> set_options_;  // for the next Start
  absl::Status check_result_;
  absl::Status confirmed_ = absl::FailedPreconditionError("model.safetensors: it was modified");  // of what workers report
  uint64_t bytes_left_ = 0;                                                                       // when it was asked last
  absl::Status broken_;
  int requests_ = 0;
  uint64_t tickets_ = 0;
  std::string principal_;  // of the calls of workers
  std::unique_ptr<JobQueue> queue_;
};

MATCHER_P2(IsAttempt, task, attempt, "") {
  return arg.task() == static_cast<uint32_t>(task) && arg.attempt() == static_cast<uint32_t>(attempt);
}

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_QUEUE_JOB_QUEUE_FIXTURE_H_
