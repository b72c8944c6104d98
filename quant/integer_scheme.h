// Integers of compressed-tensors: 2 to 8 bits, symmetric or asymmetric, one scale a group of columns, a row or the whole weight.
//
// Regions in file order, `pack-quantized` (weights only): weight_packed I32 [rows, ceil(cols*b/32)], weight_scale D [rows, groups],
// asymmetric weight_zero_point I32 [ceil(rows*b/32), groups] (packed along rows, so it accumulates), weight_shape I64 [2] (constant).
// `int-quantized` (with quantized activations): weight I8 [rows, cols], whatever the number of bits, weight_scale D [rows, groups],
// asymmetric weight_zero_point I8 [rows, groups]. With one scale for the whole weight, weight_scale and weight_zero_point (then I8 in both
// formats) have the shape [1] and are computed.
#ifndef QUERN_QUANT_INTEGER_SCHEME_H_
#define QUERN_QUANT_INTEGER_SCHEME_H_

#include <memory>
#include <string>
#include <vector>

#include "quant/kernels/integer_tile.h"
#include "quant/scheme.h"

namespace quern::quant {

class IntegerScheme : public Scheme {
 public:
  // `spec` is a supported integer spec.
  explicit IntegerScheme(const SchemeSpec& spec);

  const SchemeSpec& spec() const override { return spec_; }
  absl::Status CheckWeight(DType dtype, Shape2D shape) const override;
  absl::StatusOr<std::vector<Region>> Regions(DType dtype, Shape2D shape) const override;
  int64_t ColumnMultiple() const override;
  double EffectiveBits(DType dtype, Shape2D shape) const override;
  bool NeedsImportance() const override { return spec_.observer == Observer::kImportance; }
  // A searched row of one scale has to be seen whole: NeedsStatistics is true for its segments, and Observe refuses them, naming the bytes.
  bool NeedsStatistics(Shape2D weight, Shape2D tile) const override;
  std::unique_ptr<Statistics> NewStatistics(Shape2D weight) const override;
  absl::Status Observe(const Tile& tile, const ModuleInputs& inputs, Statistics& statistics) const override;
  absl::StatusOr<std::vector<std::string>> ComputedRegions(DType dtype, Shape2D shape, const Statistics* statistics,
                                                           const ModuleInputs& inputs) const override;
  absl::Status Encode(const Tile& tile, const ModuleInputs& inputs, const Statistics* statistics, NonfinitePolicy nonfinite,
                      absl::Span<const RegionBuffer> regions, absl::Span<RowError> errors) const override;
  absl::Status Decode(const Tile& tile, absl::Span<const RegionBuffer> regions, std::byte* out) const override;

 private:
  bool OfTensor() const { return spec_.strategy == Strategy::kTensor; }
  int64_t GroupColumns(int64_t columns) const { return spec_.strategy == Strategy::kGroup ? spec_.group_size : columns; }
  // Whether the range of each group is searched for, and that over segments of one group is not possible.
  bool Searches() const { return spec_.observer != Observer::kMinMax; }
  // The tile with the addresses of its regions resolved. `tile.data` may be null.
  absl::StatusOr<IntegerTile> Resolve(const Tile& tile, absl::Span<const RegionBuffer> regions) const;

  const SchemeSpec spec_;
  const scalar::IntegerFormat format_;
};

}  // namespace quern::quant

#endif  // QUERN_QUANT_INTEGER_SCHEME_H_
