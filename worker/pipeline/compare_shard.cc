// Tasks that compare a finished shard with its source: quantized modules are decoded and their errors computed anew, copies compared byte
// by byte.
#include <string.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/digest.h"
#include "base/status_macros.h"
#include "worker/pipeline/module_layout.h"
#include "worker/pipeline/row_fold.h"
#include "worker/pipeline/task_context.h"
#include "worker/pipeline/view_digest.h"

namespace quern::worker {
namespace {

// The lowest offset of a tensor at which bytes differ. Thread-safe.
class FirstDifference {
 public:
  void Report(uint64_t offset) {
    MutexLock lock(&mutex_);
    if (!offset_.has_value() || offset < *offset_) offset_ = offset;
  }
  std::optional<uint64_t> offset() const {
    MutexLock lock(&mutex_);
    return offset_;
  }

 private:
  mutable Mutex mutex_;
  std::optional<uint64_t> offset_ QUERN_GUARDED_BY(mutex_);
};

uint64_t DifferenceAt(const std::byte* a, const std::byte* b, uint64_t size) { return std::mismatch(a, a + size, b).first - a; }

class ModuleComparer : public std::enable_shared_from_this<ModuleComparer> {
 public:
  static absl::StatusOr<std::shared_ptr<ModuleComparer>> Create(TaskContext* context, const SourceHandle* file,
                                                                const quern::v1::QuantizeUnit& unit) {
    std::shared_ptr<ModuleComparer> comparer(new ModuleComparer(context, file));
    QUERN_ASSIGN_OR_RETURN(comparer->view_, WeightView::For(unit.weight(), context->sources()));
    comparer->layout_ = ModuleLayout::For(unit, comparer->view_.dtype, comparer->view_.shape);
    QUERN_RETURN_IF_ERROR(comparer->layout_.status());
    const ModuleLayout& layout = *comparer->layout_;
    if (layout.begin() > file->size || layout.size() > file->size - layout.begin()) {
      return absl::InvalidArgumentError(absl::StrCat("module ", unit.module(), " leads out of ", file->path));
    }
    const auto extra = [&layout, view = comparer->view_](int64_t rows, int64_t cols) {
      uint64_t size = view.SpanBytes(rows, cols);  // decoded
      for (const RegionPlace& place : layout.regions()) {
        if (!place.constant()) size += 2 * kIoBlock + (place.Rows(0, rows).size() + 1) * place.Columns(0, cols).size();
      }
      return size;
    };
    QUERN_ASSIGN_OR_RETURN(comparer->tiling_,
                           Tiling::For(comparer->view_, layout, context->preferred_tile(), context->largest_tile(), UINT64_MAX, extra));
    return comparer;
  }

  absl::Status Start() {
    for (const RegionPlace& place : layout_->regions()) {
      if (place.constant()) QUERN_RETURN_IF_ERROR(StartConstant(place));
    }
    std::shared_ptr<Strand> strand;
    std::shared_ptr<Row> row;
    return ForEachTile(view_.shape, tiling_, [&](const TileRange& range) {
      if (tiling_.segments && range.col_begin == 0) {
        strand = std::make_shared<Strand>();
        row = std::make_shared<Row>();
      }
      return StartTile(range, strand, row);
    });
  }

  const WeightView& view() const { return view_; }
  const RowFold& fold() const { return fold_; }
  std::optional<uint64_t> constant_difference() const { return constant_difference_.offset(); }

 private:
  struct Row {  // passed on between the segments of one
    Xxh3Stream digest;
    quant::RowError error;
  };

  ModuleComparer(TaskContext* context, const SourceHandle* file) : context_(*context), file_(file) {}

  absl::Status StartConstant(const RegionPlace& place) {
    auto step = std::make_unique<Step>();
    step->what = absl::StrCat("module of tensor ", view_.tensor);
    QUERN_ASSIGN_OR_RETURN(step->buffer, context_.engine().AcquireInput(BufferFor(place.offset(), place.size())));
    step->reads.push_back({file_, place.offset(), place.size(), step->buffer.data(), nullptr});
    step->compute = [self = shared_from_this(), place = &place, data = step->buffer.data() + place.offset() % kIoBlock](Step::Done done) {
      if (memcmp(data, place->region().constant.data(), place->size()) != 0) self->constant_difference_.Report(place->offset());
      done(absl::OkStatus());
    };
    return context_.engine().Start(std::move(step));
  }

