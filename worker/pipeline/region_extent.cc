#include "worker/pipeline/region_extent.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace quern::worker {
namespace {

// Elements of one weight, so that no product of dimensions with sizes or strides overflows.
constexpr int64_t kMostElements = int64_t{1} << 56;

}  // namespace

absl::StatusOr<std::vector<RegionExtent>> RegionExtent::For(const quant::Scheme& scheme, DType dtype, quant::Shape2D shape) {
  if (shape.rows < 0 || shape.cols < 0 || __int128{shape.rows} * shape.cols > kMostElements || shape.rows > kMostElements ||
      shape.cols > kMostElements) {
    return absl::InvalidArgumentError(absl::StrCat("a weight of ", shape.rows, " x ", shape.cols, " elements is too large"));
  }
  QUERN_RETURN_IF_ERROR(scheme.CheckWeight(dtype, shape));
  QUERN_ASSIGN_OR_RETURN(std::vector<quant::Region> regions, scheme.Regions(dtype, shape));
  // How a region's row grows with the weight's columns shows in the regions of narrower weights.
  const int64_t multiple = scheme.ColumnMultiple();
  QUERN_ASSIGN_OR_RETURN(const std::vector<quant::Region> one, scheme.Regions(dtype, {shape.rows, multiple}));
  QUERN_ASSIGN_OR_RETURN(const std::vector<quant::Region> two, scheme.Regions(dtype, {shape.rows, 2 * multiple}));
  if (regions.empty() || one.size() != regions.size() || two.size() != regions.size()) {
    return absl::InternalError(absl::StrCat("scheme \"", scheme.spec().ToString(), "\" stores nothing, or not always the same tensors"));
  }
  std::vector<RegionExtent> extents;
  for (size_t i = 0; i < regions.size(); ++i) {
    RegionExtent extent;
    extent.region_ = std::move(regions[i]);
    extent.columns_ = shape.cols;
    extent.column_multiple_ = multiple;
    extent.bytes_per_multiple_ = two[i].bytes_per_row - one[i].bytes_per_row;
    if (extent.constant()) {
      extent.size_ = extent.region_.constant.size();
    } else if (extent.computed()) {
      extent.size_ = static_cast<uint64_t>(BitsPerElement(extent.region_.dtype) / 8);
      for (const uint64_t dimension : extent.region_.shape) extent.size_ *= dimension;
    } else {
      extent.size_ = static_cast<uint64_t>(extent.Rows(0, shape.rows).end * extent.region_.bytes_per_row);
    }
    extents.push_back(std::move(extent));
  }
  return extents;
}

Run RegionExtent::Rows(int64_t begin, int64_t end) const {
  return {begin * region_.row_numerator / region_.row_denominator,
          (end * region_.row_numerator + region_.row_denominator - 1) / region_.row_denominator};
}

Run RegionExtent::Columns(int64_t begin, int64_t end) const {
  if (bytes_per_multiple_ == 0) return {0, region_.bytes_per_row};
  return {begin / column_multiple_ * bytes_per_multiple_,
          end >= columns_ ? region_.bytes_per_row : end / column_multiple_ * bytes_per_multiple_};
}

}  // namespace quern::worker
