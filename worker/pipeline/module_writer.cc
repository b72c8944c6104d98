#include "worker/pipeline/module_writer.h"

#include <string.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/digest.h"
#include "base/status_macros.h"

namespace quern::worker {

struct ModuleWriter::Block {
  Xxh3Stream digest;                         // of the row that is under way
  quant::RowError error;                     // likewise
  std::vector<quant::RegionBuffer> buffers;  // of the segment that is being encoded
};

struct ModuleWriter::Band {
  // A part of the band that is encoded at once.
  struct Part {
    std::vector<quant::RegionBuffer> buffers;
    std::vector<quant::RowError> errors;
  };
  std::shared_ptr<ModuleWriter> writer;
  TileRange range;
  std::byte* scratch;
  Step::Done done;
  std::vector<RowResult> rows;  // disjoint parts, by the parts' callbacks

  Mutex mutex;
  int64_t pending QUERN_GUARDED_BY(mutex) = 0;
  absl::Status status QUERN_GUARDED_BY(mutex);

  void PartEnded(absl::Status part_status) {
    absl::Status result;
    {
      MutexLock lock(&mutex);
      if (status.ok()) status = std::move(part_status);
      if (--pending > 0) return;
      result = status;
    }
    if (result.ok()) result = writer->StoreScratch(range, scratch);
    if (result.ok()) {
      writer->fold_->Add(range.row_begin, std::move(rows));
      writer->CompleteRows(range.row_begin, range.row_end);
    }
    done(writer->Explain(result));
  }
};

absl::StatusOr<std::shared_ptr<ModuleWriter>> ModuleWriter::Create(TaskContext* context, const quern::v1::QuantizeUnit& unit) {
  std::shared_ptr<ModuleWriter> writer(new ModuleWriter(context));
  QUERN_ASSIGN_OR_RETURN(writer->view_, WeightView::For(unit.weight(), context->sources()));
  for (const quern::v1::TensorView& view : unit.statistics_set()) {
    QUERN_ASSIGN_OR_RETURN(WeightView checked, WeightView::For(view, context->sources()));
    writer->statistics_set_.push_back(std::move(checked));
  }
  if (unit.inputs_size() > 0) {
    return absl::InvalidArgumentError(absl::StrCat("module ", unit.module(), ": the input ", unit.inputs(0).role(), " is not supported"));
  }
  writer->layout_ = ModuleLayout::For(unit, writer->view_.dtype, writer->view_.shape);
  QUERN_RETURN_IF_ERROR(writer->layout_.status());
  QUERN_RETURN_IF_ERROR(writer->ChoosePlace());
  return writer;
}

absl::StatusOr<Tiling> ModuleWriter::ChooseTiling() const {
  return Tiling::For(view_, *layout_, context_.preferred_tile(), context_.largest_tile(), context_.layout().window,
                     [this](int64_t rows, int64_t cols) {
                       return ScratchBytes({0, rows, 0, cols});
                     });
}

absl::Status ModuleWriter::ChoosePlace() {
  QUERN_ASSIGN_OR_RETURN(tiling_, ChooseTiling());
  // Segments of one block touch the same rows again and again, so all of it must be contiguous.
  const uint64_t most = tiling_.segments ? context_.layout().window : context_.output().MaxReserve() / 2;
  if (layout_->size() <= most) return absl::OkStatus();

  const RegionPlace& first = layout_->regions().front();
  streams_ = !first.constant() && !first.region().accumulates && first.region().row_numerator == first.region().row_denominator &&
             first.grows_with_columns();
  for (size_t i = 0; i < layout_->regions().size(); ++i) {
    const RegionPlace& place = layout_->regions()[i];
    side_offsets_.push_back(side_size_);
    if (IsSide(i) && !place.constant()) side_size_ += RoundUp(place.size(), 64);
  }
  place_ = side_size_ <= context_.held().largest() ? SidePlace::kHeld : SidePlace::kSpill;
  QUERN_ASSIGN_OR_RETURN(tiling_, ChooseTiling());
  return absl::OkStatus();
}

absl::Status ModuleWriter::Start() {
  if (layout_->scheme().NeedsStatistics(view_.shape, {tiling_.band_rows, tiling_.segment_cols})) QUERN_RETURN_IF_ERROR(ObserveAll());
  switch (place_) {
    case SidePlace::kWindow: {
      QUERN_RETURN_IF_ERROR(context_.Reserve(layout_->size()));
      OutputFile& output = context_.output();
      for (const RegionPlace& place : layout_->regions()) {
        if (place.constant()) {
          memcpy(output.At(place.offset()), place.region().constant.data(), place.size());
          output.Complete(place.offset(), place.size());
        } else if (place.region().accumulates && tiling_.segments) {
          memset(output.At(place.offset()), 0, place.size());
        }
      }
      break;
    }
    case SidePlace::kHeld: {
      std::optional<PoolBuffer> held;
      QUERN_RETURN_IF_ERROR(context_.engine().WaitUntil([&](absl::Duration timeout) {
        held = context_.held().Acquire(side_size_, timeout);
        return held.has_value();
      }));
      held_ = *std::move(held);
      for (size_t i = 0; i < side_offsets_.size(); ++i) {
        const RegionPlace& place = layout_->regions()[i];
        if (IsSide(i) && place.region().accumulates) memset(held_.data() + side_offsets_[i], 0, place.size());
      }
      break;
    }
    case SidePlace::kSpill: {
      absl::StatusOr<std::unique_ptr<SpillFile>> spill =
          SpillFile::Create(absl::StrCat(context_.options().output_path, ".spill"), side_size_);
      QUERN_RETURN_IF_ERROR(spill.status());
      spill_ = *std::move(spill);
      break;
    }
  }
  std::shared_ptr<Strand> strand;
  std::shared_ptr<Block> block;
  QUERN_RETURN_IF_ERROR(ForEachTile(view_.shape, tiling_, [&](const TileRange& range) {
    if (tiling_.segments && range.block_begins) {
      strand = std::make_shared<Strand>();
      block = std::make_shared<Block>();
    }
    return StartTile(range, strand, block);
  }));
  return place_ == SidePlace::kWindow ? absl::OkStatus() : FlushSides();
}

absl::Status ModuleWriter::ObserveAll() {
  QUERN_RETURN_IF_ERROR(ObserveView(view_, tiling_));
  for (const WeightView& view : statistics_set_) {
    QUERN_ASSIGN_OR_RETURN(const Tiling tiling, Tiling::For(view, *layout_, context_.preferred_tile(), context_.largest_tile(), UINT64_MAX,
                                                            [](int64_t, int64_t) { return uint64_t{0}; }));
    QUERN_RETURN_IF_ERROR(ObserveView(view, tiling));
  }
  QUERN_RETURN_IF_ERROR(context_.engine().WaitFor(encoded_));
  MutexLock lock(&mutex_);
  for (std::unique_ptr<quant::Statistics>& partial : partial_) {
    if (statistics_ == nullptr) {
      statistics_ = std::move(partial);
    } else {
      statistics_->Merge(*partial);
    }
  }
  partial_.clear();
  return absl::OkStatus();
}

absl::Status ModuleWriter::ObserveView(const WeightView& view, const Tiling& tiling) {
  return ForEachTile(view.shape, tiling, [&](const TileRange& range) -> absl::Status {
    const uint64_t offset = view.OffsetOf(range.row_begin, range.col_begin);
    const uint64_t size = view.SpanBytes(range.rows(), range.cols());
    auto step = std::make_unique<Step>();
    step->what = absl::StrCat("tensor ", view.tensor);
    QUERN_ASSIGN_OR_RETURN(step->buffer, context_.engine().AcquireInput(BufferFor(offset, size)));
    std::byte* const buffer = step->buffer.data();
    step->reads.push_back({view.file, offset, size, buffer, nullptr});
    step->holds = encoded_;
    step->compute = [self = shared_from_this(), view = &view, range, buffer](Step::Done done) {
      const quant::Scheme& scheme = self->layout_->scheme();
      std::unique_ptr<quant::Statistics> statistics;
      {
        MutexLock lock(&self->mutex_);
        if (!self->partial_.empty()) {
          statistics = std::move(self->partial_.back());
          self->partial_.pop_back();
        }
      }
      if (statistics == nullptr) statistics = scheme.NewStatistics(self->view_.shape);
      absl::Status status = scheme.Observe(TileIn(*view, buffer, range.row_begin, range.row_end, range.col_begin, range.col_end),
                                           quant::ModuleInputs(), *statistics);
      {
        MutexLock lock(&self->mutex_);
        self->partial_.push_back(std::move(statistics));
      }
      done(self->Explain(status));
    };
    return context_.engine().Start(std::move(step));
  });
}

absl::Status ModuleWriter::StartTile(const TileRange& range, const std::shared_ptr<Strand>& strand, const std::shared_ptr<Block>& block) {
  const uint64_t offset = view_.OffsetOf(range.row_begin, range.col_begin);
  const uint64_t size = view_.SpanBytes(range.rows(), range.cols());
  const uint64_t read_size = BufferFor(offset, size);
  if (place_ != SidePlace::kWindow && streams_) {
    QUERN_RETURN_IF_ERROR(
        context_.Reserve(layout_->regions().front().TileBytes(range.row_begin, range.row_end, range.col_begin, range.col_end)));
  }
  auto step = std::make_unique<Step>();
  step->what = absl::StrCat("tensor ", view_.tensor);
  QUERN_ASSIGN_OR_RETURN(step->buffer, context_.engine().AcquireInput(read_size + ScratchBytes(range)));
  std::byte* const buffer = step->buffer.data();
  std::byte* const scratch = buffer + read_size;
  step->reads.push_back({view_.file, offset, size, buffer, nullptr});
  step->holds = encoded_;
  step->strand = strand;
  if (block == nullptr) {
    step->compute = [self = shared_from_this(), range, buffer, scratch](Step::Done done) {
      self->EncodeBand(range, buffer, scratch, std::move(done));
    };
  } else {
    step->compute = [self = shared_from_this(), range, buffer, scratch, block](Step::Done done) {
      self->EncodeSegment(range, buffer, scratch, block, std::move(done));
    };
  }
  return context_.engine().Start(std::move(step));
}

void ModuleWriter::EncodeBand(const TileRange& range, std::byte* buffer, std::byte* scratch, Step::Done done) {
  const quant::Tile whole = TileIn(view_, buffer, range.row_begin, range.row_end, 0, view_.shape.cols);
  if (absl::Status status = LoadScratch(range, scratch); !status.ok()) {
    done(status);
    return;
  }
  auto band = std::make_shared<Band>();
  band->writer = shared_from_this();
  band->range = range;
  band->scratch = scratch;
  band->done = std::move(done);
  band->rows.resize(range.rows());
  const int64_t part_rows = CacheRows(view_);
  {
    MutexLock lock(&band->mutex);
    band->pending = (range.rows() + part_rows - 1) / part_rows;
  }
  for (int64_t row = range.row_begin; row < range.row_end; row += part_rows) {
    const int64_t row_end = std::min(row + part_rows, range.row_end);
    quant::EncodeBackend::Request request;
    request.scheme = &layout_->scheme();
    request.tile = whole;
    request.tile.row_begin = row;
    request.tile.row_end = row_end;
    request.tile.data = whole.data + (row - range.row_begin) * whole.row_stride;
    request.statistics = statistics_.get();
    request.nonfinite = layout_->nonfinite();
    // Digested just before it is encoded, so that it is read from memory once.
    RowResult* const results = band->rows.data() + (row - range.row_begin);
    for (int64_t i = 0; i < row_end - row; ++i) {
      results[i].digest = Xxh3Of(request.tile.data + i * whole.row_stride, view_.row_bytes());
    }
    auto part = std::make_shared<Band::Part>();
    const TileRange part_range{row, row_end, 0, view_.shape.cols};
    part->buffers = Buffers(part_range, range, scratch);
    if (place_ != SidePlace::kSpill) {
      for (size_t i = 0; i < part->buffers.size(); ++i) {
        const RegionPlace& place = layout_->regions()[i];
        if (place.region().accumulates && !(place_ == SidePlace::kHeld && IsSide(i))) {
          memset(part->buffers[i].data, 0, place.TileBytes(row, row_end, 0, view_.shape.cols));
        }
      }
    }
    part->errors.resize(row_end - row);
    request.regions = part->buffers;
    request.errors = absl::MakeSpan(part->errors);
    quant::EncodeBackend::Cpu()->Submit(request, [band, part, results](absl::Status status) {
      for (size_t i = 0; i < part->errors.size(); ++i) results[i].Set(part->errors[i]);
      band->PartEnded(std::move(status));
    });
  }
}

void ModuleWriter::EncodeSegment(const TileRange& range, std::byte* buffer, std::byte* scratch, const std::shared_ptr<Block>& block,
                                 Step::Done done) {
  quant::EncodeBackend::Request request;
  request.scheme = &layout_->scheme();
  request.tile = TileIn(view_, buffer, range.row_begin, range.row_end, range.col_begin, range.col_end);
  request.statistics = statistics_.get();
  request.nonfinite = layout_->nonfinite();
  if (range.col_begin == 0) {
    block->digest.Reset();
    block->error = quant::RowError();
  }
  block->digest.Update(request.tile.data, static_cast<size_t>(range.cols() * view_.element_size));
  if (absl::Status status = LoadScratch(range, scratch); !status.ok()) {
    done(status);
    return;
  }
  block->buffers = Buffers(range, range, scratch);
  request.regions = block->buffers;
  request.errors = absl::MakeSpan(&block->error, 1);
  quant::EncodeBackend::Cpu()->Submit(request, [self = shared_from_this(), range, scratch, block, done](absl::Status status) {
    if (status.ok()) status = self->StoreScratch(range, scratch);
    if (status.ok()) {
      if (range.col_end == self->view_.shape.cols) {
        RowResult row;
        row.Set(block->error);
        row.digest = block->digest.Digest64();
        self->fold_->Add(range.row_begin, {row});
      }
      if (self->place_ != SidePlace::kWindow) {
        if (self->streams_) {
          const RegionPlace& first = self->layout_->regions().front();
          const Run bytes = first.Columns(range.col_begin, range.col_end);
          self->context_.output().Complete(first.offset() + range.row_begin * first.bytes_per_row() + bytes.begin, bytes.size());
        }
      } else if (range.block_ends) {
        self->CompleteRows(RoundDown(range.row_begin, Tiling::kBlockRows), range.row_end);
      }
    }
    done(self->Explain(status));
  });
}

std::vector<quant::RegionBuffer> ModuleWriter::Buffers(const TileRange& range, const TileRange& whole, std::byte* scratch) const {
  std::vector<quant::RegionBuffer> buffers(layout_->regions().size());
  for (size_t i = 0; i < buffers.size(); ++i) {
    const RegionPlace& place = layout_->regions()[i];
    if (place.constant()) continue;
    const Run rows = place.Rows(range.row_begin, range.row_end);
    const Run bytes = place.Columns(range.col_begin, range.col_end);
    const uint64_t at = rows.begin * place.bytes_per_row() + bytes.begin;
    quant::RegionBuffer& buffer = buffers[i];
    buffer.first_row = rows.begin;
    buffer.first_byte = bytes.begin;
    buffer.row_stride = place.bytes_per_row();
    if (place_ == SidePlace::kWindow || !IsSide(i)) {
      buffer.data = context_.output().At(place.offset() + at);
    } else if (place_ == SidePlace::kHeld) {
      buffer.data = held_.data() + side_offsets_[i] + at;
    } else {
      const Run whole_rows = place.Rows(whole.row_begin, whole.row_end);
      buffer.data = scratch + (rows.begin - whole_rows.begin) * bytes.size();
      buffer.row_stride = bytes.size();
      scratch += RoundUp(whole_rows.size() * bytes.size(), 64);
    }
  }
  return buffers;
}

uint64_t ModuleWriter::ScratchBytes(const TileRange& range) const {
  uint64_t size = 0;
  if (place_ != SidePlace::kSpill) return 0;
  for (size_t i = 0; i < layout_->regions().size(); ++i) {
    const RegionPlace& place = layout_->regions()[i];
    if (IsSide(i) && !place.constant()) {
      size += RoundUp(place.TileBytes(range.row_begin, range.row_end, range.col_begin, range.col_end), 64);
    }
  }
  return size;
}

absl::Status ModuleWriter::LoadScratch(const TileRange& range, std::byte* scratch) const {
  if (place_ != SidePlace::kSpill) return absl::OkStatus();
  const std::vector<quant::RegionBuffer> buffers = Buffers(range, range, scratch);
  for (size_t i = 0; i < buffers.size(); ++i) {
    const RegionPlace& place = layout_->regions()[i];
    if (!IsSide(i) || !place.region().accumulates) continue;
    if (!tiling_.segments) {
      memset(buffers[i].data, 0, place.TileBytes(range.row_begin, range.row_end, range.col_begin, range.col_end));
      continue;
    }
    // What other rows of the block have left there.
    const Run rows = place.Rows(range.row_begin, range.row_end);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      QUERN_RETURN_IF_ERROR(spill_->Read(side_offsets_[i] + row * place.bytes_per_row() + buffers[i].first_byte,
                                         buffers[i].data + (row - rows.begin) * buffers[i].row_stride, buffers[i].row_stride));
    }
  }
  return absl::OkStatus();
}

