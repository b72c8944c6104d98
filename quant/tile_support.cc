#include "quant/tile_support.h"

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace quern::quant {

absl::StatusOr<ElementType> ElementTypeOf(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return ElementType::kBf16;
    case DType::kF16:
      return ElementType::kF16;
    case DType::kF32:
      return ElementType::kF32;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("weights of dtype ", DTypeName(dtype), " cannot be quantized, only BF16, F16 and F32"));
  }
}

absl::Status CheckPlainWeight(DType dtype, Shape2D shape) {
  QUERN_RETURN_IF_ERROR(ElementTypeOf(dtype).status());
  if (shape.rows < 1 || shape.cols < 1) {
    return absl::InvalidArgumentError(absl::StrCat("a weight of shape [", shape.rows, ", ", shape.cols, "] has no elements"));
  }
  return absl::OkStatus();
}

absl::Status CheckTile(const Tile& tile, int64_t row_multiple, int64_t column_multiple) {
  if (tile.rows() < 1 || tile.cols() < 1 || tile.row_begin < 0 || tile.col_begin < 0 || tile.col_begin % column_multiple != 0 ||
      (tile.rows() > 1 && tile.row_begin % row_multiple != 0)) {
    return absl::InternalError(absl::StrCat("no valid tile: rows ", tile.row_begin, " to ", tile.row_end, ", columns ", tile.col_begin,
                                            " to ", tile.col_end, ", row multiple ", row_multiple, ", column multiple ", column_multiple));
  }
  return absl::OkStatus();
}

absl::Status NonfiniteStatus(bool is_nan, int64_t row, int64_t column) {
  return absl::InvalidArgumentError(absl::StrCat("the element at row ", row, ", column ", column, " is ", is_nan ? "NaN" : "infinite",
                                                 "; repair the weight, or replace such elements with nonfinite: clamp"));
}

absl::StatusOr<IntegerTile> ElementsOf(const Tile& tile) {
  IntegerTile work;
  QUERN_ASSIGN_OR_RETURN(work.element, ElementTypeOf(tile.dtype));
  work.rows = tile.rows();
  work.columns = tile.cols();
  work.elements = reinterpret_cast<const unsigned char*>(tile.data);
  work.element_stride = tile.row_stride;
  return work;
}

}  // namespace quern::quant
