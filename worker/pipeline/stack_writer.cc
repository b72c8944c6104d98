#include "worker/pipeline/stack_writer.h"

#include <string.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/status_macros.h"
#include "base/task_memory.h"
#include "worker/pipeline/strided_copy.h"

namespace quern::worker {

struct StackWriter::Strip {
  PoolBuffer memory;
  int64_t col_begin = 0;
  std::shared_ptr<Gate> filled = std::make_shared<Gate>();
};

struct StackWriter::Row {
  Xxh3Stream digest;
  quant::RowError error;
};

absl::StatusOr<std::shared_ptr<StackWriter>> StackWriter::Create(TaskContext* context,
                                                                 absl::Span<const quern::v1::QuantizeUnit* const> units,
                                                                 const StackSlab& slab) {
  std::shared_ptr<StackWriter> writer(new StackWriter(context, slab));
  for (const quern::v1::QuantizeUnit* const unit : units.subspan(slab.first, slab.count)) {
    Part part;
    QUERN_ASSIGN_OR_RETURN(part.reader, WeightReader::For(unit->weight(), context->sources()));
    if (part.reader->needs_gather()) {
      return absl::InvalidArgumentError(
          absl::StrCat("module ", unit->module(), ": its columns are not contiguous, so that it cannot be turned over into a stack"));
    }
    QUERN_ASSIGN_OR_RETURN(part.layout, ModuleLayout::For(*unit, part.reader->dtype(), part.reader->shape()));
    const quant::Scheme& scheme = part.layout.scheme();
    part.fold = std::make_shared<RowFold>();
    part.offset = unit->place().offset() - units[slab.first]->place().offset();
    part.row_stride = unit->place().row_stride();
    part.row_multiple = std::lcm(scheme.RowMultiple(), part.reader->RowMultiple());
    part.column_multiple = std::lcm(scheme.ColumnMultiple(), part.reader->ColumnMultiple());
    writer->cols_ = part.reader->shape().cols;
    writer->element_ = BytesPerElement(part.layout.regions().front().region().dtype);
    writer->parts_.push_back(std::move(part));
  }
  return writer;
}

uint64_t StackWriter::TileBytes(const Part& part, int64_t rows, int64_t cols) const {
  return part.reader->TileBytes(rows, cols) + static_cast<uint64_t>(rows * cols * element_);
}

absl::StatusOr<int64_t> StackWriter::ChooseColumns() const {
  int64_t multiple = 1;
  for (const Part& part : parts_) multiple = std::lcm(multiple, part.column_multiple);
  const uint64_t ring = context_.slabs().largest();
  // Single rows are always valid tiles.
  const auto fits = [&](int64_t cols) {
    return std::all_of(parts_.begin(), parts_.end(), [&](const Part& part) { return TileBytes(part, 1, cols) <= context_.largest_tile(); });
  };
  if (slab_.size <= ring && fits(cols_)) return cols_;
  const int64_t least = std::min(multiple, cols_);
  const uint64_t least_bytes = static_cast<uint64_t>(least) * slab_.row_bytes;
  if (least_bytes > ring || !fits(least)) {
    return WithFailure(absl::ResourceExhaustedError(absl::StrCat(parts_.front().reader->What(), ": ", least, " rows of ", slab_.row_bytes,
                                                                 " bytes of the stack that it goes into must be in memory and do not fit ",
                                                                 ring, " bytes: give the worker more --memory")),
                       quern::v1::MEMORY_TOO_SMALL, std::max(GatherMemory(least_bytes), 2 * context_.options().memory));
  }
  // Two of them, so that one is filled while the other is written.
  int64_t count = std::max<int64_t>(static_cast<int64_t>(ring / 2 / slab_.row_bytes) / multiple, 1);
  while (count > 1 && !fits(count * multiple)) count /= 2;
  return std::min(count * multiple, cols_);
}

absl::Status StackWriter::Start() {
  for (const Part& part : parts_) QUERN_RETURN_IF_ERROR(part.reader->Prepare(context_));
  QUERN_ASSIGN_OR_RETURN(const int64_t cols, ChooseColumns());
  if (cols < cols_) {
    for (const Part& part : parts_) QUERN_RETURN_IF_ERROR(StartFigures(part));
  }
  for (int64_t begin = 0; begin < cols_; begin += cols) {
    QUERN_RETURN_IF_ERROR(StartStrip(begin, std::min(begin + cols, cols_), /*with_figures=*/cols >= cols_));
  }
  return absl::OkStatus();
}

absl::Status StackWriter::StartFigures(const Part& part) {
  WeightFeed feed(&context_, part.reader, nullptr, {});
  Tiling::Request request;
  request.what = part.reader->What();
  request.shape = part.reader->shape();
  request.row_multiple = part.row_multiple;
  request.column_multiple = part.column_multiple;
  request.preferred = context_.preferred_tile();
  request.largest = context_.largest_tile();
  request.bytes = [&](int64_t rows, int64_t cols) { return TileBytes(part, rows, cols); };
  QUERN_ASSIGN_OR_RETURN(const Tiling tiling, Tiling::For(request));
  std::shared_ptr<Strand> strand;
  std::shared_ptr<Row> row;
  return ForEachTile({0, request.shape.rows}, request.shape.cols, tiling, [&](const TileRange& range) {
    if (tiling.segments && range.col_begin == 0) {
      strand = std::make_shared<Strand>();
      row = std::make_shared<Row>();
    }
    return StartTile(feed, part, range, nullptr, /*with_figures=*/true, strand, row);
  });
}

absl::Status StackWriter::StartStrip(int64_t col_begin, int64_t col_end, bool with_figures) {
  const int64_t cols = col_end - col_begin;
  const uint64_t size = static_cast<uint64_t>(cols) * slab_.row_bytes;
  const auto strip = std::make_shared<Strip>();
  strip->col_begin = col_begin;
  std::optional<PoolBuffer> memory;
  QUERN_RETURN_IF_ERROR(context_.engine().WaitUntil([&](absl::Duration timeout) {
    memory = context_.slabs().Acquire(size, timeout);
    return memory.has_value();
  }));
  strip->memory = *std::move(memory);
  for (const Part& part : parts_) {
    constexpr int64_t kMostRows = 4096;
    const int64_t rows = part.reader->shape().rows;
    int64_t tile_rows = TileBytes(part, std::min(part.row_multiple, rows), cols) <= context_.largest_tile() ? part.row_multiple : 1;
    while (tile_rows > 1 && tile_rows < rows && tile_rows + part.row_multiple <= kMostRows &&
           TileBytes(part, tile_rows + part.row_multiple, cols) <= context_.preferred_tile()) {
      tile_rows += part.row_multiple;
    }
    WeightFeed feed(&context_, part.reader, nullptr, {});
    for (int64_t row = 0; row < rows; row += tile_rows) {
      const TileRange range{row, std::min(row + tile_rows, rows), col_begin, col_end};
      QUERN_RETURN_IF_ERROR(StartTile(feed, part, range, strip, with_figures, nullptr, nullptr));
    }
  }
  const uint64_t begin = slab_.offset + static_cast<uint64_t>(col_begin) * slab_.row_bytes;
  const uint64_t piece = std::min(context_.layout().window, context_.preferred_tile());
  for (uint64_t at = 0; at < size; at += piece) {
    const uint64_t part = std::min(piece, size - at);
    QUERN_RETURN_IF_ERROR(context_.Reserve(part));
    auto step = std::make_unique<Step>();
    step->what = absl::StrCat("stack of tensor ", parts_.front().reader->tensor());
    step->awaits.push_back(strip->filled);
    step->compute = [self = shared_from_this(), strip, at, part, to = begin + at](Step::Done done) {
      memcpy(self->context_.output().At(to), strip->memory.data() + at, part);
      self->context_.output().Complete(to, part);
      done(absl::OkStatus());
    };
    QUERN_RETURN_IF_ERROR(context_.engine().Start(std::move(step)));
  }
  return absl::OkStatus();
}

absl::Status StackWriter::StartTile(WeightFeed& feed, const Part& part, const TileRange& range, const std::shared_ptr<Strip>& strip,
                                    bool with_figures, const std::shared_ptr<Strand>& strand, const std::shared_ptr<Row>& row) {
  WeightFeed::Work work;
  work.extra = static_cast<uint64_t>(range.rows() * range.cols() * element_);
  work.strand = strand;
  if (strip != nullptr) work.holds = strip->filled;
  work.compute = [self = shared_from_this(), part = &part, range, strip, with_figures, row](const std::shared_ptr<const SourceTile>& tile,
                                                                                            std::byte* scratch, Step::Done done) {
    done(Annotate(self->Encode(*part, range, *tile, scratch, strip.get(), with_figures, row.get()), part->reader->path()));
  };
  return feed.Start(range, std::move(work));
}

absl::Status StackWriter::Encode(const Part& part, const TileRange& range, const SourceTile& tile, std::byte* scratch, Strip* strip,
                                 bool with_figures, Row* row) const {
  const int64_t out_row = range.cols() * element_;
  const int64_t in_row = range.cols() * part.reader->element_size();
  const int64_t step = CacheRows(in_row, part.row_multiple);
  std::vector<RowResult> results(static_cast<size_t>(with_figures ? range.rows() : 0));
  for (int64_t begin = range.row_begin; begin < range.row_end; begin += step) {
    const int64_t end = std::min(begin + step, range.row_end);
    QUERN_ASSIGN_OR_RETURN(const quant::Tile source, tile.Rows(begin, end));
    const quant::RegionBuffer values{scratch + (begin - range.row_begin) * out_row, begin, range.col_begin * element_, out_row};
    std::vector<quant::RowError> errors(row == nullptr ? static_cast<size_t>(end - begin) : 0);
    QUERN_RETURN_IF_ERROR(part.layout.scheme().Encode(source, {}, nullptr, part.layout.nonfinite(), {&values, 1},
                                                      row == nullptr ? absl::MakeSpan(errors) : absl::MakeSpan(&row->error, 1)));
    if (row != nullptr) {
      row->digest.Update(source.data, static_cast<size_t>(in_row));
    } else if (with_figures) {
      for (int64_t i = 0; i < end - begin; ++i) {
        RowResult& result = results[static_cast<size_t>(begin - range.row_begin + i)];
        result.Set(errors[static_cast<size_t>(i)]);
        result.digest = Xxh3Of(source.data + i * source.row_stride, static_cast<size_t>(in_row));
      }
    }
    if (strip == nullptr) continue;
    const auto stride = static_cast<int64_t>(slab_.row_bytes);
    std::byte* const to = strip->memory.data() + part.offset + (range.col_begin - strip->col_begin) * stride + begin * part.row_stride;
    CopyTransposed(values.data, out_row, end - begin, range.cols(), static_cast<int>(element_), to, stride, part.row_stride);
  }
  if (row != nullptr) {
    if (range.col_end < part.reader->shape().cols) return absl::OkStatus();
    RowResult result;
    result.Set(row->error);
    result.digest = row->digest.Digest64();
    part.fold->Add(static_cast<uint64_t>(range.row_begin), {result});
  } else if (with_figures) {
    part.fold->Add(static_cast<uint64_t>(range.row_begin), std::move(results));
  }
  return absl::OkStatus();
}

}  // namespace quern::worker
