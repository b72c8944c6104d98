// What the schemes of this room share between tiles as the pipeline gives them and the kernels.
#ifndef QUERN_QUANT_TILE_SUPPORT_H_
#define QUERN_QUANT_TILE_SUPPORT_H_

#include <cstddef>
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

// INTERNAL unless there is one accumulator a row of the tile.
absl::Status CheckErrors(const Tile& tile, size_t errors);

// Byte `byte` of region row `row`.
inline unsigned char* AddressIn(const RegionBuffer& buffer, int64_t row, int64_t byte) {
  return reinterpret_cast<unsigned char*>(buffer.data) + (row - buffer.first_row) * buffer.row_stride + (byte - buffer.first_byte);
}

// What an observer minimizes over a tile. INVALID_ARGUMENT for an importance with negative or non-finite values, or too few of them. Where
// all of it is 0, all columns count alike.
absl::StatusOr<scalar::RangeSearch> SearchOf(Observer observer, const Tile& tile, const ModuleInputs& inputs);

// RESOURCE_EXHAUSTED: a search for the scale of a row or block needs the whole row or all rows of the block, of so many columns.
absl::Status WholeRowsStatus(const SchemeSpec& spec, DType dtype, int64_t columns);

// INVALID_ARGUMENT naming the element of the weight, or OK for kNone. `group` is the number of columns of a group whose range overflows;
// `whole_weight`: the range is that of the whole weight.
absl::Status ProblemStatus(const scalar::Problem& problem, const Tile& tile, int64_t group, bool whole_weight = false);

// INVALID_ARGUMENT where an element of the tile decodes to a value that is not finite: one near the largest of its dtype, rounded up.
absl::Status CheckFiniteErrors(const SchemeSpec& spec, const Tile& tile, absl::Span<const RowError> errors);

// The tile as the kernels of elements take it: no regions.
absl::StatusOr<IntegerTile> ElementsOf(const Tile& tile);

}  // namespace quern::quant

#endif  // QUERN_QUANT_TILE_SUPPORT_H_
