// The search for scales of floats in vectors: what scalar::WriteSearchedScales, scalar::ErrorsOfScales and scalar::LeastErrors define. The
// two blocks of a unit are coded at the same time, each with its own candidates. A unit with a non-finite element goes to the scalar
// definition.
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quant/kernels/float_search.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "quant/kernels/float_tile.h"
#include "quant/kernels/search_error-inl.h"
#include "quant/kernels/small_floats-inl.h"
#include "quant/kernels/units-inl.h"
#include "quant/scalar/float_search.h"

HWY_BEFORE_NAMESPACE();
namespace quern::quant {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

void SearchScalesOfTile(const FloatTile& tile, const scalar::RangeSearch& search) { SearchFloatScalesScalar(tile, search); }
void ErrorsOfTile(const FloatTile& tile, const scalar::RangeSearch& search, const scalar::FloatScale* scales, int count, float factor,
                  double* errors) {
  ErrorsOfScalesScalar(tile, search, scales, count, factor, errors);
}
void LeastErrorsOfTile(const FloatTile& tile, const float* amax, float* errors) { LeastErrorsScalar(tile, amax, errors); }

#else

// A unit in registers, with the weights of its columns.
template <class D>
struct Unit {
  VF even[kPairs], odd[kPairs], weight_even[kPairs], weight_odd[kPairs];