  absl::Status StartTile(const TileRange& range, const std::shared_ptr<Strand>& strand, const std::shared_ptr<Row>& row) {
    auto step = std::make_unique<Step>();
    step->what = absl::StrCat("tensor ", view_.tensor);
    // Reads are planned at offsets of the buffer first, then the buffer is taken.
    uint64_t used = 0;
    const auto read = [&](const SourceHandle* file, uint64_t offset, uint64_t size) {
      const uint64_t at = used;
      used += BufferFor(offset, size);
      step->reads.push_back({file, offset, size, nullptr, nullptr});
      return at;
    };
    const uint64_t span = view_.SpanBytes(range.rows(), range.cols());
    std::vector<uint64_t> places{read(view_.file, view_.OffsetOf(range.row_begin, range.col_begin), span)};
    std::vector<quant::RegionBuffer> buffers(layout_->regions().size());
    std::vector<uint64_t> data_at(buffers.size());
    for (size_t i = 0; i < buffers.size(); ++i) {
      const RegionPlace& place = layout_->regions()[i];
      if (place.constant()) continue;
      const Run rows = place.Rows(range.row_begin, range.row_end);
      const Run bytes = place.Columns(range.col_begin, range.col_end);
      const uint64_t offset = place.offset() + rows.begin * place.bytes_per_row() + bytes.begin;
      buffers[i].first_row = rows.begin;
      buffers[i].first_byte = bytes.begin;
      buffers[i].row_stride = place.bytes_per_row();
      if (bytes.size() == place.bytes_per_row()) {
        places.push_back(read(file_, offset, rows.size() * bytes.size()));
        data_at[i] = places.back() + offset % kIoBlock;
        continue;
      }
      // A segment touches one row of a region, or two where a value is split between them.
      if (rows.size() > 2) return absl::InternalError(absl::StrCat(view_.What(), ": one row touches ", rows.size(), " rows of a region"));
      for (int64_t row_of_region = rows.begin; row_of_region < rows.end; ++row_of_region) {
        const uint64_t from = offset + (row_of_region - rows.begin) * place.bytes_per_row();
        places.push_back(read(file_, from, bytes.size()));
        const uint64_t at = places.back() + from % kIoBlock;
        if (row_of_region == rows.begin) {
          data_at[i] = at;
        } else {
          buffers[i].row_stride = static_cast<int64_t>(at - data_at[i]);
        }
      }
    }
    const uint64_t decoded = used;
    QUERN_ASSIGN_OR_RETURN(step->buffer, context_.engine().AcquireInput(used + span));
    std::byte* const base = step->buffer.data();
    for (size_t i = 0; i < places.size(); ++i) step->reads[i].buffer = base + places[i];
    for (size_t i = 0; i < buffers.size(); ++i) buffers[i].data = base + data_at[i];
    step->strand = strand;
    step->compute = [self = shared_from_this(), range, buffers = std::move(buffers), base, decoded, row](Step::Done done) {
      done(row == nullptr ? self->CompareBand(range, buffers, base, base + decoded)
                          : self->CompareSegment(range, buffers, base, base + decoded, *row));
    };
    return context_.engine().Start(std::move(step));
  }

  absl::Status CompareBand(const TileRange& range, absl::Span<const quant::RegionBuffer> buffers, std::byte* base, std::byte* decoded) {
    const quant::Tile whole = TileIn(view_, base, range.row_begin, range.row_end, 0, view_.shape.cols);
    std::vector<RowResult> results(range.rows());
    const int64_t part_rows = CacheRows(view_);
    for (int64_t begin = range.row_begin; begin < range.row_end; begin += part_rows) {
      quant::Tile tile = whole;
      tile.row_begin = begin;
      tile.row_end = std::min(begin + part_rows, range.row_end);
      const int64_t first = begin - range.row_begin;
      tile.data = whole.data + first * whole.row_stride;
      std::vector<quant::RowError> errors(tile.rows());
      QUERN_RETURN_IF_ERROR(layout_->scheme().Decode(tile, buffers, decoded));
      quant::Scheme::AddErrors(tile, decoded, tile.row_stride, absl::MakeSpan(errors));
      for (int64_t i = 0; i < tile.rows(); ++i) {
        results[first + i].Set(errors[i]);
        results[first + i].digest = Xxh3Of(tile.data + i * tile.row_stride, view_.row_bytes());
      }
    }
    fold_.Add(range.row_begin, std::move(results));
    return absl::OkStatus();
  }

