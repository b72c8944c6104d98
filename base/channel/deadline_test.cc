#include "base/channel/deadline.h"

#include <gtest/gtest.h>

namespace quern {
namespace {

TEST(DeadlineTest, IsByTheMonotonicClock) {
  const gpr_timespec before = gpr_now(GPR_CLOCK_MONOTONIC);
  const gpr_timespec deadline = DeadlineIn(absl::Milliseconds(1500));
  const gpr_timespec after = gpr_now(GPR_CLOCK_MONOTONIC);
  EXPECT_EQ(deadline.clock_type, GPR_CLOCK_MONOTONIC);
  const gpr_timespec length = gpr_time_from_millis(1500, GPR_TIMESPAN);
  EXPECT_GE(gpr_time_cmp(deadline, gpr_time_add(before, length)), 0);
  EXPECT_LE(gpr_time_cmp(deadline, gpr_time_add(after, length)), 0);
}

TEST(DeadlineTest, NeverAndAtOnce) {
  EXPECT_EQ(gpr_time_cmp(DeadlineIn(absl::InfiniteDuration()), gpr_inf_future(GPR_CLOCK_MONOTONIC)), 0);
  const gpr_timespec past = DeadlineIn(-absl::Seconds(5));
  EXPECT_LE(gpr_time_cmp(past, gpr_now(GPR_CLOCK_MONOTONIC)), 0);
}

}  // namespace
}  // namespace quern
