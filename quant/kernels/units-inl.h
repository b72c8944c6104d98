// Building blocks of the kernels, one copy a SIMD target: a unit of 32 elements in registers, rounding to a dtype, and the error sums of a
// row.
//
// A unit is held as pairs of F32 vectors, elements 0 2 4 .. and 1 3 5 .. : 16-bit elements come apart with a shift and a mask, two 4-bit
// codes join to a byte without a shuffle, and the lanes of row_error.h fall into whole vectors of F64.
#if defined(QUERN_QUANT_KERNELS_UNITS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_QUANT_KERNELS_UNITS_INL_H_
#undef QUERN_QUANT_KERNELS_UNITS_INL_H_
#else
#define QUERN_QUANT_KERNELS_UNITS_INL_H_
#endif

#include <type_traits>

#include "hwy/highway.h"
#include "quant/row_error.h"
#include "quant/scalar/float_formats.h"

HWY_BEFORE_NAMESPACE();
namespace quern::quant {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET != HWY_SCALAR

using DF = hn::CappedTag<float, 16>;
using DI = hn::RebindToSigned<DF>;
using DU = hn::RebindToUnsigned<DF>;
using DFHalf = hn::Half<DF>;
using DD = hn::Repartition<double, DF>;
using VF = hn::Vec<DF>;
using VU = hn::Vec<DU>;
using VD = hn::Vec<DD>;

constexpr int kUnit = 32;  // elements
constexpr int kFloats = static_cast<int>(hn::MaxLanes(DF()));
constexpr int kDoubles = kFloats / 2;
constexpr int kPairs = kUnit / 2 / kFloats;  // pairs of vectors in a unit

// Of each dtype: Load gives pair `pair` of the unit at `unit`, all of whose elements are finite; Round rounds values to the dtype; Store is
// the inverse of Load; FromTop turns the bits of elements, moved to the top of 32 bits, into values.
template <class D>
struct Elements;

template <>
struct Elements<scalar::Bf16> {
  using Lane = int16_t;
  static HWY_INLINE void Load(const unsigned char* unit, int pair, VF& even, VF& odd) {
    const VU both = hn::LoadU(DU(), reinterpret_cast<const uint32_t*>(unit) + pair * kFloats);
    even = hn::BitCast(DF(), hn::ShiftLeft<16>(both));
    odd = hn::BitCast(DF(), hn::And(both, hn::Set(DU(), 0xFFFF0000u)));
  }
  static HWY_INLINE VF FromTop(VU top) { return hn::BitCast(DF(), top); }
  static HWY_INLINE VF Round(VF value) {
    const VU bits = hn::BitCast(DU(), value);
    const VU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(DU(), 1u));
    const VU rounded = hn::Add(hn::Add(bits, hn::Set(DU(), 0x7FFFu)), odd);
    return hn::BitCast(DF(), hn::And(rounded, hn::Set(DU(), 0xFFFF0000u)));
  }
  static HWY_INLINE void Store(VF even, VF odd, unsigned char* unit, int pair) {
    const VU both = hn::Or(hn::ShiftRight<16>(hn::BitCast(DU(), even)), hn::BitCast(DU(), odd));
    hn::StoreU(both, DU(), reinterpret_cast<uint32_t*>(unit) + pair * kFloats);
  }
};

template <>
struct Elements<scalar::F16> {
  using Lane = int16_t;
  static HWY_INLINE void Load(const unsigned char* unit, int pair, VF& even, VF& odd) {
    const VU both = hn::LoadU(DU(), reinterpret_cast<const uint32_t*>(unit) + pair * kFloats);
    even = FromTop(hn::ShiftLeft<16>(both));
    odd = FromTop(hn::And(both, hn::Set(DU(), 0xFFFF0000u)));
  }
  // Sign, exponent and mantissa move to their places in F32 (the shift copies the sign into bits that the mask clears), and the product
  // corrects the bias, also of subnormals.
  static HWY_INLINE VF FromTop(VU top) {
    const VU moved = hn::BitCast(DU(), hn::ShiftRight<3>(hn::BitCast(DI(), top)));
    return hn::Mul(hn::BitCast(DF(), hn::And(moved, hn::Set(DU(), 0x8FFFE000u))), hn::Set(DF(), 0x1p112f));
  }
  static HWY_INLINE VF Round(VF value) {
    const VU bits = hn::BitCast(DU(), value);
    const VU odd = hn::And(hn::ShiftRight<13>(bits), hn::Set(DU(), 1u));
    const VU rounded = hn::And(hn::Add(hn::Add(bits, hn::Set(DU(), 0xFFFu)), odd), hn::Set(DU(), 0xFFFFE000u));
    const VF magnitude = hn::Abs(value);
    // Below 2^-14 the step is 2^-24, that of F32 between 0.5 and 1.
    const VF half = hn::Set(DF(), 0.5f);
    const VF small = hn::CopySign(hn::Sub(hn::Add(magnitude, half), half), value);
    const VF large = hn::CopySign(hn::BitCast(DF(), hn::Set(DU(), 0x7F800000u)), value);
    VF result = hn::BitCast(DF(), rounded);
    result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(DF(), 0x1p-14f)), small, result);
    return hn::IfThenElse(hn::Ge(magnitude, hn::Set(DF(), 65520.0f)), large, result);
  }
  static HWY_INLINE void Store(VF even, VF odd, unsigned char* unit, int pair) {
    const VU both = hn::Or(hn::ShiftRight<16>(ToTop(even)), ToTop(odd));
    hn::StoreU(both, DU(), reinterpret_cast<uint32_t*>(unit) + pair * kFloats);
  }

 private:
  // The inverse of FromTop for values of F16; Inf and NaN keep their top mantissa bits.
  static HWY_INLINE VU ToTop(VF value) {
    const VU bits = hn::BitCast(DU(), hn::Mul(value, hn::Set(DF(), 0x1p-112f)));
    const VU sign = hn::And(hn::BitCast(DU(), value), hn::Set(DU(), 0x80000000u));
    return hn::Or(hn::And(hn::ShiftLeft<3>(bits), hn::Set(DU(), 0x7FFF0000u)), sign);
  }
};

