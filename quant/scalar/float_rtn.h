// Rounding of weights to floats of 8 and 4 bits with scales: the definition that every kernel matches bit for bit. Built-in types only, so
// that nvcc compiles the same text; the compiler must not fuse multiplications and additions, nor flush subnormals.
//
// D is the dtype of the weight, r(x) rounds to D (numerics: reference) or does nothing (numerics: precise), D(x) always rounds. F(x) rounds
// to the stored float (E4M3 or E2M1), clamped to its largest value. Every operation is one of F32. A is the largest magnitude of a group,
// of a row, of a block or of a set.
//
// FP8, compressed-tensors: s = S(A / 448) where S is the dtype of the scale; 0 becomes its epsilon; code F(r(x / s)); value D(code * s).
//   Only where S is D itself the quotient is rounded.
// FP8, ModelOpt: s = A / 448, 0 becomes 1; code F(r(x / s)) per tensor, F(x / s) per channel; value D(code * D(s)).
// NVFP4, compressed-tensors: G = r(r(1 / A) * 2688) with A >= the smallest normal of D (precise: 2688 / A); not finite: 1;
//   scale = E4M3(G * r(A / 6)), 0 becomes 0.125; code F(x / (scale / G)); value D(BF16(code * (scale / G))).
// NVFP4, ModelOpt: s2 = A / 2688, 0 becomes 1; scale = E4M3(max(A / (6 * s2), 2^-9)), an all-zero block 1; code F(x / (scale * s2));
//   value D(code * (scale * s2)), where code 8 is +0.
// MX: A is rounded to a power of two, up from a significand of 1.75, e its exponent; E8M0 code E = clamp(127 + e - (2 for E2M1, 8 for
//   E4M3), 0, 255), 0 where A is subnormal or 0; code F(r(x / 2^(E - 127))); value D(BF16(code * 2^(E - 127))). Reference numerics on F16:
//   subnormal significands round up from 1.5 * 2^-15, and below that E is 127.
#ifndef QUERN_QUANT_SCALAR_FLOAT_RTN_H_
#define QUERN_QUANT_SCALAR_FLOAT_RTN_H_

#include <cstdint>
#include <cstring>

#include "quant/row_error.h"
#include "quant/scalar/float_formats.h"
#include "quant/scalar/integer_rtn.h"
#include "quant/scalar/small_floats.h"

