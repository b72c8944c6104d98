// Observers that search for the range of a group: the definition that every kernel matches bit for bit. Built-in types only, so that nvcc
// compiles the same text.
//
// Candidate i of 20 shrinks both ends of a group's range by p: low' = r(low * p), high' = r(high * p), with p = 1 - i/100 (MSE) or 1 - i/20
// (importance), and r as in integer_rtn.h. Every candidate is evaluated for every group; the first one with the least error is taken: a
// later one must be strictly below. An error that is NaN is never taken, and without any other the range stays as it is.
#ifndef QUERN_QUANT_SCALAR_INTEGER_SEARCH_H_
#define QUERN_QUANT_SCALAR_INTEGER_SEARCH_H_

#include <cstdint>

#include "quant/scalar/integer_rtn.h"
#include "quant/scalar/search_error.h"

namespace quern::quant::scalar {

constexpr int kShrinkCandidates = 20;

struct RangeSearch {
  SearchNorm norm = SearchNorm::kPower24;
  // kWeightedCube: one a column of the piece, not negative, and the power of two that brings the largest one of the weight below 2; null:
  // all columns count alike.
  const float* importance = nullptr;
  float importance_factor = 1;

  QUERN_HOST_DEVICE float Shrink(int candidate) const {
    return static_cast<float>(1 - candidate / (norm == SearchNorm::kPower24 ? 100.0 : 20.0));
  }
  QUERN_HOST_DEVICE float Weight(int64_t column) const { return importance == nullptr ? 1.0f : importance[column] * importance_factor; }
};

template <class D>
QUERN_HOST_DEVICE inline Range Shrunk(const IntegerFormat& format, const Range& range, float p) {
  return {RoundIntermediate<D>(range.low * p, format.precise), RoundIntermediate<D>(range.high * p, format.precise)};
}

// What an element of a group adds to the error of a candidate.
template <class D>
struct CandidateError {
  const IntegerFormat& format;
  const RangeSearch& search;
  const GroupParameters& parameters;
  const unsigned char* elements;
  int64_t begin;  // of the group in the piece
  float factor;

  QUERN_HOST_DEVICE float operator()(int64_t i) const {
    const float x = D::ToFloat(ReplaceNonfinite<D>(LoadElement<D>(elements, begin + i)));
    const float y = Dequantize<D>(parameters, Quantize<D>(format, parameters, x));
    return ElementError(search.norm, (y - x) * factor, search.Weight(begin + i));
  }
};

// Finds the ranges of the groups of a piece of one row.
template <class D>
QUERN_HOST_DEVICE inline void SearchPiece(const IntegerFormat& format, const RangeSearch& search, const unsigned char* elements,
                                          int64_t columns, int64_t group, Range* ranges) {
  for (int64_t begin = 0, index = 0; begin < columns; begin += group, ++index) {
    Range range;
    for (int64_t i = begin; i < begin + group; ++i) Extend<D>(range, LoadElement<D>(elements, i));
    const float factor = DifferenceFactor(ParametersOf<D>(format, range).scale);
    double least = static_cast<double>(FloatOf(0x7F800000));
    float best = 1;
    for (int candidate = 0; candidate < kShrinkCandidates; ++candidate) {
      const float p = search.Shrink(candidate);
      const GroupParameters parameters = ParametersOf<D>(format, Shrunk<D>(format, range, p));
      const double error = SumErrors(group, CandidateError<D>{format, search, parameters, elements, begin, factor});
      if (error < least) {
        least = error;
        best = p;
      }
    }
    ranges[index] = Shrunk<D>(format, range, best);
  }
}

}  // namespace quern::quant::scalar

#endif  // QUERN_QUANT_SCALAR_INTEGER_SEARCH_H_