absl::Status ModuleWriter::StoreScratch(const TileRange& range, std::byte* scratch) const {
  if (place_ != SidePlace::kSpill) return absl::OkStatus();
  const std::vector<quant::RegionBuffer> buffers = Buffers(range, range, scratch);
  for (size_t i = 0; i < buffers.size(); ++i) {
    const RegionPlace& place = layout_->regions()[i];
    if (!IsSide(i) || place.constant()) continue;
    const Run rows = place.Rows(range.row_begin, range.row_end);
    const uint64_t offset = side_offsets_[i] + rows.begin * place.bytes_per_row() + buffers[i].first_byte;
    if (buffers[i].row_stride == place.bytes_per_row()) {
      QUERN_RETURN_IF_ERROR(spill_->Write(offset, buffers[i].data, rows.size() * place.bytes_per_row()));
      continue;
    }
    for (int64_t row = 0; row < rows.size(); ++row) {
      QUERN_RETURN_IF_ERROR(
          spill_->Write(offset + row * place.bytes_per_row(), buffers[i].data + row * buffers[i].row_stride, buffers[i].row_stride));
    }
  }
  return absl::OkStatus();
}

void ModuleWriter::CompleteRows(int64_t begin, int64_t end) {
  for (size_t i = 0; i < layout_->regions().size(); ++i) {
    const RegionPlace& place = layout_->regions()[i];
    if (place.constant() || (place_ != SidePlace::kWindow && IsSide(i))) continue;
    const Run rows = place.Rows(begin, end);
    context_.output().Complete(place.offset() + rows.begin * place.bytes_per_row(), rows.size() * place.bytes_per_row());
  }
}

