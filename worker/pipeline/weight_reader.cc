#include "worker/pipeline/weight_reader.h"

#include <string.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "worker/pipeline/task_context.h"

namespace quern::worker {
namespace {

// Scales of a whole tensor: a handful of bytes. A plan that says more is wrong.
constexpr uint64_t kMostComputedBytes = 256;

// Whether elements of a rows x cols array stand apart and within `limit` bytes of a file, where `small` is the stride of the axis that is
// dense or nearly so.
bool StandsApart(int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride, int64_t element, uint64_t offset, uint64_t limit) {
  if (row_stride < element || col_stride < element) return false;
  const bool by_rows = row_stride >= col_stride;
  const __int128 run = by_rows ? __int128{cols - 1} * col_stride + element : __int128{rows - 1} * row_stride + element;
  const int64_t runs = by_rows ? rows : cols;
  const int64_t stride = by_rows ? row_stride : col_stride;
  if (runs > 1 && stride < run) return false;
  return __int128{runs - 1} * stride + run + offset <= limit;
}

}  // namespace

std::string WeightReader::What() const { return absl::StrCat("tensor ", tensor_, " of ", file_->path); }

absl::StatusOr<std::shared_ptr<WeightReader>> WeightReader::For(const quern::v1::TensorView& view, absl::Span<const SourceHandle> files) {
  std::shared_ptr<WeightReader> reader(new WeightReader);
  const std::string what = absl::StrCat("tensor ", view.tensor());
  if (view.file() >= files.size()) return absl::InvalidArgumentError(absl::StrCat(what, ": the task has no source file ", view.file()));
  reader->file_ = &files[view.file()];
  reader->tensor_ = view.tensor();
  QUERN_ASSIGN_OR_RETURN(reader->dtype_, ParseDType(view.dtype()));
  if (BitsPerElement(reader->dtype_) % 8 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": ", view.dtype(), " has no byte size"));
  }
  reader->element_size_ = BytesPerElement(reader->dtype_);
  reader->offset_ = view.offset();
  if (!view.decode_scheme().empty()) {
    if (absl::Status status = reader->CheckEncoded(view, files); !status.ok()) return Annotate(status, what);
    return reader;
  }
  if (view.decode_size() > 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": the plan has ", view.decode_size(), " tensors to decode it with, but no scheme"));
  }
  QUERN_RETURN_IF_ERROR(reader->CheckPlain(view));
  return reader;
}

absl::Status WeightReader::CheckPlain(const quern::v1::TensorView& view) {
  const std::string what = absl::StrCat("tensor ", view.tensor());
  // Dimensions of a file are below 2^62 bytes, so that products with strides fit.
  const uint64_t limit = file_->size;
  if (view.rows() > limit || view.cols() > limit) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": ", view.rows(), " x ", view.cols(), " elements in a file of ", limit, " bytes"));
  }
  shape_ = {static_cast<int64_t>(view.rows()), static_cast<int64_t>(view.cols())};
  row_stride_ = view.row_stride();
  col_stride_ = view.col_stride();
  if (shape_.rows == 0 || shape_.cols == 0) {
    col_stride_ = element_size_;
    return absl::OkStatus();
  }
  // The stride of an axis of one element says nothing.
  if (shape_.cols == 1) col_stride_ = element_size_;
  if (shape_.rows == 1) row_stride_ = std::max(row_stride_, static_cast<int64_t>(element_size_));
  if (shape_.rows == 1 && col_stride_ == element_size_) row_stride_ = row_bytes();
  if (!StandsApart(shape_.rows, shape_.cols, row_stride_, col_stride_, element_size_, offset_, limit)) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": the view leads out of ", file_->path, " or overlaps itself"));
  }
  if (needs_gather() && element_size_ > 4) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": elements of ", element_size_, " bytes cannot be gathered"));
  }
  return absl::OkStatus();
}

