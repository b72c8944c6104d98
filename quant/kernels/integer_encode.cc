// Encoding of integer tiles: what scalar::EncodePiece defines, in vectors.
//
// A row is worked off in chunks of groups: first the range of every group, then the parameters of many groups at once, then the codes and
// errors. A chunk with anything unusual (a non-finite element, a range that overflows, an extreme scale) goes to the scalar definition.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quant/kernels/integer_encode.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "quant/kernels/integer_groups-inl.h"
#include "quant/kernels/integer_tile.h"
#include "quant/kernels/units-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern::quant {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

scalar::Problem EncodeTile(const IntegerTile& tile, const EncodeOptions& options) { return EncodeScalar(tile, options); }
void ObserveTile(const IntegerTile& tile, scalar::Range* ranges) { ObserveScalar(tile, ranges); }

#else

constexpr int64_t kChunkColumns = 4096;

// Joins the low b bits of 8 bytes.
HWY_INLINE uint64_t JoinCodes(uint64_t codes, int bits) {
  codes = (codes & 0x00FF00FF00FF00FF) | ((codes & 0xFF00FF00FF00FF00) >> (8 - bits));
  codes = (codes & 0x0000FFFF0000FFFF) | ((codes & 0xFFFF0000FFFF0000) >> (16 - 2 * bits));
  return (codes & 0x00000000FFFFFFFF) | ((codes & 0xFFFFFFFF00000000) >> (32 - 4 * bits));
}

// Writes the codes (low 8 bits of each lane) of a unit: `bits` words.
HWY_INLINE void PackUnit(const VU* even, const VU* odd, int bits, unsigned char* packed) {
  const hn::Rebind<uint8_t, DU> d8;
  const hn::Rebind<uint16_t, DU> d16;
  if (bits == 4) {
    for (int pair = 0; pair < kPairs; ++pair) {
      hn::StoreU(hn::TruncateTo(d8, hn::Or(even[pair], hn::ShiftLeft<4>(odd[pair]))), d8, packed + pair * kFloats);
    }
    return;
  }
  alignas(64) uint16_t joined[kUnit / 2];
  for (int pair = 0; pair < kPairs; ++pair) {
    hn::StoreU(hn::TruncateTo(d16, hn::Or(even[pair], hn::ShiftLeft<8>(odd[pair]))), d16, joined + pair * kFloats);
  }
  if (bits == 8) {
    memcpy(packed, joined, sizeof joined);
    return;
  }
  unsigned char words[kUnit + 8];
  for (int block = 0; block < 4; ++block) {
    uint64_t codes;
    memcpy(&codes, joined + 4 * block, sizeof codes);
    codes = JoinCodes(codes, bits);
    memcpy(words + block * bits, &codes, sizeof codes);
  }
  memcpy(packed, words, 4 * bits);
}

template <class D, bool kSymmetric, bool kPrecise>
class RowEncoder {
  using Coder = IntegerCoder<D, kSymmetric, kPrecise>;
  using RowConstants = typename Coder::RowConstants;
  using GroupConstants = typename Coder::GroupConstants;

 public:
  RowEncoder(const IntegerTile& tile, const EncodeOptions& options)
      : format_(tile.format), replace_(options.replace_nonfinite), group_(tile.group) {}

  // Encodes one row; `fixed` is null or the ranges of its groups.
  HWY_INLINE scalar::Problem Encode(const unsigned char* elements, int64_t columns, const scalar::Range* fixed, scalar::RowOutput out,
                                    RowError& error) {
    // One group may be long and end anywhere; several are whole units.
    const int64_t step = group_ == columns ? columns : group_ * HWY_MAX(1, HWY_MIN(int64_t{kChunkGroups}, kChunkColumns / group_));
    const RowConstants row = Coder::ConstantsOfRow(format_);
    RowSums sums;
    sums.Load(error);
    for (int64_t begin = 0; begin < columns; begin += step) {
      const int64_t size = HWY_MIN(step, columns - begin);
      const int groups = static_cast<int>(size / group_);
      const unsigned char* piece = elements + begin * kBytes;
      const bool usual = Prepare(piece, groups, fixed);
      if (usual) {
        WriteParameters(groups, out);
        for (int index = 0; index < groups; ++index) {
          EncodeGroup(row, piece + index * group_ * kBytes, index, out.packed + index * group_ * row.bits / 8, sums);
        }
      } else {
        sums.Store(error);
        scalar::Problem problem = scalar::EncodePiece<D>(format_, piece, size, group_, fixed, replace_, out, error);
        if (problem.kind != scalar::Problem::kNone) {
          problem.column += begin;
          return problem;
        }
        sums.Load(error);
      }
      out.packed += size * row.bits / 8;
      if (fixed != nullptr) fixed += groups;
      if (out.scales != nullptr) out.scales += groups * kBytes;
      if (out.zero_points != nullptr) out.zero_points += groups * (format_.byte_zero_points ? 1 : 4);
      if (out.zero_points_next != nullptr) out.zero_points_next += groups * 4;
    }
    sums.Store(error);
    return {};
  }

