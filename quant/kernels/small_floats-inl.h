// Building blocks of the float kernels, one copy a SIMD target: codes of E4M3 and E2M1 from values and back, and the scales of a unit.
#if defined(QUERN_QUANT_KERNELS_SMALL_FLOATS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_QUANT_KERNELS_SMALL_FLOATS_INL_H_
#undef QUERN_QUANT_KERNELS_SMALL_FLOATS_INL_H_
#else
#define QUERN_QUANT_KERNELS_SMALL_FLOATS_INL_H_
#endif

#include "hwy/highway.h"
#include "quant/kernels/units-inl.h"
#include "quant/scalar/small_floats.h"

HWY_BEFORE_NAMESPACE();
namespace quern::quant {
namespace HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR

// What scalar::SmallFloat defines.
template <class F>
struct SmallFloats {
  static constexpr int kDropped = 23 - F::kMantissaBits;

  // Codes without sign of `t`, which is no NaN, and the values they stand for, with the sign of `t`.
  static HWY_INLINE VU Magnitudes(VF t, VF& value) {
    const DF df;
    const DU du;
    const VF magnitude = hn::Min(hn::Abs(t), hn::Set(df, F::kLargest));
    // Normal values: ties to even by integer arithmetic.
    const VU bits = hn::BitCast(du, magnitude);
    const VU odd = hn::And(hn::ShiftRight<kDropped>(bits), hn::Set(du, 1u));
    const VU rounded = hn::ShiftRight<kDropped>(hn::Add(hn::Add(bits, hn::Set(du, (1u << (kDropped - 1)) - 1)), odd));
    const VU code = hn::Sub(rounded, hn::Set(du, static_cast<uint32_t>(127 - F::kBias) << F::kMantissaBits));
    // Subnormal ones: a sum whose last bit is worth one step.
    const float step = scalar::FloatOf(static_cast<uint32_t>(127 + 1 - F::kBias - F::kMantissaBits) << 23);
    const VF magic = hn::Set(df, step * 0x1p23f);
    const VF sum = hn::Add(magnitude, magic);
    const auto small = hn::Lt(magnitude, hn::Set(df, step * static_cast<float>(1 << F::kMantissaBits)));
    value = hn::IfThenElse(small, hn::Sub(sum, magic), hn::BitCast(df, hn::ShiftLeft<kDropped>(rounded)));
    value = hn::CopySign(value, t);
    return hn::IfThenElse(hn::RebindMask(du, small), hn::Sub(hn::BitCast(du, sum), hn::BitCast(du, magic)), code);
  }