absl::Status WeightReader::CheckEncoded(const quern::v1::TensorView& view, absl::Span<const SourceHandle> files) {
  QUERN_ASSIGN_OR_RETURN(const quant::SchemeSpec spec, quant::SchemeSpec::Parse(view.decode_scheme()));
  QUERN_ASSIGN_OR_RETURN(decode_, quant::Scheme::For(spec));
  if (view.rows() > INT64_MAX || view.cols() > INT64_MAX) {
    return absl::InvalidArgumentError(absl::StrCat("a weight of ", view.rows(), " x ", view.cols(), " elements is too large"));
  }
  shape_ = {static_cast<int64_t>(view.rows()), static_cast<int64_t>(view.cols())};
  row_stride_ = 0;
  QUERN_ASSIGN_OR_RETURN(std::vector<RegionExtent> extents, RegionExtent::For(*decode_, dtype_, shape_));
  for (size_t i = 0; i < extents.size(); ++i) {
    EncodedRegion region;
    region.extent = std::move(extents[i]);
    const RegionExtent& extent = region.extent;
    if (static_cast<int>(i) >= view.decode_size()) {
      if (!extent.constant()) {
        return absl::InvalidArgumentError(absl::StrCat("the plan does not say where its ", extent.region().suffix, " stands"));
      }
      regions_.push_back(std::move(region));
      continue;
    }
    const quern::v1::TensorView& bytes = view.decode(static_cast<int>(i)).view();
    const auto wrong = [&](absl::string_view why) {
      return absl::InvalidArgumentError(absl::StrCat("its ", extent.region().suffix, " (tensor ", bytes.tensor(), "): ", why));
    };
    if (!bytes.decode_scheme().empty() || bytes.decode_size() > 0) return wrong("a view of bytes is expected");
    if (bytes.file() >= files.size()) return wrong(absl::StrCat("the task has no source file ", bytes.file()));
    region.file = &files[bytes.file()];
    region.offset = bytes.offset();
    if (!extent.constant()) {
      const int64_t rows = extent.computed() ? 1 : extent.Rows(0, shape_.rows).end;
      const int64_t cols = extent.computed() ? static_cast<int64_t>(extent.size()) : extent.bytes_per_row();
      if (extent.computed() && extent.size() > kMostComputedBytes) return wrong(absl::StrCat(extent.size(), " bytes are too many"));
      if (bytes.dtype() != "U8" || bytes.rows() != static_cast<uint64_t>(rows) || bytes.cols() != static_cast<uint64_t>(cols)) {
        return wrong(absl::StrCat("the plan has ", bytes.dtype(), " [", bytes.rows(), ", ", bytes.cols(), "], the scheme stores U8 [", rows,
                                  ", ", cols, "]"));
      }
      region.row_stride = rows == 1 ? cols : bytes.row_stride();
      if ((cols > 1 && bytes.col_stride() != 1) ||
          !StandsApart(rows, cols, std::max<int64_t>(region.row_stride, rows == 1 ? 1 : 0), 1, 1, region.offset, region.file->size)) {
        return wrong(absl::StrCat("the view leads out of ", region.file->path, ", overlaps itself or has gaps within a row"));
      }
    }
    regions_.push_back(std::move(region));
  }
  if (view.decode_size() > static_cast<int>(regions_.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("the plan has ", view.decode_size(), " tensors to decode it with, the scheme ", regions_.size()));
  }
  return absl::OkStatus();
}

bool WeightReader::prefers_gather() const {
  if (decode_ != nullptr || shape_.rows == 0 || shape_.cols == 0) return false;
  return col_stride_ != element_size_ || (shape_.rows > 1 && row_stride_ > 2 * row_bytes());
}

absl::Status WeightReader::Prepare(TaskContext& context) {
  if (ready_ != nullptr) return absl::OkStatus();
  uint64_t size = 0;
  auto step = std::make_unique<Step>();
  std::vector<std::pair<EncodedRegion*, uint64_t>> places;
  for (EncodedRegion& region : regions_) {
    if (!region.extent.computed() || region.extent.size() == 0) continue;
    places.emplace_back(&region, size);
    step->reads.push_back({region.file, region.offset, region.extent.size(), nullptr, nullptr});
    size += BufferFor(region.offset, region.extent.size());
  }
  if (places.empty()) return absl::OkStatus();
  step->what = absl::StrCat("tensor ", tensor_);
  QUERN_ASSIGN_OR_RETURN(step->buffer, context.engine().AcquireInput(size));
  std::byte* const buffer = step->buffer.data();
  for (size_t i = 0; i < places.size(); ++i) step->reads[i].buffer = buffer + places[i].second;
  ready_ = std::make_shared<Gate>();
  step->holds = ready_;
  step->compute = [self = shared_from_this(), places = std::move(places), buffer](Step::Done done) {
    for (const auto& [region, at] : places) {
      region->bytes.assign(reinterpret_cast<const char*>(buffer + at + region->offset % kIoBlock), region->extent.size());
    }
    done(absl::OkStatus());
  };
  return context.engine().Start(std::move(step));
}

PlannedTile WeightReader::Plan(const TileRange& range) const {
  PlannedTile tile;
  tile.reader_ = shared_from_this();
  tile.range_ = range;
  if (decode_ == nullptr) {
    const uint64_t offset = OffsetOf(range.row_begin, range.col_begin);
    const uint64_t size = SpanBytes(range.rows(), range.cols());
    tile.reads_.push_back({file_, offset, size, 0});
    tile.size_ = BufferFor(offset, size);
    return tile;
  }
  for (const EncodedRegion& region : regions_) {
    PlannedTile::Part& part = tile.parts_.emplace_back();
    if (!region.extent.has_rows()) continue;
    const Run rows = region.extent.Rows(range.row_begin, range.row_end);
    const Run bytes = region.extent.Columns(range.col_begin, range.col_end);
    part.first_read = tile.reads_.size();
    part.first_row = rows.begin;
    part.first_byte = bytes.begin;
    part.row_bytes = bytes.size();
    part.row_stride = region.row_stride;
    part.alignment = std::max(BitsPerElement(region.extent.region().dtype) / 8, 1);
    const uint64_t offset = region.offset + static_cast<uint64_t>(rows.begin * region.row_stride + bytes.begin);
    const auto add = [&](uint64_t from, uint64_t size) {
      tile.reads_.push_back({region.file, from, size, tile.size_});
      tile.size_ += BufferFor(from, size);
      ++part.reads;
    };
    if (rows.size() > 1 && ReadOneByOne(bytes.size(), region.row_stride)) {
      for (int64_t row = 0; row < rows.size(); ++row) {
        add(offset + static_cast<uint64_t>(row * region.row_stride), static_cast<uint64_t>(bytes.size()));
      }
      part.row_stride = bytes.size();
    } else {
      add(offset, static_cast<uint64_t>((rows.size() - 1) * region.row_stride + bytes.size()));
    }
  }
  tile.decoded_at_ = tile.size_;
  tile.size_ = RoundUp(tile.size_ + static_cast<uint64_t>(range.rows() * range.cols() * element_size_), kIoBlock);
  return tile;
}

