#include "base/dtype.h"

#include "base/status_matchers.h"

namespace quern {
namespace {

TEST(DTypeTest, NamesRoundTripForEveryType) {
  for (int i = 0; i <= static_cast<int>(DType::kF6E3M2); ++i) {
    const DType dtype = static_cast<DType>(i);
    EXPECT_THAT(ParseDType(DTypeName(dtype)), IsOkAndHolds(dtype));
  }
}

TEST(DTypeTest, UnknownNameIsRefused) {
  EXPECT_THAT(ParseDType("F3"), StatusIs(absl::StatusCode::kInvalidArgument, testing::HasSubstr("F3")));
}

TEST(DTypeTest, SubByteWidths) {
  EXPECT_EQ(BitsPerElement(DType::kF4), 4);
  EXPECT_EQ(BitsPerElement(DType::kF6E2M3), 6);
  EXPECT_EQ(BytesPerElement(DType::kBF16), 2);
}

}  // namespace
}  // namespace quern
