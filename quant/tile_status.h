// What schemes of all kinds say about tiles.
#ifndef QUERN_QUANT_TILE_STATUS_H_
#define QUERN_QUANT_TILE_STATUS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "quant/scalar/integer_rtn.h"
#include "quant/scheme.h"

namespace quern::quant {

// INTERNAL when the tile is empty or does not begin at the multiples: bands at `row_multiple` rows, any tile at `column_multiple` columns.
absl::Status CheckTile(const Tile& tile, int64_t row_multiple, int64_t column_multiple);

// INVALID_ARGUMENT naming the element of the weight, or OK for kNone. `group` is the number of columns of a group whose range overflows.
absl::Status ProblemStatus(const scalar::Problem& problem, const Tile& tile, int64_t group);

}  // namespace quern::quant

#endif  // QUERN_QUANT_TILE_STATUS_H_
