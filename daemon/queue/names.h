// Resource names: jobs/{job}, jobs/{job}/tasks/{task}, workers/{worker}.
#ifndef QUERN_DAEMON_QUEUE_NAMES_H_
#define QUERN_DAEMON_QUEUE_NAMES_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace quern::daemon {

std::string JobName(uint64_t job);
std::string TaskName(uint64_t job, uint32_t task);
std::string WorkerName(absl::string_view worker);

// INVALID_ARGUMENT shows the form that a name has.
absl::StatusOr<uint64_t> ParseJobName(absl::string_view name);
absl::StatusOr<std::string> ParseWorkerName(absl::string_view name);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_QUEUE_NAMES_H_
