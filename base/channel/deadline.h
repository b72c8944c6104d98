// Deadlines of calls.
#ifndef QUERN_BASE_CHANNEL_DEADLINE_H_
#define QUERN_BASE_CHANNEL_DEADLINE_H_

#include <grpc/support/time.h>
#include <grpcpp/support/time.h>

#include "absl/time/time.h"

namespace quern {

// So far from now by the monotonic clock, for everything of gRPC that takes a deadline. One of std::chrono::system_clock is days away, or
// over, when the wall clock jumps before the call begins.
gpr_timespec DeadlineIn(absl::Duration timeout);

}  // namespace quern

#endif  // QUERN_BASE_CHANNEL_DEADLINE_H_
