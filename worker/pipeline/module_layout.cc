#include "worker/pipeline/module_layout.h"

#include <string.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "worker/pipeline/run_task.h"

namespace quern::worker {

std::string WeightView::What() const { return absl::StrCat("tensor ", tensor, " of ", file->path); }

absl::StatusOr<WeightView> WeightView::For(const quern::v1::TensorView& view, const std::vector<SourceHandle>& files) {
  const std::string what = absl::StrCat("tensor ", view.tensor());
  if (view.file() >= files.size()) return absl::InvalidArgumentError(absl::StrCat(what, ": the task has no source file ", view.file()));
  WeightView checked;
  checked.file = &files[view.file()];
  checked.tensor = view.tensor();
  QUERN_ASSIGN_OR_RETURN(checked.dtype, ParseDType(view.dtype()));
  if (BitsPerElement(checked.dtype) % 8 != 0)
    return absl::InvalidArgumentError(absl::StrCat(what, ": ", view.dtype(), " has no byte size"));
  checked.element_size = BytesPerElement(checked.dtype);
  checked.offset = view.offset();
  checked.row_stride = view.row_stride();
  if (view.decode_size() > 0) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": weights that are decoded with ", view.decode(0).role(), " are not supported"));
  }
  // Dimensions of a file are below 2^62 bytes, so that products with strides fit.
  const uint64_t limit = checked.file->size;
  if (view.rows() > limit || view.cols() > limit) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": ", view.rows(), " x ", view.cols(), " elements in a file of ", limit, " bytes"));
  }
  checked.shape = {static_cast<int64_t>(view.rows()), static_cast<int64_t>(view.cols())};
  if (checked.shape.rows == 0 || checked.shape.cols == 0) return checked;
  if (view.col_stride() != checked.element_size) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": columns ", view.col_stride(), " bytes apart are not supported, only contiguous rows"));
  }
  __int128 end = __int128{view.rows() - 1} * view.row_stride() + __int128{view.cols()} * checked.element_size;
  if (view.row_stride() < static_cast<int64_t>(view.cols()) * checked.element_size || end + view.offset() > limit) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": the view leads out of ", checked.file->path, " or overlaps itself"));
  }
  return checked;
}

quant::Tile TileIn(const WeightView& view, std::byte* buffer, int64_t row_begin, int64_t row_end, int64_t col_begin, int64_t col_end) {
  const uint64_t offset = view.OffsetOf(row_begin, col_begin);
  std::byte* data = buffer + offset % kIoBlock;
  if (const uint64_t shift = offset % view.element_size; shift != 0) {
    memmove(data - shift, data, view.SpanBytes(row_end - row_begin, col_end - col_begin));
    data -= shift;
  }
  return quant::Tile{view.dtype, row_begin, row_end, col_begin, col_end, data, view.row_stride};
}

Run RegionPlace::Rows(int64_t begin, int64_t end) const {
  return {begin * region_.row_numerator / region_.row_denominator,
          (end * region_.row_numerator + region_.row_denominator - 1) / region_.row_denominator};
}

Run RegionPlace::Columns(int64_t begin, int64_t end) const {
  if (bytes_per_multiple_ == 0) return {0, region_.bytes_per_row};
  return {begin / column_multiple_ * bytes_per_multiple_,
          end >= columns_ ? region_.bytes_per_row : end / column_multiple_ * bytes_per_multiple_};
}

absl::StatusOr<ModuleLayout> ModuleLayout::For(const quern::v1::QuantizeUnit& unit, DType dtype, quant::Shape2D shape) {
  ModuleLayout layout;
  const std::string what = absl::StrCat("module ", unit.module());
  QUERN_ASSIGN_OR_RETURN(const quant::SchemeSpec spec, quant::SchemeSpec::Parse(unit.scheme()));
  QUERN_ASSIGN_OR_RETURN(layout.scheme_, quant::Scheme::For(spec));
  const quant::Scheme& scheme = *layout.scheme_;
  if (absl::Status status = scheme.CheckWeight(dtype, shape); !status.ok()) return Annotate(status, what);
  if (unit.nonfinite() == "clamp") {
    layout.nonfinite_ = quant::NonfinitePolicy::kClamp;
  } else if (unit.nonfinite() != "fail" && !unit.nonfinite().empty()) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": unknown policy \"", unit.nonfinite(), "\" for NaN and Inf"));
  }
  QUERN_ASSIGN_OR_RETURN(std::vector<quant::Region> regions, scheme.Regions(dtype, shape));
  // How a region's row grows with the weight's columns shows in the regions of narrower weights.
  const int64_t multiple = scheme.ColumnMultiple();
  QUERN_ASSIGN_OR_RETURN(const std::vector<quant::Region> one, scheme.Regions(dtype, {shape.rows, multiple}));
  QUERN_ASSIGN_OR_RETURN(const std::vector<quant::Region> two, scheme.Regions(dtype, {shape.rows, 2 * multiple}));
  if (static_cast<size_t>(unit.outputs_size()) != regions.size() || one.size() != regions.size() || two.size() != regions.size()) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": the plan has ", unit.outputs_size(), " tensors, the scheme ", regions.size()));
  }
  for (size_t i = 0; i < regions.size(); ++i) {
    RegionPlace place;
    place.region_ = std::move(regions[i]);
    place.offset_ = unit.outputs(static_cast<int>(i)).offset();
    place.size_ = unit.outputs(static_cast<int>(i)).size();
    place.columns_ = shape.cols;
    place.column_multiple_ = multiple;
    place.bytes_per_multiple_ = two[i].bytes_per_row - one[i].bytes_per_row;
    const uint64_t expected = place.constant() ? place.region_.constant.size()
                                               : static_cast<uint64_t>(place.Rows(0, shape.rows).end * place.region_.bytes_per_row);
    if (place.size_ != expected || (i > 0 && place.offset_ != layout.regions_[i - 1].offset_ + layout.regions_[i - 1].size_)) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", unit.outputs(static_cast<int>(i)).name(), ": the plan gives it ",
                                                     place.size_, " bytes at ", place.offset_, ", the scheme stores ", expected,
                                                     " behind the tensor before"));
    }
    layout.size_ += place.size_;
    layout.regions_.push_back(std::move(place));
  }
  if (layout.regions_.empty()) return absl::InvalidArgumentError(absl::StrCat(what, ": the scheme stores nothing"));
  return layout;
}

