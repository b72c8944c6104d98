// How a module's weight is cut into tiles, and which bytes of its stored regions each tile touches.
#ifndef QUERN_WORKER_PIPELINE_MODULE_LAYOUT_H_
#define QUERN_WORKER_PIPELINE_MODULE_LAYOUT_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/dtype.h"
#include "quant/scheme.h"
#include "quern/v1/plan.pb.h"
#include "worker/io/source_reader.h"

namespace quern::worker {

// A TensorView that was checked against its file: rows whose elements are contiguous.
struct WeightView {
  const SourceHandle* file = nullptr;
  std::string tensor;
  DType dtype;
  int element_size = 0;
  uint64_t offset = 0;
  quant::Shape2D shape;
  int64_t row_stride = 0;

  uint64_t row_bytes() const { return static_cast<uint64_t>(shape.cols) * element_size; }
  // Bytes of the file from the first element of a tile to behind its last.
  uint64_t SpanBytes(int64_t rows, int64_t cols) const { return static_cast<uint64_t>((rows - 1) * row_stride + cols * element_size); }
  uint64_t OffsetOf(int64_t row, int64_t col) const { return offset + static_cast<uint64_t>(row * row_stride + col * element_size); }
  // "tensor x of file y", for messages.
  std::string What() const;

  // INVALID_ARGUMENT for a view that leads out of its file or that this version cannot read (columns that are not contiguous, encoded
  // weights).
  static absl::StatusOr<WeightView> For(const quern::v1::TensorView& view, const std::vector<SourceHandle>& files);
};

// A tile in memory, as it was read: `data` points to its first element in `buffer`. Moves the bytes down to a multiple of the element size
// where the file has them at another place.
quant::Tile TileIn(const WeightView& view, std::byte* buffer, int64_t row_begin, int64_t row_end, int64_t col_begin, int64_t col_end);

// A run of bytes or rows, [begin, end).
struct Run {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

// One stored tensor of a module and where it stands in its file.
class RegionPlace {
 public:
  const quant::Region& region() const { return region_; }
  uint64_t offset() const { return offset_; }
  uint64_t size() const { return size_; }
  bool constant() const { return !region_.constant.empty(); }
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
  friend class ModuleLayout;
  quant::Region region_;
  uint64_t offset_ = 0;
  uint64_t size_ = 0;
  int64_t columns_ = 0;  // of the weight
  int64_t column_multiple_ = 1;
  int64_t bytes_per_multiple_ = 0;  // of a region row, for so many columns; 0: every column touches the whole row
};

class ModuleLayout {
 public:
  // INVALID_ARGUMENT where the unit's outputs are not what its scheme stores.
  static absl::StatusOr<ModuleLayout> For(const quern::v1::QuantizeUnit& unit, DType dtype, quant::Shape2D shape);

  const quant::Scheme& scheme() const { return *scheme_; }
  const std::vector<RegionPlace>& regions() const { return regions_; }
  quant::NonfinitePolicy nonfinite() const { return nonfinite_; }
  uint64_t begin() const { return regions_.front().offset(); }
  uint64_t size() const { return size_; }  // of all regions, which follow each other

 private:
  const quant::Scheme* scheme_ = nullptr;
  quant::NonfinitePolicy nonfinite_ = quant::NonfinitePolicy::kFail;
  std::vector<RegionPlace> regions_;
  uint64_t size_ = 0;
};

// Tiles are bands of `band_rows` rows, or, when 32 rows do not fit, segments of `segment_cols` columns of one row.
struct Tiling {
  bool segments = false;
  int64_t band_rows = 0;
  int64_t segment_cols = 0;

  // Rows that share accumulating regions; segments of one block are computed in order.
  static constexpr int64_t kBlockRows = 32;

  // `extra` says what a tile of (rows, cols) takes of the pool beside the bytes read. A tile takes about `preferred` bytes and never more
  // than `largest`; a region's part of it is at most `window` bytes. MEMORY_TOO_SMALL when that cannot be.
  static absl::StatusOr<Tiling> For(const WeightView& view, const ModuleLayout& layout, uint64_t preferred, uint64_t largest,
                                    uint64_t window, const std::function<uint64_t(int64_t rows, int64_t cols)>& extra);
};

// A tile of a weight, in the order of the file: a band, or a segment with the block that it belongs to.
struct TileRange {
  int64_t row_begin = 0, row_end = 0;
  int64_t col_begin = 0, col_end = 0;
  bool block_begins = false, block_ends = false;  // of segments: the first or last of their block

  int64_t rows() const { return row_end - row_begin; }
  int64_t cols() const { return col_end - col_begin; }
};

// Calls `visit` for every tile in order; stops at its first error.
absl::Status ForEachTile(quant::Shape2D shape, const Tiling& tiling, const std::function<absl::Status(const TileRange&)>& visit);

// Rows of a band that are encoded at once: few enough to stay in the cache between digest and encoding.
int64_t CacheRows(const WeightView& view);

}  // namespace quern::worker

#endif  // QUERN_WORKER_PIPELINE_MODULE_LAYOUT_H_
