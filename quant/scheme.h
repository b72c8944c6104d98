// The interface between the streaming pipeline and a number format.
//
// A weight [rows, cols] of dtype D is processed in tiles. A tile is either a band (a range of rows, full width, starting at a multiple of
// RowMultiple() rows) or a segment (one row, a range of columns starting at a multiple of ColumnMultiple()). Segments of one row are given
// in ascending order. Neither the bytes nor the error figures depend on the tiles.
//
// Passes: where NeedsStatistics(tile shape) is true, every tile first goes through Observe into a Statistics, which is merged over tiles,
// threads and the other weights of a fused set; then every tile goes through Encode with the result. Else Encode alone.
#ifndef QUERN_QUANT_SCHEME_H_
#define QUERN_QUANT_SCHEME_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/dtype.h"
#include "quant/row_error.h"
#include "quant/scheme_spec.h"

namespace quern::quant {

struct Shape2D {
  int64_t rows = 0;
  int64_t cols = 0;
};

// A part of the weight with its elements in memory, dense along a row.
struct Tile {
  DType dtype;
  int64_t row_begin = 0, row_end = 0;  // of the whole weight
  int64_t col_begin = 0, col_end = 0;
  const std::byte* data = nullptr;  // element [row_begin, col_begin]; aligned to the element size
  int64_t row_stride = 0;           // bytes

  int64_t rows() const { return row_end - row_begin; }
  int64_t cols() const { return col_end - col_begin; }
};

// One tensor that the format stores for a weight.
struct Region {
  std::string suffix;  // "weight_packed", appended to "<module>."
  DType dtype;
  std::vector<uint64_t> shape;
  std::string constant;  // bytes known from the shape alone (weight_shape), else empty
  // Bytes known once the statistics pass has ended (scales of a whole tensor or set): see Scheme::ComputedRegions. Such a region has no
  // rows.
  bool computed = false;
  // The region's bytes as rows, and how many of the weight's rows share one (32 / gcd for packed zero points: row r of the weight touches
  // region rows [r*num/den, ceil((r+1)*num/den))).
  int64_t bytes_per_row = 0;
  int64_t row_numerator = 1, row_denominator = 1;
  // Regions with `accumulates` are OR-ed into: the buffer must be zeroed before the first tile.
  bool accumulates = false;
};

// Where Encode writes (Decode reads) one region: byte `first_byte` of region row `first_row` is at `data`.
struct RegionBuffer {
  std::byte* data = nullptr;
  int64_t first_row = 0;
  int64_t first_byte = 0;
  int64_t row_stride = 0;  // bytes between region rows
};

// Optional inputs of a module: the largest magnitude of its input activations, and E[x^2] for each of the weight's columns (all of them,
// whatever the tile).
struct ModuleInputs {
  std::optional<float> activation_amax;
  absl::Span<const float> importance;
};

// What Observe gathers over tiles of one weight or of a fused set. Merging is associative and commutative.
class Statistics {
 public:
  virtual ~Statistics() = default;
  virtual void Merge(const Statistics& other) = 0;
};

enum class NonfinitePolicy { kFail, kClamp };

class Scheme {
 public:
  // The implementation for a supported spec. Immutable and thread-safe; lives as long as the program.
  static absl::StatusOr<const Scheme*> For(const SchemeSpec& spec);
  virtual ~Scheme() = default;

  virtual const SchemeSpec& spec() const = 0;

  // Whether a weight of this shape and dtype can be quantized: INVALID_ARGUMENT says why not ("64 columns are no multiple of the group size
  // 128").
  virtual absl::Status CheckWeight(DType dtype, Shape2D shape) const = 0;
  // The tensors stored, in file order.
  virtual absl::StatusOr<std::vector<Region>> Regions(DType dtype, Shape2D shape) const = 0;
  // Segments begin at multiples of this many columns, bands at multiples of this many rows (a multiple of 32).
  virtual int64_t ColumnMultiple() const = 0;
  virtual int64_t RowMultiple() const { return 32; }
  // Bits that the format stores for each weight, scales counted.
  virtual double EffectiveBits(DType dtype, Shape2D shape) const = 0;

