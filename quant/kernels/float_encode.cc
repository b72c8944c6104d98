// Encoding of float tiles: what scalar::WriteScales and scalar::EncodeFloats define, in vectors.
//
// A row is worked off twice: the scales of its groups first (where they are not given), from the largest magnitudes of many groups at once;
// then codes and errors, a unit of 32 elements at a time. Groups or units with a non-finite element go to the scalar definition.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quant/kernels/float_encode.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "quant/kernels/float_tile.h"
#include "quant/kernels/small_floats-inl.h"
#include "quant/kernels/units-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern::quant {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

scalar::Problem EncodeFloatTile(const FloatTile& tile, const FloatOptions& options) { return EncodeFloatsScalar(tile, options); }
void ObserveFloatTile(const FloatTile& tile, float* amax, int64_t stride) { ObserveAmaxScalar(tile, amax, stride); }

#else

// Magnitudes order as integers, and Inf and NaN are beyond all finite ones. A group is brought to 16 bytes of candidates first; the
// candidates of many groups are then compared at once.
struct Magnitudes {
  alignas(64) uint32_t candidates[4 * (kScaleGroups + kFloats)];
};

// The larger half, down to 16 bytes.
template <class V, class Tag>
HWY_INLINE auto LargestBlock(Tag d, V v) {
  if constexpr (hn::MaxLanes(d) * sizeof(hn::TFromD<Tag>) == 16) {
    return v;
  } else {
    const hn::Half<Tag> half;
    return LargestBlock(half, hn::Max(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

// With kBytes > 0 the number of bytes is known: that of a group of 16 or 32.
template <class D, int64_t kBytes>
HWY_INLINE void FindMagnitudes(const unsigned char* elements, int64_t columns, uint32_t* candidates) {
  using Bits = typename D::Bits;
  constexpr int64_t kVector = kBytes > 0 && kBytes < 64 ? kBytes : 64;
  const hn::CappedTag<Bits, kVector / sizeof(Bits)> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto mask = hn::Set(d, static_cast<Bits>(~(Bits{1} << (8 * sizeof(Bits) - 1))));
  auto largest = hn::Zero(d);
  const Bits* at = reinterpret_cast<const Bits*>(elements);
  if (kBytes > 0) columns = kBytes / static_cast<int64_t>(sizeof(Bits));
  int64_t i = 0;
  for (; i + lanes <= columns; i += lanes) largest = hn::Max(largest, hn::And(hn::LoadU(d, at + i), mask));
  if (i < columns) {
    alignas(64) Bits rest[64 / sizeof(Bits)] = {};
    memcpy(rest, at + i, static_cast<size_t>(columns - i) * sizeof(Bits));
    largest = hn::Max(largest, hn::And(hn::Load(d, rest), mask));
  }
  const hn::CappedTag<uint32_t, 4> block;
  hn::Store(hn::BitCast(block, LargestBlock(d, largest)), block, candidates);
}

// The largest magnitudes of the groups from `index`, a multiple of the vector's lanes. Non-finite ones give what is beyond the finite
// values of D, or NaN.
template <class D>
HWY_INLINE VF AmaxOf(const Magnitudes& magnitudes, int index) {
  using Bits = typename D::Bits;
  const hn::Repartition<Bits, DU> d;
  VU v0, v1, v2, v3;
  hn::LoadInterleaved4(DU(), magnitudes.candidates + 4 * index, v0, v1, v2, v3);
  const auto largest = hn::Max(hn::Max(hn::BitCast(d, v0), hn::BitCast(d, v1)), hn::Max(hn::BitCast(d, v2), hn::BitCast(d, v3)));
  VU top = hn::BitCast(DU(), largest);
  if constexpr (sizeof(Bits) == 2) {
    top = hn::BitCast(DU(), hn::Max(largest, hn::BitCast(d, hn::ShiftLeft<16>(top))));
    top = hn::And(top, hn::Set(DU(), 0xFFFF0000u));
  }
  return Elements<D>::FromTop(top);
}

// scalar::ScaleByte.
template <class D>
HWY_INLINE VU ScaleBytes(const scalar::FloatFormat& format, float set_scale, VF amax) {
  const DF df;
  const DU du;
  switch (format.scaling) {
    case scalar::FloatScaling::kGiven:
      break;
    case scalar::FloatScaling::kNvfp4: {
      VF local = hn::Div(amax, hn::Set(df, scalar::E2m1::kLargest));
      if (!format.precise) local = Elements<D>::Round(local);
      VF value;
      const VU code = E4m3Codes(hn::Mul(hn::Set(df, set_scale), local), value);
      return hn::IfThenElse(hn::Eq(code, hn::Zero(du)), hn::Set(du, 0x20u), code);
    }
    case scalar::FloatScaling::kModelOptNvfp4: {
      const VF scale = hn::Div(amax, hn::Set(df, scalar::E2m1::kLargest * set_scale));
      VF value;
      const VU code = E4m3Codes(hn::Max(scale, hn::Set(df, 0x1p-9f)), value);
      return hn::IfThenElse(hn::RebindMask(du, hn::Eq(scale, hn::Zero(df))), hn::Set(du, 0x38u), code);
    }
    case scalar::FloatScaling::kMx: {
      const bool f16 = std::is_same_v<D, scalar::F16> && !format.precise;
      const VF smallest = hn::Set(df, 0x1p-14f);
      const VF magnitude = f16 ? hn::Max(amax, smallest) : amax;
      const VU exponent = hn::ShiftRight<23>(hn::Add(hn::BitCast(du, magnitude), hn::Set(du, 1u << 21)));
      const VU offset = hn::Set(du, format.bits == 4 ? 2u : 8u);
      const VU code = hn::Sub(hn::Max(exponent, offset), offset);
      if (!f16) return code;
      return hn::IfThenElse(hn::RebindMask(du, hn::Lt(amax, hn::Set(df, 0x1.8p-15f))), hn::Set(du, 127u), code);
    }
  }
  return hn::Zero(du);
}

template <class D, int64_t kGroup>
void WriteScales(const scalar::FloatFormat& format, const unsigned char* elements, int64_t columns, const scalar::FloatRow& row) {
  constexpr int64_t kBytes = kGroup * static_cast<int64_t>(sizeof(typename D::Bits));
  const int64_t groups = columns / kGroup;
  Magnitudes magnitudes;
  for (int64_t begin = 0; begin < groups; begin += kScaleGroups) {
    const int count = static_cast<int>(HWY_MIN(int64_t{kScaleGroups}, groups - begin));
    const unsigned char* piece = elements + begin * kBytes;
    for (int i = 0; i < count; ++i) FindMagnitudes<D, kBytes>(piece + i * kBytes, kGroup, magnitudes.candidates + 4 * i);
    memset(magnitudes.candidates + 4 * count, 0, 4 * kFloats * sizeof(uint32_t));
    alignas(64) unsigned char bytes[kScaleGroups + kFloats];
    bool finite = true;
    for (int i = 0; i < count; i += kFloats) {
      const VF amax = AmaxOf<D>(magnitudes, i);
      finite = finite && hn::AllTrue(DF(), hn::Le(amax, hn::Set(DF(), D::kLargest)));
      const hn::Rebind<uint8_t, DU> d8;
      hn::StoreU(hn::TruncateTo(d8, ScaleBytes<D>(format, row.set_scale, amax)), d8, bytes + i);
    }
    if (finite) {
      memcpy(row.scales + begin, bytes, static_cast<size_t>(count));
    } else {
      scalar::FloatRow part = row;
      part.scales += begin;
      scalar::WriteScales<D>(format, piece, count * kGroup, kGroup, part);
    }
  }
}

// How the codes of a format are made: of E4M3 or E2M1, with quotients rounded to D or not, with values rounded to BF16 or not.
template <int kBits, bool kRoundQuotient, bool kThroughBf16>
struct Coding {
  static constexpr int kBitsOf = kBits;

  template <class D>
  static HWY_INLINE VU Code(VF x, VF divisor, VF multiplier, VF& y) {
    VF t = hn::Div(x, divisor);
    if constexpr (kRoundQuotient) t = Elements<D>::Round(t);
    VF value;
    const VU code = kBits == 8 ? E4m3Codes(t, value) : E2m1Codes(t, value);
    y = hn::Mul(value, multiplier);
    if constexpr (kThroughBf16) y = Elements<scalar::Bf16>::Round(y);
    y = Elements<D>::Round(y);
    return code;
  }
};

template <class D, class C, int kGroups>
HWY_INLINE void EncodeUnit(const unsigned char* elements, const float* divisors, const float* multipliers, unsigned char* codes,
                           RowSums& sums) {
  const hn::Rebind<uint8_t, DU> d8;
  const hn::Rebind<uint16_t, DU> d16;
  for (int pair = 0; pair < kPairs; ++pair) {
    const VF divisor = OfPair<kGroups>(divisors, pair);
    const VF multiplier = OfPair<kGroups>(multipliers, pair);
    VF x_even, x_odd, y_even, y_odd;
    Elements<D>::Load(elements, pair, x_even, x_odd);
    const VU even = C::template Code<D>(x_even, divisor, multiplier, y_even);
    const VU odd = C::template Code<D>(x_odd, divisor, multiplier, y_odd);
    sums.Add(pair, x_even, y_even, x_odd, y_odd);
    if constexpr (C::kBitsOf == 4) {
      hn::StoreU(hn::TruncateTo(d8, hn::Or(even, hn::ShiftLeft<4>(odd))), d8, codes + pair * kFloats);
    } else {
      hn::StoreU(hn::TruncateTo(d16, hn::Or(even, hn::ShiftLeft<8>(odd))), d16, reinterpret_cast<uint16_t*>(codes) + pair * kFloats);
    }
  }
}

// Encodes `columns` elements from `begin` of a row: one group, or, with kGroups 2, several of 16.
template <class D, class C, int kGroups>
HWY_INLINE scalar::Problem EncodeColumns(const FloatTile& tile, const unsigned char* elements, int64_t begin, int64_t columns,
                                         const float* divisors, const float* multipliers, bool replace, const scalar::FloatRow& row,
                                         RowSums& sums, RowError& error) {
  constexpr int64_t kBytes = sizeof(typename D::Bits);
  for (int64_t unit = 0; unit < columns; unit += kUnit, divisors += kGroups == 2 ? 2 : 0, multipliers += kGroups == 2 ? 2 : 0) {
    const unsigned char* from = elements + (begin + unit) * kBytes;
    unsigned char* to = row.codes + (begin + unit) * C::kBitsOf / 8;
    const int64_t size = HWY_MIN(int64_t{kUnit}, columns - unit);
    // Zeros fill up the last unit: they are coded exactly and add nothing to the sums.
    alignas(64) unsigned char padded[kUnit * kBytes];
    alignas(64) unsigned char codes[kUnit];
    if (HWY_UNLIKELY(size < kUnit)) {
      memset(padded, 0, sizeof padded);
      memcpy(padded, from, size * kBytes);
      if (UnitIsFinite<D>(padded)) {
        EncodeUnit<D, C, kGroups>(padded, divisors, multipliers, codes, sums);
        memcpy(to, codes, static_cast<size_t>(size * C::kBitsOf / 8));
        continue;
      }
    } else if (HWY_LIKELY(UnitIsFinite<D>(from))) {
      EncodeUnit<D, C, kGroups>(from, divisors, multipliers, to, sums);
      continue;
    }
    sums.Store(error);
    const scalar::FloatScale given[2] = {{divisors[0], multipliers[0]}, {divisors[kGroups - 1], multipliers[kGroups - 1]}};
    scalar::FloatFormat format = tile.format;
    scalar::FloatRow part = row;
    part.codes = to;
    // The scales are there already, whatever they were made of: values are rounded as the format says.
    if (format.scaling == scalar::FloatScaling::kGiven) {
      part.given = given;
    } else {
      part.scales = row.scales + (begin + unit) / tile.group;
    }
    scalar::Problem problem = scalar::EncodeFloats<D>(format, from, size, kGroups == 2 ? 16 : kUnit, replace, part, error);
    if (problem.kind != scalar::Problem::kNone) {
      problem.column += begin + unit;
      return problem;
    }
    sums.Load(error);
  }
  return {};
}

template <class D, class C>
scalar::Problem EncodeRow(const FloatTile& tile, const unsigned char* elements, bool replace, const scalar::FloatRow& row,
                          RowError& error) {
  RowSums sums;
  sums.Load(error);
  scalar::Problem problem;
  if (tile.format.scaling == scalar::FloatScaling::kGiven) {
    for (int64_t begin = 0, index = 0; begin < tile.columns && problem.kind == scalar::Problem::kNone; begin += tile.group, ++index) {
      problem = EncodeColumns<D, C, 1>(tile, elements, begin, HWY_MIN(tile.group, tile.columns - begin), &row.given[index].divisor,
                                       &row.given[index].multiplier, replace, row, sums, error);
    }
  } else {
    const int64_t groups = tile.columns / tile.group;
    GroupScales scales;
    for (int64_t first = 0; first < groups && problem.kind == scalar::Problem::kNone; first += kScaleGroups) {
      const int count = static_cast<int>(HWY_MIN(int64_t{kScaleGroups}, groups - first));
      scales.FromBytes(tile.format, row.set_scale, row.scales + first, count);
      if (tile.group == 16) {
        problem = EncodeColumns<D, C, 2>(tile, elements, first * 16, int64_t{count} * 16, scales.divisor, scales.multiplier, replace, row,
                                         sums, error);
        continue;
      }
      for (int i = 0; i < count && problem.kind == scalar::Problem::kNone; ++i) {
        problem = EncodeColumns<D, C, 1>(tile, elements, (first + i) * tile.group, tile.group, scales.divisor + i, scales.multiplier + i,
                                         replace, row, sums, error);
      }
    }
  }
  // The sums of a row that failed count for nothing.
  sums.Store(error);
  return problem;
}

template <class D, class C>
scalar::Problem EncodeRows(const FloatTile& tile, const FloatOptions& options) {
  for (int64_t row = 0; row < tile.rows; ++row) {
    const unsigned char* elements = tile.elements + row * tile.element_stride;
    const scalar::FloatRow out = FloatRowOf(tile, row);
    if (tile.format.scaling != scalar::FloatScaling::kGiven && !options.scales_chosen) {
      tile.group == 16 ? WriteScales<D, 16>(tile.format, elements, tile.columns, out)
                       : WriteScales<D, 32>(tile.format, elements, tile.columns, out);
    }
    scalar::Problem problem = EncodeRow<D, C>(tile, elements, options.replace_nonfinite, out, options.errors[row]);
    if (problem.kind != scalar::Problem::kNone) {
      problem.row = row;
      return problem;
    }
  }
  return {};
}

template <class D>
scalar::Problem EncodeFormat(const FloatTile& tile, const FloatOptions& options) {
  // BF16 values need no rounding to it before that to D, and quotients of F32 none to F32.
  constexpr bool kThroughBf16 = !std::is_same_v<D, scalar::Bf16>;
  constexpr bool kRound = !std::is_same_v<D, scalar::F32>;
  const bool round = tile.format.round_quotient;
  switch (tile.format.scaling) {
    case scalar::FloatScaling::kGiven:
      return round ? EncodeRows<D, Coding<8, kRound, false> >(tile, options) : EncodeRows<D, Coding<8, false, false> >(tile, options);
    case scalar::FloatScaling::kNvfp4:
      return EncodeRows<D, Coding<4, false, kThroughBf16> >(tile, options);
    case scalar::FloatScaling::kModelOptNvfp4:
      return EncodeRows<D, Coding<4, false, false> >(tile, options);
    case scalar::FloatScaling::kMx:
      break;
  }
  if (tile.format.bits == 8) {
    return round ? EncodeRows<D, Coding<8, kRound, kThroughBf16> >(tile, options)
                 : EncodeRows<D, Coding<8, false, kThroughBf16> >(tile, options);
  }
  return round ? EncodeRows<D, Coding<4, kRound, kThroughBf16> >(tile, options)
               : EncodeRows<D, Coding<4, false, kThroughBf16> >(tile, options);
}

scalar::Problem EncodeFloatTile(const FloatTile& tile, const FloatOptions& options) {
  switch (tile.element) {
    case ElementType::kBf16:
      return EncodeFormat<scalar::Bf16>(tile, options);
    case ElementType::kF16:
      return EncodeFormat<scalar::F16>(tile, options);
    case ElementType::kF32:
      break;
  }
  return EncodeFormat<scalar::F32>(tile, options);
}

template <class D>
void ObserveRows(const FloatTile& tile, float* amax, int64_t stride) {
  constexpr int64_t kBytes = sizeof(typename D::Bits);
  Magnitudes magnitudes;
  memset(&magnitudes, 0, sizeof magnitudes);
  for (int64_t row = 0; row < tile.rows; ++row, amax += stride) {
    const unsigned char* elements = tile.elements + row * tile.element_stride;
    for (int64_t begin = 0, index = 0; begin < tile.columns; begin += tile.group, ++index) {
      const int64_t size = HWY_MIN(tile.group, tile.columns - begin);
      if (size == 16) {
        FindMagnitudes<D, 16 * kBytes>(elements + begin * kBytes, 16, magnitudes.candidates);
      } else {
        FindMagnitudes<D, 0>(elements + begin * kBytes, size, magnitudes.candidates);
      }
      const float largest = hn::GetLane(AmaxOf<D>(magnitudes, 0));
      if (largest <= D::kLargest) {
        amax[index] = HWY_MAX(amax[index], largest);
      } else {
        scalar::ExtendGroups<D>(elements + begin * kBytes, size, size, amax + index);
      }
    }
  }
}

void ObserveFloatTile(const FloatTile& tile, float* amax, int64_t stride) {
  switch (tile.element) {
    case ElementType::kBf16:
      return ObserveRows<scalar::Bf16>(tile, amax, stride);
    case ElementType::kF16:
      return ObserveRows<scalar::F16>(tile, amax, stride);
    case ElementType::kF32:
      return ObserveRows<scalar::F32>(tile, amax, stride);
  }
}

#endif  // HWY_TARGET == HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace quern::quant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern::quant {

HWY_EXPORT(EncodeFloatTile);
HWY_EXPORT(ObserveFloatTile);

scalar::Problem EncodeFloats(const FloatTile& tile, const FloatOptions& options) {
  if (UsesScalarDefinition()) return EncodeFloatsScalar(tile, options);
  return HWY_DYNAMIC_DISPATCH(EncodeFloatTile)(tile, options);
}
void ObserveAmax(const FloatTile& tile, float* amax, int64_t stride) {
  if (UsesScalarDefinition()) return ObserveAmaxScalar(tile, amax, stride);
  HWY_DYNAMIC_DISPATCH(ObserveFloatTile)(tile, amax, stride);
}

}  // namespace quern::quant
#endif  // HWY_ONCE
