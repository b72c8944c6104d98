#include "quant/integer_scheme.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "quant/tile_support.h"

namespace quern::quant {
namespace {

// Codes of so many columns fill whole words at any width, and so do zero points of so many rows.
constexpr int64_t kWordMultiple = 32;

// Ranges of the rows of a weight whose scales are per row, or the one range of a weight that has one scale.
class Ranges : public Statistics {
 public:
  Ranges(int64_t count, int64_t columns) : ranges(count), columns(columns) {}

  void Merge(const Statistics& other) override {
    const auto& from = static_cast<const Ranges&>(other).ranges;
    for (size_t row = 0; row < ranges.size() && row < from.size(); ++row) {
      if (from[row].low < ranges[row].low) ranges[row].low = from[row].low;
      if (from[row].high > ranges[row].high) ranges[row].high = from[row].high;
    }
  }

  std::vector<scalar::Range> ranges;
  const int64_t columns;  // of the weight
};

// Rows whose ranges are searched before they are encoded: zero points of so many fill whole words.
constexpr int64_t kSearchRows = 32;

}  // namespace

IntegerScheme::IntegerScheme(const SchemeSpec& spec)
    : spec_(spec),
      format_{spec.num_bits, spec.symmetric, spec.numerics == Numerics::kPrecise, spec.activations != Activations::kNone,
              spec.activations != Activations::kNone || spec.strategy == Strategy::kTensor} {}

absl::Status IntegerScheme::CheckWeight(DType dtype, Shape2D shape) const {
  QUERN_RETURN_IF_ERROR(CheckPlainWeight(dtype, shape));
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

  Region codes;
  codes.suffix = format_.byte_codes ? "weight" : "weight_packed";
  codes.dtype = format_.byte_codes ? DType::kI8 : DType::kI32;
  codes.bytes_per_row = format_.StoredBytes(shape.cols);
  codes.shape = dims(shape.rows, codes.bytes_per_row / BytesPerElement(codes.dtype));
  regions.push_back(std::move(codes));

  Region scale;
  scale.suffix = "weight_scale";
  scale.dtype = dtype;
  scale.shape = OfTensor() ? std::vector<uint64_t>{1} : dims(shape.rows, groups);
  scale.computed = OfTensor();
  scale.bytes_per_row = OfTensor() ? 0 : groups * BytesPerElement(dtype);
  regions.push_back(std::move(scale));

  if (!spec_.symmetric) {
    Region zero_point;
    zero_point.suffix = "weight_zero_point";
    if (OfTensor()) {
      zero_point.dtype = DType::kI8;
      zero_point.shape = {1};
      zero_point.computed = true;
    } else if (format_.byte_zero_points) {
      zero_point.dtype = DType::kI8;
      zero_point.shape = dims(shape.rows, groups);
      zero_point.bytes_per_row = groups;
    } else {
      zero_point.dtype = DType::kI32;
      zero_point.shape = dims(scalar::PackedBytes(shape.rows, spec_.num_bits) / 4, groups);
      zero_point.bytes_per_row = groups * 4;
      const int64_t common = std::gcd(int64_t{spec_.num_bits}, kWordMultiple);
      zero_point.row_numerator = spec_.num_bits / common;
      zero_point.row_denominator = kWordMultiple / common;
      zero_point.accumulates = true;
    }
    regions.push_back(std::move(zero_point));
  }
  if (format_.byte_codes) return regions;

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
    if (!region.constant.empty()) continue;
    double size = BytesPerElement(region.dtype);
    for (const uint64_t dimension : region.shape) size *= static_cast<double>(dimension);
    bytes += size;
  }
  return bytes * 8 / (static_cast<double>(shape.rows) * static_cast<double>(shape.cols));
}

bool IntegerScheme::NeedsStatistics(Shape2D weight, Shape2D tile) const {
  return OfTensor() || (spec_.strategy == Strategy::kChannel && tile.cols < weight.cols);
}