namespace quern::quant::scalar {

// Where the scales of groups come from.
enum class FloatScaling {
  kGiven,          // FP8: F32 values, made by the caller
  kNvfp4,          // E4M3 bytes beside a global scale that divides
  kModelOptNvfp4,  // E4M3 bytes beside a global scale that multiplies
  kMx              // E8M0 bytes
};

struct FloatFormat {
  int bits = 8;  // 8: E4M3, 4: E2M1
  FloatScaling scaling = FloatScaling::kGiven;
  bool precise = false;
  bool round_quotient = false;  // r is applied to x / scale (never with `precise`)
};

// How a group is coded and decoded.
struct FloatScale {
  float divisor = 1;
  float multiplier = 1;
};

// The largest magnitude so far, extended by an element. Non-finite elements count as what ReplaceNonfinite makes of them.
template <class D>
QUERN_HOST_DEVICE inline float ExtendAmax(float amax, typename D::Bits bits) {
  const float value = D::ToFloat(ReplaceNonfinite<D>(bits));
  const float magnitude = value < 0 ? -value : value;
  return magnitude > amax ? magnitude : amax;
}

template <class D>
QUERN_HOST_DEVICE inline float SmallestNormal() {
  return D::kLargest > 65504 ? 0x1p-126f : 0x1p-14f;
}

// FP8 in the convention of compressed-tensors; S is the dtype of the scale.
template <class S>
QUERN_HOST_DEVICE inline float Fp8Scale(float amax) {
  const float scale = S::Round(amax / E4m3::kLargest);
  return scale == 0 ? S::kEpsilon : scale;
}

QUERN_HOST_DEVICE inline float ModelOptFp8Scale(float amax) {
  const float scale = amax / E4m3::kLargest;
  return scale == 0 ? 1 : scale;
}

// The scale of a set: what kNvfp4 and kModelOptNvfp4 need besides the bytes. The first also serves activations.
template <class D>
QUERN_HOST_DEVICE inline float Nvfp4GlobalScale(float amax, bool precise) {
  constexpr float kRange = E4m3::kLargest * E2m1::kLargest;
  float scale;
  if (precise) {
    scale = kRange / amax;
  } else {
    const float largest = amax < SmallestNormal<D>() ? SmallestNormal<D>() : amax;
    scale = D::Round(D::Round(1 / largest) * kRange);
  }
  return scale <= F32::kLargest ? scale : 1;
}

QUERN_HOST_DEVICE inline float ModelOptNvfp4Scale2(float amax) {
  const float scale = amax / (E4m3::kLargest * E2m1::kLargest);
  return scale == 0 ? 1 : scale;
}

// The stored scale of a group with the largest magnitude `amax`.
template <class D>
QUERN_HOST_DEVICE inline uint8_t ScaleByte(const FloatFormat& format, float set_scale, float amax) {
  switch (format.scaling) {
    case FloatScaling::kGiven:
      break;
    case FloatScaling::kNvfp4: {
      const uint8_t code = E4m3::FromFloat(set_scale * RoundIntermediate<D>(amax / E2m1::kLargest, format.precise));
      return code == 0 ? 0x20 : code;  // 0.125
    }
    case FloatScaling::kModelOptNvfp4: {
      const float scale = amax / (E2m1::kLargest * set_scale);
      return scale == 0 ? 0x38 : E4m3::FromFloat(scale < 0x1p-9f ? 0x1p-9f : scale);  // 0x38 is 1
    }
    case FloatScaling::kMx: {
      if (!format.precise && D::kLargest == F16::kLargest && amax < 0x1p-14f) {
        if (amax < 0x1.8p-15f) return 127;
        amax = 0x1p-14f;
      }
      const int offset = format.bits == 4 ? 2 : 8;
      const int code = static_cast<int>((BitsOf(amax) + (1u << 21)) >> 23) - offset;
      return static_cast<uint8_t>(code < 0 ? 0 : code);
    }
  }
  return 0;
}

QUERN_HOST_DEVICE inline FloatScale ScaleOf(const FloatFormat& format, float set_scale, uint8_t byte) {
  if (format.scaling == FloatScaling::kMx) return {E8m0::ToFloat(byte), E8m0::ToFloat(byte)};
  const float scale = E4m3::ToFloat(byte);
  if (format.scaling == FloatScaling::kNvfp4) return {scale / set_scale, scale / set_scale};
  // Where the product underflows everything but 0 is beyond the range.
  const float product = scale * set_scale;
  return {product == 0 ? 0x1p-149f : product, product};
}

template <class D>
QUERN_HOST_DEVICE inline uint8_t QuantizeFloat(const FloatFormat& format, const FloatScale& scale, float x) {
  float t = x / scale.divisor;
  if (format.round_quotient) t = D::Round(t);
  return format.bits == 8 ? E4m3::FromFloat(t) : E2m1::FromFloat(t);
}

// What a code stands for before it is rounded to D.
QUERN_HOST_DEVICE inline float DecodedFloat(const FloatFormat& format, const FloatScale& scale, uint8_t code) {
  float value = format.bits == 8 ? E4m3::ToFloat(code) : E2m1::ToFloat(code);
  if (format.scaling == FloatScaling::kModelOptNvfp4 && code == 8) value = 0;
  value = value * scale.multiplier;
  // Machines disagree about the sign and the payload of the NaN that damaged codes and scales give.
  if (value != value) return FloatOf(0x7FC00000);
  return format.scaling == FloatScaling::kNvfp4 || format.scaling == FloatScaling::kMx ? Bf16::Round(value) : value;
}

template <class D>
QUERN_HOST_DEVICE inline typename D::Bits DequantizeFloat(const FloatFormat& format, const FloatScale& scale, uint8_t code) {
  return D::FromFloat(DecodedFloat(format, scale, code));
}

// Scales, codes and values of a piece of one row, which begins at a multiple of 32 columns (of 16, where FloatScaling is an NVFP4).
struct FloatRow {
  float set_scale = 1;                // of the NVFP4 formats
  const FloatScale* given = nullptr;  // kGiven: one a group
  unsigned char* scales = nullptr;    // else: one byte a group
  unsigned char* codes = nullptr;     // 8 bits: a byte each; 4 bits: two a byte, the even column in the low half

