// A tile of work for the integer kernels, with the addresses resolved: what the scalar definition and every faster kernel take.
#ifndef QUERN_QUANT_KERNELS_INTEGER_TILE_H_
#define QUERN_QUANT_KERNELS_INTEGER_TILE_H_

#include <cstdint>
#include <string>

#include "quant/kernels/scalar_definition.h"
#include "quant/row_error.h"
#include "quant/scalar/integer_rtn.h"
#include "quant/scalar/integer_search.h"
#include "quant/scalar/pack_bits.h"

namespace quern::quant {

enum class ElementType { kBf16, kF16, kF32 };

// Calls `function` with the format type of the elements.
template <class Function>
auto WithFormat(ElementType element, Function function) {
  switch (element) {
    case ElementType::kBf16:
      return function(scalar::Bf16());
    case ElementType::kF16:
      return function(scalar::F16());
    case ElementType::kF32:
      break;
  }
  return function(scalar::F32());
}

struct IntegerTile {
  scalar::IntegerFormat format;
  ElementType element = ElementType::kBf16;
  int64_t rows = 0, columns = 0;
  int64_t group = 0;      // columns of a group; divides `columns`, equal to it where a row of the tile has one scale
  int64_t first_row = 0;  // of the weight: where zero points stand in their words

  const unsigned char* elements = nullptr;  // row r at elements + r * element_stride
  int64_t element_stride = 0;

  unsigned char* packed = nullptr;  // row r at packed + r * packed_stride, and so on
  int64_t packed_stride = 0;
  unsigned char* scales = nullptr;  // null where encoding does not store them: those of a whole tensor
  int64_t scale_stride = 0;
  unsigned char* zero_points = nullptr;  // asymmetric only; packed ones: the word row that holds first_row; null like `scales`
  int64_t zero_point_stride = 0;
};

// Encoding has these besides.
struct EncodeOptions {
  // The ranges of the groups of row r from fixed + r * fixed_stride, where they do not come from the tile alone: a row or tensor that was
  // observed before, or ranges that were searched for.
  const scalar::Range* fixed = nullptr;
  int64_t fixed_stride = 1;
  bool replace_nonfinite = false;
  RowError* errors = nullptr;  // one a row of the tile
};

inline scalar::RowOutput OutputOfRow(const IntegerTile& tile, int64_t row) {
  scalar::RowOutput out;
  out.packed = tile.packed + row * tile.packed_stride;
  if (tile.scales != nullptr) out.scales = tile.scales + row * tile.scale_stride;
  if (tile.zero_points == nullptr) return out;
  if (tile.format.byte_zero_points) {
    out.zero_points = tile.zero_points + row * tile.zero_point_stride;
  } else {
    const scalar::ColumnPosition first = scalar::PositionInColumn(tile.first_row, tile.format.bits);
    const scalar::ColumnPosition position = scalar::PositionInColumn(tile.first_row + row, tile.format.bits);
    out.zero_points = tile.zero_points + (position.word - first.word) * tile.zero_point_stride;
    out.zero_points_next = position.straddles ? out.zero_points + tile.zero_point_stride : nullptr;
    out.zero_point_shift = position.shift;
  }
  return out;
}

inline const scalar::Range* FixedOfRow(const EncodeOptions& options, int64_t row) {
  return options.fixed == nullptr ? nullptr : options.fixed + row * options.fixed_stride;
}

// The definition, row by row.
scalar::Problem EncodeScalar(const IntegerTile& tile, const EncodeOptions& options);
void DecodeScalar(const IntegerTile& tile, unsigned char* elements, int64_t element_stride);
// Extends ranges[r] by row r of the tile.
void ObserveScalar(const IntegerTile& tile, scalar::Range* ranges);
// Adds the errors of `decoded`, laid out like the tile's elements with its own stride, to errors[r]. Non-finite source elements are
// measured as their replacement and counted.
void AddErrorsScalar(const IntegerTile& tile, const unsigned char* decoded, int64_t decoded_stride, RowError* errors);

// Finds the ranges of all groups, row after row: whole groups, of whole rows where a row has one scale. Regions are not used.
void SearchScalar(const IntegerTile& tile, const scalar::RangeSearch& search, scalar::Range* ranges);

// The same, by the kernels of the best SIMD target of this machine: equal bit for bit.
scalar::Problem Encode(const IntegerTile& tile, const EncodeOptions& options);
void Decode(const IntegerTile& tile, unsigned char* elements, int64_t element_stride);
void Observe(const IntegerTile& tile, scalar::Range* ranges);
void Search(const IntegerTile& tile, const scalar::RangeSearch& search, scalar::Range* ranges);
void AddErrors(const IntegerTile& tile, const unsigned char* decoded, int64_t decoded_stride, RowError* errors);

// The target they run on.
std::string ActiveTarget();

}  // namespace quern::quant

#endif  // QUERN_QUANT_KERNELS_INTEGER_TILE_H_
