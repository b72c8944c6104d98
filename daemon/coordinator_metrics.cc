#include "daemon/coordinator_metrics.h"

#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "daemon/queue/names.h"

namespace quern::daemon {
namespace {

using quern::v1::Job;
using quern::v1::Task;

using Kind = MetricFamily::Kind;

// Every state has a sample, also when it is 0: a series that comes and goes makes bad graphs.
template <typename Name>
void AddStates(const uint64_t* counts, int states, Name name, MetricFamily& family, const MetricFamily::Labels& labels = {}) {
  for (int state = 1; state < states; ++state) {
    MetricFamily::Labels all = labels;
    all.emplace_back("state", absl::AsciiStrToLower(name(state)));
    family.Add(static_cast<double>(counts[state]), std::move(all));
  }
}

std::string JobStateName(int state) { return Job::State_Name(static_cast<Job::State>(state)); }
std::string TaskStateName(int state) { return Task::State_Name(static_cast<Task::State>(state)); }

void AddQueue(const QueueFigures& figures, std::vector<MetricFamily>* out) {
  const QueueCounts& counts = figures.counts;
  const auto add = [out](Kind kind, const char* name, const char* help) -> MetricFamily& { return out->emplace_back(kind, name, help); };
  AddStates(figures.jobs, Job::State_ARRAYSIZE, JobStateName, add(Kind::kGauge, "quern_jobs", "Jobs that are kept, by state"));
  MetricFamily& ended = add(Kind::kCounter, "quern_jobs_ended_total", "Ends of jobs, by state; a job that is resumed may end again");
  for (const Job::State state : {Job::SUCCEEDED, Job::FAILED, Job::CANCELLED}) {
    ended.Add(static_cast<double>(counts.jobs_ended[state]), {{"state", absl::AsciiStrToLower(Job::State_Name(state))}});
  }
  add(Kind::kHistogram, "quern_job_duration_seconds", "From the creation of a job to its end").Add(figures.job_seconds);
  AddStates(figures.tasks, Task::State_ARRAYSIZE, TaskStateName,
            add(Kind::kGauge, "quern_tasks", "Tasks of jobs that have not ended, by state; pending is the depth of the queue"));
  add(Kind::kGauge, "quern_tasks_delayed", "Pending tasks that wait after a failure").Add(static_cast<double>(figures.delayed_tasks));
  MetricFamily& live = add(Kind::kGauge, "quern_job_tasks", "Tasks of one job by state, while the job has not ended");
  for (const QueueFigures::LiveJob& job : figures.live_jobs) {
    AddStates(job.tasks, Task::State_ARRAYSIZE, TaskStateName, live, {{"job", JobName(job.id)}});
  }
  add(Kind::kGauge, "quern_attempts_running", "Attempts that workers have").Add(static_cast<double>(figures.running_attempts));
  MetricFamily& grants = add(Kind::kCounter, "quern_grants_total", "Attempts given to workers, by purpose");
  for (const quern::v1::Purpose purpose : {quern::v1::WORK, quern::v1::STRAGGLER, quern::v1::AUDIT}) {
    grants.Add(static_cast<double>(counts.grants[purpose]), {{"purpose", absl::AsciiStrToLower(quern::v1::Purpose_Name(purpose))}});
  }
  add(Kind::kCounter, "quern_commits_total", "Tasks that were committed").Add(static_cast<double>(counts.commits));
  MetricFamily& attempts =
      add(Kind::kCounter, "quern_attempts_ended_total", "Ends of attempts, by state and, where it was no commit, reason");
  for (const auto& [key, count] : counts.attempts_ended) {
    attempts.Add(static_cast<double>(count), {{"state", absl::AsciiStrToLower(quern::v1::Attempt::State_Name(key.first))},
                                              {"reason", absl::AsciiStrToLower(key.second)}});
  }
  add(Kind::kCounter, "quern_lease_expiries_total", "Attempts whose worker was not heard of for a lease")
      .Add(static_cast<double>(counts.lease_expiries));
  add(Kind::kGauge, "quern_audits_due", "Audits of running jobs that are still to be done").Add(static_cast<double>(figures.audits_due));
  add(Kind::kCounter, "quern_audits_passed_total", "Audits that came to the same bytes").Add(static_cast<double>(counts.audits_passed));
  add(Kind::kCounter, "quern_mismatches_total", "Attempts that came to other bytes than another of the same task: a machine is wrong")
      .Add(static_cast<double>(counts.mismatches));
  MetricFamily& workers = add(Kind::kGauge, "quern_workers", "Workers by state");
  for (const char* state : {"ready", "cordoned", "set aside", "draining", "unusable", "lost"}) {
    const auto found = figures.workers.find(state);
    workers.Add(found == figures.workers.end() ? 0 : static_cast<double>(found->second), {{"state", state}});
  }
  add(Kind::kCounter, "quern_workers_set_aside_total", "Workers that were set aside for their failures")
      .Add(static_cast<double>(counts.workers_set_aside));
  add(Kind::kHistogram, "quern_task_duration_seconds", "How long committed attempts took their worker").Add(figures.task_seconds);
  add(Kind::kCounter, "quern_source_bytes_total", "Bytes that committed attempts read").Add(static_cast<double>(counts.bytes_read));
  add(Kind::kCounter, "quern_output_bytes_total", "Bytes that committed attempts wrote").Add(static_cast<double>(counts.bytes_written));
  const quern::v1::StageTimes& times = counts.times;
  add(Kind::kCounter, "quern_stage_seconds_total", "Time that committed attempts spent in a stage, summed over threads")
      .Add(times.read_seconds(), {{"stage", "read"}})
      .Add(times.compute_seconds(), {{"stage", "compute"}})
      .Add(times.write_seconds(), {{"stage", "write"}})
      .Add(times.hash_seconds(), {{"stage", "hash"}});
  add(Kind::kCounter, "quern_stage_stall_seconds_total", "Time that a stage of committed attempts waited for its neighbours")
      .Add(times.read_stall_seconds(), {{"stage", "read"}})
      .Add(times.compute_stall_seconds(), {{"stage", "compute"}})
      .Add(times.write_stall_seconds(), {{"stage", "write"}});
  add(Kind::kGauge, "quern_waiting_workers", "Calls of workers that wait for news").Add(static_cast<double>(figures.waiting_calls));
}

}  // namespace

std::vector<MetricFamily> CollectCoordinatorMetrics(Coordinator& coordinator, Server& server, const StoreMetrics& store) {
  std::vector<MetricFamily> out;
  AddQueue(coordinator.queue()->Figures(), &out);
  const auto add = [&out](Kind kind, const char* name, const char* help) -> MetricFamily& { return out.emplace_back(kind, name, help); };

  add(Kind::kHistogram, "quern_store_commit_seconds", "How long a batch of changes took to be durable").Add(store.commit_seconds.Read());
  add(Kind::kHistogram, "quern_store_batch_size", "Changes that shared a batch").Add(store.batch_writers.Read());
  const PublishMetrics& publish = coordinator.publish_metrics();
  add(Kind::kCounter, "quern_publishes_total", "Results that were put together, or could not be")
      .Add(static_cast<double>(publish.succeeded.value()), {{"result", "succeeded"}})
      .Add(static_cast<double>(publish.failed.value()), {{"result", "failed"}});
  add(Kind::kHistogram, "quern_publish_seconds", "How long that took").Add(publish.seconds.Read());

  const Server::Figures figures = server.figures();
  add(Kind::kHistogram, "quern_synchronize_seconds", "Calls of workers; those that may wait are long polls")
      .Add(figures.synchronize_prompt, {{"may_wait", "false"}})
      .Add(figures.synchronize_waiting, {{"may_wait", "true"}});
  add(Kind::kGauge, "quern_calls_open", "Calls that are under way").Add(static_cast<double>(figures.open_calls));
  MetricFamily& refused = add(Kind::kCounter, "quern_calls_refused_total", "Calls that got no further than the guard, by status");
  for (const auto& [code, count] : figures.refused_calls) refused.Add(static_cast<double>(count), {{"code", absl::AsciiStrToLower(code)}});
  add(Kind::kGauge, "quern_connections", "Connections that are open").Add(figures.connections);
  add(Kind::kCounter, "quern_connections_total", "Connections that came, and whether they were accepted")
      .Add(static_cast<double>(figures.accepted), {{"accepted", "true"}})
      .Add(static_cast<double>(figures.not_accepted), {{"accepted", "false"}});
  add(Kind::kGauge, "quern_data_connections", "Connections of the data plane that are open").Add(static_cast<double>(figures.data_connections));
  add(Kind::kCounter, "quern_data_bytes_total", "Bytes of files that went over the data plane")
      .Add(static_cast<double>(figures.data_sent), {{"direction", "sent"}})
      .Add(static_cast<double>(figures.data_received), {{"direction", "received"}});
  return out;
}

}  // namespace quern::daemon
