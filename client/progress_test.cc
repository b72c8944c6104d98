#include "client/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "base/byte_size.h"

namespace quern::client {
namespace {

using quern::v1::Job;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

Job RunningJob(uint64_t read, uint64_t to_read) {
  Job job;
  job.set_state(Job::RUNNING);
  job.mutable_progress()->set_tasks_total(12);
  job.mutable_progress()->set_tasks_done(3);
  job.mutable_progress()->set_bytes_read(read);
  job.mutable_progress()->set_bytes_to_read(to_read);
  return job;
}

class ProgressTest : public testing::Test {
 protected:
  Progress Make(bool terminal, int width = 200) { return Progress(&out_, &clock_, {.terminal = terminal, .width = width}); }
  std::string Taken() {
    std::string text = out_.str();
    out_.str("");
    return text;
  }

  std::ostringstream out_;
  ManualClock clock_;
};

TEST_F(ProgressTest, PlainLineShowsTasksBytesRateEtaAndError) {
  Progress progress = Make(/*terminal=*/false);
  Job job = RunningJob(0, 4'000'000'000);
  progress.Update(job);
  EXPECT_EQ(Taken(), "running  3/12 tasks  0 B of 3.73 GiB read  -  ETA -\n");
  clock_.Advance(absl::Seconds(5));
  job.mutable_progress()->set_bytes_read(1'000'000'000);
  job.mutable_progress()->set_sum_squares(1000);
  job.mutable_progress()->set_sum_squared_error(10);
  progress.Update(job);
  EXPECT_EQ(Taken(), "running  3/12 tasks  954 MiB of 3.73 GiB read  200 MB/s  ETA 0:15  SQNR 20.0 dB\n");
}

TEST_F(ProgressTest, PlainLinesComeEveryFiveSecondsAndNotTwiceTheSame) {
  Progress progress = Make(/*terminal=*/false);
  progress.Update(RunningJob(0, kGiB));
  Taken();
  clock_.Advance(absl::Seconds(4));
  progress.Update(RunningJob(kMiB, kGiB));
  EXPECT_EQ(Taken(), "");
  clock_.Advance(absl::Seconds(1));
  progress.Update(RunningJob(kMiB, kGiB));
  EXPECT_NE(Taken(), "");

  Progress paused = Make(/*terminal=*/false);
  Job job = RunningJob(kMiB, kGiB);
  job.set_state(Job::PAUSED);
  paused.Update(job);
  EXPECT_EQ(Taken(), "paused  3/12 tasks  1 MiB of 1 GiB read\n");
  clock_.Advance(absl::Minutes(1));
  paused.Update(job);
  EXPECT_EQ(Taken(), "");
}

TEST_F(ProgressTest, ChangeOfStateIsDrawnAtOnce) {
  Progress progress = Make(/*terminal=*/false);
  progress.Update(RunningJob(0, kGiB));
  Taken();
  Job job = RunningJob(kGiB, kGiB);
  job.set_state(Job::PUBLISHING);
  progress.Update(job);
  EXPECT_THAT(Taken(), HasSubstr("publishing"));
}

TEST_F(ProgressTest, TerminalRedrawsOneLineWithinItsWidth) {
  Progress progress = Make(/*terminal=*/true, /*width=*/20);
  progress.Update(RunningJob(0, kGiB));
  EXPECT_EQ(Taken(), "\rrunning  3/12 tasks\x1b[K");
  clock_.Advance(absl::Milliseconds(100));
  progress.Update(RunningJob(kMiB, kGiB));
  EXPECT_EQ(Taken(), "");
  clock_.Advance(absl::Milliseconds(100));
  progress.Update(RunningJob(kMiB, kGiB));
  EXPECT_THAT(Taken(), AllOf(HasSubstr("\r"), Not(HasSubstr("\n"))));
}

TEST_F(ProgressTest, MessageStandsAboveTheLiveLine) {
  Progress progress = Make(/*terminal=*/true);
  progress.Update(RunningJob(0, kGiB));
  Taken();
  progress.Message("worker restarted");
  EXPECT_EQ(Taken(), "\r\x1b[Kworker restarted\n");
  progress.Update(RunningJob(0, kGiB));
  EXPECT_THAT(Taken(), HasSubstr("running"));
}

TEST_F(ProgressTest, JobsThatOnlyWriteAreMeasuredByWhatTheyWrite) {
  Progress progress = Make(/*terminal=*/false);
  Job job = RunningJob(0, 0);
  job.mutable_progress()->set_bytes_to_write(kGiB);
  job.mutable_progress()->set_bytes_written(kMiB);
  EXPECT_THAT(progress.Line(job), HasSubstr("1 MiB of 1 GiB written"));
}

TEST_F(ProgressTest, FailedTasksAreShown) {
  Progress progress = Make(/*terminal=*/false);
  Job job = RunningJob(0, kGiB);
  job.mutable_progress()->set_tasks_failed(2);
  EXPECT_THAT(progress.Line(job), HasSubstr("3/12 tasks (2 failed)"));
}

TEST_F(ProgressTest, VerificationThatFoundSomethingDoesNotSaySucceeded) {
  Progress progress = Make(/*terminal=*/false);
  Job job = RunningJob(kGiB, kGiB);
  job.set_state(Job::SUCCEEDED);
  EXPECT_THAT(progress.Line(job), HasSubstr("succeeded"));
  job.add_mismatches();
  EXPECT_THAT(progress.Line(job), AllOf(HasSubstr("1 mismatch "), Not(HasSubstr("succeeded"))));
}

TEST(RateMeterTest, ForgetsWhatIsOlderThanItsWindow) {
  RateMeter meter(absl::Seconds(10));
  meter.Add(absl::Seconds(0), 0);
  meter.Add(absl::Seconds(10), 1000);
  EXPECT_EQ(meter.growth(), 1000);
  meter.Add(absl::Seconds(20), 1100);
  EXPECT_EQ(meter.growth(), 100);
  EXPECT_EQ(meter.elapsed(), absl::Seconds(10));
  EXPECT_EQ(meter.Eta(50), absl::Seconds(5));
}

TEST(RateMeterTest, CounterThatGoesBackStartsAnew) {
  RateMeter meter(absl::Seconds(10));
  meter.Add(absl::Seconds(0), 0);
  meter.Add(absl::Seconds(1), 500);
  meter.Add(absl::Seconds(2), 100);
  EXPECT_EQ(meter.growth(), 0);
  EXPECT_EQ(meter.Eta(50), absl::InfiniteDuration());
  EXPECT_EQ(meter.Eta(0), absl::ZeroDuration());
}

// What was done before the command was run again does not count as its own speed.
TEST(RateMeterTest, FirstSampleIsTheStart) {
  RateMeter meter(absl::Seconds(10));
  meter.Add(absl::Seconds(5), 1'000'000);
  EXPECT_EQ(meter.growth(), 0);
  EXPECT_EQ(meter.elapsed(), absl::ZeroDuration());
}

TEST(StateTest, EndedStates) {
  Job job;
  for (Job::State state : {Job::QUEUED, Job::PLANNING, Job::RUNNING, Job::PUBLISHING, Job::CANCELLING, Job::PAUSED}) {
    job.set_state(state);
    EXPECT_FALSE(HasEnded(job)) << StateName(state);
  }
  for (Job::State state : {Job::SUCCEEDED, Job::FAILED, Job::CANCELLED}) {
    job.set_state(state);
    EXPECT_TRUE(HasEnded(job)) << StateName(state);
  }
}

}  // namespace
}  // namespace quern::client
