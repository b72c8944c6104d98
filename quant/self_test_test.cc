#include <gtest/gtest.h>

#include "base/status_matchers.h"
#include "quant/scheme.h"

namespace quern::quant {
namespace {

TEST(SelfTestTest, PassesOnThisMachine) { QUERN_EXPECT_OK(SelfTest()); }

}  // namespace
}  // namespace quern::quant
