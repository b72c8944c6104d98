#include "client/human.h"

#include <gtest/gtest.h>

namespace quern::client {
namespace {

TEST(HumanTest, ElapsedTimesGrowFromSecondsToDays) {
  EXPECT_EQ(FormatElapsed(absl::ZeroDuration()), "0:00");
  EXPECT_EQ(FormatElapsed(absl::Milliseconds(8900)), "0:08");
  EXPECT_EQ(FormatElapsed(absl::Seconds(754)), "12:34");
  EXPECT_EQ(FormatElapsed(absl::Hours(1) + absl::Seconds(123)), "1:02:03");
  EXPECT_EQ(FormatElapsed(absl::Hours(51) + absl::Minutes(4)), "2d 03:04");
}

TEST(HumanTest, UnknownTimesAreADash) {
  EXPECT_EQ(FormatElapsed(absl::InfiniteDuration()), "-");
  EXPECT_EQ(FormatElapsed(absl::Seconds(-1)), "-");
}

TEST(HumanTest, RatesHaveThreeFigures) {
  EXPECT_EQ(FormatRate(1'420'000'000, absl::Seconds(1)), "1.42 GB/s");
  EXPECT_EQ(FormatRate(873'000'000, absl::Seconds(10)), "87.3 MB/s");
  EXPECT_EQ(FormatRate(999'700'000, absl::Seconds(1)), "1 GB/s");
  EXPECT_EQ(FormatRate(0, absl::Seconds(1)), "0 B/s");
  EXPECT_EQ(FormatRate(17, absl::ZeroDuration()), "-");
  EXPECT_EQ(FormatRate(17, absl::InfiniteDuration()), "-");
}

TEST(HumanTest, SqnrOfNoSignalAndOfNoError) {
  EXPECT_EQ(FormatSqnr(1000, 10), "20.0 dB");
  EXPECT_EQ(FormatSqnr(0, 0), "-");
  EXPECT_EQ(FormatSqnr(5, 0), "exact");
}

TEST(HumanTest, CountsAreGroupedByThree) {
  EXPECT_EQ(FormatCount(0), "0");
  EXPECT_EQ(FormatCount(999), "999");
  EXPECT_EQ(FormatCount(36769), "36,769");
  EXPECT_EQ(FormatCount(1234567), "1,234,567");
}

TEST(HumanTest, RangesJoinRunsOfThreeAndMore) {
  EXPECT_EQ(FormatRanges({}), "");
  EXPECT_EQ(FormatRanges({5}), "5");
  EXPECT_EQ(FormatRanges({1, 0}), "0, 1");
  EXPECT_EQ(FormatRanges({0, 1, 2, 3, 5, 7, 8, 9, 9}), "0-3, 5, 7-9");
}

}  // namespace
}  // namespace quern::client
