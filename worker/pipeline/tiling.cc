#include "worker/pipeline/tiling.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/task_memory.h"
#include "worker/pipeline/run_task.h"

namespace quern::worker {
namespace {

absl::Status TooSmall(const Tiling::Request& request, const std::string& part, uint64_t bytes) {
  return WithFailure(
      absl::ResourceExhaustedError(absl::StrCat(request.what, ": ", part, " take ", bytes, " bytes and do not fit a tile of ",
                                                request.largest, ": give the worker more --memory")),
      quern::v1::MEMORY_TOO_SMALL, TileMemory(bytes));
}

}  // namespace

absl::StatusOr<Tiling> Tiling::For(const Request& request) {
  const auto fits = [&](int64_t rows, int64_t cols, uint64_t limit) {
    return request.bytes(rows, cols) <= limit && (request.admits == nullptr || request.admits(rows, cols));
  };
  const quant::Shape2D shape = request.shape;
  Tiling tiling;
  tiling.block_rows = request.row_multiple;
  const int64_t least = std::min(shape.rows, request.row_multiple);
  if (fits(least, shape.cols, request.largest)) {
    tiling.segment_cols = shape.cols;
    tiling.band_rows = least;
    while (tiling.band_rows < shape.rows && tiling.band_rows + request.row_multiple <= request.most_rows &&
           fits(tiling.band_rows + request.row_multiple, shape.cols, request.preferred)) {
      tiling.band_rows += request.row_multiple;
    }
    return tiling;
  }
  tiling.segments = true;
  tiling.band_rows = 1;
  if (request.rows_whole > 0) {
    tiling.segment_cols = shape.cols;
    if (request.rows_whole == 1 && fits(1, shape.cols, request.largest)) return tiling;
    const int64_t whole = request.rows_whole == 1 ? 1 : least;
    return TooSmall(request, absl::StrCat(whole, " rows of ", shape.cols, " columns, which ", request.whole_rows, " needs whole,"),
                    request.bytes(whole, shape.cols));
  }
  const int64_t multiple = request.column_multiple;
  if (!fits(1, std::min(multiple, shape.cols), request.largest)) {
    return TooSmall(request, absl::StrCat(multiple, " columns"), request.bytes(1, std::min(multiple, shape.cols)));
  }
  int64_t fitting = 1, most = (shape.cols + multiple - 1) / multiple;
  while (fitting < most) {
    const int64_t middle = (fitting + most + 1) / 2;
    if (fits(1, std::min(middle * multiple, shape.cols), request.preferred)) {
      fitting = middle;
    } else {
      most = middle - 1;
    }
  }
  tiling.segment_cols = std::min(fitting * multiple, shape.cols);
  return tiling;
}

absl::Status ForEachTile(Run rows, int64_t cols, const Tiling& tiling, const std::function<absl::Status(const TileRange&)>& visit) {
  if (!tiling.segments) {
    for (int64_t row = rows.begin; row < rows.end; row += tiling.band_rows) {
      QUERN_RETURN_IF_ERROR(visit({row, std::min(row + tiling.band_rows, rows.end), 0, cols, true, true}));
    }
    return absl::OkStatus();
  }
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const bool first_row = row % tiling.block_rows == 0;
    const bool last_row = row + 1 == rows.end || (row + 1) % tiling.block_rows == 0;
    for (int64_t col = 0; col < cols; col += tiling.segment_cols) {
      const int64_t end = std::min(col + tiling.segment_cols, cols);
      QUERN_RETURN_IF_ERROR(visit({row, row + 1, col, end, first_row && col == 0, last_row && end == cols}));
    }
  }
  return absl::OkStatus();
}

int64_t CacheRows(int64_t row_bytes, int64_t multiple) {
  constexpr int64_t kCacheBytes = 256 * 1024;
  // Row figures of a part stay small, too.
  constexpr int64_t kMost = 1024;
  return std::clamp<int64_t>(kCacheBytes / (std::max<int64_t>(row_bytes, 1) * multiple), 1, std::max<int64_t>(kMost / multiple, 1)) *
         multiple;
}

}  // namespace quern::worker
