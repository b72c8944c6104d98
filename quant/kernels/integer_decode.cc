// Decoding of integer tiles and the errors between two tiles: what scalar::DecodePiece and scalar::AddError define, in vectors.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quant/kernels/integer_decode.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "quant/kernels/integer_tile.h"
#include "quant/kernels/units-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quern::quant {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

void DecodeTile(const IntegerTile& tile, unsigned char* elements, int64_t stride) { DecodeScalar(tile, elements, stride); }
void AddTileErrors(const IntegerTile& tile, const unsigned char* decoded, int64_t stride, RowError* errors) {
  AddErrorsScalar(tile, decoded, stride, errors);
}
std::string NameOfTarget() { return hwy::TargetName(HWY_TARGET); }

#else

// Spreads 8 codes of b bits to bytes: the inverse of joining them.
HWY_INLINE uint64_t SpreadCodes(uint64_t codes, int bits) {
  const uint64_t four = (uint64_t{1} << 4 * bits) - 1;
  codes = (codes & four) | (codes & four << 4 * bits) << (32 - 4 * bits);
  const uint64_t two = ((uint64_t{1} << 2 * bits) - 1) * 0x0000000100000001;
  codes = (codes & two) | (codes & two << 2 * bits) << (16 - 2 * bits);
  const uint64_t one = ((uint64_t{1} << bits) - 1) * 0x0001000100010001;
  return (codes & one) | (codes & one << bits) << (8 - bits);
}

// Codes of a unit as F32, without the offset taken off; signed codes of 8 bits get one of 128 by flipping their signs.
HWY_INLINE void UnpackUnit(const unsigned char* packed, int bits, uint64_t flip, VF* even, VF* odd) {
  const hn::Rebind<uint16_t, DU> d16;
  alignas(64) uint16_t joined[kUnit / 2];
  for (int block = 0; block < 4; ++block) {
    uint64_t codes = 0;
    memcpy(&codes, packed + block * bits, bits);
    codes = SpreadCodes(codes, bits) ^ flip;
    memcpy(joined + 4 * block, &codes, sizeof codes);
  }
  for (int pair = 0; pair < kPairs; ++pair) {
    const VU both = hn::PromoteTo(DU(), hn::Load(d16, joined + pair * kFloats));
    even[pair] = hn::ConvertTo(DF(), hn::BitCast(DI(), hn::And(both, hn::Set(DU(), 0xFFu))));
    odd[pair] = hn::ConvertTo(DF(), hn::BitCast(DI(), hn::ShiftRight<8>(both)));
  }
}

template <class D>
HWY_INLINE void DecodeUnit(const unsigned char* packed, int bits, uint64_t flip, float origin, float scale, unsigned char* elements) {
  VF even[kPairs], odd[kPairs];
  UnpackUnit(packed, bits, flip, even, odd);
  const VF origins = hn::Set(DF(), origin);
  const VF scales = hn::Set(DF(), scale);
  for (int pair = 0; pair < kPairs; ++pair) {
    Elements<D>::Store(Elements<D>::Round(hn::Mul(hn::Sub(even[pair], origins), scales)),
                       Elements<D>::Round(hn::Mul(hn::Sub(odd[pair], origins), scales)), elements, pair);
  }
}

template <class D>
void DecodeRows(const IntegerTile& tile, unsigned char* elements, int64_t stride) {
  constexpr int64_t kBytes = sizeof(typename D::Bits);
  const scalar::IntegerFormat& format = tile.format;
  const int bits = format.StoredBits();
  const uint64_t flip = format.byte_codes ? 0x8080808080808080 : 0;
  const int64_t units = tile.group / kUnit;
  const int64_t rest = tile.group % kUnit;
  for (int64_t row = 0; row < tile.rows; ++row) {
    const scalar::RowOutput in = OutputOfRow(tile, row);
    for (int64_t index = 0; index < tile.columns / tile.group; ++index) {
      const float scale = D::ToFloat(scalar::LoadElement<D>(in.scales, index));
      const float zero_point = format.symmetric ? 0 : static_cast<float>(scalar::ZeroPoint(format, in, index));
      const float origin = zero_point + (format.byte_codes ? 128.0f : static_cast<float>(format.Offset()));
      const unsigned char* packed = in.packed + index * tile.group * bits / 8;
      unsigned char* out = elements + row * stride + index * tile.group * kBytes;
      if (!D::IsFinite(scalar::LoadElement<D>(in.scales, index))) {
        for (int64_t i = 0; i < tile.group; ++i) {
          const typename D::Bits value = D::FromFloat((static_cast<float>(scalar::Code(format, packed, i)) - zero_point) * scale);
          memcpy(out + i * kBytes, &value, sizeof value);
        }
        continue;
      }
      for (int64_t unit = 0; unit < units; ++unit) {
        DecodeUnit<D>(packed + unit * 4 * bits, bits, flip, origin, scale, out + unit * kUnit * kBytes);
      }
      if (rest == 0) continue;
      alignas(64) unsigned char words[kUnit] = {};
      alignas(64) unsigned char padded[kUnit * kBytes];
      memcpy(words, packed + units * 4 * bits, format.StoredBytes(rest));
      DecodeUnit<D>(words, bits, flip, origin, scale, padded);
      memcpy(out + units * kUnit * kBytes, padded, rest * kBytes);
    }
  }
}

