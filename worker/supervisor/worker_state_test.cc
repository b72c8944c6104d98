#include "worker/supervisor/worker_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace quern::worker {
namespace {

using quern::v1::AttemptId;
using quern::v1::AttemptStatus;
using quern::v1::SynchronizeRequest;
using quern::v1::SynchronizeResponse;
using ::testing::HasSubstr;

constexpr absl::Duration kStart = absl::Seconds(1000);
const absl::Duration kAtOnce = -absl::InfiniteDuration();

AttemptId Id(uint32_t attempt) {
  AttemptId id;
  id.set_job("jobs/1");
  id.set_task(3);
  id.set_attempt(attempt);
  return id;
}

quern::v1::DesiredAttempt* Want(SynchronizeResponse* response, uint32_t attempt, bool with_spec = true) {
  quern::v1::DesiredAttempt* desired = response->add_attempts();
  *desired->mutable_id() = Id(attempt);
  desired->set_purpose(quern::v1::WORK);
  desired->set_output_path("/out");
  desired->set_memory(100);
  if (with_spec) desired->mutable_spec()->set_label("shard");
  return desired;
}

AttemptStatus Event(uint32_t attempt, AttemptStatus::State state) {
  AttemptStatus status;
  *status.mutable_id() = Id(attempt);
  status.set_state(state);
  status.set_memory(100);
  return status;
}

class WorkerStateTest : public ::testing::Test {
 protected:
  static WorkerInfo Info() {
    WorkerInfo info;
    info.name = "w";
    info.incarnation = "uuid";
    info.host = "h";
    info.machine = "m";
    info.version = "1";
    info.numerics_version = 9;
    info.slots = 1;
    info.threads = 4;
    info.memory = 512;
    info.devices.emplace_back().set_self_test_passed(true);
    info.reader = "direct";
    return info;
  }

  SynchronizeRequest Call() { return state_.StartCall(now_); }
  WorkerState::Actions Answer(SynchronizeResponse response) { return state_.FinishCall(&response, now_); }
  // A whole call.
  WorkerState::Actions Exchange(SynchronizeResponse response = {}) {
    Call();
    return Answer(std::move(response));
  }
  // Attempt 1 runs and the coordinator knows.
  void StartOne() {
    SynchronizeResponse response;
    Want(&response, 1);
    ASSERT_EQ(Exchange(response).start.size(), 1u);
    SynchronizeResponse known;
    Want(&known, 1, false);
    Exchange(known);
  }

  absl::Duration now_ = kStart;
  WorkerState state_{Info()};
};

TEST_F(WorkerStateTest, FirstCallIsDueAtOnceAndSaysWhoItIs) {
  EXPECT_EQ(state_.NextCall(), kAtOnce);
  const SynchronizeRequest request = Call();
  EXPECT_EQ(request.worker(), "w");
  EXPECT_EQ(request.incarnation(), "uuid");
  EXPECT_EQ(request.host(), "h");
  EXPECT_EQ(request.machine(), "m");
  EXPECT_EQ(request.version(), "1");
  EXPECT_EQ(request.numerics_version(), 9u);
  EXPECT_EQ(request.slots(), 1u);
  EXPECT_EQ(request.threads(), 4u);
  EXPECT_EQ(request.memory(), 512u);
  EXPECT_EQ(request.devices_size(), 1);
  EXPECT_FALSE(request.may_wait());
  EXPECT_FALSE(request.draining());
  EXPECT_FALSE(request.has_available_for());
}

TEST_F(WorkerStateTest, IdleWorkerLongPolls) {
  Exchange();
  EXPECT_LE(state_.NextCall(), now_ + WorkerState::kMinInterval);
  EXPECT_TRUE(Call().may_wait());
  EXPECT_EQ(state_.NextCall(), absl::InfiniteDuration());
  EXPECT_EQ(state_.CallTimeout(), WorkerState::kLongPoll);
}

TEST_F(WorkerStateTest, LongPollOfABusyWorkerIsGivenUpAfterTwiceTheCoordinatorsInterval) {
  StartOne();
  SynchronizeResponse response;
  response.mutable_next_call()->set_seconds(3);
  response.mutable_lease()->set_seconds(30);
  Want(&response, 1, false);
  Exchange(response);
  now_ = state_.NextCall();
  ASSERT_TRUE(Call().may_wait());
  EXPECT_EQ(state_.NextCall(), now_ + absl::Seconds(6));
}

TEST_F(WorkerStateTest, LongPollOfABusyWorkerIsGivenUpAfterAThirdOfTheLease) {
  StartOne();
  SynchronizeResponse response;
  response.mutable_next_call()->set_seconds(100);
  response.mutable_lease()->set_seconds(30);
  Want(&response, 1, false);
  Exchange(response);
  now_ = state_.NextCall();
  ASSERT_TRUE(Call().may_wait());
  EXPECT_EQ(state_.NextCall(), now_ + absl::Seconds(10));
}

TEST_F(WorkerStateTest, CoordinatorThatHoldsNoCallsIsNotHammered) {
  Exchange();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(state_.NextCall(), now_ + WorkerState::kMinInterval);
    now_ = state_.NextCall();
    Exchange();
  }
}

