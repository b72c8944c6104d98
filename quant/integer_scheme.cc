#include "quant/integer_scheme.h"

#include <cstring>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "quant/tile_status.h"

namespace quern::quant {
namespace {

// Codes of so many columns fill whole words at any width, and so do zero points of so many rows.
constexpr int64_t kWordMultiple = 32;

// Ranges of the rows of a weight whose scales are per row.
class RowRanges : public Statistics {
 public:
  explicit RowRanges(int64_t rows) : ranges(rows) {}

  void Merge(const Statistics& other) override {
    const auto& from = static_cast<const RowRanges&>(other).ranges;
    for (size_t row = 0; row < ranges.size() && row < from.size(); ++row) {
      if (from[row].low < ranges[row].low) ranges[row].low = from[row].low;
      if (from[row].high > ranges[row].high) ranges[row].high = from[row].high;
    }
  }

  std::vector<scalar::Range> ranges;
};

}  // namespace

absl::StatusOr<ElementType> ElementTypeOf(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return ElementType::kBf16;
    case DType::kF16:
      return ElementType::kF16;
    case DType::kF32:
      return ElementType::kF32;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("weights of dtype ", DTypeName(dtype), " cannot be quantized, only BF16, F16 and F32"));
  }
}

IntegerScheme::IntegerScheme(const SchemeSpec& spec)
    : spec_(spec), format_{spec.num_bits, spec.symmetric, spec.numerics == Numerics::kPrecise} {}

