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

// An object with "identity" (lower-case hexadecimal), "job", "sources" (path, size, mtime_ns, inode, digests), "grants" and "commits".
// Both lists are in order and share one count, "seq": a task was granted again after its commit only if a grant of it has a larger one.
absl::StatusOr<std::string> BuildRunJson(JobStore* store, const quern::store::JobRecord& job, const quern::v1::PlanSummary& plan);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_RPC_RUN_JSON_H_
