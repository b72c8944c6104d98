#include "quant/scalar/small_floats.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace quern::quant::scalar {
namespace {

// The code of the nearest value by comparing with all of them, ties to the even code.
template <class F>
uint8_t Nearest(float magnitude) {
  uint32_t best = 0;
  for (uint32_t code = 1; code <= F::kLargestCode; ++code) {
    const double distance = std::abs(double{magnitude} - F::Magnitude(code));
    const double least = std::abs(double{magnitude} - F::Magnitude(best));
    if (distance < least || (distance == least && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(best);
}

TEST(SmallFloatsTest, E4m3ValuesAreThoseOfTheFormat) {
  EXPECT_EQ(E4m3::ToFloat(0x00), 0.0f);
  EXPECT_EQ(E4m3::ToFloat(0x01), 0x1p-9f);
  EXPECT_EQ(E4m3::ToFloat(0x07), 0x7p-9f);
  EXPECT_EQ(E4m3::ToFloat(0x08), 0x1p-6f);
  EXPECT_EQ(E4m3::ToFloat(0x38), 1.0f);
  EXPECT_EQ(E4m3::ToFloat(0x7E), 448.0f);
  EXPECT_EQ(E4m3::ToFloat(0xFE), -448.0f);
  EXPECT_TRUE(std::signbit(E4m3::ToFloat(0x80)));
  EXPECT_TRUE(std::isnan(E4m3::ToFloat(0x7F)));
  EXPECT_TRUE(std::isnan(E4m3::ToFloat(0xFF)));
}

TEST(SmallFloatsTest, E2m1ValuesAreThoseOfTheFormat) {
  const float values[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (uint8_t code = 0; code < 8; ++code) {
    EXPECT_EQ(E2m1::ToFloat(code), values[code]);
    EXPECT_EQ(E2m1::ToFloat(code | 8), -values[code]);
  }
  EXPECT_TRUE(std::signbit(E2m1::ToFloat(8)));
}

TEST(SmallFloatsTest, E8m0IsAPowerOfTwo) {
  EXPECT_EQ(E8m0::ToFloat(127), 1.0f);
  EXPECT_EQ(E8m0::ToFloat(0), 0x1p-127f);
  EXPECT_EQ(E8m0::ToFloat(1), 0x1p-126f);
  EXPECT_EQ(E8m0::ToFloat(254), 0x1p127f);
  EXPECT_TRUE(std::isinf(E8m0::ToFloat(255)));
}

TEST(SmallFloatsTest, EveryCodeComesBack) {
  for (int code = 0; code < 256; ++code) {
    if ((code & 0x7F) == 0x7F) continue;
    EXPECT_EQ(E4m3::FromFloat(E4m3::ToFloat(static_cast<uint8_t>(code))), code);
  }
  for (uint8_t code = 0; code < 16; ++code) {
    if (code == 8) continue;  // -0
    EXPECT_EQ(E2m1::FromFloat(E2m1::ToFloat(code)), code);
  }
}

TEST(SmallFloatsTest, RoundsToTheNearestCodeTiesToEven) {
  // All BF16 values, and their neighbours in F32, among which are all ties.
  for (uint32_t top = 0; top < 0x7F80; ++top) {
    for (const int32_t delta : {-1, 0, 1}) {
      if (top == 0 && delta < 0) continue;
      const float value = FloatOf((top << 16) + static_cast<uint32_t>(delta));
      if (value > 1e6f || (value < 1e-6f && top % 64 != 0)) continue;
      ASSERT_EQ(E4m3::FromFloat(value), Nearest<E4m3>(value)) << value;
      ASSERT_EQ(E4m3::FromFloat(-value), Nearest<E4m3>(value) | 0x80) << value;
      ASSERT_EQ(E2m1::FromFloat(value), Nearest<E2m1>(value)) << value;
      ASSERT_EQ(E2m1::FromFloat(-value), value == 0 ? 0 : Nearest<E2m1>(value) | 8) << value;
    }
  }
}

TEST(SmallFloatsTest, BeyondTheRangeIsTheLargestValue) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float value : {465.0f, 1e30f, infinity}) {
    EXPECT_EQ(E4m3::FromFloat(value), 0x7E);
    EXPECT_EQ(E4m3::FromFloat(-value), 0xFE);
    EXPECT_EQ(E2m1::FromFloat(value), 7);
    EXPECT_EQ(E2m1::FromFloat(-value), 15);
  }
  // Smaller than every subnormal: a rounded negative keeps its sign.
  EXPECT_EQ(E4m3::FromFloat(-0x1p-140f), 0x80);
  EXPECT_EQ(E2m1::FromFloat(-0x1p-149f), 8);
}

}  // namespace
}  // namespace quern::quant::scalar