std::unique_ptr<Statistics> IntegerScheme::NewStatistics(Shape2D weight) const {
  return std::make_unique<Ranges>(spec_.strategy == Strategy::kChannel ? weight.rows : OfTensor() ? 1 : 0, weight.cols);
}

absl::Status IntegerScheme::Observe(const Tile& tile, const ModuleInputs&, Statistics& statistics) const {
  QUERN_RETURN_IF_ERROR(CheckTile(tile, RowMultiple(), ColumnMultiple()));
  std::vector<scalar::Range>& ranges = static_cast<Ranges&>(statistics).ranges;
  QUERN_ASSIGN_OR_RETURN(IntegerTile work, ElementsOf(tile));
  if (Searches()) {
    return WholeRowsStatus(spec_, tile.dtype, static_cast<Ranges&>(statistics).columns);
  }
  if (OfTensor() && ranges.size() == 1) {
    const int64_t rows = std::exchange(work.rows, 1);
    for (int64_t row = 0; row < rows; ++row, work.elements += work.element_stride) quant::Observe(work, ranges.data());
    return absl::OkStatus();
  }
  if (tile.row_end > static_cast<int64_t>(ranges.size())) {
    return absl::InternalError(absl::StrCat("scheme \"", spec_.ToString(), "\": no statistics are kept for row ", tile.row_end - 1));
  }
  quant::Observe(work, ranges.data() + tile.row_begin);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> IntegerScheme::ComputedRegions(DType dtype, Shape2D, const Statistics* statistics,
                                                                        const ModuleInputs&) const {
  std::vector<std::string> computed;
  if (!OfTensor()) return computed;
  QUERN_ASSIGN_OR_RETURN(const ElementType element, ElementTypeOf(dtype));
  if (statistics == nullptr) return absl::InternalError(absl::StrCat("scheme \"", spec_.ToString(), "\" needs statistics"));
  const scalar::Range& range = static_cast<const Ranges&>(*statistics).ranges.at(0);
  computed.resize(spec_.symmetric ? 1 : 2);
  WithFormat(element, [&](auto d) {
    using D = decltype(d);
    computed[0].resize(sizeof(typename D::Bits));
    scalar::RowOutput out;
    out.scales = reinterpret_cast<unsigned char*>(computed[0].data());
    if (!spec_.symmetric) {
      computed[1].resize(1);
      out.zero_points = reinterpret_cast<unsigned char*>(computed[1].data());
    }
    scalar::StoreParameters<D>(format_, scalar::ParametersOf<D>(format_, range), 0, out);
  });
  return computed;
}

absl::StatusOr<IntegerTile> IntegerScheme::Resolve(const Tile& tile, absl::Span<const RegionBuffer> regions) const {
  QUERN_RETURN_IF_ERROR(CheckTile(tile, RowMultiple(), ColumnMultiple()));
  QUERN_ASSIGN_OR_RETURN(IntegerTile work, ElementsOf(tile));
  work.format = format_;
  work.group = GroupColumns(tile.cols());
  work.first_row = tile.row_begin;
  if (work.columns % work.group != 0) {
    return absl::InternalError(absl::StrCat("a tile of ", work.columns, " columns cuts a group of ", work.group));
  }
  const size_t count = 2 + (spec_.symmetric ? 0 : 1) + (format_.byte_codes ? 0 : 1);
  if (regions.size() != count) {
    return absl::InternalError(absl::StrCat("scheme \"", spec_.ToString(), "\" has ", count, " regions, not ", regions.size()));
  }
  work.packed = AddressIn(regions[0], tile.row_begin, tile.col_begin * format_.StoredBits() / 8);
  work.packed_stride = regions[0].row_stride;
  if (OfTensor()) {
    work.scales = reinterpret_cast<unsigned char*>(regions[1].data);
    if (!spec_.symmetric) work.zero_points = reinterpret_cast<unsigned char*>(regions[2].data);
    return work;
  }
  // A row of one scale has its scale and zero point at byte 0, whichever segment of the row this is.
  const int64_t first_group = spec_.strategy == Strategy::kGroup ? tile.col_begin / spec_.group_size : 0;
  work.scales = AddressIn(regions[1], tile.row_begin, first_group * BytesPerElement(tile.dtype));
  work.scale_stride = regions[1].row_stride;
  if (!spec_.symmetric) {
    work.zero_points = format_.byte_zero_points
                           ? AddressIn(regions[2], tile.row_begin, first_group)
                           : AddressIn(regions[2], scalar::PositionInColumn(tile.row_begin, spec_.num_bits).word, first_group * 4);
    work.zero_point_stride = regions[2].row_stride;
  }
  return work;
}

absl::Status IntegerScheme::Encode(const Tile& tile, const ModuleInputs& inputs, const Statistics* statistics, NonfinitePolicy nonfinite,
                                   absl::Span<const RegionBuffer> regions, absl::Span<RowError> errors) const {
  QUERN_ASSIGN_OR_RETURN(IntegerTile work, Resolve(tile, regions));
  QUERN_RETURN_IF_ERROR(CheckErrors(tile, errors.size()));
  if (Searches() && tile.rows() > kSearchRows) {
    // Ranges are kept for a few rows at a time.
    for (Tile part = tile; part.row_begin < tile.row_end; part.row_begin += kSearchRows, part.data += kSearchRows * part.row_stride) {
      part.row_end = std::min(part.row_begin + kSearchRows, tile.row_end);
      QUERN_RETURN_IF_ERROR(
          Encode(part, inputs, statistics, nonfinite, regions, errors.subspan(part.row_begin - tile.row_begin, part.rows())));
    }
    return absl::OkStatus();
  }
  EncodeOptions options;
  options.replace_nonfinite = nonfinite == NonfinitePolicy::kClamp;
  options.errors = errors.data();
  if (OfTensor()) {
    if (statistics == nullptr) return absl::InternalError("a weight with one scale needs statistics");
    options.fixed = static_cast<const Ranges*>(statistics)->ranges.data();
    options.fixed_stride = 0;
    work.scales = nullptr;  // ComputedRegions has them
    work.zero_points = nullptr;
  } else if (spec_.strategy == Strategy::kChannel) {
    if (statistics != nullptr && Searches()) {
      return absl::InternalError(absl::StrCat("scheme \"", spec_.ToString(), "\" takes no statistics"));
    } else if (statistics != nullptr) {
      const std::vector<scalar::Range>& ranges = static_cast<const Ranges*>(statistics)->ranges;
      if (tile.row_end > static_cast<int64_t>(ranges.size())) {
        return absl::InternalError(absl::StrCat("no statistics are kept for row ", tile.row_end - 1));
      }
      options.fixed = ranges.data() + tile.row_begin;
    } else if (tile.col_begin != 0) {
      return absl::InternalError("a segment of a row with one scale needs statistics");
    }
  }
  std::vector<scalar::Range> searched;
  if (Searches()) {
    QUERN_ASSIGN_OR_RETURN(const scalar::RangeSearch search, SearchOf(spec_.observer, tile, inputs));
    options.fixed_stride = work.columns / work.group;
    searched.resize(work.rows * options.fixed_stride);
    Search(work, search, searched.data());
    options.fixed = searched.data();
  }
  QUERN_RETURN_IF_ERROR(ProblemStatus(quant::Encode(work, options), tile, work.group, OfTensor()));
  return CheckFiniteErrors(spec_, tile, errors);
}

absl::Status IntegerScheme::Decode(const Tile& tile, absl::Span<const RegionBuffer> regions, std::byte* out) const {
  QUERN_ASSIGN_OR_RETURN(const IntegerTile work, Resolve(tile, regions));
  quant::Decode(work, reinterpret_cast<unsigned char*>(out), tile.row_stride);
  return absl::OkStatus();
}

}  // namespace quern::quant
