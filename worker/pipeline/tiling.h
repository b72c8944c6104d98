// How a weight is cut into tiles.
#ifndef QUERN_WORKER_PIPELINE_TILING_H_
#define QUERN_WORKER_PIPELINE_TILING_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quant/scheme.h"
#include "worker/pipeline/region_extent.h"

namespace quern::worker {

// Tiles are bands of `band_rows` rows, or, when `block_rows` rows do not fit, segments of `segment_cols` columns of one row.
struct Tiling {
  struct Request {
    std::string what;  // for messages
    quant::Shape2D shape;
    int64_t row_multiple = 32;     // bands begin at multiples of so many rows
    int64_t column_multiple = 32;  // segments at multiples of so many columns
    // A tile takes about `preferred` bytes of the pool and never more than `largest`.
    uint64_t preferred = 0;
    uint64_t largest = 0;
    std::function<uint64_t(int64_t rows, int64_t cols)> bytes;  // that a tile takes of the pool
    std::function<bool(int64_t rows, int64_t cols)> admits;     // what else must hold of a tile; null: nothing
    // Bands have no more rows, unless one multiple has. Figures of rows are kept outside the pool.
    int64_t most_rows = 4096;
    // How many rows must be whole in one tile (Scheme::RowsSearchedWhole), and why, for messages ("the search for a row's scale"). 0:
    // segments will do; 1: segments of all columns will.
    int64_t rows_whole = 0;
    std::string whole_rows;
  };

  bool segments = false;
  int64_t band_rows = 0;
  int64_t segment_cols = 0;
  // Rows that share rows of regions; segments of one block are computed in order.
  int64_t block_rows = 32;

  // MEMORY_TOO_SMALL when no tile fits.
  static absl::StatusOr<Tiling> For(const Request& request);
};

// Calls `visit` for every tile of some rows in the order of the file; stops at its first error. The rows begin at a multiple of
// `block_rows`, and end at one or with the weight.
absl::Status ForEachTile(Run rows, int64_t cols, const Tiling& tiling, const std::function<absl::Status(const TileRange&)>& visit);

// Rows of a band, of so many bytes each, that are encoded at once: few enough to stay in the cache between digest and encoding. A multiple
// of `multiple`.
int64_t CacheRows(int64_t row_bytes, int64_t multiple);

}  // namespace quern::worker

#endif  // QUERN_WORKER_PIPELINE_TILING_H_
