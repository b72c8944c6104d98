// The search for ranges in vectors: what scalar::SearchPiece defines. Parameters of all candidates of many groups are computed at once,
// then each group is coded with each of them. A chunk of groups with anything unusual goes to the scalar definition.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quant/kernels/integer_search.cc"
#include "quant/scalar/integer_search.h"

#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "quant/kernels/integer_groups-inl.h"
#include "quant/kernels/integer_tile.h"
#include "quant/kernels/search_error-inl.h"
#include "quant/kernels/units-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern::quant {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

void SearchTile(const IntegerTile& tile, const scalar::RangeSearch& search, scalar::Range* ranges) { SearchScalar(tile, search, ranges); }

#else

constexpr int kSearchGroups = 16;  // of a chunk
constexpr int64_t kSearchColumns = 2048;

template <class D, bool kSymmetric, bool kPrecise, scalar::SearchNorm kNorm>
class RowSearch {
  using Coder = IntegerCoder<D, kSymmetric, kPrecise>;
  using RowConstants = typename Coder::RowConstants;
  using GroupConstants = typename Coder::GroupConstants;

 public:
  RowSearch(const IntegerTile& tile, const scalar::RangeSearch& search) : format_(tile.format), search_(search), group_(tile.group) {
    for (int candidate = 0; candidate < scalar::kShrinkCandidates; ++candidate) shrink_[candidate] = search.Shrink(candidate);
  }

  void Search(const unsigned char* elements, int64_t columns, scalar::Range* ranges) {
    // One group may be long and end anywhere; several are whole units.
    const int64_t step = group_ == columns ? columns : group_ * HWY_MAX(1, HWY_MIN(int64_t{kSearchGroups}, kSearchColumns / group_));
    for (int64_t begin = 0; begin < columns; begin += step) {
      const int64_t size = HWY_MIN(step, columns - begin);
      const int groups = static_cast<int>(size / group_);
      const unsigned char* piece = elements + begin * kBytes;
      const float* importance = search_.importance == nullptr ? nullptr : search_.importance + begin;
      if (Prepare(piece, groups)) {
        for (int index = 0; index < groups; ++index) {
          const float p =
              shrink_[Best(piece + index * group_ * kBytes, index, importance == nullptr ? nullptr : importance + index * group_)];
          ranges[index] = scalar::Shrunk<D>(format_, {low_[index], high_[index]}, p);
        }
      } else {
        scalar::RangeSearch search = search_;
        search.importance = importance;
        scalar::SearchPiece<D>(format_, search, piece, size, group_, ranges);
      }
      ranges += groups;
    }
  }

 private:
  static constexpr int64_t kBytes = sizeof(typename D::Bits);

  // Computes the parameters of all candidates. False when the scalar definition has to take the chunk.
  HWY_NOINLINE bool Prepare(const unsigned char* piece, int groups) {
    for (int index = 0; index < groups; ++index) {
      FindCandidates<D>(piece + index * group_ * kBytes, group_, candidates_.high + 4 * index, candidates_.low + 4 * index);
    }
    const DF df;
    const VF largest = hn::Set(df, D::kLargest);
    for (int index = 0; index < groups; index += kFloats) {
      const auto lanes = hn::FirstN(df, static_cast<size_t>(groups - index));
      VF high, low;
      RangesOf<D>(candidates_, index, high, low);
      high = hn::IfThenElseZero(lanes, high);
      low = hn::IfThenElseZero(lanes, low);
      if (!hn::AllTrue(df, hn::And(hn::Le(high, largest), hn::Ge(low, hn::Neg(largest))))) return false;
      hn::Store(high, df, high_ + index);
      hn::Store(low, df, low_ + index);
      for (int candidate = 0; candidate < scalar::kShrinkCandidates; ++candidate) {
        const VF p = hn::Set(df, shrink_[candidate]);
        const typename Coder::Parameters parameters =
            Coder::ParametersOf(format_, Coder::Round(hn::Mul(low, p)), Coder::Round(hn::Mul(high, p)));
        // The others have scales of at least 1/20 of the first one's.
        if (candidate == 0 && !hn::AllTrue(df, parameters.usual)) return false;
        hn::Store(parameters.scale, df, scale_[candidate] + index);
        if constexpr (Coder::kReciprocal) hn::Store(parameters.reciprocal, df, reciprocal_[candidate] + index);
        if constexpr (!kSymmetric) hn::Store(parameters.zero_point, df, zero_point_[candidate] + index);
      }
    }
    return true;
  }

  // The candidate with the least error.
  HWY_INLINE int Best(const unsigned char* elements, int index, const float* importance) const {
    const RowConstants row = Coder::ConstantsOfRow(format_);
    const VF factor = hn::Set(DF(), scalar::DifferenceFactor(scale_[0][index]));
    double least = static_cast<double>(scalar::FloatOf(0x7F800000));
    int best = 0;
    for (int candidate = 0; candidate < scalar::kShrinkCandidates; ++candidate) {
      const GroupConstants group =
          Coder::ConstantsOfGroup(row, scale_[candidate][index], reciprocal_[candidate][index], zero_point_[candidate][index]);
      const double error = Error(row, group, factor, elements, importance);
      if (error < least) {
        least = error;
        best = candidate;
      }
    }
    return best;
  }

