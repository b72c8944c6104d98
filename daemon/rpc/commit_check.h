// The coordinator's own look at what a worker says it has written, and the files by which workers prove what they see.
#ifndef QUERN_DAEMON_RPC_COMMIT_CHECK_H_
#define QUERN_DAEMON_RPC_COMMIT_CHECK_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/queue/job_queue.h"
#include "quern/v1/jobs.pb.h"
#include "quern/v1/plan.pb.h"

namespace quern::daemon {

// Whether a worker reports of a shard what its plan asks for, which the manifest is made of: a SHA-256, one digest for each tensor of the
// source that it read, and sound error figures for each module. DATA_LOSS says what is missing, or wrong. Other tasks: OK.
absl::Status CheckReport(const quern::v1::TaskSpec& spec, const quern::v1::TaskResult& result);

// CheckReport, and whether the file at `path` has the size and header that plan and result say. On a network filesystem waits up to
// `patience` for it to appear. DATA_LOSS says what differs. Blocks.
absl::Status CheckCommit(const quern::v1::TaskSpec& spec, const std::string& path, const quern::v1::TaskResult& result,
                         absl::Duration patience);

// Whether the whole file has this SHA-256 (raw bytes). FAILED_PRECONDITION when it has another, CANCELLED once `stop` says so, which is
// asked for each MiB. Blocks while the file is read.
absl::Status CheckContent(const std::string& path, const std::string& sha256, const std::function<bool()>& stop);

// What workers must see to get tasks of the job. `first_task` is its first one, nullptr when it has none. Writes OUT/.quern/sight for a
// job that writes an output. Blocks.
absl::StatusOr<std::vector<SightProbe>> MakeSightProbes(const quern::v1::JobSpec& spec, const quern::v1::PlanSummary& plan,
                                                        const quern::v1::TaskSpec* first_task);
std::string SightPath(const std::string& output);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_COMMIT_CHECK_H_
