// Plain values in vectors: what scalar::EncodePlainPiece and scalar::DecodePlainPiece define. A unit with anything unusual (a non-finite
// element, a value that overflows) goes to the scalar definition.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quant/kernels/plain.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "quant/kernels/plain_tile.h"
#include "quant/kernels/units-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern::quant {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

scalar::Problem EncodePlainTile(const PlainTile& tile, bool replace, RowError* errors) { return EncodePlainScalar(tile, replace, errors); }
void DecodePlainTile(const PlainTile& tile, unsigned char* elements, int64_t stride) { DecodePlainScalar(tile, elements, stride); }

#else

// Rounds a unit; false where the scalar definition has to take it.
template <class D, class P>
HWY_INLINE bool EncodeUnit(const unsigned char* elements, unsigned char* values, RowSums& sums) {
  VF x_even[kPairs], x_odd[kPairs], p_even[kPairs], p_odd[kPairs];
  const DF df;
  VF largest = hn::Zero(df);
  for (int pair = 0; pair < kPairs; ++pair) {
    Elements<D>::Load(elements, pair, x_even[pair], x_odd[pair]);
    p_even[pair] = Elements<P>::Round(x_even[pair]);
    p_odd[pair] = Elements<P>::Round(x_odd[pair]);
    largest = hn::Max(largest, hn::Max(hn::Abs(p_even[pair]), hn::Abs(p_odd[pair])));
  }
  if (!hn::AllTrue(df, hn::Le(largest, hn::Set(df, P::kLargest)))) return false;
  for (int pair = 0; pair < kPairs; ++pair) {
    Elements<P>::Store(p_even[pair], p_odd[pair], values, pair);
    sums.Add(pair, x_even[pair], Elements<D>::Round(p_even[pair]), x_odd[pair], Elements<D>::Round(p_odd[pair]));
  }
  return true;
}

template <class D, class P>
scalar::Problem EncodeRow(const unsigned char* elements, int64_t columns, bool replace, unsigned char* values, RowError& error) {
  constexpr int64_t kFrom = sizeof(typename D::Bits), kTo = sizeof(typename P::Bits);
  RowSums sums;
  sums.Load(error);
  for (int64_t begin = 0; begin < columns; begin += kUnit) {
    const int64_t size = HWY_MIN(int64_t{kUnit}, columns - begin);
    // Zeros fill up the last unit: they are stored nowhere and add nothing to the sums.
    alignas(64) unsigned char padded[kUnit * kFrom];
    alignas(64) unsigned char rounded[kUnit * kTo];
    const unsigned char* from = elements + begin * kFrom;
    unsigned char* to = values + begin * kTo;
    if (HWY_UNLIKELY(size < kUnit)) {
      memset(padded, 0, sizeof padded);
      memcpy(padded, from, size * kFrom);
      from = padded;
      to = rounded;
    }
    if (HWY_LIKELY((UnitIsFinite<D>(from) && EncodeUnit<D, P>(from, to, sums)))) {
      if (size < kUnit) memcpy(values + begin * kTo, rounded, size * kTo);
      continue;
    }
    sums.Store(error);
    scalar::Problem problem = scalar::EncodePlainPiece<D, P>(elements + begin * kFrom, size, replace, values + begin * kTo, error);
    if (problem.kind != scalar::Problem::kNone) {
      problem.column += begin;
      return problem;
    }
    sums.Load(error);
  }
  sums.Store(error);
  return {};
}

