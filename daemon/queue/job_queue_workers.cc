// The protocol of workers: what a call changes, and what is answered when.
#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/log_fields.h"
#include "base/status_macros.h"
#include "base/text_check.h"
#include "base/worker_name.h"
#include "daemon/queue/job_queue.h"
#include "daemon/queue/names.h"

namespace quern::daemon {
namespace {

using quern::store::TaskRecord;
using quern::v1::AttemptStatus;
using quern::v1::Job;
using quern::v1::SynchronizeRequest;
using quern::v1::SynchronizeResponse;
using quern::v1::Task;

// Chores that need not be done at once: what only time changes, and what is too much for every tick.
constexpr absl::Duration kChores = absl::Seconds(1);
// A worker that is lost and holds nothing is forgotten after this.
constexpr absl::Duration kForgetWorkerAfter = absl::Hours(1);
// Superseded incarnations that are remembered for each name. One beyond that would be taken for the newest, once more.
constexpr size_t kMaxSuperseded = 256;
constexpr size_t kMaxIncarnation = 64;
// Of a worker: one that lists more is no real one.
constexpr int kMaxDevices = 64;
constexpr size_t kMaxHost = 256;
constexpr size_t kMaxMachine = 64;
// By how much of it a wait may be shorter. After a restart all workers call at once, and would go on doing so.
constexpr double kWaitSpread = 0.25;

void SetDuration(absl::Duration duration, google::protobuf::Duration* out) {
  const int64_t ns = absl::ToInt64Nanoseconds(duration);
  out->set_seconds(ns / 1'000'000'000);
  out->set_nanos(static_cast<int32_t>(ns % 1'000'000'000));
}

bool Ended(AttemptStatus::State state) { return state != AttemptStatus::RUNNING && state != AttemptStatus::STATE_UNSPECIFIED; }

// A worker's texts are stored, and shown on terminals.
void MakePlain(SynchronizeRequest* info) {
  info->set_host(OneLine(info->host(), kMaxHost));
  info->set_version(OneLine(info->version(), kMaxHost));
  info->set_machine(OneLine(info->machine(), kMaxMachine));
  if (info->devices_size() > kMaxDevices) info->mutable_devices()->DeleteSubrange(kMaxDevices, info->devices_size() - kMaxDevices);
  for (quern::v1::Device& device : *info->mutable_devices()) {
    device.set_kind(OneLine(device.kind(), kMaxHost));
    device.set_name(OneLine(device.name(), kMaxHost));
    device.set_self_test_detail(OneLine(device.self_test_detail()));
  }
}

quern::v1::Failure PlainFailure(quern::v1::Failure failure) {
  failure.set_message(OneLine(failure.message()));
  return failure;
}

// For a worker in whose place another has come.
SynchronizeResponse StopResponse(absl::string_view name, absl::string_view host, absl::Time since) {
  SynchronizeResponse response;
  response.set_desired_state(quern::v1::STOP);
  response.set_stop_reason(absl::StrCat("another worker with the name ", name, " started on ", OneLine(host, kMaxHost), " at ",
                                        absl::FormatTime(absl::RFC3339_sec, since, absl::UTCTimeZone()),
                                        ": give each worker a --name of its own"));
  return response;
}

}  // namespace

absl::StatusOr<quern::v1::TaskSpec> JobQueue::LoadSpec(const AttemptRef& ref) {
  QUERN_ASSIGN_OR_RETURN(const std::string text, options_.store->Get(TaskKey('s', ref.job, ref.task)));
  quern::v1::TaskSpec spec;
  if (!spec.ParseFromString(text)) return absl::DataLossError(absl::StrCat("job store: unreadable plan of ", TaskName(ref.job, ref.task)));
  return spec;
}

void JobQueue::Synchronize(const SynchronizeRequest& request, const std::string& principal, uint64_t ticket,
                           std::function<void(absl::StatusOr<SynchronizeResponse>)> done) {
  Section section(this);
  absl::Status refused = broken_;
  if (refused.ok() && shut_down_) refused = absl::UnavailableError("the coordinator is stopping");
  if (refused.ok()) refused = CheckWorkerName(request.worker());
  // A UUID has 36 bytes; it is remembered.
  if (refused.ok() && (request.incarnation().empty() || request.incarnation().size() > kMaxIncarnation)) {
    refused = absl::InvalidArgumentError(absl::StrCat("a worker needs an incarnation of 1 to ", kMaxIncarnation, " bytes"));
  }
  if (!refused.ok()) {
    after_unlock_.push_back([done = std::move(done), refused] { done(refused); });
    return;
  }
  WorkerState& worker = workers_[request.worker()];
  const auto old = std::find_if(worker.superseded.begin(), worker.superseded.end(), [&](const Superseded& old) {
    return old.incarnation == request.incarnation() && (principal.empty() || old.principal.value_or(principal) == principal);
  });
  if (old != worker.superseded.end()) {
    AnswerSuperseded(worker, *old, request, std::move(done));
    return;
  }
  if (BelongsToAnother(worker, principal)) {
    after_unlock_.push_back([done = std::move(done), denied = RefuseName(worker, request, principal)] { done(denied); });
    return;
  }
  const bool known = !worker.info.incarnation().empty();
  if (known && worker.info.incarnation() != request.incarnation()) Supersede(worker, request);
  worker.principal = principal;
  UpdateWorker(worker, request);
  if (worker.waiter.has_value()) {
    after_unlock_.push_back(
        [done = std::move(worker.waiter->done)] { done(absl::AbortedError("a newer call of the worker took its place")); });
    RemoveWaiter(worker);
  }
  const bool checking = IsChecking(worker);
  absl::Duration wait;
  // An idle worker is heard of again before it would count as lost.
  if (request.may_wait()) {
    wait = worker.granted.empty() ? std::min(options_.long_poll, options_.lease * 2 / 3) : options_.progress_interval;
    wait *= 1 - std::uniform_real_distribution<double>(0, kWaitSpread)(random_);
  }
  if (checking) wait = std::max(wait, options_.commit_wait);
  worker.waiter = Waiter{ticket, worker.last_seen + wait, std::move(done)};
  worker.waiter_order = next_waiter_++;
  waiters_[worker.waiter_order] = request.worker();
  tickets_[ticket] = request.worker();
  AnswerWorker(worker, wait == absl::ZeroDuration());
}

int64_t JobQueue::FreeSlots(const WorkerState& worker) {
  std::set<AttemptRef> busy = worker.granted;
  for (const AttemptStatus& status : worker.info.attempts()) {
    const AttemptRef ref{ParseJobName(status.id().job()).value_or(0), status.id().task(), status.id().attempt()};
    if (Ended(status.state())) {
      busy.erase(ref);
    } else {
      busy.insert(ref);
    }
  }
  return static_cast<int64_t>(worker.info.slots()) - static_cast<int64_t>(busy.size());
}

void JobQueue::IndexWaiter(const WorkerState& worker) {
  if (FreeSlots(worker) > 0) {
    idle_waiters_[worker.waiter_order] = worker.info.worker();
  } else {
    idle_waiters_.erase(worker.waiter_order);
  }
}

void JobQueue::RemoveWaiter(WorkerState& worker) {
  waiters_.erase(worker.waiter_order);
  idle_waiters_.erase(worker.waiter_order);
  tickets_.erase(worker.waiter->ticket);
  worker.waiter.reset();
}

bool JobQueue::IsChecking(const WorkerState& worker) const {
  for (const AttemptStatus& status : worker.info.attempts()) {
    const absl::StatusOr<uint64_t> job = ParseJobName(status.id().job());
    if (job.ok() && checking_.count({*job, status.id().task(), status.id().attempt()}) > 0) return true;
  }
  return false;
}

void JobQueue::CancelSynchronize(uint64_t ticket) {
  Section section(this);
  const auto it = tickets_.find(ticket);
  if (it == tickets_.end()) return;
  WorkerState& worker = workers_.at(it->second);
  after_unlock_.push_back([done = std::move(worker.waiter->done)] { done(absl::CancelledError("the worker hung up")); });
  RemoveWaiter(worker);
  worker.hung_up = true;
}

bool JobQueue::BelongsToAnother(const WorkerState& worker, const std::string& principal) {
  if (principal.empty() || worker.lost || worker.info.incarnation().empty()) return false;
  return worker.principal.value_or(principal) != principal;
}

absl::Status JobQueue::RefuseName(WorkerState& worker, const SynchronizeRequest& request, const std::string& principal) {
  if (worker.refused != request.incarnation()) {
    worker.refused = request.incarnation();
    Log(absl::StrCat("audit event=worker_name_refused worker=", LogValue(request.worker()), " who=", LogValue(principal),
                     " host=", LogValue(OneLine(request.host(), kMaxHost)), " holder=", LogValue(*worker.principal),
                     " holder_host=", LogValue(worker.info.host())));
  }
  return absl::PermissionDeniedError(
      absl::StrCat("the name ", request.worker(), " belongs to a worker on ", worker.info.host(),
                   " with another token or certificate: give this worker a --name of its own, or wait until that one has not been heard of "
                   "for ",
                   absl::FormatDuration(options_.lease)));
}

void JobQueue::Supersede(WorkerState& worker, const SynchronizeRequest& request) {
  const std::string& name = request.worker();
  Log(absl::StrCat("worker event=replaced worker=", LogValue(name), " host=", LogValue(request.host()),
                   " former_host=", LogValue(worker.info.host())));
  Superseded old{worker.info.incarnation(), worker.principal, options_.clock->Monotonic() + options_.lease, false, {}};
  const std::set<AttemptRef> granted = worker.granted;
  for (const AttemptRef& ref : granted) {
    const uint64_t used = FindAttempt(ref)->record.memory();
    if (!LoseAttempt(ref, absl::StrCat("worker ", name, " was replaced by a new incarnation"))) continue;
    // A container that was killed as a whole says nothing: the next attempt is careful in any case.
    TaskState& task = FindJob(ref.job)->tasks[ref.task];
    Suspicion suspicion{ref, task.record.memory_limit(), absl::StrCat("worker ", name, " died, and a new process took its place")};
    if (HalveMemory(task, used)) {
      absl::StrAppend(&suspicion.message, "; it may have run out of memory, the next attempt gets ",
                      FormatByteSize(task.record.memory_limit()));
      PutTask(*FindJob(ref.job), ref.task);
    }
    old.suspicions.push_back(std::move(suspicion));
  }
  if (worker.hung_up) CountSuspicions(old);
  worker.superseded.push_back(std::move(old));
  if (worker.superseded.size() > kMaxSuperseded) worker.superseded.pop_front();
  if (worker.waiter.has_value()) {
    Say([done = std::move(worker.waiter->done),
         response = StopResponse(name, request.host(), options_.clock->Wall())](absl::Status status) {
      if (status.ok()) {
        done(response);
      } else {
        done(status);
      }
    });
    RemoveWaiter(worker);
  }
  worker.info.Clear();
  worker.granted.clear();
  worker.sight.clear();
  worker.told_to_stop.clear();
}

void JobQueue::AnswerSuperseded(const WorkerState& worker, Superseded& old, const SynchronizeRequest& request,
                                std::function<void(absl::StatusOr<SynchronizeResponse>)> done) {
  if (!old.told) {
    old.told = true;
    Log(absl::StrCat(
        "worker event=same_name worker=", LogValue(request.worker()), " host=", LogValue(request.host()),
        " message=\"two workers have this name: the one on this host, which began earlier, is told to stop; give each a --name of "
        "its own\""));
  }
  ForgiveSuspicions(old);
  HandleAttempts(request, nullptr);
  SynchronizeResponse response = StopResponse(request.worker(), worker.info.host(), worker.here_since);
  for (const AttemptStatus& status : request.attempts()) {
    const AttemptRef ref{ParseJobName(status.id().job()).value_or(0), status.id().task(), status.id().attempt()};
    if (!Ended(status.state())) {
      quern::v1::DesiredAttempt& desired = *response.add_attempts();
      *desired.mutable_id() = status.id();
      desired.set_purpose(status.purpose());
      desired.set_stop(true);
      desired.set_stop_reason(response.stop_reason());
    } else if (checking_.count(ref) == 0) {
      *response.add_acknowledged() = status.id();
    }
  }
  Say([done = std::move(done), response = std::move(response)](absl::Status status) {
    if (status.ok()) {
      done(response);
    } else {
      done(status);
    }
  });
}

void JobQueue::ForgiveSuspicions(Superseded& old) {
  for (const Suspicion& suspicion : old.suspicions) {
    if (!CountsFailures(suspicion.ref)) continue;
    JobState& job = *FindJob(suspicion.ref.job);
    TaskRecord& task = job.tasks[suspicion.ref.task].record;
    const uint64_t before = suspicion.memory_before;
    if (task.memory_limit() == 0 || (before != 0 && before <= task.memory_limit())) continue;
    task.set_memory_limit(before);
    PutTask(job, suspicion.ref.task);
  }
  old.suspicions.clear();
}

void JobQueue::CountSuspicions(Superseded& old) {
  for (const Suspicion& suspicion : std::exchange(old.suspicions, {})) {
    if (CountsFailures(suspicion.ref)) CountFailure(*FindJob(suspicion.ref.job), suspicion.ref.task, "WORKER_LOST", suspicion.message);
  }
}

void JobQueue::UpdateWorker(WorkerState& worker, const SynchronizeRequest& request) {
  const absl::Duration now = options_.clock->Monotonic();
  const bool is_new = worker.info.incarnation() != request.incarnation() || worker.info.version().empty();
  // Who leaves does not come back but as another incarnation: else it could give back one task after the other, and no failure would count.
  const bool leaves = request.draining() || (!is_new && worker.info.draining());
  worker.info = request;
  worker.info.set_draining(leaves);
  worker.info.clear_sight();
  MakePlain(&worker.info);
  // Results and messages are large, and handled below.
  for (AttemptStatus& status : *worker.info.mutable_attempts()) {
    status.clear_result();
    status.clear_failure();
  }
  worker.last_seen = now;
  worker.last_seen_wall = options_.clock->Wall();
  if (is_new) worker.here_since = worker.last_seen_wall;
  worker.hung_up = false;
  worker.lost = false;
  worker.available_until = absl::InfiniteDuration();
  if (request.has_available_for()) {
    worker.available_until = now + absl::Seconds(request.available_for().seconds()) + absl::Nanoseconds(request.available_for().nanos());
  }
  if (is_new) {
    const std::string problem = NotReady(worker);
    Log(absl::StrCat("worker event=here worker=", LogValue(request.worker()), " host=", LogValue(request.host()),
                     " memory=", request.memory(), problem.empty() ? "" : " state=unusable", MessageField(problem)));
  }
  for (const quern::v1::SightAnswer& answer : request.sight()) HandleSight(worker, answer);
  const std::set<AttemptRef> listed = HandleAttempts(request, &worker);
  for (auto it = worker.told_to_stop.begin(); it != worker.told_to_stop.end();) {
    it = listed.count(*it) == 0 ? worker.told_to_stop.erase(it) : std::next(it);
  }
  const std::set<AttemptRef> granted = worker.granted;
  for (const AttemptRef& ref : granted) {
    Attempt* const attempt = FindAttempt(ref);
    if (attempt->stop && listed.count(ref) == 0) {
      // It never got the grant.
      EndAttempt(ref, quern::v1::Attempt::STOPPED, "STOPPED", attempt->stop_reason);
      continue;
    }
    attempt->deadline = now + options_.lease;
    attempt->seen_alive = true;
  }
}

std::set<JobQueue::AttemptRef> JobQueue::HandleAttempts(const SynchronizeRequest& request, WorkerState* current) {
  std::set<AttemptRef> listed;
  for (const AttemptStatus& status : request.attempts()) {
    const absl::StatusOr<uint64_t> job_id = ParseJobName(status.id().job());
    if (!job_id.ok()) continue;
    const AttemptRef ref{*job_id, status.id().task(), status.id().attempt()};
    listed.insert(ref);
    if (status.state() == AttemptStatus::COMPLETED) {
      HandleCompletion(ref, request, status.result());
      continue;
    }
    Attempt* const attempt = FindAttempt(ref);
    if (attempt == nullptr || attempt->record.worker() != request.worker() || attempt->record.incarnation() != request.incarnation())
      continue;
    switch (status.state()) {
      case AttemptStatus::FAILED:
        if (checking_.count(ref) == 0) HandleFailure(ref, PlainFailure(status.failure()));
        break;
      case AttemptStatus::STOPPED: {
        if (checking_.count(ref) > 0) break;
        // A coordinator that has just started does not know what the one before it has asked for.
        const bool asked = current == nullptr || attempt->stop || !attempt->seen_alive || IsDraining(*current);
        if (asked) {
          if (current != nullptr) NoteGivenBack(ref);
          const std::string why = current == nullptr ? attempt->record.message() : attempt->stop_reason;
          EndAttempt(ref, quern::v1::Attempt::STOPPED, "STOPPED", why);
        } else {
          // Else it would get the task again at once, and for ever.
          HandleFailure(ref, quern::v1::INTERNAL, "the worker stopped it unasked, and is not leaving");
        }
        break;
      }
      default: {
        if (current == nullptr) break;
        if (status.bytes_read() != attempt->bytes_read || status.bytes_written() != attempt->bytes_written) Changed(*FindJob(ref.job));
        attempt->bytes_read = status.bytes_read();
        attempt->bytes_written = status.bytes_written();
        JobState& job = *FindJob(ref.job);
        TaskState& task = job.tasks[ref.task];
        // Its lease had run out, but nobody else has begun: it goes on.
        const bool audit = attempt->record.purpose() == quern::v1::AUDIT;
        const bool wanted = audit ? job.audits.count(ref.task) > 0 : task.record.state() == Task::PENDING;
        if (attempt->record.state() == quern::v1::Attempt::LOST && wanted) {
          SetAttemptState(job, *attempt, quern::v1::Attempt::GRANTED);
          attempt->record.clear_end_time_ns();
          attempt->record.clear_reason();
          attempt->record.clear_message();
          if (!audit) MoveTask(job, ref.task, Task::RUNNING);
          IndexAudit(job, ref.task);
          PutAttempt(ref, attempt->record);
          PutTask(job, ref.task);
          Changed(job);
          current->granted.insert(ref);
        }
      }
    }
  }
  return listed;
}

void JobQueue::HandleSight(WorkerState& worker, const quern::v1::SightAnswer& answer) {
  const absl::StatusOr<uint64_t> job = ParseJobName(answer.job());
  if (!job.ok()) return;
  const auto it = worker.sight.find({*job, answer.what()});
  if (it == worker.sight.end() || it->second.state != Sight::kAsked || it->second.nonce != answer.nonce()) return;
  const bool seen = answer.seen() && answer.digest() == it->second.expected;
  it->second.state = seen ? Sight::kSeen : Sight::kBlind;
  it->second.time = options_.clock->Monotonic();
  if (!seen) {
    const bool streams = options_.can_stream && options_.can_stream(worker.info, *job, answer.what());
    Log(absl::StrCat("worker event=does_not_see worker=", LogValue(worker.info.worker()), " job=", LogValue(answer.job()),
                     " what=", answer.what() == quern::v1::SightChallenge::OUTPUT ? "output" : "source",
                     streams ? " then=streams" : " then=gets_no_tasks",
                     MessageField(answer.seen() ? "it read other bytes" : answer.detail())));
  }
}

void JobQueue::AnswerWaiters() {
  while (true) {
    if (news_for_all_) {
      news_for_all_ = false;
      const std::map<uint64_t, std::string> waiters = waiters_;
      for (const auto& [order, name] : waiters) AnswerWorker(workers_.at(name), false);
    } else if (!news_for_.empty()) {
      for (const std::string& name : std::exchange(news_for_, {})) {
        if (const auto it = workers_.find(name); it != workers_.end()) AnswerWorker(it->second, false);
      }
    } else if (work_arrived_) {
      work_arrived_ = false;
      OfferWork();
    } else {
      return;
    }
  }
}

void JobQueue::OfferWork() {
  for (auto it = idle_waiters_.begin(); it != idle_waiters_.end() && HasOffer();) {
    const uint64_t order = it->first;
    AnswerWorker(workers_.at(it->second), false);
    it = idle_waiters_.upper_bound(order);
  }
}

bool JobQueue::HasOffer() const {
  return std::any_of(active_.begin(), active_.end(), [this](uint64_t id) QUERN_NO_THREAD_SAFETY_ANALYSIS {
    const JobState& job = jobs_.at(id);
    return Schedulable(job) && !(job.pending.empty() && job.audits.empty() && job.stragglers.empty());
  });
}

void JobQueue::AnswerWorker(WorkerState& worker, bool even_without_news) {
  if (!worker.waiter.has_value()) return;
  SynchronizeResponse response;
  std::vector<SpecToLoad> specs;
  bool answer = even_without_news || !broken_.ok() || shut_down_;
  // One answer for the end of an attempt and for what comes next.
  if (!answer && IsChecking(worker)) return;
  if (broken_.ok() && !shut_down_ && BuildAnswer(worker, &response, &specs)) answer = true;
  if (!answer) {
    IndexWaiter(worker);
    return;
  }
  SetDuration(options_.lease, response.mutable_lease());
  SetDuration(worker.granted.empty() ? absl::ZeroDuration() : options_.progress_interval, response.mutable_next_call());
  auto done = std::move(worker.waiter->done);
  RemoveWaiter(worker);
  // "Go on" tells nothing that a crash could make untrue, and is not kept waiting for what others have changed.
  const bool tells =
      response.acknowledged_size() > 0 || !specs.empty() || !writes_.empty() ||
      (response.desired_state() == quern::v1::DRAIN && !worker.info.draining()) ||
      std::any_of(response.attempts().begin(), response.attempts().end(), [](const auto& attempt) { return attempt.stop(); });
  if (!tells && broken_.ok() && !shut_down_) {
    after_unlock_.push_back([done = std::move(done), response = std::move(response)]() mutable { done(std::move(response)); });
    return;
  }
  if (shut_down_) {
    Say([done = std::move(done)](absl::Status status) {
      done(status.ok() ? absl::UnavailableError("the coordinator is stopping") : status);
    });
    return;
  }
  Say([this, done = std::move(done), response = std::move(response), specs = std::move(specs)](absl::Status status) mutable {
    if (!status.ok()) return done(status);
    if (specs.empty()) return done(std::move(response));
    {
      MutexLock lock(&mutex_);
      ++outside_;
    }
    const auto& run = options_.run_reads ? options_.run_reads : options_.run;
    run([this, done = std::move(done), response = std::move(response), specs = std::move(specs)]() mutable {
      absl::Status loaded;
      for (const SpecToLoad& load : specs) {
        absl::StatusOr<quern::v1::TaskSpec> spec = LoadSpec(load.ref);
        if (!spec.ok()) {
          loaded = spec.status();
          break;
        }
        *response.mutable_attempts(load.index)->mutable_spec() = *std::move(spec);
      }
      if (loaded.ok()) {
        done(std::move(response));
      } else {
        done(loaded);
      }
      RunDone();
    });
  });
}

bool JobQueue::BuildAnswer(WorkerState& worker, SynchronizeResponse* response, std::vector<SpecToLoad>* specs) {
  bool news = false;
  const SynchronizeRequest& info = worker.info;
  response->set_desired_state(IsDraining(worker) ? quern::v1::DRAIN : quern::v1::RUN);
  if (IsDraining(worker) && !info.draining()) news = true;
  std::set<AttemptRef> listed;
  for (const AttemptStatus& status : info.attempts()) {
    const uint64_t job_id = ParseJobName(status.id().job()).value_or(0);
    const AttemptRef ref{job_id, status.id().task(), status.id().attempt()};
    listed.insert(ref);
    if (Ended(status.state())) {
      if (checking_.count(ref) > 0) continue;
      *response->add_acknowledged() = status.id();
      news = true;
      continue;
    }
    const Attempt* const attempt = FindAttempt(ref);
    const bool wanted = attempt != nullptr && attempt->record.worker() == info.worker() &&
                        attempt->record.incarnation() == info.incarnation() && !attempt->stop;
    if (wanted) {
      AddDesired(*FindJob(ref.job), ref, *attempt, false, response, specs);
      continue;
    }
    quern::v1::DesiredAttempt& desired = *response->add_attempts();
    *desired.mutable_id() = status.id();
    desired.set_purpose(status.purpose());
    desired.set_stop(true);
    desired.set_stop_reason(attempt != nullptr && attempt->stop ? attempt->stop_reason : "the attempt is not wanted any more");
    if (worker.told_to_stop.insert(ref).second) news = true;
  }
  for (const AttemptRef& ref : worker.granted) {
    const Attempt& attempt = *FindAttempt(ref);
    if (listed.count(ref) > 0 || attempt.stop) continue;
    AddDesired(*FindJob(ref.job), ref, attempt, true, response, specs);
    news = true;
  }
  if (NotReady(worker).empty() && AddGrants(worker, response, specs)) news = true;
  return news;
}

void JobQueue::AddDesired(JobState& job, const AttemptRef& ref, const Attempt& attempt, bool with_spec, SynchronizeResponse* response,
                          std::vector<SpecToLoad>* specs) {
  quern::v1::DesiredAttempt& desired = *response->add_attempts();
  desired.mutable_id()->set_job(JobName(ref.job));
  desired.mutable_id()->set_task(ref.task);
  desired.mutable_id()->set_attempt(ref.attempt);
  desired.set_purpose(attempt.record.purpose() == quern::v1::PURPOSE_UNSPECIFIED ? quern::v1::WORK : attempt.record.purpose());
  desired.set_memory(attempt.record.memory());
  desired.set_fetch_source(attempt.record.fetch_source());
  desired.set_send_output(attempt.record.send_output());
  const quern::v1::JobSpec& job_spec = job.record.spec();
  desired.set_reader(job_spec.has_dequantize() ? job_spec.dequantize().reader() : job_spec.quantize().reader());
  if (job.tasks[ref.task].record.has_output()) {
    desired.set_output_path(options_.attempt_path(job.record.spec().output(), ref.task, ref.attempt));
  }
  desired.set_fetch_source(attempt.record.fetch_source());
  desired.set_send_output(attempt.record.send_output());
  if (with_spec) specs->push_back({response->attempts_size() - 1, ref});
}

void JobQueue::Tick() {
  Section section(this);
  const absl::Duration now = options_.clock->Monotonic();
  for (const uint64_t id : active_) {
    JobState& job = jobs_.at(id);
    while (!job.delayed.empty() && job.delayed.begin()->first <= now) {
      const uint32_t task = job.delayed.begin()->second;
      job.delayed.erase(job.delayed.begin());
      job.pending.Insert(task, job.tasks[task].record.minimum_memory());
      work_arrived_ = true;
    }
  }
  for (auto it = workers_.begin(); it != workers_.end();) {
    WorkerState& worker = it->second;
    std::vector<AttemptRef> expired;
    for (const AttemptRef& ref : worker.granted) {
      const Attempt* const attempt = FindAttempt(ref);
      if (attempt != nullptr && attempt->deadline <= now && checking_.count(ref) == 0) expired.push_back(ref);
    }
    counts_.lease_expiries += expired.size();
    for (const AttemptRef& ref : expired) {
      const std::string message = absl::StrCat("worker ", it->first, " has not been heard of for ", absl::FormatDuration(options_.lease));
      if (LoseAttempt(ref, message)) CountFailure(*FindJob(ref.job), ref.task, "WORKER_LOST", message);
    }
    for (Superseded& old : worker.superseded) {
      if (old.dead_at <= now) CountSuspicions(old);
    }
    if (!worker.lost && now - worker.last_seen >= options_.lease) {
      worker.lost = true;
      Log(absl::StrCat("worker event=lost worker=", LogValue(it->first)));
    }
    if (worker.waiter.has_value() && worker.waiter->deadline <= now) AnswerWorker(worker, true);
    const bool remembered = worker.standing.cordoned() || worker.standing.set_aside();
    const bool forget =
        worker.lost && !remembered && worker.granted.empty() && !worker.waiter.has_value() && now - worker.last_seen >= kForgetWorkerAfter;
    it = forget ? workers_.erase(it) : std::next(it);
  }
  if (now < next_chores_) return;
  next_chores_ = now + kChores;
  for (const uint64_t id : active_) {
    FindStragglers(jobs_.at(id));
    NoteWaiting(jobs_.at(id));
  }
  // What was refused before may be granted now: time alone ends the waiting for another worker.
  if (!idle_waiters_.empty() && HasOffer()) work_arrived_ = true;
}

void JobQueue::GrantGrace() {
  MutexLock lock(&mutex_);
  const absl::Duration now = options_.clock->Monotonic();
  for (auto& [id, job] : jobs_) {
    for (const uint32_t task : job.live) {
      for (auto& [number, attempt] : job.tasks[task].attempts) attempt.deadline = now + options_.lease;
    }
  }
  for (auto& [name, worker] : workers_) {
    if (!worker.lost) worker.last_seen = now;
    for (Superseded& old : worker.superseded) old.dead_at = now + options_.lease;
  }
}

void JobQueue::Shutdown() {
  Section section(this);
  shut_down_ = true;
  news_for_all_ = true;
}

}  // namespace quern::daemon
