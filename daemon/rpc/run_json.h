// OUT/.quern/run.json: what differs from run to run.
#ifndef QUERN_DAEMON_RPC_RUN_JSON_H_
#define QUERN_DAEMON_RPC_RUN_JSON_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/queue/job_store.h"
#include "quern/store/store.pb.h"
#include "quern/v1/plan.pb.h"

namespace quern::daemon {

// An object with "identity" (lower-case hexadecimal), "job", "recipe", "max_shard_size", "numerics_version", "sources" (path, size,
// mtime_ns, inode, digests), "grants" and "commits". Both lists are in order and share one count, "seq": a task was granted again after its
// commit only if a grant of it has a larger one.
absl::StatusOr<std::string> BuildRunJson(JobStore* store, const quern::store::JobRecord& job, const quern::v1::PlanSummary& plan);

// What the file at `path` says of the plan that it was written for: the fields that IdentityDifference compares. DATA_LOSS when it is not
// of our making.
absl::StatusOr<quern::v1::PlanSummary> ParseRunJson(const std::string& path);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_RUN_JSON_H_