  QUERN_HOST_DEVICE FloatScale Scale(const FloatFormat& format, int64_t group) const {
    return format.scaling == FloatScaling::kGiven ? given[group] : ScaleOf(format, set_scale, scales[group]);
  }
};

// Extends the largest magnitudes of groups of a row; the last group may be cut.
template <class D>
QUERN_HOST_DEVICE inline void ExtendGroups(const unsigned char* elements, int64_t columns, int64_t group, float* amax) {
  for (int64_t i = 0; i < columns; ++i) amax[i / group] = ExtendAmax<D>(amax[i / group], LoadElement<D>(elements, i));
}

// Writes the scale bytes of groups.
template <class D>
QUERN_HOST_DEVICE inline void WriteScales(const FloatFormat& format, const unsigned char* elements, int64_t columns, int64_t group,
                                          const FloatRow& row) {
  for (int64_t begin = 0, index = 0; begin < columns; begin += group, ++index) {
    float amax = 0;
    for (int64_t i = begin; i < begin + group; ++i) amax = ExtendAmax<D>(amax, LoadElement<D>(elements, i));
    row.scales[index] = ScaleByte<D>(format, row.set_scale, amax);
  }
}

// Writes codes by the scales that are there. The last group may be cut. `replace` is the policy for non-finite elements; without it the
// first one stops the work and is returned, its column counted from the piece's first.
template <class D>
QUERN_HOST_DEVICE inline Problem EncodeFloats(const FloatFormat& format, const unsigned char* elements, int64_t columns, int64_t group,
                                              bool replace, const FloatRow& row, RowError& error) {
  FloatScale scale;
  uint8_t low = 0;
  for (int64_t i = 0; i < columns; ++i) {
    if (i % group == 0) scale = row.Scale(format, i / group);
    const typename D::Bits bits = LoadElement<D>(elements, i);
    if (!D::IsFinite(bits)) {
      if (!replace) return {D::IsNan(bits) ? Problem::kNan : Problem::kInf, 0, i};
      ++error.nonfinite;
    }
    const float x = D::ToFloat(ReplaceNonfinite<D>(bits));
    const uint8_t code = QuantizeFloat<D>(format, scale, x);
    if (format.bits == 8) {
      row.codes[i] = code;
    } else if (i % 2 == 0) {
      low = code;
    } else {
      row.codes[i / 2] = static_cast<unsigned char>(low | code << 4);
    }
    AddError(error, i, x, D::ToFloat(DequantizeFloat<D>(format, scale, code)));
  }
  return {};
}

// The inverse.
template <class D>
QUERN_HOST_DEVICE inline void DecodeFloats(const FloatFormat& format, const FloatRow& row, int64_t columns, int64_t group,
                                           unsigned char* elements) {
  FloatScale scale;
  for (int64_t i = 0; i < columns; ++i) {
    if (i % group == 0) scale = row.Scale(format, i / group);
    const uint8_t code = format.bits == 8 ? row.codes[i] : static_cast<uint8_t>(row.codes[i / 2] >> (i % 2 * 4) & 15);
    const typename D::Bits bits = DequantizeFloat<D>(format, scale, code);
    memcpy(elements + i * static_cast<int64_t>(sizeof bits), &bits, sizeof bits);
  }
}

}  // namespace quern::quant::scalar

#endif  // QUERN_QUANT_SCALAR_FLOAT_RTN_H_
