#include "worker/supervisor/worker_state.h"

#include <algorithm>
#include <functional>

#include "absl/strings/str_cat.h"
#include "google/protobuf/duration.pb.h"

namespace quern::worker {
namespace {

using quern::v1::AttemptId;
using quern::v1::AttemptStatus;

absl::Duration FromProto(const google::protobuf::Duration& duration) {
  return absl::Seconds(duration.seconds()) + absl::Nanoseconds(duration.nanos());
}

void ToProto(absl::Duration duration, google::protobuf::Duration* out) {
  duration = std::max(duration, absl::ZeroDuration());
  const int64_t seconds = absl::IDivDuration(duration, absl::Seconds(1), &duration);
  out->set_seconds(seconds);
  out->set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(duration)));
}

bool Ended(const AttemptStatus& status) { return status.state() != AttemptStatus::RUNNING; }

// A factor in [0.8, 1.2) that differs between workers, so that those that lost a coordinator do not return in step.
double SpreadOf(const std::string& incarnation) {
  return 0.8 + 0.4 * static_cast<double>(std::hash<std::string>()(incarnation) % 1000) / 1000;
}

}  // namespace

WorkerState::WorkerState(WorkerInfo info) : info_(std::move(info)), spread_(SpreadOf(info_.incarnation)) {
  for (const quern::v1::Device& device : info_.devices) self_test_passed_ &= device.self_test_passed();
}

absl::Duration WorkerState::RenewInterval() const { return std::min(lease_ / 3, 2 * progress_interval_); }

absl::Duration WorkerState::NextCall() const {
  if (call_out_) {
    if (!call_waits_) return absl::InfiniteDuration();
    if (news()) return -absl::InfiniteDuration();
    return running_ > 0 ? call_start_ + RenewInterval() : absl::InfiniteDuration();
  }
  return news() ? not_before_ : std::max(not_before_, next_call_);
}

absl::Duration WorkerState::CallTimeout() const {
  if (call_waits_) return kLongPoll;
  return std::min(std::max(lease_ / 3, absl::Seconds(5)), absl::Seconds(30));
}

quern::v1::SynchronizeRequest WorkerState::StartCall(absl::Duration now) {
  quern::v1::SynchronizeRequest request;
  request.set_worker(info_.name);
  request.set_incarnation(info_.incarnation);
  request.set_host(info_.host);
  request.set_machine(info_.machine);
  request.set_version(info_.version);
  request.set_numerics_version(info_.numerics_version);
  request.set_slots(info_.slots);
  request.set_threads(info_.threads);
  request.set_memory(info_.memory);
  for (const quern::v1::Device& device : info_.devices) *request.add_devices() = device;
  for (auto& [key, attempt] : attempts_) {
    *request.add_attempts() = attempt.status;
    attempt.told = attempt.status.state();
  }
  for (const quern::v1::SightAnswer& answer : sight_) *request.add_sight() = answer;
  sight_told_ = sight_.size();
  if (info_.available_until != absl::InfiniteDuration()) ToProto(info_.available_until - now, request.mutable_available_for());
  request.set_draining(draining_);
  request.set_data_plane(info_.data_plane);
  request.set_may_wait(may_wait_ && !news());

  call_out_ = true;
  call_waits_ = request.may_wait();
  call_start_ = now;
  told_before_ = std::exchange(told_changes_, changes_);
  return request;
}

WorkerState::Actions WorkerState::FinishCall(quern::v1::SynchronizeResponse* response, absl::Duration now) {
  call_out_ = false;
  may_wait_ = true;
  backoff_ = absl::ZeroDuration();
  for (size_t i = 0; i < sight_told_; ++i) sight_pending_.erase(sight_[i].nonce());
  sight_.erase(sight_.begin(), sight_.begin() + sight_told_);
  sight_told_ = 0;
  if (const absl::Duration lease = FromProto(response->lease()); lease > absl::ZeroDuration()) lease_ = lease;
  const absl::Duration next = FromProto(response->next_call());
  progress_interval_ = next > absl::ZeroDuration() ? next : kProgressInterval;

  Actions actions;
  for (const AttemptId& id : response->acknowledged()) {
    const auto found = attempts_.find(KeyOf(id));
    // Only an end that the request carried can have been stored.
    if (found != attempts_.end() && Ended(found->second.status) && found->second.told == found->second.status.state())
      attempts_.erase(found);
  }
  std::set<Key> wanted;
  for (const quern::v1::DesiredAttempt& desired : response->attempts()) {
    if (!desired.stop()) wanted.insert(KeyOf(desired.id()));
  }
  for (auto& [key, attempt] : attempts_) {
    if (!wanted.contains(key) && attempt.told != AttemptStatus::STATE_UNSPECIFIED) Stop(&attempt, &actions.stop);
  }
  if (response->desired_state() == quern::v1::STOP) {
    told_to_stop_ = true;
    stop_reason_ = response->stop_reason();
    for (const AttemptId& id : StopAll()) actions.stop.push_back(id);
  }
  for (quern::v1::DesiredAttempt& desired : *response->mutable_attempts()) Consider(&desired, &actions);
  for (quern::v1::SightChallenge& challenge : *response->mutable_challenges()) {
    if (sight_pending_.insert(challenge.nonce()).second) actions.challenges.push_back(std::move(challenge));
  }

  next_call_ = call_start_ + kMinInterval;
  not_before_ = now;
  return actions;
}

