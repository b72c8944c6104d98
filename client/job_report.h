// Jobs, tasks and workers for people.
#ifndef QUERN_CLIENT_JOB_REPORT_H_
#define QUERN_CLIENT_JOB_REPORT_H_

#include <string>

#include "absl/time/time.h"
#include "client/console.h"
#include "client/watch_job.h"
#include "quern/v1/jobs.pb.h"

namespace quern::client {

std::string FormatJobs(const quern::v1::ListJobsResponse& jobs, absl::Time now);
// Everything about one job, with the history of its tasks' attempts.
std::string FormatJob(const quern::v1::Job& job, const quern::v1::ListTasksResponse& tasks);
// Everything about one task, with all that is known of each attempt.
std::string FormatTask(const quern::v1::Task& task);
// What keeps the job from going on; empty: nothing.
std::string FormatWaiting(const quern::v1::Job& job);
std::string FormatTasks(const quern::v1::ListTasksResponse& tasks);
std::string FormatWorkers(const quern::v1::ListWorkersResponse& workers, absl::Time now);

// "quantize /models/a -> /models/b".
std::string Describe(const quern::v1::JobSpec& spec);

// How a job ended, in a few lines: what was done, bytes, rate, error, where; or what went wrong and what to do.
std::string FormatOutcome(const WatchOutcome& outcome);

// Prints how a job ended, unless the watching was interrupted before: FormatOutcome, or the job as JSON. Why a job failed goes to
// console.err in both cases, as for other errors; mismatches are a result and go to console.out.
void ReportOutcome(const WatchOutcome& outcome, bool json, Console& console);

}  // namespace quern::client

#endif  // QUERN_CLIENT_JOB_REPORT_H_