  HWY_INLINE double Error(RowConstants row, GroupConstants group, VF factor, const unsigned char* elements, const float* importance) const {
    double total = 0;
    for (int64_t begin = 0; begin < group_; begin += kErrorBlock) {
      const int64_t end = HWY_MIN(begin + kErrorBlock, group_);
      ErrorLanes lanes;
      int64_t i = begin;
      for (; i + kUnit <= end; i += kUnit) {
        AddUnit(row, group, factor, elements + i * kBytes, importance == nullptr ? nullptr : importance + i, lanes);
      }
      if (HWY_UNLIKELY(i < end)) {
        // Zeros fill up the last unit: they are coded exactly and add nothing.
        alignas(64) unsigned char padded[kUnit * kBytes] = {};
        alignas(64) float weights[kUnit] = {};
        memcpy(padded, elements + i * kBytes, (end - i) * kBytes);
        if (importance != nullptr) memcpy(weights, importance + i, (end - i) * sizeof weights[0]);
        AddUnit(row, group, factor, padded, importance == nullptr ? nullptr : weights, lanes);
      }
      total += static_cast<double>(lanes.Fold());
    }
    return total;
  }

  HWY_INLINE void AddUnit(RowConstants row, GroupConstants group, VF factor, const unsigned char* elements, const float* importance,
                          ErrorLanes& lanes) const {
    const DF df;
    for (int pair = 0; pair < kPairs; ++pair) {
      VF x_even, x_odd, y_even, y_odd;
      Elements<D>::Load(elements, pair, x_even, x_odd);
      Coder::Code(row, group, x_even, y_even);
      Coder::Code(row, group, x_odd, y_odd);
      VF w_even = hn::Set(df, 1.0f), w_odd = w_even;
      if constexpr (kNorm == scalar::SearchNorm::kWeightedCube) {
        if (importance != nullptr) {
          Elements<scalar::F32>::Load(reinterpret_cast<const unsigned char*>(importance), pair, w_even, w_odd);
          w_even = hn::Mul(w_even, hn::Set(df, search_.importance_factor));
          w_odd = hn::Mul(w_odd, hn::Set(df, search_.importance_factor));
        }
      }
      lanes.Add(pair, ElementErrors<kNorm>(hn::Mul(hn::Sub(y_even, x_even), factor), w_even),
                ElementErrors<kNorm>(hn::Mul(hn::Sub(y_odd, x_odd), factor), w_odd));
    }
  }

  const scalar::IntegerFormat format_;
  const scalar::RangeSearch search_;
  const int64_t group_;
  float shrink_[scalar::kShrinkCandidates];
  // Of the groups of a chunk.
  Candidates candidates_;
  alignas(64) float low_[kSearchGroups];
  alignas(64) float high_[kSearchGroups];
  alignas(64) float scale_[scalar::kShrinkCandidates][kSearchGroups];
  alignas(64) float reciprocal_[scalar::kShrinkCandidates][kSearchGroups] = {};
  alignas(64) float zero_point_[scalar::kShrinkCandidates][kSearchGroups] = {};
};

template <class D, bool kSymmetric, bool kPrecise, scalar::SearchNorm kNorm>
void SearchRows(const IntegerTile& tile, const scalar::RangeSearch& search, scalar::Range* ranges) {
  RowSearch<D, kSymmetric, kPrecise, kNorm> row_search(tile, search);
  for (int64_t row = 0; row < tile.rows; ++row, ranges += tile.columns / tile.group) {
    row_search.Search(tile.elements + row * tile.element_stride, tile.columns, ranges);
  }
}

template <class D, bool kSymmetric, bool kPrecise>
void SearchByNorm(const IntegerTile& tile, const scalar::RangeSearch& search, scalar::Range* ranges) {
  if (search.norm == scalar::SearchNorm::kPower24) {
    return SearchRows<D, kSymmetric, kPrecise, scalar::SearchNorm::kPower24>(tile, search, ranges);
  }
  return SearchRows<D, kSymmetric, kPrecise, scalar::SearchNorm::kWeightedCube>(tile, search, ranges);
}

template <class D>
void SearchFormat(const IntegerTile& tile, const scalar::RangeSearch& search, scalar::Range* ranges) {
  // F32 has no rounding of intermediates: both numerics are one.
  constexpr bool kF32 = std::is_same_v<D, scalar::F32>;
  if (kF32 || tile.format.precise) {
    return tile.format.symmetric ? SearchByNorm<D, true, true>(tile, search, ranges) : SearchByNorm<D, false, true>(tile, search, ranges);
  }
  return tile.format.symmetric ? SearchByNorm<D, true, kF32>(tile, search, ranges) : SearchByNorm<D, false, kF32>(tile, search, ranges);
}

void SearchTile(const IntegerTile& tile, const scalar::RangeSearch& search, scalar::Range* ranges) {
  // Units begin at the groups' beginnings and must not reach into the next one.
  if (tile.group != tile.columns && tile.group % kUnit != 0) return SearchScalar(tile, search, ranges);
  WithFormat(tile.element, [&](auto d) { SearchFormat<decltype(d)>(tile, search, ranges); });
}

#endif  // HWY_TARGET == HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace quern::quant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern::quant {

HWY_EXPORT(SearchTile);

void SearchScalar(const IntegerTile& tile, const scalar::RangeSearch& search, scalar::Range* ranges) {
  const int64_t groups = tile.columns / tile.group;
  WithFormat(tile.element, [&](auto d) {
    for (int64_t row = 0; row < tile.rows; ++row) {
      scalar::SearchPiece<decltype(d)>(tile.format, search, tile.elements + row * tile.element_stride, tile.columns, tile.group,
                                       ranges + row * groups);
    }
  });
}

void Search(const IntegerTile& tile, const scalar::RangeSearch& search, scalar::Range* ranges) {
  if (UsesScalarDefinition()) return SearchScalar(tile, search, ranges);
  HWY_DYNAMIC_DISPATCH(SearchTile)(tile, search, ranges);
}

}  // namespace quern::quant
#endif  // HWY_ONCE
