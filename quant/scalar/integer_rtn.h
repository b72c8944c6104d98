// Round-to-nearest integer quantization: the definition that every kernel matches bit for bit. Built-in types only, so that nvcc compiles
// the same text; the compiler must not fuse multiplications and additions, nor flush subnormals.
//
// D is the dtype of the weight, r(x) rounds to D (numerics: reference) or does nothing (numerics: precise), D(x) always rounds. Over a
// group, with low = min(0, values), high = max(0, values), b bits, qmin = -2^(b-1), qmax = 2^(b-1) - 1:
//   symmetric:   s = D(max(-low, high) / ((2^b - 1) / 2)), zp = 0
//   asymmetric:  s = D(r(high - low) / (2^b - 1)), zp = round(clamp(r(qmin - r(low / s)), qmin, qmax)), where 0/0 gives 0
//   s == 0 becomes the epsilon of D, after the zero point was computed
//   code:        t = r(x / s), asymmetric t = r(t + zp); q = round(clamp(t, qmin, qmax)), ties to even
//   value:       y = D((q - zp) * s), what compressed-tensors decompresses to
// An asymmetric range that overflows gives no finite scale. It is reported; where the caller goes on, the largest finite value stands for
// it.
#ifndef QUERN_QUANT_SCALAR_INTEGER_RTN_H_
#define QUERN_QUANT_SCALAR_INTEGER_RTN_H_

#include <cstdint>
#include <cstring>

#include "quant/row_error.h"
#include "quant/scalar/float_formats.h"
#include "quant/scalar/pack_bits.h"

namespace quern::quant::scalar {

struct IntegerFormat {
  int bits = 4;
  bool symmetric = true;
  bool precise = false;
  // Codes are stored as I8, one a byte, and not as a stream of bits (`int-quantized`).
  bool byte_codes = false;
  // Zero points are stored as I8 beside each scale, and not as a stream of bits along the rows.
  bool byte_zero_points = false;

