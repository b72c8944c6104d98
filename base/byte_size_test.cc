#include "base/byte_size.h"

#include "base/status_matchers.h"

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
  for (const char* text : {"", "MiB", "-1", "1XB", "12parsecs", "1e99TiB", "99999999999TiB", "1.2.3"}) {
    EXPECT_THAT(ParseByteSize(text), StatusIs(absl::StatusCode::kInvalidArgument)) << text;
  }
}

TEST(ByteSizeTest, FormatsThreeFigures) {
  EXPECT_EQ(FormatByteSize(17), "17 B");
  EXPECT_EQ(FormatByteSize(512 * kMiB), "512 MiB");
  EXPECT_EQ(FormatByteSize(kGiB + kGiB / 4), "1.25 GiB");
}

}  // namespace
}  // namespace quern
