// The floats of 8 and 4 bits that weights and scales are stored in: the definition of every rounding to them. Ties go to even, values
// beyond the largest finite one become that one. Built-in types only, so that nvcc compiles the same text.
#ifndef QUERN_QUANT_SCALAR_SMALL_FLOATS_H_
#define QUERN_QUANT_SCALAR_SMALL_FLOATS_H_

#include <cstdint>

#include "quant/scalar/float_formats.h"

namespace quern::quant::scalar {

// Codes of sign, exponent and mantissa: with e exponent bits whose bias is kBias, the codes of magnitude are those of the values in order.
template <int kMantissaBits_, int kBias_, uint32_t kLargestCode_>
struct SmallFloat {
  static constexpr int kMantissaBits = kMantissaBits_;
  static constexpr int kBias = kBias_;
  static constexpr uint32_t kLargestCode = kLargestCode_;

  // The value of a code without sign.
  QUERN_HOST_DEVICE static float Magnitude(uint32_t code) {
    const uint32_t exponent = code >> kMantissaBits;
    const uint32_t mantissa = code & ((1u << kMantissaBits) - 1);
    // Subnormal codes count in steps of 2^(1 - bias - mantissa bits).
    if (exponent == 0) return static_cast<float>(mantissa) * FloatOf(static_cast<uint32_t>(127 + 1 - kBias - kMantissaBits) << 23);
    return FloatOf((exponent + 127 - kBias) << 23 | mantissa << (23 - kMantissaBits));
  }

  // The code of a magnitude that is no NaN.
  QUERN_HOST_DEVICE static uint32_t CodeOf(float magnitude) {
    const uint32_t bits = BitsOf(magnitude);
    const int exponent = static_cast<int>(bits >> 23) - 127 + kBias;  // as a code has it
    const uint32_t significand = (bits & 0x7FFFFF) | 0x800000;
    // What is dropped of a significand of 24 bits; more of a subnormal one.
    const int drop = 23 - kMantissaBits + (exponent < 1 ? 1 - exponent : 0);
    if (drop > 24) return 0;
    const uint32_t half = 1u << (drop - 1);
    const uint32_t rounded = (significand + half - 1 + ((significand >> drop) & 1)) >> drop;
    // A rounding that overflows the mantissa carries into the exponent. The leading one of a normal value counts as one exponent.
    const uint32_t code = rounded + (exponent < 1 ? 0 : static_cast<uint32_t>(exponent - 1) << kMantissaBits);
    return code < kLargestCode ? code : kLargestCode;
  }
};

// F8_E4M3 (finite: no infinities, 0x7F and 0xFF are NaN), largest value 448.
struct E4m3 : SmallFloat<3, 7, 0x7E> {
  static constexpr float kLargest = 448;
  QUERN_HOST_DEVICE static float ToFloat(uint8_t code) {
    const uint32_t magnitude = code & 0x7Fu;
    const uint32_t bits = magnitude == 0x7F ? 0x7FC00000u : BitsOf(Magnitude(magnitude));
    return FloatOf(bits | (code & 0x80u) << 24);
  }
  // `value` is no NaN. The sign of a zero is kept.
  QUERN_HOST_DEVICE static uint8_t FromFloat(float value) {
    const uint32_t bits = BitsOf(value);
    return static_cast<uint8_t>(CodeOf(FloatOf(bits & 0x7FFFFFFF)) | (bits >> 24 & 0x80));
  }
};

// F4 (E2M1): 0 0.5 1 1.5 2 3 4 6 and their negatives, sign in bit 3.
struct E2m1 : SmallFloat<1, 1, 7> {
  static constexpr float kLargest = 6;
  QUERN_HOST_DEVICE static float ToFloat(uint8_t code) { return FloatOf(BitsOf(Magnitude(code & 7u)) | (code & 8u) << 28); }
  // `value` is no NaN. Negative values that round to zero have code 8, but -0 has code 0.
  QUERN_HOST_DEVICE static uint8_t FromFloat(float value) {
    return static_cast<uint8_t>(CodeOf(FloatOf(BitsOf(value) & 0x7FFFFFFF)) | (value < 0 ? 8u : 0u));
  }
};

// F8_E8M0, often stored as U8: a power of two, 2^(code - 127). 255 is read as infinite, as compressed-tensors does.
struct E8m0 {
  QUERN_HOST_DEVICE static float ToFloat(uint8_t code) {
    return FloatOf(code == 0 ? 0x00400000u : static_cast<uint32_t>(code) << 23);  // 2^-127 is subnormal
  }
};

}  // namespace quern::quant::scalar

#endif  // QUERN_QUANT_SCALAR_SMALL_FLOATS_H_
