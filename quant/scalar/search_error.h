// The error that observers minimize when they search for a scale. Built-in types only, so that nvcc compiles the same text.
//
// Each element adds |y - x|^2.4 (MSE), |y - x|^3 times the importance of its column (importance), or |y - x|^2 (sweep). The differences are
// scaled by a power of two first, the same one for all candidates of a group, so that nothing overflows or underflows.
//
// Sums have a fixed order. Element i of a group belongs to lane (i % 32) / 2; the two elements of a lane that stand side by side are added
// first, then to the lane; lanes are F32. After every 1024 elements (and at the end) the lanes fold 16 -> 8 -> 4 -> 2 -> 1, lane i+n/2 to
// lane i, and the sum is added to an F64 total.
#ifndef QUERN_QUANT_SCALAR_SEARCH_ERROR_H_
#define QUERN_QUANT_SCALAR_SEARCH_ERROR_H_

#include <cstdint>
#include <cstring>

#include "quant/scalar/float_formats.h"

namespace quern::quant::scalar {

enum class SearchNorm { kPower24, kWeightedCube, kSquare };

// |u|^2.4 by nothing but F32 multiplications and additions, to 7e-7 of the value from 2^-50 to 2^50. With v = u^2: a first estimate w of
// v^(-1/5) comes from dividing the bits of v, as an integer, by -5 (within 3 %); then u^2.4 = v^1.2 = (v w^2)^2 (1 - h)^(-4/5), where h = 1
// - v w^5 is at most 0.16 in magnitude, and a polynomial stands for the last factor. 0 gives 0.
struct Power24 {
  static constexpr float kSlope = -0.2f;
  static constexpr float kOrigin = 1277916288.0f;  // 2^23 (1.2 * 127 - 0.0605)
  static constexpr float kFactor[6] = {0x1.000006p+0f, 0x1.9999bep-1f, 0x1.70860ap-1f, 0x1.57e328p-1f, 0x1.52dc38p-1f, 0x1.476db6p-1f};
};

QUERN_HOST_DEVICE inline float PowerOf24(float u) {
  const float v = u * u;
  const float estimate = static_cast<float>(static_cast<int32_t>(BitsOf(v))) * Power24::kSlope + Power24::kOrigin;
  const float w = FloatOf(static_cast<uint32_t>(static_cast<int32_t>(estimate)));
  const float w2 = w * w;
  const float a = v * w2;
  const float h = 1.0f - a * (w2 * w);
  float factor = Power24::kFactor[5];
  for (int i = 4; i >= 0; --i) factor = factor * h + Power24::kFactor[i];
  return (a * a) * factor;
}

// What one element adds. `u` is the scaled difference.
QUERN_HOST_DEVICE inline float ElementError(SearchNorm norm, float u, float weight) {
  if (norm == SearchNorm::kPower24) return PowerOf24(u);
  const float square = u * u;
  if (norm == SearchNorm::kSquare) return square;
  return (square * (u < 0 ? -u : u)) * weight;
}

// The power of two that scales differences: one over that of the group's scale before it was shrunk.
QUERN_HOST_DEVICE inline float DifferenceFactor(float scale) {
  uint32_t exponent = BitsOf(scale) >> 23 & 0xFF;
  exponent = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
  return FloatOf((254 - exponent) << 23);
}

// The sum over a group of `count` elements; `error_of(i)` is what element i adds.
template <class Function>
QUERN_HOST_DEVICE inline double SumErrors(int64_t count, const Function& error_of) {
  constexpr int64_t kBlock = 1024;
  double total = 0;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = begin + kBlock < count ? begin + kBlock : count;
    float lanes[16] = {};
    for (int64_t i = begin; i < end; i += 2) lanes[i % 32 / 2] += error_of(i) + (i + 1 < end ? error_of(i + 1) : 0.0f);
    for (int n = 8; n > 0; n /= 2) {
      for (int lane = 0; lane < n; ++lane) lanes[lane] += lanes[lane + n];
    }
    total += static_cast<double>(lanes[0]);
  }
  return total;
}

}  // namespace quern::quant::scalar

#endif  // QUERN_QUANT_SCALAR_SEARCH_ERROR_H_