  // Values of codes without sign; NaN codes give 480.
  static HWY_INLINE VF Values(VU codes) {
    const DF df;
    const DU du;
    // A subnormal code is read as the normal one of the least exponent, whose leading one is then taken off. (Subnormal F32 values on the
    // way would be slow.)
    const auto small = hn::Lt(hn::BitCast(DI(), codes), hn::Set(DI(), 1 << F::kMantissaBits));
    const VU leading = hn::IfThenElseZero(hn::RebindMask(du, small), hn::Set(du, 1u << 23));
    const VU bias = hn::Set(du, static_cast<uint32_t>(127 - F::kBias) << 23);
    const VF value = hn::BitCast(df, hn::Add(hn::Add(hn::ShiftLeft<kDropped>(codes), bias), leading));
    const VF one = hn::Set(df, scalar::FloatOf(static_cast<uint32_t>(127 + 1 - F::kBias) << 23));
    return hn::Sub(value, hn::IfThenElseZero(hn::RebindMask(df, small), one));
  }
};

// Codes and values of t, which is no NaN.
HWY_INLINE VU E4m3Codes(VF t, VF& value) {
  const VU sign = hn::And(hn::ShiftRight<24>(hn::BitCast(DU(), t)), hn::Set(DU(), 0x80u));
  return hn::Or(SmallFloats<scalar::E4m3>::Magnitudes(t, value), sign);
}
HWY_INLINE VU E2m1Codes(VF t, VF& value) {
  const auto negative = hn::RebindMask(DU(), hn::Lt(t, hn::Zero(DF())));
  return hn::Or(SmallFloats<scalar::E2m1>::Magnitudes(t, value), hn::IfThenElseZero(negative, hn::Set(DU(), 8u)));
}

HWY_INLINE VF E4m3Values(VU codes) {
  const VF magnitude = SmallFloats<scalar::E4m3>::Values(hn::And(codes, hn::Set(DU(), 0x7Fu)));
  const VU sign = hn::ShiftLeft<24>(hn::And(codes, hn::Set(DU(), 0x80u)));
  return hn::BitCast(DF(), hn::Or(hn::BitCast(DU(), magnitude), sign));
}
HWY_INLINE VF E2m1Values(VU codes) {
  const VF magnitude = SmallFloats<scalar::E2m1>::Values(hn::And(codes, hn::Set(DU(), 7u)));
  const VU sign = hn::ShiftLeft<28>(hn::And(codes, hn::Set(DU(), 8u)));
  return hn::BitCast(DF(), hn::Or(hn::BitCast(DU(), magnitude), sign));
}
HWY_INLINE VF E8m0Values(VU codes) {
  const VF power = hn::BitCast(DF(), hn::ShiftLeft<23>(codes));
  return hn::IfThenElse(hn::Eq(power, hn::Zero(DF())), hn::Set(DF(), 0x1p-127f), power);
}

// Of one pair of a unit that has one value (kGroups 1), or one for each half (kGroups 2, groups of 16).
template <int kGroups>
HWY_INLINE VF OfPair(const float* values, int pair) {
  if constexpr (kGroups == 1) {
    return hn::Set(DF(), values[0]);
  } else if constexpr (kPairs == 1) {
    return hn::Combine(DF(), hn::Set(DFHalf(), values[1]), hn::Set(DFHalf(), values[0]));
  } else {
    return hn::Set(DF(), values[pair / (kPairs / 2)]);
  }
}

// Of the groups from `first` on: what codes are divided by, and what they are multiplied by.
constexpr int kScaleGroups = 64;
struct GroupScales {
  // One more than a chunk has, for the last unit of an odd number of groups of 16.
  alignas(64) float divisor[kScaleGroups + kFloats];
  alignas(64) float multiplier[kScaleGroups + kFloats];

  // scalar::ScaleOf for `groups` bytes.
  HWY_INLINE void FromBytes(const scalar::FloatFormat& format, float set_scale, const unsigned char* bytes, int groups) {
    const hn::Rebind<uint8_t, DU> d8;
    alignas(64) unsigned char padded[kScaleGroups + kFloats];
    memset(padded, 0x38, sizeof padded);  // no scale that zeros, which fill up the last unit, could not be divided by
    memcpy(padded, bytes, static_cast<size_t>(groups));
    for (int i = 0; i < groups + 1; i += kFloats) {
      const VU codes = hn::PromoteTo(DU(), hn::LoadU(d8, padded + i));
      VF multipliers, divisors;
      if (format.scaling == scalar::FloatScaling::kMx) {
        multipliers = divisors = E8m0Values(codes);
      } else {
        // A damaged scale is NaN, as a value and as what is made of it.
        const auto is_nan = hn::RebindMask(DF(), hn::Eq(hn::And(codes, hn::Set(DU(), 0x7Fu)), hn::Set(DU(), 0x7Fu)));
        const VF nan = hn::BitCast(DF(), hn::Set(DU(), 0x7FC00000u));
        const VF values = hn::IfThenElse(is_nan, nan, E4m3Values(codes));
        if (format.scaling == scalar::FloatScaling::kNvfp4) {
          multipliers = divisors = hn::Div(values, hn::Set(DF(), set_scale));
        } else {
          multipliers = hn::Mul(values, hn::Set(DF(), set_scale));
          divisors = hn::IfThenElse(hn::Eq(multipliers, hn::Zero(DF())), hn::Set(DF(), 0x1p-149f), multipliers);
        }
      }
      hn::Store(divisors, DF(), divisor + i);
      hn::Store(multipliers, DF(), multiplier + i);
    }
  }
};

#endif  // HWY_TARGET != HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace quern::quant
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
