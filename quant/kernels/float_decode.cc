// Decoding of float tiles: what scalar::DecodeFloats defines, in vectors. Units with a NaN code or a scale that is not finite go to the
// scalar definition.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quant/kernels/float_decode.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "quant/kernels/float_tile.h"
#include "quant/kernels/small_floats-inl.h"
#include "quant/kernels/units-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern::quant {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

void DecodeFloatTile(const FloatTile& tile, unsigned char* elements, int64_t stride) { DecodeFloatsScalar(tile, elements, stride); }

#else

// E4M3 or E2M1; values rounded to BF16 or not; code 8 of E2M1 as +0 or not.
template <int kBits, bool kThroughBf16, bool kPositiveZero>
struct Decoding {
  static constexpr int kBitsOf = kBits;

  template <class D>
  static HWY_INLINE VF Value(VU codes, VF multiplier) {
    VF value = kBits == 8 ? E4m3Values(codes) : E2m1Values(codes);
    if constexpr (kPositiveZero) value = hn::IfThenElseZero(hn::Ne(value, hn::Zero(DF())), value);
    value = hn::Mul(value, multiplier);
    if constexpr (kThroughBf16) value = Elements<scalar::Bf16>::Round(value);
    return Elements<D>::Round(value);
  }
};

template <class D, class C, int kGroups>
HWY_INLINE void DecodeUnit(const unsigned char* codes, const float* multipliers, unsigned char* elements) {
  const hn::Rebind<uint8_t, DU> d8;
  const hn::Rebind<uint16_t, DU> d16;
  for (int pair = 0; pair < kPairs; ++pair) {
    const VF multiplier = OfPair<kGroups>(multipliers, pair);
    VU even, odd;
    if constexpr (C::kBitsOf == 4) {
      const VU both = hn::PromoteTo(DU(), hn::LoadU(d8, codes + pair * kFloats));
      even = hn::And(both, hn::Set(DU(), 15u));
      odd = hn::ShiftRight<4>(both);
    } else {
      const VU both = hn::PromoteTo(DU(), hn::LoadU(d16, reinterpret_cast<const uint16_t*>(codes) + pair * kFloats));
      even = hn::And(both, hn::Set(DU(), 0xFFu));
      odd = hn::ShiftRight<8>(both);
    }
    Elements<D>::Store(C::template Value<D>(even, multiplier), C::template Value<D>(odd, multiplier), elements, pair);
  }
}

// Whether a unit of E4M3 codes has no NaN.
HWY_INLINE bool NoNanCodes(const unsigned char* codes) {
  const hn::CappedTag<uint8_t, kUnit> d;
  auto largest = hn::Zero(d);
  for (int64_t i = 0; i < kUnit; i += static_cast<int64_t>(hn::Lanes(d))) {
    largest = hn::Max(largest, hn::And(hn::LoadU(d, codes + i), hn::Set(d, uint8_t{0x7F})));
  }
  return hn::AllFalse(d, hn::Eq(largest, hn::Set(d, uint8_t{0x7F})));
}

HWY_INLINE bool IsFinite(float value) { return scalar::F32::IsFinite(scalar::BitsOf(value)); }

// Decodes `columns` codes from `begin` of a row: one group, or, with kGroups 2, several of 16.
template <class D, class C, int kGroups>
HWY_INLINE void DecodeColumns(const FloatTile& tile, const scalar::FloatRow& row, int64_t begin, int64_t columns, const float* multipliers,
                              unsigned char* elements) {
  constexpr int64_t kBytes = sizeof(typename D::Bits);
  for (int64_t unit = 0; unit < columns; unit += kUnit, multipliers += kGroups == 2 ? 2 : 0) {
    const int64_t size = HWY_MIN(int64_t{kUnit}, columns - unit);
    const unsigned char* from = row.codes + (begin + unit) * C::kBitsOf / 8;
    unsigned char* to = elements + (begin + unit) * kBytes;
    alignas(64) unsigned char codes[kUnit];
    alignas(64) unsigned char padded[kUnit * kBytes];
    if (HWY_UNLIKELY(size < kUnit)) {
      memset(codes, 0, sizeof codes);
      memcpy(codes, from, static_cast<size_t>(size * C::kBitsOf / 8));
      from = codes;
    }
    const bool usual =
        IsFinite(multipliers[0]) && IsFinite(multipliers[size > 16 ? kGroups - 1 : 0]) && (C::kBitsOf == 4 || NoNanCodes(from));
    if (HWY_LIKELY(usual)) {
      DecodeUnit<D, C, kGroups>(from, multipliers, size < kUnit ? padded : to);
      if (HWY_UNLIKELY(size < kUnit)) memcpy(to, padded, static_cast<size_t>(size * kBytes));
      continue;
    }
    const int64_t group = begin + unit;
    scalar::FloatRow part = row;
    part.codes = const_cast<unsigned char*>(from);
    if (tile.format.scaling == scalar::FloatScaling::kGiven) {
      part.given = row.given + group / tile.group;
    } else {
      part.scales = row.scales + group / tile.group;
    }
    scalar::DecodeFloats<D>(tile.format, part, size, kGroups == 2 ? 16 : kUnit, to);
  }
}

