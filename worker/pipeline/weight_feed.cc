#include "worker/pipeline/weight_feed.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/task_memory.h"

namespace quern::worker {

absl::StatusOr<quant::Tile> SourceTile::Rows(int64_t begin, int64_t end) const {
  if (slab_ == nullptr) return planned_->Rows(begin, end);
  quant::Tile tile = slab_->Rows(begin, end);
  tile.col_begin = range_.col_begin;
  tile.col_end = range_.col_end;
  tile.data += range_.col_begin * element_size_;
  return tile;
}

absl::StatusOr<Tiling::Request> WeightFeed::StartRequest(int64_t row_multiple, int64_t column_multiple) {
  Tiling::Request request;
  request.what = reader_->What();
  request.shape = reader_->shape();
  request.row_multiple = row_multiple;
  request.column_multiple = column_multiple;
  if (whole_ == nullptr) {
    request.row_multiple = std::lcm(row_multiple, reader_->RowMultiple());
    request.column_multiple = std::lcm(column_multiple, reader_->ColumnMultiple());
    if (reader_->prefers_gather()) QUERN_RETURN_IF_ERROR(ChooseSlab(request.row_multiple));
  }
  if (whole_ != nullptr || gathers()) {
    // Tiles that take nothing of the pool are for the threads to share.
    constexpr int64_t kBandBytes = 1024 * 1024;
    request.most_rows = std::clamp<int64_t>(kBandBytes / std::max<int64_t>(reader_->row_bytes(), 1), 1, request.most_rows);
  }
  request.preferred = context_.preferred_tile();
  request.largest = context_.largest_tile();
  request.bytes = [this](int64_t rows, int64_t cols) { return TileBytes(rows, cols); };
  return request;
}

absl::Status WeightFeed::ChooseSlab(int64_t row_multiple) {
  const int64_t rows = reader_->shape().rows;
  const uint64_t ring = context_.slabs().largest();
  const int64_t least = std::min(rows, row_multiple);
  if (WeightSlab::BytesFor(*reader_, least) > ring) {
    if (!reader_->needs_gather()) return absl::OkStatus();  // row by row, then
    const uint64_t needed = GatherMemory(WeightSlab::BytesFor(*reader_, least));
    return WithFailure(
        absl::ResourceExhaustedError(absl::StrCat(reader_->What(), ": ", least, " rows of ", reader_->shape().cols,
                                                  " columns must be in memory, since its columns are not contiguous, and do not fit ", ring,
                                                  " bytes: give the worker more --memory")),
        quern::v1::MEMORY_TOO_SMALL, needed);
  }
  // Two of them, so that one is filled while the other is used; of equal size.
  const auto fits = [&](int64_t count) { return WeightSlab::BytesFor(*reader_, count) <= ring / 2; };
  if (fits(rows)) {
    slab_rows_ = rows;
    return absl::OkStatus();
  }
  int64_t low = 1, high = rows / row_multiple + 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (fits(middle * row_multiple)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int64_t most = low * row_multiple;
  const int64_t slabs = (rows + most - 1) / most;
  slab_rows_ = ((rows + slabs - 1) / slabs + row_multiple - 1) / row_multiple * row_multiple;
  return absl::OkStatus();
}

uint64_t WeightFeed::TileBytes(int64_t rows, int64_t cols) const {
  return whole_ != nullptr || gathers() ? 0 : reader_->TileBytes(rows, cols);
}

absl::Status WeightFeed::ForEachTile(const Tiling& tiling, const std::function<absl::Status(const TileRange&)>& visit) {
  const quant::Shape2D shape = reader_->shape();
  if (whole_ != nullptr) {
    slab_ = whole_;
  } else {
    QUERN_RETURN_IF_ERROR(reader_->Prepare(context_));
  }
  if (!gathers()) return worker::ForEachTile({0, shape.rows}, shape.cols, tiling, visit);
  for (int64_t row = 0; row < shape.rows; row += slab_rows_) {
    const Run rows{row, std::min(row + slab_rows_, shape.rows)};
    const uint64_t size = WeightSlab::BytesFor(*reader_, rows.size());
    slab_.reset();
    std::optional<PoolBuffer> memory;
    QUERN_RETURN_IF_ERROR(context_.engine().WaitUntil([&](absl::Duration timeout) {
      memory = context_.slabs().Acquire(size, timeout);
      return memory.has_value();
    }));
    QUERN_ASSIGN_OR_RETURN(slab_, WeightSlab::Start(context_, reader_, rows.begin, rows.end, *std::move(memory)));
    QUERN_RETURN_IF_ERROR(worker::ForEachTile(rows, shape.cols, tiling, visit));
  }
  slab_.reset();
  return absl::OkStatus();
}

absl::Status WeightFeed::Start(const TileRange& range, Work work) {
  const auto tile = std::make_shared<SourceTile>();
  tile->range_ = range;
  tile->element_size_ = reader_->element_size();
  auto step = std::make_unique<Step>();
  step->what = absl::StrCat("tensor ", reader_->tensor());
  step->awaits = awaits_;
  uint64_t own = 0;
  if (slab_ != nullptr) {
    tile->slab_ = slab_;
    step->awaits.push_back(slab_->loaded());
  } else {
    tile->planned_ = reader_->Plan(range);
    own = tile->planned_->size();
    if (reader_->ready() != nullptr) step->awaits.push_back(reader_->ready());
    for (const PlannedRead& read : tile->planned_->reads()) step->reads.push_back({read.file, read.offset, read.size, nullptr, nullptr});
  }
  for (const PlannedRead& read : work.reads) step->reads.push_back({read.file, read.offset, read.size, nullptr, nullptr});
  std::byte* buffer = nullptr;
  if (own + work.extra > 0) {
    QUERN_ASSIGN_OR_RETURN(step->buffer, context_.engine().AcquireInput(own + work.extra));
    buffer = step->buffer.data();
  }
  size_t next = 0;
  if (tile->planned_.has_value()) {
    for (const PlannedRead& read : tile->planned_->reads()) step->reads[next++].buffer = buffer + read.at;
  }
  for (const PlannedRead& read : work.reads) step->reads[next++].buffer = buffer + own + read.at;
  step->strand = std::move(work.strand);
  step->holds = std::move(work.holds);
  std::byte* const extra = work.extra > 0 ? buffer + own : nullptr;
  step->compute = [tile, buffer, extra, compute = std::move(work.compute)](Step::Done done) {
    if (tile->planned_.has_value()) tile->planned_->Arrange(buffer);
    compute(tile, extra, std::move(done));
  };
  return context_.engine().Start(std::move(step));
}

}  // namespace quern::worker
