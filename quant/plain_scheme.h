// Not quantized: the weight's values rounded to BF16, F16 or F32, in one region "weight" [rows, cols].
#ifndef QUERN_QUANT_PLAIN_SCHEME_H_
#define QUERN_QUANT_PLAIN_SCHEME_H_

#include <memory>
#include <vector>

#include "quant/kernels/plain_tile.h"
#include "quant/scheme.h"

namespace quern::quant {

class PlainScheme : public Scheme {
 public:
  // `spec` is a supported plain spec.
  explicit PlainScheme(const SchemeSpec& spec);

  const SchemeSpec& spec() const override { return spec_; }
  absl::Status CheckWeight(DType dtype, Shape2D shape) const override;
  absl::StatusOr<std::vector<Region>> Regions(DType dtype, Shape2D shape) const override;
  int64_t ColumnMultiple() const override;
  double EffectiveBits(DType dtype, Shape2D shape) const override;
  bool NeedsStatistics(Shape2D weight, Shape2D tile) const override;
  std::unique_ptr<Statistics> NewStatistics(Shape2D weight) const override;
  absl::Status Observe(const Tile& tile, const ModuleInputs& inputs, Statistics& statistics) const override;
  absl::Status Encode(const Tile& tile, const ModuleInputs& inputs, const Statistics* statistics, NonfinitePolicy nonfinite,
                      absl::Span<const RegionBuffer> regions, absl::Span<RowError> errors) const override;
  absl::Status Decode(const Tile& tile, absl::Span<const RegionBuffer> regions, std::byte* out) const override;

 private:
  absl::StatusOr<PlainTile> Resolve(const Tile& tile, absl::Span<const RegionBuffer> regions) const;

  const SchemeSpec spec_;
  const DType plain_;
};

}  // namespace quern::quant

#endif  // QUERN_QUANT_PLAIN_SCHEME_H_
