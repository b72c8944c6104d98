#include "quant/scalar/integer_rtn.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace quern::quant::scalar {
namespace {

using ::testing::ElementsAre;

constexpr IntegerFormat kSymmetric4 = {4, true, false};
constexpr IntegerFormat kAsymmetric4 = {4, false, false};

template <class D>
std::vector<int> Codes(const IntegerFormat& format, const GroupParameters& parameters, const std::vector<float>& values) {
  std::vector<int> codes;
  for (const float value : values) codes.push_back(static_cast<int>(Quantize<D>(format, parameters, D::Round(value))));
  return codes;
}

TEST(IntegerRtnTest, TheKnownGroup) {
  const std::vector<float> values = {.30f, -.12f, .05f, -.31f, .22f, 0, -.07f, .155f};
  Range range;
  for (const float value : values) Extend<Bf16>(range, Bf16::FromFloat(value));
  const GroupParameters symmetric = ParametersOf<Bf16>(kSymmetric4, range);
  EXPECT_EQ(Bf16::FromFloat(symmetric.scale), 0x3D2A);
  EXPECT_THAT(Codes<Bf16>(kSymmetric4, symmetric, values), ElementsAre(7, -3, 1, -7, 5, 0, -2, 4));
  const GroupParameters asymmetric = ParametersOf<Bf16>(kAsymmetric4, range);
  EXPECT_EQ(Bf16::FromFloat(asymmetric.scale), 0x3D26);
  EXPECT_EQ(asymmetric.zero_point, 0);
  EXPECT_THAT(Codes<Bf16>(kAsymmetric4, asymmetric, values), ElementsAre(7, -3, 1, -8, 5, 0, -2, 4));
}

TEST(IntegerRtnTest, TiesGoToEvenAfterClamping) {
  GroupParameters parameters;
  parameters.scale = 1;
  EXPECT_THAT(Codes<F32>({4, true, false}, parameters, {0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -7.5f, 7.5f, 100, -100}),
              ElementsAre(0, 2, 2, 0, -2, -8, 7, 7, -8));
  EXPECT_THAT(Codes<F32>({8, true, false}, parameters, {127.5f, -127.5f, -128.5f}), ElementsAre(127, -128, -128));
}

TEST(IntegerRtnTest, AGroupOfZerosHasEpsilonAndDecodesToZero) {
  for (const IntegerFormat& format : {kSymmetric4, kAsymmetric4, IntegerFormat{8, false, true}}) {
    const GroupParameters bf16 = ParametersOf<Bf16>(format, Range());
    EXPECT_EQ(bf16.scale, 0x1p-7f);
    EXPECT_EQ(bf16.zero_point, 0);
    EXPECT_EQ(Dequantize<Bf16>(bf16, Quantize<Bf16>(format, bf16, 0)), 0);
    EXPECT_EQ(ParametersOf<F16>(format, Range()).scale, 0x1p-10f);
    EXPECT_EQ(ParametersOf<F32>(format, Range()).scale, 0x1p-23f);
  }
}

TEST(IntegerRtnTest, AScaleThatUnderflowsLeavesTheZeroPointAtItsEnd) {
  // -2^-133 / 15 rounds to 0 in BF16; low / 0 is -Inf.
  const GroupParameters parameters = ParametersOf<Bf16>(kAsymmetric4, {-0x1p-133f, 0});
  EXPECT_EQ(parameters.scale, Bf16::kEpsilon);
  EXPECT_EQ(parameters.zero_point, 7);
}

TEST(IntegerRtnTest, ARangeThatOverflowsIsReportedAndSaturates) {
  const GroupParameters f16 = ParametersOf<F16>(kAsymmetric4, {-60000, 60000});
  EXPECT_TRUE(f16.overflow);
  EXPECT_EQ(f16.scale, F16::Round(65504.0f / 15));
  EXPECT_FALSE(ParametersOf<F16>(kSymmetric4, {-60000, 60000}).overflow);
  EXPECT_FALSE(ParametersOf<F16>({4, false, true}, {-60000, 60000}).overflow);  // F32 holds the difference
  const GroupParameters f32 = ParametersOf<F32>({2, false, true}, {-3e38f, 3e38f});
  EXPECT_TRUE(f32.overflow);
  EXPECT_TRUE(std::isfinite(f32.scale));
}

TEST(IntegerRtnTest, PreciseRoundsOnlyTheScaleAndTheResult) {
  // BF16 has steps of 0.5 from 64 to 128: a quotient such as 70.3 becomes 70.5 first, which is a tie.
  GroupParameters parameters;
  int different = 0;
  for (int i = 0; i < 128 * 128; ++i) {
    parameters.scale = Bf16::ToFloat(static_cast<uint16_t>(0x3C00 + i % 128));
    const float x = Bf16::ToFloat(static_cast<uint16_t>(0x3F00 + i / 128));  // 32 to 128 times the scale
    const float precise = Quantize<Bf16>({8, true, true}, parameters, x);
    EXPECT_EQ(precise, std::nearbyint(std::fmin(x / parameters.scale, 127.0f)));
    different += precise != Quantize<Bf16>({8, true, false}, parameters, x);
  }
  EXPECT_GT(different, 0);
}

TEST(IntegerRtnTest, ErrorsGoToSixteenLanesInOrder) {
  RowError error;
  for (int i = 0; i < 20; ++i) AddError(error, i, static_cast<float>(i), static_cast<float>(i) - (i == 17 ? 3.0f : 1.0f));
  EXPECT_EQ(error.error[0], 2);
  EXPECT_EQ(error.error[1], 1 + 9);
  EXPECT_EQ(error.error[5], 1);
  EXPECT_EQ(error.signal[3], 9 + 19 * 19);
  EXPECT_EQ(error.max_abs, 3);
  EXPECT_EQ(error.SumSquaredError(), 19 + 9);
}

TEST(IntegerRtnTest, NonfiniteElementsStopOrAreReplaced) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> values(32, 0.25f);
  values[9] = -inf;
  values[11] = nan;
  const auto* elements = reinterpret_cast<const unsigned char*>(values.data());
  unsigned char packed[16];
  float scale;
  RowOutput out;
  out.packed = packed;
  out.scales = reinterpret_cast<unsigned char*>(&scale);
  RowError error;
  Problem problem = EncodePiece<F32>(kSymmetric4, elements, 32, 32, nullptr, false, out, error);
  EXPECT_EQ(problem.kind, Problem::kInf);
  EXPECT_EQ(problem.column, 9);
  problem = EncodePiece<F32>(kSymmetric4, elements, 32, 32, nullptr, true, out, error);
  EXPECT_EQ(problem.kind, Problem::kNone);
  EXPECT_EQ(error.nonfinite, 2u);
  EXPECT_EQ(scale, F32::kLargest / 2 / 7.5f);
  EXPECT_EQ(UnpackCode(packed, 11, 4), 8u);  // NaN became 0
}

}  // namespace
}  // namespace quern::quant::scalar
