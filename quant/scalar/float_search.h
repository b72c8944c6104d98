// Observers that search for the scales of floats: the definition that every kernel matches bit for bit. Built-in types only, so that nvcc
// compiles the same text.
//
// NVFP4, for each block of 16 at a fixed global scale: every E4M3 code from that of 1.8 times the block's largest magnitude A down to that
// of 0.8 A (MSE) or 0.05 A (importance), the codes by float_rtn.h of r(1.8 A), r(0.8 A), r(0.05 A); or all 126 positive codes, ascending
// (sweep). A code that underflows to 0 is what float_rtn.h makes of it. The first code with the least error is taken: a later one must be
// strictly below. A block of zeros keeps the code of float_rtn.h.
//
// FP8 with one scale a row or a block of 128 x 128: candidates as of integers (integer_search.h), the largest magnitude of the row or block
// shrunk by p. The error of a block is the sum of those of its rows, in order.
//
// The global scale of NVFP4 under MSE, compressed-tensors: it decides which scales blocks can have, so it is searched for too. Of a sample
// of the set's blocks (block_sample.h; all of them, where they are few) the one with the least estimated error is taken, each block with
// its best scale. Candidates are 2688 / A' for A' from 1.8 down to 0.8 times the largest magnitude of the set, in even steps, more of them
// the fewer blocks there are; of very few blocks also every one that nvfp4_expanded_mse could come to.
#ifndef QUERN_QUANT_SCALAR_FLOAT_SEARCH_H_
#define QUERN_QUANT_SCALAR_FLOAT_SEARCH_H_

#include <cstdint>

#include "quant/scalar/float_rtn.h"
#include "quant/scalar/integer_search.h"
#include "quant/scalar/search_error.h"

namespace quern::quant::scalar {

constexpr int kE4m3Codes = 127;  // positive and zero, without NaN

// The candidates of a block: from `first` by `step` to `last`.
struct CodeRange {
  int first = 0, last = 0, step = -1;
};

// The code of a scale for the largest magnitude `amax`, as float_rtn.h, but 0 where it underflows.
template <class D>
QUERN_HOST_DEVICE inline int ScaleCode(const FloatFormat& format, float set_scale, float amax) {
  if (format.scaling == FloatScaling::kModelOptNvfp4) {
    const float scale = amax / (E2m1::kLargest * set_scale);
    return E4m3::FromFloat(scale < 0x1p-9f ? 0x1p-9f : scale);
  }
  return E4m3::FromFloat(set_scale * RoundIntermediate<D>(amax / E2m1::kLargest, format.precise));
}

template <class D>
QUERN_HOST_DEVICE inline CodeRange CandidateCodes(const FloatFormat& format, SearchNorm norm, float set_scale, float amax) {
  if (norm == SearchNorm::kSquare) return {1, kE4m3Codes - 1, 1};
  const float highest = RoundIntermediate<D>(amax * 1.8f, format.precise);
  const float lowest = RoundIntermediate<D>(amax * (norm == SearchNorm::kPower24 ? 0.8f : 0.05f), format.precise);
  return {ScaleCode<D>(format, set_scale, highest), ScaleCode<D>(format, set_scale, lowest), -1};
}

// How blocks are coded with each code as their scale.
struct ScaleTable {
  FloatScale scales[kE4m3Codes];
  uint8_t bytes[kE4m3Codes];  // as stored

  QUERN_HOST_DEVICE ScaleTable(const FloatFormat& format, float set_scale) {
    for (int code = 0; code < kE4m3Codes; ++code) {
      bytes[code] = static_cast<uint8_t>(code != 0 ? code : format.scaling == FloatScaling::kNvfp4 ? 0x20 : 0x01);
      scales[code] = ScaleOf(format, set_scale, bytes[code]);
    }
  }
};

// What an element adds to the error of a scale.
template <class D>
struct FloatError {
  const FloatFormat& format;
  const RangeSearch& search;
  const FloatScale& scale;
  const unsigned char* elements;
  int64_t begin;  // of the group in the piece
  float factor;