  QUERN_HOST_DEVICE float Min() const { return -static_cast<float>(1 << (bits - 1)); }
  QUERN_HOST_DEVICE float Max() const { return static_cast<float>((1 << (bits - 1)) - 1); }
  QUERN_HOST_DEVICE uint32_t Offset() const { return 1u << (bits - 1); }
  // Of a code as it is stored: its bits, what is added to it, and the bytes of so many.
  QUERN_HOST_DEVICE int StoredBits() const { return byte_codes ? 8 : bits; }
  QUERN_HOST_DEVICE uint32_t StoredOffset() const { return byte_codes ? 0 : Offset(); }
  QUERN_HOST_DEVICE int64_t StoredBytes(int64_t codes) const { return byte_codes ? codes : PackedBytes(codes, bits); }
};

// Smallest and largest value of a group, zero included.
struct Range {
  float low = 0;
  float high = 0;
};

struct GroupParameters {
  float scale = 0;  // a value of D
  float zero_point = 0;
  bool overflow = false;
};

// Rounds to an integer, ties to even, for |value| < 2^22.
QUERN_HOST_DEVICE inline float RoundToInteger(float value) { return (value + 0x1.8p23f) - 0x1.8p23f; }

QUERN_HOST_DEVICE inline float Clamp(float value, float low, float high) { return value < low ? low : value > high ? high : value; }

template <class D>
QUERN_HOST_DEVICE inline float RoundIntermediate(float value, bool precise) {
  return precise ? value : D::Round(value);
}

// Non-finite elements count as what ReplaceNonfinite makes of them.
template <class D>
QUERN_HOST_DEVICE inline void Extend(Range& range, typename D::Bits bits) {
  const float value = D::ToFloat(ReplaceNonfinite<D>(bits));
  if (value < range.low) range.low = value;
  if (value > range.high) range.high = value;
}

template <class D>
QUERN_HOST_DEVICE inline GroupParameters ParametersOf(const IntegerFormat& format, const Range& range) {
  GroupParameters parameters;
  const float steps = static_cast<float>((1 << format.bits) - 1);
  if (format.symmetric) {
    const float magnitude = -range.low > range.high ? -range.low : range.high;
    parameters.scale = D::Round(magnitude / (steps / 2));
  } else {
    float width = RoundIntermediate<D>(range.high - range.low, format.precise);
    const float largest = format.precise ? F32::kLargest : D::kLargest;
    if (width > largest) {
      parameters.overflow = true;
      width = largest;
    }
    parameters.scale = D::Round(width / steps);
    const float quotient = RoundIntermediate<D>(range.low / parameters.scale, format.precise);
    const float zero_point = RoundIntermediate<D>(format.Min() - quotient, format.precise);
    const bool is_nan = zero_point != zero_point;
    parameters.zero_point = is_nan ? 0 : RoundToInteger(Clamp(zero_point, format.Min(), format.Max()));
  }
  if (parameters.scale == 0) parameters.scale = D::kEpsilon;
  return parameters;
}

template <class D>
QUERN_HOST_DEVICE inline float Quantize(const IntegerFormat& format, const GroupParameters& parameters, float x) {
  float t = RoundIntermediate<D>(x / parameters.scale, format.precise);
  if (!format.symmetric) t = RoundIntermediate<D>(t + parameters.zero_point, format.precise);
  return RoundToInteger(Clamp(t, format.Min(), format.Max()));
}

template <class D>
QUERN_HOST_DEVICE inline float Dequantize(const GroupParameters& parameters, float code) {
  return D::Round((code - parameters.zero_point) * parameters.scale);
}

// Adds the element at `column` of its row, source x and decoded y, to the row's figures.
QUERN_HOST_DEVICE inline void AddError(RowError& error, int64_t column, float x, float y) {
  const int lane = static_cast<int>(column % RowError::kLanes);
  const double source = x;
  const double difference = source - static_cast<double>(y);
  error.error[lane] += difference * difference;
  error.signal[lane] += source * source;
  const double magnitude = difference < 0 ? -difference : difference;
  if (magnitude > error.max_abs) error.max_abs = magnitude;
}

// What a row could not be encoded for.
struct Problem {
  enum Kind { kNone, kNan, kInf, kOverflow };
  Kind kind = kNone;
  int64_t row = 0;     // of the tile
  int64_t column = 0;  // of the tile: the element, or the first one of a group whose range overflows
};

// Where the codes of a piece of one row go.
struct RowOutput {
  unsigned char* packed = nullptr;            // codes of the piece, from a word's start
  unsigned char* scales = nullptr;            // D, one a group; null: not stored by encoding
  unsigned char* zero_points = nullptr;       // asymmetric: I32, one a group, OR-ed into at `zero_point_shift`, or I8; null as above
  unsigned char* zero_points_next = nullptr;  // the next word row, where the code straddles into it; else null
  int zero_point_shift = 0;
};

QUERN_HOST_DEVICE inline void OrWord(unsigned char* at, uint32_t bits) {
  uint32_t word;
  memcpy(&word, at, sizeof word);
  word |= bits;
  memcpy(at, &word, sizeof word);
}

template <class D>
QUERN_HOST_DEVICE inline typename D::Bits LoadElement(const unsigned char* elements, int64_t index) {
  typename D::Bits bits;
  memcpy(&bits, elements + index * static_cast<int64_t>(sizeof bits), sizeof bits);
  return bits;
}

// Stores the parameters of group `index`.
template <class D>
QUERN_HOST_DEVICE inline void StoreParameters(const IntegerFormat& format, const GroupParameters& parameters, int64_t index,
                                              const RowOutput& out) {
  if (out.scales != nullptr) {
    const typename D::Bits scale = D::FromFloat(parameters.scale);
    memcpy(out.scales + index * static_cast<int64_t>(sizeof scale), &scale, sizeof scale);
  }
  if (format.symmetric || out.zero_points == nullptr) return;
  const int32_t zero_point = static_cast<int32_t>(parameters.zero_point);
  if (format.byte_zero_points) {
    out.zero_points[index] = static_cast<unsigned char>(zero_point);
    return;
  }
  const uint64_t code = static_cast<uint64_t>(static_cast<uint32_t>(zero_point) + format.Offset()) << out.zero_point_shift;
  OrWord(out.zero_points + index * 4, static_cast<uint32_t>(code));
  if (out.zero_points_next != nullptr) OrWord(out.zero_points_next + index * 4, static_cast<uint32_t>(code >> 32));
}

// Encodes `columns` elements of one row, which begin at a multiple of 32 columns, in groups of `group` elements. With `fixed` the range of
// each group is given: of a row or tensor that was observed before, or one that was searched for. `replace` is the policy for non-finite
// elements; without it the first one stops the work and is returned, its column counted from the piece's first, and so is a group whose
// range overflows.
template <class D>
QUERN_HOST_DEVICE inline Problem EncodePiece(const IntegerFormat& format, const unsigned char* elements, int64_t columns, int64_t group,
                                             const Range* fixed, bool replace, const RowOutput& out, RowError& error) {
  using Bits = typename D::Bits;
  BitWriter writer(out.packed, format.bits);
  for (int64_t begin = 0, index = 0; begin < columns; begin += group, ++index) {
    Range range;
    for (int64_t i = begin; i < begin + group; ++i) {
      const Bits bits = LoadElement<D>(elements, i);
      if (!D::IsFinite(bits)) {
        if (!replace) return {D::IsNan(bits) ? Problem::kNan : Problem::kInf, 0, i};
        ++error.nonfinite;
      }
      Extend<D>(range, bits);
    }
    if (fixed != nullptr) range = fixed[index];
    const GroupParameters parameters = ParametersOf<D>(format, range);
    if (parameters.overflow && !replace) return {Problem::kOverflow, 0, begin};
    StoreParameters<D>(format, parameters, index, out);
    for (int64_t i = begin; i < begin + group; ++i) {
      const float x = D::ToFloat(ReplaceNonfinite<D>(LoadElement<D>(elements, i)));
      const float code = Quantize<D>(format, parameters, x);
      if (format.byte_codes) {
        out.packed[i] = static_cast<unsigned char>(static_cast<int32_t>(code));
      } else {
        writer.Put(static_cast<uint32_t>(static_cast<int32_t>(code)) + format.Offset());
      }
      AddError(error, i, x, Dequantize<D>(parameters, code));
    }
  }
  writer.Finish();
  return {};
}

// The stored zero point of a group.
QUERN_HOST_DEVICE inline int32_t ZeroPoint(const IntegerFormat& format, const RowOutput& in, int64_t index) {
  if (format.byte_zero_points) return static_cast<int8_t>(in.zero_points[index]);
  uint32_t words[2] = {};
  memcpy(&words[0], in.zero_points + index * 4, sizeof words[0]);
  if (in.zero_points_next != nullptr) memcpy(&words[1], in.zero_points_next + index * 4, sizeof words[1]);
  const uint32_t code = static_cast<uint32_t>((uint64_t{words[1]} << 32 | words[0]) >> in.zero_point_shift) & ((1u << format.bits) - 1);
  return static_cast<int32_t>(code) - static_cast<int32_t>(format.Offset());
}

// The code of element `index` of a piece.
QUERN_HOST_DEVICE inline int32_t Code(const IntegerFormat& format, const unsigned char* packed, int64_t index) {
  if (format.byte_codes) return static_cast<int8_t>(packed[index]);
  return static_cast<int32_t>(UnpackCode(packed, index, format.bits)) - static_cast<int32_t>(format.Offset());
}

// The inverse: writes `columns` decoded elements. Reads what EncodePiece writes.
template <class D>
QUERN_HOST_DEVICE inline void DecodePiece(const IntegerFormat& format, const RowOutput& in, int64_t columns, int64_t group,
                                          unsigned char* elements) {
  using Bits = typename D::Bits;
  for (int64_t begin = 0, index = 0; begin < columns; begin += group, ++index) {
    GroupParameters parameters;
    parameters.scale = D::ToFloat(LoadElement<D>(in.scales, index));
    if (!format.symmetric) parameters.zero_point = static_cast<float>(ZeroPoint(format, in, index));
    for (int64_t i = begin; i < begin + group; ++i) {
      const Bits bits = D::FromFloat(Dequantize<D>(parameters, static_cast<float>(Code(format, in.packed, i))));
      memcpy(elements + i * static_cast<int64_t>(sizeof bits), &bits, sizeof bits);
    }
  }
}

// Adds the errors of `columns` elements that begin at a multiple of 16 columns of their row. Non-finite sources are measured as their
// replacement and counted.
template <class D>
QUERN_HOST_DEVICE inline void AddErrorsOfPiece(const unsigned char* source, const unsigned char* decoded, int64_t columns,
                                               RowError& error) {
  for (int64_t i = 0; i < columns; ++i) {
    const typename D::Bits bits = LoadElement<D>(source, i);
    if (!D::IsFinite(bits)) ++error.nonfinite;
    AddError(error, i, D::ToFloat(ReplaceNonfinite<D>(bits)), D::ToFloat(LoadElement<D>(decoded, i)));
  }
}

}  // namespace quern::quant::scalar

#endif  // QUERN_QUANT_SCALAR_INTEGER_RTN_H_
