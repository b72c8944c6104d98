// Which bytes of a stored tensor belong to a tile of its weight.
#ifndef QUERN_WORKER_PIPELINE_REGION_EXTENT_H_
#define QUERN_WORKER_PIPELINE_REGION_EXTENT_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "base/dtype.h"
#include "quant/scheme.h"

namespace quern::worker {

// A run of bytes or rows, [begin, end).
struct Run {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

// A tile of a weight: a band, or a segment with the block that it belongs to.
struct TileRange {
  int64_t row_begin = 0, row_end = 0;
  int64_t col_begin = 0, col_end = 0;
  bool block_begins = false, block_ends = false;  // of segments: the first or last of their block

  int64_t rows() const { return row_end - row_begin; }
  int64_t cols() const { return col_end - col_begin; }
};

class RegionExtent {
 public:
  // Of each region, in the scheme's order. INVALID_ARGUMENT where the scheme cannot hold such a weight.
  static absl::StatusOr<std::vector<RegionExtent>> For(const quant::Scheme& scheme, DType dtype, quant::Shape2D shape);

  const quant::Region& region() const { return region_; }
  uint64_t size() const { return size_; }  // of the whole region
  bool constant() const { return !region_.constant.empty(); }
  bool computed() const { return region_.computed; }
  // Constant and computed regions have no rows; the rest of this class is about those that do.
  bool has_rows() const { return !constant() && !computed(); }
  int64_t bytes_per_row() const { return region_.bytes_per_row; }
  bool grows_with_columns() const { return bytes_per_multiple_ > 0; }  // else every column touches whole rows

  // Region rows that rows [begin, end) of the weight touch, and bytes of each that columns [begin, end) do.
  Run Rows(int64_t begin, int64_t end) const;
  Run Columns(int64_t begin, int64_t end) const;
  // Bytes that a tile touches, row after row.
  uint64_t TileBytes(int64_t row_begin, int64_t row_end, int64_t col_begin, int64_t col_end) const {
    return static_cast<uint64_t>(Rows(row_begin, row_end).size() * Columns(col_begin, col_end).size());
  }

 private:
  quant::Region region_;
  uint64_t size_ = 0;
  int64_t columns_ = 0;  // of the weight
  int64_t column_multiple_ = 1;
  int64_t bytes_per_multiple_ = 0;  // of a region row, for so many columns; 0: every column touches the whole row
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_PIPELINE_REGION_EXTENT_H_