void DecodeTile(const IntegerTile& tile, unsigned char* elements, int64_t stride) {
  // Groups that are not whole units share words of codes.
  if (tile.group != tile.columns && tile.group % kUnit != 0) return DecodeScalar(tile, elements, stride);
  switch (tile.element) {
    case ElementType::kBf16:
      return DecodeRows<scalar::Bf16>(tile, elements, stride);
    case ElementType::kF16:
      return DecodeRows<scalar::F16>(tile, elements, stride);
    case ElementType::kF32:
      return DecodeRows<scalar::F32>(tile, elements, stride);
  }
}

template <class D>
HWY_INLINE void AddUnit(const unsigned char* source, const unsigned char* decoded, RowSums& sums) {
  for (int pair = 0; pair < kPairs; ++pair) {
    VF x_even, x_odd, y_even, y_odd;
    Elements<D>::Load(source, pair, x_even, x_odd);
    Elements<D>::Load(decoded, pair, y_even, y_odd);
    sums.Add(pair, x_even, y_even, x_odd, y_odd);
  }
}

template <class D>
void AddRowErrors(const IntegerTile& tile, const unsigned char* decoded, int64_t stride, RowError* errors) {
  constexpr int64_t kBytes = sizeof(typename D::Bits);
  for (int64_t row = 0; row < tile.rows; ++row) {
    const unsigned char* source = tile.elements + row * tile.element_stride;
    const unsigned char* values = decoded + row * stride;
    RowSums sums;
    sums.Load(errors[row]);
    for (int64_t begin = 0; begin < tile.columns; begin += kUnit) {
      const int64_t size = HWY_MIN(int64_t{kUnit}, tile.columns - begin);
      // Zeros fill up the last unit and add nothing.
      alignas(64) unsigned char padded[2][kUnit * kBytes];
      const unsigned char* x = source + begin * kBytes;
      const unsigned char* y = values + begin * kBytes;
      if (size < kUnit) {
        memset(padded, 0, sizeof padded);
        memcpy(padded[0], x, size * kBytes);
        memcpy(padded[1], y, size * kBytes);
        x = padded[0];
        y = padded[1];
      }
      if (UnitIsFinite<D>(x) && UnitIsFinite<D>(y)) {
        AddUnit<D>(x, y, sums);
        continue;
      }
      sums.Store(errors[row]);
      scalar::AddErrorsOfPiece<D>(x, y, size, errors[row]);
      sums.Load(errors[row]);
    }
    sums.Store(errors[row]);
  }
}

void AddTileErrors(const IntegerTile& tile, const unsigned char* decoded, int64_t stride, RowError* errors) {
  switch (tile.element) {
    case ElementType::kBf16:
      return AddRowErrors<scalar::Bf16>(tile, decoded, stride, errors);
    case ElementType::kF16:
      return AddRowErrors<scalar::F16>(tile, decoded, stride, errors);
    case ElementType::kF32:
      return AddRowErrors<scalar::F32>(tile, decoded, stride, errors);
  }
}

std::string NameOfTarget() { return hwy::TargetName(HWY_TARGET); }

#endif  // HWY_TARGET == HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace quern::quant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quern::quant {

HWY_EXPORT(DecodeTile);
HWY_EXPORT(AddTileErrors);
HWY_EXPORT(NameOfTarget);

void Decode(const IntegerTile& tile, unsigned char* elements, int64_t element_stride) {
  if (UsesScalarDefinition()) return DecodeScalar(tile, elements, element_stride);
  HWY_DYNAMIC_DISPATCH(DecodeTile)(tile, elements, element_stride);
}
void AddErrors(const IntegerTile& tile, const unsigned char* decoded, int64_t decoded_stride, RowError* errors) {
  if (UsesScalarDefinition()) return AddErrorsScalar(tile, decoded, decoded_stride, errors);
  HWY_DYNAMIC_DISPATCH(AddTileErrors)(tile, decoded, decoded_stride, errors);
}
std::string ActiveTarget() { return HWY_DYNAMIC_DISPATCH(NameOfTarget)(); }

}  // namespace quern::quant
#endif  // HWY_ONCE