absl::Status IntegerScheme::CheckWeight(DType dtype, Shape2D shape) const {
  QUERN_RETURN_IF_ERROR(ElementTypeOf(dtype).status());
  if (shape.rows < 1 || shape.cols < 1) {
    return absl::InvalidArgumentError(absl::StrCat("a weight of shape [", shape.rows, ", ", shape.cols, "] has no elements"));
  }
  if (shape.cols % GroupColumns(shape.cols) != 0) {
    return absl::InvalidArgumentError(absl::StrCat(shape.cols, " columns are no multiple of the group size ", spec_.group_size));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Region>> IntegerScheme::Regions(DType dtype, Shape2D shape) const {
  QUERN_RETURN_IF_ERROR(CheckWeight(dtype, shape));
  const int64_t groups = shape.cols / GroupColumns(shape.cols);
  const auto dims = [](int64_t rows, int64_t cols) {
    return std::vector<uint64_t>{static_cast<uint64_t>(rows), static_cast<uint64_t>(cols)};
  };
  std::vector<Region> regions;

  Region packed;
  packed.suffix = "weight_packed";
  packed.dtype = DType::kI32;
  packed.bytes_per_row = scalar::PackedBytes(shape.cols, spec_.num_bits);
  packed.shape = dims(shape.rows, packed.bytes_per_row / 4);
  regions.push_back(std::move(packed));

  Region scale;
  scale.suffix = "weight_scale";
  scale.dtype = dtype;
  scale.shape = dims(shape.rows, groups);
  scale.bytes_per_row = groups * BytesPerElement(dtype);
  regions.push_back(std::move(scale));

  if (!spec_.symmetric) {
    Region zero_point;
    zero_point.suffix = "weight_zero_point";
    zero_point.dtype = DType::kI32;
    zero_point.shape = dims(scalar::PackedBytes(shape.rows, spec_.num_bits) / 4, groups);
    zero_point.bytes_per_row = groups * 4;
    const int64_t common = std::gcd(int64_t{spec_.num_bits}, kWordMultiple);
    zero_point.row_numerator = spec_.num_bits / common;
    zero_point.row_denominator = kWordMultiple / common;
    zero_point.accumulates = true;
    regions.push_back(std::move(zero_point));
  }

  Region dimensions;
  dimensions.suffix = "weight_shape";
  dimensions.dtype = DType::kI64;
  dimensions.shape = {2};
  for (const int64_t dimension : {shape.rows, shape.cols}) {
    for (int byte = 0; byte < 8; ++byte) dimensions.constant.push_back(static_cast<char>(static_cast<uint64_t>(dimension) >> (8 * byte)));
  }
  regions.push_back(std::move(dimensions));
  return regions;
}

int64_t IntegerScheme::ColumnMultiple() const {
  return spec_.strategy == Strategy::kGroup ? std::lcm(spec_.group_size, kWordMultiple) : kWordMultiple;
}

double IntegerScheme::EffectiveBits(DType dtype, Shape2D shape) const {
  const absl::StatusOr<std::vector<Region>> regions = Regions(dtype, shape);
  if (!regions.ok()) return 0;
  double bytes = 0;
  for (const Region& region : *regions) {
    if (region.constant.empty()) bytes += static_cast<double>(region.shape[0]) * static_cast<double>(region.bytes_per_row);
  }
  return bytes * 8 / (static_cast<double>(shape.rows) * static_cast<double>(shape.cols));
}

bool IntegerScheme::NeedsStatistics(Shape2D weight, Shape2D tile) const {
  return spec_.strategy == Strategy::kChannel && tile.cols < weight.cols;
}

std::unique_ptr<Statistics> IntegerScheme::NewStatistics(Shape2D weight) const {
  return std::make_unique<RowRanges>(spec_.strategy == Strategy::kChannel ? weight.rows : 0);
}

absl::Status IntegerScheme::Observe(const Tile& tile, const ModuleInputs&, Statistics& statistics) const {
  QUERN_RETURN_IF_ERROR(CheckTile(tile, RowMultiple(), ColumnMultiple()));
  std::vector<scalar::Range>& ranges = static_cast<RowRanges&>(statistics).ranges;
  if (tile.row_end > static_cast<int64_t>(ranges.size())) {
    return absl::InternalError(absl::StrCat("scheme \"", spec_.ToString(), "\": no statistics are kept for row ", tile.row_end - 1));
  }
  IntegerTile work;
  QUERN_ASSIGN_OR_RETURN(work.element, ElementTypeOf(tile.dtype));
  work.rows = tile.rows();
  work.columns = tile.cols();
  work.elements = reinterpret_cast<const unsigned char*>(tile.data);
  work.element_stride = tile.row_stride;
  quant::Observe(work, ranges.data() + tile.row_begin);
  return absl::OkStatus();
}

absl::StatusOr<IntegerTile> IntegerScheme::Resolve(const Tile& tile, absl::Span<const RegionBuffer> regions) const {
  QUERN_RETURN_IF_ERROR(CheckTile(tile, RowMultiple(), ColumnMultiple()));
  IntegerTile work;
  QUERN_ASSIGN_OR_RETURN(work.element, ElementTypeOf(tile.dtype));
  work.format = format_;
  work.rows = tile.rows();
  work.columns = tile.cols();
  work.group = GroupColumns(tile.cols());
  work.first_row = tile.row_begin;
  if (work.columns % work.group != 0) {
    return absl::InternalError(absl::StrCat("a tile of ", work.columns, " columns cuts a group of ", work.group));
  }
  const size_t used = spec_.symmetric ? 2 : 3;
  if (regions.size() != used + 1) {
    return absl::InternalError(absl::StrCat("scheme \"", spec_.ToString(), "\" has ", used + 1, " regions, not ", regions.size()));
  }
  // A row of one scale has its scale and zero point at byte 0, whichever segment of the row this is.
  const int64_t first_group = spec_.strategy == Strategy::kGroup ? tile.col_begin / spec_.group_size : 0;
  const auto address = [&](size_t index, int64_t row, int64_t byte) {
    const RegionBuffer& buffer = regions[index];
    return reinterpret_cast<unsigned char*>(buffer.data) + (row - buffer.first_row) * buffer.row_stride + (byte - buffer.first_byte);
  };
  work.elements = reinterpret_cast<const unsigned char*>(tile.data);
  work.element_stride = tile.row_stride;
  work.packed = address(0, tile.row_begin, tile.col_begin * spec_.num_bits / 8);
  work.packed_stride = regions[0].row_stride;
  work.scales = address(1, tile.row_begin, first_group * BytesPerElement(tile.dtype));
  work.scale_stride = regions[1].row_stride;
  if (!spec_.symmetric) {
    work.zero_points = address(2, scalar::PositionInColumn(tile.row_begin, spec_.num_bits).word, first_group * 4);
    work.zero_point_stride = regions[2].row_stride;
  }
  return work;
}

absl::Status IntegerScheme::Encode(const Tile& tile, const ModuleInputs&, const Statistics* statistics, NonfinitePolicy nonfinite,
                                   absl::Span<const RegionBuffer> regions, absl::Span<RowError> errors) const {
  QUERN_ASSIGN_OR_RETURN(const IntegerTile work, Resolve(tile, regions));
  if (static_cast<int64_t>(errors.size()) != tile.rows()) {
    return absl::InternalError(absl::StrCat(errors.size(), " row errors for a tile of ", tile.rows(), " rows"));
  }
  EncodeOptions options;
  options.replace_nonfinite = nonfinite == NonfinitePolicy::kClamp;
  options.errors = errors.data();
  if (spec_.strategy == Strategy::kChannel) {
    if (statistics != nullptr) {
      const std::vector<scalar::Range>& ranges = static_cast<const RowRanges*>(statistics)->ranges;
      if (tile.row_end > static_cast<int64_t>(ranges.size())) {
        return absl::InternalError(absl::StrCat("no statistics are kept for row ", tile.row_end - 1));
      }
      options.fixed = ranges.data() + tile.row_begin;
    } else if (tile.col_begin != 0) {
      return absl::InternalError("a segment of a row with one scale needs statistics");
    }
  }
  return ProblemStatus(quant::Encode(work, options), tile, work.group);
}

absl::Status IntegerScheme::Decode(const Tile& tile, absl::Span<const RegionBuffer> regions, std::byte* out) const {
  QUERN_ASSIGN_OR_RETURN(const IntegerTile work, Resolve(tile, regions));
  quant::Decode(work, reinterpret_cast<unsigned char*>(out), tile.row_stride);
  return absl::OkStatus();
}

}  // namespace quern::quant
