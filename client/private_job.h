// Runs one job on a private coordinator and worker, from the first process to the last.
#ifndef QUERN_CLIENT_PRIVATE_JOB_H_
#define QUERN_CLIENT_PRIVATE_JOB_H_

#include <cstddef>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/console.h"
#include "client/exit_code.h"
#include "client/job_options.h"
#include "client/private_farm.h"
#include "client/watch_job.h"
#include "quern/v1/jobs.pb.h"

namespace quern::client {

// Blocks until the job has ended or was interrupted. `durable`: the job's state lies in its output and the job goes on where it stopped
// when it is run again; it is removed once the job has succeeded, and with everything else that was made when the job is refused or cannot
// be planned. Else the state is in memory. Children and the runtime directory are gone when this returns.
absl::StatusOr<WatchOutcome> RunPrivateJob(const quern::v1::JobSpec& spec, const WorkerOptions& worker, bool durable, Console& console);

// Runs a durable job, reports how it ended, and unless `json`, what the manifest of its output says, with so many of the worst modules.
absl::StatusOr<ExitCode> RunToOutput(const quern::v1::JobSpec& spec, const WorkerOptions& worker, size_t worst_modules, bool json,
                                     Console& console);

// Asks a private coordinator without a worker.
absl::Status AskPrivateCoordinator(Console& console,
                                   const std::function<grpc::Status(quern::v1::Jobs::Stub&, grpc::ClientContext*)>& question);

}  // namespace quern::client

#endif  // QUERN_CLIENT_PRIVATE_JOB_H_
