// Versions of what a store holds. docs/operations.md says what an upgrade means for those who run it.
#ifndef QUERN_DAEMON_QUEUE_STORE_MIGRATION_H_
#define QUERN_DAEMON_QUEUE_STORE_MIGRATION_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "daemon/queue/job_store.h"

namespace quern::daemon {

// store.proto says what each version added.
inline constexpr uint32_t kStoreVersion = 3;

// Makes `store` one of kStoreVersion: an empty one is marked, an older one is migrated in one write, which may be large.
// FAILED_PRECONDITION for a newer one, DATA_LOSS for records without a version; neither is changed. `name` is for messages. Blocks.
absl::Status PrepareStore(JobStore* store, const std::string& name);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_QUEUE_STORE_MIGRATION_H_
