#include "base/byte_size.h"

#include "base/status_matchers.h"
#include "base/task_memory.h"

namespace quern {
namespace {

TEST(ByteSizeTest, BinaryAndDecimalUnits) {
  EXPECT_THAT(ParseByteSize("512MiB"), IsOkAndHolds(512 * kMiB));
  EXPECT_THAT(ParseByteSize("512 MB"), IsOkAndHolds(512'000'000u));
  EXPECT_THAT(ParseByteSize("2GiB"), IsOkAndHolds(2 * kGiB));
  EXPECT_THAT(ParseByteSize("2gb"), IsOkAndHolds(2'000'000'000u));
  EXPECT_THAT(ParseByteSize("1.5KiB"), IsOkAndHolds(1536u));
  EXPECT_THAT(ParseByteSize("17"), IsOkAndHolds(17u));
}

TEST(ByteSizeTest, RefusesWhatIsNoSize) {
  for (const char* text : {"", "MiB", "-1", "1XB", "12parsecs", "1e99TiB", "1.2.3"}) {
    EXPECT_THAT(ParseByteSize(text), StatusIs(absl::StatusCode::kInvalidArgument, ::testing::HasSubstr("is no size in bytes"))) << text;
  }
}

TEST(ByteSizeTest, WhatIsTooLargeIsToldAsThat) {
  for (const std::string& text : {std::string("99999999999TiB"), std::string("99999999999999999999GiB"), std::string("9223372036854775808"),
                                  std::string("8388608 TiB"), std::string(400, '9')}) {
    EXPECT_THAT(ParseByteSize(text), StatusIs(absl::StatusCode::kInvalidArgument, ::testing::HasSubstr("is too large"))) << text;
  }
  EXPECT_THAT(ParseByteSize("8388607TiB"), IsOkAndHolds(uint64_t{8388607} << 40));
}

TEST(ByteSizeTest, FormatsThreeFigures) {
  EXPECT_EQ(FormatByteSize(17), "17 B");
  EXPECT_EQ(FormatByteSize(512 * kMiB), "512 MiB");
  EXPECT_EQ(FormatByteSize(kGiB + kGiB / 4), "1.25 GiB");
}

TEST(ByteSizeTest, WhatIsNeededIsNeverPrintedAsLess) {
  EXPECT_EQ(FormatLeastMemory(16 * kMiB), "16 MiB");
  EXPECT_EQ(FormatLeastMemory(1187 * kMiB), "1187 MiB");
  for (const uint64_t bytes : {uint64_t{1}, 16 * kMiB + 1, 117 * kMiB + kMiB / 3, 117 * kMiB + kMiB - 1, 1023 * kMiB + 5, 41 * kGiB + 1}) {
    const absl::StatusOr<uint64_t> typed = ParseByteSize(FormatLeastMemory(bytes));
    ASSERT_TRUE(typed.ok());
    EXPECT_GE(*typed, bytes);
    EXPECT_LT(*typed, bytes + kMiB);
  }
}

}  // namespace
}  // namespace quern
