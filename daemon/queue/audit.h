// Which tasks are run again on another worker to compare the digests.
#ifndef QUERN_DAEMON_QUEUE_AUDIT_H_
#define QUERN_DAEMON_QUEUE_AUDIT_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace quern::daemon {

// A choice that a job's identity and the task alone decide: the same tasks whenever, and by whomever, it is made; a larger fraction
// chooses all tasks of a smaller one.
bool ChosenForAudit(absl::string_view job_identity, uint32_t task, double fraction);

// INVALID_ARGUMENT unless it is 0 to 1.
absl::Status CheckAuditFraction(double fraction);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_QUEUE_AUDIT_H_
