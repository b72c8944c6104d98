#include "quant/scalar/float_formats.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace quern::quant::scalar {
namespace {

// Value of a 16-bit format by its definition, for finite bits.
double ValueOf(uint16_t bits, int mantissa_bits, int bias) {
  const int exponent = (bits & 0x7FFF) >> mantissa_bits;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                         : std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

template <class D>
void EveryValueConvertsExactly(int mantissa_bits, int bias) {
  for (uint32_t i = 0; i < 0x10000; ++i) {
    const uint16_t bits = static_cast<uint16_t>(i);
    const float value = D::ToFloat(bits);
    if (D::IsNan(bits)) {
      EXPECT_TRUE(std::isnan(value)) << i;
      EXPECT_TRUE(D::IsNan(D::FromFloat(value))) << i;
      EXPECT_EQ(D::FromFloat(value) & 0x8000, bits & 0x8000) << i;
      EXPECT_EQ(ReplaceNonfinite<D>(bits), 0);
    } else if (!D::IsFinite(bits)) {
      EXPECT_TRUE(std::isinf(value)) << i;
      EXPECT_EQ(D::FromFloat(value), bits);
      EXPECT_EQ(D::ToFloat(ReplaceNonfinite<D>(bits)), std::copysign(D::kLargest / 2, value));
    } else {
      ASSERT_EQ(static_cast<double>(value), ValueOf(bits, mantissa_bits, bias)) << i;
      ASSERT_EQ(std::signbit(value), (bits & 0x8000) != 0) << i;
      ASSERT_EQ(D::FromFloat(value), bits) << i;
      ASSERT_EQ(ReplaceNonfinite<D>(bits), bits);
    }
  }
}

// Between every two neighbours: the middle goes to the even one, everything else to the nearer one.
template <class D>
void EveryGapRoundsToNearestEven(uint16_t largest) {
  for (uint16_t bits = 0; bits <= largest; ++bits) {
    const uint16_t next = static_cast<uint16_t>(bits + 1);
    const float low = D::ToFloat(bits);
    // Above the largest value stands the next power of two, which becomes Inf.
    const float high = bits == largest ? low + (low - D::ToFloat(static_cast<uint16_t>(bits - 1))) : D::ToFloat(next);
    const float middle = low / 2 + high / 2;
    const uint16_t even = bits % 2 == 0 ? bits : next;
    if (!std::isfinite(high)) break;  // BF16 above its largest value: see below
    for (const uint16_t sign : {uint16_t{0}, uint16_t{0x8000}}) {
      const float factor = sign != 0 ? -1.0f : 1.0f;
      ASSERT_EQ(D::FromFloat(factor * middle), even | sign) << bits;
      ASSERT_EQ(D::FromFloat(factor * std::nextafter(middle, 0.0f)), bits | sign) << bits;
      ASSERT_EQ(D::FromFloat(factor * std::nextafter(middle, std::numeric_limits<float>::infinity())), next | sign) << bits;
    }
  }
}

TEST(FloatFormatsTest, EveryBf16ValueConvertsExactly) { EveryValueConvertsExactly<Bf16>(7, 127); }
TEST(FloatFormatsTest, EveryF16ValueConvertsExactly) { EveryValueConvertsExactly<F16>(10, 15); }
TEST(FloatFormatsTest, EveryBf16GapRoundsToNearestEven) { EveryGapRoundsToNearestEven<Bf16>(0x7F7F); }
TEST(FloatFormatsTest, EveryF16GapRoundsToNearestEven) { EveryGapRoundsToNearestEven<F16>(0x7BFF); }

TEST(FloatFormatsTest, Bf16OverflowsHalfAStepAboveItsLargestValue) {
  EXPECT_EQ(Bf16::FromFloat(FloatOf(0x7F7F7FFF)), 0x7F7F);
  EXPECT_EQ(Bf16::FromFloat(FloatOf(0x7F7F8000)), 0x7F80);
  EXPECT_EQ(Bf16::FromFloat(FloatOf(0xFF7FFFFF)), 0xFF80);
}

TEST(FloatFormatsTest, ConstantsAreTheFormats) {
  EXPECT_EQ(Bf16::FromFloat(Bf16::kLargest), 0x7F7F);
  EXPECT_EQ(F16::FromFloat(F16::kLargest), 0x7BFF);
  EXPECT_EQ(F32::kLargest, std::numeric_limits<float>::max());
  EXPECT_EQ(Bf16::ToFloat(0x3F81) - 1, Bf16::kEpsilon);
  EXPECT_EQ(F16::ToFloat(0x3C01) - 1, F16::kEpsilon);
  EXPECT_EQ(F32::kEpsilon, std::numeric_limits<float>::epsilon());
}

TEST(FloatFormatsTest, F32IsKeptAsItIs) {
  for (const uint32_t bits : {0u, 0x80000000u, 1u, 0x3F800000u, 0x7F7FFFFFu, 0x7F800000u, 0x7FC00001u}) {
    EXPECT_EQ(F32::FromFloat(F32::ToFloat(bits)), bits);
    EXPECT_EQ(F32::IsFinite(bits), bits < 0x7F800000 || bits == 0x80000000);
  }
  EXPECT_EQ(ReplaceNonfinite<F32>(0xFF800000), 0xFEFFFFFF);
  EXPECT_EQ(ReplaceNonfinite<F32>(0x7FC00001), 0u);
}

}  // namespace
}  // namespace quern::quant::scalar
