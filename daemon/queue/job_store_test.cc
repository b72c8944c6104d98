// What every store must do, run against each of them.
#include "daemon/queue/job_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "daemon/queue/job_store_conformance.h"

namespace quern::daemon {
namespace {

TEST(StoreKey, GoesByJobThenTaskThenAttempt) {
  EXPECT_EQ(JobKey('j', 0x0102), std::string("j\0\0\0\0\0\0\1\2", 9));
  EXPECT_EQ(TaskKey('t', 1, 3), std::string("t\0\0\0\0\0\0\0\1\0\0\0\3", 13));
  EXPECT_EQ(AttemptKey(1, 3, 2), std::string("a\0\0\0\0\0\0\0\1\0\0\0\3\0\0\0\2", 17));
  EXPECT_LT(JobKey('j', 255), JobKey('j', 256));
  EXPECT_LT(TaskKey('t', 1, 0xFFFFFFFF), TaskKey('t', 2, 0));
}

INSTANTIATE_TEST_SUITE_P(Memory, JobStoreConformance,
                         testing::Values(StoreFactory{"memory", [](const std::string&) { return NewMemoryJobStore(); }, false}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace quern::daemon