absl::StatusOr<Tiling> Tiling::For(const WeightView& view, const ModuleLayout& layout, uint64_t preferred, uint64_t largest,
                                   uint64_t window, const std::function<uint64_t(int64_t, int64_t)>& extra) {
  // Row figures are kept per tile, outside the pool: a tile has no more rows than this.
  constexpr int64_t kMaxRows = 4096;
  const auto bytes = [&](int64_t rows, int64_t cols) { return BufferFor(kIoBlock - 1, view.SpanBytes(rows, cols)) + extra(rows, cols); };
  const auto fits = [&](int64_t rows, int64_t cols, uint64_t limit) {
    if (bytes(rows, cols) > limit) return false;
    for (const RegionPlace& place : layout.regions()) {
      if (!place.constant() && place.TileBytes(0, rows, 0, cols) > window) return false;
    }
    return true;
  };
  const quant::Shape2D shape = view.shape;
  Tiling tiling;
  // Views with large gaps between rows are read row by row.
  const bool dense = static_cast<uint64_t>(view.row_stride) <= 2 * view.row_bytes() || shape.rows == 1;
  const int64_t least = std::min(shape.rows, kBlockRows);
  if (dense && fits(least, shape.cols, largest)) {
    tiling.segment_cols = shape.cols;
    tiling.band_rows = least;
    while (tiling.band_rows < std::min(shape.rows, kMaxRows) && fits(tiling.band_rows + kBlockRows, shape.cols, preferred)) {
      tiling.band_rows += kBlockRows;
    }
    return tiling;
  }
  tiling.segments = true;
  tiling.band_rows = 1;
  const int64_t multiple = layout.scheme().ColumnMultiple();
  if (!fits(1, std::min(multiple, shape.cols), largest)) {
    const uint64_t least_bytes = bytes(1, std::min(multiple, shape.cols));
    return WithFailure(
        absl::ResourceExhaustedError(absl::StrCat(view.What(), ": ", multiple, " columns take ", least_bytes,
                                                  " bytes and do not fit a tile of ", largest, ": give the worker more --memory")),
        quern::v1::MEMORY_TOO_SMALL, 8 * least_bytes);
  }
  int64_t fitting = 1, most = (shape.cols + multiple - 1) / multiple;
  while (fitting < most) {
    const int64_t middle = (fitting + most + 1) / 2;
    if (fits(1, std::min(middle * multiple, shape.cols), preferred)) {
      fitting = middle;
    } else {
      most = middle - 1;
    }
  }
  tiling.segment_cols = std::min(fitting * multiple, shape.cols);
  return tiling;
}

absl::Status ForEachTile(quant::Shape2D shape, const Tiling& tiling, const std::function<absl::Status(const TileRange&)>& visit) {
  if (!tiling.segments) {
    for (int64_t row = 0; row < shape.rows; row += tiling.band_rows) {
      QUERN_RETURN_IF_ERROR(visit({row, std::min(row + tiling.band_rows, shape.rows), 0, shape.cols, true, true}));
    }
    return absl::OkStatus();
  }
  for (int64_t row = 0; row < shape.rows; ++row) {
    const bool first_row = row % Tiling::kBlockRows == 0;
    const bool last_row = row + 1 == shape.rows || (row + 1) % Tiling::kBlockRows == 0;
    for (int64_t col = 0; col < shape.cols; col += tiling.segment_cols) {
      const int64_t end = std::min(col + tiling.segment_cols, shape.cols);
      QUERN_RETURN_IF_ERROR(visit({row, row + 1, col, end, first_row && col == 0, last_row && end == shape.cols}));
    }
  }
  return absl::OkStatus();
}

int64_t CacheRows(const WeightView& view) {
  constexpr int64_t kCacheBytes = 256 * 1024;
  const int64_t blocks = kCacheBytes / (view.row_stride * Tiling::kBlockRows);
  // Row figures of a part stay small, too.
  return std::clamp<int64_t>(blocks, 1, 32) * Tiling::kBlockRows;
}

}  // namespace quern::worker