  absl::Status CompareSegment(const TileRange& range, absl::Span<const quant::RegionBuffer> buffers, std::byte* base, std::byte* decoded,
                              Row& row) {
    const quant::Tile tile = TileIn(view_, base, range.row_begin, range.row_end, range.col_begin, range.col_end);
    row.digest.Update(tile.data, static_cast<size_t>(range.cols() * view_.element_size));
    QUERN_RETURN_IF_ERROR(layout_->scheme().Decode(tile, buffers, decoded));
    quant::Scheme::AddErrors(tile, decoded, tile.row_stride, absl::MakeSpan(&row.error, 1));
    if (range.col_end == view_.shape.cols) {
      RowResult result;
      result.Set(row.error);
      result.digest = row.digest.Digest64();
      fold_.Add(range.row_begin, {result});
    }
    return absl::OkStatus();
  }

  TaskContext& context_;
  const SourceHandle* const file_;
  WeightView view_;
  absl::StatusOr<ModuleLayout> layout_ = absl::InternalError("not made");
  Tiling tiling_;
  RowFold fold_;
  FirstDifference constant_difference_;
};

// What the comparison of a copied tensor finds.
struct CopyCheck {
  FirstDifference difference;  // as an offset of the shard
  Xxh3Stream source;
};

// Starts the steps of one copied tensor.
absl::Status StartCopy(TaskContext& context, const SourceHandle& file, const quern::v1::CopyUnit& unit,
                       const std::shared_ptr<CopyCheck>& check) {
  const quern::v1::TensorView& source = unit.source();
  const quern::v1::OutputTensor& output = unit.output();
  if (source.file() >= context.sources().size()) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", output.name(), ": the task has no source file ", source.file()));
  }
  const SourceHandle& from = context.sources()[source.file()];
  const uint64_t size = output.size();
  if (source.rows() != 1 || source.cols() != size || source.offset() > from.size || size > from.size - source.offset() ||
      output.offset() > file.size || size > file.size - output.offset()) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", output.name(), ": its ", size, " bytes lead out of ", from.path, " or ", file.path));
  }
  const uint64_t piece = context.preferred_tile() / 2;
  const std::shared_ptr<Strand> strand = size > piece ? std::make_shared<Strand>() : nullptr;
  for (uint64_t at = 0; at < size; at += piece) {
    const uint64_t part = std::min(piece, size - at);
    const uint64_t source_at = source.offset() + at;
    const uint64_t output_at = output.offset() + at;
    const uint64_t source_size = BufferFor(source_at, part);
    auto step = std::make_unique<Step>();
    step->what = absl::StrCat("tensor ", output.name());
    QUERN_ASSIGN_OR_RETURN(step->buffer, context.engine().AcquireInput(source_size + BufferFor(output_at, part)));
    std::byte* const base = step->buffer.data();
    step->reads.push_back({&from, source_at, part, base, nullptr});
    step->reads.push_back({&file, output_at, part, base + source_size, nullptr});
    step->strand = strand;
    step->compute = [check, a = base + source_at % kIoBlock, b = base + source_size + output_at % kIoBlock, part,
                     output_at](Step::Done done) {
      check->source.Update(a, part);
      if (memcmp(a, b, part) != 0) check->difference.Report(output_at + DifferenceAt(a, b, part));
      done(absl::OkStatus());
    };
    QUERN_RETURN_IF_ERROR(context.engine().Start(std::move(step)));
  }
  return absl::OkStatus();
}