uint64_t WeightReader::TileBytes(int64_t rows, int64_t cols) const {
  if (decode_ == nullptr) return BufferFor(kIoBlock - 1, SpanBytes(rows, cols));
  uint64_t size = RoundUp(static_cast<uint64_t>(rows * cols * element_size_), kIoBlock);
  for (const EncodedRegion& region : regions_) {
    if (!region.extent.has_rows()) continue;
    // A row more than at the start of the weight, where tiles begin within a row of the region.
    const int64_t region_rows = region.extent.Rows(0, rows).size() + 1;
    const int64_t bytes = region.extent.Columns(0, cols).size();
    if (ReadOneByOne(bytes, region.row_stride)) {
      size += static_cast<uint64_t>(region_rows) * BufferFor(kIoBlock - 1, static_cast<uint64_t>(bytes));
    } else {
      size += BufferFor(kIoBlock - 1, static_cast<uint64_t>((region_rows - 1) * region.row_stride + bytes));
    }
  }
  return size;
}

void PlannedTile::Arrange(std::byte* buffer) {
  buffer_ = buffer;
  // Down to a multiple of the element size where the file has the bytes at another place.
  const auto align = [buffer](const PlannedRead& read, int alignment) {
    std::byte* data = buffer + read.at + read.offset % kIoBlock;
    if (const uint64_t shift = read.offset % static_cast<uint64_t>(alignment); shift != 0) {
      memmove(data - shift, data, read.size);
      data -= shift;
    }
    return data;
  };
  if (!reader_->decodes()) {
    data_ = align(reads_[0], reader_->element_size());
    return;
  }
  for (size_t i = 0; i < parts_.size(); ++i) {
    const Part& part = parts_[i];
    quant::RegionBuffer& to = buffers_.emplace_back();
    to.first_row = part.first_row;
    to.first_byte = part.first_byte;
    to.row_stride = part.row_stride;
    if (part.reads == 1) {
      to.data = align(reads_[part.first_read], part.alignment);
    } else if (part.reads > 1) {
      // Together, at the start of the first: each read stands behind where its row goes.
      std::byte* const first = buffer + reads_[part.first_read].at;
      for (size_t row = 0; row < part.reads; ++row) {
        const PlannedRead& read = reads_[part.first_read + row];
        memmove(first + static_cast<int64_t>(row) * part.row_bytes, buffer + read.at + read.offset % kIoBlock, read.size);
      }
      to.data = first;
    } else {
      to.data = reinterpret_cast<std::byte*>(const_cast<char*>(reader_->regions_[i].bytes.data()));
      to.row_stride = static_cast<int64_t>(reader_->regions_[i].bytes.size());
    }
  }
}

absl::StatusOr<quant::Tile> PlannedTile::Rows(int64_t begin, int64_t end) const {
  quant::Tile tile{reader_->dtype(), begin, end, range_.col_begin, range_.col_end, nullptr, reader_->row_stride()};
  if (!reader_->decodes()) {
    tile.data = data_ + (begin - range_.row_begin) * tile.row_stride;
    return tile;
  }
  tile.row_stride = range_.cols() * reader_->element_size();
  std::byte* const out = buffer_ + decoded_at_ + (begin - range_.row_begin) * tile.row_stride;
  QUERN_RETURN_IF_ERROR(CopyRows(begin, end, out, tile.row_stride));
  tile.data = out;
  return tile;
}

absl::Status PlannedTile::CopyRows(int64_t begin, int64_t end, std::byte* out, int64_t out_stride) const {
  if (reader_->decodes()) {
    const quant::Tile tile{reader_->dtype(), begin, end, range_.col_begin, range_.col_end, nullptr, out_stride};
    return reader_->decode_->Decode(tile, buffers_, out);
  }
  for (int64_t row = begin; row < end; ++row) {
    memcpy(out + (row - begin) * out_stride, data_ + (row - range_.row_begin) * reader_->row_stride(),
           static_cast<size_t>(range_.cols() * reader_->element_size()));
  }
  return absl::OkStatus();
}

}  // namespace quern::worker
