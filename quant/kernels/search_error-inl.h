// The error of candidates in vectors, one copy a SIMD target: what scalar/search_error.h defines.
#if defined(QUERN_QUANT_KERNELS_SEARCH_ERROR_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_QUANT_KERNELS_SEARCH_ERROR_INL_H_
#undef QUERN_QUANT_KERNELS_SEARCH_ERROR_INL_H_
#else
#define QUERN_QUANT_KERNELS_SEARCH_ERROR_INL_H_
#endif

#include "hwy/highway.h"
#include "quant/kernels/units-inl.h"
#include "quant/scalar/search_error.h"

HWY_BEFORE_NAMESPACE();
namespace quern::quant {
namespace HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR

HWY_INLINE VF PowerOf24(VF u) {
  const DF df;
  const VF v = hn::Mul(u, u);
  const VF bits = hn::ConvertTo(df, hn::BitCast(DI(), v));
  const VF estimate = hn::Add(hn::Mul(bits, hn::Set(df, scalar::Power24::kSlope)), hn::Set(df, scalar::Power24::kOrigin));
  const VF w = hn::BitCast(df, hn::ConvertTo(DI(), estimate));
  const VF w2 = hn::Mul(w, w);
  const VF a = hn::Mul(v, w2);
  const VF h = hn::Sub(hn::Set(df, 1.0f), hn::Mul(a, hn::Mul(w2, w)));
  VF factor = hn::Set(df, scalar::Power24::kFactor[5]);
  factor = hn::Add(hn::Mul(factor, h), hn::Set(df, scalar::Power24::kFactor[4]));
  factor = hn::Add(hn::Mul(factor, h), hn::Set(df, scalar::Power24::kFactor[3]));
  factor = hn::Add(hn::Mul(factor, h), hn::Set(df, scalar::Power24::kFactor[2]));
  factor = hn::Add(hn::Mul(factor, h), hn::Set(df, scalar::Power24::kFactor[1]));
  factor = hn::Add(hn::Mul(factor, h), hn::Set(df, scalar::Power24::kFactor[0]));
  return hn::Mul(hn::Mul(a, a), factor);
}

template <scalar::SearchNorm kNorm>
HWY_INLINE VF ElementErrors(VF u, VF weight) {
  if constexpr (kNorm == scalar::SearchNorm::kPower24) {
    return PowerOf24(u);
  } else {
    const VF square = hn::Mul(u, u);
    if constexpr (kNorm == scalar::SearchNorm::kSquare) return square;
    return hn::Mul(hn::Mul(square, hn::Abs(u)), weight);
  }
}

// Sums of lanes 0 .. n-1 with lanes n .. 2n-1, down to 4, then the rest.
template <class Tag, class V>
HWY_INLINE float FoldVector(Tag d, V v) {
  if constexpr (hn::MaxLanes(d) == 4) {
    alignas(16) float lanes[4];
    hn::Store(v, d, lanes);
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
  } else {
    const hn::Half<Tag> half;
    return FoldVector(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

// The lanes of a block: pair p of a unit is lanes p * kFloats and on.
class ErrorLanes {
 public:
  HWY_INLINE ErrorLanes() {
    for (int pair = 0; pair < kPairs; ++pair) sums_[pair] = hn::Zero(DF());
  }
  HWY_INLINE void Add(int pair, VF even, VF odd) { sums_[pair] = hn::Add(sums_[pair], hn::Add(even, odd)); }
  HWY_INLINE float Fold() {
    for (int n = kPairs / 2; n > 0; n /= 2) {
      for (int pair = 0; pair < n; ++pair) sums_[pair] = hn::Add(sums_[pair], sums_[pair + n]);
    }
    return FoldVector(DF(), sums_[0]);
  }

 private:
  VF sums_[kPairs];
};

constexpr int64_t kErrorBlock = 1024;  // elements whose sum is F32

#endif  // HWY_TARGET != HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace quern::quant
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