void WorkerState::Consider(quern::v1::DesiredAttempt* desired, Actions* actions) {
  if (desired->stop() || !desired->has_spec() || attempts_.contains(KeyOf(desired->id()))) return;
  AttemptStatus status;
  *status.mutable_id() = desired->id();
  status.set_purpose(desired->purpose());
  status.set_memory(desired->memory() == 0 ? info_.memory : std::min(desired->memory(), info_.memory));
  if (draining_) {
    // Given back at once: nobody has to wait for the lease to end.
    status.set_state(AttemptStatus::STOPPED);
  } else if (!self_test_passed_) {
    status.set_state(AttemptStatus::FAILED);
    status.mutable_failure()->set_reason(quern::v1::INTERNAL);
    status.mutable_failure()->set_message(
        absl::StrCat("worker ", info_.name, " on ", info_.host, " takes no work: its self-test failed at start"));
  } else if (running_ < info_.slots) {
    status.set_state(AttemptStatus::RUNNING);
    ++running_;
    quern::v1::StartAttempt start;
    *start.mutable_id() = desired->id();
    *start.mutable_spec() = std::move(*desired->mutable_spec());
    start.set_output_path(desired->output_path());
    start.set_memory(status.memory());
    start.set_threads(info_.threads);
    start.set_fetch_source(desired->fetch_source());
    start.set_send_output(desired->send_output());
    start.set_reader(desired->reader().empty() || desired->reader() == "auto" ? info_.reader : desired->reader());
    actions->start.push_back(std::move(start));
  } else {
    // An answer that crossed with the end of an attempt, or the wish to stop one first: it comes again.
    return;
  }
  attempts_[KeyOf(desired->id())].status = std::move(status);
  ++changes_;
}

void WorkerState::TakeBackCall() {
  call_out_ = false;
  may_wait_ = false;
  told_changes_ = told_before_;
  sight_told_ = 0;
}

void WorkerState::FailCall(absl::Duration now) {
  TakeBackCall();
  backoff_ = std::min(std::max(backoff_ * 2, kMinBackoff), kMaxBackoff);
  not_before_ = now + backoff_ * spread_;
}

void WorkerState::CancelledCall(absl::Duration now) {
  TakeBackCall();
  not_before_ = now;
  next_call_ = now;
}

void WorkerState::EndAttempt(Attempt* attempt, AttemptStatus status) {
  status.set_purpose(attempt->status.purpose());
  attempt->status = std::move(status);
  --running_;
  ++changes_;
}

void WorkerState::Stop(Attempt* attempt, std::vector<AttemptId>* stop) {
  if (Ended(attempt->status) || attempt->stop) return;
  attempt->stop = true;
  stop->push_back(attempt->status.id());
}

void WorkerState::OnEvent(AttemptStatus status) {
  const auto found = attempts_.find(KeyOf(status.id()));
  if (found == attempts_.end() || Ended(found->second.status)) return;
  if (Ended(status)) {
    EndAttempt(&found->second, std::move(status));
  } else {
    status.set_purpose(found->second.status.purpose());
    found->second.status = std::move(status);
  }
}

void WorkerState::OnExecutorFailure(const AttemptId& id, quern::v1::Failure failure) {
  const auto found = attempts_.find(KeyOf(id));
  if (found == attempts_.end() || Ended(found->second.status)) return;
  AttemptStatus status = found->second.status;
  if (found->second.stop) {
    status.set_state(AttemptStatus::STOPPED);
  } else {
    status.set_state(AttemptStatus::FAILED);
    *status.mutable_failure() = std::move(failure);
  }
  EndAttempt(&found->second, std::move(status));
}

void WorkerState::OnSight(quern::v1::SightAnswer answer) {
  sight_.push_back(std::move(answer));
  ++changes_;
}

void WorkerState::Drain() {
  if (draining_) return;
  draining_ = true;
  ++changes_;
}

std::vector<AttemptId> WorkerState::StopAll() {
  Drain();
  std::vector<AttemptId> stop;
  for (auto& [key, attempt] : attempts_) Stop(&attempt, &stop);
  return stop;
}

bool WorkerState::has_results() const {
  return std::any_of(attempts_.begin(), attempts_.end(),
                     [](const auto& entry) { return entry.second.status.state() == AttemptStatus::COMPLETED; });
}

bool WorkerState::all_told() const { return attempts_.empty() && !news() && !call_out_; }

}  // namespace quern::worker
