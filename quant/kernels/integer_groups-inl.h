// Groups of integers in vectors, one copy a SIMD target: their ranges, their parameters, and the codes of their elements. Shared by
// encoding and by the search for ranges.
#if defined(QUERN_QUANT_KERNELS_INTEGER_GROUPS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUERN_QUANT_KERNELS_INTEGER_GROUPS_INL_H_
#undef QUERN_QUANT_KERNELS_INTEGER_GROUPS_INL_H_
#else
#define QUERN_QUANT_KERNELS_INTEGER_GROUPS_INL_H_
#endif

#include "hwy/highway.h"
#include "quant/kernels/units-inl.h"
#include "quant/scalar/integer_rtn.h"

HWY_BEFORE_NAMESPACE();
namespace quern::quant {
namespace HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR

constexpr int kChunkGroups = 64;

// Ranges of pieces of rows. Elements order as integers: the positive ones as signed, the negative ones, by magnitude, as unsigned; Inf and
// NaN are beyond all finite values. So the largest signed and the largest unsigned integer are the largest element and the smallest one (or
// no negative one at all). A piece is brought to 16 bytes of candidates each first; the candidates of many pieces are then compared at
// once.
struct Candidates {
  alignas(64) uint32_t high[4 * kChunkGroups];
  alignas(64) uint32_t low[4 * kChunkGroups];
};

// The larger half, down to 16 bytes.
template <class V, class Tag>
HWY_INLINE auto ReduceToBlock(Tag d, V v) {
  if constexpr (hn::MaxLanes(d) * sizeof(hn::TFromD<Tag>) == 16) {
    return v;
  } else {
    const hn::Half<Tag> half;
    return ReduceToBlock(half, hn::Max(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

template <class D>
HWY_INLINE void FindCandidates(const unsigned char* elements, int64_t columns, uint32_t* high, uint32_t* low) {
  using Lane = typename Elements<D>::Lane;
  using Bits = typename D::Bits;
  const hn::CappedTag<Lane, 64 / sizeof(Lane)> di;
  const hn::RebindToUnsigned<decltype(di)> du;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(di));
  auto largest = hn::Zero(di);
  auto smallest = hn::Zero(du);
  const Lane* at = reinterpret_cast<const Lane*>(elements);
  int64_t i = 0;
  const auto extend = [&](auto lane) HWY_ATTR {
    largest = hn::Max(largest, lane);
    smallest = hn::Max(smallest, hn::BitCast(du, lane));
  };
  for (; i + lanes <= columns; i += lanes) extend(hn::LoadU(di, at + i));
  if (i < columns) {
    alignas(64) Bits rest[64 / sizeof(Bits)] = {};
    memcpy(rest, at + i, static_cast<size_t>(columns - i) * sizeof(Bits));
    extend(hn::Load(di, reinterpret_cast<const Lane*>(rest)));
  }
  const hn::CappedTag<uint32_t, 4> block;
  hn::Store(hn::BitCast(block, ReduceToBlock(di, largest)), block, high);
  hn::Store(hn::BitCast(block, ReduceToBlock(du, smallest)), block, low);
}

// The largest (signed or unsigned) candidates of as many pieces as a vector has lanes, moved to the top of 32 bits.
template <class D, class Tag>
HWY_INLINE VU LargestCandidates(Tag, const uint32_t* candidates) {
  using Lane = hn::TFromD<Tag>;
  const hn::Repartition<Lane, DU> d;
  VU v0, v1, v2, v3;
  hn::LoadInterleaved4(DU(), candidates, v0, v1, v2, v3);
  const auto largest = hn::Max(hn::Max(hn::BitCast(d, v0), hn::BitCast(d, v1)), hn::Max(hn::BitCast(d, v2), hn::BitCast(d, v3)));
  if constexpr (sizeof(Lane) == 4) {
    return hn::BitCast(DU(), largest);
  } else {
    const VU low_half = hn::ShiftLeft<16>(hn::BitCast(DU(), largest));
    return hn::And(hn::BitCast(DU(), hn::Max(largest, hn::BitCast(d, low_half))), hn::Set(DU(), 0xFFFF0000u));
  }
}

// Largest and smallest element (and zero) of the pieces from `index`, a multiple of the vector's lanes. Non-finite ones give values beyond
// the finite ones of D, or NaN.
template <class D>
HWY_INLINE void RangesOf(const Candidates& candidates, int index, VF& high, VF& low) {
  using Lane = typename Elements<D>::Lane;
  const VU largest = LargestCandidates<D>(hn::CappedTag<Lane, 64 / sizeof(Lane)>(), candidates.high + 4 * index);
  const VU smallest = LargestCandidates<D>(hn::CappedTag<std::make_unsigned_t<Lane>, 64 / sizeof(Lane)>(), candidates.low + 4 * index);
  high = Elements<D>::FromTop(largest);
  low = Elements<D>::FromTop(hn::And(smallest, hn::BitCast(DU(), hn::BroadcastSignBit(hn::BitCast(DI(), smallest)))));
}

// Arithmetic of one kind of integers.
template <class D, bool kSymmetric, bool kPrecise>
struct IntegerCoder {
  // For BF16 values x and s, x * (1/s) rounds to the same BF16 value as x / s, as long as nothing is near the ends of the exponents.
  static constexpr bool kReciprocal = std::is_same_v<D, scalar::Bf16> && !kPrecise;

  static HWY_INLINE VF Round(VF value) { return kPrecise ? value : Elements<D>::Round(value); }

  // Parameters of a vector of groups. `usual` is false where the scalar definition has to compute them.
  struct Parameters {
    VF scale, reciprocal, zero_point;
    hn::Mask<DF> usual;
  };
  static HWY_INLINE Parameters ParametersOf(const scalar::IntegerFormat& format, VF low, VF high) {
    const DF df;
    const VF zero = hn::Zero(df);
    const float steps = static_cast<float>((1 << format.bits) - 1);
    Parameters result;
    result.zero_point = zero;
    result.reciprocal = zero;
    result.usual = hn::Eq(zero, zero);
    if constexpr (kSymmetric) {
      result.scale = Elements<D>::Round(hn::Div(hn::Max(hn::Neg(low), high), hn::Set(df, steps / 2)));
    } else {
      const VF minimum = hn::Set(df, format.Min());
      const VF magic = hn::Set(df, 0x1.8p23f);
      const VF width = Round(hn::Sub(high, low));
      result.usual = hn::Le(width, hn::Set(df, kPrecise ? scalar::F32::kLargest : D::kLargest));
      result.scale = Elements<D>::Round(hn::Div(width, hn::Set(df, steps)));
      VF zero_point = Round(hn::Sub(minimum, Round(hn::Div(low, result.scale))));
      zero_point = hn::IfThenElseZero(hn::Eq(zero_point, zero_point), zero_point);  // NaN, of 0/0, becomes 0
      zero_point = hn::Min(hn::Max(zero_point, minimum), hn::Set(df, format.Max()));
      result.zero_point = hn::Sub(hn::Add(zero_point, magic), magic);
    }
    result.scale = hn::IfThenElse(hn::Eq(result.scale, zero), hn::Set(df, D::kEpsilon), result.scale);
    if constexpr (kReciprocal) {
      const auto moderate = hn::And(hn::Ge(result.scale, hn::Set(df, 0x1p-100f)), hn::Le(result.scale, hn::Set(df, 0x1p100f)));
      result.usual = hn::And(result.usual, moderate);
      result.reciprocal = hn::Div(hn::Set(df, 1.0f), result.scale);
    }
    return result;
  }

  // What is the same for all units of a row, or of a group: in registers, since the bytes written could alias any member.
  struct RowConstants {
    int bits;  // of a code as it is stored
    VF minimum, maximum;
    VF magic;  // adding it rounds to an integer, ties to even, and leaves it in the low bits; the code's offset, an even number, comes
               // along
  };
  struct GroupConstants {
    VF scale, reciprocal, zero_point;
    VF origin;  // magic + zero point
  };

  static HWY_INLINE RowConstants ConstantsOfRow(const scalar::IntegerFormat& format) {
    const DF df;
    return {format.StoredBits(), hn::Set(df, format.Min()), hn::Set(df, format.Max()),
            hn::Set(df, 0x1.8p23f + static_cast<float>(format.StoredOffset()))};
  }
  static HWY_INLINE GroupConstants ConstantsOfGroup(RowConstants row, float scale, float reciprocal, float zero_point) {
    const DF df;
    GroupConstants group;
    group.scale = hn::Set(df, scale);
    group.reciprocal = kReciprocal ? hn::Set(df, reciprocal) : hn::Zero(df);
    group.zero_point = kSymmetric ? hn::Zero(df) : hn::Set(df, zero_point);
    group.origin = hn::Add(row.magic, group.zero_point);
    return group;
  }

  // The unsigned codes of x, and the values y that they stand for.
  static HWY_INLINE VU Code(RowConstants row, GroupConstants group, VF x, VF& y) {
    VF t = Round(kReciprocal ? hn::Mul(x, group.reciprocal) : hn::Div(x, group.scale));
    if constexpr (!kSymmetric) t = Round(hn::Add(t, group.zero_point));
    t = hn::Min(hn::Max(t, row.minimum), row.maximum);
    const VF shifted = hn::Add(t, row.magic);
    y = Elements<D>::Round(hn::Mul(hn::Sub(shifted, group.origin), group.scale));
    return hn::And(hn::BitCast(DU(), shifted), hn::Set(DU(), 0xFFu));
  }
};

#endif  // HWY_TARGET != HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace quern::quant
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
