#include "worker/supervisor/worker_metrics.h"

#include <unistd.h>

#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace quern::worker {
namespace {

using quern::v1::AttemptStatus;

std::map<std::string, double> Values(const WorkerMetrics& metrics) {
  std::map<std::string, double> values;
  for (const MetricFamily& family : metrics.Collect()) {
    for (const MetricFamily::Sample& sample : family.samples) {
      std::string name = family.name;
      for (const auto& [label, value] : sample.labels) absl::StrAppend(&name, " ", value);
      values[name] = sample.value;
    }
  }
  return values;
}

AttemptStatus Completed(uint64_t read, uint64_t written) {
  AttemptStatus status;
  status.set_state(AttemptStatus::COMPLETED);
  status.set_bytes_read(read);
  status.set_bytes_written(written);
  status.mutable_times()->set_read_seconds(1.5);
  status.mutable_times()->set_write_stall_seconds(0.25);
  status.mutable_result()->set_peak_rss(1000);
  return status;
}

TEST(WorkerMetrics, BytesAreCountedAsTheyMoveAndOnce) {
  WorkerMetrics metrics(2, 5000);
  metrics.AttemptStarted(0, 4000);
  metrics.AttemptStarted(1, 5000);
  metrics.AttemptMoved(0, 100, 10);
  metrics.AttemptMoved(1, 7, 0);
  metrics.AttemptMoved(0, 150, 10);
  std::map<std::string, double> values = Values(metrics);
  EXPECT_EQ(values["quern_worker_read_bytes_total"], 157);
  EXPECT_EQ(values["quern_worker_written_bytes_total"], 10);
  EXPECT_EQ(values["quern_worker_attempts_running"], 2);
  EXPECT_EQ(values["quern_worker_pool_bytes"], 9000);
  metrics.AttemptEnded(0, Completed(200, 50));
  metrics.AttemptDied(1, AttemptStatus::FAILED, quern::v1::OUT_OF_MEMORY);
  // The next one of a slot begins at 0 again.
  metrics.AttemptStarted(0, 4000);
  metrics.AttemptMoved(0, 1, 1);
  values = Values(metrics);
  EXPECT_EQ(values["quern_worker_read_bytes_total"], 208);
  EXPECT_EQ(values["quern_worker_written_bytes_total"], 51);
  EXPECT_EQ(values["quern_worker_pool_bytes"], 4000);
  EXPECT_EQ(values["quern_worker_attempts_ended_total completed "], 1);
  EXPECT_EQ(values["quern_worker_attempts_ended_total failed out_of_memory"], 1);
  EXPECT_EQ(values["quern_worker_stage_seconds_total read"], 1.5);
  EXPECT_EQ(values["quern_worker_stage_stall_seconds_total write"], 0.25);
  EXPECT_EQ(values["quern_worker_executor_peak_resident_bytes"], 1000);
}

TEST(WorkerMetrics, ExecutorsAreCountedByHowTheyEnded) {
  WorkerMetrics metrics(1, 5000);
  metrics.ExecutorStarted(0, getpid());
  EXPECT_GT(Values(metrics)["quern_worker_executor_resident_bytes"], 100'000);
  metrics.ExecutorEnded(0, {.exit = {.signaled = true, .code = 9}, .out_of_memory = true});
  EXPECT_EQ(Values(metrics)["quern_worker_executor_resident_bytes"], 0);
  metrics.ExecutorStarted(0, getpid());
  metrics.ExecutorEnded(0, {.exit = {.signaled = false, .code = 1}, .out_of_memory = false});
  std::map<std::string, double> values = Values(metrics);
  EXPECT_EQ(values["quern_worker_executor_starts_total"], 2);
  EXPECT_EQ(values["quern_worker_executor_deaths_total out_of_memory"], 1);
  EXPECT_EQ(values["quern_worker_executor_deaths_total exit"], 1);
  EXPECT_EQ(values["quern_worker_executor_deaths_total signal"], 0);
}

TEST(WorkerMetrics, CoordinatorIsReachableWhileItAnswers) {
  WorkerMetrics metrics(1, 5000);
  EXPECT_EQ(Values(metrics)["quern_worker_coordinator_reachable"], 0);
  metrics.CallEnded(true, absl::Milliseconds(5), false);
  EXPECT_EQ(Values(metrics)["quern_worker_coordinator_reachable"], 1);
  metrics.CallEnded(false, absl::Seconds(5), true);
  std::map<std::string, double> values = Values(metrics);
  EXPECT_EQ(values["quern_worker_coordinator_reachable"], 0);
  EXPECT_EQ(values["quern_worker_synchronize_failures_total"], 1);
  EXPECT_EQ(values["quern_worker_draining"], 0);
  metrics.Draining();
  EXPECT_EQ(Values(metrics)["quern_worker_draining"], 1);
}

}  // namespace
}  // namespace quern::worker
