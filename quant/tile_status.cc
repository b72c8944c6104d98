#include "quant/tile_status.h"

#include "absl/strings/str_cat.h"

namespace quern::quant {

absl::Status CheckTile(const Tile& tile, int64_t row_multiple, int64_t column_multiple) {
  if (tile.rows() < 1 || tile.cols() < 1 || tile.row_begin < 0 || tile.col_begin < 0 || tile.col_begin % column_multiple != 0 ||
      (tile.rows() > 1 && tile.row_begin % row_multiple != 0)) {
    return absl::InternalError(absl::StrCat("no valid tile: rows ", tile.row_begin, " to ", tile.row_end, ", columns ", tile.col_begin,
                                            " to ", tile.col_end, ", multiples ", row_multiple, " and ", column_multiple));
  }
  return absl::OkStatus();
}

absl::Status ProblemStatus(const scalar::Problem& problem, const Tile& tile, int64_t group) {
  const int64_t row = tile.row_begin + problem.row;
  const int64_t column = tile.col_begin + problem.column;
  switch (problem.kind) {
    case scalar::Problem::kNone:
      return absl::OkStatus();
    case scalar::Problem::kNan:
    case scalar::Problem::kInf:
      return absl::InvalidArgumentError(absl::StrCat("the element at row ", row, ", column ", column, " is ",
                                                     problem.kind == scalar::Problem::kNan ? "NaN" : "infinite",
                                                     "; repair the weight, or replace such elements with nonfinite: clamp"));
    case scalar::Problem::kOverflow:
      break;
  }
  return absl::InvalidArgumentError(absl::StrCat("row ", row, ", columns ", column, " to ", column + group - 1,
                                                 ": the difference of the largest and the smallest value overflows ", DTypeName(tile.dtype),
                                                 ", so that the scale is not finite; use a symmetric scheme, or nonfinite: clamp"));
}

}  // namespace quern::quant