 private:
  static constexpr int64_t kBytes = sizeof(typename D::Bits);
  // Computes the parameters of `groups` groups. False when the scalar definition has to take the chunk.
  HWY_NOINLINE bool Prepare(const unsigned char* piece, int groups, const scalar::Range* fixed) {
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
      auto usual = hn::And(hn::Le(high, largest), hn::Ge(low, hn::Neg(largest)));
      if (fixed != nullptr) {
        alignas(64) float highs[kFloats] = {}, lows[kFloats] = {};
        for (int i = 0; i < HWY_MIN(kFloats, groups - index); ++i) {
          highs[i] = fixed[index + i].high;
          lows[i] = fixed[index + i].low;
        }
        high = hn::Load(df, highs);
        low = hn::Load(df, lows);
      }
      const typename Coder::Parameters parameters = Coder::ParametersOf(format_, low, high);
      hn::Store(parameters.scale, df, scale_ + index);
      if constexpr (Coder::kReciprocal) hn::Store(parameters.reciprocal, df, reciprocal_ + index);
      if constexpr (!kSymmetric) hn::Store(parameters.zero_point, df, zero_point_ + index);
      usual = hn::And(usual, parameters.usual);
      if (!hn::AllTrue(df, usual)) return false;
    }
    return true;
  }

  HWY_NOINLINE void WriteParameters(int groups, const scalar::RowOutput& out) const {
    if (out.scales != nullptr) {
      for (int index = 0; index < groups; ++index) {
        const typename D::Bits bits = D::FromFloat(scale_[index]);
        memcpy(out.scales + index * kBytes, &bits, sizeof bits);
      }
    }
    if (kSymmetric || out.zero_points == nullptr) return;
    if (format_.byte_zero_points) {
      for (int index = 0; index < groups; ++index)
        out.zero_points[index] = static_cast<unsigned char>(static_cast<int>(zero_point_[index]));
      return;
    }
    const float offset = static_cast<float>(format_.Offset());
    uint32_t codes[kChunkGroups];
    for (int index = 0; index < groups; ++index) codes[index] = static_cast<uint32_t>(static_cast<int32_t>(zero_point_[index] + offset));
    for (int index = 0; index < groups; ++index) scalar::OrWord(out.zero_points + index * 4, codes[index] << out.zero_point_shift);
    if (out.zero_points_next == nullptr) return;
    for (int index = 0; index < groups; ++index)
      scalar::OrWord(out.zero_points_next + index * 4, codes[index] >> (32 - out.zero_point_shift));
  }

  HWY_INLINE void EncodeGroup(RowConstants row, const unsigned char* elements, int index, unsigned char* packed, RowSums& sums) const {
    const GroupConstants group = Coder::ConstantsOfGroup(row, scale_[index], reciprocal_[index], zero_point_[index]);
    const int64_t units = group_ / kUnit;
    const int64_t rest = group_ % kUnit;
    // Zeros fill up the last unit: they are coded exactly and add nothing to the sums.
    alignas(64) unsigned char padded[kUnit * kBytes];
    alignas(64) unsigned char words[kUnit];
    for (int64_t unit = 0; unit < units + (rest != 0); ++unit) {
      const unsigned char* from = elements + unit * kUnit * kBytes;
      unsigned char* to = packed + unit * 4 * row.bits;
      if (HWY_UNLIKELY(unit == units)) {
        memset(padded, 0, sizeof padded);
        memcpy(padded, from, rest * kBytes);
        from = padded;
        to = words;
      }
      EncodeUnit(row, group, from, to, sums);
    }
    if (rest == 0) return;
    const int64_t end = rest * row.bits;
    if (end % 8 != 0) words[end / 8] &= static_cast<unsigned char>((1 << end % 8) - 1);
    memset(words + (end + 7) / 8, 0, sizeof words - (end + 7) / 8);
    memcpy(packed + units * 4 * row.bits, words, format_.StoredBytes(rest));
  }

  static HWY_INLINE void EncodeUnit(RowConstants row, GroupConstants group, const unsigned char* elements, unsigned char* packed,
                                    RowSums& sums) {
    VU even_codes[kPairs], odd_codes[kPairs];
    for (int pair = 0; pair < kPairs; ++pair) {
      VF x_even, x_odd, y_even, y_odd;
      Elements<D>::Load(elements, pair, x_even, x_odd);
      even_codes[pair] = Coder::Code(row, group, x_even, y_even);
      odd_codes[pair] = Coder::Code(row, group, x_odd, y_odd);
      sums.Add(pair, x_even, y_even, x_odd, y_odd);
    }
    PackUnit(even_codes, odd_codes, row.bits, packed);
  }

  const scalar::IntegerFormat format_;
  const bool replace_;
  const int64_t group_;
  // Of the groups of a chunk.
  Candidates candidates_;
  alignas(64) float scale_[kChunkGroups];
  alignas(64) float reciprocal_[kChunkGroups] = {};
  alignas(64) float zero_point_[kChunkGroups] = {};
};

