// Encoding of integer tiles: what scalar::EncodePiece defines, in vectors.
//
// A row is worked off in chunks of groups: first the range of every group, then the parameters of many groups at once, then the codes and
// errors. A chunk with anything unusual (a non-finite element, a range that overflows, an extreme scale) goes to the scalar definition.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quant/kernels/integer_encode.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "quant/kernels/integer_tile.h"
#include "quant/kernels/units-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern::quant {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

scalar::Problem EncodeTile(const IntegerTile& tile, const EncodeOptions& options) { return EncodeScalar(tile, options); }
void ObserveTile(const IntegerTile& tile, scalar::Range* ranges) { ObserveScalar(tile, ranges); }

#else

constexpr int kChunkGroups = 64;
constexpr int64_t kChunkColumns = 4096;

// The largest and the smallest element of a piece and zero, as bits moved to the top of 32. Elements order as integers: the positive ones
// as signed, the negative ones, by magnitude, as unsigned. Inf and NaN are beyond all finite values.
struct TopRange {
  uint32_t high, low;
};

template <class D>
HWY_INLINE TopRange RangeOf(const unsigned char* elements, int64_t columns) {
  using Lane = typename Elements<D>::Lane;
  using Bits = typename D::Bits;
  constexpr int kShift = 32 - 8 * static_cast<int>(sizeof(Bits));
  const hn::CappedTag<Lane, 64 / sizeof(Lane)> di;
  const hn::RebindToUnsigned<decltype(di)> du;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(di));
  auto high = hn::Zero(di);
  auto low = hn::Zero(du);
  const Lane* at = reinterpret_cast<const Lane*>(elements);
  int64_t i = 0;
  for (; i + lanes <= columns; i += lanes) {
    const auto lane = hn::LoadU(di, at + i);
    high = hn::Max(high, lane);
    low = hn::Max(low, hn::BitCast(du, lane));
  }
  Lane largest = hn::GetLane(hn::MaxOfLanes(di, high));
  Bits smallest = hn::GetLane(hn::MaxOfLanes(du, low));
  for (; i < columns; ++i) {
    const Bits bits = scalar::LoadElement<D>(elements, i);
    if (static_cast<Lane>(bits) > largest) largest = static_cast<Lane>(bits);
    if (bits > smallest) smallest = bits;
  }
  if (static_cast<Lane>(smallest) > 0) smallest = 0;  // none is negative
  return {uint32_t{static_cast<Bits>(largest)} << kShift, uint32_t{smallest} << kShift};
}

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
 public:
  RowEncoder(const IntegerTile& tile, const EncodeOptions& options)
      : format_(tile.format), replace_(options.replace_nonfinite), group_(tile.group) {}

  // Encodes one row; `fixed` is null or the range of its only group.
  HWY_INLINE scalar::Problem Encode(const unsigned char* elements, int64_t columns, const scalar::Range* fixed, scalar::RowOutput out,
                                    RowError& error) {
    // One group may be long and end anywhere; several are whole units.
    const int64_t step = group_ == columns ? columns : group_ * HWY_MAX(1, HWY_MIN(int64_t{kChunkGroups}, kChunkColumns / group_));
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
          EncodeGroup(piece + index * group_ * kBytes, index, out.packed + index * group_ * format_.bits / 8, sums);
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
      out.packed += size * format_.bits / 8;
      out.scales += groups * kBytes;
      if (!kSymmetric) {
        out.zero_points += groups * 4;
        if (out.zero_points_next != nullptr) out.zero_points_next += groups * 4;
      }
    }
    sums.Store(error);
    return {};
  }

 private:
  static constexpr int64_t kBytes = sizeof(typename D::Bits);
  // For BF16 values x and s, x * (1/s) rounds to the same BF16 value as x / s, as long as nothing is near the ends of the exponents.
  static constexpr bool kReciprocal = std::is_same_v<D, scalar::Bf16> && !kPrecise;

  static HWY_INLINE VF Round(VF value) { return kPrecise ? value : Elements<D>::Round(value); }

  // Computes the parameters of `groups` groups. False when the scalar definition has to take the chunk.
  HWY_INLINE bool Prepare(const unsigned char* piece, int groups, const scalar::Range* fixed) {
    for (int index = 0; index < groups; ++index) {
      const TopRange range = RangeOf<D>(piece + index * group_ * kBytes, group_);
      high_[index] = range.high;
      low_[index] = range.low;
    }
    const DF df;
    const VF zero = hn::Zero(df);
    const VF steps = hn::Set(df, static_cast<float>((1 << format_.bits) - 1));
    const VF half_steps = hn::Set(df, static_cast<float>((1 << format_.bits) - 1) / 2);
    const VF minimum = hn::Set(df, format_.Min());
    const VF maximum = hn::Set(df, format_.Max());
    const VF largest = hn::Set(df, D::kLargest);
    const VF magic = hn::Set(df, 0x1.8p23f);
    for (int index = 0; index < groups; index += kFloats) {
      const auto lanes = hn::FirstN(df, static_cast<size_t>(groups - index));
      const VF top_high = Elements<D>::FromTop(hn::Load(DU(), high_ + index));
      const VF top_low = Elements<D>::FromTop(hn::Load(DU(), low_ + index));
      VF high = hn::IfThenElseZero(lanes, top_high);
      VF low = hn::IfThenElseZero(lanes, top_low);
      auto usual = hn::And(hn::Le(high, largest), hn::Ge(low, hn::Neg(largest)));
      if (fixed != nullptr) {
        high = hn::Set(df, fixed->high);
        low = hn::Set(df, fixed->low);
      }
      VF scale, zero_point = zero;
      if constexpr (kSymmetric) {
        scale = Elements<D>::Round(hn::Div(hn::Max(hn::Neg(low), high), half_steps));
      } else {
        const VF width = Round(hn::Sub(high, low));
        usual = hn::And(usual, hn::Le(width, hn::Set(df, kPrecise ? scalar::F32::kLargest : D::kLargest)));
        scale = Elements<D>::Round(hn::Div(width, steps));
        zero_point = Round(hn::Sub(minimum, Round(hn::Div(low, scale))));
        zero_point = hn::IfThenElseZero(hn::Eq(zero_point, zero_point), zero_point);  // NaN, of 0/0, becomes 0
        zero_point = hn::Min(hn::Max(zero_point, minimum), maximum);
        zero_point = hn::Sub(hn::Add(zero_point, magic), magic);
        hn::Store(zero_point, df, zero_point_ + index);
      }
      scale = hn::IfThenElse(hn::Eq(scale, zero), hn::Set(df, D::kEpsilon), scale);
      hn::Store(scale, df, scale_ + index);
      if constexpr (kReciprocal) {
        usual = hn::And(usual, hn::And(hn::Ge(scale, hn::Set(df, 0x1p-100f)), hn::Le(scale, hn::Set(df, 0x1p100f))));
        hn::Store(hn::Div(hn::Set(df, 1.0f), scale), df, reciprocal_ + index);
      }
      if (!hn::AllTrue(df, usual)) return false;
    }
    return true;
  }

  HWY_INLINE void WriteParameters(int groups, const scalar::RowOutput& out) const {
    for (int index = 0; index < groups; ++index) {
      const typename D::Bits bits = D::FromFloat(scale_[index]);
      memcpy(out.scales + index * kBytes, &bits, sizeof bits);
    }
    if (kSymmetric) return;
    const float offset = static_cast<float>(format_.Offset());
    uint32_t codes[kChunkGroups];
    for (int index = 0; index < groups; ++index) codes[index] = static_cast<uint32_t>(static_cast<int32_t>(zero_point_[index] + offset));
    for (int index = 0; index < groups; ++index) scalar::OrWord(out.zero_points + index * 4, codes[index] << out.zero_point_shift);
    if (out.zero_points_next == nullptr) return;
    for (int index = 0; index < groups; ++index)
      scalar::OrWord(out.zero_points_next + index * 4, codes[index] >> (32 - out.zero_point_shift));
  }

  HWY_INLINE void EncodeGroup(const unsigned char* elements, int index, unsigned char* packed, RowSums& sums) const {
    const int64_t units = group_ / kUnit;
    for (int64_t unit = 0; unit < units; ++unit) {
      EncodeUnit(elements + unit * kUnit * kBytes, index, packed + unit * 4 * format_.bits, sums);
    }
    const int64_t rest = group_ % kUnit;
    if (rest == 0) return;
    // Zeros fill up the last unit: they are coded exactly and add nothing to the sums.
    alignas(64) unsigned char padded[kUnit * kBytes] = {};
    alignas(64) unsigned char words[kUnit] = {};
    memcpy(padded, elements + units * kUnit * kBytes, rest * kBytes);
    EncodeUnit(padded, index, words, sums);
    const int64_t end = rest * format_.bits;
    if (end % 8 != 0) words[end / 8] &= static_cast<unsigned char>((1 << end % 8) - 1);
    memset(words + (end + 7) / 8, 0, sizeof words - (end + 7) / 8);
    memcpy(packed + units * 4 * format_.bits, words, scalar::PackedBytes(rest, format_.bits));
  }

  HWY_INLINE void EncodeUnit(const unsigned char* elements, int index, unsigned char* packed, RowSums& sums) const {
    VU even_codes[kPairs], odd_codes[kPairs];
    for (int pair = 0; pair < kPairs; ++pair) {
      VF x_even, x_odd, y_even, y_odd;
      Elements<D>::Load(elements, pair, x_even, x_odd);
      even_codes[pair] = Code(x_even, index, y_even);
      odd_codes[pair] = Code(x_odd, index, y_odd);
      sums.Add(pair, x_even, y_even, x_odd, y_odd);
    }
    PackUnit(even_codes, odd_codes, format_.bits, packed);
  }

  // The unsigned codes of x, and the values y that they stand for.
  HWY_INLINE VU Code(VF x, int index, VF& y) const {
    const DF df;
    const VF scale = hn::Set(df, scale_[index]);
    VF t = Round(kReciprocal ? hn::Mul(x, hn::Set(df, reciprocal_[index])) : hn::Div(x, scale));
    if constexpr (!kSymmetric) t = Round(hn::Add(t, hn::Set(df, zero_point_[index])));
    t = hn::Min(hn::Max(t, hn::Set(df, format_.Min())), hn::Set(df, format_.Max()));
    // Adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves it in the low bits; the code's offset is even and comes along.
    const float magic = 0x1.8p23f + static_cast<float>(format_.Offset());
    const VF shifted = hn::Add(t, hn::Set(df, magic));
    const VF origin = hn::Set(df, kSymmetric ? magic : magic + zero_point_[index]);
    y = Elements<D>::Round(hn::Mul(hn::Sub(shifted, origin), scale));
    return hn::And(hn::BitCast(DU(), shifted), hn::Set(DU(), 0xFFu));
  }

  const scalar::IntegerFormat format_;
  const bool replace_;
  const int64_t group_;
  // Of the groups of a chunk.
  alignas(64) uint32_t high_[kChunkGroups];
  alignas(64) uint32_t low_[kChunkGroups];
  alignas(64) float scale_[kChunkGroups];
  alignas(64) float reciprocal_[kChunkGroups];
  alignas(64) float zero_point_[kChunkGroups];
};

