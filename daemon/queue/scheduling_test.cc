// Who gets which task, and what is thought of workers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/queue/job_queue_fixture.h"

namespace quern::daemon {
namespace {

using quern::v1::Attempt;
using quern::v1::AttemptId;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

class SchedulingTest : public JobQueueTest {
 protected:
  void StartWith(std::function<void(JobQueueOptions*)> set) {
    set_options_ = std::move(set);
    Restart();
  }

  void Wait(absl::Duration time) {
    clock_.Advance(time);
    queue_->Tick();
    store_.Sync();
  }

  // What the call grants, in order.
  std::vector<quern::v1::DesiredAttempt> Grants(const SynchronizeRequest& request) {
    std::vector<quern::v1::DesiredAttempt> grants;
    const SynchronizeResponse response = Sync(request);
    for (const auto& attempt : response.attempts()) {
      if (attempt.has_spec()) grants.push_back(attempt);
    }
    return grants;
  }
  void Fail(const SynchronizeRequest& worker, const AttemptId& id, quern::v1::FailureReason reason = quern::v1::IO_ERROR) {
    SynchronizeRequest request = WithFailure(worker, id, reason);
    request.set_slots(0);
    Sync(request);
  }
  void CompleteAndRest(SynchronizeRequest worker, const AttemptId& id, double seconds = 0, const std::string& digest = "digest") {
    worker.set_slots(0);
    SynchronizeRequest request = With(std::move(worker), id, AttemptStatus::COMPLETED);
    request.mutable_attempts(0)->mutable_result()->mutable_times()->set_wall_seconds(seconds);
    request.mutable_attempts(0)->mutable_result()->set_sha256(digest);
    EXPECT_THAT(Sync(request).acknowledged(), SizeIs(1));
  }