template <class D, bool kSymmetric, bool kPrecise>
scalar::Problem EncodeRows(const IntegerTile& tile, const EncodeOptions& options) {
  RowEncoder<D, kSymmetric, kPrecise> encoder(tile, options);
  for (int64_t row = 0; row < tile.rows; ++row) {
    scalar::Problem problem = encoder.Encode(tile.elements + row * tile.element_stride, tile.columns, FixedOfRow(options, row),
                                             OutputOfRow(tile, row), options.errors[row]);
    if (problem.kind != scalar::Problem::kNone) {
      problem.row = row;
      return problem;
    }
  }
  return {};
}

template <class D>
scalar::Problem EncodeFormat(const IntegerTile& tile, const EncodeOptions& options) {
  if (tile.format.symmetric) {
    return tile.format.precise ? EncodeRows<D, true, true>(tile, options) : EncodeRows<D, true, false>(tile, options);
  }
  return tile.format.precise ? EncodeRows<D, false, true>(tile, options) : EncodeRows<D, false, false>(tile, options);
}

// F32 has no rounding of intermediates: both numerics are one.
template <>
scalar::Problem EncodeFormat<scalar::F32>(const IntegerTile& tile, const EncodeOptions& options) {
  return tile.format.symmetric ? EncodeRows<scalar::F32, true, true>(tile, options) : EncodeRows<scalar::F32, false, true>(tile, options);
}

scalar::Problem EncodeTile(const IntegerTile& tile, const EncodeOptions& options) {
  // Groups that are not whole units share words of codes.
  if (tile.group != tile.columns && tile.group % kUnit != 0) return EncodeScalar(tile, options);
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
void ObserveRows(const IntegerTile& tile, scalar::Range* ranges) {
  Candidates candidates = {};
  for (int64_t row = 0; row < tile.rows; ++row) {
    const unsigned char* elements = tile.elements + row * tile.element_stride;
    FindCandidates<D>(elements, tile.columns, candidates.high, candidates.low);
    VF high, low;
    RangesOf<D>(candidates, 0, high, low);
    const scalar::Range range = {hn::GetLane(low), hn::GetLane(high)};
    if (range.high <= D::kLargest && range.low >= -D::kLargest) {
      ranges[row].low = HWY_MIN(ranges[row].low, range.low);
      ranges[row].high = HWY_MAX(ranges[row].high, range.high);
    } else {
      for (int64_t i = 0; i < tile.columns; ++i) scalar::Extend<D>(ranges[row], scalar::LoadElement<D>(elements, i));
    }
  }
}

void ObserveTile(const IntegerTile& tile, scalar::Range* ranges) {
  switch (tile.element) {
    case ElementType::kBf16:
      return ObserveRows<scalar::Bf16>(tile, ranges);
    case ElementType::kF16:
      return ObserveRows<scalar::F16>(tile, ranges);
    case ElementType::kF32:
      return ObserveRows<scalar::F32>(tile, ranges);
  }
}

#endif  // HWY_TARGET == HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace quern::quant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern::quant {

HWY_EXPORT(EncodeTile);
HWY_EXPORT(ObserveTile);

scalar::Problem Encode(const IntegerTile& tile, const EncodeOptions& options) {
  if (UsesScalarDefinition()) return EncodeScalar(tile, options);
  return HWY_DYNAMIC_DISPATCH(EncodeTile)(tile, options);
}
void Observe(const IntegerTile& tile, scalar::Range* ranges) {
  if (UsesScalarDefinition()) return ObserveScalar(tile, ranges);
  HWY_DYNAMIC_DISPATCH(ObserveTile)(tile, ranges);
}

}  // namespace quern::quant
#endif  // HWY_ONCE
