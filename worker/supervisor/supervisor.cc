#include "worker/supervisor/supervisor.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log_fields.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "worker/supervisor/sight.h"

namespace quern::worker {
namespace {

using quern::v1::AttemptId;
using quern::v1::AttemptStatus;

// How often a child whose channel has closed is asked whether it has ended: a matter of milliseconds.
constexpr absl::Duration kReapInterval = absl::Milliseconds(5);

// "attempt event=... job=... task=... attempt=..."
std::string Line(absl::string_view event, const AttemptId& id) {
  return absl::StrCat("attempt event=", event, " ", AttemptFields(id.job(), id.task(), id.attempt()));
}

std::string FailureFields(const quern::v1::Failure& failure) {
  return absl::StrCat(" reason=", LogValue(quern::v1::FailureReason_Name(failure.reason())), MessageField(failure.message()));
}

bool SameAttempt(const AttemptId& a, const AttemptId& b) {
  return a.task() == b.task() && a.attempt() == b.attempt() && a.job() == b.job();
}

}  // namespace

// Events for Run's thread. Outlives the supervisor while threads that post to it live.
class Supervisor::Inbox {
 public:
  void Post(std::function<void()> event) {
    MutexLock lock(&mutex_);
    events_.push_back(std::move(event));
    posted_.Signal();
  }
  // Waits for an event, but not longer than `timeout`, and takes all there are.
  std::vector<std::function<void()>> Take(absl::Duration timeout) {
    MutexLock lock(&mutex_);
    // A wakeup without an event only makes Run look at the clock early.
    if (events_.empty() && timeout > absl::ZeroDuration()) posted_.WaitFor(&mutex_, timeout);
    return std::exchange(events_, {});
  }

