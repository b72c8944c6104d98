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
  std::shared_ptr<const SourceTile> tile;
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

absl::StatusOr<std::shared_ptr<ModuleWriter>> ModuleWriter::Create(TaskContext* context, StatisticsSets* sets,
                                                                   const quern::v1::QuantizeUnit& unit) {
  std::shared_ptr<ModuleWriter> writer(new ModuleWriter(context, sets, unit));
  QUERN_ASSIGN_OR_RETURN(writer->reader_, WeightReader::For(unit.weight(), context->sources()));
  writer->layout_ = ModuleLayout::For(unit, writer->reader_->dtype(), writer->reader_->shape());
  QUERN_RETURN_IF_ERROR(writer->layout_.status());
  return writer;
}

absl::StatusOr<Tiling> ModuleWriter::ChooseTiling(WeightFeed& feed) const {
  QUERN_ASSIGN_OR_RETURN(Tiling::Request request, feed.StartRequest(layout_->scheme().RowMultiple(), layout_->scheme().ColumnMultiple()));
  request.rows_whole = layout_->scheme().RowsSearchedWhole();
  request.whole_rows = request.rows_whole == 1 ? "the search for a row's scale" : "the search for a block's scale";
  request.bytes = [this, &feed](int64_t rows, int64_t cols) { return feed.TileBytes(rows, cols) + ScratchBytes({0, rows, 0, cols}); };
  request.admits = [this](int64_t rows, int64_t cols) {
    return std::all_of(layout_->regions().begin(), layout_->regions().end(), [&](const RegionPlace& place) {
      return !place.has_rows() || place.TileBytes(0, rows, 0, cols) <= context_.layout().window;
    });
  };
  return Tiling::For(request);
}

absl::Status ModuleWriter::ChoosePlace(WeightFeed& feed) {
  QUERN_ASSIGN_OR_RETURN(tiling_, ChooseTiling(feed));
  // Segments of one block touch the same rows again and again, so all of it must be contiguous.
  const uint64_t most = tiling_.segments ? context_.layout().window : context_.output().MaxReserve() / 2;
  if (layout_->size() <= most) return absl::OkStatus();

  const RegionPlace& first = layout_->regions().front();
  streams_ = first.has_rows() && !first.region().accumulates && first.region().row_numerator == first.region().row_denominator &&
             first.grows_with_columns();
  for (size_t i = 0; i < layout_->regions().size(); ++i) {
    const RegionPlace& place = layout_->regions()[i];
    side_offsets_.push_back(side_size_);
    if (IsSide(i) && place.has_rows()) side_size_ += RoundUp(place.size(), 64);
  }
  // Inputs stand in the same ring as long as the module lives; what is left of it is whole only on one side of them.
  const uint64_t inputs = inputs_->held_bytes();
  const uint64_t room = inputs == 0 ? context_.held().largest() : RoundDown((context_.held().largest() - inputs) / 2, kIoBlock);
  place_ = side_size_ <= room ? SidePlace::kHeld : SidePlace::kSpill;
  QUERN_ASSIGN_OR_RETURN(tiling_, ChooseTiling(feed));
  return absl::OkStatus();
}