template <class D, bool kSymmetric, bool kPrecise>
scalar::Problem EncodeRows(const IntegerTile& tile, const EncodeOptions& options) {
  RowEncoder<D, kSymmetric, kPrecise> encoder(tile, options);
  for (int64_t row = 0; row < tile.rows; ++row) {
    scalar::Problem problem =
        encoder.Encode(tile.elements + row * tile.element_stride, tile.columns, options.fixed == nullptr ? nullptr : options.fixed + row,
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
  for (int64_t row = 0; row < tile.rows; ++row) {
    const unsigned char* elements = tile.elements + row * tile.element_stride;
    const TopRange range = RangeOf<D>(elements, tile.columns);
    constexpr int kShift = 32 - 8 * static_cast<int>(sizeof(typename D::Bits));
    const typename D::Bits high = static_cast<typename D::Bits>(range.high >> kShift);
    const typename D::Bits low = static_cast<typename D::Bits>(range.low >> kShift);
    if (D::IsFinite(high) && D::IsFinite(low)) {
      scalar::Extend<D>(ranges[row], high);
      scalar::Extend<D>(ranges[row], low);
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

scalar::Problem Encode(const IntegerTile& tile, const EncodeOptions& options) { return HWY_DYNAMIC_DISPATCH(EncodeTile)(tile, options); }
void Observe(const IntegerTile& tile, scalar::Range* ranges) { HWY_DYNAMIC_DISPATCH(ObserveTile)(tile, ranges); }

}  // namespace quern::quant
#endif  // HWY_ONCE
