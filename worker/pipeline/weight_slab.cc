#include "worker/pipeline/weight_slab.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "worker/pipeline/strided_copy.h"
#include "worker/pipeline/tiling.h"

namespace quern::worker {
namespace {

// Read straight into the slab.
bool InPlace(const WeightReader& reader) {
  return reader.contiguous() && reader.row_stride() == reader.row_bytes() &&
         reader.OffsetOf(0, 0) % static_cast<uint64_t>(reader.element_size()) == 0;
}

int64_t StrideOf(const WeightReader& reader) {
  if (InPlace(reader)) return reader.row_bytes();
  const uint64_t lines = RoundUp(static_cast<uint64_t>(reader.row_bytes()), 64);
  // Rows a power of two apart would share few lines of the cache while columns are turned into rows.
  return static_cast<int64_t>(lines % 512 == 0 ? lines + 64 : lines);
}

}  // namespace

uint64_t WeightSlab::BytesFor(const WeightReader& reader, int64_t rows) {
  return BufferFor(InPlace(reader) ? kIoBlock - 1 : 0, static_cast<uint64_t>(rows * StrideOf(reader)));
}

std::byte* WeightSlab::At(int64_t row, int64_t col) const {
  return data_ + (row - row_begin_) * row_stride_ + col * reader_->element_size();
}

quant::Tile WeightSlab::Rows(int64_t begin, int64_t end) const {
  return {reader_->dtype(), begin, end, 0, reader_->shape().cols, At(begin, 0), row_stride_};
}

absl::StatusOr<std::shared_ptr<WeightSlab>> WeightSlab::Start(TaskContext& context, std::shared_ptr<WeightReader> reader, int64_t begin,
                                                              int64_t end, PoolBuffer memory) {
  std::shared_ptr<WeightSlab> slab(new WeightSlab);
  slab->reader_ = std::move(reader);
  slab->row_begin_ = begin;
  slab->row_end_ = end;
  slab->memory_ = std::move(memory);
  slab->data_ = slab->memory_.data();
  slab->row_stride_ = StrideOf(*slab->reader_);
  if (slab->reader_->prefers_gather()) {
    QUERN_RETURN_IF_ERROR(StartGathering(context, slab));
  } else if (InPlace(*slab->reader_)) {
    QUERN_RETURN_IF_ERROR(StartReads(context, slab));
  } else {
    QUERN_RETURN_IF_ERROR(StartTiles(context, slab));
  }
  return slab;
}

absl::Status WeightSlab::StartReads(TaskContext& context, const std::shared_ptr<WeightSlab>& slab) {
  const WeightReader& reader = *slab->reader_;
  const uint64_t begin = reader.OffsetOf(slab->row_begin_, 0);
  const uint64_t end = begin + static_cast<uint64_t>((slab->row_end_ - slab->row_begin_) * slab->row_stride_);
  std::byte* const memory = slab->data_;
  slab->data_ += begin % kIoBlock;
  auto step = std::make_unique<Step>();
  step->what = absl::StrCat("tensor ", reader.tensor());
  // Pieces meet at multiples of blocks, so that none writes where another does.
  for (uint64_t at = begin; at < end;) {
    const uint64_t next = std::min(RoundDown(at, kIoBlock) + context.preferred_tile(), end);
    step->reads.push_back({reader.file(), at, next - at, memory + RoundDown(at, kIoBlock) - RoundDown(begin, kIoBlock), nullptr});
    at = next;
  }
  step->holds = slab->loaded_;
  step->compute = [slab](Step::Done done) { done(absl::OkStatus()); };
  return context.engine().Start(std::move(step));
}

absl::Status WeightSlab::StartTiles(TaskContext& context, const std::shared_ptr<WeightSlab>& slab) {
  WeightReader& reader = *slab->reader_;
  QUERN_RETURN_IF_ERROR(reader.Prepare(context));
  Tiling::Request request;
  request.what = reader.What();
  request.shape = reader.shape();
  request.row_multiple = std::max<int64_t>(reader.RowMultiple(), 32);
  request.column_multiple = reader.ColumnMultiple();
  request.preferred = context.preferred_tile();
  request.largest = context.largest_tile();
  request.bytes = [&reader](int64_t rows, int64_t cols) { return reader.TileBytes(rows, cols); };
  QUERN_ASSIGN_OR_RETURN(const Tiling tiling, Tiling::For(request));
  return ForEachTile({0, reader.shape().rows}, reader.shape().cols, tiling, [&](const TileRange& range) -> absl::Status {
    const auto tile = std::make_shared<PlannedTile>(reader.Plan(range));
    auto step = std::make_unique<Step>();
    step->what = absl::StrCat("tensor ", reader.tensor());
    QUERN_ASSIGN_OR_RETURN(step->buffer, context.engine().AcquireInput(tile->size()));
    std::byte* const buffer = step->buffer.data();
    for (const PlannedRead& read : tile->reads()) step->reads.push_back({read.file, read.offset, read.size, buffer + read.at, nullptr});
    step->holds = slab->loaded_;
    if (reader.ready() != nullptr) step->awaits.push_back(reader.ready());
    step->compute = [slab, tile, range, buffer](Step::Done done) {
      tile->Arrange(buffer);
      done(Annotate(tile->CopyRows(range.row_begin, range.row_end, slab->At(range.row_begin, range.col_begin), slab->row_stride_),
                    slab->reader_->path()));
    };
    return context.engine().Start(std::move(step));
  });
}

absl::Status WeightSlab::StartGathering(TaskContext& context, const std::shared_ptr<WeightSlab>& slab) {
  const WeightReader& reader = *slab->reader_;
  const int64_t element = reader.element_size();
  // Runs are the rows of the weight or its columns, whichever are closer together.
  const bool by_rows = reader.row_stride() >= reader.col_stride();
  const Run rows{slab->row_begin_, slab->row_end_};
  const Run cols{0, reader.shape().cols};
  const Run along = by_rows ? cols : rows;
  const Run across = by_rows ? rows : cols;
  const int64_t along_stride = by_rows ? reader.col_stride() : reader.row_stride();
  const int64_t across_stride = by_rows ? reader.row_stride() : reader.col_stride();
  const auto offset_of = [&](int64_t run, int64_t element_of_run) {
    return by_rows ? reader.OffsetOf(run, element_of_run) : reader.OffsetOf(element_of_run, run);
  };
  const int64_t budget = static_cast<int64_t>(context.preferred_tile() - 2 * kIoBlock);
  const int64_t most_along = std::max<int64_t>((budget - element) / along_stride, 1);
  for (int64_t first = along.begin; first < along.end; first += most_along) {
    const Run part{first, std::min(first + most_along, along.end)};
    const int64_t run_bytes = (part.size() - 1) * along_stride + element;
    const bool one_by_one = ReadOneByOne(run_bytes, across_stride);
    const int64_t apart = static_cast<int64_t>(BufferFor(kIoBlock - 1, static_cast<uint64_t>(run_bytes)));
    int64_t most_across = std::max<int64_t>(one_by_one ? budget / apart : (budget - run_bytes) / across_stride + 1, 1);
    // Whole lines of the cache, where columns become rows.
    if (most_across > 32) most_across -= most_across % 32;
    for (int64_t run = across.begin; run < across.end; run += most_across) {
      const Run runs{run, std::min(run + most_across, across.end)};
      auto step = std::make_unique<Step>();
      step->what = absl::StrCat("tensor ", reader.tensor());
      uint64_t size = 0;
      std::vector<uint64_t> places;  // of the runs in the buffer
      if (one_by_one) {
        for (int64_t i = runs.begin; i < runs.end; ++i) {
          const uint64_t offset = offset_of(i, part.begin);
          places.push_back(size + offset % kIoBlock);
          step->reads.push_back({reader.file(), offset, static_cast<uint64_t>(run_bytes), nullptr, nullptr});
          size += BufferFor(offset, static_cast<uint64_t>(run_bytes));
        }
      } else {
        const uint64_t begin = offset_of(runs.begin, part.begin);
        const uint64_t span = static_cast<uint64_t>((runs.size() - 1) * across_stride + run_bytes);
        for (int64_t i = 0; i < runs.size(); ++i) places.push_back(begin % kIoBlock + static_cast<uint64_t>(i * across_stride));
        step->reads.push_back({reader.file(), begin, span, nullptr, nullptr});
        size = BufferFor(begin, span);
      }
      QUERN_ASSIGN_OR_RETURN(step->buffer, context.engine().AcquireInput(size));
      std::byte* const buffer = step->buffer.data();
      uint64_t at = 0;
      for (ReadRequest& read : step->reads) {
        read.buffer = buffer + at;
        at += BufferFor(read.offset, read.size);
      }
      step->holds = slab->loaded_;
      step->compute = [slab, by_rows, part, runs, along_stride, places = std::move(places), buffer](Step::Done done) {
        const int size_of_element = slab->reader_->element_size();
        if (by_rows) {
          for (int64_t i = 0; i < runs.size(); ++i) {
            CopyRow(buffer + places[static_cast<size_t>(i)], along_stride, part.size(), size_of_element,
                    slab->At(runs.begin + i, part.begin));
          }
        } else {
          std::vector<const std::byte*> columns;
          columns.reserve(places.size());
          for (const uint64_t place : places) columns.push_back(buffer + place);
          CopyColumns(columns.data(), runs.size(), part.size(), along_stride, size_of_element, slab->At(part.begin, runs.begin),
                      slab->row_stride_);
        }
        done(absl::OkStatus());
      };
      QUERN_RETURN_IF_ERROR(context.engine().Start(std::move(step)));
    }
  }
  return absl::OkStatus();
}

}  // namespace quern::worker