  // Of how many rows a search for one scale must see all columns in one tile: 128 where it is a block's, 1 where it is a row's, 0 where any
  // tile will do. One row is then given as a segment of all its columns, too.
  int64_t RowsSearchedWhole() const;

  // Whether one scale is shared by all weights of a fused set (NVFP4's global scale), so that statistics are those of the set.
  virtual bool SharesSetScale() const { return false; }
  // Whether ModuleInputs::importance, ModuleInputs::activation_amax are needed.
  virtual bool NeedsImportance() const { return false; }
  virtual bool NeedsActivationAmax() const { return false; }
  // INVALID_ARGUMENT says why no scale can be stored for inputs of this magnitude beside a weight of the dtype ("overflows F16").
  virtual absl::Status CheckActivationAmax(DType dtype, float amax) const;
  // Whether tiles of this form need the statistics pass (channel scales over segments; a scale over a whole tensor or set).
  virtual bool NeedsStatistics(Shape2D weight, Shape2D tile) const = 0;
  virtual std::unique_ptr<Statistics> NewStatistics(Shape2D weight) const = 0;
  virtual absl::Status Observe(const Tile& tile, const ModuleInputs& inputs, Statistics& statistics) const = 0;

  // Bytes of each region with `computed`, in their order. `statistics` is null where there are none.
  virtual absl::StatusOr<std::vector<std::string>> ComputedRegions(DType dtype, Shape2D shape, const Statistics* statistics,
                                                                   const ModuleInputs& inputs) const;

  // Encodes a tile into its regions (constant and computed ones have no buffer: their entry is ignored) and adds each row's error to
  // `errors`, one accumulator a row of the tile. `statistics` is null where NeedsStatistics is false. A NaN or Inf is INVALID_ARGUMENT
  // naming row and column with kFail; with kClamp NaN becomes 0 and Inf half the largest finite value, and the row's error counts them.
  // Thread-safe for disjoint rows, except that bands must not share a row of an accumulating region (multiples of RowMultiple() rows never
  // do).
  virtual absl::Status Encode(const Tile& tile, const ModuleInputs& inputs, const Statistics* statistics, NonfinitePolicy nonfinite,
                              absl::Span<const RegionBuffer> regions, absl::Span<RowError> errors) const = 0;

  // The inverse: fills the rows and columns of `tile` (dtype D; `data` is written through `out`) from the regions, as the format's own
  // library decompresses, rounded to D. Computed regions are given whole, constant ones are ignored.
  virtual absl::Status Decode(const Tile& tile, absl::Span<const RegionBuffer> regions, std::byte* out) const = 0;

  // Adds the error between a source tile and decoded values laid out alike, in the same order of sums as Encode.
  static void AddErrors(const Tile& source, const std::byte* decoded, int64_t decoded_row_stride, absl::Span<RowError> errors);
};

// The SIMD target that kernels run on here, for example "AVX3" or "AVX2".
std::string KernelTarget();

// Asynchronous form: a backend takes tiles and calls back when they are done, in any order, from any thread. The CPU one runs inline in
// Submit; a GPU one queues copies and kernels. Thread-safe.
class EncodeBackend {
 public:
  struct Request {
    const Scheme* scheme = nullptr;
    Tile tile;
    ModuleInputs inputs;
    const Statistics* statistics = nullptr;
    NonfinitePolicy nonfinite = NonfinitePolicy::kFail;
    absl::Span<const RegionBuffer> regions;  // these and `errors` stay valid until `done`
    absl::Span<RowError> errors;
  };
  virtual ~EncodeBackend() = default;
  virtual void Submit(const Request& request, std::function<void(absl::Status)> done) = 0;
  static EncodeBackend* Cpu();
};

// Runs golden vectors through the active kernels; an error says which scheme and value differ.
absl::Status SelfTest();

}  // namespace quern::quant

#endif  // QUERN_QUANT_SCHEME_H_