absl::Status ModuleWriter::FlushSides() {
  OutputFile& output = context_.output();
  const uint64_t piece = context_.layout().window;
  for (size_t i = 0; i < layout_->regions().size(); ++i) {
    if (!IsSide(i)) continue;
    const RegionPlace& place = layout_->regions()[i];
    for (uint64_t at = 0; at < place.size(); at += piece) {
      const uint64_t size = std::min(piece, place.size() - at);
      QUERN_RETURN_IF_ERROR(context_.Reserve(size));
      std::byte* const to = output.At(place.offset() + at);
      if (place.constant()) {
        memcpy(to, place.region().constant.data() + at, size);
        output.Complete(place.offset() + at, size);
        continue;
      }
      auto step = std::make_unique<Step>();
      step->what = absl::StrCat("module of tensor ", view_.tensor);
      step->awaits = encoded_;
      step->compute = [self = shared_from_this(), i, at, size, to](Step::Done done) {
        absl::Status status;
        const uint64_t from = self->side_offsets_[i] + at;
        if (self->place_ == SidePlace::kHeld) {
          memcpy(to, self->held_.data() + from, size);
        } else {
          status = self->spill_->Read(from, to, size);
        }
        if (status.ok()) self->context_.output().Complete(self->layout_->regions()[i].offset() + at, size);
        done(status);
      };
      QUERN_RETURN_IF_ERROR(context_.engine().Start(std::move(step)));
    }
  }
  return absl::OkStatus();
}

absl::Status ModuleWriter::Explain(const absl::Status& status) const { return Annotate(status, view_.file->path); }

}  // namespace quern::worker