TEST_F(WorkerStateTest, AvailableTimeShrinks) {
  WorkerInfo info = Info();
  info.available_until = kStart + absl::Milliseconds(90'500);
  WorkerState state(info);
  const SynchronizeRequest request = state.StartCall(kStart + absl::Seconds(30));
  EXPECT_EQ(request.available_for().seconds(), 60);
  EXPECT_EQ(request.available_for().nanos(), 500'000'000);
  SynchronizeResponse response;
  state.FinishCall(&response, kStart + absl::Seconds(30));
  EXPECT_EQ(state.StartCall(kStart + absl::Hours(1)).available_for().seconds(), 0);
}

TEST_F(WorkerStateTest, StartsWhatIsWantedWithItsOptions) {
  SynchronizeResponse response;
  Want(&response, 1)->set_reader("mmap");
  const WorkerState::Actions actions = Exchange(response);
  ASSERT_EQ(actions.start.size(), 1u);
  EXPECT_EQ(actions.start[0].id().attempt(), 1u);
  EXPECT_EQ(actions.start[0].spec().label(), "shard");
  EXPECT_EQ(actions.start[0].output_path(), "/out");
  EXPECT_EQ(actions.start[0].memory(), 100u);
  EXPECT_EQ(actions.start[0].threads(), 4u);
  EXPECT_EQ(actions.start[0].reader(), "mmap");
  EXPECT_EQ(state_.running(), 1);
  // The coordinator hears at once that the grant has arrived.
  EXPECT_LE(state_.NextCall(), now_);
  const SynchronizeRequest request = Call();
  EXPECT_FALSE(request.may_wait());
  ASSERT_EQ(request.attempts_size(), 1);
  EXPECT_EQ(request.attempts(0).state(), AttemptStatus::RUNNING);
  EXPECT_EQ(request.attempts(0).purpose(), quern::v1::WORK);
  EXPECT_EQ(request.attempts(0).memory(), 100u);
}

TEST_F(WorkerStateTest, ReaderOfTheWorkerUnlessTheJobChooses) {
  SynchronizeResponse response;
  Want(&response, 1)->set_reader("auto");
  EXPECT_EQ(Exchange(response).start.at(0).reader(), "direct");
}

TEST_F(WorkerStateTest, MemoryIsNeverMoreThanTheWorkersOwn) {
  SynchronizeResponse response;
  Want(&response, 1)->set_memory(10'000);
  EXPECT_EQ(Exchange(response).start.at(0).memory(), 512u);
}

TEST_F(WorkerStateTest, NoMemoryWantedMeansTheWorkersOwn) {
  SynchronizeResponse response;
  Want(&response, 1)->set_memory(0);
  EXPECT_EQ(Exchange(response).start.at(0).memory(), 512u);
}

TEST_F(WorkerStateTest, RunningAttemptIsNotStartedTwice) {
  StartOne();
  SynchronizeResponse response;
  Want(&response, 1);
  EXPECT_TRUE(Exchange(response).start.empty());
  EXPECT_EQ(state_.running(), 1);
}

TEST_F(WorkerStateTest, NoMoreThanItsSlots) {
  SynchronizeResponse response;
  Want(&response, 1);
  Want(&response, 2);
  const WorkerState::Actions actions = Exchange(response);
  ASSERT_EQ(actions.start.size(), 1u);
  EXPECT_EQ(actions.start[0].id().attempt(), 1u);
  // Once there is room it is taken, as the coordinator still wants it.
  state_.OnEvent(Event(1, AttemptStatus::COMPLETED));
  EXPECT_EQ(Exchange(response).start.size(), 1u);
}

TEST_F(WorkerStateTest, GrantWithoutSpecWaitsForIt) {
  SynchronizeResponse response;
  Want(&response, 1, false);
  EXPECT_TRUE(Exchange(response).start.empty());
  Want(&response, 1);
  EXPECT_EQ(Exchange(response).start.size(), 1u);
}

TEST_F(WorkerStateTest, UnlistedAttemptIsStoppedOnce) {
  StartOne();
  const WorkerState::Actions actions = Exchange();
  ASSERT_EQ(actions.stop.size(), 1u);
  EXPECT_EQ(actions.stop[0].attempt(), 1u);
  EXPECT_TRUE(Exchange().stop.empty());
}

TEST_F(WorkerStateTest, AttemptToldToStopIsStopped) {
  StartOne();
  SynchronizeResponse response;
  Want(&response, 1, false)->set_stop(true);
  EXPECT_EQ(Exchange(response).stop.size(), 1u);
  state_.OnEvent(Event(1, AttemptStatus::STOPPED));
  EXPECT_EQ(Call().attempts(0).state(), AttemptStatus::STOPPED);
}

TEST_F(WorkerStateTest, StopOfAnUnknownAttemptDoesNothing) {
  SynchronizeResponse response;
  Want(&response, 1)->set_stop(true);
  const WorkerState::Actions actions = Exchange(response);
  EXPECT_TRUE(actions.stop.empty());
  EXPECT_TRUE(actions.start.empty());
}

TEST_F(WorkerStateTest, CompletionCancelsTheLongPollAndIsToldAtOnce) {
  StartOne();
  now_ = state_.NextCall();
  ASSERT_TRUE(Call().may_wait());
  EXPECT_GT(state_.NextCall(), now_);
  state_.OnEvent(Event(1, AttemptStatus::COMPLETED));
  EXPECT_EQ(state_.NextCall(), kAtOnce);
  state_.CancelledCall(now_);
  EXPECT_LE(state_.NextCall(), now_);
  const SynchronizeRequest request = Call();
  EXPECT_FALSE(request.may_wait());
  EXPECT_EQ(request.attempts(0).state(), AttemptStatus::COMPLETED);
}

TEST_F(WorkerStateTest, CompletionDuringAShortCallIsToldByTheNext) {
  StartOne();
  state_.OnSight({});  // makes the next call one that does not wait
  ASSERT_FALSE(Call().may_wait());
  state_.OnEvent(Event(1, AttemptStatus::COMPLETED));
  EXPECT_EQ(state_.NextCall(), absl::InfiniteDuration());
  SynchronizeResponse response;
  Want(&response, 1, false);
  Answer(response);
  EXPECT_LE(state_.NextCall(), now_);
}

TEST_F(WorkerStateTest, LongPollOfABusyWorkerIsRenewedWithProgress) {
  StartOne();
  now_ = state_.NextCall();
  ASSERT_TRUE(Call().may_wait());
  AttemptStatus progress = Event(1, AttemptStatus::RUNNING);
  progress.set_bytes_read(7);
  state_.OnEvent(progress);
  EXPECT_EQ(state_.NextCall(), now_ + 2 * WorkerState::kProgressInterval);
  now_ = state_.NextCall();
  state_.CancelledCall(now_);
  const SynchronizeRequest request = Call();
  // The cancelled call may have carried an answer.
  EXPECT_FALSE(request.may_wait());
  EXPECT_EQ(request.attempts(0).bytes_read(), 7u);
  EXPECT_EQ(request.attempts(0).purpose(), quern::v1::WORK);
}

TEST_F(WorkerStateTest, EndIsToldUntilItIsAcknowledged) {
  StartOne();
  AttemptStatus end = Event(1, AttemptStatus::COMPLETED);
  end.mutable_result()->set_sha256("digest");
  state_.OnEvent(end);
  EXPECT_EQ(Call().attempts(0).result().sha256(), "digest");
  Answer({});
  EXPECT_TRUE(state_.has_ends());
  EXPECT_EQ(Call().attempts(0).result().sha256(), "digest");
  SynchronizeResponse response;
  *response.add_acknowledged() = Id(1);
  Answer(response);
  EXPECT_FALSE(state_.has_ends());
  EXPECT_EQ(Call().attempts_size(), 0);
}

TEST_F(WorkerStateTest, AcknowledgementOfWhatWasNotToldIsIgnored) {
  StartOne();
  Call();  // lists it as running
  state_.OnEvent(Event(1, AttemptStatus::COMPLETED));
  SynchronizeResponse response;
  *response.add_acknowledged() = Id(1);
  *response.add_acknowledged() = Id(77);
  Answer(response);
  EXPECT_EQ(Call().attempts(0).state(), AttemptStatus::COMPLETED);
}

TEST_F(WorkerStateTest, EndedAttemptThatIsStillWantedIsNotStartedAgain) {
  StartOne();
  state_.OnEvent(Event(1, AttemptStatus::FAILED));
  SynchronizeResponse response;
  Want(&response, 1);
  EXPECT_TRUE(Exchange(response).start.empty());
}

TEST_F(WorkerStateTest, CoordinatorAwayIsRetriedWithGrowingDelays) {
  StartOne();
  absl::Duration last = absl::ZeroDuration();
  for (int i = 0; i < 10; ++i) {
    now_ = std::max(now_, state_.NextCall());
    Call();
    state_.FailCall(now_);
    const absl::Duration delay = state_.NextCall() - now_;
    EXPECT_GE(delay, last);
    EXPECT_GE(delay, WorkerState::kMinBackoff * 0.8);
    EXPECT_LE(delay, WorkerState::kMaxBackoff * 1.2);
    last = delay;
  }
  EXPECT_GE(last, WorkerState::kMaxBackoff * 0.8);
  EXPECT_EQ(state_.running(), 1);
  // What ends meanwhile is kept, and is no reason to hammer.
  state_.OnEvent(Event(1, AttemptStatus::COMPLETED));
  EXPECT_EQ(state_.NextCall(), now_ + last);
  now_ = state_.NextCall();
  const SynchronizeRequest request = Call();
  EXPECT_FALSE(request.may_wait());
  EXPECT_EQ(request.attempts(0).state(), AttemptStatus::COMPLETED);
  // One success, and the delay is the shortest again.
  Answer({});
  Call();
  state_.FailCall(now_);
  EXPECT_LE(state_.NextCall(), now_ + WorkerState::kMinBackoff * 1.2);
}

TEST_F(WorkerStateTest, AfterAFailureTheNextCallDoesNotWait) {
  Exchange();
  now_ = state_.NextCall();
  ASSERT_TRUE(Call().may_wait());
  state_.FailCall(now_);
  EXPECT_FALSE(Call().may_wait());
}

TEST_F(WorkerStateTest, FailedCallHasToldNothing) {
  StartOne();
  state_.OnEvent(Event(1, AttemptStatus::COMPLETED));
  Call();
  state_.FailCall(now_);
  EXPECT_FALSE(state_.all_told());
  now_ = state_.NextCall();
  EXPECT_FALSE(Call().may_wait());
}

TEST_F(WorkerStateTest, DeadExecutorFailsItsAttempt) {
  StartOne();
  quern::v1::Failure failure;
  failure.set_reason(quern::v1::OUT_OF_MEMORY);
  failure.set_signal(9);
  state_.OnExecutorFailure(Id(1), failure);
  EXPECT_EQ(state_.running(), 0);
  const SynchronizeRequest request = Call();
  EXPECT_EQ(request.attempts(0).state(), AttemptStatus::FAILED);
  EXPECT_EQ(request.attempts(0).failure().reason(), quern::v1::OUT_OF_MEMORY);
  EXPECT_EQ(request.attempts(0).failure().signal(), 9);
  EXPECT_EQ(request.attempts(0).memory(), 100u);
}

TEST_F(WorkerStateTest, ExecutorKilledToStopItsAttemptHasStoppedIt) {
  StartOne();
  Exchange();
  state_.OnExecutorFailure(Id(1), {});
  EXPECT_EQ(Call().attempts(0).state(), AttemptStatus::STOPPED);
}

TEST_F(WorkerStateTest, LateEventsOfAnEndedAttemptAreIgnored) {
  StartOne();
  state_.OnEvent(Event(1, AttemptStatus::COMPLETED));
  state_.OnEvent(Event(1, AttemptStatus::RUNNING));
  state_.OnExecutorFailure(Id(1), {});
  state_.OnEvent(Event(2, AttemptStatus::FAILED));
  EXPECT_EQ(state_.running(), 0);
  const SynchronizeRequest request = Call();
  ASSERT_EQ(request.attempts_size(), 1);
  EXPECT_EQ(request.attempts(0).state(), AttemptStatus::COMPLETED);
}

TEST_F(WorkerStateTest, FailedSelfTestRefusesWork) {
  WorkerInfo info = Info();
  info.devices[0].set_self_test_passed(false);
  WorkerState state(info);
  state.StartCall(now_);
  SynchronizeResponse response;
  Want(&response, 1);
  EXPECT_TRUE(state.FinishCall(&response, now_).start.empty());
  const SynchronizeRequest request = state.StartCall(now_);
  ASSERT_EQ(request.attempts_size(), 1);
  EXPECT_EQ(request.attempts(0).state(), AttemptStatus::FAILED);
  EXPECT_THAT(request.attempts(0).failure().message(), HasSubstr("self-test failed"));
}

TEST_F(WorkerStateTest, ChallengeIsTakenOnceAndItsAnswerToldOnce) {
  SynchronizeResponse response;
  response.add_challenges()->set_nonce("n");
  ASSERT_EQ(Exchange(response).challenges.size(), 1u);
  EXPECT_TRUE(Exchange(response).challenges.empty());
  quern::v1::SightAnswer answer;
  answer.set_nonce("n");
  state_.OnSight(answer);
  EXPECT_EQ(Call().sight_size(), 1);
  state_.FailCall(now_);
  // That call has carried nothing.
  EXPECT_EQ(Call().sight_size(), 1);
  Answer({});
  EXPECT_EQ(Call().sight_size(), 0);
  // The coordinator may ask again.
  EXPECT_EQ(Answer(response).challenges.size(), 1u);
}

TEST_F(WorkerStateTest, AnswerThatComesDuringACallIsKeptForTheNext) {
  quern::v1::SightAnswer answer;
  answer.set_nonce("first");
  state_.OnSight(answer);
  ASSERT_EQ(Call().sight_size(), 1);
  answer.set_nonce("second");
  state_.OnSight(answer);
  Answer({});
  const SynchronizeRequest request = Call();
  ASSERT_EQ(request.sight_size(), 1);
  EXPECT_EQ(request.sight(0).nonce(), "second");
}

TEST_F(WorkerStateTest, DrainingWorkerFinishesAndGivesBackWhatComesLate) {
  StartOne();
  state_.Drain();
  EXPECT_LE(state_.NextCall(), now_);
  EXPECT_TRUE(Call().draining());
  SynchronizeResponse response;
  Want(&response, 1, false);
  Want(&response, 2);
  const WorkerState::Actions actions = Answer(response);
  EXPECT_TRUE(actions.start.empty());
  EXPECT_TRUE(actions.stop.empty());
  state_.OnEvent(Event(1, AttemptStatus::COMPLETED));
  EXPECT_FALSE(state_.all_told());
  const SynchronizeRequest request = Call();
  ASSERT_EQ(request.attempts_size(), 2);
  EXPECT_EQ(request.attempts(0).state(), AttemptStatus::COMPLETED);
  EXPECT_EQ(request.attempts(1).state(), AttemptStatus::STOPPED);
  SynchronizeResponse acknowledge;
  *acknowledge.add_acknowledged() = Id(1);
  *acknowledge.add_acknowledged() = Id(2);
  EXPECT_FALSE(state_.all_told());
  Answer(acknowledge);
  EXPECT_TRUE(state_.all_told());
}

TEST_F(WorkerStateTest, CoordinatorSaysStop) {
  StartOne();
  SynchronizeResponse response;
  response.set_desired_state(quern::v1::STOP);
  Want(&response, 1, false);
  EXPECT_EQ(Exchange(response).stop.size(), 1u);
  EXPECT_TRUE(state_.told_to_stop());
}

TEST_F(WorkerStateTest, StopAllStopsWhatRuns) {
  StartOne();
  ASSERT_EQ(state_.StopAll().size(), 1u);
  EXPECT_TRUE(state_.StopAll().empty());
  EXPECT_TRUE(Call().draining());
}

}  // namespace
}  // namespace quern::worker
