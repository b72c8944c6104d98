// Who gets which task: the rules that job_queue.h states.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/log_fields.h"
#include "base/task_memory.h"
#include "daemon/queue/job_queue.h"
#include "daemon/queue/names.h"

namespace quern::daemon {
namespace {

using quern::store::TaskRecord;
using quern::v1::Job;
using quern::v1::SynchronizeResponse;
using quern::v1::Task;

// Without any experience of a job, a worker must be there at least this long to get a task.
constexpr double kUnknownTaskSeconds = 60;
constexpr double kTaskTimeMargin = 1.5;
// Tasks of a job that are looked at for one grant.
constexpr int kLooks = 64;
// Finished tasks of a job that say how long another takes.
constexpr size_t kPeers = 3;

uint64_t BytesOf(const TaskRecord& task) { return task.bytes_to_read() + task.bytes_to_write(); }

std::string UsableDevice(const quern::v1::SynchronizeRequest& info) {
  for (const quern::v1::Device& device : info.devices()) {
    if (device.self_test_passed()) return absl::StrCat(device.kind(), device.name().empty() ? "" : " ", device.name());
  }
  return "";
}

}  // namespace

bool JobQueue::AddGrants(WorkerState& worker, SynchronizeResponse* response, std::vector<SpecToLoad>* specs) {
  int64_t free = FreeSlots(worker);
  if (free <= 0) return false;
  bool news = false;
  std::vector<JobState*> jobs;
  for (const uint64_t id : active_) {
    JobState& job = jobs_.at(id);
    if (!Schedulable(job) || job.record.numerics_version() != worker.info.numerics_version()) continue;
    if (!job.pending.empty() || !job.audits.empty() || !job.stragglers.empty()) jobs.push_back(&job);
  }
  const auto before = [](const JobState* a, const JobState* b) {
    if (a->record.priority() != b->record.priority()) return a->record.priority() > b->record.priority();
    return std::tie(a->granted, a->last_served) < std::tie(b->granted, b->last_served);
  };
  std::map<const JobState*, Access> proved;
  for (const bool second_try : {false, true}) {
    std::vector<JobState*> left = jobs;
    while (free > 0 && !left.empty()) {
      const auto first = std::min_element(left.begin(), left.end(), before);
      JobState& job = **first;
      const auto [access, asked] = proved.try_emplace(&job);
      if (asked) access->second = ProveSight(worker, job, response, &news);
      const bool granted = Schedulable(job) && access->second.possible &&
                           (second_try ? GrantSecondTry(worker, job, access->second, response, specs)
                                       : GrantFrom(worker, job, access->second, response, specs));
      if (!granted) {
        left.erase(first);
        continue;
      }
      news = true;
      --free;
    }
  }
  return news;
}

bool JobQueue::GrantFrom(WorkerState& worker, JobState& job, const Access& access, SynchronizeResponse* response,
                         std::vector<SpecToLoad>* specs) {
  int looks = kLooks;
  for (const auto& [task, due] : job.audits) {
    if (looks-- == 0) break;
    if (!MayAudit(worker, job, task, due)) continue;
    Grant(worker, job, task, quern::v1::AUDIT, access, response, specs);
    return true;
  }
  const std::optional<uint32_t> task = job.pending.First(worker.info.memory(), kLooks, [&](uint32_t index) QUERN_NO_THREAD_SAFETY_ANALYSIS {
    return CanFinish(worker, job, job.tasks[index].record) && !IsAvoided(worker, job, index);
  });
  if (task.has_value()) {
    Grant(worker, job, *task, quern::v1::WORK, access, response, specs);
    return true;
  }
  FailTasksThatNobodyHasMemoryFor(worker, job);
  return false;
}

bool JobQueue::GrantSecondTry(WorkerState& worker, JobState& job, const Access& access, SynchronizeResponse* response,
                              std::vector<SpecToLoad>* specs) {
  for (const uint32_t index : job.stragglers) {
    const TaskState& task = job.tasks[index];
    const bool own = std::any_of(task.attempts.begin(), task.attempts.end(),
                                 [&](const auto& entry) { return entry.second.record.worker() == worker.info.worker(); });
    if (own || worker.info.memory() < task.record.minimum_memory() || !CanFinish(worker, job, task.record)) continue;
    job.stragglers.erase(index);
    Grant(worker, job, index, quern::v1::STRAGGLER, access, response, specs);
    return true;
  }
  return false;
}

void JobQueue::FindStragglers(JobState& job) {
  job.stragglers.clear();
  if (!Schedulable(job) || !job.pending.empty() || job.times.count() < kPeers) return;
  const absl::Duration now = options_.clock->Monotonic();
  for (const uint32_t index : job.live) {
    const TaskState& task = job.tasks[index];
    const Attempt* only = nullptr;
    int granted = 0;
    for (const auto& [number, attempt] : task.attempts) {
      if (attempt.record.state() != quern::v1::Attempt::GRANTED) continue;
      only = &attempt;
      ++granted;
    }
    const auto trouble = job.trouble.find(index);
    if (task.record.state() != Task::RUNNING || granted != 1 || only->record.purpose() == quern::v1::STRAGGLER ||
        BytesOf(task.record) == 0 || (trouble != job.trouble.end() && trouble->second.second_try_failed)) {
      continue;
    }
    const auto bytes = static_cast<double>(BytesOf(task.record));
    const double anew = job.times.median() * bytes;
    const double elapsed = absl::ToDoubleSeconds(now - only->granted_at);
    if (now - only->granted_at < options_.straggler_after || elapsed < anew) continue;
    const double done = std::min(1.0, static_cast<double>(only->bytes_read + only->bytes_written) / bytes);
    const double left = done > 0 ? elapsed * (1 - done) / done : std::numeric_limits<double>::infinity();
    if (left > anew) job.stragglers.insert(index);
  }
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

double JobQueue::SecondsFor(const WorkerState& worker, const JobState& job, const TaskRecord& task) const {
  const bool own = worker.seconds_per_byte > 0 && (worker.rated_job == job.record.id() || job.times.count() == 0);
  const double rate = own ? worker.seconds_per_byte : job.times.median();
  if (rate <= 0) return kUnknownTaskSeconds;
  return kTaskTimeMargin * rate * static_cast<double>(BytesOf(task));
}

bool JobQueue::CanFinish(const WorkerState& worker, const JobState& job, const TaskRecord& task) const {
  if (worker.available_until == absl::InfiniteDuration()) return true;
  return options_.clock->Monotonic() + absl::Seconds(SecondsFor(worker, job, task)) <= worker.available_until;
}

const char* JobQueue::WhyNot(const WorkerState& worker, const JobState& job, const TaskRecord& task) const {
  if (worker.lost || worker.info.slots() == 0 || !NotReady(worker).empty()) return "takes no tasks";
  if (worker.info.memory() < task.minimum_memory()) return "has too little memory";
  if (worker.info.numerics_version() != job.record.numerics_version()) return "has another numerics version";
  if (!CanFinish(worker, job, task)) return "leaves too soon";
  for (const SightProbe& probe : job.sight) {
    const auto sight = worker.sight.find({job.record.id(), probe.what});
    if (sight != worker.sight.end() && sight->second.state == Sight::kBlind &&
        !(options_.can_stream && options_.can_stream(worker.info, job.record.id(), probe.what))) {
      return "does not see the files";
    }
  }
  return nullptr;
}

bool JobQueue::CouldRun(const WorkerState& worker, const JobState& job, const TaskRecord& task) const {
  return WhyNot(worker, job, task) == nullptr;
}

JobQueue::Distance JobQueue::DistanceOf(const Runner& a, const Runner& b) {
  if (a.worker == b.worker) return Distance::kSameWorker;
  return !a.machine.empty() && a.machine == b.machine ? Distance::kSameMachine : Distance::kOtherMachine;
}

JobQueue::Distance JobQueue::DistanceOf(const Runner& runner, const std::set<Runner>& others) {
  Distance nearest = Distance::kOtherMachine;
  for (const Runner& other : others) nearest = std::min(nearest, DistanceOf(runner, other));
  return nearest;
}

bool JobQueue::FartherCouldRun(const JobState& job, uint32_t task, const std::set<Runner>& others, Distance than) const {
  return std::any_of(workers_.begin(), workers_.end(), [&](const auto& entry) QUERN_NO_THREAD_SAFETY_ANALYSIS {
    return DistanceOf(RunnerOf(entry.second), others) > than && CouldRun(entry.second, job, job.tasks[task].record);
  });
}

bool JobQueue::FailedNear(const JobState& job, uint32_t task, const Runner& runner) const {
  const auto trouble = job.trouble.find(task);
  if (trouble == job.trouble.end()) return false;
  std::set<Runner> others = trouble->second.failed_on;
  const Distance distance = DistanceOf(runner, others);
  if (distance == Distance::kOtherMachine) return false;
  // Its own work is audited by another.
  const TaskRecord& record = job.tasks[task].record;
  if (record.state() == Task::COMMITTED) others.insert(CommitterOf(record));
  return FartherCouldRun(job, task, others, distance);
}

bool JobQueue::IsAvoided(const WorkerState& worker, const JobState& job, uint32_t task) const {
  const auto trouble = job.trouble.find(task);
  return trouble != job.trouble.end() && trouble->second.avoid_until > options_.clock->Monotonic() &&
         FailedNear(job, task, RunnerOf(worker));
}

bool JobQueue::MayAudit(const WorkerState& worker, const JobState& job, uint32_t task, absl::Duration due) const {
  const TaskRecord& record = job.tasks[task].record;
  const absl::Duration now = options_.clock->Monotonic();
  const auto trouble = job.trouble.find(task);
  if (trouble != job.trouble.end() && trouble->second.not_before > now) return false;
  if (worker.info.memory() < record.minimum_memory() || !CanFinish(worker, job, record) || IsAvoided(worker, job, task)) return false;
  const Runner committer = CommitterOf(record);
  const Distance distance = DistanceOf(RunnerOf(worker), committer);
  if (distance == Distance::kOtherMachine) return true;
  if (distance == Distance::kSameWorker && IsDisputed(job, committer)) return false;
  return now - due >= options_.audit_patience && !FartherCouldRun(job, task, {committer}, distance);
}

void JobQueue::FailTasksThatNobodyHasMemoryFor(const WorkerState& worker, JobState& job) {
  const std::optional<uint32_t> task = job.pending.LeastAbove(worker.info.memory());
  if (!task.has_value() || options_.clock->Monotonic() < settled_at_) return;
  const uint64_t minimum = job.tasks[*task].record.minimum_memory();
  for (const auto& [name, other] : workers_) {
    if (!other.lost && other.info.slots() > 0 && other.info.memory() >= minimum && CannotWork(other).empty()) return;
  }
  FailTask(job, *task, "MEMORY_TOO_SMALL",
           absl::StrCat("it needs a buffer pool of at least ", FormatLeastMemory(minimum), ", and worker ", worker.info.worker(), " has ",
                        FormatByteSize(worker.info.memory()), ": start a worker with more --memory, then run the job again"));
}

void JobQueue::Grant(WorkerState& worker, JobState& job, uint32_t task_index, quern::v1::Purpose purpose, const Access& access,
                     SynchronizeResponse* response, std::vector<SpecToLoad>* specs) {
  TaskState& task = job.tasks[task_index];
  const uint32_t number = task.record.next_attempt();
  task.record.set_next_attempt(number + 1);
  const AttemptRef ref{job.record.id(), task_index, number};
  Attempt& attempt = task.attempts[number];
  quern::store::AttemptRecord& record = attempt.record;
  SetAttemptState(job, attempt, quern::v1::Attempt::GRANTED);
  record.set_purpose(purpose);
  record.set_worker(worker.info.worker());
  record.set_incarnation(worker.info.incarnation());
  record.set_host(worker.info.host());
  record.set_machine(worker.info.machine());
  if (worker.principal.has_value()) record.set_principal(*worker.principal);
  record.set_grant_time_ns(absl::ToUnixNanos(options_.clock->Wall()));
  record.set_device(UsableDevice(worker.info));
  record.set_grant_sequence(job.next_sequence++);
  record.set_fetch_source(access.fetch_source);
  record.set_send_output(access.send_output);
  const uint64_t limit = task.record.memory_limit();
  record.set_memory(limit == 0 ? worker.info.memory() : std::min(limit, worker.info.memory()));
  attempt.granted_at = options_.clock->Monotonic();
  attempt.deadline = attempt.granted_at + options_.lease;
  attempt.seen_alive = true;
  worker.granted.insert(ref);
  job.live.insert(task_index);
  job.last_served = ++grants_;
  ++counts_.grants[purpose];
  if (purpose == quern::v1::WORK) MoveTask(job, task_index, Task::RUNNING);
  IndexAudit(job, task_index);
  PutTask(job, task_index);
  PutAttempt(ref, record);
  Changed(job);
  if (job.record.state() == Job::QUEUED) SetState(job, Job::RUNNING);
  if (purpose == quern::v1::AUDIT) {
    Log(absl::StrCat("attempt event=audit ", AttemptFields(JobName(ref.job), ref.task, number),
                     " worker=", LogValue(worker.info.worker())));
  } else if (purpose == quern::v1::STRAGGLER) {
    Log(absl::StrCat("attempt event=second_try ", AttemptFields(JobName(ref.job), ref.task, number),
                     " worker=", LogValue(worker.info.worker())));
  }
  AddDesired(job, ref, attempt, true, response, specs);
}

}  // namespace quern::daemon
