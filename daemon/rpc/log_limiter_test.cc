#include "daemon/rpc/log_limiter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace quern::daemon {
namespace {

using testing::ElementsAre;

TEST(LogLimiterTest, SoManyLinesASecondAndACountOfTheOthers) {
  ManualClock clock;
  std::vector<std::string> lines;
  LogLimiter limiter([&](const std::string& line) { lines.push_back(line); }, &clock, 2);
  for (const char* line : {"a", "b", "c", "d"}) limiter.Write(line);
  EXPECT_THAT(lines, ElementsAre("a", "b"));
  clock.Advance(absl::Milliseconds(999));
  limiter.Write("e");
  EXPECT_THAT(lines, ElementsAre("a", "b"));
  clock.Advance(absl::Milliseconds(1));
  limiter.Write("f");
  limiter.Write("g");
  EXPECT_THAT(lines, ElementsAre("a", "b", "audit event=left_out lines=3", "f", "g"));
}

}  // namespace
}  // namespace quern::daemon
