// Floats of 8 and 4 bits: FP8 (E4M3), NVFP4, MXFP4 and MXFP8 in the convention of compressed-tensors, FP8 and NVFP4 in ModelOpt's.
//
// Regions, in file order; C are computed ones:
//   FP8       weight F8_E4M3 [rows, cols]; weight_scale, of the scheme's scale dtype: tensor [1] C, channel [rows, 1],
//             block [ceil(rows/128), ceil(cols/128)] (accumulates: rows of a block share it); with kFp8Static input_scale D [1] C
//   NVFP4     weight_packed U8 [rows, cols/2]; weight_scale F8_E4M3 [rows, cols/16]; weight_global_scale F32 [1] C; with kNvfp4Static
//             input_global_scale F32 [1] C
//   MX        weight_packed U8 [rows, cols/2] or weight F8_E4M3 [rows, cols]; weight_scale U8 [rows, cols/32]
//   ModelOpt  FP8: weight F8_E4M3; weight_scale F32, tensor [] C, channel [rows]; with kFp8Static input_scale F32 [] C
//             NVFP4: weight U8 [rows, cols/2]; weight_scale F8_E4M3; weight_scale_2 F32 [] C; with kNvfp4Static input_scale F32 [] C
//
// FP8 with scales of another dtype than the weight's also decodes the checkpoints that others publish, edge blocks cut short. With E8M0
// scales (blocks only) it does no more than that.
#ifndef QUERN_QUANT_FLOAT_SCHEME_H_
#define QUERN_QUANT_FLOAT_SCHEME_H_

#include <memory>
#include <string>
#include <vector>

#include "quant/kernels/float_tile.h"
#include "quant/scheme.h"

namespace quern::quant {

class FloatScheme : public Scheme {
 public:
  // `spec` is a supported float spec.
  explicit FloatScheme(const SchemeSpec& spec);

  const SchemeSpec& spec() const override { return spec_; }
  absl::Status CheckWeight(DType dtype, Shape2D shape) const override;
  absl::StatusOr<std::vector<Region>> Regions(DType dtype, Shape2D shape) const override;
  int64_t ColumnMultiple() const override;
  int64_t RowMultiple() const override;
  double EffectiveBits(DType dtype, Shape2D shape) const override;
  bool SharesSetScale() const override;
  bool NeedsActivationAmax() const override;
  absl::Status CheckActivationAmax(DType dtype, float amax) const override;
  bool NeedsImportance() const override { return spec_.observer == Observer::kImportance; }
  bool NeedsStatistics(Shape2D weight, Shape2D tile) const override;
  std::unique_ptr<Statistics> NewStatistics(Shape2D weight) const override;
  absl::Status Observe(const Tile& tile, const ModuleInputs& inputs, Statistics& statistics) const override;
  absl::StatusOr<std::vector<std::string>> ComputedRegions(DType dtype, Shape2D shape, const Statistics* statistics,
                                                           const ModuleInputs& inputs) const override;
  absl::Status Encode(const Tile& tile, const ModuleInputs& inputs, const Statistics* statistics, NonfinitePolicy nonfinite,
                      absl::Span<const RegionBuffer> regions, absl::Span<RowError> errors) const override;
  absl::Status Decode(const Tile& tile, absl::Span<const RegionBuffer> regions, std::byte* out) const override;

 private:
  bool is_modelopt() const { return spec_.convention == Convention::kModelOpt; }
  bool is_fp8() const { return scaling_ == scalar::FloatScaling::kGiven; }
  bool is_nvfp4() const { return spec_.strategy == Strategy::kTensorGroup; }
  scalar::FloatFormat FormatOf(DType dtype) const;
  DType ScaleDType(DType weight) const;
  size_t RegionCount() const;
  bool Searches() const { return spec_.observer != Observer::kMinMax; }
  // Whether the global scale is searched for too.
  bool SearchesGlobalScale() const { return is_nvfp4() && !is_modelopt() && spec_.observer == Observer::kMse; }
  // The global scale of NVFP4 by what was observed.
  float GlobalScaleOf(DType dtype, const Statistics& statistics) const;
  // The tile with the addresses of what every row has of its own. `tile.data` may be null.
  absl::StatusOr<FloatTile> Resolve(const Tile& tile, absl::Span<const RegionBuffer> regions) const;
  // Calls `function` with parts of the tile whose rows have the same `given` scales or one each: blocks of rows, or the whole tile.
  template <class Function>
  absl::Status ForEachBand(const Tile& tile, const FloatTile& work, Function function) const;

  const SchemeSpec spec_;
  const scalar::FloatScaling scaling_;
};

// INVALID_ARGUMENT says what of a float spec is not supported.
absl::Status CheckFloatScheme(const SchemeSpec& spec);

}  // namespace quern::quant

#endif  // QUERN_QUANT_FLOAT_SCHEME_H_