  QUERN_HOST_DEVICE float operator()(int64_t i) const {
    const float x = D::ToFloat(ReplaceNonfinite<D>(LoadElement<D>(elements, begin + i)));
    const uint8_t code = QuantizeFloat<D>(format, scale, x);
    // ModelOpt compares products as they are.
    const float y = format.scaling == FloatScaling::kModelOptNvfp4 ? DecodedFloat(format, scale, code)
                                                                   : D::ToFloat(DequantizeFloat<D>(format, scale, code));
    return ElementError(search.norm, (y - x) * factor, search.Weight(begin + i));
  }
};

// The best code of a block, and its error.
struct BestCode {
  int code = -1;  // none was better than infinite
  double error = 0;
};

template <class D>
QUERN_HOST_DEVICE inline BestCode SearchBlock(const FloatFormat& format, const RangeSearch& search, const ScaleTable& table,
                                              const CodeRange& codes, float factor, const unsigned char* elements, int64_t begin,
                                              int64_t group) {
  BestCode best;
  double least = static_cast<double>(FloatOf(0x7F800000));
  for (int code = codes.first; codes.step < 0 ? code >= codes.last : code <= codes.last; code += codes.step) {
    const double error = SumErrors(group, FloatError<D>{format, search, table.scales[code], elements, begin, factor});
    if (error < least) {
      least = error;
      best = {code, error};
    }
  }
  return best;
}

template <class D>
QUERN_HOST_DEVICE inline float AmaxOfBlock(const unsigned char* elements, int64_t begin, int64_t group) {
  float amax = 0;
  for (int64_t i = begin; i < begin + group; ++i) amax = ExtendAmax<D>(amax, LoadElement<D>(elements, i));
  return amax;
}

// Writes the scale bytes of the blocks of a piece of one row.
template <class D>
QUERN_HOST_DEVICE inline void WriteSearchedScales(const FloatFormat& format, const RangeSearch& search, const ScaleTable& table,
                                                  const unsigned char* elements, int64_t columns, int64_t group, const FloatRow& row) {
  for (int64_t begin = 0, index = 0; begin < columns; begin += group, ++index) {
    const float amax = AmaxOfBlock<D>(elements, begin, group);
    row.scales[index] = ScaleByte<D>(format, row.set_scale, amax);
    if (amax == 0) continue;
    const CodeRange codes = CandidateCodes<D>(format, search.norm, row.set_scale, amax);
    const BestCode best = SearchBlock<D>(format, search, table, codes, DifferenceFactor(amax), elements, begin, group);
    if (best.code >= 0) row.scales[index] = table.bytes[best.code];
  }
}

// The errors of `count` scales for a whole row of `columns` elements.
template <class D>
QUERN_HOST_DEVICE inline void ErrorsOfScales(const FloatFormat& format, const RangeSearch& search, const FloatScale* scales, int count,
                                             float factor, const unsigned char* elements, int64_t columns, double* errors) {
  for (int i = 0; i < count; ++i) errors[i] = SumErrors(columns, FloatError<D>{format, search, scales[i], elements, 0, factor});
}

// The global scale.

// 2^(2.4 e): what an error that was scaled by 2^-e is worth.
QUERN_HOST_DEVICE inline double PowerOf24OfTwo(int exponent) {
  // 12 e / 5, by its whole and its fractional part.
  const int fifths = exponent * 12;
  const int whole = fifths >= 0 ? fifths / 5 : -((4 - fifths) / 5);
  constexpr double kFraction[5] = {1, 0x1.2611186bae675p+0, 0x1.51cb453b9536cp+0, 0x1.8406003b2ae5cp+0, 0x1.bdb8cdadbe120p+0};
  const uint64_t bits = static_cast<uint64_t>(whole + 1023) << 52;
  double power;
  memcpy(&power, &bits, sizeof power);
  return power * kFraction[fifths - 5 * whole];
}

// What a scaled error in a block with the largest magnitude `amax` is worth: the differences were scaled by DifferenceFactor(amax).
QUERN_HOST_DEVICE inline double BlockWeight(float amax) {
  return PowerOf24OfTwo(127 - static_cast<int>(BitsOf(DifferenceFactor(amax)) >> 23));
}

// 64 mixed bits of a block's place in its weight.
QUERN_HOST_DEVICE inline uint64_t BlockHash(int64_t row, int64_t block) {
  uint64_t z = (static_cast<uint64_t>(row) << 32 ^ static_cast<uint64_t>(block)) * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return z ^ z >> 31;
}

// Blocks with the highest priorities are sampled. Divided by a number in (0, 1] that the place decides, a weight of w is above p with
// probability min(1, w / p): this makes sums over the sample unbiased when each block counts max(w, p), p the highest priority left out.
QUERN_HOST_DEVICE inline double BlockPriority(double weight, uint64_t hash) {
  return weight / (static_cast<double>((hash >> 11) + 1) * 0x1p-53);
}

// What the observer `nvfp4_expanded_mse` shrinks a block's largest magnitude to at its step `step` of 111.
constexpr int kExpandedSteps = 111;
template <class D>
QUERN_HOST_DEVICE inline float ExpandedAmax(float amax, int step, bool precise) {
  const float highest = RoundIntermediate<D>(amax * 1.8f, precise);
  return RoundIntermediate<D>(highest * static_cast<float>(1 - step / 200.0), precise);
}

// Candidate `index` of `count` for the global scale; it may be 0 or infinite, and then is none.
QUERN_HOST_DEVICE inline float CandidateGlobalScale(float amax, int index, int count) {
  const float largest = amax * (1.8f - static_cast<float>(index) / static_cast<float>(count));
  return E4m3::kLargest * E2m1::kLargest / largest;
}

// The least error of each block, scaled, at the global scale that `table` was made for; infinite where no code has any. `amax` has the
// largest magnitudes of the blocks, none 0.
template <class D>
QUERN_HOST_DEVICE inline void LeastErrors(const FloatFormat& format, float set_scale, const ScaleTable& table,
                                          const unsigned char* elements, int64_t blocks, const float* amax, float* errors) {
  const RangeSearch search;
  for (int64_t block = 0; block < blocks; ++block) {
    const CodeRange codes = CandidateCodes<D>(format, search.norm, set_scale, amax[block]);
    const BestCode best = SearchBlock<D>(format, search, table, codes, DifferenceFactor(amax[block]), elements, block * 16, 16);
    errors[block] = best.code >= 0 ? static_cast<float>(best.error) : FloatOf(0x7F800000);
  }
}

}  // namespace quern::quant::scalar

#endif  // QUERN_QUANT_SCALAR_FLOAT_SEARCH_H_
