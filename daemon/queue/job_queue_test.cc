#include "daemon/queue/job_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/clock.h"
#include "base/status_matchers.h"
#include "daemon/queue/job_queue_fixture.h"
#include "daemon/queue/names.h"
#include "quern/v1/test_printer.h"

namespace quern::daemon {
namespace {

using quern::v1::Attempt;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

TEST_F(JobQueueTest, TasksAreGrantedInOrderAndTheJobEndsReady) {
  const uint64_t job = AddTasks(3);
  EXPECT_EQ(Get(job).state(), Job::QUEUED);
  for (uint32_t task = 0; task < 3; ++task) {
    const auto id = Granted(Worker("w"));
    EXPECT_THAT(id, IsAttempt(task, 1));
    EXPECT_EQ(Get(job).state(), Job::RUNNING);
    EXPECT_THAT(ready_, IsEmpty());
    SynchronizeRequest no_more = With(Worker("w"), id, AttemptStatus::COMPLETED);
    no_more.set_slots(0);
    EXPECT_THAT(Sync(no_more).acknowledged(), ElementsAre(IsAttempt(task, 1)));
  }
  EXPECT_EQ(Get(job).state(), Job::PUBLISHING);
  EXPECT_THAT(ready_, ElementsAre(job));
  EXPECT_THAT(checked_, ElementsAre("/out/0.1", "/out/1.1", "/out/2.1"));
  EXPECT_THAT(Call(&JobQueue::PauseJob, job), StatusIs(absl::StatusCode::kFailedPrecondition));
  queue_->FinishJob(job, {}, [](absl::StatusOr<Job> result) { EXPECT_THAT(result, IsOk()); });
  store_.Sync();
  EXPECT_EQ(Get(job).state(), Job::SUCCEEDED);
  EXPECT_EQ(Get(job).progress().tasks_done(), 3);
  EXPECT_EQ(Get(job).progress().bytes_read(), 12000);
}

TEST_F(JobQueueTest, GrantCarriesWhatTheWorkerNeeds) {
  AddTasks(1);
  const SynchronizeResponse response = Sync(Worker("w"));
  ASSERT_THAT(response.attempts(), SizeIs(1));
  EXPECT_EQ(response.attempts(0).output_path(), "/out/0.1");
  EXPECT_EQ(response.attempts(0).memory(), 512 * kMiB);
  EXPECT_EQ(response.attempts(0).spec().label(), "shard 0");
  EXPECT_EQ(response.attempts(0).purpose(), quern::v1::WORK);
  EXPECT_EQ(response.lease().seconds(), 30);
  EXPECT_EQ(response.desired_state(), quern::v1::RUN);
}

TEST_F(JobQueueTest, GrantIsToldOnlyOnceItIsStored) {
  AddTasks(1);
  const Answer answer = Begin(Worker("w"));
  EXPECT_FALSE(answer->has_value());
  store_.Sync();
  ASSERT_TRUE(answer->has_value());
  EXPECT_THAT((**answer)->attempts(), SizeIs(1));
}

TEST_F(JobQueueTest, GrantLostWithTheCoordinatorIsMadeAgainUnderTheSameNumberOnlyIfItWasNeverStored) {
  const uint64_t job = AddTasks(1);
  const Answer unheard = Begin(Worker("w"));
  Restart();  // the grant was not stored
  EXPECT_THAT(Granted(Worker("w")), IsAttempt(0, 1));
  SynchronizeRequest lost = Worker("w", 1, "second");
  Begin(lost);
  store_.ApplySilently();  // stored, but nobody heard of it
  Restart();
  EXPECT_THAT(Granted(Worker("w", 1, "third")), IsAttempt(0, 3));
  EXPECT_EQ(Tasks(job)[0].failures(), 0) << "whether the workers died before the coordinators is not known";
}

TEST_F(JobQueueTest, JobsGoByPriorityThenByAge) {
  const uint64_t first = Add(MakeJob(1, "/a"));
  const uint64_t second = Add(MakeJob(1, "/b"));
  NewJob urgent = MakeJob(1, "/c");
  urgent.priority = 5;
  const uint64_t third = Add(std::move(urgent));
  const SynchronizeResponse response = Sync(Worker("w", 3));
  std::vector<std::string> jobs;
  for (const auto& attempt : response.attempts()) jobs.push_back(attempt.id().job());
  EXPECT_THAT(jobs, ElementsAre(JobName(third), JobName(first), JobName(second)));
}

TEST_F(JobQueueTest, SlotsLimitGrants) {
  AddTasks(5);
  const SynchronizeResponse response = Sync(Worker("w", 2));
  ASSERT_THAT(response.attempts(), SizeIs(2));
  SynchronizeRequest busy = Worker("w", 2);
  for (const auto& attempt : response.attempts()) List(&busy, attempt.id(), AttemptStatus::RUNNING);
  const SynchronizeResponse again = Sync(busy);
  for (const auto& attempt : again.attempts()) EXPECT_FALSE(attempt.has_spec());
}

TEST_F(JobQueueTest, LostReplyIsSaidAgain) {
  AddTasks(2);
  EXPECT_THAT(Granted(Worker("w")), IsAttempt(0, 1));
  EXPECT_THAT(Granted(Worker("w")), IsAttempt(0, 1)) << "the worker does not list it, so it never heard of it";
}

TEST_F(JobQueueTest, ExpiredLeaseIsGivenToAnotherAndCounts) {
  const uint64_t job = AddTasks(1);
  Granted(Worker("a"));
  clock_.Advance(absl::Seconds(31));
  queue_->Tick();
  EXPECT_THAT(Granted(Worker("b")), IsAttempt(0, 2));
  const Task task = Tasks(job)[0];
  EXPECT_EQ(task.failures(), 1);
  EXPECT_EQ(task.attempts(0).state(), Attempt::LOST);
  EXPECT_EQ(task.attempts(1).state(), Attempt::GRANTED);
}

TEST_F(JobQueueTest, RenewedLeaseLives) {
  const uint64_t job = AddTasks(1);
  const auto id = Granted(Worker("a"));
  for (int i = 0; i < 5; ++i) {
    clock_.Advance(absl::Seconds(20));
    queue_->Tick();
    EXPECT_FALSE(Sync(With(Worker("a"), id, AttemptStatus::RUNNING)).attempts(0).stop());
  }
  EXPECT_EQ(Tasks(job)[0].failures(), 0);
}

TEST_F(JobQueueTest, WallClockThatJumpsEndsNoLease) {
  AddTasks(1);
  const auto id = Granted(Worker("a"));
  clock_.JumpWall(absl::Hours(48));
  queue_->Tick();
  EXPECT_FALSE(Sync(With(Worker("a"), id, AttemptStatus::RUNNING)).attempts(0).stop());
}

TEST_F(JobQueueTest, ExpiredAttemptGoesOnWhenNobodyElseHasBegun) {
  const uint64_t job = AddTasks(1);
  const auto id = Granted(Worker("a"));
  clock_.Advance(absl::Seconds(31));
  queue_->Tick();
  const SynchronizeResponse response = Sync(With(Worker("a"), id, AttemptStatus::RUNNING));
  ASSERT_THAT(response.attempts(), SizeIs(1));
  EXPECT_FALSE(response.attempts(0).stop());
  EXPECT_EQ(Tasks(job)[0].attempts(0).state(), Attempt::GRANTED);
}

TEST_F(JobQueueTest, FirstCommitWinsAndFencesTheOther) {
  const uint64_t job = AddTasks(1);
  const auto slow = Granted(Worker("a"));
  clock_.Advance(absl::Seconds(31));
  queue_->Tick();
  const auto fast = Granted(Worker("b"));
  // The expired one is first.
  Complete(Worker("a"), slow);
  const SynchronizeResponse response = Sync(With(Worker("b"), fast, AttemptStatus::RUNNING));
  ASSERT_THAT(response.attempts(), SizeIs(1));
  EXPECT_TRUE(response.attempts(0).stop());
  // Even if it gets to its end.
  Complete(Worker("b"), fast);
  const Task task = Tasks(job)[0];
  EXPECT_EQ(task.attempts(0).state(), Attempt::COMMITTED);
  EXPECT_EQ(task.attempts(1).state(), Attempt::STOPPED);
  EXPECT_THAT(checked_, ElementsAre("/out/0.1"));
  EXPECT_THAT(ready_, ElementsAre(job));
}

TEST_F(JobQueueTest, SameCompletionAgainIsAcknowledged) {
  const uint64_t job = AddTasks(2);
  const auto id = Granted(Worker("a"));
  Complete(Worker("a"), id);
  Complete(Worker("a"), id);
  Restart();
  Complete(Worker("a"), id);
  EXPECT_EQ(Get(job).progress().tasks_done(), 1);
  EXPECT_THAT(checked_, SizeIs(1));
}

TEST_F(JobQueueTest, OtherDigestOfACommittedAttemptIsDataLoss) {
  const uint64_t job = AddTasks(2);
  const auto id = Granted(Worker("a"));
  Complete(Worker("a"), id);
  SynchronizeRequest other = With(Worker("a"), id, AttemptStatus::COMPLETED);
  other.mutable_attempts(0)->mutable_result()->set_sha256("something else");
  Sync(other);
  EXPECT_EQ(Get(job).state(), Job::FAILED);
  EXPECT_EQ(Get(job).error().reason(), "DATA_LOSS");
}

TEST_F(JobQueueTest, CommitIsNotAcknowledgedBeforeItIsStored) {
  AddTasks(1);
  const auto id = Granted(Worker("a"));
  const Answer answer = Begin(With(Worker("a"), id, AttemptStatus::COMPLETED));
  EXPECT_FALSE(answer->has_value());
  EXPECT_THAT(ready_, IsEmpty());
  Restart();
  // The coordinator died before: the completion counts when it is reported again.
  Complete(Worker("a"), id);
  EXPECT_THAT(ready_, SizeIs(1));
}

TEST_F(JobQueueTest, FileThatIsNotWhatTheWorkerSaysIsAFailure) {
  const uint64_t job = AddTasks(1);
  const auto id = Granted(Worker("a"));
  check_result_ = absl::DataLossError("/out/0.1 has 10 bytes of 1000");
  Complete(Worker("a"), id);
  const Task task = Tasks(job)[0];
  EXPECT_EQ(task.attempts(0).state(), Attempt::FAILED);
  EXPECT_EQ(task.attempts(0).message(), "/out/0.1 has 10 bytes of 1000");
  EXPECT_EQ(task.failures(), 1);
}

TEST_F(JobQueueTest, ThreeFailuresStopTheJobAndResumingItForgetsThem) {
  const uint64_t job = AddTasks(2);
  for (uint32_t attempt = 1; attempt <= 3; ++attempt) {
    const auto id = Granted(Worker("a"));
    EXPECT_THAT(id, IsAttempt(0, attempt));
    SynchronizeRequest failed = WithFailure(Worker("a"), id, quern::v1::IO_ERROR, "read error in model.safetensors at 4096");
    failed.set_slots(0);
    Sync(failed);
  }
  EXPECT_EQ(Get(job).state(), Job::FAILED);
  EXPECT_EQ(Get(job).error().reason(), "IO_ERROR");
  EXPECT_EQ(Get(job).error().task(), TaskName(job, 0));
  EXPECT_THAT(Get(job).error().message(), HasSubstr("failed 3 times, the last time with: read error in model.safetensors at 4096"));
  EXPECT_THAT(Sync(Worker("a")).attempts(), IsEmpty());
  QUERN_ASSERT_OK(Resume(job));
  EXPECT_EQ(Get(job).state(), Job::RUNNING);
  EXPECT_FALSE(Get(job).has_error());
  EXPECT_EQ(Tasks(job)[0].failures(), 0);
  EXPECT_THAT(Granted(Worker("a")), IsAttempt(0, 4));
}

TEST_F(JobQueueTest, OtherAttemptsOfAFailedJobAreStoppedButMayCommit) {
  const uint64_t job = AddTasks(3);
  const SynchronizeResponse granted = Sync(Worker("a", 2));
  SynchronizeRequest request = WithFailure(Worker("a", 2), granted.attempts(0).id(), quern::v1::SOURCE_CHANGED);
  List(&request, granted.attempts(1).id(), AttemptStatus::RUNNING);
  const SynchronizeResponse response = Sync(request);
  ASSERT_THAT(response.attempts(), SizeIs(1));
  EXPECT_TRUE(response.attempts(0).stop());
  EXPECT_EQ(Get(job).state(), Job::FAILED);
  Complete(Worker("a", 2), granted.attempts(1).id());
  EXPECT_EQ(Get(job).progress().tasks_done(), 1);
  EXPECT_EQ(Get(job).state(), Job::FAILED);
}

TEST_F(JobQueueTest, ChangedSourceThatTheCoordinatorSeesTooFailsTheJobAtOnce) {
  const uint64_t job = AddTasks(1);
  Sync(WithFailure(Worker("a"), Granted(Worker("a")), quern::v1::SOURCE_CHANGED));
  EXPECT_EQ(Get(job).state(), Job::FAILED);
  EXPECT_EQ(Get(job).error().reason(), "SOURCE_CHANGED");
  EXPECT_EQ(Get(job).error().message(), "task 0 (shard 0): model.safetensors: it was modified");
  EXPECT_EQ(Tasks(job)[0].attempts_size(), 1);
}

TEST_F(JobQueueTest, WhatOneWorkerAloneReportsFailsNoJob) {
  confirmed_ = absl::OkStatus();
  for (const quern::v1::FailureReason reason :
       {quern::v1::SOURCE_CHANGED, quern::v1::DISK_FULL, quern::v1::BAD_INPUT, quern::v1::MEMORY_TOO_SMALL}) {
    SCOPED_TRACE(quern::v1::FailureReason_Name(reason));
    const uint64_t job = AddTasks(1);
    Sync(Worker("honest", 0));
    SynchronizeRequest lie = WithFailure(Worker("liar"), Granted(Worker("liar")), reason);
    lie.set_slots(0);
    Sync(lie);
    EXPECT_EQ(Tasks(job)[0].failures(), 1);
    const auto id = Granted(Worker("honest"));
    EXPECT_THAT(id, IsAttempt(0, 2));
    Complete(Worker("honest", 0), id);
    EXPECT_THAT(ready_, testing::Contains(job));
  }
}

TEST_F(JobQueueTest, WhatTheCoordinatorDoesNotSeeFailsTheJobAsAnyErrorDoes) {
  for (const absl::Status& look : {absl::OkStatus(), absl::UnavailableError("the disk is away")}) {
    confirmed_ = look;
    const uint64_t job = AddTasks(1);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(Get(job).error().reason(), "");
      SynchronizeRequest lie = WithFailure(Worker("liar"), Granted(Worker("liar")), quern::v1::SOURCE_CHANGED, "it was replaced");
      lie.set_slots(0);
      Sync(lie);
    }
    EXPECT_EQ(Get(job).error().reason(), "IO_ERROR") << "to plan it again would not help";
    EXPECT_THAT(Get(job).error().message(), testing::AllOf(HasSubstr("worker liar: it was replaced; this coordinator, however, "),
                                                           HasSubstr(look.ok() ? "finds nothing" : "the disk is away")));
  }
}

TEST_F(JobQueueTest, BadInputFailsTheJobOnceTwoWorkersSaySo) {
  const uint64_t job = AddTasks(1);
  for (const char* name : {"a", "b"}) {
    EXPECT_EQ(Get(job).error().reason(), "");
    Sync(WithFailure(Worker(name, 0), Granted(Worker(name)), quern::v1::BAD_INPUT, "NaN in w at [0, 3]"));
  }
  EXPECT_EQ(Get(job).error().reason(), "BAD_INPUT");
  EXPECT_EQ(Get(job).error().message(), "task 0 (shard 0): NaN in w at [0, 3] (found on workers a and b)");
}

TEST_F(JobQueueTest, BadInputOfTheOnlyWorkerFailsTheJobInTheEnd) {
  const uint64_t job = AddTasks(1);
  for (int i = 0; i < 3; ++i) {
    Sync(WithFailure(Worker("a", 0), Granted(Worker("a")), quern::v1::BAD_INPUT, "NaN in w at [0, 3]"));
  }
  EXPECT_EQ(Get(job).error().reason(), "BAD_INPUT");
  EXPECT_THAT(Get(job).error().message(), HasSubstr("NaN in w at [0, 3]"));
}

TEST_F(JobQueueTest, BadInputFailsTheJobAtOnceWhereOneWitnessIsEnough) {
  set_options_ = [](JobQueueOptions* options) { options->bad_input_witnesses = 1; };
  Restart();
  const uint64_t job = AddTasks(1);
  Sync(WithFailure(Worker("a", 0), Granted(Worker("a")), quern::v1::BAD_INPUT, "NaN in w at [0, 3]"));
  EXPECT_EQ(Get(job).error().reason(), "BAD_INPUT");
  EXPECT_EQ(Get(job).error().message(), "task 0 (shard 0): NaN in w at [0, 3]");
}

TEST_F(JobQueueTest, TaskIsGivenToNobodyWhileTheCoordinatorLooksAtItsSource) {
  std::function<void(absl::Status)> looked;
  set_options_ = [&looked](JobQueueOptions* options) {
    options->confirm = [&looked](uint64_t, uint32_t, const quern::v1::Failure&, uint64_t, std::function<void(absl::Status)> done) {
      looked = std::move(done);
    };
  };
  Restart();
  const uint64_t job = AddTasks(1);
  const auto id = Granted(Worker("a"));
  const Answer answer = Begin(WithFailure(Worker("a", 0), id, quern::v1::SOURCE_CHANGED));
  ASSERT_TRUE(looked != nullptr);
  clock_.Advance(absl::Seconds(31));
  queue_->Tick();
  store_.Sync();
  EXPECT_THAT(Sync(Worker("b")).attempts(), IsEmpty()) << "its lease does not run out meanwhile";
  ASSERT_TRUE(answer->has_value());
  EXPECT_THAT((**answer)->acknowledged(), IsEmpty());
  QUERN_ASSERT_OK(Call(&JobQueue::CancelJob, job));
  looked(absl::FailedPreconditionError("it was modified"));
  store_.Sync();
  EXPECT_EQ(Get(job).state(), Job::CANCELLED) << "what was cancelled meanwhile stays so";
}

TEST_F(JobQueueTest, FullDiskFailsTheJobWithTheBytesNeededAndDoesNotCount) {
  const uint64_t job = AddTasks(3);
  const auto first = Granted(Worker("a"));
  SynchronizeRequest done = With(Worker("a"), first, AttemptStatus::COMPLETED);
  const SynchronizeResponse next = Sync(done);
  ASSERT_THAT(next.attempts(), SizeIs(1));
  Sync(WithFailure(Worker("a"), next.attempts(0).id(), quern::v1::DISK_FULL));
  EXPECT_EQ(Get(job).state(), Job::FAILED);
  EXPECT_EQ(Get(job).error().reason(), "DISK_FULL");
  EXPECT_THAT(Get(job).error().message(), HasSubstr("disk full: /out needs 2000 bytes"));
  EXPECT_EQ(bytes_left_, 2000);
  EXPECT_EQ(Tasks(job)[1].failures(), 0);
  EXPECT_EQ(Tasks(job)[1].state(), Task::PENDING);
  QUERN_ASSERT_OK(Resume(job));
  EXPECT_THAT(Granted(Worker("a")), IsAttempt(1, 2));
}

TEST_F(JobQueueTest, OutOfMemoryHalvesDownToTheMinimumThenFails) {
  const uint64_t job = AddTasks(1);
  std::vector<uint64_t> memories;
  while (Get(job).state() != Job::FAILED) {
    ASSERT_LT(memories.size(), 20);
    const SynchronizeResponse response = Sync(Worker("a"));
    ASSERT_THAT(response.attempts(), SizeIs(1));
    memories.push_back(response.attempts(0).memory() / kMiB);
    SynchronizeRequest failed = WithFailure(Worker("a"), response.attempts(0).id(), quern::v1::OUT_OF_MEMORY, "killed by signal 9");
    failed.set_slots(0);
    Sync(failed);
  }
  EXPECT_THAT(memories, ElementsAre(512, 256, 128, 64, 32, 16, 16, 16)) << "another worker might have the memory";
  EXPECT_EQ(Get(job).error().reason(), "OUT_OF_MEMORY");
  EXPECT_THAT(Get(job).error().message(),
              HasSubstr("task 0 (shard 0): failed 3 times, the last time with: out of memory on a with a buffer pool of 16 MiB"));
  EXPECT_THAT(Get(job).error().message(), HasSubstr("raise the memory limit"));
  QUERN_ASSERT_OK(Resume(job));
  EXPECT_EQ(Sync(Worker("a")).attempts(0).memory(), 512 * kMiB);
}

TEST_F(JobQueueTest, NewIncarnationEndsTheOldAttemptsAtOnceAndIsSuspectedOfMemory) {
  const uint64_t job = AddTasks(1);
  EXPECT_THAT(Granted(Worker("a", 1, "first")), IsAttempt(0, 1));
  const SynchronizeResponse response = Sync(Worker("a", 1, "second"));
  ASSERT_THAT(response.attempts(), SizeIs(1));
  EXPECT_THAT(response.attempts(0).id(), IsAttempt(0, 2));
  EXPECT_EQ(response.attempts(0).memory(), 256 * kMiB);
  // The old one may be alive: whether it died shows when its lease has passed without a word.
  EXPECT_EQ(Tasks(job)[0].failures(), 0);
  clock_.Advance(absl::Seconds(29));
  Sync(With(Worker("a", 1, "second"), response.attempts(0).id(), AttemptStatus::RUNNING));
  queue_->Tick();
  EXPECT_EQ(Tasks(job)[0].failures(), 0);
  clock_.Advance(absl::Seconds(1));
  queue_->Tick();
  queue_->Tick();
  EXPECT_EQ(Tasks(job)[0].failures(), 1);
}

TEST_F(JobQueueTest, IncarnationThatHungUpBeforeTheNewOneCameHasDied) {
  const uint64_t job = AddTasks(1);
  for (int i = 1; i <= 3; ++i) {
    const SynchronizeRequest worker = Worker("a", 1, absl::StrCat("life ", i));
    const auto id = Granted(worker);
    EXPECT_EQ(Tasks(job)[0].failures(), i - 1);
    SynchronizeRequest waiting = With(worker, id, AttemptStatus::RUNNING);
    waiting.set_may_wait(true);
    Begin(waiting);
    queue_->CancelSynchronize(tickets_);
  }
  Sync(Worker("a", 1, "life 4"));
  const Job failed = Get(job);
  EXPECT_EQ(failed.state(), Job::FAILED);
  EXPECT_EQ(failed.error().reason(), "WORKER_LOST");
  EXPECT_THAT(failed.error().message(), HasSubstr("failed 3 times"));
}

TEST_F(JobQueueTest, SupersededIncarnationIsToldToStopAndWhy) {
  const uint64_t job = AddTasks(2);
  const SynchronizeRequest first = Worker("a", 1, "first");
  const auto old = Granted(first);
  SynchronizeRequest second = Worker("a", 1, "second");
  second.set_host("elsewhere");
  const auto id = Granted(second);
  for (int i = 0; i < 3; ++i) {
    // Also a call that may wait is answered at once.
    SynchronizeRequest again = With(first, old, AttemptStatus::RUNNING);
    again.set_may_wait(i == 1);
    const SynchronizeResponse response = Sync(again);
    EXPECT_EQ(response.desired_state(), quern::v1::STOP);
    EXPECT_THAT(response.stop_reason(), HasSubstr("another worker with the name a started on elsewhere at "));
    ASSERT_THAT(response.attempts(), SizeIs(1));
    EXPECT_TRUE(response.attempts(0).stop());
  }
  EXPECT_THAT(Sync(With(first, old, AttemptStatus::STOPPED)).acknowledged(), SizeIs(1));
  // The newest one is not disturbed.
  const SynchronizeResponse response = Sync(With(second, id, AttemptStatus::RUNNING));
  EXPECT_EQ(response.desired_state(), quern::v1::RUN);
  ASSERT_THAT(response.attempts(), SizeIs(1));
  EXPECT_FALSE(response.attempts(0).stop());
  ASSERT_THAT(queue_->ListWorkers(), SizeIs(1));
  EXPECT_EQ(queue_->ListWorkers()[0].incarnation(), "second");
  EXPECT_EQ(Tasks(job)[0].failures(), 0);
}

TEST_F(JobQueueTest, WaitingCallOfASupersededIncarnationIsToldToStopAtOnce) {
  SynchronizeRequest first = Worker("a", 1, "first");
  first.set_may_wait(true);
  const Answer answer = Begin(first);
  store_.Sync();
  EXPECT_FALSE(answer->has_value());
  Sync(Worker("a", 1, "second"));
  ASSERT_TRUE(answer->has_value());
  ASSERT_THAT(**answer, IsOk());
  EXPECT_EQ((**answer)->desired_state(), quern::v1::STOP);
  EXPECT_THAT((**answer)->stop_reason(), HasSubstr("another worker with the name a"));
}

TEST_F(JobQueueTest, WorkersOfOneNameFailNoTaskAndGetTheirMemoryBack) {
  const uint64_t job = AddTasks(1);
  // Each comes while the ones before it live, as when a service manager starts every stopped one again.
  std::vector<std::pair<SynchronizeRequest, quern::v1::AttemptId>> olds;
  for (int i = 1; i <= 20; ++i) {
    const SynchronizeRequest worker = Worker("a", 1, absl::StrCat("life ", i));
    olds.emplace_back(worker, Granted(worker));
  }
  const auto [newest, id] = olds.back();
  olds.pop_back();
  for (const auto& [worker, old] : olds) {
    EXPECT_EQ(Sync(With(worker, old, AttemptStatus::RUNNING)).desired_state(), quern::v1::STOP);
  }
  for (int i = 0; i < 5; ++i) {
    clock_.Advance(absl::Seconds(20));
    Sync(With(newest, id, AttemptStatus::RUNNING));
    queue_->Tick();
  }
  EXPECT_EQ(Get(job).state(), Job::RUNNING);
  EXPECT_EQ(Tasks(job)[0].failures(), 0);
  const SynchronizeResponse response = Sync(With(newest, id, AttemptStatus::STOPPED));
  ASSERT_THAT(response.attempts(), SizeIs(1));
  EXPECT_EQ(response.attempts(0).memory(), 512 * kMiB);
}

TEST_F(JobQueueTest, WorkThatASupersededIncarnationFinishedIsKept) {
  const uint64_t job = AddTasks(1);
  const SynchronizeRequest first = Worker("a", 1, "first");
  const auto old = Granted(first);
  const SynchronizeRequest second = Worker("a", 1, "second");
  const auto id = Granted(second);
  // Its file is looked at, then the attempt is acknowledged.
  Sync(With(first, old, AttemptStatus::COMPLETED));
  EXPECT_THAT(Sync(With(first, old, AttemptStatus::COMPLETED)).acknowledged(), SizeIs(1));
  EXPECT_EQ(Get(job).state(), Job::PUBLISHING);
  const SynchronizeResponse response = Sync(With(second, id, AttemptStatus::RUNNING));
  ASSERT_THAT(response.attempts(), SizeIs(1));
  EXPECT_TRUE(response.attempts(0).stop());
}

TEST_F(JobQueueTest, SupersededIncarnationTakesNothingUpAgain) {
  const uint64_t job = AddTasks(1);
  const SynchronizeRequest first = Worker("a", 1, "first");
  const auto old = Granted(first);
  SynchronizeRequest second = Worker("a", 1, "second");
  second.set_slots(0);
  Sync(second);
  EXPECT_EQ(Tasks(job)[0].state(), Task::PENDING);
  Sync(With(first, old, AttemptStatus::RUNNING));
  EXPECT_EQ(Tasks(job)[0].state(), Task::PENDING);
}

TEST_F(JobQueueTest, ResumedJobForgetsDeathsThatWereOnlySuspected) {
  const uint64_t job = AddTasks(1);
  Granted(Worker("a", 1, "first"));
  Sync(Worker("a", 1, "second"));
  ASSERT_THAT(Call(&JobQueue::PauseJob, job), IsOk());
  ASSERT_THAT(Resume(job), IsOk());
  clock_.Advance(absl::Seconds(20));
  queue_->Tick();
  clock_.Advance(absl::Seconds(9));
  Sync(Worker("a", 1, "second"));
  clock_.Advance(absl::Seconds(2));
  queue_->Tick();
  EXPECT_EQ(Tasks(job)[0].failures(), 0);
}

TEST_F(JobQueueTest, DrainedAttemptCountsForNothing) {
  const uint64_t job = AddTasks(1);
  const auto id = Granted(Worker("a"));
  SynchronizeRequest leaving = With(Worker("a"), id, AttemptStatus::STOPPED);
  leaving.set_draining(true);
  const SynchronizeResponse response = Sync(leaving);
  EXPECT_THAT(response.acknowledged(), SizeIs(1));
  EXPECT_THAT(response.attempts(), IsEmpty());
  EXPECT_EQ(response.desired_state(), quern::v1::DRAIN);
  EXPECT_EQ(Tasks(job)[0].failures(), 0);
  EXPECT_EQ(Tasks(job)[0].state(), Task::PENDING);
}

TEST_F(JobQueueTest, TaskThatIsGivenBackUnaskedWaitsAndCountsAsAFailure) {
  set_options_ = [](JobQueueOptions* options) { options->retry_backoff = absl::Seconds(1); };
  Restart();
  const uint64_t job = AddTasks(1);
  for (int failures = 1; failures <= 3; ++failures) {
    const SynchronizeResponse response = Sync(With(Worker("a"), Granted(Worker("a")), AttemptStatus::STOPPED));
    EXPECT_THAT(response.acknowledged(), SizeIs(1));
    EXPECT_THAT(response.attempts(), IsEmpty());
    EXPECT_EQ(Tasks(job)[0].failures(), failures);
    clock_.Advance(absl::Seconds(4));
    queue_->Tick();
  }
  EXPECT_EQ(Get(job).state(), Job::FAILED);
  EXPECT_EQ(Get(job).error().reason(), "INTERNAL");
  EXPECT_THAT(Get(job).error().message(), HasSubstr("the worker stopped it unasked"));
}

TEST_F(JobQueueTest, StopsThatACoordinatorBeforeThisOneMayHaveAskedForCountForNothing) {
  const uint64_t job = AddTasks(1);
  const auto id = Granted(Worker("a"));
  Restart();
  Sync(With(Worker("a", 0), id, AttemptStatus::STOPPED));
  EXPECT_EQ(Tasks(job)[0].failures(), 0);
  EXPECT_EQ(Tasks(job)[0].attempts(0).state(), quern::v1::Attempt::STOPPED);
}

TEST_F(JobQueueTest, WhatAWorkerSaysIsCutAndPlainBeforeItIsKept) {
  const uint64_t job = AddTasks(2);
  SynchronizeRequest worker = Worker("a");
  worker.set_host("h\x1b[2J" + std::string(100'000, 'h'));
  worker.set_version("1\n2");
  worker.add_devices()->set_self_test_passed(true);
  worker.mutable_devices(0)->set_kind("cpu\r");
  worker.mutable_devices(0)->set_name(std::string(100'000, 'n'));
  const std::string message = "\x1b[31mred\r\nerror none \u202e" + std::string(1'000'000, 'x');
  const auto id = Granted(worker);
  worker.set_slots(0);
  Sync(WithFailure(worker, id, quern::v1::IO_ERROR, message));
  const quern::v1::Attempt attempt = Tasks(job)[0].attempts(0);
  EXPECT_EQ(attempt.host().substr(0, 8), "h [2Jhhh");
  EXPECT_LT(attempt.host().size(), 400);
  EXPECT_LT(attempt.device().size(), 400);
  EXPECT_EQ(attempt.message().substr(0, 30), " [31mred  error none  xxxxxxxx");
  EXPECT_LT(attempt.message().size(), 5000);
  EXPECT_THAT(attempt.message(), HasSubstr(absl::StrCat("cut here: it has ", message.size(), " bytes")));
  const quern::v1::Worker shown = queue_->ListWorkers()[0];
  EXPECT_EQ(shown.version(), "1 2");
  EXPECT_LT(shown.ByteSizeLong(), 2000);
}

TEST_F(JobQueueTest, WorkerThatDrainsAndThenVanishesCountsForNothing) {
  const uint64_t job = AddTasks(1);
  const auto id = Granted(Worker("a"));
  SynchronizeRequest leaving = With(Worker("a"), id, AttemptStatus::RUNNING);
  leaving.set_draining(true);
  Sync(leaving);
  clock_.Advance(absl::Seconds(31));
  queue_->Tick();
  EXPECT_EQ(Tasks(job)[0].failures(), 0);
  EXPECT_EQ(Tasks(job)[0].state(), Task::PENDING);
}

TEST_F(JobQueueTest, LeaseGetsGraceAfterARestartAndItsLossDoesNotCount) {
  const uint64_t job = AddTasks(1);
  Granted(Worker("a"));
  clock_.Advance(absl::Seconds(29));
  Restart();
  clock_.Advance(absl::Seconds(29));
  queue_->Tick();
  EXPECT_EQ(Tasks(job)[0].state(), Task::RUNNING);
  clock_.Advance(absl::Seconds(2));
  queue_->Tick();
  EXPECT_EQ(Tasks(job)[0].state(), Task::PENDING);
  EXPECT_EQ(Tasks(job)[0].failures(), 0);
}

TEST_F(JobQueueTest, WorkerThatDiedWithTheCoordinatorIsReplacedAtOnceAndKeepsItsMemory) {
  const uint64_t job = AddTasks(1);
  Granted(Worker("a"));
  Restart();
  const SynchronizeResponse response = Sync(Worker("a", 1, "second"));
  ASSERT_THAT(response.attempts(), SizeIs(1));
  EXPECT_THAT(response.attempts(0).id(), IsAttempt(0, 2));
  EXPECT_EQ(response.attempts(0).memory(), 512 * kMiB);
  EXPECT_EQ(Tasks(job)[0].failures(), 0);
}

TEST_F(JobQueueTest, AttemptGoesOnOverARestartOfTheCoordinator) {
  const uint64_t job = AddTasks(1);
  const auto id = Granted(Worker("a"));
  Restart();
  EXPECT_FALSE(Sync(With(Worker("a"), id, AttemptStatus::RUNNING)).attempts(0).stop());
  Complete(Worker("a"), id);
  EXPECT_EQ(Get(job).state(), Job::PUBLISHING);
}

TEST_F(JobQueueTest, NothingIsGrantedAfterARestartBeforeTheSourceWasLookedAt) {
  const uint64_t job = AddTasks(1);
  Restart(/*release=*/false);
  EXPECT_THAT(queue_->HeldJobs(), ElementsAre(job));
  EXPECT_THAT(Sync(Worker("a")).attempts(), IsEmpty());
  queue_->Release(job, {});
  EXPECT_THAT(Granted(Worker("a")), IsAttempt(0, 1));
}

TEST_F(JobQueueTest, NothingIsPublishedAfterARestartBeforeTheSourceWasLookedAt) {
  const uint64_t job = AddTasks(1);
  Complete(Worker("a"), Granted(Worker("a")));
  Restart(/*release=*/false);
  EXPECT_THAT(ready_, IsEmpty());
  queue_->Release(job, {});
  store_.Sync();
  EXPECT_THAT(ready_, ElementsAre(job));
}

TEST_F(JobQueueTest, SequenceOfGrantsAndCommitsGoesOnOverARestart) {
  const uint64_t job = AddTasks(2);
  Complete(Worker("a"), Granted(Worker("a")));
  Restart();
  Complete(Worker("a", 1, "second"), Granted(Worker("a", 1, "second")));
  std::vector<std::pair<uint64_t, uint64_t>> sequences;
  QUERN_ASSERT_OK(store_.Scan(JobKey('a', job), [&](absl::string_view, absl::string_view value) {
    quern::store::AttemptRecord record;
    EXPECT_TRUE(record.ParseFromArray(value.data(), value.size()));
    if (record.state() == Attempt::COMMITTED) sequences.emplace_back(record.grant_sequence(), record.commit_sequence());
    return absl::OkStatus();
  }));
  ASSERT_THAT(sequences, SizeIs(2));
  EXPECT_LT(sequences[0].first, sequences[0].second);
  EXPECT_LT(sequences[0].second, sequences[1].first);
  EXPECT_LT(sequences[1].first, sequences[1].second);
}

TEST_F(JobQueueTest, TasksGoOnlyToWorkersThatSeeTheFiles) {
  NewJob add = MakeJob(1);
  SightProbe probe;
  probe.path = "/src/model.safetensors";
  probe.size = 8192;
  probe.offsets = {0, 4096};
  probe.samples = "the bytes";
  add.sight = {probe};
  const uint64_t job = Add(std::move(add));
  const SynchronizeResponse asked = Sync(Worker("a"));
  EXPECT_THAT(asked.attempts(), IsEmpty());
  ASSERT_THAT(asked.challenges(), SizeIs(1));
  EXPECT_EQ(asked.challenges(0).path(), "/src/model.safetensors");
  EXPECT_THAT(asked.challenges(0).offsets(), ElementsAre(0, 4096));

  SynchronizeRequest wrong = Worker("a");
  quern::v1::SightAnswer* answer = wrong.add_sight();
  answer->set_job(JobName(job));
  answer->set_what(quern::v1::SightChallenge::SOURCE);
  answer->set_nonce(asked.challenges(0).nonce());
  answer->set_seen(true);
  answer->set_digest(SightDigest(asked.challenges(0).nonce(), "other bytes"));
  EXPECT_THAT(Sync(wrong).attempts(), IsEmpty());
  EXPECT_THAT(Sync(Worker("a")).challenges(), IsEmpty()) << "it is not asked again at once";

  clock_.Advance(absl::Seconds(6));
  const SynchronizeResponse again = Sync(Worker("a"));
  ASSERT_THAT(again.challenges(), SizeIs(1));
  EXPECT_NE(again.challenges(0).nonce(), asked.challenges(0).nonce());
  SynchronizeRequest right = wrong;
  right.mutable_sight(0)->set_nonce(again.challenges(0).nonce());
  right.mutable_sight(0)->set_digest(SightDigest(again.challenges(0).nonce(), "the bytes"));
  EXPECT_THAT(Granted(right), IsAttempt(0, 1));

  // Another process may stand on another machine: it proves it anew.
  EXPECT_THAT(Sync(Worker("a", 1, "second")).attempts(), IsEmpty());
}

TEST_F(JobQueueTest, WorkerWithOtherNumericsGetsNothing) {
  AddTasks(1);
  SynchronizeRequest request = Worker("a");
  request.set_numerics_version(2);
  EXPECT_THAT(Sync(request).attempts(), IsEmpty());
  ASSERT_THAT(queue_->ListWorkers(), SizeIs(1));
  EXPECT_EQ(queue_->ListWorkers()[0].state(), "unusable");
}

TEST_F(JobQueueTest, WorkerWhoseSelfTestFailedGetsNothing) {
  AddTasks(1);
  SynchronizeRequest request = Worker("a");
  request.add_devices()->set_kind("cpu");
  EXPECT_THAT(Sync(request).attempts(), IsEmpty());
  request.mutable_devices(0)->set_self_test_passed(true);
  EXPECT_THAT(Sync(request).attempts(), SizeIs(1));
}

TEST_F(JobQueueTest, WorkerThatLeavesSoonGetsNothing) {
  AddTasks(1);
  SynchronizeRequest request = Worker("a");
  request.mutable_available_for()->set_seconds(30);
  EXPECT_THAT(Sync(request).attempts(), IsEmpty());
  request.mutable_available_for()->set_seconds(3600);
  EXPECT_THAT(Sync(request).attempts(), SizeIs(1));
}

TEST_F(JobQueueTest, ExperienceSaysWhetherATaskCanFinish) {
  AddTasks(3);
  SynchronizeRequest done = With(Worker("a"), Granted(Worker("a")), AttemptStatus::COMPLETED);
  done.mutable_attempts(0)->mutable_result()->mutable_times()->set_wall_seconds(1000);
  done.set_slots(0);
  Sync(done);
  SynchronizeRequest request = Worker("a");
  request.mutable_available_for()->set_seconds(1200);
  EXPECT_THAT(Sync(request).attempts(), IsEmpty());
  request.mutable_available_for()->set_seconds(1600);
  EXPECT_THAT(Sync(request).attempts(), SizeIs(1));
}

TEST_F(JobQueueTest, WorkerWithTooLittleMemoryIsPassedOverOrNamed) {
  const uint64_t job = AddTasks(1);
  SynchronizeRequest small = Worker("small");
  small.set_memory(8 * kMiB);
  SynchronizeRequest big = Worker("big");
  big.set_numerics_version(1);
  big.set_draining(true);
  Sync(big);
  EXPECT_THAT(Sync(small).attempts(), IsEmpty());
  EXPECT_EQ(Get(job).state(), Job::QUEUED) << "a big one is there and may come back";
  clock_.Advance(absl::Seconds(31));
  queue_->Tick();
  Sync(small);
  EXPECT_EQ(Get(job).state(), Job::FAILED);
  EXPECT_EQ(Get(job).error().reason(), "MEMORY_TOO_SMALL");
  EXPECT_THAT(Get(job).error().message(), HasSubstr("at least 16 MiB, and worker small has 8 MiB"));
}

TEST_F(JobQueueTest, PausedJobFinishesWhatRunsAndGrantsNothing) {
  const uint64_t job = AddTasks(2);
  const auto id = Granted(Worker("a"));
  QUERN_ASSERT_OK(Call(&JobQueue::PauseJob, job));
  EXPECT_FALSE(Sync(With(Worker("a"), id, AttemptStatus::RUNNING)).attempts(0).stop());
  Complete(Worker("a"), id);
  EXPECT_EQ(Get(job).state(), Job::PAUSED);
  EXPECT_THAT(Sync(Worker("a")).attempts(), IsEmpty());
  Restart();
  EXPECT_EQ(Get(job).state(), Job::PAUSED);
  QUERN_ASSERT_OK(Resume(job));
  EXPECT_THAT(Granted(Worker("a")), IsAttempt(1, 1));
}

TEST_F(JobQueueTest, CompletePausedJobPublishesOnResume) {
  const uint64_t job = AddTasks(1);
  const auto id = Granted(Worker("a"));
  QUERN_ASSERT_OK(Call(&JobQueue::PauseJob, job));
  Complete(Worker("a"), id);
  EXPECT_THAT(ready_, IsEmpty());
  QUERN_ASSERT_OK(Resume(job));
  EXPECT_THAT(ready_, ElementsAre(job));
}

TEST_F(JobQueueTest, CancelWaitsForRunningAttempts) {
  const uint64_t job = AddTasks(2);
  const auto id = Granted(Worker("a"));
  QUERN_ASSERT_OK(Call(&JobQueue::CancelJob, job));
  EXPECT_EQ(Get(job).state(), Job::CANCELLING);
  const SynchronizeResponse response = Sync(With(Worker("a"), id, AttemptStatus::RUNNING));
  EXPECT_TRUE(response.attempts(0).stop());
  EXPECT_EQ(response.attempts(0).stop_reason(), "the job was cancelled");
  Sync(With(Worker("a"), id, AttemptStatus::STOPPED));
  EXPECT_EQ(Get(job).state(), Job::CANCELLED);
  EXPECT_TRUE(Get(job).has_end_time());
  QUERN_ASSERT_OK(Resume(job));
  EXPECT_THAT(Granted(Worker("a")), IsAttempt(0, 2));
}

TEST_F(JobQueueTest, CancelOfAnIdleJobIsImmediate) {
  const uint64_t job = AddTasks(2);
  EXPECT_EQ(Call(&JobQueue::CancelJob, job)->state(), Job::CANCELLED);
}

TEST_F(JobQueueTest, WorkerThatHasSaidThatItLeavesGetsNothingUntilItStartsAnew) {
  const uint64_t job = AddTasks(1);
  const auto id = Granted(Worker("a"));
  SynchronizeRequest leaving = Worker("a", 0);
  leaving.set_draining(true);
  Sync(With(leaving, id, AttemptStatus::STOPPED));
  EXPECT_EQ(Tasks(job)[0].failures(), 0);
  EXPECT_THAT(Sync(Worker("a")).attempts(), IsEmpty());
  SynchronizeRequest anew = Worker("a");
  anew.set_incarnation("anew");
  EXPECT_THAT(Granted(anew), IsAttempt(0, 2));
}

TEST_F(JobQueueTest, JobSaysThatItWaitsForAWorker) {
  const uint64_t job = AddTasks(1);
  EXPECT_THAT(Get(job).waits_for(), HasSubstr("none is connected"));
  const auto id = Granted(Worker("a"));
  EXPECT_EQ(Get(job).waits_for(), "");
  Complete(Worker("a"), id);
  EXPECT_EQ(Get(job).waits_for(), "");
}

TEST_F(JobQueueTest, DeletedJobIsGoneAndItsAttemptsAreStopped) {
  const uint64_t job = AddTasks(1);
  const auto id = Granted(Worker("a"));
  queue_->DeleteJob(job, [](absl::Status status) { EXPECT_THAT(status, IsOk()); });
  store_.Sync();
  EXPECT_TRUE(Sync(With(Worker("a"), id, AttemptStatus::RUNNING)).attempts(0).stop());
  EXPECT_THAT(Call(&JobQueue::GetJob, job), StatusIs(absl::StatusCode::kNotFound));
  int left = 0;
  QUERN_ASSERT_OK(store_.Scan("", [&](absl::string_view, absl::string_view) {
    ++left;
    return absl::OkStatus();
  }));
  EXPECT_EQ(left, 1) << "only the next number of a job";
  EXPECT_GT(AddTasks(1), job);
}

TEST_F(JobQueueTest, TasksWhoseFilesAreGoneAreDoneAgainOnResume) {
  const uint64_t job = AddTasks(2);
  Complete(Worker("a"), Granted(Worker("a")));
  QUERN_ASSERT_OK(Call(&JobQueue::PauseJob, job));
  ResumeOptions options;
  options.lost_tasks = {0};
  QUERN_ASSERT_OK(Resume(job, std::move(options)));
  Sync(Worker("a", 0, "second"));
  EXPECT_THAT(Granted(Worker("b")), IsAttempt(0, 2));
}

TEST_F(JobQueueTest, BytesOfLostTasksCountAsNotWritten) {
  const uint64_t job = AddTasks(4);
  for (int i = 0; i < 3; ++i) Complete(Worker("a"), Granted(Worker("a")));
  ASSERT_EQ(Get(job).progress().bytes_written(), 3000);
  QUERN_ASSERT_OK(Call(&JobQueue::PauseJob, job));
  ResumeOptions options;
  options.lost_tasks = {0, 2};
  QUERN_ASSERT_OK(Resume(job, std::move(options)));
  EXPECT_EQ(Get(job).progress().bytes_written(), 1000);
}

TEST_F(JobQueueTest, JobWithoutTasksIsReadyAtOnce) {
  const uint64_t job = AddTasks(0);
  EXPECT_THAT(ready_, ElementsAre(job));
}

TEST_F(JobQueueTest, FinishedJobIsRecordedAsSucceeded) {
  NewJob add = MakeJob(0);
  add.finished = true;
  const uint64_t job = Add(std::move(add));
  EXPECT_THAT(ready_, IsEmpty());
  EXPECT_EQ(Get(job).state(), Job::SUCCEEDED);
}

TEST_F(JobQueueTest, IdleCallWaitsUntilThereIsWork) {
  SynchronizeRequest idle = Worker("a");
  idle.set_may_wait(true);
  const Answer answer = Begin(idle);
  store_.Sync();
  EXPECT_FALSE(answer->has_value());
  AddTasks(1);
  ASSERT_TRUE(answer->has_value());
  EXPECT_THAT((**answer)->attempts(), SizeIs(1));
}

TEST_F(JobQueueTest, IdleCallEndsWithTheLongPoll) {
  SynchronizeRequest idle = Worker("a");
  idle.set_may_wait(true);
  const Answer answer = Begin(idle);
  clock_.Advance(absl::Seconds(14));
  queue_->Tick();
  EXPECT_FALSE(answer->has_value());
  clock_.Advance(absl::Seconds(6));
  queue_->Tick();
  ASSERT_TRUE(answer->has_value());
  EXPECT_THAT(**answer, IsOk());
}

TEST_F(JobQueueTest, CallsThatBeginTogetherDoNotEndTogether) {
  std::vector<Answer> answers;
  for (int i = 0; i < 100; ++i) {
    SynchronizeRequest idle = Worker(absl::StrCat("w", i));
    idle.set_may_wait(true);
    answers.push_back(Begin(idle));
  }
  const auto ended = [&] {
    return std::count_if(answers.begin(), answers.end(), [](const Answer& answer) { return answer->has_value(); });
  };
  clock_.Advance(absl::Milliseconds(17'500));
  queue_->Tick();
  EXPECT_GT(ended(), 0);
  EXPECT_LT(ended(), 100);
  clock_.Advance(absl::Milliseconds(2'500));
  queue_->Tick();
  EXPECT_EQ(ended(), 100);
}

TEST_F(JobQueueTest, IdleWorkerIsNotLostWhileItsCallWaits) {
  set_options_ = [](JobQueueOptions* options) { options->lease = absl::Seconds(3); };
  Restart();
  SynchronizeRequest idle = Worker("a");
  idle.set_may_wait(true);
  const Answer answer = Begin(idle);
  clock_.Advance(absl::Seconds(2));
  queue_->Tick();
  EXPECT_TRUE(answer->has_value());
  Begin(idle);
  clock_.Advance(absl::Seconds(2));
  queue_->Tick();
  EXPECT_EQ(queue_->ListWorkers().at(0).state(), "ready");
  queue_->Shutdown();
}

TEST_F(JobQueueTest, WaitingBusyCallHearsOfACancelAtOnce) {
  const uint64_t job = AddTasks(1);
  SynchronizeRequest busy = With(Worker("a"), Granted(Worker("a")), AttemptStatus::RUNNING);
  busy.set_may_wait(true);
  const Answer answer = Begin(busy);
  store_.Sync();
  EXPECT_FALSE(answer->has_value());
  QUERN_ASSERT_OK(Call(&JobQueue::CancelJob, job));
  ASSERT_TRUE(answer->has_value());
  EXPECT_TRUE((**answer)->attempts(0).stop());
  const Answer told = Begin(busy);
  store_.Sync();
  EXPECT_FALSE(told->has_value()) << "it was told already";
  queue_->Shutdown();
}

TEST_F(JobQueueTest, NewerCallTakesThePlaceOfAWaitingOne) {
  SynchronizeRequest idle = Worker("a");
  idle.set_may_wait(true);
  const Answer first = Begin(idle);
  const Answer second = Begin(idle);
  ASSERT_TRUE(first->has_value());
  EXPECT_THAT(**first, StatusIs(absl::StatusCode::kAborted));
  EXPECT_FALSE(second->has_value());
  queue_->CancelSynchronize(tickets_);
  ASSERT_TRUE(second->has_value());
  EXPECT_THAT(**second, StatusIs(absl::StatusCode::kCancelled));
  AddTasks(1);
  EXPECT_EQ(queue_->ListWorkers()[0].tasks_size(), 0) << "nothing is granted to a call that is gone";
}

TEST_F(JobQueueTest, ShutdownEndsWaitingCalls) {
  SynchronizeRequest idle = Worker("a");
  idle.set_may_wait(true);
  const Answer answer = Begin(idle);
  queue_->Shutdown();
  ASSERT_TRUE(answer->has_value());
  EXPECT_THAT(**answer, StatusIs(absl::StatusCode::kUnavailable));
}

TEST_F(JobQueueTest, AfterAFailureOfTheStoreNothingIsPromised) {
  AddTasks(1);
  SynchronizeRequest idle = Worker("idle", 0);
  idle.set_may_wait(true);
  const Answer waiting = Begin(idle);
  store_.FailWith(absl::ResourceExhaustedError("disk full"));
  const Answer answer = Begin(Worker("a"));
  store_.Sync();
  ASSERT_TRUE(answer->has_value());
  EXPECT_THAT(**answer, StatusIs(absl::StatusCode::kResourceExhausted));
  EXPECT_THAT(broken_, StatusIs(absl::StatusCode::kResourceExhausted));
  ASSERT_TRUE(waiting->has_value());
  EXPECT_THAT(**waiting, StatusIs(absl::StatusCode::kResourceExhausted));
  EXPECT_THAT(**Begin(Worker("b")), StatusIs(absl::StatusCode::kResourceExhausted));
}

TEST_F(JobQueueTest, CallWithoutAProperNameIsRefused) {
  std::vector<SynchronizeRequest> requests;
  for (const std::string& name : std::vector<std::string>{"", "a\nb", std::string(1000, 'x')}) requests.push_back(Worker(name));
  requests.push_back(Worker("a", 1, ""));
  requests.push_back(Worker("a", 1, std::string(1000, 'x')));
  for (const SynchronizeRequest& request : requests) {
    const Answer answer = Begin(request);
    ASSERT_TRUE(answer->has_value());
    EXPECT_THAT(**answer, StatusIs(absl::StatusCode::kInvalidArgument));
  }
  EXPECT_THAT(queue_->ListWorkers(), IsEmpty());
}

TEST_F(JobQueueTest, ProgressAndErrorsAreSummed) {
  const uint64_t job = AddTasks(2);
  SynchronizeRequest done = With(Worker("a"), Granted(Worker("a")), AttemptStatus::COMPLETED);
  for (double sse : {1.0, 3.0}) {
    quern::v1::ModuleError* error = done.mutable_attempts(0)->mutable_result()->add_errors();
    error->set_module(absl::StrCat("m", sse));
    error->set_sum_squared_error(sse);
    error->set_sum_squares(100);
    error->set_max_abs_error(sse / 10);
  }
  const SynchronizeResponse next = Sync(done);
  SynchronizeRequest busy = With(Worker("a"), next.attempts(0).id(), AttemptStatus::RUNNING);
  busy.mutable_attempts(0)->set_bytes_read(500);
  const uint64_t before = queue_->Revision(job);
  Sync(busy);
  EXPECT_GT(queue_->Revision(job), before);
  const quern::v1::Progress progress = Get(job).progress();
  EXPECT_EQ(progress.tasks_done(), 1);
  EXPECT_EQ(progress.tasks_running(), 1);
  EXPECT_EQ(progress.bytes_read(), 4500);
  EXPECT_EQ(progress.bytes_to_write(), 2000);
  EXPECT_EQ(progress.sum_squared_error(), 4);
  EXPECT_EQ(progress.sum_squares(), 200);
  EXPECT_EQ(progress.max_abs_error(), 0.3);
  EXPECT_EQ(progress.worst_module(), "m3");
  const uint64_t revision = queue_->Revision(job);
  Restart();
  EXPECT_GT(queue_->Revision(job), 0);
  EXPECT_EQ(Get(job).progress().sum_squared_error(), 4);
  clock_.Advance(absl::Seconds(1));
  Restart();
  EXPECT_GT(queue_->Revision(job), revision);
}

TEST(JobName, ParsesOnlyItsOwnForm) {
  EXPECT_THAT(ParseJobName("jobs/12"), IsOkAndHolds(12));
  for (const char* bad : {"12", "jobs/", "jobs/+1", "jobs/01", "jobs/ 1", "jobs/1/tasks/2", "jobs/99999999999999999999"}) {
    EXPECT_THAT(ParseJobName(bad), StatusIs(absl::StatusCode::kInvalidArgument)) << bad;
  }
}

}  // namespace
}  // namespace quern::daemon