template <class D, class C>
void DecodeRows(const FloatTile& tile, unsigned char* elements, int64_t stride) {
  GroupScales scales;
  for (int64_t r = 0; r < tile.rows; ++r, elements += stride) {
    const scalar::FloatRow row = FloatRowOf(tile, r);
    if (tile.format.scaling == scalar::FloatScaling::kGiven) {
      for (int64_t begin = 0, index = 0; begin < tile.columns; begin += tile.group, ++index) {
        DecodeColumns<D, C, 1>(tile, row, begin, HWY_MIN(tile.group, tile.columns - begin), &row.given[index].multiplier, elements);
      }
      continue;
    }
    const int64_t groups = tile.columns / tile.group;
    for (int64_t first = 0; first < groups; first += kScaleGroups) {
      const int count = static_cast<int>(HWY_MIN(int64_t{kScaleGroups}, groups - first));
      scales.FromBytes(tile.format, row.set_scale, row.scales + first, count);
      if (tile.group == 16) {
        DecodeColumns<D, C, 2>(tile, row, first * 16, int64_t{count} * 16, scales.multiplier, elements);
        continue;
      }
      for (int i = 0; i < count; ++i) {
        DecodeColumns<D, C, 1>(tile, row, (first + i) * tile.group, tile.group, scales.multiplier + i, elements);
      }
    }
  }
}

template <class D>
void DecodeFormat(const FloatTile& tile, unsigned char* elements, int64_t stride) {
  // BF16 values need no rounding to it before that to D.
  constexpr bool kThroughBf16 = !std::is_same_v<D, scalar::Bf16>;
  switch (tile.format.scaling) {
    case scalar::FloatScaling::kGiven:
      return DecodeRows<D, Decoding<8, false, false> >(tile, elements, stride);
    case scalar::FloatScaling::kNvfp4:
      return DecodeRows<D, Decoding<4, kThroughBf16, false> >(tile, elements, stride);
    case scalar::FloatScaling::kModelOptNvfp4:
      return DecodeRows<D, Decoding<4, false, true> >(tile, elements, stride);
    case scalar::FloatScaling::kMx:
      break;
  }
  return tile.format.bits == 8 ? DecodeRows<D, Decoding<8, kThroughBf16, false> >(tile, elements, stride)
                               : DecodeRows<D, Decoding<4, kThroughBf16, false> >(tile, elements, stride);
}

void DecodeFloatTile(const FloatTile& tile, unsigned char* elements, int64_t stride) {
  switch (tile.element) {
    case ElementType::kBf16:
      return DecodeFormat<scalar::Bf16>(tile, elements, stride);
    case ElementType::kF16:
      return DecodeFormat<scalar::F16>(tile, elements, stride);
    case ElementType::kF32:
      return DecodeFormat<scalar::F32>(tile, elements, stride);
  }
}

#endif  // HWY_TARGET == HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace quern::quant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern::quant {

HWY_EXPORT(DecodeFloatTile);

void DecodeFloats(const FloatTile& tile, unsigned char* elements, int64_t element_stride) {
  if (UsesScalarDefinition()) return DecodeFloatsScalar(tile, elements, element_stride);
  HWY_DYNAMIC_DISPATCH(DecodeFloatTile)(tile, elements, element_stride);
}

}  // namespace quern::quant
#endif  // HWY_ONCE