 private:
  Mutex mutex_;
  CondVar posted_;
  std::vector<std::function<void()>> events_ QUERN_GUARDED_BY(mutex_);
};

Supervisor::Supervisor(SupervisorOptions options)
    : inbox_(std::make_shared<Inbox>()), options_(std::move(options)), state_(options_.info), slots_(options_.info.slots) {
  if (options_.metrics == nullptr) options_.metrics = std::make_shared<WorkerMetrics>(options_.info.slots, options_.info.memory);
}

Supervisor::~Supervisor() = default;

void Supervisor::Post(std::function<void()> event) { inbox_->Post(std::move(event)); }

void Supervisor::RequestDrain() {
  Post([this] {
    leaving_ = true;
    state_.Drain();
    options_.metrics->Draining();
    options_.log(LogLevel::kInfo, "draining: what runs is finished, then the worker leaves");
  });
}

void Supervisor::RequestStop() {
  Post([this] {
    leaving_ = stopping_ = true;
    leave_by_ = absl::InfiniteDuration();
    options_.metrics->Draining();
    StopAttempts(state_.StopAll(), kShortStopGrace);
    // Those that were asked before have less time left now.
    for (Slot& slot : slots_) {
      if (slot.busy) slot.kill_at = std::min(slot.kill_at, options_.clock->Monotonic() + kShortStopGrace);
    }
    options_.log(LogLevel::kInfo, "stopping at once");
  });
}

absl::Status Supervisor::Run() {
  while (true) {
    const absl::Duration now = options_.clock->Monotonic();
    StepExecutors(now);
    StepCall(now);
    if (Left(now)) break;
    for (const std::function<void()>& event : inbox_->Take(std::min(NextStep() - now, absl::Hours(1)))) event();
  }
  options_.transport.reset();
  slots_.clear();
  return end_;
}

absl::Duration Supervisor::NextStep() const {
  // A call that is being cancelled is waited for, not cancelled again.
  absl::Duration next = cancelled_ ? absl::InfiniteDuration() : state_.NextCall();
  next = std::min(next, leave_by_);
  for (const Slot& slot : slots_) {
    next = std::min(next, slot.kill_at);
    if (slot.closed) next = std::min(next, options_.clock->Monotonic() + kReapInterval);
  }
  return next;
}

void Supervisor::StepCall(absl::Duration now) {
  if (cancelled_ || state_.NextCall() > now) return;
  if (state_.call_out()) {
    cancelled_ = true;
    options_.transport->Cancel();
    return;
  }
  quern::v1::SynchronizeRequest request = state_.StartCall(now);
  call_began_ = now;
  call_waits_ = request.may_wait();
  options_.transport->Call(std::move(request), state_.CallTimeout(), [this](absl::Status status, quern::v1::SynchronizeResponse response) {
    // std::function wants copies.
    auto shared = std::make_shared<quern::v1::SynchronizeResponse>(std::move(response));
    Post([this, status = std::move(status), shared] { OnAnswer(status, std::move(*shared)); });
  });
}

void Supervisor::OnAnswer(const absl::Status& status, quern::v1::SynchronizeResponse response) {
  const absl::Duration now = options_.clock->Monotonic();
  const bool cancelled = std::exchange(cancelled_, false);
  if (!status.ok()) {
    if ((cancelled && absl::IsCancelled(status)) || (state_.call_waits() && absl::IsDeadlineExceeded(status))) {
      state_.CancelledCall(now);
      return;
    }
    options_.metrics->CallEnded(/*answered=*/false, now - call_began_, call_waits_);
    state_.FailCall(now);
    std::string error(status.message());
    if (error != last_call_error_) {
      options_.log(LogLevel::kWarning, absl::StrCat("the coordinator does not answer (", status.ToString(), "); retrying, ",
                                                    state_.running(), " running attempts go on"));
      last_call_error_ = std::move(error);
    }
    return;
  }
  options_.metrics->CallEnded(/*answered=*/true, now - call_began_, call_waits_);
  if (!last_call_error_.empty()) options_.log(LogLevel::kInfo, "the coordinator answers again");
  last_call_error_.clear();
  if (response.desired_state() == quern::v1::DRAIN && !leaving_) {
    leaving_ = true;
    state_.Drain();
    options_.metrics->Draining();
    options_.log(LogLevel::kInfo, "the coordinator drains this worker: what runs is finished, then it leaves");
  }
  WorkerState::Actions actions = state_.FinishCall(&response, now);
  StopAttempts(actions.stop, kStopGrace);
  for (quern::v1::StartAttempt& start : actions.start) StartAttempt(std::move(start));
  if (!actions.challenges.empty()) AnswerChallenges(std::move(actions.challenges));
  if (state_.told_to_stop() && !stopping_) {
    const std::string why =
        absl::StrCat("the coordinator told this worker to stop", state_.stop_reason().empty() ? "" : ": ", state_.stop_reason());
    options_.log(LogLevel::kError, why);
    // One that was asked to leave does as it was asked.
    if (!leaving_) end_ = absl::FailedPreconditionError(why);
    leaving_ = stopping_ = true;
    leave_by_ = absl::InfiniteDuration();
  }
}

void Supervisor::AnswerChallenges(std::vector<quern::v1::SightChallenge> challenges) {
  // On a thread that nobody waits for: a network filesystem may hang, renewals must not.
  std::thread([this, inbox = inbox_, paths = options_.paths, challenges = std::move(challenges)] {
    for (const quern::v1::SightChallenge& challenge : challenges) {
      // `this` is used by Run's thread only, which takes nothing from the inbox after the supervisor's end.
      inbox->Post([this, answer = AnswerSight(challenge, paths)] { state_.OnSight(answer); });
    }
  }).detach();
}

absl::Status Supervisor::EnsureProcess(Slot* slot) {
  if (slot->process != nullptr && !slot->closed) return absl::OkStatus();
  slot->process.reset();
  slot->closed = false;
  const size_t index = slot - slots_.data();
  const int generation = ++slot->generation;
  ExecutorProcess::Options options{options_.executor_argv, options_.oom, nullptr, nullptr};
  options.on_event = [this, index, generation](AttemptStatus status) {
    Post([this, index, generation, status = std::move(status)] { OnExecutorEvent(index, generation, status); });
  };
  options.on_closed = [this, index, generation](absl::Status why) {
    Post([this, index, generation, why = std::move(why)] { OnExecutorClosed(index, generation, why); });
  };
  QUERN_ASSIGN_OR_RETURN(slot->process, ExecutorProcess::Spawn(std::move(options)));
  options_.metrics->ExecutorStarted(index, slot->process->pid());
  options_.log(LogLevel::kInfo, absl::StrCat("executor ", slot->process->pid(), " started"));
  return absl::OkStatus();
}

void Supervisor::StartAttempt(quern::v1::StartAttempt start) {
  const auto slot = std::find_if(slots_.begin(), slots_.end(), [](const Slot& slot) { return !slot.busy; });
  // The state starts no more than there are slots, and both free one on the same event.
  const size_t index = slot - slots_.begin();
  slot->busy = true;
  slot->stop = false;
  slot->attempt = start.id();
  slot->memory = start.memory();
  slot->kill_at = absl::InfiniteDuration();
  options_.metrics->AttemptStarted(index, start.memory());
  options_.log(LogLevel::kInfo,
               absl::StrCat(Line("started", start.id()), " label=", LogValue(start.spec().label()), " memory=", start.memory()));
  absl::Status status = EnsureProcess(&*slot);
  if (status.ok()) status = slot->process->Start(std::move(start));
  if (status.ok()) return;
  // A child that is gone says so by its channel, which OnExecutorClosed turns into the attempt's failure.
  if (slot->process != nullptr && absl::IsUnavailable(status)) return;
  quern::v1::Failure failure;
  failure.set_reason(quern::v1::INTERNAL);
  failure.set_message(absl::StrCat("no executor could be given the attempt: ", std::string(status.message())));
  options_.log(LogLevel::kError, absl::StrCat(Line("failed", slot->attempt), FailureFields(failure)));
  options_.metrics->AttemptDied(index, AttemptStatus::FAILED, failure.reason());
  state_.OnExecutorFailure(slot->attempt, std::move(failure));
  slot->busy = false;
  // It may have read half of the command.
  slot->process.reset();
}

void Supervisor::StopAttempts(const std::vector<AttemptId>& ids, absl::Duration grace) {
  for (const AttemptId& id : ids) {
    for (Slot& slot : slots_) {
      if (!slot.busy || !SameAttempt(slot.attempt, id)) continue;
      options_.log(LogLevel::kInfo, Line("stopping", id));
      slot.stop = true;
      slot.kill_at = options_.clock->Monotonic() + grace;
      // One that does not take the command is killed when the grace is over.
      slot.process->Stop(id).IgnoreError();
    }
  }
}

void Supervisor::OnExecutorEvent(size_t index, int generation, AttemptStatus status) {
  Slot& slot = slots_[index];
  if (slot.generation != generation) return;
  const bool own = slot.busy && SameAttempt(slot.attempt, status.id());
  if (own && status.state() == AttemptStatus::RUNNING) options_.metrics->AttemptMoved(index, status.bytes_read(), status.bytes_written());
  if (own && status.state() != AttemptStatus::RUNNING) {
    options_.metrics->AttemptEnded(index, status);
    slot.busy = false;
    slot.kill_at = absl::InfiniteDuration();
    switch (status.state()) {
      case AttemptStatus::COMPLETED:
        options_.log(LogLevel::kInfo, Line("completed", status.id()));
        break;
      case AttemptStatus::FAILED:
        options_.log(LogLevel::kError, absl::StrCat(Line("failed", status.id()), FailureFields(status.failure())));
        break;
      default:
        options_.log(LogLevel::kInfo, Line("stopped", status.id()));
    }
  }
  state_.OnEvent(std::move(status));
}

void Supervisor::OnExecutorClosed(size_t index, int generation, absl::Status why) {
  Slot& slot = slots_[index];
  if (slot.generation != generation || slot.process == nullptr) return;
  slot.closed = true;
  slot.closed_why = std::move(why);
  slot.kill_at = std::min(slot.kill_at, options_.clock->Monotonic() + kExitGrace);
}

void Supervisor::StepExecutors(absl::Duration now) {
  for (Slot& slot : slots_) {
    if (slot.process == nullptr) continue;
    if (slot.kill_at <= now) {
      slot.kill_at = absl::InfiniteDuration();
      options_.log(LogLevel::kWarning, absl::StrCat("executor ", slot.process->pid(), " does not end by itself and is killed"));
      if (const absl::Status killed = slot.process->Kill(); !killed.ok()) options_.log(LogLevel::kError, killed.ToString());
    }
    if (!slot.closed) continue;
    ExecutorDeath death;
    const pid_t pid = slot.process->pid();
    const absl::StatusOr<bool> ended = slot.process->Reap(&death);
    if (ended.ok() && !*ended) continue;
    quern::v1::Failure failure = FailureOfDeath(death, slot.memory, options_.oom.DescribeLimit());
    if (!slot.closed_why.ok()) absl::StrAppend(failure.mutable_message(), "; ", std::string(slot.closed_why.message()));
    if (!ended.ok()) absl::StrAppend(failure.mutable_message(), "; ", std::string(ended.status().message()));
    const size_t index = &slot - slots_.data();
    options_.log(LogLevel::kError, slot.busy ? absl::StrCat(Line("executor_died", slot.attempt), FailureFields(failure))
                                             : absl::StrCat("executor ", pid, " died idle of ", death.exit.ToString()));
    options_.metrics->ExecutorEnded(index, death);
    if (slot.busy) {
      options_.metrics->AttemptDied(index, slot.stop ? AttemptStatus::STOPPED : AttemptStatus::FAILED, failure.reason());
      state_.OnExecutorFailure(slot.attempt, std::move(failure));
    }
    slot.busy = false;
    slot.closed = false;
    slot.kill_at = absl::InfiniteDuration();
    slot.process.reset();
  }
}

bool Supervisor::Left(absl::Duration now) {
  if (!leaving_ || state_.running() > 0) return false;
  if (state_.all_told()) return true;
  // Results are worth a wait. Anything else the coordinator learns by itself, from a new worker or from the end of the lease.
  const bool results = state_.has_results() && !stopping_;
  const bool coordinator_away = !last_call_error_.empty();
  if (leave_by_ == absl::InfiniteDuration()) leave_by_ = now + (results ? kFarewell : kShortFarewell);
  if (!results && coordinator_away) leave_by_ = std::min(leave_by_, now);
  if (now < leave_by_) return false;
  if (state_.has_ends()) options_.log(LogLevel::kWarning, "leaving with ends of attempts that the coordinator has not acknowledged");
  return true;
}

}  // namespace quern::worker
