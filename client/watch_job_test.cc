#include "client/watch_job.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>

#include <functional>
#include <memory>
#include <sstream>
#include <utility>
#include <vector>

#include "base/status_matchers.h"

namespace quern::client {
namespace {

using quern::v1::Job;
using ::testing::HasSubstr;

Job JobIn(Job::State state, uint64_t bytes_read = 0) {
  Job job;
  job.set_name("jobs/7");
  job.set_state(state);
  job.mutable_progress()->set_bytes_read(bytes_read);
  job.mutable_progress()->set_tasks_total(1);
  return job;
}

// Each WatchJob call takes the next script: what it sends and how it ends.
class ScriptedJobs : public quern::v1::Jobs::Service {
 public:
  using Script = std::function<grpc::Status(grpc::ServerContext*, grpc::ServerWriter<Job>*)>;
  void Add(Script script) { scripts_.push_back(std::move(script)); }

  grpc::Status WatchJob(grpc::ServerContext* context, const quern::v1::WatchJobRequest* request, grpc::ServerWriter<Job>* writer) override {
    EXPECT_EQ(request->name(), "jobs/7");
    if (next_ == scripts_.size()) return grpc::Status(grpc::StatusCode::NOT_FOUND, "no script is left");
    return scripts_[next_++](context, writer);
  }

 private:
  std::vector<Script> scripts_;
  size_t next_ = 0;
};

class WatchJobTest : public testing::Test {
 protected:
  WatchJobTest() {
    grpc::ServerBuilder builder;
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    stub_ = quern::v1::Jobs::NewStub(server_->InProcessChannel({}));
  }
  absl::StatusOr<WatchOutcome> Watch(const Job& job) {
    Progress progress(&out_, &clock_, {});
    return WatchJob(*stub_, job, /*farm=*/nullptr, interrupt_, progress, &clock_);
  }

  ScriptedJobs service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<quern::v1::Jobs::Stub> stub_;
  std::ostringstream out_;
  ManualClock clock_;
  Interrupt interrupt_;
};

TEST_F(WatchJobTest, FollowsToTheEndAndCountsOnlyItsOwnBytes) {
  service_.Add([](grpc::ServerContext*, grpc::ServerWriter<Job>* writer) {
    writer->Write(JobIn(Job::RUNNING, 500));
    writer->Write(JobIn(Job::SUCCEEDED, 800));
    return grpc::Status::OK;
  });
  QUERN_ASSERT_OK_AND_ASSIGN(WatchOutcome outcome, Watch(JobIn(Job::RUNNING, 300)));
  EXPECT_EQ(outcome.job.state(), Job::SUCCEEDED);
  EXPECT_FALSE(outcome.interrupted);
  EXPECT_EQ(outcome.bytes_read, 500);
}

TEST_F(WatchJobTest, WhatTheJobWaitsForIsToldOnce) {
  Job job = JobIn(Job::RUNNING);
  job.set_waits_for("a worker:\nnone is connected");
  service_.Add([&job](grpc::ServerContext*, grpc::ServerWriter<Job>* writer) {
    writer->Write(job);
    // What is not taken at once is taken with what comes after it.
    job.set_state(Job::SUCCEEDED);
    writer->Write(job);
    return grpc::Status::OK;
  });
  QUERN_ASSERT_OK(Watch(Job(job)).status());
  const std::string told = "waits for a worker: none is connected\n";
  const size_t first = out_.str().find(told);
  ASSERT_NE(first, std::string::npos) << out_.str();
  EXPECT_EQ(out_.str().find(told, first + 1), std::string::npos) << out_.str();
}

TEST_F(WatchJobTest, EndedJobNeedsNoStream) {
  QUERN_ASSERT_OK_AND_ASSIGN(WatchOutcome outcome, Watch(JobIn(Job::FAILED)));
  EXPECT_EQ(outcome.job.state(), Job::FAILED);
}

TEST_F(WatchJobTest, EndedJobShowsWhatItDidAllInAll) {
  Job job = JobIn(Job::SUCCEEDED, 900);
  job.mutable_create_time()->set_seconds(1000);
  job.mutable_create_time()->set_nanos(900'000'000);
  job.mutable_end_time()->set_seconds(1065);
  job.mutable_end_time()->set_nanos(400'000'000);
  QUERN_ASSERT_OK_AND_ASSIGN(WatchOutcome outcome, Watch(job));
  EXPECT_EQ(outcome.elapsed, absl::Milliseconds(64'500));
  EXPECT_EQ(outcome.bytes_read, 900);
}

TEST_F(WatchJobTest, LostConnectionIsTriedAgain) {
  service_.Add([](grpc::ServerContext*, grpc::ServerWriter<Job>* writer) {
    writer->Write(JobIn(Job::RUNNING));
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "restarting");
  });
  service_.Add([](grpc::ServerContext*, grpc::ServerWriter<Job>* writer) {
    writer->Write(JobIn(Job::SUCCEEDED));
    return grpc::Status::OK;
  });
  QUERN_ASSERT_OK_AND_ASSIGN(WatchOutcome outcome, Watch(JobIn(Job::QUEUED)));
  EXPECT_EQ(outcome.job.state(), Job::SUCCEEDED);
  EXPECT_THAT(out_.str(), HasSubstr("trying again"));
}

TEST_F(WatchJobTest, OtherErrorsEndTheWatching) {
  service_.Add([](grpc::ServerContext*, grpc::ServerWriter<Job>*) { return grpc::Status(grpc::StatusCode::NOT_FOUND, "no job jobs/7"); });
  EXPECT_THAT(Watch(JobIn(Job::QUEUED)), StatusIs(absl::StatusCode::kNotFound, HasSubstr("jobs/7")));
}

TEST_F(WatchJobTest, InterruptEndsTheWatchingAndNotTheJob) {
  service_.Add([](grpc::ServerContext* context, grpc::ServerWriter<Job>* writer) {
    writer->Write(JobIn(Job::RUNNING));
    raise(SIGINT);
    while (!context->IsCancelled()) sched_yield();
    return grpc::Status::CANCELLED;
  });
  QUERN_ASSERT_OK_AND_ASSIGN(WatchOutcome outcome, Watch(JobIn(Job::QUEUED)));
  EXPECT_TRUE(outcome.interrupted);
}

}  // namespace
}  // namespace quern::client