std::string Describe(const quern::v1::ModuleError& expected, const quern::v1::ModuleError& found) {
  // 17 digits tell any two doubles apart.
  return absl::StrFormat(
      "decoded again, its errors differ from the manifest's: sum of squared errors %.17g instead of %.17g, largest %.17g instead of %.17g, "
      "sum of squares %.17g instead of %.17g, elements %d instead of %d, not finite %d instead of %d",
      found.sum_squared_error(), expected.sum_squared_error(), found.max_abs_error(), expected.max_abs_error(), found.sum_squares(),
      expected.sum_squares(), found.count(), expected.count(), found.nonfinite(), expected.nonfinite());
}

absl::Status Compare(TaskContext& context, const SourceHandle& file, const quern::v1::CompareShard& work, quern::v1::TaskResult* result) {
  std::vector<std::function<void()>> reports;  // in the order of the units
  const auto mismatch = [&](const std::string& tensor, uint64_t offset, const std::string& what) {
    quern::v1::Mismatch* found = result->add_mismatches();
    found->set_file(work.path());
    found->set_tensor(tensor);
    found->set_offset(offset);
    found->set_what(what);
  };
  for (const quern::v1::CompareUnit& unit : work.units()) {
    switch (unit.kind_case()) {
      case quern::v1::CompareUnit::kCopy: {
        auto check = std::make_shared<CopyCheck>();
        reports.push_back([&, check] {
          if (check->difference.offset().has_value()) {
            mismatch(unit.copy().output().name(), *check->difference.offset(), "a copied byte differs from the source");
          }
          ViewDigester digester;
          digester.AddRow(check->source.Digest64());
          quern::v1::ViewDigest* digest = result->add_source_digests();
          digest->set_tensor(unit.copy().source().tensor());
          digest->set_digest(digester.Digest());
        });
        QUERN_RETURN_IF_ERROR(StartCopy(context, file, unit.copy(), check));
        break;
      }
      case quern::v1::CompareUnit::kQuantize: {
        const quern::v1::QuantizeUnit& quantize = unit.quantize();
        QUERN_ASSIGN_OR_RETURN(const std::shared_ptr<ModuleComparer> comparer, ModuleComparer::Create(&context, &file, quantize));
        reports.push_back([&, comparer] {
          quern::v1::ModuleError found = comparer->fold().Error();
          const quant::Shape2D shape = comparer->view().shape;
          found.set_module(quantize.module());
          found.set_count(static_cast<uint64_t>(shape.rows) * static_cast<uint64_t>(shape.cols));
          const quern::v1::ModuleError& expected = unit.expected();
          if (comparer->constant_difference().has_value()) {
            mismatch(quantize.module(), *comparer->constant_difference(), "the stored shape is not that of the weight");
          }
          if (found.sum_squared_error() != expected.sum_squared_error() || found.sum_squares() != expected.sum_squares() ||
              found.max_abs_error() != expected.max_abs_error() || found.nonfinite() != expected.nonfinite() ||
              found.count() != expected.count()) {
            mismatch(quantize.module(), quantize.outputs(0).offset(), Describe(expected, found));
          }
          quern::v1::ViewDigest* digest = result->add_source_digests();
          digest->set_tensor(quantize.weight().tensor());
          digest->set_digest(comparer->fold().Digest());
          *result->add_errors() = std::move(found);
        });
        QUERN_RETURN_IF_ERROR(comparer->Start());
        break;
      }
      case quern::v1::CompareUnit::KIND_NOT_SET:
        return absl::InvalidArgumentError("a unit of the plan is of a kind that this worker does not know");
    }
  }
  QUERN_RETURN_IF_ERROR(context.engine().Drain());
  QUERN_RETURN_IF_ERROR(context.CheckSourcesAgain());
  for (const std::function<void()>& report : reports) report();
  return absl::OkStatus();
}

}  // namespace

absl::Status RunCompareShard(TaskContext& context, const quern::v1::CompareShard& work, quern::v1::TaskResult* result) {
  absl::StatusOr<SourceHandle> file = context.Open(work.path());
  if (absl::IsNotFound(file.status())) {
    quern::v1::Mismatch* found = result->add_mismatches();
    found->set_file(work.path());
    found->set_what("the file is missing");
    return absl::OkStatus();
  }
  QUERN_RETURN_IF_ERROR(file.status());
  result->set_file_size(file->size);
  absl::Status status = Compare(context, *file, work, result);
  // Reads under way refer to the file.
  context.engine().Stop();
  return status;
}

}  // namespace quern::worker