absl::Status ModuleWriter::Start() {
  const quant::Scheme& scheme = layout_->scheme();
  const quant::Shape2D shape = reader_->shape();
  QUERN_ASSIGN_OR_RETURN(inputs_, LoadedInputs::Start(context_, unit_, scheme, shape.cols, /*all=*/true));
  awaits_ = inputs_->awaits();
  // What even whole rows need is the scale of a tensor or of a set.
  if (scheme.NeedsStatistics(shape, {std::min(shape.rows, scheme.RowMultiple()), shape.cols})) {
    QUERN_ASSIGN_OR_RETURN(pass_, sets_.Observe(unit_, scheme, reader_, inputs_));
  }
  {
    WeightFeed feed(&context_, reader_, pass_.weight, {});
    QUERN_RETURN_IF_ERROR(ChoosePlace(feed));
  }
  if (pass_.statistics == nullptr && scheme.NeedsStatistics(shape, {tiling_.band_rows, tiling_.segment_cols})) {
    QUERN_ASSIGN_OR_RETURN(pass_.statistics, StatisticsSets::ObserveOne(context_, scheme, reader_, inputs_));
  }
  if (pass_.statistics != nullptr) awaits_.push_back(pass_.statistics->ready());
  part_rows_ = CacheRows(reader_->row_bytes(), tiling_.block_rows);

  QUERN_RETURN_IF_ERROR(ReserveSides());
  if (layout_->has_computed()) QUERN_RETURN_IF_ERROR(StartComputed());
  WeightFeed feed(&context_, reader_, pass_.weight, awaits_);
  QUERN_RETURN_IF_ERROR(feed.StartRequest(scheme.RowMultiple(), scheme.ColumnMultiple()).status());
  std::shared_ptr<Strand> strand;
  std::shared_ptr<Block> block;
  QUERN_RETURN_IF_ERROR(feed.ForEachTile(tiling_, [&](const TileRange& range) {
    if (tiling_.segments && range.block_begins) {
      strand = std::make_shared<Strand>();
      block = std::make_shared<Block>();
    }
    return StartTile(feed, range, strand, block);
  }));
  if (place_ != SidePlace::kWindow) QUERN_RETURN_IF_ERROR(FlushSides());
  // The steps have what they need of it; memory goes back as they end.
  pass_.weight.reset();
  sets_.Started(pass_);
  return absl::OkStatus();
}

absl::Status ModuleWriter::ReserveSides() {
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
      return absl::OkStatus();
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
      return absl::OkStatus();
    }
    case SidePlace::kSpill: {
      absl::StatusOr<std::unique_ptr<SpillFile>> spill = context_.CreateSpill(side_size_);
      QUERN_RETURN_IF_ERROR(spill.status());
      spill_ = *std::move(spill);
      return absl::OkStatus();
    }
  }
  return absl::OkStatus();
}

absl::Status ModuleWriter::StartComputed() {
  auto step = std::make_unique<Step>();
  step->what = absl::StrCat("module of tensor ", reader_->tensor());
  step->awaits = awaits_;
  step->holds = encoded_;
  step->compute = [self = shared_from_this()](Step::Done done) {
    absl::StatusOr<std::vector<std::string>> computed = self->layout_->ComputedRegions(self->statistics(), self->inputs_->Get());
    if (!computed.ok()) {
      done(self->Explain(computed.status()));
      return;
    }
    self->computed_ = *std::move(computed);
    if (self->place_ == SidePlace::kWindow) {
      for (size_t i = 0; i < self->computed_.size(); ++i) {
        const RegionPlace& place = self->layout_->regions()[i];
        if (!place.computed()) continue;
        memcpy(self->context_.output().At(place.offset()), self->computed_[i].data(), place.size());
        self->context_.output().Complete(place.offset(), place.size());
      }
    }
    done(absl::OkStatus());
  };
  return context_.engine().Start(std::move(step));
}

absl::Status ModuleWriter::StartTile(WeightFeed& feed, const TileRange& range, const std::shared_ptr<Strand>& strand,
                                     const std::shared_ptr<Block>& block) {
  if (place_ != SidePlace::kWindow && streams_) {
    QUERN_RETURN_IF_ERROR(
        context_.Reserve(layout_->regions().front().TileBytes(range.row_begin, range.row_end, range.col_begin, range.col_end)));
  }
  WeightFeed::Work work;
  work.extra = ScratchBytes(range);
  work.holds = encoded_;
  work.strand = strand;
  work.compute = [self = shared_from_this(), range, block](const std::shared_ptr<const SourceTile>& tile, std::byte* scratch,
                                                           Step::Done done) {
    if (block == nullptr) {
      self->EncodeBand(range, tile, scratch, std::move(done));
    } else {
      self->EncodeSegment(range, *tile, scratch, block, std::move(done));
    }
  };
  return feed.Start(range, std::move(work));
}

