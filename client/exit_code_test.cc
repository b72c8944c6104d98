#include "client/exit_code.h"

#include <gtest/gtest.h>

#include "base/status_macros.h"

namespace quern::client {
namespace {

using quern::v1::Job;

TEST(ExitCodeTest, OnlyUsageErrorsAreUsage) {
  EXPECT_EQ(ExitCodeOf(absl::OkStatus()), ExitCode::kDone);
  EXPECT_EQ(ExitCodeOf(UsageError("--scheme is missing")), ExitCode::kUsage);
  EXPECT_EQ(ExitCodeOf(absl::InvalidArgumentError("64 columns are no multiple of 128")), ExitCode::kFailed);
  EXPECT_EQ(ExitCodeOf(absl::UnavailableError("gone")), ExitCode::kFailed);
}

TEST(ExitCodeTest, UsageSurvivesAnnotation) { EXPECT_EQ(ExitCodeOf(Annotate(UsageError("bad"), "--memory")), ExitCode::kUsage); }

TEST(ExitCodeTest, EndedJobs) {
  Job job;
  job.set_state(Job::SUCCEEDED);
  EXPECT_EQ(ExitCodeOf(job), ExitCode::kDone);
  job.add_mismatches()->set_file("model.safetensors");
  EXPECT_EQ(ExitCodeOf(job), ExitCode::kMismatch);

  Job failed;
  failed.set_state(Job::FAILED);
  EXPECT_EQ(ExitCodeOf(failed), ExitCode::kFailed);
  failed.mutable_error()->set_reason("MISMATCH");
  EXPECT_EQ(ExitCodeOf(failed), ExitCode::kMismatch);

  Job cancelled;
  cancelled.set_state(Job::CANCELLED);
  EXPECT_EQ(ExitCodeOf(cancelled), ExitCode::kFailed);
}

}  // namespace
}  // namespace quern::client
