// What is thought of a worker: whether it gets work, and why not.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/log_fields.h"
#include "daemon/queue/job_queue.h"
#include "daemon/queue/names.h"

namespace quern::daemon {
namespace {

// Of a worker's measured speed, how much the last task counts.
constexpr double kNewestShare = 0.3;
// Jobs or workers that a message names.
constexpr size_t kNamed = 8;
// Tasks, or workers, that are looked at to tell what a job waits for.
constexpr int kWaitLooks = 8;

using quern::store::TaskRecord;

}  // namespace

bool JobQueue::IsDraining(const WorkerState& worker) const {
  return worker.info.draining() || (!worker.info.incarnation().empty() && worker.standing.drain_incarnation() == worker.info.incarnation());
}

std::string JobQueue::CannotWork(const WorkerState& worker) const {
  if (worker.info.numerics_version() != options_.numerics_version) {
    return absl::StrCat("its numerics version is ", worker.info.numerics_version(), ", this coordinator's is ", options_.numerics_version);
  }
  std::vector<std::string> failed;
  for (const quern::v1::Device& device : worker.info.devices()) {
    if (device.self_test_passed()) return "";
    failed.push_back(absl::StrCat(device.kind(), device.name().empty() ? "" : " ", device.name(),
                                  device.self_test_detail().empty() ? "" : absl::StrCat(" (", device.self_test_detail(), ")")));
  }
  return failed.empty() ? "" : absl::StrCat("the self-test failed on ", absl::StrJoin(failed, ", "));
}

std::string JobQueue::NotReady(const WorkerState& worker) const {
  if (IsDraining(worker)) return "it finishes what runs and leaves";
  if (worker.standing.cordoned()) {
    const std::string& reason = worker.standing.cordon_reason();
    return absl::StrCat("cordoned", reason.empty() ? "" : ": ", reason);
  }
  if (worker.standing.set_aside()) return worker.standing.set_aside_reason();
  return CannotWork(worker);
}

void JobQueue::WorkerSucceeded(const std::string& name, const AttemptRef& ref, const quern::v1::TaskResult& result) {
  JobState& job = *FindJob(ref.job);
  const quern::store::TaskRecord& task = job.tasks[ref.task].record;
  const uint64_t bytes = task.bytes_to_read() + task.bytes_to_write();
  const double rate = bytes > 0 ? result.times().wall_seconds() / static_cast<double>(bytes) : 0;
  if (rate > 0) job.times.Add(rate);
  const auto it = workers_.find(name);
  if (it == workers_.end()) return;
  WorkerState& worker = it->second;
  worker.failures_in_a_row = 0;
  worker.failed_tasks.clear();
  if (rate <= 0) return;
  const bool more = worker.seconds_per_byte > 0 && worker.rated_job == ref.job;
  worker.seconds_per_byte = more ? (1 - kNewestShare) * worker.seconds_per_byte + kNewestShare * rate : rate;
  worker.rated_job = ref.job;
}

void JobQueue::WorkerFailed(const std::string& name, const AttemptRef& ref, const std::string& message) {
  const auto it = workers_.find(name);
  if (it == workers_.end()) return;
  WorkerState& worker = it->second;
  if (worker.failures_in_a_row++ == 0) worker.commits_before = commits_;
  if (worker.failed_tasks.size() < 2) worker.failed_tasks.insert({ref.job, ref.task});
  if (options_.set_aside_after == 0 || worker.standing.set_aside() || worker.failures_in_a_row < options_.set_aside_after ||
      worker.failed_tasks.size() < 2 || commits_ == worker.commits_before) {
    return;
  }
  worker.standing.set_set_aside(true);
  worker.standing.set_set_aside_reason(absl::StrCat("set aside: its last ", worker.failures_in_a_row,
                                                    " attempts failed while others committed, the last one with: ", message));
  PutWorker(worker);
  ++counts_.workers_set_aside;
  Log(absl::StrCat("worker event=set_aside worker=", LogValue(name), MessageField(worker.standing.set_aside_reason()),
                   " note=\"it gets no more tasks until it is uncordoned\""));
}

void JobQueue::PutWorker(const WorkerState& worker) {
  const quern::store::WorkerRecord& standing = worker.standing;
  std::string key = absl::StrCat("w", worker.info.worker());
  if (standing.cordoned() || standing.set_aside() || !standing.drain_incarnation().empty()) {
    quern::store::WorkerRecord record = standing;
    record.set_name(worker.info.worker());
    Put(std::move(key), record.SerializeAsString());
  } else {
    writes_.push_back({StoreWrite::Kind::kDelete, std::move(key), ""});
  }
}

void JobQueue::ChangeWorker(const std::string& name, const std::function<void(WorkerState&)>& change, WorkerCallback done) {
  Section section(this);
  const auto it = workers_.find(name);
  absl::StatusOr<quern::v1::Worker> answer = absl::NotFoundError(absl::StrCat("there is no ", WorkerName(name)));
  if (it != workers_.end()) {
    change(it->second);
    PutWorker(it->second);
    NewsFor(name);
    work_arrived_ = true;
    answer = DescribeWorker(name, it->second);
    Log(absl::StrCat("worker event=changed worker=", LogValue(name), " state=", LogValue(answer->state()), MessageField(answer->detail())));
  }
  Say([done = std::move(done), answer = std::move(answer)](absl::Status status) {
    if (status.ok()) {
      done(answer);
    } else {
      done(status);
    }
  });
}

void JobQueue::CordonWorker(const std::string& name, const std::string& reason, WorkerCallback done) {
  ChangeWorker(
      name,
      [&](WorkerState& worker) {
        worker.standing.set_cordoned(true);
        worker.standing.set_cordon_reason(reason);
      },
      std::move(done));
}

void JobQueue::UncordonWorker(const std::string& name, WorkerCallback done) {
  ChangeWorker(
      name,
      [](WorkerState& worker) {
        worker.standing.clear_cordoned();
        worker.standing.clear_cordon_reason();
        worker.standing.clear_set_aside();
        worker.standing.clear_set_aside_reason();
        worker.failures_in_a_row = 0;
        worker.failed_tasks.clear();
      },
      std::move(done));
}

void JobQueue::DrainWorker(const std::string& name, WorkerCallback done) {
  ChangeWorker(
      name, [](WorkerState& worker) { worker.standing.set_drain_incarnation(worker.info.incarnation()); }, std::move(done));
}

const char* JobQueue::StateOf(const WorkerState& worker) const {
  // One that only the records of attempts tell of has not called yet.
  if (worker.lost || worker.here_since == absl::Time()) return "lost";
  if (IsDraining(worker)) return "draining";
  if (worker.standing.cordoned()) return "cordoned";
  if (worker.standing.set_aside()) return "set aside";
  return CannotWork(worker).empty() ? "ready" : "unusable";
}

quern::v1::Worker JobQueue::DescribeWorker(const std::string& name, const WorkerState& state) const {
  quern::v1::Worker worker;
  worker.set_name(WorkerName(name));
  worker.set_host(state.info.host());
  worker.set_incarnation(state.info.incarnation());
  const bool heard = state.here_since != absl::Time();
  const bool lost = state.lost || !heard;
  worker.set_detail(NotReady(state));
  worker.set_state(StateOf(state));
  if (lost && !state.standing.cordoned() && !state.standing.set_aside()) {
    worker.set_detail(heard ? "it has not been heard of for a lease" : "it has not been heard of since this coordinator started");
  }
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
  worker.set_numerics_version(state.info.numerics_version());
  worker.set_failures_in_a_row(state.failures_in_a_row);
  worker.set_machine(state.info.machine());
  return worker;
}

std::vector<quern::v1::Worker> JobQueue::ListWorkers() {
  MutexLock lock(&mutex_);
  std::vector<quern::v1::Worker> out;
  for (const auto& [name, state] : workers_) out.push_back(DescribeWorker(name, state));
  return out;
}

// ---- Disputes ----

void JobQueue::AddDispute(JobState& job, const Runner& worker, const Runner& other) {
  for (const auto& dispute : job.record.disputes()) {
    const bool same = dispute.worker() == worker.worker && dispute.other() == other.worker;
    if (same || (dispute.worker() == other.worker && dispute.other() == worker.worker)) return;
  }
  quern::store::JobRecord::Dispute& dispute = *job.record.add_disputes();
  dispute.set_worker(worker.worker);
  dispute.set_worker_machine(worker.machine);
  dispute.set_other(other.worker);
  dispute.set_other_machine(other.machine);
  PutJob(job);
}

bool JobQueue::IsDisputed(const JobState& job, const Runner& runner) {
  return std::any_of(job.record.disputes().begin(), job.record.disputes().end(), [&](const auto& dispute) {
    const std::set<Runner> sides = {{dispute.worker(), dispute.worker_machine()}, {dispute.other(), dispute.other_machine()}};
    return DistanceOf(runner, sides) != Distance::kOtherMachine;
  });
}

void JobQueue::SettleDisputes(JobState& job) {
  const auto is_out = [&](const std::string& name) QUERN_NO_THREAD_SAFETY_ANALYSIS {
    const auto it = workers_.find(name);
    return it != workers_.end() && (it->second.standing.cordoned() || it->second.standing.set_aside());
  };
  std::set<Runner> wrong;
  google::protobuf::RepeatedPtrField<quern::store::JobRecord::Dispute> open;
  for (const auto& dispute : job.record.disputes()) {
    if (is_out(dispute.worker())) wrong.insert({dispute.worker(), dispute.worker_machine()});
    if (is_out(dispute.other())) wrong.insert({dispute.other(), dispute.other_machine()});
    if (!is_out(dispute.worker()) && !is_out(dispute.other())) *open.Add() = dispute;
  }
  if (job.record.disputes().empty()) return;
  *job.record.mutable_disputes() = std::move(open);
  PutJob(job);
  // What a wrong worker still runs must not be committed later.
  std::vector<AttemptRef> running;
  for (const uint32_t task : job.live) {
    for (const auto& [number, attempt] : job.tasks[task].attempts) {
      if (DistanceOf(RunnerOf(attempt.record), wrong) == Distance::kSameWorker) running.push_back({job.record.id(), task, number});
    }
  }
  for (const AttemptRef& ref : running) {
    if (FindAttempt(ref) != nullptr) EndAttempt(ref, quern::v1::Attempt::STOPPED, "STOPPED", "its worker was taken out after a mismatch");
  }
  uint32_t again = 0, audits = 0;
  for (uint32_t i = 0; i < job.tasks.size(); ++i) {
    const quern::store::TaskRecord& record = job.tasks[i].record;
    if (record.state() != quern::v1::Task::COMMITTED) continue;
    const Runner committer = CommitterOf(record);
    const bool passed = record.audit() == quern::store::TaskRecord::PASSED && !record.audited_by().empty();
    if (passed && DistanceOf({record.audited_by(), record.audited_on()}, committer) == Distance::kOtherMachine) continue;
    const Distance distance = DistanceOf(committer, wrong);
    if (distance == Distance::kSameWorker) {
      Uncommit(job, i, quern::v1::Task::PENDING);
      ++again;
    } else if (record.has_output() && (distance == Distance::kSameMachine || IsDisputed(job, committer))) {
      SetAudit(job, i, quern::store::TaskRecord::DUE);
      PutTask(job, i);
      ++audits;
    }
  }
  if (again > 0) CountTotals(job);
  std::set<std::string> names;
  for (const Runner& runner : wrong) names.insert(runner.worker);
  Log(absl::StrCat("job event=distrust job=", JobName(job.record.id()), " workers=", LogValue(absl::StrJoin(names, ",")),
                   " tasks_again=", again, " tasks_to_audit=", audits,
                   audits == 0 ? ""
                               : " note=\"the audits wait for a worker that is not in the dispute: start one, or cordon the worker that is "
                                 "wrong and run quern retry again\""));
}

std::string JobQueue::WaitsFor(const JobState& job) const {
  const quern::v1::Job::State state = job.record.state();
  if ((state != quern::v1::Job::QUEUED && state != quern::v1::Job::RUNNING) || job.held || job.granted > 0 || Complete(job)) return "";
  std::vector<const WorkerState*> ready;
  for (const auto& [name, worker] : workers_) {
    if (absl::string_view(StateOf(worker)) == "ready") ready.push_back(&worker);
  }
  if (ready.empty()) return "a worker: none is connected that may take tasks (quern workers)";
  const TaskRecord* stuck = nullptr;  // the first that nobody can take stands for all
  const auto somebody = [&](uint32_t task) QUERN_NO_THREAD_SAFETY_ANALYSIS {
    const TaskRecord& record = job.tasks[task].record;
    if (stuck == nullptr) stuck = &record;
    const bool disputed = record.state() == quern::v1::Task::COMMITTED && IsDisputed(job, CommitterOf(record));
    return std::any_of(ready.begin(), ready.end(), [&](const WorkerState* worker) QUERN_NO_THREAD_SAFETY_ANALYSIS {
      return !(disputed && worker->info.worker() == record.committed_by()) && CouldRun(*worker, job, record);
    });
  };
  int looks = kWaitLooks;
  for (auto it = job.delayed.begin(); it != job.delayed.end() && looks-- > 0; ++it) {
    if (somebody(it->second)) return "";
  }
  if (job.pending.First(UINT64_MAX, kWaitLooks, somebody).has_value()) return "";
  // Those that need less memory may come later.
  looks = kWaitLooks;
  for (const WorkerState* worker : ready) {
    if (looks-- == 0) break;
    if (job.pending.First(worker->info.memory(), kWaitLooks, somebody).has_value()) return "";
  }
  looks = kWaitLooks;
  for (auto it = job.audits.begin(); it != job.audits.end() && looks-- > 0; ++it) {
    if (somebody(it->first)) return "";
  }
  if (stuck == nullptr) return "";
  const bool audit = stuck->state() == quern::v1::Task::COMMITTED;
  std::vector<std::string> unfit;
  for (const WorkerState* worker : ready) {
    const char* const why = WhyNot(*worker, job, *stuck);
    if (why != nullptr && unfit.size() < kNamed) unfit.push_back(absl::StrCat(worker->info.worker(), " ", why));
  }
  const std::string why = unfit.empty() ? "" : absl::StrCat(" (", absl::StrJoin(unfit, ", "), ")");
  if (!audit || !IsDisputed(job, CommitterOf(*stuck))) {
    return absl::StrCat("a worker that can run ", audit ? "the audit of " : "", stuck->label(), why);
  }
  std::set<std::string> names;
  for (const auto& dispute : job.record.disputes()) names.insert({dispute.worker(), dispute.other()});
  return absl::StrCat(
      "audits by another worker than ", absl::StrJoin(names, " and "), why,
      ", for after a mismatch its own word does not count: start one more; or quern pause the job, quern cordon the one that "
      "is wrong, and quern resume");
}

void JobQueue::NoteWaiting(JobState& job) {
  std::string waits_for = WaitsFor(job);
  if (waits_for == job.waits_for) return;
  job.waits_for = std::move(waits_for);
  Changed(job);
}

std::string JobQueue::DescribeDispute(const JobState& job, uint32_t task, const std::string& worker, const std::string& other) const {
  const auto count = [&](const std::string& name) {
    uint32_t committed = 0;
    for (uint32_t i = 0; i < job.tasks.size(); ++i) committed += i != task && job.tasks[i].record.committed_by() == name;
    return committed;
  };
  std::string text = absl::StrCat("Of the other tasks of this job worker ", other, " has committed ", count(other));
  if (worker != other) absl::StrAppend(&text, " and worker ", worker, " ", count(worker));
  absl::StrAppend(&text,
                  ": retry does those of a cordoned worker again that no other machine has confirmed; while neither is cordoned it has all "
                  "of them audited by other workers");
  std::vector<std::string> jobs;
  for (const auto& [id, with] : jobs_) {
    const bool holds =
        id != job.record.id() && std::any_of(with.tasks.begin(), with.tasks.end(), [&](const TaskState& state) {
          return !state.record.committed_by().empty() && (state.record.committed_by() == worker || state.record.committed_by() == other);
        });
    if (holds) jobs.push_back(JobName(id));
  }
  if (!jobs.empty()) {
    const size_t named = std::min(jobs.size(), kNamed);
    absl::StrAppend(&text, ". Results of the two are also in ",
                    absl::StrJoin(jobs.begin(), jobs.begin() + static_cast<ptrdiff_t>(named), ", "),
                    named < jobs.size() ? absl::StrCat(" and ", jobs.size() - named, " more") : "", ", which retry does not touch");
  }
  return text;
}

}  // namespace quern::daemon