template <class D, class P>
void DecodeRow(const unsigned char* values, int64_t columns, unsigned char* elements) {
  constexpr int64_t kFrom = sizeof(typename P::Bits), kTo = sizeof(typename D::Bits);
  int64_t begin = 0;
  for (; begin + kUnit <= columns; begin += kUnit) {
    const unsigned char* from = values + begin * kFrom;
    unsigned char* to = elements + begin * kTo;
    if (HWY_UNLIKELY(!UnitIsFinite<P>(from))) {
      scalar::DecodePlainPiece<D, P>(from, kUnit, to);
      continue;
    }
    for (int pair = 0; pair < kPairs; ++pair) {
      VF even, odd;
      Elements<P>::Load(from, pair, even, odd);
      Elements<D>::Store(Elements<D>::Round(even), Elements<D>::Round(odd), to, pair);
    }
  }
  scalar::DecodePlainPiece<D, P>(values + begin * kFrom, columns - begin, elements + begin * kTo);
}

template <class D, class P>
scalar::Problem EncodeRows(const PlainTile& tile, bool replace, RowError* errors) {
  for (int64_t row = 0; row < tile.rows; ++row) {
    scalar::Problem problem = EncodeRow<D, P>(tile.elements + row * tile.element_stride, tile.columns, replace,
                                              tile.values + row * tile.value_stride, errors[row]);
    if (problem.kind != scalar::Problem::kNone) {
      problem.row = row;
      return problem;
    }
  }
  return {};
}

template <class D, class P>
void DecodeRows(const PlainTile& tile, unsigned char* elements, int64_t stride) {
  for (int64_t row = 0; row < tile.rows; ++row) {
    DecodeRow<D, P>(tile.values + row * tile.value_stride, tile.columns, elements + row * stride);
  }
}

scalar::Problem EncodePlainTile(const PlainTile& tile, bool replace, RowError* errors) {
  return WithFormat(tile.element, [&](auto d) {
    return WithFormat(tile.plain, [&](auto p) { return EncodeRows<decltype(d), decltype(p)>(tile, replace, errors); });
  });
}

void DecodePlainTile(const PlainTile& tile, unsigned char* elements, int64_t stride) {
  WithFormat(tile.element,
             [&](auto d) { WithFormat(tile.plain, [&](auto p) { DecodeRows<decltype(d), decltype(p)>(tile, elements, stride); }); });
}

#endif  // HWY_TARGET == HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace quern::quant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern::quant {

HWY_EXPORT(EncodePlainTile);
HWY_EXPORT(DecodePlainTile);

scalar::Problem EncodePlainScalar(const PlainTile& tile, bool replace_nonfinite, RowError* errors) {
  return WithFormat(tile.element, [&](auto d) {
    return WithFormat(tile.plain, [&](auto p) {
      for (int64_t row = 0; row < tile.rows; ++row) {
        scalar::Problem problem = scalar::EncodePlainPiece<decltype(d), decltype(p)>(
            tile.elements + row * tile.element_stride, tile.columns, replace_nonfinite, tile.values + row * tile.value_stride, errors[row]);
        problem.row = row;
        if (problem.kind != scalar::Problem::kNone) return problem;
      }
      return scalar::Problem();
    });
  });
}

void DecodePlainScalar(const PlainTile& tile, unsigned char* elements, int64_t element_stride) {
  WithFormat(tile.element, [&](auto d) {
    WithFormat(tile.plain, [&](auto p) {
      for (int64_t row = 0; row < tile.rows; ++row) {
        scalar::DecodePlainPiece<decltype(d), decltype(p)>(tile.values + row * tile.value_stride, tile.columns,
                                                           elements + row * element_stride);
      }
    });
  });
}

scalar::Problem EncodePlain(const PlainTile& tile, bool replace_nonfinite, RowError* errors) {
  if (UsesScalarDefinition()) return EncodePlainScalar(tile, replace_nonfinite, errors);
  return HWY_DYNAMIC_DISPATCH(EncodePlainTile)(tile, replace_nonfinite, errors);
}
void DecodePlain(const PlainTile& tile, unsigned char* elements, int64_t element_stride) {
  if (UsesScalarDefinition()) return DecodePlainScalar(tile, elements, element_stride);
  HWY_DYNAMIC_DISPATCH(DecodePlainTile)(tile, elements, element_stride);
}

}  // namespace quern::quant
#endif  // HWY_ONCE
