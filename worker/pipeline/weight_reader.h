// How the bytes of a weight are read: which reads fetch a tile, and how the tile is made of them.
//
// Three kinds. Contiguous rows are used where they land. Encoded weights (decode_scheme) are read region by region and decoded. Weights
// whose columns are not contiguous (transposed, interleaved), or whose rows are far apart, would cost a block of the disk for every few
// bytes: they are gathered, many rows at once, into memory of their own (WeightSlab).
#ifndef QUERN_WORKER_PIPELINE_WEIGHT_READER_H_
#define QUERN_WORKER_PIPELINE_WEIGHT_READER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/dtype.h"
#include "quant/scheme.h"
#include "quern/v1/plan.pb.h"
#include "worker/io/source_reader.h"
#include "worker/pipeline/engine.h"
#include "worker/pipeline/region_extent.h"

namespace quern::worker {

class TaskContext;

// A read into a buffer that is not there yet: BufferFor(offset, size) bytes at `at` of it, a multiple of kIoBlock.
struct PlannedRead {
  const SourceHandle* file = nullptr;
  uint64_t offset = 0;
  uint64_t size = 0;
  uint64_t at = 0;
};

// Whether runs of so many bytes that begin `stride` bytes apart are better read one by one than with what lies between them. A read by
// itself takes as long as moving tens of KiB.
inline constexpr bool ReadOneByOne(int64_t bytes, int64_t stride) {
  constexpr int64_t kReadCost = 32 * 1024;
  return static_cast<int64_t>(BufferFor(kIoBlock - 1, static_cast<uint64_t>(bytes))) + kReadCost < stride;
}

class PlannedTile;

// Immutable and thread-safe, but for Prepare. Shared by the steps that read the weight.
class WeightReader : public std::enable_shared_from_this<WeightReader> {
 public:
  // INVALID_ARGUMENT for a view that leads out of its files, overlaps itself or is of no known kind. `files` outlive the reader.
  static absl::StatusOr<std::shared_ptr<WeightReader>> For(const quern::v1::TensorView& view, absl::Span<const SourceHandle> files);

  const std::string& tensor() const { return tensor_; }
  const std::string& path() const { return file_->path; }
  std::string What() const;  // "tensor x of file y", for messages
  DType dtype() const { return dtype_; }
  int element_size() const { return element_size_; }
  quant::Shape2D shape() const { return shape_; }
  int64_t row_bytes() const { return shape_.cols * element_size_; }  // of the weight as the encoder takes it

  bool contiguous() const { return decode_ == nullptr && col_stride_ == element_size_; }
  bool decodes() const { return decode_ != nullptr; }
  // Better, or only, read by gathering.
  bool prefers_gather() const;
  bool needs_gather() const { return decode_ == nullptr && col_stride_ != element_size_; }
  // Bands begin at multiples of RowMultiple() rows, segments at multiples of ColumnMultiple() columns.
  int64_t RowMultiple() const { return decode_ == nullptr ? 1 : decode_->RowMultiple(); }
  int64_t ColumnMultiple() const { return decode_ == nullptr ? 1 : decode_->ColumnMultiple(); }

  // Starts the step that reads what every tile needs (scales of the whole tensor), if there is any: tiles are made once ready() is open,
  // which is null where there is no such step. By the task's thread; does nothing the second time.
  absl::Status Prepare(TaskContext& context);
  const std::shared_ptr<Gate>& ready() const { return ready_; }

  // Tiles of weights that need no gathering.
  PlannedTile Plan(const TileRange& range) const;
  // At least PlannedTile::size() of any tile of so many rows and columns.
  uint64_t TileBytes(int64_t rows, int64_t cols) const;

  // Of weights that are gathered: element (row, col) stands at OffsetOf. Runs are contiguous but for gaps between their elements: rows
  // of the weight, or its columns.
  const SourceHandle* file() const { return file_; }
  uint64_t OffsetOf(int64_t row, int64_t col) const { return offset_ + static_cast<uint64_t>(row * row_stride_ + col * col_stride_); }
  int64_t row_stride() const { return row_stride_; }
  int64_t col_stride() const { return col_stride_; }

 private:
  friend class PlannedTile;
  // One region of an encoded weight.
  struct EncodedRegion {
    RegionExtent extent;
    const SourceHandle* file = nullptr;
    uint64_t offset = 0;
    int64_t row_stride = 0;
    std::string bytes;  // of computed regions, once read
  };

  WeightReader() = default;
  absl::Status CheckPlain(const quern::v1::TensorView& view);
  absl::Status CheckEncoded(const quern::v1::TensorView& view, absl::Span<const SourceHandle> files);
  uint64_t SpanBytes(int64_t rows, int64_t cols) const {
    return static_cast<uint64_t>((rows - 1) * row_stride_ + (cols - 1) * col_stride_ + element_size_);
  }

  std::string tensor_;
  const SourceHandle* file_ = nullptr;
  DType dtype_ = DType::kBF16;
  int element_size_ = 0;
  uint64_t offset_ = 0;
  quant::Shape2D shape_;
  int64_t row_stride_ = 0;
  int64_t col_stride_ = 0;
  const quant::Scheme* decode_ = nullptr;
  std::vector<EncodedRegion> regions_;
  std::shared_ptr<Gate> ready_;
};

// A tile on its way: the reads that it takes, then the rows of the tile. Not thread-safe.
class PlannedTile {
 public:
  const std::vector<PlannedRead>& reads() const { return reads_; }
  uint64_t size() const { return size_; }  // of the buffer, a multiple of kIoBlock

  // After all reads are in. `buffer` is aligned to kIoBlock.
  void Arrange(std::byte* buffer);
  // Rows [begin, end) of the tile, all its columns; `begin` is where the tile begins or a multiple of RowMultiple(). Decodes them now. The
  // tile stays valid as long as the buffer.
  absl::StatusOr<quant::Tile> Rows(int64_t begin, int64_t end) const;
  // Likewise, into rows `out_stride` bytes apart. Of any kind.
  absl::Status CopyRows(int64_t begin, int64_t end, std::byte* out, int64_t out_stride) const;

 private:
  friend class WeightReader;
  struct Part {  // of a region
    size_t first_read = 0;
    size_t reads = 0;  // 1: all rows, else one a row
    int64_t first_row = 0;
    int64_t first_byte = 0;
    int64_t row_bytes = 0;
    int64_t row_stride = 0;  // in the buffer
    int alignment = 1;
  };

  std::shared_ptr<const WeightReader> reader_;
  TileRange range_;
  std::vector<PlannedRead> reads_;
  std::vector<Part> parts_;
  uint64_t decoded_at_ = 0;
  uint64_t size_ = 0;
  std::byte* buffer_ = nullptr;
  const std::byte* data_ = nullptr;  // of a contiguous tile
  std::vector<quant::RegionBuffer> buffers_;
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_PIPELINE_WEIGHT_READER_H_