  HWY_INLINE Unit(const unsigned char* elements, const float* importance, float importance_factor) {
    for (int pair = 0; pair < kPairs; ++pair) {
      Elements<D>::Load(elements, pair, even[pair], odd[pair]);
      weight_even[pair] = weight_odd[pair] = hn::Set(DF(), 1.0f);
      if (importance != nullptr) {
        Elements<scalar::F32>::Load(reinterpret_cast<const unsigned char*>(importance), pair, weight_even[pair], weight_odd[pair]);
        weight_even[pair] = hn::Mul(weight_even[pair], hn::Set(DF(), importance_factor));
        weight_odd[pair] = hn::Mul(weight_odd[pair], hn::Set(DF(), importance_factor));
      }
    }
  }
};

// What is compared with an element: the product of value and scale as it is (ModelOpt), rounded to D, or to BF16 and then to D.
enum class Compared { kProduct, kRounded, kRoundedThroughBf16 };

// Of NVFP4 in compressed-tensors: BF16 values need no rounding to it before that to D.
template <class D>
constexpr Compared kComparedNvfp4 = std::is_same_v<D, scalar::Bf16> ? Compared::kRounded : Compared::kRoundedThroughBf16;

// The scaled difference between x and what it decodes to.
template <class D, int kBits, bool kRoundQuotient, Compared kCompared>
HWY_INLINE VF Difference(VF x, VF divisor, VF multiplier, VF factor) {
  VF t = hn::Div(x, divisor);
  if constexpr (kRoundQuotient) t = Elements<D>::Round(t);
  VF value;
  if constexpr (kBits == 8) {
    E4m3Codes(t, value);
  } else {
    E2m1Codes(t, value);
  }
  VF y = hn::Mul(value, multiplier);
  if constexpr (kCompared == Compared::kRoundedThroughBf16) y = Elements<scalar::Bf16>::Round(y);
  if constexpr (kCompared != Compared::kProduct) y = Elements<D>::Round(y);
  return hn::Mul(hn::Sub(y, x), factor);
}

// Errors of the two blocks of a unit.
template <class D, Compared kCompared, scalar::SearchNorm kNorm>
HWY_INLINE void BlockErrors(const Unit<D>& unit, const float* divisors, const float* multipliers, const float* factors, float* errors) {
  VF sums[kPairs];
  for (int pair = 0; pair < kPairs; ++pair) {
    const VF divisor = OfPair<2>(divisors, pair), multiplier = OfPair<2>(multipliers, pair), factor = OfPair<2>(factors, pair);
    const VF even = Difference<D, 4, false, kCompared>(unit.even[pair], divisor, multiplier, factor);
    const VF odd = Difference<D, 4, false, kCompared>(unit.odd[pair], divisor, multiplier, factor);
    sums[pair] = hn::Add(ElementErrors<kNorm>(even, unit.weight_even[pair]), ElementErrors<kNorm>(odd, unit.weight_odd[pair]));
  }
  // The lanes of a block fold as those of scalar::SumErrors, whose upper half is empty.
  if constexpr (kPairs == 1) {
    errors[0] = FoldVector(DFHalf(), hn::LowerHalf(DFHalf(), sums[0]));
    errors[1] = FoldVector(DFHalf(), hn::UpperHalf(DFHalf(), sums[0]));
  } else if constexpr (kPairs == 2) {
    errors[0] = FoldVector(DF(), sums[0]);
    errors[1] = FoldVector(DF(), sums[1]);
  } else {
    errors[0] = FoldVector(DF(), hn::Add(sums[0], sums[1]));
    errors[1] = FoldVector(DF(), hn::Add(sums[2], sums[3]));
  }
}

// The best codes of the two blocks of a unit.
template <class D, Compared kCompared, scalar::SearchNorm kNorm>
HWY_INLINE void SearchUnit(const Unit<D>& unit, const scalar::ScaleTable& table, const scalar::CodeRange* codes, const float* factors,
                           scalar::BestCode* best) {
  int code[2], left[2];
  float least[2];
  for (int block = 0; block < 2; ++block) {
    code[block] = codes[block].first;
    left[block] = (codes[block].last - codes[block].first) * codes[block].step;
    least[block] = scalar::FloatOf(0x7F800000);
    best[block] = scalar::BestCode();
  }
  for (int step = 0; step <= HWY_MAX(left[0], left[1]); ++step) {
    float divisors[2], multipliers[2], errors[2];
    for (int block = 0; block < 2; ++block) {
      divisors[block] = table.scales[code[block]].divisor;
      multipliers[block] = table.scales[code[block]].multiplier;
    }
    BlockErrors<D, kCompared, kNorm>(unit, divisors, multipliers, factors, errors);
    for (int block = 0; block < 2; ++block) {
      if (errors[block] < least[block]) {
        least[block] = errors[block];
        best[block] = {code[block], static_cast<double>(errors[block])};
      }
      // A block that is through repeats its last candidate, which is not better than itself.
      if (step < left[block]) code[block] += codes[block].step;
    }
  }
}

// Calls `work(begin, unit address, importance, blocks)` for the units of a row; zeros fill up the last one.
template <class D, class Work>
HWY_INLINE void ForEachUnit(const unsigned char* elements, const float* importance, int64_t columns, const Work& work) {
  constexpr int64_t kBytes = sizeof(typename D::Bits);
  for (int64_t begin = 0; begin < columns; begin += kUnit) {
    if (HWY_LIKELY(begin + kUnit <= columns)) {
      work(begin, elements + begin * kBytes, importance == nullptr ? nullptr : importance + begin, 2);
      continue;
    }
    alignas(64) unsigned char padded[kUnit * kBytes] = {};
    alignas(64) float weights[kUnit] = {};
    memcpy(padded, elements + begin * kBytes, (columns - begin) * kBytes);
    if (importance != nullptr) memcpy(weights, importance + begin, (columns - begin) * sizeof weights[0]);
    work(begin, padded, importance == nullptr ? nullptr : weights, 1);
  }
}

template <class D, Compared kCompared, scalar::SearchNorm kNorm>
void SearchRows(const FloatTile& tile, const scalar::RangeSearch& search) {
  const scalar::ScaleTable table(tile.format, tile.set_scale);
  for (int64_t row_index = 0; row_index < tile.rows; ++row_index) {
    const scalar::FloatRow row = FloatRowOf(tile, row_index);
    const auto work = [&](int64_t begin, const unsigned char* elements, const float* importance, int blocks) HWY_ATTR {
      scalar::FloatRow part = row;
      part.scales += begin / 16;
      if (!UnitIsFinite<D>(elements)) {
        scalar::RangeSearch by_definition = search;
        by_definition.importance = importance;
        return scalar::WriteSearchedScales<D>(tile.format, by_definition, table, elements, blocks * 16, 16, part);
      }
      float factors[2], amax[2];
      scalar::CodeRange codes[2];
      for (int block = 0; block < 2; ++block) {
        amax[block] = scalar::AmaxOfBlock<D>(elements, block * 16, 16);
        factors[block] = scalar::DifferenceFactor(amax[block]);
        if (amax[block] != 0) codes[block] = scalar::CandidateCodes<D>(tile.format, search.norm, tile.set_scale, amax[block]);
      }
      scalar::BestCode best[2];
      SearchUnit<D, kCompared, kNorm>(Unit<D>(elements, importance, search.importance_factor), table, codes, factors, best);
      for (int block = 0; block < blocks; ++block) {
        const bool found = amax[block] != 0 && best[block].code >= 0;
        part.scales[block] = found ? table.bytes[best[block].code] : scalar::ScaleByte<D>(tile.format, tile.set_scale, amax[block]);
      }
    };
    ForEachUnit<D>(tile.elements + row_index * tile.element_stride, search.importance, tile.columns, work);
  }
}

template <class D, Compared kCompared>
void SearchByNorm(const FloatTile& tile, const scalar::RangeSearch& search) {
  switch (search.norm) {
    case scalar::SearchNorm::kPower24:
      return SearchRows<D, kCompared, scalar::SearchNorm::kPower24>(tile, search);
    case scalar::SearchNorm::kWeightedCube:
      return SearchRows<D, kCompared, scalar::SearchNorm::kWeightedCube>(tile, search);
    case scalar::SearchNorm::kSquare:
      return SearchRows<D, kCompared, scalar::SearchNorm::kSquare>(tile, search);
  }
}

void SearchScalesOfTile(const FloatTile& tile, const scalar::RangeSearch& search) {
  WithFormat(tile.element, [&](auto d) {
    using D = decltype(d);
    return tile.format.scaling == scalar::FloatScaling::kNvfp4 ? SearchByNorm<D, kComparedNvfp4<D> >(tile, search)
                                                               : SearchByNorm<D, Compared::kProduct>(tile, search);
  });
}

template <class D>
void LeastErrorsOfRow(const FloatTile& tile, const float* amax, float* errors) {
  const scalar::ScaleTable table(tile.format, tile.set_scale);
  const auto work = [&](int64_t begin, const unsigned char* elements, const float*, int blocks) HWY_ATTR {
    const int64_t first = begin / 16;
    if (!UnitIsFinite<D>(elements)) {
      return scalar::LeastErrors<D>(tile.format, tile.set_scale, table, elements, blocks, amax + first, errors + first);
    }
    float factors[2] = {1, 1};
    scalar::CodeRange codes[2];
    for (int block = 0; block < blocks; ++block) {
      factors[block] = scalar::DifferenceFactor(amax[first + block]);
      codes[block] = scalar::CandidateCodes<D>(tile.format, scalar::SearchNorm::kPower24, tile.set_scale, amax[first + block]);
    }
    scalar::BestCode best[2];
    SearchUnit<D, kComparedNvfp4<D>, scalar::SearchNorm::kPower24>(Unit<D>(elements, nullptr, 1), table, codes, factors, best);
    for (int block = 0; block < blocks; ++block) {
      errors[first + block] = best[block].code >= 0 ? static_cast<float>(best[block].error) : scalar::FloatOf(0x7F800000);
    }
  };
  ForEachUnit<D>(tile.elements, nullptr, tile.columns, work);
}

void LeastErrorsOfTile(const FloatTile& tile, const float* amax, float* errors) {
  WithFormat(tile.element, [&](auto d) { LeastErrorsOfRow<decltype(d)>(tile, amax, errors); });
}

template <class D, bool kRoundQuotient, scalar::SearchNorm kNorm>
void ErrorsOfRow(const FloatTile& tile, const scalar::RangeSearch& search, const scalar::FloatScale* scales, int count, float factor,
                 double* errors) {
  constexpr int64_t kBytes = sizeof(typename D::Bits);
  bool finite = true;
  ForEachUnit<D>(tile.elements, nullptr, tile.columns,
                 [&](int64_t, const unsigned char* elements, const float*, int) HWY_ATTR { finite = finite && UnitIsFinite<D>(elements); });
  if (!finite) return scalar::ErrorsOfScales<D>(tile.format, search, scales, count, factor, tile.elements, tile.columns, errors);
  const DF df;
  for (int i = 0; i < count; ++i) {
    const VF divisor = hn::Set(df, scales[i].divisor), multiplier = hn::Set(df, scales[i].multiplier), by = hn::Set(df, factor);
    errors[i] = 0;
    for (int64_t begin = 0; begin < tile.columns; begin += kErrorBlock) {
      ErrorLanes lanes;
      const auto work = [&](int64_t, const unsigned char* elements, const float* importance, int) HWY_ATTR {
        const Unit<D> unit(elements, importance, search.importance_factor);
        for (int pair = 0; pair < kPairs; ++pair) {
          const VF even = Difference<D, 8, kRoundQuotient, Compared::kRounded>(unit.even[pair], divisor, multiplier, by);
          const VF odd = Difference<D, 8, kRoundQuotient, Compared::kRounded>(unit.odd[pair], divisor, multiplier, by);
          lanes.Add(pair, ElementErrors<kNorm>(even, unit.weight_even[pair]), ElementErrors<kNorm>(odd, unit.weight_odd[pair]));
        }
      };
      ForEachUnit<D>(tile.elements + begin * kBytes, search.importance == nullptr ? nullptr : search.importance + begin,
                     HWY_MIN(kErrorBlock, tile.columns - begin), work);
      errors[i] += static_cast<double>(lanes.Fold());
    }
  }
}

void ErrorsOfTile(const FloatTile& tile, const scalar::RangeSearch& search, const scalar::FloatScale* scales, int count, float factor,
                  double* errors) {
  WithFormat(tile.element, [&](auto d) {
    using D = decltype(d);
    constexpr bool kRound = !std::is_same_v<D, scalar::F32>;
    const bool weighted = search.norm == scalar::SearchNorm::kWeightedCube;
    const auto run = [&](auto round) {
      if (weighted) {
        return ErrorsOfRow<D, decltype(round)::value, scalar::SearchNorm::kWeightedCube>(tile, search, scales, count, factor, errors);
      }
      return ErrorsOfRow<D, decltype(round)::value, scalar::SearchNorm::kPower24>(tile, search, scales, count, factor, errors);
    };
    return tile.format.round_quotient ? run(std::bool_constant<kRound>()) : run(std::false_type());
  });
}

#endif  // HWY_TARGET == HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace quern::quant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern::quant {

HWY_EXPORT(SearchScalesOfTile);
HWY_EXPORT(ErrorsOfTile);
HWY_EXPORT(LeastErrorsOfTile);

void SearchFloatScalesScalar(const FloatTile& tile, const scalar::RangeSearch& search) {
  const scalar::ScaleTable table(tile.format, tile.set_scale);
  WithFormat(tile.element, [&](auto d) {
    for (int64_t row = 0; row < tile.rows; ++row) {
      scalar::WriteSearchedScales<decltype(d)>(tile.format, search, table, tile.elements + row * tile.element_stride, tile.columns,
                                               tile.group, FloatRowOf(tile, row));
    }
  });
}

void ErrorsOfScalesScalar(const FloatTile& tile, const scalar::RangeSearch& search, const scalar::FloatScale* scales, int count,
                          float factor, double* errors) {
  WithFormat(tile.element, [&](auto d) {
    scalar::ErrorsOfScales<decltype(d)>(tile.format, search, scales, count, factor, tile.elements, tile.columns, errors);
  });
}

void LeastErrorsScalar(const FloatTile& tile, const float* amax, float* errors) {
  const scalar::ScaleTable table(tile.format, tile.set_scale);
  WithFormat(tile.element, [&](auto d) {
    scalar::LeastErrors<decltype(d)>(tile.format, tile.set_scale, table, tile.elements, tile.columns / 16, amax, errors);
  });
}

void SearchFloatScales(const FloatTile& tile, const scalar::RangeSearch& search) {
  if (UsesScalarDefinition()) return SearchFloatScalesScalar(tile, search);
  HWY_DYNAMIC_DISPATCH(SearchScalesOfTile)(tile, search);
}
void ErrorsOfScales(const FloatTile& tile, const scalar::RangeSearch& search, const scalar::FloatScale* scales, int count, float factor,
                    double* errors) {
  if (UsesScalarDefinition()) return ErrorsOfScalesScalar(tile, search, scales, count, factor, errors);
  HWY_DYNAMIC_DISPATCH(ErrorsOfTile)(tile, search, scales, count, factor, errors);
}
void LeastErrors(const FloatTile& tile, const float* amax, float* errors) {
  if (UsesScalarDefinition()) return LeastErrorsScalar(tile, amax, errors);
  HWY_DYNAMIC_DISPATCH(LeastErrorsOfTile)(tile, amax, errors);
}

}  // namespace quern::quant
#endif  // HWY_ONCE
