// Tasks that compare a finished shard with its source: quantized modules are decoded and their errors computed anew, copies compared byte
// by byte.
#include <string.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/digest.h"
#include "base/status_macros.h"
#include "worker/pipeline/module_inputs.h"
#include "worker/pipeline/module_layout.h"
#include "worker/pipeline/row_fold.h"
#include "worker/pipeline/statistics_sets.h"
#include "worker/pipeline/task_context.h"
#include "worker/pipeline/tiling.h"
#include "worker/pipeline/view_digest.h"
#include "worker/pipeline/weight_feed.h"
#include "worker/pipeline/weight_reader.h"

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
  // All outlive the comparer.
  static absl::StatusOr<std::shared_ptr<ModuleComparer>> Create(TaskContext* context, StatisticsSets* sets, const SourceHandle* file,
                                                                const quern::v1::QuantizeUnit& unit) {
    std::shared_ptr<ModuleComparer> comparer(new ModuleComparer(context, sets, file, unit));
    QUERN_ASSIGN_OR_RETURN(comparer->reader_, WeightReader::For(unit.weight(), context->sources()));
    comparer->layout_ = ModuleLayout::For(unit, comparer->reader_->dtype(), comparer->reader_->shape());
    QUERN_RETURN_IF_ERROR(comparer->layout_.status());
    const ModuleLayout& layout = *comparer->layout_;
    if (layout.strided()) {
      QUERN_ASSIGN_OR_RETURN(comparer->stored_, WeightReader::For(StoredView(unit, layout), absl::MakeConstSpan(file, 1)));
      return comparer;
    }
    if (layout.begin() > file->size || layout.size() > file->size - layout.begin()) {
      return absl::InvalidArgumentError(absl::StrCat("module ", unit.module(), " leads out of ", file->path));
    }
    return comparer;
  }

  // By the task's thread.
  absl::Status Start() {
    if (stored_ != nullptr) return StartStrided();
    const quant::Scheme& scheme = layout_->scheme();
    const quant::Shape2D shape = reader_->shape();
    for (const RegionPlace& place : layout_->regions()) {
      if (place.constant()) QUERN_RETURN_IF_ERROR(StartConstant(place));
    }
    StatisticsSets::Pass pass;
    std::vector<std::shared_ptr<Gate>> awaits;
    if (layout_->has_computed()) {
      QUERN_ASSIGN_OR_RETURN(inputs_, LoadedInputs::Start(context_, unit_, scheme, shape.cols, /*all=*/false));
      if (scheme.NeedsStatistics(shape, {std::min(shape.rows, scheme.RowMultiple()), shape.cols})) {
        QUERN_ASSIGN_OR_RETURN(pass, sets_.Observe(unit_, scheme, reader_, inputs_));
      }
      QUERN_RETURN_IF_ERROR(StartComputed(pass.statistics));
      awaits.push_back(computed_ready_);
    }
    WeightFeed feed(&context_, reader_, pass.weight, std::move(awaits));
    QUERN_ASSIGN_OR_RETURN(Tiling::Request request, feed.StartRequest(scheme.RowMultiple(), scheme.ColumnMultiple()));
    request.bytes = [this, &feed](int64_t rows, int64_t cols) {
      uint64_t size = feed.TileBytes(rows, cols) + DecodedBytes(rows, cols);
      for (const RegionPlace& place : layout_->regions()) {
        if (place.has_rows())
          size += static_cast<uint64_t>((place.Rows(0, rows).size() + 1) * place.Columns(0, cols).size()) + 2 * kIoBlock;
      }
      return size;
    };
    QUERN_ASSIGN_OR_RETURN(const Tiling tiling, Tiling::For(request));
    part_rows_ = CacheRows(reader_->row_bytes(), tiling.block_rows);
    std::shared_ptr<Strand> strand;
    std::shared_ptr<Row> row;
    QUERN_RETURN_IF_ERROR(feed.ForEachTile(tiling, [&](const TileRange& range) {
      if (tiling.segments && range.col_begin == 0) {
        strand = std::make_shared<Strand>();
        row = std::make_shared<Row>();
      }
      return StartTile(feed, range, strand, row);
    }));
    pass.weight.reset();
    sets_.Started(pass);
    return absl::OkStatus();
  }

  quant::Shape2D shape() const { return reader_->shape(); }
  const RowFold& fold() const { return fold_; }
  std::optional<uint64_t> constant_difference() const { return constant_difference_.offset(); }
  std::optional<uint64_t> computed_difference() const { return computed_difference_.offset(); }

 private:
  struct Row {  // passed on between the segments of one
    Xxh3Stream digest;
    quant::RowError error;
  };

  ModuleComparer(TaskContext* context, StatisticsSets* sets, const SourceHandle* file, const quern::v1::QuantizeUnit& unit)
      : context_(*context), sets_(*sets), file_(file), unit_(unit) {}

  uint64_t DecodedBytes(int64_t rows, int64_t cols) const { return static_cast<uint64_t>(rows * cols * reader_->element_size()); }

  // Where the plain values stand in their stack.
  static quern::v1::TensorView StoredView(const quern::v1::QuantizeUnit& unit, const ModuleLayout& layout) {
    quern::v1::TensorView view;
    view.set_tensor(unit.outputs(0).name());
    view.set_dtype(unit.outputs(0).dtype());
    view.set_offset(layout.begin());
    view.set_rows(unit.weight().rows());
    view.set_cols(unit.weight().cols());
    view.set_row_stride(unit.place().row_stride());
    view.set_col_stride(unit.place().col_stride());
    return view;
  }

  // Plain values that lie spread in a stack are gathered, and the source is read beside them.
  absl::Status StartStrided() {
    const quant::Scheme& scheme = layout_->scheme();
    if (reader_->needs_gather()) {
      return absl::InvalidArgumentError(
          absl::StrCat(reader_->What(), ": its columns are not contiguous, so that it cannot be compared with a stack"));
    }
    QUERN_RETURN_IF_ERROR(reader_->Prepare(context_));
    std::vector<std::shared_ptr<Gate>> awaits;
    if (reader_->ready() != nullptr) awaits.push_back(reader_->ready());
    WeightFeed feed(&context_, stored_, nullptr, std::move(awaits));
    QUERN_ASSIGN_OR_RETURN(Tiling::Request request, feed.StartRequest(std::lcm(scheme.RowMultiple(), reader_->RowMultiple()),
                                                                      std::lcm(scheme.ColumnMultiple(), reader_->ColumnMultiple())));
    request.bytes = [this, &feed](int64_t rows, int64_t cols) {
      return feed.TileBytes(rows, cols) + reader_->TileBytes(rows, cols) + DecodedBytes(rows, cols);
    };
    QUERN_ASSIGN_OR_RETURN(const Tiling tiling, Tiling::For(request));
    part_rows_ = CacheRows(reader_->row_bytes(), tiling.block_rows);
    std::shared_ptr<Strand> strand;
    std::shared_ptr<Row> row;
    return feed.ForEachTile(tiling, [&](const TileRange& range) {
      if (tiling.segments && range.col_begin == 0) {
        strand = std::make_shared<Strand>();
        row = std::make_shared<Row>();
      }
      const auto source = std::make_shared<PlannedTile>(reader_->Plan(range));
      WeightFeed::Work work;
      work.reads = source->reads();
      work.extra = source->size() + DecodedBytes(range.rows(), range.cols());
      work.strand = strand;
      work.compute = [self = shared_from_this(), range, source, row](const std::shared_ptr<const SourceTile>& stored, std::byte* extra,
                                                                     Step::Done done) {
        source->Arrange(extra);
        const absl::StatusOr<quant::Tile> values = stored->Rows(range.row_begin, range.row_end);
        if (!values.ok()) {
          done(values.status());
          return;
        }
        const quant::RegionBuffer region{const_cast<std::byte*>(values->data), range.row_begin,
                                         range.col_begin * self->stored_->element_size(), values->row_stride};
        const auto rows = [&](int64_t begin, int64_t end) { return source->Rows(begin, end); };
        std::byte* const decoded = extra + source->size();
        done(row == nullptr ? self->CompareBand(range, rows, {&region, 1}, decoded)
                            : self->CompareSegment(range, rows, {&region, 1}, decoded, *row));
      };
      return feed.Start(range, std::move(work));
    });
  }

  absl::Status StartConstant(const RegionPlace& place) {
    auto step = std::make_unique<Step>();
    step->what = absl::StrCat("module of tensor ", reader_->tensor());
    QUERN_ASSIGN_OR_RETURN(step->buffer, context_.engine().AcquireInput(BufferFor(place.offset(), place.size())));
    step->reads.push_back({file_, place.offset(), place.size(), step->buffer.data(), nullptr});
    step->compute = [self = shared_from_this(), place = &place, data = step->buffer.data() + place.offset() % kIoBlock](Step::Done done) {
      if (memcmp(data, place->region().constant.data(), place->size()) != 0) self->constant_difference_.Report(place->offset());
      done(absl::OkStatus());
    };
    return context_.engine().Start(std::move(step));
  }

  // Reads the computed regions, which decoding needs whole, and compares them with what the source gives.
  absl::Status StartComputed(const std::shared_ptr<const SetStatistics>& statistics) {
    auto step = std::make_unique<Step>();
    step->what = absl::StrCat("module of tensor ", reader_->tensor());
    step->awaits = inputs_->awaits();
    if (statistics != nullptr) step->awaits.push_back(statistics->ready());
    uint64_t size = 0;
    std::vector<uint64_t> places(layout_->regions().size());
    for (size_t i = 0; i < places.size(); ++i) {
      const RegionPlace& place = layout_->regions()[i];
      if (!place.computed() || place.size() == 0) continue;
      places[i] = size;
      size += BufferFor(place.offset(), place.size());
      step->reads.push_back({file_, place.offset(), place.size(), nullptr, nullptr});
    }
    QUERN_ASSIGN_OR_RETURN(step->buffer, context_.engine().AcquireInput(size));
    std::byte* const buffer = step->buffer.data();
    uint64_t at = 0;
    for (ReadRequest& read : step->reads) {
      read.buffer = buffer + at;
      at += BufferFor(read.offset, read.size);
    }
    step->holds = computed_ready_;
    step->compute = [self = shared_from_this(), statistics, places = std::move(places), buffer](Step::Done done) {
      // Scales of activations are given from outside; who only has the source cannot check them. 1 stands in for them then.
      quant::ModuleInputs inputs = self->inputs_->Get();
      const bool activations = inputs.activation_amax.has_value();
      if (!activations && self->layout_->scheme().NeedsActivationAmax()) inputs.activation_amax = 1.0f;
      const absl::StatusOr<std::vector<std::string>> expected =
          self->layout_->ComputedRegions(statistics == nullptr ? nullptr : statistics->Get(), inputs);
      if (!expected.ok()) {
        done(expected.status());
        return;
      }
      self->computed_.resize(places.size());
      for (size_t i = 0; i < places.size(); ++i) {
        const RegionPlace& place = self->layout_->regions()[i];
        if (!place.computed()) continue;
        self->computed_[i].assign(reinterpret_cast<const char*>(buffer + places[i] + place.offset() % kIoBlock), place.size());
        if (!activations && absl::StartsWith(place.region().suffix, "input_")) continue;
        if (self->computed_[i] != (*expected)[i]) self->computed_difference_.Report(place.offset());
      }
      done(absl::OkStatus());
    };
    return context_.engine().Start(std::move(step));
  }

  absl::Status StartTile(WeightFeed& feed, const TileRange& range, const std::shared_ptr<Strand>& strand, const std::shared_ptr<Row>& row) {
    WeightFeed::Work work;
    const auto read = [&](uint64_t offset, uint64_t size) {
      const uint64_t at = work.extra;
      work.extra += BufferFor(offset, size);
      work.reads.push_back({file_, offset, size, at});
      return at + offset % kIoBlock;
    };
    std::vector<quant::RegionBuffer> buffers(layout_->regions().size());
    std::vector<uint64_t> data_at(buffers.size());
    for (size_t i = 0; i < buffers.size(); ++i) {
      const RegionPlace& place = layout_->regions()[i];
      if (!place.has_rows()) continue;
      const Run rows = place.Rows(range.row_begin, range.row_end);
      const Run bytes = place.Columns(range.col_begin, range.col_end);
      const uint64_t offset = place.offset() + rows.begin * place.bytes_per_row() + bytes.begin;
      buffers[i].first_row = rows.begin;
      buffers[i].first_byte = bytes.begin;
      buffers[i].row_stride = place.bytes_per_row();
      if (bytes.size() == place.bytes_per_row()) {
        data_at[i] = read(offset, static_cast<uint64_t>(rows.size() * bytes.size()));
        continue;
      }
      // A segment touches one row of a region, or two where a value is split between them.
      if (rows.size() > 2)
        return absl::InternalError(absl::StrCat(reader_->What(), ": one row touches ", rows.size(), " rows of a region"));
      for (int64_t row_of_region = rows.begin; row_of_region < rows.end; ++row_of_region) {
        const uint64_t at = read(offset + (row_of_region - rows.begin) * place.bytes_per_row(), static_cast<uint64_t>(bytes.size()));
        if (row_of_region == rows.begin) {
          data_at[i] = at;
        } else {
          buffers[i].row_stride = static_cast<int64_t>(at - data_at[i]);
        }
      }
    }
    const uint64_t decoded = work.extra;
    work.extra += DecodedBytes(range.rows(), range.cols());
    work.strand = strand;
    work.compute = [self = shared_from_this(), range, buffers = std::move(buffers), data_at = std::move(data_at), decoded, row](
                       const std::shared_ptr<const SourceTile>& tile, std::byte* extra, Step::Done done) {
      std::vector<quant::RegionBuffer> regions = buffers;
      for (size_t i = 0; i < regions.size(); ++i) {
        const RegionPlace& place = self->layout_->regions()[i];
        if (place.has_rows()) regions[i].data = extra + data_at[i];
        if (place.computed()) {
          regions[i].data = reinterpret_cast<std::byte*>(self->computed_[i].data());
          regions[i].row_stride = static_cast<int64_t>(place.size());
        }
      }
      const auto rows = [&](int64_t begin, int64_t end) { return tile->Rows(begin, end); };
      done(row == nullptr ? self->CompareBand(range, rows, regions, extra + decoded)
                          : self->CompareSegment(range, rows, regions, extra + decoded, *row));
    };
    return feed.Start(range, std::move(work));
  }

  // Decodes rows that stand as `source` does into `decoded`, which is dense, and adds their errors.
  absl::Status Compare(const quant::Tile& source, absl::Span<const quant::RegionBuffer> regions, std::byte* decoded,
                       absl::Span<quant::RowError> errors) const {
    quant::Tile dense = source;
    dense.row_stride = source.cols() * reader_->element_size();
    QUERN_RETURN_IF_ERROR(layout_->scheme().Decode(dense, regions, decoded));
    quant::Scheme::AddErrors(source, decoded, dense.row_stride, errors);
    return absl::OkStatus();
  }

  // `source` gives rows of the tile.
  template <class Rows>
  absl::Status CompareBand(const TileRange& range, const Rows& source, absl::Span<const quant::RegionBuffer> regions, std::byte* decoded) {
    std::vector<RowResult> results(range.rows());
    for (int64_t begin = range.row_begin; begin < range.row_end; begin += part_rows_) {
      QUERN_ASSIGN_OR_RETURN(const quant::Tile tile, source(begin, std::min(begin + part_rows_, range.row_end)));
      const int64_t first = begin - range.row_begin;
      std::vector<quant::RowError> errors(tile.rows());
      QUERN_RETURN_IF_ERROR(Compare(tile, regions, decoded, absl::MakeSpan(errors)));
      for (int64_t i = 0; i < tile.rows(); ++i) {
        results[first + i].Set(errors[i]);
        results[first + i].digest = Xxh3Of(tile.data + i * tile.row_stride, static_cast<size_t>(reader_->row_bytes()));
      }
    }
    fold_.Add(range.row_begin, std::move(results));
    return absl::OkStatus();
  }

  template <class Rows>
  absl::Status CompareSegment(const TileRange& range, const Rows& source, absl::Span<const quant::RegionBuffer> regions, std::byte* decoded,
                              Row& row) {
    QUERN_ASSIGN_OR_RETURN(const quant::Tile tile, source(range.row_begin, range.row_end));
    row.digest.Update(tile.data, static_cast<size_t>(range.cols() * reader_->element_size()));
    QUERN_RETURN_IF_ERROR(Compare(tile, regions, decoded, absl::MakeSpan(&row.error, 1)));
    if (range.col_end == shape().cols) {
      RowResult result;
      result.Set(row.error);
      result.digest = row.digest.Digest64();
      fold_.Add(range.row_begin, {result});
    }
    return absl::OkStatus();
  }

  TaskContext& context_;
  StatisticsSets& sets_;
  const SourceHandle* const file_;
  const quern::v1::QuantizeUnit& unit_;
  std::shared_ptr<WeightReader> reader_;
  std::shared_ptr<WeightReader> stored_;  // the values of the file where they lie spread in a stack
  absl::StatusOr<ModuleLayout> layout_ = absl::InternalError("not made");
  std::shared_ptr<const LoadedInputs> inputs_;
  const std::shared_ptr<Gate> computed_ready_ = std::make_shared<Gate>();
  std::vector<std::string> computed_;  // by region, of the file; written before computed_ready_ opens
  int64_t part_rows_ = 0;
  RowFold fold_;
  FirstDifference constant_difference_;
  FirstDifference computed_difference_;
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
  std::vector<const quern::v1::QuantizeUnit*> quantized;
  for (const quern::v1::CompareUnit& unit : work.units()) {
    if (unit.has_quantize()) quantized.push_back(&unit.quantize());
  }
  StatisticsSets sets(&context, quantized);
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
        QUERN_ASSIGN_OR_RETURN(const std::shared_ptr<ModuleComparer> comparer, ModuleComparer::Create(&context, &sets, &file, quantize));
        reports.push_back([&, comparer] {
          quern::v1::ModuleError found = comparer->fold().Error();
          const quant::Shape2D shape = comparer->shape();
          found.set_module(quantize.module());
          found.set_count(static_cast<uint64_t>(shape.rows) * static_cast<uint64_t>(shape.cols));
          const quern::v1::ModuleError& expected = unit.expected();
          if (comparer->constant_difference().has_value()) {
            mismatch(quantize.module(), *comparer->constant_difference(), "the stored shape is not that of the weight");
          }
          if (comparer->computed_difference().has_value()) {
            mismatch(quantize.module(), *comparer->computed_difference(),
                     "a scale of the whole tensor or set is not what the source gives");
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
