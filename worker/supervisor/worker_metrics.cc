#include "worker/supervisor/worker_metrics.h"

#include <unistd.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"

namespace quern::worker {
namespace {

using quern::v1::AttemptStatus;

using Kind = MetricFamily::Kind;

constexpr char kOutOfMemory[] = "out_of_memory";
constexpr char kSignal[] = "signal";
constexpr char kExit[] = "exit";

// 0 for a process that is gone.
double ResidentBytes(pid_t pid) {
  const absl::StatusOr<std::string> text = ReadKernelFile(absl::StrCat("/proc/", pid, "/statm"));
  if (!text.ok()) return 0;
  const std::vector<std::string> pages = absl::StrSplit(*text, ' ');
  double resident = 0;
  if (pages.size() < 2 || !absl::SimpleAtod(pages[1], &resident)) return 0;
  return resident * static_cast<double>(sysconf(_SC_PAGESIZE));
}

}  // namespace

WorkerMetrics::WorkerMetrics(int slots, uint64_t memory) : memory_(memory), slots_(static_cast<size_t>(slots)) {
  for (const char* cause : {kOutOfMemory, kSignal, kExit}) executor_deaths_[cause] = 0;
}

void WorkerMetrics::CallEnded(bool answered, absl::Duration took, bool may_wait) {
  (may_wait ? waiting_seconds_ : prompt_seconds_).Observe(absl::ToDoubleSeconds(took));
  MutexLock lock(&mutex_);
  reachable_ = answered;
  failed_calls_ += !answered;
}

void WorkerMetrics::Draining() {
  MutexLock lock(&mutex_);
  draining_ = true;
}

void WorkerMetrics::ExecutorStarted(size_t slot, pid_t pid) {
  MutexLock lock(&mutex_);
  slots_[slot].executor = pid;
  ++executor_starts_;
}

void WorkerMetrics::ExecutorEnded(size_t slot, const ExecutorDeath& death) {
  MutexLock lock(&mutex_);
  slots_[slot].executor = 0;
  ++executor_deaths_[death.out_of_memory ? kOutOfMemory : death.exit.signaled ? kSignal : kExit];
}

void WorkerMetrics::AttemptStarted(size_t slot, uint64_t memory) {
  MutexLock lock(&mutex_);
  ++started_;
  slots_[slot] = Slot{.executor = slots_[slot].executor, .busy = true, .memory = memory};
}

void WorkerMetrics::CountBytes(Slot& slot, uint64_t bytes_read, uint64_t bytes_written) {
  bytes_read_ += std::max(bytes_read, slot.bytes_read) - slot.bytes_read;
  bytes_written_ += std::max(bytes_written, slot.bytes_written) - slot.bytes_written;
  slot.bytes_read = std::max(bytes_read, slot.bytes_read);
  slot.bytes_written = std::max(bytes_written, slot.bytes_written);
}

void WorkerMetrics::CountEnd(size_t slot, AttemptStatus::State state, quern::v1::FailureReason reason) {
  slots_[slot].busy = false;
  slots_[slot].memory = 0;
  const std::string why = state == AttemptStatus::FAILED ? quern::v1::FailureReason_Name(reason) : "";
  ++ended_[{absl::AsciiStrToLower(AttemptStatus::State_Name(state)), absl::AsciiStrToLower(why)}];
}

void WorkerMetrics::AttemptMoved(size_t slot, uint64_t bytes_read, uint64_t bytes_written) {
  MutexLock lock(&mutex_);
  CountBytes(slots_[slot], bytes_read, bytes_written);
}

void WorkerMetrics::AttemptEnded(size_t slot, const AttemptStatus& status) {
  if (status.has_result()) attempt_seconds_.Observe(status.times().wall_seconds());
  MutexLock lock(&mutex_);
  CountBytes(slots_[slot], status.bytes_read(), status.bytes_written());
  CountEnd(slot, status.state(), status.failure().reason());
  if (!status.has_result()) return;
  const quern::v1::StageTimes& times = status.times();
  times_.set_read_seconds(times_.read_seconds() + times.read_seconds());
  times_.set_compute_seconds(times_.compute_seconds() + times.compute_seconds());
  times_.set_write_seconds(times_.write_seconds() + times.write_seconds());
  times_.set_hash_seconds(times_.hash_seconds() + times.hash_seconds());
  times_.set_read_stall_seconds(times_.read_stall_seconds() + times.read_stall_seconds());
  times_.set_compute_stall_seconds(times_.compute_stall_seconds() + times.compute_stall_seconds());
  times_.set_write_stall_seconds(times_.write_stall_seconds() + times.write_stall_seconds());
  peak_resident_ = std::max(peak_resident_, status.result().peak_rss());
}

void WorkerMetrics::AttemptDied(size_t slot, AttemptStatus::State state, quern::v1::FailureReason reason) {
  MutexLock lock(&mutex_);
  CountEnd(slot, state, reason);
}

absl::Status WorkerMetrics::Live() const {
  MutexLock lock(&mutex_);
  return absl::OkStatus();
}

absl::Status WorkerMetrics::Ready() const {
  MutexLock lock(&mutex_);
  if (draining_) return absl::UnavailableError("the worker takes no more tasks and will leave");
  if (!reachable_) return absl::UnavailableError("the coordinator has not answered the last call");
  return absl::OkStatus();
}

std::vector<MetricFamily> WorkerMetrics::Collect() const {
  std::vector<MetricFamily> out;
  const auto add = [&out](Kind kind, const char* name, const char* help) -> MetricFamily& { return out.emplace_back(kind, name, help); };
  std::vector<pid_t> executors;
  {
    MutexLock lock(&mutex_);
    uint64_t running = 0, pool = 0;
    for (const Slot& slot : slots_) {
      running += slot.busy;
      pool += slot.memory;
      if (slot.executor != 0) executors.push_back(slot.executor);
    }
    add(Kind::kGauge, "quern_worker_coordinator_reachable", "1 while the coordinator answers").Add(reachable_ ? 1 : 0);
    add(Kind::kGauge, "quern_worker_draining", "1 once the worker takes nothing new").Add(draining_ ? 1 : 0);
    add(Kind::kCounter, "quern_worker_synchronize_failures_total", "Calls that the coordinator did not answer")
        .Add(static_cast<double>(failed_calls_));
    add(Kind::kGauge, "quern_worker_slots", "Attempts that it runs at a time").Add(static_cast<double>(slots_.size()));
    add(Kind::kGauge, "quern_worker_attempts_running", "Attempts that run").Add(static_cast<double>(running));
    add(Kind::kCounter, "quern_worker_attempts_started_total", "Attempts that were begun").Add(static_cast<double>(started_));
    MetricFamily& ended =
        add(Kind::kCounter, "quern_worker_attempts_ended_total", "Ends of attempts, by state and, of failed ones, reason");
    for (const auto& [key, count] : ended_) ended.Add(static_cast<double>(count), {{"state", key.first}, {"reason", key.second}});
    add(Kind::kCounter, "quern_worker_read_bytes_total", "Bytes of sources that were read").Add(static_cast<double>(bytes_read_));
    add(Kind::kCounter, "quern_worker_written_bytes_total", "Bytes of shards that were written").Add(static_cast<double>(bytes_written_));
    add(Kind::kCounter, "quern_worker_stage_seconds_total", "Time that completed attempts spent in a stage, summed over threads")
        .Add(times_.read_seconds(), {{"stage", "read"}})
        .Add(times_.compute_seconds(), {{"stage", "compute"}})
        .Add(times_.write_seconds(), {{"stage", "write"}})
        .Add(times_.hash_seconds(), {{"stage", "hash"}});
    add(Kind::kCounter, "quern_worker_stage_stall_seconds_total", "Time that a stage of completed attempts waited for its neighbours")
        .Add(times_.read_stall_seconds(), {{"stage", "read"}})
        .Add(times_.compute_stall_seconds(), {{"stage", "compute"}})
        .Add(times_.write_stall_seconds(), {{"stage", "write"}});
    add(Kind::kGauge, "quern_worker_pool_limit_bytes", "Buffer pool of an attempt, as --memory says").Add(static_cast<double>(memory_));
    add(Kind::kGauge, "quern_worker_pool_bytes", "Buffer pools of the attempts that run").Add(static_cast<double>(pool));
    add(Kind::kGauge, "quern_worker_executor_peak_resident_bytes", "Largest resident memory of an executor that completed an attempt")
        .Add(static_cast<double>(peak_resident_));
    add(Kind::kCounter, "quern_worker_executor_starts_total", "Executors that were started").Add(static_cast<double>(executor_starts_));
    MetricFamily& deaths = add(Kind::kCounter, "quern_worker_executor_deaths_total", "Executors that ended, by cause");
    for (const auto& [cause, count] : executor_deaths_) deaths.Add(static_cast<double>(count), {{"cause", cause}});
  }
  double resident = 0;
  for (const pid_t pid : executors) resident += ResidentBytes(pid);
  add(Kind::kGauge, "quern_worker_executor_resident_bytes", "Resident memory of the executors").Add(resident);
  add(Kind::kHistogram, "quern_worker_attempt_duration_seconds", "How long completed attempts took").Add(attempt_seconds_.Read());
  add(Kind::kHistogram, "quern_worker_synchronize_seconds", "Calls to the coordinator; those that may wait are long polls")
      .Add(prompt_seconds_.Read(), {{"may_wait", "false"}})
      .Add(waiting_seconds_.Read(), {{"may_wait", "true"}});
  return out;
}

}  // namespace quern::worker
