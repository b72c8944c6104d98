#include "base/channel/deadline.h"

#include <algorithm>

namespace quern {

gpr_timespec DeadlineIn(absl::Duration timeout) {
  if (timeout == absl::InfiniteDuration()) return gpr_inf_future(GPR_CLOCK_MONOTONIC);
  const timespec length = absl::ToTimespec(std::max(timeout, absl::ZeroDuration()));
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_timespec{length.tv_sec, static_cast<int32_t>(length.tv_nsec), GPR_TIMESPAN});
}

}  // namespace quern
