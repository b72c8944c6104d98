// BF16, F16 and F32 as bits and as values: the definition of every rounding to a weight's dtype. Integer arithmetic, ties to even,
// subnormals kept, no dependence on the rounding of the machine. Built-in types only, so that nvcc compiles the same text.
#ifndef QUERN_QUANT_SCALAR_FLOAT_FORMATS_H_
#define QUERN_QUANT_SCALAR_FLOAT_FORMATS_H_

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define QUERN_HOST_DEVICE __host__ __device__
#else
#define QUERN_HOST_DEVICE
#endif

namespace quern::quant::scalar {

QUERN_HOST_DEVICE inline uint32_t BitsOf(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

QUERN_HOST_DEVICE inline float FloatOf(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Each format: Bits as stored; ToFloat is exact; FromFloat rounds to nearest, ties to even (a NaN stays a NaN of the same sign, quiet);
// Round is both. kEpsilon is the distance from 1 to the next value, kLargest the largest finite value.
struct Bf16 {
  using Bits = uint16_t;
  static constexpr float kEpsilon = 0x1p-7f;
  static constexpr float kLargest = 0x1.fep127f;

  QUERN_HOST_DEVICE static float ToFloat(Bits bits) { return FloatOf(uint32_t{bits} << 16); }
  QUERN_HOST_DEVICE static Bits FromFloat(float value) {
    const uint32_t bits = BitsOf(value);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<Bits>((bits >> 16) | 0x0040);
    return static_cast<Bits>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }
  QUERN_HOST_DEVICE static float Round(float value) { return ToFloat(FromFloat(value)); }
  QUERN_HOST_DEVICE static bool IsFinite(Bits bits) { return (bits & 0x7F80) != 0x7F80; }
  QUERN_HOST_DEVICE static bool IsNan(Bits bits) { return (bits & 0x7FFF) > 0x7F80; }
};

struct F16 {
  using Bits = uint16_t;
  static constexpr float kEpsilon = 0x1p-10f;
  static constexpr float kLargest = 65504.0f;

  QUERN_HOST_DEVICE static float ToFloat(Bits bits) {
    const uint32_t sign = uint32_t{static_cast<uint16_t>(bits & 0x8000)} << 16;
    const uint32_t exponent = (bits >> 10) & 31;
    uint32_t mantissa = bits & 0x3FF;
    if (exponent == 31) return FloatOf(sign | 0x7F800000 | (mantissa << 13));
    if (exponent != 0) return FloatOf(sign | ((exponent + 112) << 23) | (mantissa << 13));
    if (mantissa == 0) return FloatOf(sign);
    uint32_t shift = 0;
    while ((mantissa & 0x400) == 0) {
      mantissa <<= 1;
      ++shift;
    }
    return FloatOf(sign | ((113 - shift) << 23) | ((mantissa & 0x3FF) << 13));
  }
  QUERN_HOST_DEVICE static Bits FromFloat(float value) {
    const uint32_t bits = BitsOf(value);
    const uint32_t sign = (bits >> 16) & 0x8000;
    const uint32_t magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return static_cast<Bits>(sign | 0x7E00 | ((magnitude >> 13) & 0x3FF));
    if (magnitude >= 0x477FF000) return static_cast<Bits>(sign | 0x7C00);  // 65520 and above
    if (magnitude >= 0x38800000) {                                         // 2^-14 and above: normal
      return static_cast<Bits>(sign | ((magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13));
    }
    if (magnitude <= 0x33000000) return static_cast<Bits>(sign);  // at most 2^-25: ties to zero
    const uint32_t significand = (magnitude & 0x7FFFFF) | 0x800000;
    const uint32_t shift = 126 - (magnitude >> 23);  // 14 .. 24: what is left counts in units of 2^-24
    const uint32_t half = uint32_t{1} << (shift - 1);
    return static_cast<Bits>(sign | ((significand + half - 1 + ((significand >> shift) & 1)) >> shift));
  }
  QUERN_HOST_DEVICE static float Round(float value) { return ToFloat(FromFloat(value)); }
  QUERN_HOST_DEVICE static bool IsFinite(Bits bits) { return (bits & 0x7C00) != 0x7C00; }
  QUERN_HOST_DEVICE static bool IsNan(Bits bits) { return (bits & 0x7FFF) > 0x7C00; }
};

struct F32 {
  using Bits = uint32_t;
  static constexpr float kEpsilon = 0x1p-23f;
  static constexpr float kLargest = 0x1.fffffep127f;

  QUERN_HOST_DEVICE static float ToFloat(Bits bits) { return FloatOf(bits); }
  QUERN_HOST_DEVICE static Bits FromFloat(float value) { return BitsOf(value); }
  QUERN_HOST_DEVICE static float Round(float value) { return value; }
  QUERN_HOST_DEVICE static bool IsFinite(Bits bits) { return (bits & 0x7F800000) != 0x7F800000; }
  QUERN_HOST_DEVICE static bool IsNan(Bits bits) { return (bits & 0x7FFFFFFF) > 0x7F800000; }
};

// The value that stands for a NaN or an Inf where the policy replaces them: 0, or half the largest finite value of that sign. Codes reach
// beyond the largest magnitude of their group (by a third at 2 bits, by 8/7.5 at 4): the whole value would decode to Inf again.
template <class D>
QUERN_HOST_DEVICE inline typename D::Bits ReplaceNonfinite(typename D::Bits bits) {
  if (D::IsFinite(bits)) return bits;
  if (D::IsNan(bits)) return 0;
  return D::FromFloat((D::ToFloat(bits) < 0 ? -D::kLargest : D::kLargest) / 2);
}

}  // namespace quern::quant::scalar

#endif  // QUERN_QUANT_SCALAR_FLOAT_FORMATS_H_