void ModuleWriter::EncodeBand(const TileRange& range, const std::shared_ptr<const SourceTile>& tile, std::byte* scratch, Step::Done done) {
  if (absl::Status status = LoadScratch(range, scratch); !status.ok()) {
    done(status);
    return;
  }
  auto band = std::make_shared<Band>();
  band->writer = shared_from_this();
  band->tile = tile;
  band->range = range;
  band->scratch = scratch;
  band->done = std::move(done);
  band->rows.resize(range.rows());
  const int64_t part_rows = part_rows_;
  {
    MutexLock lock(&band->mutex);
    band->pending = (range.rows() + part_rows - 1) / part_rows;
  }
  for (int64_t row = range.row_begin; row < range.row_end; row += part_rows) {
    const int64_t row_end = std::min(row + part_rows, range.row_end);
    quant::EncodeBackend::Request request;
    request.scheme = &layout_->scheme();
    const absl::StatusOr<quant::Tile> rows = tile->Rows(row, row_end);
    if (!rows.ok()) {
      band->PartEnded(rows.status());
      continue;
    }
    request.tile = *rows;
    request.inputs = inputs_->Get();
    request.statistics = statistics();
    request.nonfinite = layout_->nonfinite();
    // Digested just before it is encoded, so that it is read from memory once.
    RowResult* const results = band->rows.data() + (row - range.row_begin);
    for (int64_t i = 0; i < row_end - row; ++i) {
      results[i].digest = Xxh3Of(request.tile.data + i * request.tile.row_stride, static_cast<size_t>(reader_->row_bytes()));
    }
    auto part = std::make_shared<Band::Part>();
    const TileRange part_range{row, row_end, 0, reader_->shape().cols};
    part->buffers = Buffers(part_range, range, scratch);
    if (place_ != SidePlace::kSpill) {
      for (size_t i = 0; i < part->buffers.size(); ++i) {
        const RegionPlace& place = layout_->regions()[i];
        if (place.region().accumulates && !(place_ == SidePlace::kHeld && IsSide(i))) {
          memset(part->buffers[i].data, 0, place.TileBytes(row, row_end, 0, reader_->shape().cols));
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

void ModuleWriter::EncodeSegment(const TileRange& range, const SourceTile& tile, std::byte* scratch, const std::shared_ptr<Block>& block,
                                 Step::Done done) {
  const absl::StatusOr<quant::Tile> segment = tile.Rows(range.row_begin, range.row_end);
  if (!segment.ok()) {
    done(Explain(segment.status()));
    return;
  }
  quant::EncodeBackend::Request request;
  request.scheme = &layout_->scheme();
  request.tile = *segment;
  request.inputs = inputs_->Get();
  request.statistics = statistics();
  request.nonfinite = layout_->nonfinite();
  if (range.col_begin == 0) {
    block->digest.Reset();
    block->error = quant::RowError();
  }
  block->digest.Update(request.tile.data, static_cast<size_t>(range.cols() * reader_->element_size()));
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
      if (range.col_end == self->shape().cols) {
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
        self->CompleteRows(RoundDown(range.row_begin, self->tiling_.block_rows), range.row_end);
      }
    }
    done(self->Explain(status));
  });
}

std::vector<quant::RegionBuffer> ModuleWriter::Buffers(const TileRange& range, const TileRange& whole, std::byte* scratch) const {
  std::vector<quant::RegionBuffer> buffers(layout_->regions().size());
  for (size_t i = 0; i < buffers.size(); ++i) {
    const RegionPlace& place = layout_->regions()[i];
    if (!place.has_rows()) continue;
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
    if (IsSide(i) && place.has_rows()) {
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
    if (!IsSide(i) || !place.has_rows()) continue;
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
    if (!place.has_rows() || (place_ != SidePlace::kWindow && IsSide(i))) continue;
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
      step->what = absl::StrCat("module of tensor ", reader_->tensor());
      step->awaits.push_back(encoded_);
      step->compute = [self = shared_from_this(), i, at, size, to](Step::Done done) {
        absl::Status status;
        const uint64_t from = self->side_offsets_[i] + at;
        if (self->layout_->regions()[i].computed()) {
          memcpy(to, self->computed_[i].data() + at, size);
        } else if (self->place_ == SidePlace::kHeld) {
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

absl::Status ModuleWriter::Explain(const absl::Status& status) const { return Annotate(status, reader_->path()); }

}  // namespace quern::worker
