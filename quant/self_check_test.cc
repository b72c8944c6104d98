#include <gtest/gtest.h>

#include "base/status_matchers.h"
#include "hwy/targets.h"
#include "quant/scheme.h"

namespace quern::quant {
namespace {

TEST(SelfTestTest, PassesOnEveryTargetOfThisMachine) {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    QUERN_EXPECT_OK(SelfTest()) << KernelTarget();
  }
  hwy::SetSupportedTargetsForTest(0);
}

}  // namespace
}  // namespace quern::quant
