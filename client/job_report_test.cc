#include "client/job_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "client/json_output.h"

namespace quern::client {
namespace {

using quern::v1::Job;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

Job QuantizeJob(Job::State state) {
  Job job;
  job.set_name("jobs/7");
  job.set_state(state);
  job.mutable_spec()->set_output("/out");
  job.mutable_spec()->mutable_quantize()->set_source("/in");
  job.mutable_create_time()->set_seconds(1'700'000'000);
  job.mutable_progress()->set_tasks_total(4);
  job.mutable_progress()->set_tasks_done(3);
  return job;
}

TEST(JobReportTest, JobsTableShowsStateTasksAndAge) {
  quern::v1::ListJobsResponse jobs;
  *jobs.add_jobs() = QuantizeJob(Job::RUNNING);
  const std::string text = FormatJobs(jobs, absl::FromUnixSeconds(1'700'000'090));
  EXPECT_THAT(text, AllOf(HasSubstr("jobs/7  running"), HasSubstr("3/4"), HasSubstr("1:30"), HasSubstr("quantize /in -> /out")));
  EXPECT_EQ(FormatJobs({}, absl::UnixEpoch()), "no jobs\n");
}

TEST(JobReportTest, HistoryShowsEveryAttempt) {
  quern::v1::ListTasksResponse tasks;
  auto* task = tasks.add_tasks();
  task->set_name("jobs/7/tasks/0");
  auto* lost = task->add_attempts();
  lost->set_attempt(1);
  lost->set_state(quern::v1::Attempt::LOST);
  lost->mutable_grant_time()->set_seconds(100);
  lost->mutable_end_time()->set_seconds(165);
  lost->set_reason("OUT_OF_MEMORY");
  lost->set_message("killed with 512 MiB");
  auto* running = task->add_attempts();
  running->set_attempt(2);
  running->set_state(quern::v1::Attempt::GRANTED);
  EXPECT_THAT(FormatJob(QuantizeJob(Job::RUNNING), tasks),
              AllOf(HasSubstr("lost"), HasSubstr("1:05"), HasSubstr("OUT_OF_MEMORY: killed with 512 MiB"), HasSubstr("granted")));
}

TEST(JobReportTest, NothingThatOthersSayControlsTheTerminalOrWritesLines) {
  const std::string evil = "x\x1b[2J\r\nforged \u202e";
  Job job = QuantizeJob(Job::FAILED);
  job.mutable_spec()->set_output("/out" + evil);
  job.mutable_error()->set_reason("IO_ERROR");
  job.mutable_error()->set_message(evil);
  job.mutable_progress()->set_sum_squares(1);
  job.mutable_progress()->set_worst_module(evil);
  job.mutable_plan()->set_resolved_recipe("bits: 4\nnote: \x1b[2J\n");
  quern::v1::ListTasksResponse tasks;
  quern::v1::Task& task = *tasks.add_tasks();
  task.set_label(evil);
  quern::v1::Attempt& attempt = *task.add_attempts();
  attempt.set_worker(evil);
  attempt.set_host(evil);
  attempt.set_device(evil);
  attempt.set_message(evil);
  attempt.set_reason(evil);
  WatchOutcome outcome;
  outcome.job = job;
  Job mismatched = job;
  mismatched.add_mismatches()->set_what(evil);
  mismatched.mutable_mismatches(0)->set_file(evil);
  WatchOutcome verified;
  verified.job = mismatched;
  for (const std::string& text :
       {FormatJob(mismatched, tasks), FormatTask(task), FormatTasks(tasks), FormatOutcome(outcome), FormatOutcome(verified)}) {
    for (const char* control : {"\x1b", "\r", "\u202e", "\nforged"}) EXPECT_THAT(text, Not(HasSubstr(control)));
  }
  EXPECT_THAT(FormatJob(job, tasks), HasSubstr("  error IO_ERROR: x [2J \n    forged"));
  EXPECT_THAT(FormatJob(job, tasks), HasSubstr("recipe\nbits: 4\nnote:  [2J\n"));
}

TEST(JobReportTest, WhatAJobWaitsForIsShown) {
  Job job = QuantizeJob(Job::RUNNING);
  EXPECT_THAT(FormatJob(job, {}), Not(HasSubstr("waits for")));
  job.set_waits_for("a worker: none is connected");
  EXPECT_THAT(FormatJob(job, {}), HasSubstr("\n  waits for a worker: none is connected\n"));
}

TEST(JobReportTest, TaskShowsAllThatIsKnownOfItsAttempts) {
  quern::v1::Task task;
  task.set_name("jobs/7/tasks/24");
  task.set_state(quern::v1::Task::COMMITTED);
  task.set_label("model-00025");
  task.add_layers(24);
  task.set_failures(1);
  task.set_bytes_to_read(4 << 20);
  auto* failed = task.add_attempts();
  failed->set_attempt(1);
  failed->set_purpose("work");
  failed->set_state(quern::v1::Attempt::FAILED);
  failed->set_worker("node7");
  failed->set_host("node7.example.org");
  failed->set_device("cpu AVX3");
  failed->set_memory(512 << 20);
  failed->mutable_grant_time()->set_seconds(100);
  failed->mutable_end_time()->set_seconds(165);
  failed->set_reason("IO_ERROR");
  failed->set_message("cannot read /models/x");
  auto* committed = task.add_attempts();
  committed->set_attempt(2);
  committed->set_state(quern::v1::Attempt::COMMITTED);
  committed->set_peak_rss(600 << 20);
  committed->mutable_times()->set_wall_seconds(3);
  committed->mutable_times()->set_read_seconds(1.25);
  committed->mutable_times()->set_read_stall_seconds(0.5);
  const std::string text = FormatTask(task);
  EXPECT_THAT(text,
              AllOf(HasSubstr("jobs/7/tasks/24  committed  model-00025"), HasSubstr("layers 24; reads 4 MiB"), HasSubstr("1 failure\n"),
                    HasSubstr("attempt 1  failed  (work)"), HasSubstr("node7 on node7.example.org, cpu AVX3, 512 MiB"),
                    HasSubstr("took 1:05"), HasSubstr("reason  IO_ERROR\n  message cannot read /models/x\n")));
  EXPECT_THAT(text, AllOf(HasSubstr("attempt 2  committed"), HasSubstr("read 1.25 s (stalled 0.50 s)"), HasSubstr("peak memory 600 MiB")));
  EXPECT_THAT(FormatTask(quern::v1::Task()), HasSubstr("no attempts"));
}

TEST(JobReportTest, OutcomeOfSuccessHasBytesRateAndError) {
  WatchOutcome outcome;
  outcome.job = QuantizeJob(Job::SUCCEEDED);
  outcome.job.mutable_progress()->set_bytes_to_read(8'000'000'000);
  outcome.job.mutable_progress()->set_bytes_read(8'000'000'000);
  outcome.job.mutable_progress()->set_sum_squares(100);
  outcome.job.mutable_progress()->set_sum_squared_error(1);
  outcome.elapsed = absl::Seconds(2);
  outcome.bytes_read = 2'000'000'000;  // the rest was read by an earlier run
  EXPECT_THAT(FormatOutcome(outcome),
              AllOf(HasSubstr("succeeded"), HasSubstr("7.45 GiB read"), HasSubstr("1 GB/s"), HasSubstr("SQNR 20.0 dB")));
}

TEST(JobReportTest, OutcomeOfFailureSaysWhereAndWhy) {
  WatchOutcome outcome;
  outcome.job = QuantizeJob(Job::FAILED);
  outcome.job.mutable_error()->set_reason("DISK_FULL");
  outcome.job.mutable_error()->set_task("jobs/7/tasks/2");
  outcome.job.mutable_error()->set_message("disk full: 12 GiB are needed on /out; free space and run again");
  EXPECT_THAT(FormatOutcome(outcome), HasSubstr("DISK_FULL in jobs/7/tasks/2: disk full: 12 GiB"));
}

TEST(JobReportTest, WhyAJobFailedGoesToStderrAndMismatchesToStdout) {
  WatchOutcome outcome;
  outcome.job = QuantizeJob(Job::FAILED);
  outcome.job.mutable_error()->set_reason("BAD_INPUT");
  outcome.job.mutable_error()->set_message("lm_head.weight holds NaN");
  for (const bool json : {false, true}) {
    std::ostringstream out, err;
    Console console{.out = out, .err = err};
    ReportOutcome(outcome, json, console);
    EXPECT_THAT(err.str(), HasSubstr("BAD_INPUT: lm_head.weight holds NaN"));
    EXPECT_EQ(out.str(), json ? ToJson(outcome.job) : "");
  }
  outcome.job.mutable_error()->set_reason("MISMATCH");
  std::ostringstream out, err;
  Console console{.out = out, .err = err};
  ReportOutcome(outcome, false, console);
  EXPECT_THAT(out.str(), HasSubstr("MISMATCH"));
  EXPECT_EQ(err.str(), "");
}

TEST(JobReportTest, MismatchWithoutAFileHasNoEmptyField) {
  WatchOutcome outcome;
  outcome.job = QuantizeJob(Job::SUCCEEDED);
  outcome.job.add_mismatches()->set_what("the output holds no config.json");
  EXPECT_THAT(FormatOutcome(outcome), HasSubstr("\n  the output holds no config.json\n"));
}

TEST(JobReportTest, MismatchesAreListedUpToALimit) {
  WatchOutcome outcome;
  outcome.job = QuantizeJob(Job::SUCCEEDED);
  for (int i = 0; i < 60; ++i) {
    auto* mismatch = outcome.job.add_mismatches();
    mismatch->set_file("model.safetensors");
    mismatch->set_tensor("lm_head.weight");
    mismatch->set_offset(4096);
    mismatch->set_what("scale is not finite");
  }
  EXPECT_THAT(FormatOutcome(outcome),
              AllOf(HasSubstr("MISMATCH"), HasSubstr("model.safetensors: lm_head.weight at byte 4096: scale is not finite"),
                    HasSubstr("and 10 more")));
}

TEST(JobReportTest, AlreadyDoneClaimsNoWork) {
  WatchOutcome outcome;
  outcome.job = QuantizeJob(Job::SUCCEEDED);
  outcome.job.set_already_done(true);
  EXPECT_THAT(FormatOutcome(outcome), AllOf(HasSubstr("already done"), Not(HasSubstr("tasks;"))));
}

TEST(JobReportTest, WorkersShowWhenTheyWereSeen) {
  quern::v1::ListWorkersResponse workers;
  auto* worker = workers.add_workers();
  worker->set_name("workers/a");
  worker->set_state("ready");
  worker->set_detail("cordoned: new disk");
  worker->set_memory(512 << 20);
  worker->mutable_last_seen()->set_seconds(100);
  EXPECT_THAT(FormatWorkers(workers, absl::FromUnixSeconds(103)),
              AllOf(HasSubstr("workers/a"), HasSubstr("512 MiB"), HasSubstr("0:03 ago"), HasSubstr("cordoned: new disk")));
}

}  // namespace
}  // namespace quern::client
