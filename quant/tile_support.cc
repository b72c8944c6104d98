#include "quant/tile_support.h"

#include <algorithm>

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

absl::Status CheckErrors(const Tile& tile, size_t errors) {
  if (static_cast<int64_t>(errors) == tile.rows()) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(errors, " row errors for a tile of ", tile.rows(), " rows"));
}

absl::Status WholeRowsStatus(const SchemeSpec& spec, DType dtype, int64_t columns) {
  const bool block = spec.strategy == Strategy::kBlock;
  const int64_t bytes = (block ? spec.group_size : 1) * columns * BytesPerElement(dtype);
  return absl::ResourceExhaustedError(absl::StrCat(
      "scheme \"", spec.ToString(), "\" searches over whole ", block ? "blocks: " : "rows: ", block ? spec.group_size : 1,
      block ? " rows" : " row", " of ", columns, " columns take ", bytes,
      " bytes, more than a tile of this memory budget; allow more memory, or choose ", block ? "the observer minmax" : "groups"));
}

absl::Status ProblemStatus(const scalar::Problem& problem, const Tile& tile, int64_t group, bool whole_weight) {
  const int64_t row = tile.row_begin + problem.row;
  const int64_t column = tile.col_begin + problem.column;
  switch (problem.kind) {
    case scalar::Problem::kNone:
      return absl::OkStatus();
    case scalar::Problem::kNan:
    case scalar::Problem::kInf:
      return absl::InvalidArgumentError(
          absl::StrCat("the element at row ", row, ", column ", column, " is ", problem.kind == scalar::Problem::kNan ? "NaN" : "infinite",
                       "; repair the weight, or the scale that it is decoded with (what quantizes can replace it: nonfinite: clamp in the "
                       "recipe)"));
    case scalar::Problem::kOverflow:
      break;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      whole_weight ? std::string("the whole weight") : absl::StrCat("row ", row, ", columns ", column, " to ", column + group - 1),
      ": the difference of the largest and the smallest value overflows ", DTypeName(tile.dtype),
      ", so that the scale is not finite; use a symmetric scheme, or nonfinite: clamp"));
}

absl::Status CheckFiniteErrors(const SchemeSpec& spec, const Tile& tile, absl::Span<const RowError> errors) {
  for (size_t i = 0; i < errors.size(); ++i) {
    // Also false of NaN, which the difference of two infinities gives.
    if (errors[i].max_abs <= static_cast<double>(scalar::F32::kLargest)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("row ", tile.row_begin + static_cast<int64_t>(i), ": under scheme \"", spec.ToString(),
                     "\" an element so near the largest value of ", DTypeName(tile.dtype),
                     " is rounded beyond it and would decode to infinity; ignore this module, or convert the checkpoint to a dtype "
                     "with a larger range"));
  }
  return absl::OkStatus();
}

namespace {

// The power of two that brings the largest importance to at least 1 and below 2; 0 where all are 0.
absl::StatusOr<float> ImportanceFactor(absl::Span<const float> importance, int64_t columns) {
  if (static_cast<int64_t>(importance.size()) < columns) {
    return absl::InvalidArgumentError(
        absl::StrCat("the importance has ", importance.size(), " values for a weight of at least ", columns, " columns"));
  }
  float largest = 0;
  for (size_t i = 0; i < importance.size(); ++i) {
    if (!(importance[i] >= 0 && importance[i] <= scalar::F32::kLargest)) {
      return absl::InvalidArgumentError(
          absl::StrCat("the importance of column ", i, " is ", importance[i], "; each is a mean of squares, finite and not negative"));
    }
    largest = std::max(largest, importance[i]);
  }
  return largest == 0 ? 0.0f : scalar::DifferenceFactor(largest);
}

}  // namespace

absl::StatusOr<scalar::RangeSearch> SearchOf(Observer observer, const Tile& tile, const ModuleInputs& inputs) {
  scalar::RangeSearch search;
  if (observer == Observer::kSweep) search.norm = scalar::SearchNorm::kSquare;
  if (observer != Observer::kImportance) return search;
  search.norm = scalar::SearchNorm::kWeightedCube;
  QUERN_ASSIGN_OR_RETURN(const float factor, ImportanceFactor(inputs.importance, tile.col_end));
  if (factor == 0) return search;
  search.importance = inputs.importance.data() + tile.col_begin;
  search.importance_factor = factor;
  return search;
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