template <>
struct Elements<scalar::F32> {
  using Lane = int32_t;
  static HWY_INLINE void Load(const unsigned char* unit, int pair, VF& even, VF& odd) {
    const float* at = reinterpret_cast<const float*>(unit) + pair * 2 * kFloats;
    const VF low = hn::LoadU(DF(), at);
    const VF high = hn::LoadU(DF(), at + kFloats);
    even = hn::ConcatEven(DF(), high, low);
    odd = hn::ConcatOdd(DF(), high, low);
  }
  static HWY_INLINE VF FromTop(VU top) { return hn::BitCast(DF(), top); }
  static HWY_INLINE VF Round(VF value) { return value; }
  static HWY_INLINE void Store(VF even, VF odd, unsigned char* unit, int pair) {
    hn::StoreInterleaved2(even, odd, DF(), reinterpret_cast<float*>(unit) + pair * 2 * kFloats);
  }
};

// Whether all elements of a unit are finite: the exponent of none is all ones.
template <class D>
HWY_INLINE bool UnitIsFinite(const unsigned char* unit) {
  using Lane = std::make_unsigned_t<typename Elements<D>::Lane>;
  const hn::CappedTag<Lane, 64 / sizeof(Lane)> d;
  const auto mask = hn::Set(d, static_cast<Lane>(D::FromFloat(scalar::FloatOf(0x7F800000))));
  auto largest = hn::Zero(d);
  for (int64_t i = 0; i < kUnit; i += static_cast<int64_t>(hn::Lanes(d))) {
    largest = hn::Max(largest, hn::And(hn::LoadU(d, reinterpret_cast<const Lane*>(unit) + i), mask));
  }
  return hn::AllFalse(d, hn::Eq(largest, mask));
}

// The error figures of one row while it is worked on. Lanes 0 2 4 .. of row_error.h are in the first half of the vectors, 1 3 5 .. in the
// second.
class RowSums {
 public:
  HWY_INLINE void Load(const RowError& error) {
    LoadLanes(error.error, error_);
    LoadLanes(error.signal, signal_);
    max_abs_ = hn::Set(DD(), error.max_abs);
  }
  HWY_INLINE void Store(RowError& error) const {
    StoreLanes(error_, error.error);
    StoreLanes(signal_, error.signal);
    error.max_abs = hn::GetLane(hn::MaxOfLanes(DD(), max_abs_));
  }
  // Adds pair `pair` of a unit: sources and decoded values.
  HWY_INLINE void Add(int pair, VF x_even, VF y_even, VF x_odd, VF y_odd) {
    AddHalf(hn::LowerHalf(DFHalf(), x_even), hn::LowerHalf(DFHalf(), y_even), Index(pair, 0));
    AddHalf(hn::LowerHalf(DFHalf(), x_odd), hn::LowerHalf(DFHalf(), y_odd), kVectors + Index(pair, 0));
    AddHalf(hn::UpperHalf(DFHalf(), x_even), hn::UpperHalf(DFHalf(), y_even), Index(pair, 1));
    AddHalf(hn::UpperHalf(DFHalf(), x_odd), hn::UpperHalf(DFHalf(), y_odd), kVectors + Index(pair, 1));
  }

 private:
  static constexpr int kVectors = RowError::kLanes / 2 / kDoubles;  // of the even lanes, and as many of the odd ones

  static constexpr int Index(int pair, int half) { return (pair * 2 + half) % kVectors; }

  HWY_INLINE void AddHalf(hn::Vec<DFHalf> x, hn::Vec<DFHalf> y, int index) {
    const VD source = hn::PromoteTo(DD(), x);
    const VD difference = hn::Sub(source, hn::PromoteTo(DD(), y));
    error_[index] = hn::Add(error_[index], hn::Mul(difference, difference));
    // The square of an F32 value is exact in F64: whether this fuses makes no difference.
    signal_[index] = hn::MulAdd(source, source, signal_[index]);
    max_abs_ = hn::Max(max_abs_, hn::Abs(difference));
  }
  static HWY_INLINE void LoadLanes(const double* lanes, VD* vectors) {
    alignas(64) double half[2][RowError::kLanes / 2];
    for (int i = 0; i < RowError::kLanes; ++i) half[i % 2][i / 2] = lanes[i];
    for (int i = 0; i < kVectors; ++i) {
      vectors[i] = hn::Load(DD(), half[0] + i * kDoubles);
      vectors[kVectors + i] = hn::Load(DD(), half[1] + i * kDoubles);
    }
  }
  static HWY_INLINE void StoreLanes(const VD* vectors, double* lanes) {
    alignas(64) double half[2][RowError::kLanes / 2];
    for (int i = 0; i < kVectors; ++i) {
      hn::Store(vectors[i], DD(), half[0] + i * kDoubles);
      hn::Store(vectors[kVectors + i], DD(), half[1] + i * kDoubles);
    }
    for (int i = 0; i < RowError::kLanes; ++i) lanes[i] = half[i % 2][i / 2];
  }

  VD error_[2 * kVectors];
  VD signal_[2 * kVectors];
  VD max_abs_;
};

#endif  // HWY_TARGET != HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace quern::quant
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
