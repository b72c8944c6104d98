// The protocol of workers: what a call changes, and what is answered when.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/status_macros.h"
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

// Without any experience of a job, a worker must be there at least this long to get a task.
constexpr double kUnknownTaskSeconds = 60;
constexpr double kTaskTimeMargin = 1.5;
// A worker that is lost and holds nothing is forgotten after this.
constexpr absl::Duration kForgetWorkerAfter = absl::Hours(1);
// Superseded incarnations that are remembered for each name. One beyond that would be taken for the newest, once more.
constexpr size_t kMaxSuperseded = 256;
constexpr size_t kMaxIncarnation = 64;

void SetDuration(absl::Duration duration, google::protobuf::Duration* out) {
  const int64_t ns = absl::ToInt64Nanoseconds(duration);
  out->set_seconds(ns / 1'000'000'000);
  out->set_nanos(static_cast<int32_t>(ns % 1'000'000'000));
}

bool Ended(AttemptStatus::State state) { return state != AttemptStatus::RUNNING && state != AttemptStatus::STATE_UNSPECIFIED; }

std::string UsableDevice(const SynchronizeRequest& info) {
  for (const quern::v1::Device& device : info.devices()) {
    if (device.self_test_passed()) return absl::StrCat(device.kind(), device.name().empty() ? "" : " ", device.name());
  }
  return "";
}

// For a worker in whose place another has come.
SynchronizeResponse StopResponse(absl::string_view name, absl::string_view host, absl::Time since) {
  SynchronizeResponse response;
  response.set_desired_state(quern::v1::STOP);
  response.set_stop_reason(absl::StrCat("another worker with the name ", name, " started on ", host, " at ",
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

void JobQueue::Synchronize(const SynchronizeRequest& request, uint64_t ticket,
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
  const auto old = std::find_if(worker.superseded.begin(), worker.superseded.end(),
                                [&](const Superseded& old) { return old.incarnation == request.incarnation(); });
  if (old != worker.superseded.end()) {
    AnswerSuperseded(worker, *old, request, std::move(done));
    return;
  }
  const bool known = !worker.info.incarnation().empty();
  if (known && worker.info.incarnation() != request.incarnation()) Supersede(worker, request);
  UpdateWorker(worker, request);
  if (worker.waiter.has_value()) {
    waiters_.erase(worker.waiter_order);
    after_unlock_.push_back(
        [done = std::move(worker.waiter->done)] { done(absl::AbortedError("a newer call of the worker took its place")); });
  }
  const bool checking = IsChecking(worker);
  absl::Duration wait;
  if (request.may_wait()) wait = worker.granted.empty() ? options_.long_poll : options_.progress_interval;
  if (checking) wait = std::max(wait, options_.commit_wait);
  worker.waiter = Waiter{ticket, worker.last_seen + wait, std::move(done)};
  worker.waiter_order = next_waiter_++;
  waiters_[worker.waiter_order] = request.worker();
  AnswerWorker(worker, wait == absl::ZeroDuration());
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
  for (auto& [name, worker] : workers_) {
    if (!worker.waiter.has_value() || worker.waiter->ticket != ticket) continue;
    waiters_.erase(worker.waiter_order);
    after_unlock_.push_back([done = std::move(worker.waiter->done)] { done(absl::CancelledError("the worker hung up")); });
    worker.waiter.reset();
    worker.hung_up = true;
    return;
  }
}

void JobQueue::Supersede(WorkerState& worker, const SynchronizeRequest& request) {
  const std::string& name = request.worker();
  Log(absl::StrCat("worker ", name, ": a new process on ", request.host(), " takes the place of the one on ", worker.info.host()));
  Superseded old{worker.info.incarnation(), options_.clock->Monotonic() + options_.lease, false, {}};
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
    waiters_.erase(worker.waiter_order);
    Say([done = std::move(worker.waiter->done),
         response = StopResponse(name, request.host(), options_.clock->Wall())](absl::Status status) {
      if (status.ok()) {
        done(response);
      } else {
        done(status);
      }
    });
    worker.waiter.reset();
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
    Log(absl::StrCat("two workers are named ", request.worker(), ": the one on ", request.host(),
                     ", which began earlier, is told to stop; give each a --name of its own"));
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
  worker.info = request;
  worker.info.clear_sight();
  // Results are large and handled below.
  for (AttemptStatus& status : *worker.info.mutable_attempts()) status.clear_result();
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
    const std::string problem = CannotWork(worker);
    Log(absl::StrCat("worker ", request.worker(), " on ", request.host(), " is here, ", FormatByteSize(request.memory()),
                     problem.empty() ? "" : absl::StrCat("; it gets no tasks: ", problem)));
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
      HandleCompletion(ref, request.worker(), status.result());
      continue;
    }
    Attempt* const attempt = FindAttempt(ref);
    if (attempt == nullptr || attempt->record.worker() != request.worker() || attempt->record.incarnation() != request.incarnation())
      continue;
    switch (status.state()) {
      case AttemptStatus::FAILED:
        if (checking_.count(ref) == 0) HandleFailure(ref, status.failure());
        break;
      case AttemptStatus::STOPPED:
        if (checking_.count(ref) == 0) {
          const std::string why = current == nullptr ? attempt->record.message() : attempt->stop_reason;
          EndAttempt(ref, quern::v1::Attempt::STOPPED, "STOPPED", why);
        }
        break;
      default: {
        if (current == nullptr) break;
        if (status.bytes_read() != attempt->bytes_read || status.bytes_written() != attempt->bytes_written) Changed(*FindJob(ref.job));
        attempt->bytes_read = status.bytes_read();
        attempt->bytes_written = status.bytes_written();
        JobState& job = *FindJob(ref.job);
        TaskState& task = job.tasks[ref.task];
        // Its lease had run out, but nobody else has begun: it goes on.
        if (attempt->record.state() == quern::v1::Attempt::LOST && task.record.state() == Task::PENDING) {
          attempt->record.set_state(quern::v1::Attempt::GRANTED);
          attempt->record.clear_end_time_ns();
          attempt->record.clear_reason();
          attempt->record.clear_message();
          task.record.set_state(Task::RUNNING);
          job.pending.erase(ref.task);
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
    Log(absl::StrCat(
        "worker ", worker.info.worker(), " does not see the ", answer.what() == quern::v1::SightChallenge::OUTPUT ? "output" : "source",
        " of ", answer.job(),
        streams ? " and streams it: " : " and gets none of its tasks: ", answer.seen() ? "it read other bytes" : answer.detail()));
  }
}

std::string JobQueue::CannotWork(const WorkerState& worker) const {
  if (worker.info.numerics_version() != options_.numerics_version) {
    return absl::StrCat("its numerics version is ", worker.info.numerics_version(), ", this coordinator's is ", options_.numerics_version);
  }
  if (worker.info.devices_size() > 0 && UsableDevice(worker.info).empty()) return "none of its devices passed the self-test";
  return "";
}

void JobQueue::AnswerWaiters() {
  const std::map<uint64_t, std::string> waiters = waiters_;
  for (const auto& [order, name] : waiters) {
    const auto it = workers_.find(name);
    if (it != workers_.end()) AnswerWorker(it->second, false);
  }
}

void JobQueue::AnswerWorker(WorkerState& worker, bool even_without_news) {
  if (!worker.waiter.has_value()) return;
  SynchronizeResponse response;
  std::vector<SpecToLoad> specs;
  bool answer = even_without_news || !broken_.ok() || shut_down_;
  // One answer for the end of an attempt and for what comes next.
  if (!answer && IsChecking(worker)) return;
  if (broken_.ok() && !shut_down_ && BuildAnswer(worker, &response, &specs)) answer = true;
  if (!answer) return;
  SetDuration(options_.lease, response.mutable_lease());
  SetDuration(worker.granted.empty() ? absl::ZeroDuration() : options_.progress_interval, response.mutable_next_call());
  auto done = std::move(worker.waiter->done);
  worker.waiter.reset();
  waiters_.erase(worker.waiter_order);
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
    options_.run([this, done = std::move(done), response = std::move(response), specs = std::move(specs)]() mutable {
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
  response->set_desired_state(info.draining() ? quern::v1::DRAIN : quern::v1::RUN);
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
  if (!info.draining() && CannotWork(worker).empty() && AddGrants(worker, response, specs)) news = true;
  return news;
}

void JobQueue::AddDesired(JobState& job, const AttemptRef& ref, const Attempt& attempt, bool with_spec, SynchronizeResponse* response,
                          std::vector<SpecToLoad>* specs) {
  quern::v1::DesiredAttempt& desired = *response->add_attempts();
  desired.mutable_id()->set_job(JobName(ref.job));
  desired.mutable_id()->set_task(ref.task);
  desired.mutable_id()->set_attempt(ref.attempt);
  desired.set_purpose(quern::v1::WORK);
  desired.set_memory(attempt.record.memory());
  const quern::v1::JobSpec& job_spec = job.record.spec();
  desired.set_reader(job_spec.has_dequantize() ? job_spec.dequantize().reader() : job_spec.quantize().reader());
  if (job.tasks[ref.task].record.has_output()) {
    desired.set_output_path(options_.attempt_path(job.record.spec().output(), ref.task, ref.attempt));
  }
  desired.set_fetch_source(attempt.record.fetch_source());
  desired.set_send_output(attempt.record.send_output());
  if (with_spec) specs->push_back({response->attempts_size() - 1, ref});
}

bool JobQueue::AddGrants(WorkerState& worker, SynchronizeResponse* response, std::vector<SpecToLoad>* specs) {
  bool news = false;
  std::set<AttemptRef> busy = worker.granted;
  for (const AttemptStatus& status : worker.info.attempts()) {
    const AttemptRef ref{ParseJobName(status.id().job()).value_or(0), status.id().task(), status.id().attempt()};
    if (Ended(status.state())) {
      busy.erase(ref);
    } else {
      busy.insert(ref);
    }
  }
  int64_t free = static_cast<int64_t>(worker.info.slots()) - static_cast<int64_t>(busy.size());
  if (free <= 0) return false;
  std::vector<JobState*> jobs;
  for (auto& [id, job] : jobs_) {
    if (Schedulable(job) && !job.pending.empty()) jobs.push_back(&job);
  }
  std::stable_sort(jobs.begin(), jobs.end(),
                   [](const JobState* a, const JobState* b) { return a->record.priority() > b->record.priority(); });
  for (JobState* job : jobs) {
    if (free <= 0) break;
    const Access access = ProveSight(worker, *job, response, &news);
    if (!access.possible) continue;
    const std::vector<uint32_t> pending(job->pending.begin(), job->pending.end());
    for (uint32_t task : pending) {
      if (free <= 0 || !Schedulable(*job)) break;
      if (!MemoryIsEnough(worker, *job, task) || !CanFinish(worker, *job, job->tasks[task])) continue;
      Grant(worker, *job, task, access, response, specs);
      news = true;
      --free;
    }
  }
  return news;
}

JobQueue::Access JobQueue::ProveSight(WorkerState& worker, const JobState& job, SynchronizeResponse* response, bool* news) {
  Access access;
  const absl::Duration now = options_.clock->Monotonic();
  for (const SightProbe& probe : job.sight) {
    const auto [it, inserted] = worker.sight.try_emplace({job.record.id(), probe.what});
    SightState& sight = it->second;
    if (sight.state == Sight::kSeen && !inserted) continue;
    if (sight.state == Sight::kBlind && options_.can_stream && options_.can_stream(worker.info, job.record.id(), probe.what)) {
      (probe.what == quern::v1::SightChallenge::OUTPUT ? access.send_output : access.fetch_source) = true;
      continue;
    }
    access.possible = false;
    const bool again = !inserted && now - sight.time >= options_.sight_retry;
    if (inserted || again) {
      const uint64_t words[2] = {random_(), random_()};
      sight.nonce.assign(reinterpret_cast<const char*>(words), sizeof(words));
      sight.expected = SightDigest(sight.nonce, probe.samples);
      sight.state = Sight::kAsked;
      sight.time = now;
      *news = true;
    }
    if (worker.waiter.has_value()) worker.waiter->deadline = std::min(worker.waiter->deadline, sight.time + options_.sight_retry);
    if (sight.state != Sight::kAsked) continue;
    quern::v1::SightChallenge& challenge = *response->add_challenges();
    challenge.set_job(JobName(job.record.id()));
    challenge.set_what(probe.what);
    challenge.set_path(probe.path);
    challenge.set_size(probe.size);
    challenge.mutable_offsets()->Assign(probe.offsets.begin(), probe.offsets.end());
    challenge.set_nonce(sight.nonce);
    challenge.set_create_in(probe.create_in);
  }
  return access;
}

bool JobQueue::MemoryIsEnough(WorkerState& worker, JobState& job, uint32_t task) {
  const uint64_t minimum = job.tasks[task].record.minimum_memory();
  if (worker.info.memory() >= minimum) return true;
  for (const auto& [name, other] : workers_) {
    if (!other.lost && other.info.slots() > 0 && other.info.memory() >= minimum && CannotWork(other).empty()) return false;
  }
  FailTask(job, task, "MEMORY_TOO_SMALL",
           absl::StrCat("it needs a buffer pool of at least ", FormatByteSize(minimum), ", and worker ", worker.info.worker(), " has ",
                        FormatByteSize(worker.info.memory()), ": start a worker with more --memory, then run the job again"));
  return false;
}

bool JobQueue::CanFinish(const WorkerState& worker, const JobState& job, const TaskState& task) const {
  if (worker.available_until == absl::InfiniteDuration()) return true;
  double seconds = kUnknownTaskSeconds;
  if (job.seconds_per_byte > 0) {
    seconds = kTaskTimeMargin * job.seconds_per_byte * static_cast<double>(task.record.bytes_to_read() + task.record.bytes_to_write());
  }
  return options_.clock->Monotonic() + absl::Seconds(seconds) <= worker.available_until;
}

void JobQueue::Grant(WorkerState& worker, JobState& job, uint32_t task_index, const Access& access, SynchronizeResponse* response,
                     std::vector<SpecToLoad>* specs) {
  TaskState& task = job.tasks[task_index];
  const uint32_t number = task.record.next_attempt();
  task.record.set_next_attempt(number + 1);
  task.record.set_state(Task::RUNNING);
  job.pending.erase(task_index);
  const AttemptRef ref{job.record.id(), task_index, number};
  Attempt& attempt = task.attempts[number];
  quern::store::AttemptRecord& record = attempt.record;
  record.set_state(quern::v1::Attempt::GRANTED);
  record.set_worker(worker.info.worker());
  record.set_incarnation(worker.info.incarnation());
  record.set_host(worker.info.host());
  record.set_grant_time_ns(absl::ToUnixNanos(options_.clock->Wall()));
  record.set_device(UsableDevice(worker.info));
  record.set_grant_sequence(job.next_sequence++);
  record.set_fetch_source(access.fetch_source);
  record.set_send_output(access.send_output);
  const uint64_t limit = task.record.memory_limit();
  record.set_memory(limit == 0 ? worker.info.memory() : std::min(limit, worker.info.memory()));
  attempt.deadline = options_.clock->Monotonic() + options_.lease;
  attempt.seen_alive = true;
  worker.granted.insert(ref);
  PutTask(job, task_index);
  PutAttempt(ref, record);
  Changed(job);
  if (job.record.state() == Job::QUEUED) SetState(job, Job::RUNNING);
  AddDesired(job, ref, attempt, true, response, specs);
}

std::vector<quern::v1::Worker> JobQueue::ListWorkers() {
  MutexLock lock(&mutex_);
  std::vector<quern::v1::Worker> out;
  for (const auto& [name, state] : workers_) {
    quern::v1::Worker& worker = out.emplace_back();
    worker.set_name(WorkerName(name));
    worker.set_host(state.info.host());
    worker.set_incarnation(state.info.incarnation());
    worker.set_state(state.lost ? "lost" : state.info.draining() ? "draining" : !CannotWork(state).empty() ? "unusable" : "ready");
    worker.set_memory(state.info.memory());
    worker.set_threads(state.info.threads());
    for (const quern::v1::Device& device : state.info.devices()) {
      worker.add_devices(absl::StrCat(device.kind(), device.name().empty() ? "" : " ", device.name()));
    }
    for (const AttemptRef& ref : state.granted) worker.add_tasks(TaskName(ref.job, ref.task));
    const int64_t ns = absl::ToUnixNanos(state.last_seen_wall);
    worker.mutable_last_seen()->set_seconds(ns / 1'000'000'000);
    worker.mutable_last_seen()->set_nanos(static_cast<int32_t>(ns % 1'000'000'000));
    worker.set_version(state.info.version());
  }
  return out;
}

void JobQueue::Tick() {
  Section section(this);
  const absl::Duration now = options_.clock->Monotonic();
  for (auto it = workers_.begin(); it != workers_.end();) {
    WorkerState& worker = it->second;
    const std::set<AttemptRef> granted = worker.granted;
    for (const AttemptRef& ref : granted) {
      const Attempt* const attempt = FindAttempt(ref);
      if (attempt != nullptr && attempt->deadline <= now && checking_.count(ref) == 0) {
        const std::string message = absl::StrCat("worker ", it->first, " has not been heard of for ", absl::FormatDuration(options_.lease));
        if (LoseAttempt(ref, message)) CountFailure(*FindJob(ref.job), ref.task, "WORKER_LOST", message);
      }
    }
    for (Superseded& old : worker.superseded) {
      if (old.dead_at <= now) CountSuspicions(old);
    }
    if (!worker.lost && now - worker.last_seen >= options_.lease) {
      worker.lost = true;
      Log(absl::StrCat("worker ", it->first, " is lost"));
    }
    if (worker.waiter.has_value() && worker.waiter->deadline <= now) AnswerWorker(worker, true);
    const bool forget = worker.lost && worker.granted.empty() && !worker.waiter.has_value() && now - worker.last_seen >= kForgetWorkerAfter;
    it = forget ? workers_.erase(it) : std::next(it);
  }
}

void JobQueue::Shutdown() {
  Section section(this);
  shut_down_ = true;
  look_at_waiters_ = true;
}

}  // namespace quern::daemon
