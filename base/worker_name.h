// Names of workers: chosen by whoever starts one, shown in tables, logs and resource names (workers/{worker}).
#ifndef QUERN_BASE_WORKER_NAME_H_
#define QUERN_BASE_WORKER_NAME_H_

#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace quern {

inline constexpr size_t kMaxWorkerName = 128;

// INVALID_ARGUMENT unless `name` has 1 to kMaxWorkerName bytes of UTF-8 without control characters, spaces and slashes, and is neither .
// nor .. itself.
absl::Status CheckWorkerName(absl::string_view name);

}  // namespace quern

#endif  // QUERN_BASE_WORKER_NAME_H_
