#include "quant/scalar/search_error.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "quant/scalar/integer_search.h"

namespace quern::quant::scalar {
namespace {

TEST(SearchErrorTest, ThePowerIsWithinAMillionth) {
  double worst = 0;
  // Every 37th significand of every exponent of the squares that are normal.
  for (int exponent = -60; exponent <= 50; ++exponent) {
    for (uint32_t significand = 0; significand < (1u << 23); significand += 3701) {
      const float u = std::ldexp(FloatOf(0x3F800000 | significand), exponent);
      const double exact = std::pow(static_cast<double>(u), 2.4);
      worst = std::fmax(worst, std::fabs(PowerOf24(u) / exact - 1));
    }
  }
  EXPECT_LT(worst, 7e-7);
  EXPECT_EQ(PowerOf24(0), 0);
  EXPECT_EQ(PowerOf24(-0.0f), 0);
  EXPECT_EQ(PowerOf24(-3), PowerOf24(3));
  EXPECT_NEAR(PowerOf24(2), std::pow(2, 2.4), 1e-5);
}

TEST(SearchErrorTest, NormsAreWhatTheySay) {
  EXPECT_EQ(ElementError(SearchNorm::kSquare, -3, 5), 9);
  EXPECT_EQ(ElementError(SearchNorm::kWeightedCube, -3, 5), 135);
  EXPECT_EQ(ElementError(SearchNorm::kPower24, -3, 5), PowerOf24(3));
}

TEST(SearchErrorTest, DifferencesAreScaledByAPowerOfTwo) {
  EXPECT_EQ(DifferenceFactor(1), 1);
  EXPECT_EQ(DifferenceFactor(1.75f), 1);
  EXPECT_EQ(DifferenceFactor(0x1.8p-20f), 0x1p20f);
  EXPECT_EQ(DifferenceFactor(std::numeric_limits<float>::denorm_min()), 0x1p126f);
  EXPECT_EQ(DifferenceFactor(std::numeric_limits<float>::max()), 0x1p-126f);
}

TEST(SearchErrorTest, SumsHaveAFixedOrder) {
  // 1 + 2^-24 is lost in F32 unless the small ones meet first.
  std::vector<float> errors(2048, 0.0f);
  errors[0] = 1;
  errors[1] = 0x1p-24f;   // meets element 0: lost, a tie to even
  errors[33] = 0x1p-24f;  // the same lane, after it: lost as well
  EXPECT_EQ(SumErrors(64, [&](int64_t i) { return errors[i]; }), 1.0);
  errors[32] = 0x1p-24f;  // with its neighbour it is 2^-23
  EXPECT_EQ(SumErrors(64, [&](int64_t i) { return errors[i]; }), 1.0 + 0x1p-23);
  // Blocks of 1024 meet in F64.
  errors[1024] = 0x1p-40f;
  EXPECT_EQ(SumErrors(2048, [&](int64_t i) { return errors[i]; }), 1.0 + 0x1p-23 + 0x1p-40);
  EXPECT_EQ(SumErrors(3, [](int64_t i) { return static_cast<float>(i + 1); }), 6);
}

TEST(SearchErrorTest, TheFirstOfEqualCandidatesIsTaken) {
  // A group of zeros has no error with any range.
  const std::vector<float> zeros(32, 0.0f);
  Range range;
  SearchPiece<F32>({4, true, false}, RangeSearch(), reinterpret_cast<const unsigned char*>(zeros.data()), 32, 32, &range);
  EXPECT_EQ(range.low, 0);
  EXPECT_EQ(range.high, 0);
  // 15 alone is coded as 7 steps of 2, and nothing smaller comes nearer; -15 as -8 steps, so that 15/16 of the range would be best.
  std::vector<float> one(32, 0.0f);
  one[3] = 15;
  SearchPiece<F32>({4, true, false}, RangeSearch(), reinterpret_cast<const unsigned char*>(one.data()), 32, 32, &range);
  EXPECT_EQ(range.high, 15);
  one[3] = -15;
  SearchPiece<F32>({4, true, false}, RangeSearch(), reinterpret_cast<const unsigned char*>(one.data()), 32, 32, &range);
  EXPECT_EQ(range.low, -15 * 0.94f);
}

TEST(SearchErrorTest, AnErrorThatIsNoNumberLeavesTheRange) {
  // The code -8 of a scale near the end of F32 decodes to -Inf.
  std::vector<float> huge(32, -F32::kLargest);
  Range range;
  SearchPiece<F32>({4, true, false}, RangeSearch(), reinterpret_cast<const unsigned char*>(huge.data()), 32, 32, &range);
  EXPECT_TRUE(std::isfinite(range.low));
}

}  // namespace
}  // namespace quern::quant::scalar
