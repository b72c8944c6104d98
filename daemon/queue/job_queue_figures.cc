// The figures of the queue.
#include <cmath>

#include "daemon/queue/job_queue.h"

namespace quern::daemon {
namespace {

using quern::v1::Job;
using quern::v1::Task;

// Workers say what they like.
double Amount(double value) { return std::isfinite(value) && value > 0 ? value : 0; }

}  // namespace

void JobQueue::CountEnd(quern::v1::Attempt::State state, const std::string& reason) { ++counts_.attempts_ended[{state, reason}]; }

void JobQueue::CountResult(const quern::v1::TaskResult& result) {
  counts_.bytes_read += result.bytes_read();
  counts_.bytes_written += result.bytes_written();
  const quern::v1::StageTimes& times = result.times();
  quern::v1::StageTimes& sums = counts_.times;
  sums.set_read_seconds(sums.read_seconds() + Amount(times.read_seconds()));
  sums.set_compute_seconds(sums.compute_seconds() + Amount(times.compute_seconds()));
  sums.set_write_seconds(sums.write_seconds() + Amount(times.write_seconds()));
  sums.set_hash_seconds(sums.hash_seconds() + Amount(times.hash_seconds()));
  sums.set_wall_seconds(sums.wall_seconds() + Amount(times.wall_seconds()));
  sums.set_read_stall_seconds(sums.read_stall_seconds() + Amount(times.read_stall_seconds()));
  sums.set_compute_stall_seconds(sums.compute_stall_seconds() + Amount(times.compute_stall_seconds()));
  sums.set_write_stall_seconds(sums.write_stall_seconds() + Amount(times.write_stall_seconds()));
  task_seconds_.Observe(times.wall_seconds());
}

QueueFigures JobQueue::Figures() {
  QueueFigures figures;
  MutexLock lock(&mutex_);
  figures.counts = counts_;
  for (const auto& [id, job] : jobs_) {
    if (Job::State_IsValid(job.record.state())) ++figures.jobs[job.record.state()];
  }
  for (const uint64_t id : active_) {
    const JobState& job = jobs_.at(id);
    for (int state = 0; state < Task::State_ARRAYSIZE; ++state) figures.tasks[state] += job.count[state];
    figures.delayed_tasks += job.delayed.size();
    figures.audits_due += job.audits_left;
    figures.running_attempts += job.granted;
    if (figures.live_jobs.size() == kMostLiveJobs) continue;
    QueueFigures::LiveJob& live = figures.live_jobs.emplace_back();
    live.id = id;
    for (int state = 0; state < Task::State_ARRAYSIZE; ++state) live.tasks[state] = job.count[state];
  }
  for (const auto& [name, worker] : workers_) ++figures.workers[StateOf(worker)];
  figures.waiting_calls = waiters_.size();
  figures.job_seconds = job_seconds_.Read();
  figures.task_seconds = task_seconds_.Read();
  return figures;
}

}  // namespace quern::daemon
