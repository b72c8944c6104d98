// Observers that search for the scales of floats: the definition that every kernel matches bit for bit. Built-in types only, so that nvcc
// compiles the same text.
//
// NVFP4, for each block of 16 at a fixed global scale: every E4M3 code from that of 1.8 times the block's largest magnitude A down to that
// of 0.8 A (MSE) or 0.05 A (importance), the codes by float_rtn.h of r(1.8 A), r(0.8 A), r(0.05 A); or all 126 positive codes, ascending
// (sweep). A code that underflows to 0 is what float_rtn.h makes of it. The first code with the least error is taken: a later one must be
// strictly below. A block of zeros keeps the code of float_rtn.h.
//
// FP8 with one scale a row: candidates as of integers (integer_search.h), the largest magnitude of the row shrunk by p.
//
// The global scale of NVFP4 under MSE, compressed-tensors: it decides which scales blocks can have, so it is searched for too. Of 16
// significands m = 1, 1 + 1/16, ..., 1 + 15/16 the one with the least sum over all blocks is taken, each block with its best scale
// s / (m 2^k), s of E4M3, where no exponent is out of reach; then the largest power of two that leaves the largest scale taken at 448 or
// below.
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
    const float y = D::ToFloat(DequantizeFloat<D>(format, scale, QuantizeFloat<D>(format, scale, x)));
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

constexpr int kSignificands = 16;

QUERN_HOST_DEVICE inline float Significand(int index) { return 1.0f + static_cast<float>(index) * 0x1p-4f; }

// The power of two that brings the scale of a block, A / 6, to at least 16 and below 32, the middle of E4M3.
QUERN_HOST_DEVICE inline float MiddleFactor(float local) { return DifferenceFactor(local) * 16; }

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

// A sum that does not depend on the order of its terms: each one, cut to 28 bits, is added to the integer of its exponent.
class ExactSum {
 public:
  QUERN_HOST_DEVICE void Add(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    const int exponent = static_cast<int>(bits >> 52) - 1023 - kLowest;
    if (exponent < 0) return;  // what is not counted: below 2^-400
    const int bin = exponent / 4 < kBins ? exponent / 4 : kBins - 1;
    bins_[bin] += ((bits & 0xFFFFFFFFFFFFF) | 0x10000000000000) >> 25 << exponent % 4;
  }
  QUERN_HOST_DEVICE void Add(const ExactSum& other) {
    for (int bin = 0; bin < kBins; ++bin) bins_[bin] += other.bins_[bin];
  }
  QUERN_HOST_DEVICE double Total() const {
    double total = 0;
    for (int bin = 0; bin < kBins; ++bin) {
      const uint64_t bits = static_cast<uint64_t>(1023 + kLowest + 4 * bin - 27) << 52;
      double unit;
      memcpy(&unit, &bits, sizeof unit);
      total += static_cast<double>(bins_[bin]) * unit;
    }
    return total;
  }

 private:
  static constexpr int kLowest = -400;
  static constexpr int kBins = 192;
  uint64_t bins_[kBins] = {};
};

struct GlobalScaleSums {
  ExactSum errors[kSignificands];
  float largest[kSignificands] = {};  // scale of a block times the significand

  QUERN_HOST_DEVICE void Add(int significand, int exponent, double error, float scale) {
    errors[significand].Add(error * PowerOf24OfTwo(exponent));
    if (scale > largest[significand]) largest[significand] = scale;
  }
  QUERN_HOST_DEVICE void Add(const GlobalScaleSums& other) {
    for (int i = 0; i < kSignificands; ++i) {
      errors[i].Add(other.errors[i]);
      if (other.largest[i] > largest[i]) largest[i] = other.largest[i];
    }
  }
  // The scale with the least sum of errors; 0 where no block was counted.
  QUERN_HOST_DEVICE float Best() const {
    int best = 0;
    double least = errors[0].Total();
    for (int i = 1; i < kSignificands; ++i) {
      const double total = errors[i].Total();
      if (total < least) {
        least = total;
        best = i;
      }
    }
    if (largest[best] == 0) return 0;
    float power = DifferenceFactor(largest[best]) * 0x1p8f;
    if (power > 0x1p126f) power = 0x1p126f;
    if (largest[best] * power > E4m3::kLargest) power /= 2;
    return Significand(best) * power;
  }
};

QUERN_HOST_DEVICE inline int ExponentOf(float value) { return static_cast<int>(BitsOf(value) >> 23 & 0xFF) - 127; }

// Adds the blocks of a piece of one row. A block whose scale is 0 or subnormal is not counted.
template <class D>
QUERN_HOST_DEVICE inline void ObserveGlobalScale(const FloatFormat& format, const unsigned char* elements, int64_t columns, int64_t group,
                                                 GlobalScaleSums& sums) {
  const RangeSearch search;
  for (int64_t begin = 0; begin < columns; begin += group) {
    const float amax = AmaxOfBlock<D>(elements, begin, group);
    const float local = RoundIntermediate<D>(amax / E2m1::kLargest, format.precise);
    if (local < 0x1p-126f) continue;
    const float middle = MiddleFactor(local);
    for (int i = 0; i < kSignificands; ++i) {
      const float set_scale = Significand(i) * middle;
      const ScaleTable table(format, set_scale);
      const CodeRange codes = CandidateCodes<D>(format, search.norm, set_scale, amax);
      const BestCode best = SearchBlock<D>(format, search, table, codes, DifferenceFactor(amax), elements, begin, group);
      if (best.code > 0) sums.Add(i, ExponentOf(amax), best.error, E4m3::ToFloat(static_cast<uint8_t>(best.code)) / middle);
    }
  }
}

}  // namespace quern::quant::scalar

#endif  // QUERN_QUANT_SCALAR_FLOAT_SEARCH_H_