  quern::v1::Worker WorkerNamed(const std::string& name) {
    for (quern::v1::Worker& worker : queue_->ListWorkers()) {
      if (worker.name() == absl::StrCat("workers/", name)) return worker;
    }
    return {};
  }
  absl::Status Cordon(const std::string& name) {
    absl::Status status = absl::InternalError("not called");
    queue_->CordonWorker(name, "new disk", [&](absl::StatusOr<quern::v1::Worker> worker) { status = worker.status(); });
    store_.Sync();
    return status;
  }
  absl::Status Uncordon(const std::string& name) {
    absl::Status status = absl::InternalError("not called");
    queue_->UncordonWorker(name, [&](absl::StatusOr<quern::v1::Worker> worker) { status = worker.status(); });
    store_.Sync();
    return status;
  }
  absl::Status Drain(const std::string& name) {
    absl::Status status = absl::InternalError("not called");
    queue_->DrainWorker(name, [&](absl::StatusOr<quern::v1::Worker> worker) { status = worker.status(); });
    store_.Sync();
    return status;
  }
};

// ---- Several jobs ----

TEST_F(SchedulingTest, EqualJobsShareTheWorkers) {
  const uint64_t first = Add(MakeJob(10, "/a")), second = Add(MakeJob(10, "/b"));
  std::map<std::string, int> running;
  for (int i = 0; i < 6; ++i) ++running[Granted(Worker(absl::StrCat("w", i))).job()];
  EXPECT_EQ(running[JobName(first)], 3);
  EXPECT_EQ(running[JobName(second)], 3);
}

TEST_F(SchedulingTest, SingleWorkerTakesTurnsBetweenEqualJobs) {
  Add(MakeJob(10, "/a"));
  Add(MakeJob(10, "/b"));
  std::map<std::string, int> served;
  AttemptId id = Granted(Worker("w"));
  for (int i = 0; i < 6; ++i) {
    ++served[id.job()];
    id = Granted(With(Worker("w"), id, AttemptStatus::COMPLETED));
  }
  EXPECT_THAT(served, testing::Each(testing::Pair(testing::_, 3)));
}

TEST_F(SchedulingTest, JobOfLowerPriorityGetsWhatIsLeft) {
  NewJob urgent = MakeJob(1, "/a");
  urgent.priority = 1;
  Add(MakeJob(5, "/b"));
  const uint64_t first = Add(std::move(urgent));
  const auto grants = Grants(Worker("w", 3));
  ASSERT_THAT(grants, SizeIs(3));
  EXPECT_EQ(grants[0].id().job(), JobName(first));
  EXPECT_NE(grants[1].id().job(), JobName(first));
}

// ---- Failures ----

TEST_F(SchedulingTest, FailedTaskWaitsLongerEachTime) {
  StartWith([](JobQueueOptions* options) { options->retry_backoff = absl::Seconds(1); });
  AddTasks(1);
  Fail(Worker("a"), Granted(Worker("a")));
  EXPECT_THAT(Grants(Worker("a")), IsEmpty());
  Wait(absl::Milliseconds(999));
  EXPECT_THAT(Grants(Worker("a")), IsEmpty());
  Wait(absl::Milliseconds(1));
  Fail(Worker("a"), Granted(Worker("a")));
  Wait(absl::Milliseconds(1999));
  EXPECT_THAT(Grants(Worker("a")), IsEmpty());
  // Whoever waits hears of it.
  SynchronizeRequest idle = Worker("a");
  idle.set_may_wait(true);
  const Answer answer = Begin(idle);
  Wait(absl::Milliseconds(1));
  ASSERT_TRUE(answer->has_value());
  EXPECT_THAT((**answer)->attempts(), SizeIs(1));
}

TEST_F(SchedulingTest, OtherTasksDoNotWaitForAFailedOne) {
  StartWith([](JobQueueOptions* options) { options->retry_backoff = absl::Seconds(1); });
  AddTasks(2);
  Fail(Worker("a"), Granted(Worker("a")));
  EXPECT_THAT(Granted(Worker("a")), IsAttempt(1, 1));
}

TEST_F(SchedulingTest, ResumedJobDoesNotWait) {
  StartWith([](JobQueueOptions* options) { options->retry_backoff = absl::Minutes(1); });
  const uint64_t job = AddTasks(1);
  Fail(Worker("a"), Granted(Worker("a")));
  QUERN_ASSERT_OK(Call(&JobQueue::PauseJob, job));
  QUERN_ASSERT_OK(Resume(job));
  EXPECT_THAT(Granted(Worker("a")), IsAttempt(0, 2));
}

TEST_F(SchedulingTest, FailedTaskGoesToAnotherWorkerWhileThereIsOne) {
  AddTasks(2);
  const SynchronizeRequest busy = With(Worker("b"), Granted(Worker("b")), AttemptStatus::RUNNING);
  Fail(Worker("a"), Granted(Worker("a")));
  EXPECT_THAT(Grants(Worker("a")), IsEmpty());
  const auto id = Granted(Worker("c"));
  EXPECT_THAT(id, IsAttempt(1, 2));
  Fail(Worker("c"), id);
  Wait(absl::Seconds(29));
  Sync(busy);
  EXPECT_THAT(Grants(Worker("a")), IsEmpty()) << "b could, it is only busy";
  // Nobody took it for a lease: then whoever asks may.
  Wait(absl::Seconds(2));
  EXPECT_THAT(Granted(Worker("a")), IsAttempt(1, 3));
}

TEST_F(SchedulingTest, BrokenWorkerDoesNotFailAJobWhoseOtherWorkersAreLongBusy) {
  const uint64_t job = AddTasks(2);
  const auto id = Granted(Worker("good"));
  for (int i = 0; i < 10; ++i) {
    Fail(Worker("broken"), Granted(Worker("broken")));
    for (int beat = 0; beat < 2; ++beat) {
      Wait(absl::Seconds(16));
      Sync(With(Worker("good"), id, AttemptStatus::RUNNING));
    }
  }
  EXPECT_EQ(Get(job).state(), Job::RUNNING);
  EXPECT_EQ(Tasks(job)[1].failures(), 1);
  CompleteAndRest(Worker("good"), id);
  CompleteAndRest(Worker("good"), Granted(Worker("good")));
  EXPECT_THAT(ready_, ElementsAre(job));
}

TEST_F(SchedulingTest, LostLinkDoesNotCount) {
  const uint64_t job = AddTasks(1);
  for (int i = 0; i < 5; ++i) Fail(Worker("a"), Granted(Worker("a")), quern::v1::LINK_LOST);
  EXPECT_EQ(Tasks(job)[0].failures(), 0);
  EXPECT_EQ(Get(job).state(), Job::RUNNING);
}

TEST_F(SchedulingTest, WorkerThatFailsEverythingIsSetAsideUntilItIsUncordoned) {
  NewJob add = MakeJob(30);
  const uint64_t job = Add(std::move(add));
  for (int i = 0; i < 5; ++i) {
    Complete(Worker("good", 0), Granted(Worker("good")));
    EXPECT_EQ(WorkerNamed("bad").state(), i == 0 ? "" : "ready");
    Fail(Worker("bad"), Granted(Worker("bad")));
  }
  EXPECT_EQ(Get(job).state(), Job::RUNNING);
  EXPECT_EQ(WorkerNamed("bad").state(), "set aside");
  EXPECT_EQ(WorkerNamed("bad").failures_in_a_row(), 5);
  EXPECT_THAT(WorkerNamed("bad").detail(), HasSubstr("its last 5 attempts failed while others committed, the last one with: why"));
  EXPECT_THAT(Grants(Worker("bad")), IsEmpty());
  Restart();
  EXPECT_THAT(Grants(Worker("bad", 1, "second")), IsEmpty()) << "its name is what was set aside";
  QUERN_ASSERT_OK(Uncordon("bad"));
  EXPECT_THAT(Grants(Worker("bad", 1, "second")), SizeIs(1));
  Restart();
  EXPECT_EQ(WorkerNamed("bad").state(), "lost") << "it has not called this coordinator yet";
  Sync(Worker("bad", 1, "second"));
  EXPECT_EQ(WorkerNamed("bad").state(), "ready");
}

TEST_F(SchedulingTest, WorkerThatLiesAboutTheSourceIsSetAside) {
  confirmed_ = absl::OkStatus();
  const uint64_t job = AddTasks(30);
  for (int i = 0; i < 5; ++i) {
    Complete(Worker("good", 0), Granted(Worker("good")));
    Fail(Worker("liar"), Granted(Worker("liar")), i % 2 == 0 ? quern::v1::SOURCE_CHANGED : quern::v1::BAD_INPUT);
  }
  EXPECT_EQ(WorkerNamed("liar").state(), "set aside");
  EXPECT_EQ(Get(job).state(), Job::RUNNING);
}

TEST_F(SchedulingTest, WorkersAreNotSetAsideWhenNobodySucceeds) {
  for (int i = 0; i < 8; ++i) {
    Add(MakeJob(1, absl::StrCat("/out", i)));
    Fail(Worker("a"), Granted(Worker("a")));
  }
  EXPECT_EQ(WorkerNamed("a").state(), "ready");
}

TEST_F(SchedulingTest, SuccessEndsARowOfFailures) {
  AddTasks(30);
  for (int i = 0; i < 12; ++i) {
    Complete(Worker("good", 0), Granted(Worker("good")));
    const auto id = Granted(Worker("a"));
    if (i % 3 == 2) {
      CompleteAndRest(Worker("a"), id);
    } else {
      Fail(Worker("a"), id);
    }
  }
  EXPECT_EQ(WorkerNamed("a").state(), "ready");
  EXPECT_EQ(WorkerNamed("a").failures_in_a_row(), 0);
}

// ---- Cordon and drain ----

TEST_F(SchedulingTest, CordonedWorkerFinishesWhatItRunsAndGetsNothingNew) {
  AddTasks(3);
  const auto id = Granted(Worker("a"));
  QUERN_ASSERT_OK(Cordon("a"));
  EXPECT_EQ(WorkerNamed("a").state(), "cordoned");
  EXPECT_EQ(WorkerNamed("a").detail(), "cordoned: new disk");
  EXPECT_FALSE(Sync(With(Worker("a"), id, AttemptStatus::RUNNING)).attempts(0).stop());
  Complete(Worker("a"), id);
  EXPECT_THAT(Grants(Worker("a")), IsEmpty());
  EXPECT_THAT(Grants(Worker("a", 1, "second")), IsEmpty()) << "a new process is cordoned too";
  Restart();
  EXPECT_THAT(Grants(Worker("a", 1, "third")), IsEmpty()) << "also for another coordinator";
  SynchronizeRequest idle = Worker("a", 1, "third");
  idle.set_may_wait(true);
  const Answer answer = Begin(idle);
  QUERN_ASSERT_OK(Uncordon("a"));
  ASSERT_TRUE(answer->has_value()) << "it hears of it at once";
  EXPECT_THAT((**answer)->attempts(), SizeIs(1));
}

TEST_F(SchedulingTest, CordonIsToldOnlyOnceItIsStored) {
  Sync(Worker("a"));
  bool told = false;
  queue_->CordonWorker("a", "", [&](absl::StatusOr<quern::v1::Worker> worker) { told = worker.ok(); });
  EXPECT_FALSE(told);
  store_.Sync();
  EXPECT_TRUE(told);
}

TEST_F(SchedulingTest, CordonedWorkerThatIsAwayIsListed) {
  Sync(Worker("a"));
  QUERN_ASSERT_OK(Cordon("a"));
  Restart();
  Wait(absl::Hours(48));
  EXPECT_EQ(WorkerNamed("a").state(), "lost");
  EXPECT_EQ(WorkerNamed("a").detail(), "cordoned: new disk");
  QUERN_ASSERT_OK(Uncordon("a"));
  Wait(absl::Hours(2));
  EXPECT_THAT(queue_->ListWorkers(), IsEmpty());
}

TEST_F(SchedulingTest, UnknownWorkersCannotBeCordoned) {
  EXPECT_THAT(Cordon("a"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("workers/a")));
}

TEST_F(SchedulingTest, DrainedWorkerIsToldAndTakesNothingUntilItComesBack) {
  AddTasks(3);
  const auto id = Granted(Worker("a"));
  SynchronizeRequest busy = With(Worker("a"), id, AttemptStatus::RUNNING);
  busy.set_may_wait(true);
  const Answer answer = Begin(busy);
  QUERN_ASSERT_OK(Drain("a"));
  ASSERT_TRUE(answer->has_value()) << "it hears of it at once";
  EXPECT_EQ((**answer)->desired_state(), quern::v1::DRAIN);
  EXPECT_FALSE((**answer)->attempts(0).stop());
  Restart();
  const SynchronizeResponse again = Sync(With(Worker("a"), id, AttemptStatus::COMPLETED));
  EXPECT_EQ(again.desired_state(), quern::v1::DRAIN);
  EXPECT_THAT(again.attempts(), IsEmpty());
  EXPECT_EQ(WorkerNamed("a").state(), "draining");
  EXPECT_THAT(Grants(Worker("a", 1, "second")), SizeIs(1));
}

// ---- What fits a worker ----

TEST_F(SchedulingTest, SmallWorkerGetsTheTasksThatFit) {
  NewJob add = MakeJob(3);
  add.tasks[0].set_minimum_memory(1024 * kMiB);
  add.tasks[1].set_minimum_memory(600 * kMiB);
  Add(std::move(add));
  SynchronizeRequest big = Worker("big");
  big.set_memory(2048 * kMiB);
  big.set_slots(1);
  EXPECT_THAT(Granted(big), IsAttempt(0, 1));
  EXPECT_THAT(Granted(Worker("small")), IsAttempt(2, 1));
}

TEST_F(SchedulingTest, NoTaskFailsForMemoryBeforeWorkersCouldComeBack) {
  NewJob add = MakeJob(1);
  add.tasks[0].set_minimum_memory(1024 * kMiB);
  const uint64_t job = Add(std::move(add));
  Restart();
  EXPECT_THAT(Grants(Worker("small")), IsEmpty());
  EXPECT_EQ(Get(job).state(), Job::QUEUED);
  Wait(absl::Seconds(30));
  Sync(Worker("small"));
  EXPECT_EQ(Get(job).error().reason(), "MEMORY_TOO_SMALL");
}

TEST_F(SchedulingTest, JobIsPinnedToItsNumericsVersion) {
  NewJob add = MakeJob(1);
  add.plan.set_numerics_version(7);
  const uint64_t job = Add(std::move(add));
  EXPECT_EQ(Get(job).numerics_version(), 7);
  EXPECT_THAT(Grants(Worker("a")), IsEmpty());
  StartWith([](JobQueueOptions* options) { options->numerics_version = 7; });
  EXPECT_THAT(Grants(Worker("a")), IsEmpty());
  EXPECT_THAT(WorkerNamed("a").detail(), HasSubstr("its numerics version is 1, this coordinator's is 7"));
  SynchronizeRequest fits = Worker("b");
  fits.set_numerics_version(7);
  EXPECT_THAT(Grants(fits), SizeIs(1));
}

TEST_F(SchedulingTest, FailedSelfTestIsShownWithItsReason) {
  AddTasks(1);
  SynchronizeRequest request = Worker("a");
  quern::v1::Device& device = *request.add_devices();
  device.set_kind("cpu");
  device.set_name("AVX2");
  device.set_self_test_detail("W4A16 row 3 differs");
  EXPECT_THAT(Grants(request), IsEmpty());
  EXPECT_EQ(WorkerNamed("a").state(), "unusable");
  EXPECT_EQ(WorkerNamed("a").detail(), "the self-test failed on cpu AVX2 (W4A16 row 3 differs)");
}

TEST_F(SchedulingTest, WorkersOwnSpeedSaysWhetherATaskCanFinish) {
  AddTasks(4);
  const auto slow = Granted(Worker("slow")), fast = Granted(Worker("fast"));
  CompleteAndRest(Worker("slow"), slow, 100);
  CompleteAndRest(Worker("fast"), fast, 10);
  for (const char* name : {"slow", "fast"}) {
    SynchronizeRequest request = Worker(name);
    request.mutable_available_for()->set_seconds(60);
    EXPECT_THAT(Grants(request), SizeIs(std::string(name) == "fast" ? 1 : 0)) << name;
  }
}

TEST_F(SchedulingTest, BlindWorkerGetsTasksOnceItsFilesCanBeStreamed) {
  bool can_stream = false;
  StartWith([&](JobQueueOptions* options) {
    options->can_stream = [&](const SynchronizeRequest& worker, uint64_t, quern::v1::SightChallenge::What) {
      EXPECT_EQ(worker.worker(), "far");
      return can_stream;
    };
  });
  NewJob add = MakeJob(1);
  SightProbe source, output;
  output.what = quern::v1::SightChallenge::OUTPUT;
  source.samples = "source";
  output.samples = "output";
  add.sight = {source, output};
  Add(std::move(add));
  SynchronizeRequest request = Worker("far");
  const SynchronizeResponse asked = Sync(request);
  for (const auto& challenge : asked.challenges()) {
    quern::v1::SightAnswer& answer = *request.add_sight();
    answer.set_job(challenge.job());
    answer.set_what(challenge.what());
    answer.set_nonce(challenge.nonce());
    answer.set_seen(challenge.what() == quern::v1::SightChallenge::SOURCE);
    answer.set_digest(SightDigest(challenge.nonce(), "source"));
  }
  ASSERT_THAT(request.sight(), SizeIs(2));
  EXPECT_THAT(Grants(request), IsEmpty());
  can_stream = true;
  const auto grants = Grants(Worker("far"));
  ASSERT_THAT(grants, SizeIs(1));
  EXPECT_FALSE(grants[0].fetch_source());
  EXPECT_TRUE(grants[0].send_output());
  Restart();
  const auto again = Grants(Worker("far"));
  ASSERT_THAT(again, SizeIs(1)) << "the answer was lost";
  EXPECT_TRUE(again[0].send_output());
}

// ---- Second tries ----

class StragglerTest : public SchedulingTest {
 protected:
  // Four tasks that take 10 s each are done, the last one runs on "slow".
  void SetUp() override {
    SchedulingTest::SetUp();
    job_ = AddTasks(5);
    for (int i = 0; i < 4; ++i) CompleteAndRest(Worker("fast"), Granted(Worker("fast")), 10);
    id_ = Granted(Worker("slow"));
  }
  SynchronizeRequest Slow(uint64_t bytes) {
    SynchronizeRequest request = Worker("slow");
    List(&request, id_, AttemptStatus::RUNNING)->set_bytes_read(bytes);
    return request;
  }
  uint64_t job_ = 0;
  AttemptId id_;
};

TEST_F(StragglerTest, SlowTaskIsGivenToAnIdleWorkerTooAndTheFirstCommitWins) {
  Sync(Slow(100));
  SynchronizeRequest idle = Worker("fast");
  idle.set_may_wait(true);
  const Answer answer = Begin(idle);
  Wait(absl::Seconds(9));
  EXPECT_FALSE(answer->has_value()) << "it has not run for as long as others";
  Wait(absl::Seconds(3));
  ASSERT_TRUE(answer->has_value());
  ASSERT_THAT((**answer)->attempts(), SizeIs(1));
  const quern::v1::DesiredAttempt second = (**answer)->attempts(0);
  EXPECT_THAT(second.id(), IsAttempt(4, 2));
  EXPECT_EQ(second.purpose(), quern::v1::STRAGGLER);
  EXPECT_EQ(second.output_path(), "/out/4.2");
  Wait(absl::Seconds(2));
  EXPECT_THAT(Grants(Worker("third")), IsEmpty()) << "one second try a task";
  SynchronizeRequest busy = Slow(200);
  busy.set_may_wait(true);
  const Answer slow = Begin(busy);
  CompleteAndRest(Worker("fast"), second.id(), 10);
  ASSERT_TRUE(slow->has_value()) << "the other is stopped at once";
  EXPECT_TRUE((**slow)->attempts(0).stop());
  const Task task = Tasks(job_)[4];
  EXPECT_EQ(task.attempts(0).state(), Attempt::STOPPED);
  EXPECT_EQ(task.attempts(0).reason(), "FENCED");
  EXPECT_EQ(task.attempts(1).state(), Attempt::COMMITTED);
  EXPECT_EQ(task.attempts(1).purpose(), "straggler");
  EXPECT_THAT(ready_, ElementsAre(job_));
}

TEST_F(StragglerTest, FirstAttemptMayWinToo) {
  Wait(absl::Seconds(12));
  const auto second = Grants(Worker("fast"));
  ASSERT_THAT(second, SizeIs(1));
  CompleteAndRest(Worker("slow"), id_, 12);
  EXPECT_TRUE(Sync(With(Worker("fast"), second[0].id(), AttemptStatus::RUNNING)).attempts(0).stop());
  EXPECT_THAT(ready_, ElementsAre(job_));
}

TEST_F(StragglerTest, TaskThatIsNearlyDoneIsLeftAlone) {
  Wait(absl::Seconds(11));
  Sync(Slow(4000));  // of 5000: three seconds more
  Wait(absl::Seconds(1));
  EXPECT_THAT(Grants(Worker("fast")), IsEmpty());
  Wait(absl::Seconds(28));
  Sync(Slow(4000));  // ten more
  Wait(absl::Seconds(2));
  EXPECT_THAT(Grants(Worker("fast")), SizeIs(1));
}

TEST_F(StragglerTest, WorkerThatLeavesTooSoonGetsNoSecondTry) {
  Sync(Slow(100));
  Wait(absl::Seconds(12));
  SynchronizeRequest request = Worker("fast");
  request.mutable_available_for()->set_seconds(14);  // a task takes it 10 s, with half as much to spare
  EXPECT_THAT(Grants(request), IsEmpty());
  request.mutable_available_for()->set_seconds(16);
  EXPECT_THAT(Grants(request), SizeIs(1));
}

TEST_F(StragglerTest, ItsOwnWorkerGetsNoSecondTry) {
  Sync(Slow(100));
  Wait(absl::Seconds(12));
  SynchronizeRequest request = Slow(100);
  request.set_slots(2);
  EXPECT_THAT(Grants(request), IsEmpty());
}

TEST_F(StragglerTest, SecondTryThatFailsEndsNothing) {
  Wait(absl::Seconds(12));
  const auto second = Grants(Worker("fast"));
  ASSERT_THAT(second, SizeIs(1));
  Fail(Worker("fast"), second[0].id());
  EXPECT_FALSE(Sync(Slow(100)).attempts(0).stop());
  EXPECT_EQ(Tasks(job_)[4].state(), Task::RUNNING);
  Wait(absl::Seconds(2));
  EXPECT_THAT(Grants(Worker("third")), IsEmpty()) << "no third";
  CompleteAndRest(Worker("slow"), id_);
  EXPECT_THAT(ready_, ElementsAre(job_));
}

TEST_F(SchedulingTest, NoSecondTryWhilePeersAreFew) {
  AddTasks(4);
  for (int i = 0; i < 2; ++i) CompleteAndRest(Worker("fast"), Granted(Worker("fast")), 10);
  Granted(Worker("slow"));
  Granted(Worker("slower"));
  Wait(absl::Seconds(20));
  EXPECT_THAT(Grants(Worker("fast")), IsEmpty()) << "two finished tasks say little";
}

// ---- Audits ----

class AuditTest : public SchedulingTest {
 protected:
  uint64_t AddAudited(int tasks) {
    NewJob add = MakeJob(tasks);
    add.audit_fraction = 1;
    return Add(std::move(add));
  }
};

TEST_F(AuditTest, AnotherWorkerRunsTheTaskAgainAndTheJobEndsAfterThat) {
  const uint64_t job = AddAudited(1);
  EXPECT_EQ(Get(job).audit_fraction(), 1);
  CompleteAndRest(Worker("a"), Granted(Worker("a")));
  EXPECT_THAT(ready_, IsEmpty());
  EXPECT_EQ(Get(job).progress().tasks_to_audit(), 1);
  EXPECT_EQ(Get(job).progress().tasks_done(), 1);
  EXPECT_THAT(Grants(Worker("a")), IsEmpty()) << "not the same worker";
  const auto audit = Grants(Worker("b"));
  ASSERT_THAT(audit, SizeIs(1));
  EXPECT_EQ(audit[0].purpose(), quern::v1::AUDIT);
  EXPECT_THAT(audit[0].id(), IsAttempt(0, 2));
  EXPECT_EQ(audit[0].output_path(), "/out/0.2");
  EXPECT_THAT(Grants(Worker("c")), IsEmpty()) << "one audit a task";
  CompleteAndRest(Worker("b"), audit[0].id());
  EXPECT_THAT(ready_, ElementsAre(job));
  EXPECT_THAT(removed_, ElementsAre("/out/0.2"));
  EXPECT_EQ(Get(job).progress().tasks_audited(), 1);
  ASSERT_THAT(queue_->CommittedAttempts(job), SizeIs(1));
  EXPECT_EQ(queue_->CommittedAttempts(job)[0].attempt, 1) << "what is published is what was committed";
  EXPECT_EQ(Tasks(job)[0].attempts(1).purpose(), "audit");
  CompleteAndRest(Worker("b"), audit[0].id());  // the answer was lost
  EXPECT_EQ(Get(job).state(), Job::PUBLISHING);
}

TEST_F(AuditTest, OtherBytesFailTheJobAndNameBothWorkers) {
  const uint64_t job = AddAudited(2);
  CompleteAndRest(Worker("a"), Granted(Worker("a")));
  const auto audit = Grants(Worker("b"));
  ASSERT_THAT(audit, SizeIs(1));
  CompleteAndRest(Worker("b"), audit[0].id(), 0, "other bytes");
  const Job failed = Get(job);
  EXPECT_EQ(failed.state(), Job::FAILED);
  EXPECT_EQ(failed.error().reason(), "DATA_LOSS");
  EXPECT_EQ(failed.error().task(), TaskName(job, 0));
  EXPECT_THAT(failed.error().message(), testing::AllOf(HasSubstr("task 0 (shard 0): worker b (attempt 2)"),
                                                       HasSubstr("worker a (attempt 1)"), HasSubstr("/out/0.1"), HasSubstr("/out/0.2")));
  EXPECT_THAT(removed_, IsEmpty()) << "both files stay";
  EXPECT_EQ(failed.progress().tasks_done(), 0);
  Restart();
  // It is done anew, and audited anew.
  QUERN_ASSERT_OK(Resume(job));
  const auto id = Granted(Worker("a"));
  EXPECT_THAT(id, IsAttempt(0, 3));
  CompleteAndRest(Worker("a"), id);
  EXPECT_EQ(Grants(Worker("b"))[0].purpose(), quern::v1::AUDIT);
}

TEST_F(AuditTest, CommittedFileIsReadBackAndOneThatIsNotAsReportedFailsTheJob) {
  const uint64_t job = AddAudited(2);
  CompleteAndRest(Worker("a"), Granted(Worker("a")));
  CompleteAndRest(Worker("a"), Granted(Worker("a")));
  stored_ = absl::FailedPreconditionError("/out/0.1 has another SHA-256");
  CompleteAndRest(Worker("b"), Grants(Worker("b"))[0].id());
  EXPECT_THAT(read_back_, ElementsAre("/out/0.1"));
  const Job failed = Get(job);
  EXPECT_EQ(failed.state(), Job::FAILED);
  EXPECT_EQ(failed.error().reason(), "DATA_LOSS");
  EXPECT_EQ(failed.error().task(), TaskName(job, 0));
  EXPECT_THAT(failed.error().message(), testing::AllOf(HasSubstr("worker a (attempt 1) has stored"), HasSubstr("worker b has confirmed"),
                                                       HasSubstr("/out/0.1 has another")));
  EXPECT_THAT(removed_, IsEmpty()) << "both files stay";
  EXPECT_EQ(failed.progress().tasks_done(), 1);
  const Attempt auditor = Tasks(job)[0].attempts(1);
  EXPECT_EQ(auditor.state(), Attempt::COMMITTED) << "it was right";
  EXPECT_EQ(auditor.reason(), "");
  EXPECT_THAT(auditor.message(), HasSubstr("the bytes that attempt 1 reported"));
  // It is done anew, and so is, with the worker cordoned, what it has stored besides.
  stored_ = absl::OkStatus();
  QUERN_ASSERT_OK(Cordon("a"));
  QUERN_ASSERT_OK(Resume(job));
  EXPECT_EQ(Get(job).progress().tasks_done(), 0);
  for (int i = 0; i < 2; ++i) CompleteAndRest(Worker("b"), Granted(Worker("b")));
  for (int i = 0; i < 2; ++i) CompleteAndRest(Worker("c"), Grants(Worker("c"))[0].id());
  EXPECT_THAT(ready_, ElementsAre(job));
}

TEST_F(AuditTest, FileThatCannotBeReadBackIsNoWordOnItsWorker) {
  const uint64_t job = AddAudited(1);
  CompleteAndRest(Worker("a"), Granted(Worker("a")));
  stored_ = absl::DataLossError("/out/0.1: Stale file handle");
  const auto audit = Grants(Worker("b"));
  ASSERT_THAT(audit, SizeIs(1));
  CompleteAndRest(Worker("b"), audit[0].id());
  EXPECT_EQ(Get(job).state(), Job::RUNNING);
  EXPECT_EQ(Get(job).progress().tasks_done(), 1) << "what was committed stays";
  EXPECT_EQ(WorkerNamed("b").failures_in_a_row(), 0);
  EXPECT_EQ(Tasks(job)[0].failures(), 1);
  stored_ = absl::OkStatus();
  const auto again = Grants(Worker("c"));
  ASSERT_THAT(again, SizeIs(1));
  EXPECT_EQ(again[0].purpose(), quern::v1::AUDIT);
  CompleteAndRest(Worker("c"), again[0].id());
  EXPECT_THAT(ready_, ElementsAre(job));
}

TEST_F(AuditTest, FileThatCanNeverBeReadBackFailsTheJob) {
  const uint64_t job = AddAudited(1);
  CompleteAndRest(Worker("a"), Granted(Worker("a")));
  stored_ = absl::UnavailableError("/out/0.1: Resource temporarily unavailable");
  for (int i = 0; i < 3; ++i) {
    const SynchronizeRequest worker = Worker(absl::StrCat("w", i));
    const auto audit = Grants(worker);
    ASSERT_THAT(audit, SizeIs(1)) << i;
    CompleteAndRest(worker, audit[0].id());
  }
  EXPECT_THAT(Get(job).error().message(), testing::AllOf(HasSubstr("cannot read the committed file back"), HasSubstr("temporarily")));
}

TEST_F(AuditTest, ReadingBackThatIsPutOffIsDoneWhenTheAuditIsReportedAgain) {
  const uint64_t job = AddAudited(1);
  CompleteAndRest(Worker("a"), Granted(Worker("a")));
  const auto audit = Grants(Worker("b"));
  ASSERT_THAT(audit, SizeIs(1));
  stored_ = absl::CancelledError("the coordinator is stopping");
  CompleteAndRest(Worker("b"), audit[0].id());
  EXPECT_THAT(ready_, IsEmpty());
  stored_ = absl::OkStatus();
  CompleteAndRest(Worker("b"), audit[0].id());
  EXPECT_THAT(ready_, ElementsAre(job));
  EXPECT_EQ(Get(job).progress().tasks_audited(), 1);
}

TEST_F(AuditTest, WorkerThatLeavesTooSoonGetsNoAudit) {
  AddAudited(1);
  CompleteAndRest(Worker("a"), Granted(Worker("a")), 10);
  SynchronizeRequest request = Worker("b");
  request.mutable_available_for()->set_seconds(14);
  EXPECT_THAT(Grants(request), IsEmpty());
  request.mutable_available_for()->set_seconds(16);
  EXPECT_THAT(Grants(request), SizeIs(1));
}

TEST_F(AuditTest, SameWorkerAuditsWhenThereIsNoOther) {
  const uint64_t job = AddAudited(1);
  CompleteAndRest(Worker("a"), Granted(Worker("a")));
  Wait(absl::Seconds(29));
  EXPECT_THAT(Grants(Worker("a")), IsEmpty());
  Wait(absl::Seconds(1));
  Sync(Worker("b", 0));  // takes no work
  const auto audit = Grants(Worker("a"));
  ASSERT_THAT(audit, SizeIs(1));
  CompleteAndRest(Worker("a"), audit[0].id());
  EXPECT_THAT(ready_, ElementsAre(job));
}

TEST_F(AuditTest, SameWorkerLeavesTheAuditToAnotherThatIsBusy) {
  AddAudited(3);
  const auto id = Granted(Worker("b"));
  CompleteAndRest(Worker("a"), Granted(Worker("a")));
  Granted(Worker("a"));
  for (int i = 0; i < 4; ++i) {
    Wait(absl::Seconds(15));
    Sync(With(Worker("b"), id, AttemptStatus::RUNNING));
    const SynchronizeResponse response = Sync(Worker("a", 2));
    for (const auto& attempt : response.attempts()) EXPECT_NE(attempt.purpose(), quern::v1::AUDIT);
  }
}

TEST_F(AuditTest, AuditGoesOnOverARestart) {
  const uint64_t job = AddAudited(1);
  CompleteAndRest(Worker("a"), Granted(Worker("a")));
  const auto audit = Grants(Worker("b"));
  ASSERT_THAT(audit, SizeIs(1));
  Restart();
  EXPECT_THAT(ready_, IsEmpty());
  EXPECT_THAT(Grants(Worker("c")), IsEmpty()) << "it is under way";
  CompleteAndRest(Worker("b"), audit[0].id());
  EXPECT_THAT(ready_, ElementsAre(job));
}

TEST_F(AuditTest, LostAuditIsGivenToAnother) {
  const uint64_t job = AddAudited(1);
  CompleteAndRest(Worker("a"), Granted(Worker("a")));
  const auto lost = Grants(Worker("b"));
  ASSERT_THAT(lost, SizeIs(1));
  Wait(absl::Seconds(31));
  const auto audit = Grants(Worker("c"));
  ASSERT_THAT(audit, SizeIs(1));
  EXPECT_EQ(audit[0].purpose(), quern::v1::AUDIT);
  CompleteAndRest(Worker("c"), audit[0].id());
  EXPECT_THAT(ready_, ElementsAre(job));
  EXPECT_TRUE(Sync(With(Worker("b"), lost[0].id(), AttemptStatus::RUNNING)).attempts(0).stop());
}

TEST_F(AuditTest, AuditThatCannotBeDoneFailsTheJobAndKeepsTheResult) {
  const uint64_t job = AddAudited(1);
  CompleteAndRest(Worker("a"), Granted(Worker("a")));
  for (int i = 0; i < 3; ++i) {
    const auto audit = Grants(Worker(absl::StrCat("w", i)));
    ASSERT_THAT(audit, SizeIs(1)) << i;
    Fail(Worker(absl::StrCat("w", i)), audit[0].id());
  }
  EXPECT_EQ(Get(job).state(), Job::FAILED);
  EXPECT_THAT(Get(job).error().message(), HasSubstr("audit of task 0"));
  EXPECT_EQ(Get(job).progress().tasks_done(), 1);
  QUERN_ASSERT_OK(Resume(job));
  EXPECT_EQ(Grants(Worker("w"))[0].purpose(), quern::v1::AUDIT);
}

TEST_F(AuditTest, AuditMayBeAskedForOnResume) {
  const uint64_t job = AddTasks(1);
  const auto id = Granted(Worker("a"));
  QUERN_ASSERT_OK(Call(&JobQueue::PauseJob, job));
  CompleteAndRest(Worker("a"), id);
  ResumeOptions options;
  options.audit_fraction = 1;
  QUERN_ASSERT_OK(Resume(job, std::move(options)));
  EXPECT_THAT(ready_, IsEmpty());
  EXPECT_EQ(Grants(Worker("b"))[0].purpose(), quern::v1::AUDIT);
}

TEST_F(AuditTest, PriorityMayBeChangedOnResume) {
  const uint64_t job = AddTasks(1);
  QUERN_ASSERT_OK(Call(&JobQueue::PauseJob, job));
  ResumeOptions options;
  options.priority = 7;
  QUERN_ASSERT_OK(Resume(job, std::move(options)));
  Restart();
  EXPECT_EQ(Get(job).priority(), 7);
}

TEST_F(AuditTest, FencedAttemptThatEndsWithOtherBytesIsNotSilent) {
  const uint64_t job = AddTasks(2);
  const auto slow = Granted(Worker("a"));
  Wait(absl::Seconds(31));
  const auto fast = Granted(Worker("b"));
  CompleteAndRest(Worker("b"), fast);
  CompleteAndRest(Worker("a"), slow, 0, "other bytes");
  EXPECT_EQ(Get(job).error().reason(), "DATA_LOSS");
}

// Workers a and b come to different bytes for task 0, which nobody audits; a has committed task 1, b task 2 and c task 3.
class DisputeTest : public SchedulingTest {
 protected:
  void Dispute() {
    job_ = AddTasks(5);
    late_ = Granted(Worker("a"));
    Wait(absl::Seconds(31));
    const auto first = Granted(Worker("b"));
    ASSERT_THAT(first, IsAttempt(0, 2));
    for (const char* name : {"a", "b", "c"}) {
      // b holds task 0 meanwhile.
      const SynchronizeRequest asks = *name == 'b' ? With(Worker("b", 2), first, AttemptStatus::RUNNING) : Worker(name);
      CompleteAndRest(Worker(name), Granted(asks));
    }
    CompleteAndRest(Worker("b"), first);
    CompleteAndRest(Worker("a"), late_, 0, "other bytes");
    ASSERT_EQ(Get(job_).error().reason(), "DATA_LOSS");
  }
  std::vector<uint32_t> Committed() {
    std::vector<uint32_t> tasks;
    for (const auto& attempt : queue_->CommittedAttempts(job_)) tasks.push_back(attempt.task);
    return tasks;
  }
  uint64_t job_ = 0;
  quern::v1::AttemptId late_;
};

TEST_F(DisputeTest, MessageSaysWhatElseTheTwoHaveCommittedAndWhere) {
  const uint64_t other = Add(MakeJob(1, "/other"));
  CompleteAndRest(Worker("b"), Granted(Worker("b")));
  Dispute();
  EXPECT_THAT(Get(job_).error().message(),
              testing::AllOf(HasSubstr("worker b has committed 1 and worker a 1"), HasSubstr("quern retry"), HasSubstr(JobName(other))));
}

TEST_F(DisputeTest, RetryDoesAgainWhatTheCordonedWorkerCommitted) {
  Dispute();
  QUERN_ASSERT_OK(Cordon("a"));
  Restart();
  EXPECT_THAT(Committed(), ElementsAre(1, 2, 3));
  QUERN_ASSERT_OK(Resume(job_));
  EXPECT_THAT(Committed(), ElementsAre(2, 3));
  EXPECT_EQ(Get(job_).progress().bytes_read(), 2 * 4000);
  Restart();
  EXPECT_THAT(Committed(), ElementsAre(2, 3)) << "it is in the records";
  EXPECT_THAT(Grants(Worker("a")), IsEmpty());
  for (int i = 0; i < 3; ++i) CompleteAndRest(Worker("b"), Granted(Worker("b")));
  EXPECT_THAT(ready_, ElementsAre(job_)) << "b has been decided for: nothing of it is audited";
}

TEST_F(DisputeTest, WhileNeitherIsCordonedOthersAuditAllThatTheTwoCommit) {
  Dispute();
  QUERN_ASSERT_OK(Resume(job_));
  EXPECT_THAT(Committed(), ElementsAre(1, 2, 3));
  EXPECT_EQ(Get(job_).progress().tasks_to_audit(), 2);
  Restart();
  EXPECT_EQ(Get(job_).progress().tasks_to_audit(), 2);
  for (int i = 0; i < 2; ++i) {
    const auto audit = Grants(Worker("c"));
    ASSERT_THAT(audit, SizeIs(1));
    EXPECT_EQ(audit[0].purpose(), quern::v1::AUDIT);
    CompleteAndRest(Worker("c"), audit[0].id());
  }
  CompleteAndRest(Worker("c"), Granted(Worker("c")));
  CompleteAndRest(Worker("a"), Granted(Worker("a")));
  EXPECT_THAT(ready_, IsEmpty()) << "what it commits from now on is audited too";
  Wait(absl::Seconds(60));
  EXPECT_THAT(Grants(Worker("a")), IsEmpty()) << "its own word is no proof";
  SynchronizeRequest busy = Worker("c");
  List(&busy, quern::v1::AttemptId(), AttemptStatus::RUNNING);
  Sync(busy);
  EXPECT_EQ(Get(job_).waits_for(), "") << "c is there for it";
  QUERN_ASSERT_OK(Cordon("c"));
  EXPECT_THAT(Get(job_).waits_for(), testing::AllOf(HasSubstr("another worker than a and b"), HasSubstr("quern cordon")));
  SynchronizeRequest small = Worker("d");
  small.set_memory(kMiB);
  Sync(small);
  EXPECT_THAT(Get(job_).waits_for(), HasSubstr("another worker than a and b (d has too little memory)"));
  QUERN_ASSERT_OK(Uncordon("c"));
  const auto audit = Grants(Worker("c"));
  ASSERT_THAT(audit, SizeIs(1));
  EXPECT_EQ(audit[0].purpose(), quern::v1::AUDIT);
  CompleteAndRest(Worker("c"), audit[0].id());
  EXPECT_THAT(ready_, ElementsAre(job_));
}

TEST_F(DisputeTest, WhatAnotherWorkerHasConfirmedIsKept) {
  Dispute();
  QUERN_ASSERT_OK(Resume(job_));
  const auto audit = Grants(Worker("c"));
  ASSERT_THAT(audit, SizeIs(1));
  ASSERT_EQ(audit[0].id().task(), 1);
  CompleteAndRest(Worker("c"), audit[0].id());
  QUERN_ASSERT_OK(Call(&JobQueue::PauseJob, job_));
  QUERN_ASSERT_OK(Cordon("a"));
  QUERN_ASSERT_OK(Cordon("b"));
  QUERN_ASSERT_OK(Resume(job_));
  EXPECT_THAT(Committed(), ElementsAre(1, 3));
}

TEST_F(DisputeTest, WhatTheCordonedWorkerStillRunsIsNotCommittedAfterRetry) {
  Dispute();
  QUERN_ASSERT_OK(Resume(job_));
  const auto audit = Grants(Worker("a"));  // of what b committed
  ASSERT_THAT(audit, SizeIs(1));
  const auto work = Grants(With(Worker("a", 2), audit[0].id(), AttemptStatus::RUNNING));
  ASSERT_THAT(work, testing::Not(IsEmpty()));
  const quern::v1::AttemptId id = work.back().id();
  ASSERT_EQ(work.back().purpose(), quern::v1::WORK);
  QUERN_ASSERT_OK(Call(&JobQueue::PauseJob, job_));
  QUERN_ASSERT_OK(Cordon("a"));
  QUERN_ASSERT_OK(Resume(job_));
  Sync(With(Worker("a"), id, AttemptStatus::COMPLETED));
  EXPECT_THAT(Committed(), ElementsAre(2, 3));
}

TEST_F(DisputeTest, WorkerThatWasSetAsideCountsAsTakenOut) {
  Dispute();
  NewJob add = MakeJob(20, "/other");
  add.priority = 1;
  Add(std::move(add));
  for (int i = 0; i < 5; ++i) {
    Complete(Worker("c", 0), Granted(Worker("c")));
    Fail(Worker("b"), Granted(Worker("b")));
  }
  ASSERT_EQ(WorkerNamed("b").state(), "set aside");
  QUERN_ASSERT_OK(Resume(job_));
  EXPECT_THAT(Committed(), ElementsAre(1, 3));
  EXPECT_EQ(Get(job_).progress().tasks_to_audit(), 0) << "a has been decided for";
}

TEST_F(DisputeTest, AuditOfItsOwnWorkIsNoWordForAWorkerInADispute) {
  StartWith([](JobQueueOptions* options) { options->audit_patience = absl::ZeroDuration(); });
  NewJob add = MakeJob(2);
  add.audit_fraction = 1;
  job_ = Add(std::move(add));
  CompleteAndRest(Worker("a"), Granted(Worker("a")));
  CompleteAndRest(Worker("a"), Granted(Worker("a")));  // its own audit: there is no other
  ASSERT_EQ(Get(job_).progress().tasks_audited(), 1);
  CompleteAndRest(Worker("a"), Granted(Worker("a")));
  CompleteAndRest(Worker("b"), Granted(Worker("b")), 0, "other bytes");
  ASSERT_EQ(Get(job_).error().reason(), "DATA_LOSS");
  Restart();
  QUERN_ASSERT_OK(Resume(job_));
  EXPECT_EQ(Get(job_).progress().tasks_audited(), 0);
  QUERN_ASSERT_OK(Call(&JobQueue::PauseJob, job_));
  EXPECT_THAT(Committed(), ElementsAre(0));
  Sync(Worker("a", 0));
  QUERN_ASSERT_OK(Cordon("a"));
  QUERN_ASSERT_OK(Resume(job_));
  EXPECT_THAT(Committed(), IsEmpty());
}

TEST_F(DisputeTest, WorkerThatReportsTwoDigestsIsInADisputeWithItself) {
  job_ = AddTasks(2);
  const auto id = Granted(Worker("a"));
  CompleteAndRest(Worker("a"), id);
  SynchronizeRequest again = With(Worker("a"), id, AttemptStatus::COMPLETED);
  again.mutable_attempts(0)->mutable_result()->set_sha256("other bytes");
  Sync(again);
  ASSERT_EQ(Get(job_).error().reason(), "DATA_LOSS");
  QUERN_ASSERT_OK(Resume(job_));
  EXPECT_EQ(Get(job_).progress().tasks_to_audit(), 1);
  QUERN_ASSERT_OK(Call(&JobQueue::PauseJob, job_));
  QUERN_ASSERT_OK(Cordon("a"));
  QUERN_ASSERT_OK(Resume(job_));
  EXPECT_THAT(Committed(), IsEmpty());
}

TEST_F(DisputeTest, ResumeWithFewerAuditsKeepsThoseOfTheDispute) {
  Dispute();
  ResumeOptions options;
  options.audit_fraction = 0;
  QUERN_ASSERT_OK(Resume(job_, std::move(options)));
  EXPECT_EQ(Get(job_).progress().tasks_to_audit(), 2);
}

TEST_F(SchedulingTest, JobSaysThatNoneOfTheWorkersIsFitAndItsWatchersHearOfIt) {
  const uint64_t job = AddTasks(2);
  SynchronizeRequest leaves = Worker("leaves");
  leaves.mutable_available_for()->set_seconds(1);
  Sync(leaves);
  SynchronizeRequest old = Worker("old");
  old.set_memory(kMiB);
  Sync(old);
  uint64_t revision = Get(job).revision();
  EXPECT_EQ(Get(job).waits_for(), "a worker that can run shard 0 (leaves leaves too soon, old has too little memory)");
  Wait(absl::Seconds(2));
  EXPECT_GT(queue_->Revision(job), revision);
  revision = queue_->Revision(job);
  Wait(absl::Seconds(2));
  EXPECT_EQ(queue_->Revision(job), revision) << "it is still so";
  SynchronizeRequest busy = Worker("fit");
  List(&busy, quern::v1::AttemptId(), AttemptStatus::RUNNING);
  Sync(busy);
  Wait(absl::Seconds(2));
  EXPECT_EQ(Get(job).waits_for(), "");
  EXPECT_GT(queue_->Revision(job), revision);
}

TEST_F(SchedulingTest, TaskThatAMachineGivesBackAgainWaitsLongerEachTime) {
  StartWith([](JobQueueOptions* options) { options->retry_backoff = absl::Seconds(1); });
  const uint64_t job = AddTasks(1);
  for (int i = 0; i < 8; ++i) {
    // Of another name each time, as one without --name has.
    SynchronizeRequest worker = Worker(absl::StrCat("w", i));
    worker.set_machine("rack7");
    const auto id = Granted(worker);
    SynchronizeRequest leaving = worker;
    leaving.set_draining(true);
    // Some say so, others are not heard of again.
    Sync(With(leaving, id, i % 2 == 0 ? AttemptStatus::STOPPED : AttemptStatus::RUNNING));
    if (i % 2 == 1) Wait(absl::Seconds(31));
    if (i == 0) continue;  // others have it at once
    const absl::Duration wait = std::min(absl::Seconds(1 << (i - 1)), absl::Minutes(1));
    Wait(wait - absl::Milliseconds(1));
    SynchronizeRequest next = Worker(absl::StrCat("w", i + 1));
    next.set_machine("rack7");
    EXPECT_THAT(Grants(next), IsEmpty()) << i;
    Wait(absl::Milliseconds(1));
  }
  EXPECT_EQ(Tasks(job)[0].failures(), 0);
}

// ---- Names and machines ----

class IdentityTest : public SchedulingTest {
 protected:
  absl::Status Refusal(const SynchronizeRequest& request) {
    const Answer answer = Begin(request);
    store_.Sync();
    return answer->has_value() ? (*answer)->status() : absl::OkStatus();
  }
};

TEST_F(IdentityTest, NameBelongsToItsPrincipalUntilItsWorkerIsLost) {
  const uint64_t job = AddTasks(1);
  principal_ = "token:a";
  const auto id = Granted(Worker("w"));
  principal_ = "token:b";
  EXPECT_THAT(Refusal(Worker("w", 1, "second")), StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("the name w belongs to")));
  EXPECT_THAT(Refusal(Worker("w")), StatusIs(absl::StatusCode::kPermissionDenied, testing::_)) << "nor with its incarnation";
  EXPECT_EQ(Tasks(job)[0].state(), Task::RUNNING);
  EXPECT_THAT(Grants(Worker("other")), IsEmpty()) << "a name of its own it may have";
  Restart();
  EXPECT_THAT(Refusal(Worker("w", 1, "second")), StatusIs(absl::StatusCode::kPermissionDenied, testing::_)) << "it is in the records";
  Wait(absl::Seconds(31));
  EXPECT_THAT(Granted(Worker("w", 1, "second")), IsAttempt(0, 2));
  principal_ = "token:a";
  EXPECT_THAT(Refusal(Worker("w", 1, "third")), StatusIs(absl::StatusCode::kPermissionDenied, testing::_));
  // What it ran may still be the first to end.
  const SynchronizeResponse stop = Sync(With(Worker("w"), id, AttemptStatus::COMPLETED));
  EXPECT_EQ(stop.desired_state(), quern::v1::STOP);
  EXPECT_THAT(ready_, ElementsAre(job));
}

TEST_F(IdentityTest, SameUserAndTrustedPeersMayTakeANameOver) {
  AddTasks(1);
  principal_ = "token:a certificate:node7";
  Granted(Worker("w"));
  EXPECT_THAT(Granted(Worker("w", 1, "second")), IsAttempt(0, 2));
  principal_ = "";
  EXPECT_THAT(Granted(Worker("w", 1, "third")), IsAttempt(0, 3));
}

TEST_F(IdentityTest, WhatOthersSayOfAnAttemptIsNotBelieved) {
  const uint64_t job = AddTasks(1);
  const auto id = Granted(Worker("a"));
  CompleteAndRest(Worker("b"), id);
  CompleteAndRest(Worker("a", 1, "second"), id);
  EXPECT_THAT(ready_, IsEmpty());
  CompleteAndRest(Worker("b"), Granted(Worker("b")));
  EXPECT_THAT(ready_, ElementsAre(job));
  for (uint32_t attempt = 1; attempt <= 3; ++attempt) {
    quern::v1::AttemptId claimed = id;
    claimed.set_attempt(attempt);
    CompleteAndRest(Worker("c"), claimed, 0, "other bytes");
  }
  EXPECT_EQ(Get(job).state(), Job::PUBLISHING) << "one that ran nothing has nothing to say";
}

class MachinesTest : public SchedulingTest {
 protected:
  static SynchronizeRequest On(const std::string& machine, const std::string& name, uint32_t slots = 1) {
    SynchronizeRequest request = Worker(name, slots);
    request.set_machine(machine);
    return request;
  }
  uint64_t AddAudited(int tasks) {
    NewJob add = MakeJob(tasks);
    add.audit_fraction = 1;
    return Add(std::move(add));
  }
};

TEST_F(MachinesTest, AuditGoesToAnotherMachine) {
  const uint64_t job = AddAudited(1);
  const auto id = Granted(On("m1", "a"));
  Sync(On("m2", "c", 2));  // busy with nothing, and waits
  CompleteAndRest(On("m1", "a"), id);
  Restart();
  Sync(On("m1", "b", 0));
  Wait(absl::Seconds(20));
  Sync(On("m1", "a", 0));
  SynchronizeRequest busy = On("m2", "c");
  List(&busy, id, AttemptStatus::RUNNING);
  Sync(busy);
  Wait(absl::Seconds(20));
  EXPECT_THAT(Grants(On("m1", "b")), IsEmpty()) << "it is on the machine that is to be audited";
  const auto audit = Grants(On("m2", "c"));
  ASSERT_THAT(audit, SizeIs(1));
  EXPECT_EQ(audit[0].purpose(), quern::v1::AUDIT);
  CompleteAndRest(On("m2", "c"), audit[0].id());
  EXPECT_THAT(ready_, ElementsAre(job));
  EXPECT_EQ(WorkerNamed("c").machine(), "m2");
}

TEST_F(MachinesTest, OnOneMachineAuditsGoToAnotherWorkerAfterAWhile) {
  const uint64_t job = AddAudited(1);
  CompleteAndRest(On("m1", "a"), Granted(On("m1", "a")));
  EXPECT_THAT(Grants(On("m1", "b")), IsEmpty());
  Wait(absl::Seconds(20));
  Sync(On("m1", "b", 2));
  Wait(absl::Seconds(10));
  EXPECT_THAT(Grants(On("m1", "a")), IsEmpty()) << "another could";
  const auto audit = Grants(On("m1", "b"));
  ASSERT_THAT(audit, SizeIs(1));
  CompleteAndRest(On("m1", "b"), audit[0].id());
  EXPECT_THAT(ready_, ElementsAre(job));
}

TEST_F(MachinesTest, FailuresOnOneMachineCountOnceWhileAnotherCouldTry) {
  const uint64_t job = AddTasks(1);
  Sync(On("m2", "c", 0));
  Fail(On("m1", "a"), Granted(On("m1", "a")));
  SynchronizeRequest busy = On("m2", "c");
  List(&busy, quern::v1::AttemptId(), AttemptStatus::RUNNING);
  Sync(busy);
  EXPECT_THAT(Grants(On("m1", "b")), IsEmpty()) << "it failed on that machine";
  Wait(absl::Seconds(20));
  Sync(busy);
  Wait(absl::Seconds(15));
  Fail(On("m1", "b"), Granted(On("m1", "b")));
  EXPECT_EQ(Tasks(job)[0].failures(), 1);
  Wait(absl::Seconds(31));  // c is lost
  Fail(On("m1", "d"), Granted(On("m1", "d")));
  EXPECT_EQ(Tasks(job)[0].failures(), 2);
}

TEST_F(MachinesTest, WorkersOfOneMachineAreOneWitnessOfBadInputWhileThereIsAnother) {
  const uint64_t job = Add(MakeJob(1, "/a"));
  SynchronizeRequest busy = On("m2", "c");
  List(&busy, quern::v1::AttemptId(), AttemptStatus::RUNNING);
  Fail(On("m1", "a"), Granted(On("m1", "a")), quern::v1::BAD_INPUT);
  const auto id = Granted(On("m1", "b"));
  Sync(busy);
  Fail(On("m1", "b"), id, quern::v1::BAD_INPUT);
  EXPECT_EQ(Get(job).state(), Job::RUNNING);
  Fail(On("m2", "c"), Granted(On("m2", "c")), quern::v1::BAD_INPUT);
  EXPECT_EQ(Get(job).error().reason(), "BAD_INPUT");
  Wait(absl::Seconds(31));
  const uint64_t alone = Add(MakeJob(1, "/b"));
  for (const char* name : {"a", "b"}) Fail(On("m1", name), Granted(On("m1", name)), quern::v1::BAD_INPUT);
  EXPECT_EQ(Get(alone).error().reason(), "BAD_INPUT") << "there is no other machine to ask";
}

// Workers a (of m1) and x (of m2) come to different bytes for task 0; b, which is on m1 too, has committed task 1.
TEST_F(MachinesTest, WhatOthersOnADisputedMachineCommittedIsAudited) {
  const uint64_t job = AddTasks(3);
  const auto late = Granted(On("m1", "a"));
  Wait(absl::Seconds(31));
  const auto first = Granted(On("m2", "x"));
  CompleteAndRest(On("m1", "b"), Granted(On("m1", "b")));
  CompleteAndRest(On("m2", "x"), first);
  CompleteAndRest(On("m1", "a"), late, 0, "other bytes");
  ASSERT_EQ(Get(job).error().reason(), "DATA_LOSS");
  QUERN_ASSERT_OK(Resume(job));
  EXPECT_EQ(Get(job).progress().tasks_to_audit(), 1);
  QUERN_ASSERT_OK(Call(&JobQueue::PauseJob, job));
  // A cordon is of a name. What others on its machine have committed is kept, and audited.
  QUERN_ASSERT_OK(Cordon("a"));
  QUERN_ASSERT_OK(Resume(job));
  EXPECT_EQ(Get(job).progress().tasks_to_audit(), 1);
  ASSERT_THAT(queue_->CommittedAttempts(job), SizeIs(1));
  EXPECT_EQ(queue_->CommittedAttempts(job)[0].task, 1);
  EXPECT_EQ(Grants(On("m2", "x"))[0].purpose(), quern::v1::AUDIT);
}

// ---- Time ----

TEST_F(SchedulingTest, CoordinatorThatStoodStillGivesGrace) {
  const uint64_t job = AddTasks(1);
  Granted(Worker("a"));
  clock_.Advance(absl::Minutes(10));
  queue_->GrantGrace();
  Wait(absl::Seconds(29));
  EXPECT_EQ(Tasks(job)[0].state(), Task::RUNNING);
  EXPECT_EQ(WorkerNamed("a").state(), "ready");
  Wait(absl::Seconds(1));
  EXPECT_EQ(Tasks(job)[0].state(), Task::PENDING);
}

TEST_F(SchedulingTest, RenewalDoesNotWaitForTheStore) {
  AddTasks(2);
  const auto id = Granted(Worker("a"));
  const Answer grant = Begin(Worker("b"));
  const Answer renewal = Begin(With(Worker("a"), id, AttemptStatus::RUNNING));
  EXPECT_FALSE(grant->has_value());
  ASSERT_TRUE(renewal->has_value());
  EXPECT_FALSE((**renewal)->attempts(0).stop());
  store_.Sync();
  EXPECT_TRUE(grant->has_value());
}

TEST_F(SchedulingTest, JobThatIsPausedOrCancelledBeforeItsSourceWasLookedAtStaysSo) {
  const uint64_t paused = Add(MakeJob(1, "/a")), cancelled = Add(MakeJob(1, "/b"));
  Restart(/*release=*/false);
  QUERN_ASSERT_OK(Call(&JobQueue::PauseJob, paused));
  QUERN_ASSERT_OK(Call(&JobQueue::CancelJob, cancelled));
  EXPECT_THAT(queue_->HeldJobs(), IsEmpty());
  EXPECT_EQ(Get(paused).state(), Job::PAUSED);
}

TEST_F(SchedulingTest, EndedJobsExpireByAgeAndCount) {
  std::vector<uint64_t> jobs;
  for (int i = 0; i < 4; ++i) {
    NewJob add = MakeJob(0, absl::StrCat("/out", i));
    add.finished = true;
    jobs.push_back(Add(std::move(add)));
    clock_.Advance(absl::Hours(1));
  }
  AddTasks(1);  // has not ended
  EXPECT_THAT(queue_->ExpiredJobs(absl::InfinitePast(), 100), IsEmpty());
  EXPECT_THAT(queue_->ExpiredJobs(absl::InfinitePast(), 3), ElementsAre(jobs[0]));
  EXPECT_THAT(queue_->ExpiredJobs(clock_.Wall() - absl::Minutes(150), 100), ElementsAre(jobs[0], jobs[1]));
  EXPECT_THAT(queue_->ExpiredJobs(absl::InfiniteFuture(), 100), SizeIs(4));
}

}  // namespace
}  // namespace quern::daemon
