#include "quant/plain_scheme.h"

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "quant/tile_support.h"

namespace quern::quant {
namespace {

// Segments of so many columns begin where the error lanes of a row and the kernels' units begin.
constexpr int64_t kPlainColumns = 32;

// Nothing is gathered.
class NoStatistics : public Statistics {
 public:
  void Merge(const Statistics&) override {}
};

}  // namespace

PlainScheme::PlainScheme(const SchemeSpec& spec) : spec_(spec), plain_(PlainDType(spec)) {}

absl::Status PlainScheme::CheckWeight(DType dtype, Shape2D shape) const { return CheckPlainWeight(dtype, shape); }

absl::StatusOr<std::vector<Region>> PlainScheme::Regions(DType dtype, Shape2D shape) const {
  QUERN_RETURN_IF_ERROR(CheckWeight(dtype, shape));
  Region weight;
  weight.suffix = "weight";
  weight.dtype = plain_;
  weight.shape = {static_cast<uint64_t>(shape.rows), static_cast<uint64_t>(shape.cols)};
  weight.bytes_per_row = shape.cols * BytesPerElement(plain_);
  return std::vector<Region>{weight};
}

int64_t PlainScheme::ColumnMultiple() const { return kPlainColumns; }
double PlainScheme::EffectiveBits(DType, Shape2D) const { return BitsPerElement(plain_); }
bool PlainScheme::NeedsStatistics(Shape2D, Shape2D) const { return false; }
std::unique_ptr<Statistics> PlainScheme::NewStatistics(Shape2D) const { return std::make_unique<NoStatistics>(); }
absl::Status PlainScheme::Observe(const Tile&, const ModuleInputs&, Statistics&) const { return absl::OkStatus(); }

absl::StatusOr<PlainTile> PlainScheme::Resolve(const Tile& tile, absl::Span<const RegionBuffer> regions) const {
  QUERN_RETURN_IF_ERROR(CheckTile(tile, RowMultiple(), kPlainColumns));
  if (regions.size() != 1) {
    return absl::InternalError(absl::StrCat("scheme \"", spec_.ToString(), "\" has 1 region, not ", regions.size()));
  }
  PlainTile work;
  QUERN_ASSIGN_OR_RETURN(work.element, ElementTypeOf(tile.dtype));
  QUERN_ASSIGN_OR_RETURN(work.plain, ElementTypeOf(plain_));
  work.rows = tile.rows();
  work.columns = tile.cols();
  work.elements = reinterpret_cast<const unsigned char*>(tile.data);
  work.element_stride = tile.row_stride;
  work.values = AddressIn(regions[0], tile.row_begin, tile.col_begin * BytesPerElement(plain_));
  work.value_stride = regions[0].row_stride;
  return work;
}

absl::Status PlainScheme::Encode(const Tile& tile, const ModuleInputs&, const Statistics*, NonfinitePolicy nonfinite,
                                 absl::Span<const RegionBuffer> regions, absl::Span<RowError> errors) const {
  QUERN_ASSIGN_OR_RETURN(const PlainTile work, Resolve(tile, regions));
  QUERN_RETURN_IF_ERROR(CheckErrors(tile, errors.size()));
  const scalar::Problem problem = EncodePlain(work, nonfinite == NonfinitePolicy::kClamp, errors.data());
  if (problem.kind != scalar::Problem::kOverflow) return ProblemStatus(problem, tile, /*group=*/1);
  return absl::InvalidArgumentError(absl::StrCat("the element at row ", tile.row_begin + problem.row, ", column ",
                                                 tile.col_begin + problem.column, " is too large for ", DTypeName(plain_),
                                                 "; choose --dtype bf16 or f32"));
}

absl::Status PlainScheme::Decode(const Tile& tile, absl::Span<const RegionBuffer> regions, std::byte* out) const {
  QUERN_ASSIGN_OR_RETURN(const PlainTile work, Resolve(tile, regions));
  DecodePlain(work, reinterpret_cast<unsigned char*>(out), tile.row_stride);
  return absl::OkStatus();
}

}  // namespace quern::quant
