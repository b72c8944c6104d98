#include "daemon/queue/audit.h"

#include <gtest/gtest.h>

#include <limits>

#include "base/status_matchers.h"

namespace quern::daemon {
namespace {

TEST(Audit, FractionOfTasksIsChosen) {
  int chosen = 0;
  for (uint32_t task = 0; task < 10000; ++task) chosen += ChosenForAudit("identity", task, 0.01);
  EXPECT_GT(chosen, 60);
  EXPECT_LT(chosen, 140);
}

TEST(Audit, NoneAndAll) {
  for (uint32_t task = 0; task < 1000; ++task) {
    EXPECT_FALSE(ChosenForAudit("identity", task, 0));
    EXPECT_TRUE(ChosenForAudit("identity", task, 1));
  }
}

TEST(Audit, LargerFractionKeepsWhatASmallerOneChooses) {
  int differs = 0;
  for (uint32_t task = 0; task < 1000; ++task) {
    EXPECT_LE(ChosenForAudit("identity", task, 0.1), ChosenForAudit("identity", task, 0.3));
    differs += ChosenForAudit("identity", task, 0.5) != ChosenForAudit("another", task, 0.5);
  }
  EXPECT_GT(differs, 300) << "the job's identity counts";
}

TEST(Audit, FractionsOutsideOfItsRangeAreRefused) {
  for (double fraction : {0.0, 0.5, 1.0}) EXPECT_THAT(CheckAuditFraction(fraction), IsOk());
  for (double fraction : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    EXPECT_THAT(CheckAuditFraction(fraction), StatusIs(absl::StatusCode::kInvalidArgument));
  }
}

}  // namespace
}  // namespace quern::daemon
