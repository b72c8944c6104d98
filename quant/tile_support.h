// What the schemes of this room share between tiles as the pipeline gives them and the kernels.
#ifndef QUERN_QUANT_TILE_SUPPORT_H_
#define QUERN_QUANT_TILE_SUPPORT_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quant/kernels/integer_tile.h"
#include "quant/scheme.h"

namespace quern::quant {

// INVALID_ARGUMENT for a dtype that is no weight's.
absl::StatusOr<ElementType> ElementTypeOf(DType dtype);

// INVALID_ARGUMENT for a dtype that is no weight's, or a shape without elements.
absl::Status CheckPlainWeight(DType dtype, Shape2D shape);

// INTERNAL unless the tile is a band or a segment at a place where one may begin.
absl::Status CheckTile(const Tile& tile, int64_t row_multiple, int64_t column_multiple);

// Byte `byte` of region row `row`.
inline unsigned char* AddressIn(const RegionBuffer& buffer, int64_t row, int64_t byte) {
  return reinterpret_cast<unsigned char*>(buffer.data) + (row - buffer.first_row) * buffer.row_stride + (byte - buffer.first_byte);
}

// The error for an element that is NaN or infinite, at a place of the whole weight.
absl::Status NonfiniteStatus(bool is_nan, int64_t row, int64_t column);

// The power of two that brings the largest importance of a weight's columns to at least 1 and below 2; 0 where all are 0, so that all
// columns count alike. INVALID_ARGUMENT for values that are negative or not finite, and for less than `columns` of them.
absl::StatusOr<float> ImportanceFactor(absl::Span<const float> importance, int64_t columns);

// INVALID_ARGUMENT naming the element of the weight, or OK for kNone. `group` is the number of columns of a group whose range overflows;
// `whole_weight`: the range is that of the whole weight.
absl::Status ProblemStatus(const scalar::Problem& problem, const Tile& tile, int64_t group, bool whole_weight = false);

// The tile as the kernels of elements take it: no regions.
absl::StatusOr<IntegerTile> ElementsOf(const Tile& tile);

}  // namespace quern::quant

#endif  // QUERN_QUANT_TILE_SUPPORT_H_
