#include "quant/float_scheme.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "quant/block_sample.h"
#include "quant/tile_support.h"

namespace quern::quant {
namespace {

using scalar::FloatScale;
using scalar::FloatScaling;

constexpr int64_t kBlock = 128;

int64_t Blocks(int64_t n) { return (n + kBlock - 1) / kBlock; }

// Largest magnitudes: of everything that was observed, and of each row or block where the scheme has a scale for it.
class AmaxStatistics : public Statistics {
 public:
  AmaxStatistics(Shape2D weight, int64_t rows, int64_t columns)
      : weight(weight), columns(columns), parts(static_cast<size_t>(rows * columns)) {}

  void Merge(const Statistics& other) override {
    const auto& from = static_cast<const AmaxStatistics&>(other);
    amax = std::max(amax, from.amax);
    if (from.dtype.has_value()) See(*from.dtype);
    for (size_t i = 0; i < parts.size() && i < from.parts.size(); ++i) parts[i] = std::max(parts[i], from.parts[i]);
    if (sample != nullptr && from.sample != nullptr) sample->Merge(*from.sample);
  }

  void See(DType of_weight) { dtype = !dtype.has_value() || *dtype == of_weight ? of_weight : DType::kF32; }

  // The best global scale of the sample, found once.
  float SampledGlobalScale(const scalar::FloatFormat& format) const {
    MutexLock lock(&mutex_);
    if (!global_scale_.has_value()) global_scale_ = sample->BestGlobalScale(format, amax);
    return *global_scale_;
  }

  float amax = 0;
  std::optional<DType> dtype;           // of all weights that were observed; F32 where they differ
  std::unique_ptr<BlockSample> sample;  // where the global scale is searched for
  Shape2D weight;
  int64_t columns;           // parts of a row of parts
  std::vector<float> parts;  // rows, or blocks row by row

 private:
  mutable Mutex mutex_;
  mutable std::optional<float> global_scale_ QUERN_GUARDED_BY(mutex_);
};

FloatScaling ScalingOf(const SchemeSpec& spec) {
  if (spec.strategy == Strategy::kTensorGroup) {
    return spec.convention == Convention::kModelOpt ? FloatScaling::kModelOptNvfp4 : FloatScaling::kNvfp4;
  }
  return spec.strategy == Strategy::kGroup ? FloatScaling::kMx : FloatScaling::kGiven;
}

// Calls `function` with the format type of a dtype that holds plain values.
template <class Function>
auto WithDType(DType dtype, Function function) {
  if (dtype == DType::kBF16) return function(scalar::Bf16());
  if (dtype == DType::kF16) return function(scalar::F16());
  return function(scalar::F32());
}

void AppendFloat(std::string& bytes, DType dtype, float value) {
  WithDType(dtype, [&](auto d) {
    const auto bits = decltype(d)::FromFloat(value);
    bytes.append(reinterpret_cast<const char*>(&bits), sizeof bits);
  });
}

float ReadScale(const unsigned char* at, DType dtype) {
  if (dtype == DType::kU8) return scalar::E8m0::ToFloat(*at);
  return WithDType(dtype, [&](auto d) { return decltype(d)::ToFloat(scalar::LoadElement<decltype(d)>(at, 0)); });
}

std::vector<uint64_t> Dims(int64_t rows, int64_t cols) { return {static_cast<uint64_t>(rows), static_cast<uint64_t>(cols)}; }

Region RowRegion(std::string suffix, DType dtype, std::vector<uint64_t> shape, int64_t bytes_per_row) {
  Region region;
  region.suffix = std::move(suffix);
  region.dtype = dtype;
  region.shape = std::move(shape);
  region.bytes_per_row = bytes_per_row;
  return region;
}

Region ComputedRegion(std::string suffix, DType dtype, bool scalar) {
  Region region;
  region.suffix = std::move(suffix);
  region.dtype = dtype;
  if (!scalar) region.shape = {1};
  region.computed = true;
  return region;
}

// The scale of FP8 weights or activations in the convention of compressed-tensors.
float Fp8ScaleOf(DType scale_dtype, float amax) {
  return WithDType(scale_dtype, [&](auto s) { return scalar::Fp8Scale<decltype(s)>(amax); });
}

float Rounded(DType dtype, float value) {
  return WithDType(dtype, [&](auto d) { return decltype(d)::Round(value); });
}

}  // namespace

absl::Status CheckFloatScheme(const SchemeSpec& spec) {
  const auto unsupported = [&](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat("scheme \"", spec.ToString(), "\" is not supported: ", what));
  };
  const bool modelopt = spec.convention == Convention::kModelOpt;
  const auto one_of = [](auto value, auto... values) { return ((value == values) || ...); };
  if (!spec.symmetric) return unsupported("floats are symmetric");
  if (spec.observer == Observer::kSweep && spec.strategy != Strategy::kTensorGroup) {
    return unsupported("the sweep over block scales is for NVFP4");
  }
  if (spec.observer != Observer::kMinMax && spec.strategy == Strategy::kTensor) {
    return unsupported(
        "with one scale for the whole weight the observer is minmax; mse and importance exist for FP8 with a scale for each "
        "channel (FP8_DYNAMIC) or block (FP8_BLOCK), for NVFP4 and for integers in groups and channels");
  }
  if (spec.observer != Observer::kMinMax && spec.strategy == Strategy::kGroup) {
    return unsupported(
        "the observer of MXFP4 and MXFP8 is minmax: their scales are powers of two; mse and importance exist for NVFP4, FP8 "
        "with a scale for each channel or block, and integers in groups and channels");
  }
  if (spec.num_bits != 4 && spec.num_bits != 8) return unsupported("floats have 4 or 8 bits");
  switch (spec.strategy) {
    case Strategy::kTensorGroup:
      if (spec.num_bits != 4 || spec.group_size != 16 || spec.scale != ScaleType::kE4m3) {
        return unsupported("groups under a global scale (NVFP4) have 4 bits, 16 columns and scale=e4m3");
      }
      if (!one_of(spec.activations, Activations::kNone, Activations::kNvfp4Static)) {
        return unsupported("NVFP4 goes with activations none and nvfp4_static");
      }
      return absl::OkStatus();
    case Strategy::kGroup:
      if (spec.group_size != 32 || spec.scale != ScaleType::kE8m0) return unsupported("groups (MX) have 32 columns and scale=e8m0");
      if (modelopt) return unsupported("ModelOpt's convention has FP8 and NVFP4");
      if (spec.activations != Activations::kNone && spec.activations != (spec.num_bits == 4 ? Activations::kMxfp4 : Activations::kMxfp8)) {
        return unsupported("MXFP4 goes with activations none and mxfp4, MXFP8 with none and mxfp8");
      }
      return absl::OkStatus();
    case Strategy::kTensor:
    case Strategy::kChannel:
    case Strategy::kBlock:
      break;
  }
  if (spec.num_bits != 8) return unsupported("4-bit floats have groups of 16 (NVFP4) or 32 (MXFP4) columns");
  if (spec.strategy == Strategy::kBlock ? spec.group_size != kBlock : spec.group_size != 0) {
    return unsupported("FP8 has a scale for a tensor, a channel or a block of 128");
  }
  if (modelopt) {
    if (spec.strategy == Strategy::kBlock) return unsupported("ModelOpt's FP8 has a scale for a tensor or a channel");
    if (spec.scale != ScaleType::kF32) return unsupported("ModelOpt's FP8 has scale=f32");
    const Activations with = spec.strategy == Strategy::kTensor ? Activations::kFp8Static : Activations::kFp8Token;
    if (!one_of(spec.activations, Activations::kNone, with)) {
      return unsupported("ModelOpt's FP8 goes with activations fp8_static per tensor, fp8_token per channel, or none");
    }
    return absl::OkStatus();
  }
  if (spec.strategy == Strategy::kBlock) {
    if (!one_of(spec.scale, ScaleType::kWeight, ScaleType::kF32, ScaleType::kBf16, ScaleType::kF16, ScaleType::kE8m0)) {
      return unsupported("FP8 in blocks has a scale of the weight's dtype, f32, bf16, f16 or e8m0");
    }
    if (!one_of(spec.activations, Activations::kNone, Activations::kFp8Group128)) {
      return unsupported("FP8 in blocks goes with activations none and fp8_group128");
    }
    return absl::OkStatus();
  }
  if (!one_of(spec.scale, ScaleType::kWeight, ScaleType::kF32, ScaleType::kBf16, ScaleType::kF16)) {
    return unsupported("FP8 has a scale of the weight's dtype, f32, bf16 or f16");
  }
  if (!one_of(spec.activations, Activations::kNone, Activations::kFp8Token, Activations::kFp8Static)) {
    return unsupported("FP8 goes with activations none, fp8_token and fp8_static");
  }
  return absl::OkStatus();
}

FloatScheme::FloatScheme(const SchemeSpec& spec) : spec_(spec), scaling_(ScalingOf(spec)) {}

DType FloatScheme::ScaleDType(DType weight) const {
  switch (spec_.scale) {
    case ScaleType::kWeight:
      return weight;
    case ScaleType::kF32:
      return DType::kF32;
    case ScaleType::kBf16:
      return DType::kBF16;
    case ScaleType::kF16:
      return DType::kF16;
    case ScaleType::kE4m3:
      return DType::kF8E4M3;
    case ScaleType::kE8m0:
      break;
  }
  return DType::kU8;
}

scalar::FloatFormat FloatScheme::FormatOf(DType dtype) const {
  scalar::FloatFormat format;
  format.bits = spec_.num_bits;
  format.scaling = scaling_;
  format.precise = spec_.numerics == Numerics::kPrecise;
  const bool rounds = is_fp8() ? (is_modelopt() ? spec_.strategy == Strategy::kTensor : ScaleDType(dtype) == dtype) : !is_nvfp4();
  format.round_quotient = rounds && !format.precise;
  return format;
}

absl::Status FloatScheme::CheckWeight(DType dtype, Shape2D shape) const {
  QUERN_RETURN_IF_ERROR(ElementTypeOf(dtype).status());
  if (shape.rows < 1 || shape.cols < 1) {
    return absl::InvalidArgumentError(absl::StrCat("a weight of shape [", shape.rows, ", ", shape.cols, "] has no elements"));
  }
  if (!is_fp8() && shape.cols % spec_.group_size != 0) {
    return absl::InvalidArgumentError(absl::StrCat(shape.cols, " columns are no multiple of the group size ", spec_.group_size));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Region>> FloatScheme::Regions(DType dtype, Shape2D shape) const {
  QUERN_RETURN_IF_ERROR(CheckWeight(dtype, shape));
  std::vector<Region> regions;
  if (spec_.num_bits == 4) {
    regions.push_back(RowRegion(is_modelopt() ? "weight" : "weight_packed", DType::kU8, Dims(shape.rows, shape.cols / 2), shape.cols / 2));
  } else {
    regions.push_back(RowRegion("weight", DType::kF8E4M3, Dims(shape.rows, shape.cols), shape.cols));
  }
  const DType scale = ScaleDType(dtype);
  const int64_t scale_bytes = BytesPerElement(scale);
  switch (spec_.strategy) {
    case Strategy::kTensor:
      regions.push_back(ComputedRegion("weight_scale", scale, is_modelopt()));
      break;
    case Strategy::kChannel:
      regions.push_back(RowRegion("weight_scale", scale, Dims(shape.rows, 1), scale_bytes));
      if (is_modelopt()) regions.back().shape.pop_back();
      break;
    case Strategy::kBlock:
      regions.push_back(RowRegion("weight_scale", scale, Dims(Blocks(shape.rows), Blocks(shape.cols)), Blocks(shape.cols) * scale_bytes));
      regions.back().row_denominator = kBlock;
      regions.back().accumulates = true;
      break;
    case Strategy::kGroup:
    case Strategy::kTensorGroup: {
      const int64_t groups = shape.cols / spec_.group_size;
      regions.push_back(RowRegion("weight_scale", scale, Dims(shape.rows, groups), groups));
      break;
    }
  }
  if (is_nvfp4()) regions.push_back(ComputedRegion(is_modelopt() ? "weight_scale_2" : "weight_global_scale", DType::kF32, is_modelopt()));
  if (spec_.activations == Activations::kNvfp4Static) {
    regions.push_back(ComputedRegion(is_modelopt() ? "input_scale" : "input_global_scale", DType::kF32, is_modelopt()));
  } else if (spec_.activations == Activations::kFp8Static) {
    regions.push_back(ComputedRegion("input_scale", is_modelopt() ? DType::kF32 : dtype, is_modelopt()));
  }
  return regions;
}

size_t FloatScheme::RegionCount() const { return 2 + (is_nvfp4() ? 1 : 0) + (NeedsActivationAmax() ? 1 : 0); }

int64_t FloatScheme::ColumnMultiple() const { return spec_.strategy == Strategy::kBlock ? kBlock : 32; }
int64_t FloatScheme::RowMultiple() const { return spec_.strategy == Strategy::kBlock ? kBlock : 32; }

double FloatScheme::EffectiveBits(DType dtype, Shape2D shape) const {
  const absl::StatusOr<std::vector<Region>> regions = Regions(dtype, shape);
  if (!regions.ok()) return 0;
  double bits = 0;
  for (const Region& region : *regions) {
    double elements = 1;
    for (const uint64_t dimension : region.shape) elements *= static_cast<double>(dimension);
    bits += elements * BitsPerElement(region.dtype);
  }
  return bits / (static_cast<double>(shape.rows) * static_cast<double>(shape.cols));
}

bool FloatScheme::SharesSetScale() const { return is_nvfp4() || (is_modelopt() && spec_.strategy == Strategy::kTensor); }

bool FloatScheme::NeedsActivationAmax() const {
  return spec_.activations == Activations::kNvfp4Static || spec_.activations == Activations::kFp8Static;
}

bool FloatScheme::NeedsStatistics(Shape2D weight, Shape2D tile) const {
  switch (spec_.strategy) {
    case Strategy::kTensor:
    case Strategy::kTensorGroup:
      return true;
    case Strategy::kChannel:
      return tile.cols < weight.cols;
    case Strategy::kBlock:  // single rows of narrow weights, too
      return tile.cols < weight.cols || tile.rows < std::min(kBlock, weight.rows);
    case Strategy::kGroup:
      break;
  }
  return false;
}

std::unique_ptr<Statistics> FloatScheme::NewStatistics(Shape2D weight) const {
  if (spec_.strategy == Strategy::kChannel) return std::make_unique<AmaxStatistics>(weight, weight.rows, 1);
  if (spec_.strategy == Strategy::kBlock) return std::make_unique<AmaxStatistics>(weight, Blocks(weight.rows), Blocks(weight.cols));
  auto statistics = std::make_unique<AmaxStatistics>(weight, 0, 0);
  if (SearchesGlobalScale()) statistics->sample = std::make_unique<BlockSample>();
  return statistics;
}

template <class Function>
absl::Status FloatScheme::ForEachBand(const Tile& tile, const FloatTile& work, Function function) const {
  if (spec_.strategy != Strategy::kBlock) return function(tile.row_begin, work);
  for (int64_t row = tile.row_begin; row < tile.row_end;) {
    const int64_t end = std::min(tile.row_end, (row / kBlock + 1) * kBlock);
    FloatTile band = work;
    band.rows = end - row;
    const int64_t skipped = row - tile.row_begin;
    if (band.elements != nullptr) band.elements += skipped * band.element_stride;
    if (band.codes != nullptr) band.codes += skipped * band.code_stride;
    QUERN_RETURN_IF_ERROR(function(row, band));
    row = end;
  }
  return absl::OkStatus();
}

absl::Status FloatScheme::Observe(const Tile& tile, const ModuleInputs&, Statistics& statistics) const {
  QUERN_RETURN_IF_ERROR(CheckTile(tile, RowMultiple(), ColumnMultiple()));
  auto& into = static_cast<AmaxStatistics&>(statistics);
  into.See(tile.dtype);
  FloatTile work;
  QUERN_ASSIGN_OR_RETURN(work.element, ElementTypeOf(tile.dtype));
  work.rows = tile.rows();
  work.columns = tile.cols();
  work.group = spec_.strategy == Strategy::kBlock ? kBlock : tile.cols();
  work.elements = reinterpret_cast<const unsigned char*>(tile.data);
  work.element_stride = tile.row_stride;
  if (Searches() && (spec_.strategy == Strategy::kChannel || spec_.strategy == Strategy::kBlock))
    return WholeRowsStatus(spec_, tile.dtype, into.weight.cols);
  if (into.sample != nullptr) {
    work.group = spec_.group_size;
    into.sample->Observe(work, tile.row_begin, tile.col_begin / spec_.group_size, &into.amax);
    return absl::OkStatus();
  }
  return ForEachBand(tile, work, [&](int64_t row, const FloatTile& band) -> absl::Status {
    switch (spec_.strategy) {
      case Strategy::kChannel:
      case Strategy::kBlock: {
        const bool block = spec_.strategy == Strategy::kBlock;
        const int64_t part = block ? row / kBlock * into.columns + tile.col_begin / kBlock : row;
        const int64_t used = block ? Blocks(tile.cols()) : band.rows;
        if (part + used > static_cast<int64_t>(into.parts.size())) {
          return absl::InternalError(absl::StrCat("scheme \"", spec_.ToString(), "\": no statistics are kept for row ", row));
        }
        ObserveAmax(band, into.parts.data() + part, block ? 0 : 1);
        return absl::OkStatus();
      }
      default:
        ObserveAmax(band, &into.amax, 0);
        return absl::OkStatus();
    }
  });
}

float FloatScheme::GlobalScaleOf(DType dtype, const Statistics& statistics) const {
  const auto& observed = static_cast<const AmaxStatistics&>(statistics);
  if (is_modelopt()) return scalar::ModelOptNvfp4Scale2(observed.amax);
  // One for the set, also where its weights have different dtypes.
  dtype = observed.dtype.value_or(dtype);
  if (observed.sample != nullptr) {
    const float searched = observed.SampledGlobalScale(FormatOf(dtype));
    if (searched != 0) return searched;
  }
  const bool precise = spec_.numerics == Numerics::kPrecise;
  return WithDType(dtype, [&](auto d) { return scalar::Nvfp4GlobalScale<decltype(d)>(observed.amax, precise); });
}

absl::Status FloatScheme::CheckActivationAmax(DType dtype, float amax) const {
  if (!std::isfinite(amax) || amax <= 0) return absl::InvalidArgumentError("and is to be a finite number above 0");
  const bool precise = spec_.numerics == Numerics::kPrecise;
  const bool rounded = !is_modelopt() && !precise;
  const absl::string_view remedy = "; numerics: precise has more room";
  if (rounded && !std::isfinite(Rounded(dtype, amax))) {
    return absl::InvalidArgumentError(absl::StrCat("which overflows ", DTypeName(dtype), ", the dtype of the weight", remedy));
  }
  // Where the formula gives none, a stand-in would be stored that has nothing to do with the inputs.
  const bool nvfp4 = spec_.activations == Activations::kNvfp4Static;
  constexpr float kNvfp4Range = scalar::E4m3::kLargest * scalar::E2m1::kLargest;
  const bool has_scale = WithDType(dtype, [&](auto d) {
    using D = decltype(d);
    if (is_modelopt()) return amax / (nvfp4 ? kNvfp4Range : scalar::E4m3::kLargest) > 0;
    if (!nvfp4) return D::Round((precise ? amax : D::Round(amax)) / scalar::E4m3::kLargest) > 0;
    if (precise) return kNvfp4Range / amax <= scalar::F32::kLargest;
    const float largest = D::Round(amax);
    return largest >= scalar::SmallestNormal<D>() && D::Round(D::Round(1 / largest) * kNvfp4Range) <= scalar::F32::kLargest;
  });
  if (has_scale) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("too little for a scale", is_modelopt() ? "" : absl::StrCat(" in ", DTypeName(dtype)), rounded && nvfp4 ? remedy : ""));
}

absl::StatusOr<std::vector<std::string>> FloatScheme::ComputedRegions(DType dtype, Shape2D, const Statistics* statistics,
                                                                      const ModuleInputs& inputs) const {
  std::vector<std::string> regions;
  if (is_nvfp4() || spec_.strategy == Strategy::kTensor) {
    if (statistics == nullptr) {
      return absl::InternalError(absl::StrCat("scheme \"", spec_.ToString(), "\" needs statistics for its scale"));
    }
    const float amax = static_cast<const AmaxStatistics*>(statistics)->amax;
    regions.emplace_back();
    if (is_nvfp4()) {
      AppendFloat(regions.back(), DType::kF32, GlobalScaleOf(dtype, *statistics));
    } else if (is_modelopt()) {
      AppendFloat(regions.back(), DType::kF32, scalar::ModelOptFp8Scale(amax));
    } else {
      AppendFloat(regions.back(), ScaleDType(dtype), Fp8ScaleOf(ScaleDType(dtype), amax));
    }
  }
  if (!NeedsActivationAmax()) return regions;
  if (!inputs.activation_amax.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("scheme \"", spec_.ToString(), "\" stores a scale of the module's inputs, and none of their magnitudes was given"));
  }
  float amax = *inputs.activation_amax;
  const bool nvfp4 = spec_.activations == Activations::kNvfp4Static;
  if (nvfp4) dtype = static_cast<const AmaxStatistics*>(statistics)->dtype.value_or(dtype);
  if (absl::Status status = CheckActivationAmax(dtype, amax); !status.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("the largest magnitude of the module's inputs is ", amax, ", ", status.message()));
  }
  const bool precise = spec_.numerics == Numerics::kPrecise;
  // The observer of llm-compressor holds it in the dtype of the model.
  if (!is_modelopt() && !precise) amax = Rounded(dtype, amax);
  regions.emplace_back();
  if (is_modelopt()) {
    AppendFloat(regions.back(), DType::kF32, nvfp4 ? scalar::ModelOptNvfp4Scale2(amax) : scalar::ModelOptFp8Scale(amax));
  } else if (nvfp4) {
    AppendFloat(regions.back(), DType::kF32,
                WithDType(dtype, [&](auto d) { return scalar::Nvfp4GlobalScale<decltype(d)>(amax, precise); }));
  } else {
    AppendFloat(regions.back(), dtype, Fp8ScaleOf(dtype, amax));
  }
  return regions;
}

absl::StatusOr<FloatTile> FloatScheme::Resolve(const Tile& tile, absl::Span<const RegionBuffer> regions) const {
  FloatTile work;
  QUERN_ASSIGN_OR_RETURN(work.element, ElementTypeOf(tile.dtype));
  if (regions.size() != RegionCount()) {
    return absl::InternalError(absl::StrCat("scheme \"", spec_.ToString(), "\" has ", RegionCount(), " regions, not ", regions.size()));
  }
  work.format = FormatOf(tile.dtype);
  work.rows = tile.rows();
  work.columns = tile.cols();
  work.group = is_fp8() && spec_.strategy != Strategy::kBlock ? tile.cols() : spec_.group_size;
  if (!is_fp8() && work.columns % work.group != 0) {
    return absl::InternalError(absl::StrCat("a tile of ", work.columns, " columns cuts a group of ", work.group));
  }
  work.elements = reinterpret_cast<const unsigned char*>(tile.data);
  work.element_stride = tile.row_stride;
  work.codes = AddressIn(regions[0], tile.row_begin, tile.col_begin * spec_.num_bits / 8);
  work.code_stride = regions[0].row_stride;
  if (!is_fp8()) {
    work.scales = AddressIn(regions[1], tile.row_begin, tile.col_begin / work.group);
    work.scale_stride = regions[1].row_stride;
  }
  return work;
}

absl::Status FloatScheme::Encode(const Tile& tile, const ModuleInputs& inputs, const Statistics* statistics, NonfinitePolicy nonfinite,
                                 absl::Span<const RegionBuffer> regions, absl::Span<RowError> errors) const {
  QUERN_RETURN_IF_ERROR(CheckTile(tile, RowMultiple(), ColumnMultiple()));
  if (is_fp8() && spec_.scale == ScaleType::kE8m0) {
    return absl::InvalidArgumentError(
        absl::StrCat("scheme \"", spec_.ToString(), "\" can be decoded only; weights are quantized with scales of their own dtype"));
  }
  QUERN_ASSIGN_OR_RETURN(FloatTile work, Resolve(tile, regions));
  QUERN_RETURN_IF_ERROR(CheckErrors(tile, errors.size()));
  const auto* observed = static_cast<const AmaxStatistics*>(statistics);
  const bool per_part = spec_.strategy == Strategy::kChannel || spec_.strategy == Strategy::kBlock;
  if (observed == nullptr && (is_nvfp4() || spec_.strategy == Strategy::kTensor || (per_part && tile.col_begin != 0))) {
    return absl::InternalError(absl::StrCat("scheme \"", spec_.ToString(), "\" needs statistics for this tile"));
  }
  if (observed != nullptr && Searches() && per_part) {
    return absl::InternalError(absl::StrCat("scheme \"", spec_.ToString(), "\" takes no statistics"));
  }
  if (is_nvfp4()) work.set_scale = GlobalScaleOf(tile.dtype, *statistics);
  scalar::RangeSearch search;
  if (Searches()) {
    QUERN_ASSIGN_OR_RETURN(search, SearchOf(spec_.observer, tile, inputs));
  }
  const DType scale_dtype = ScaleDType(tile.dtype);
  const int64_t scale_bytes = BytesPerElement(scale_dtype);
  // Decoding in ModelOpt's convention rounds the scale to the dtype of the weight.
  const auto given = [&](float amax) -> FloatScale {
    if (!is_modelopt()) return {Fp8ScaleOf(scale_dtype, amax), Fp8ScaleOf(scale_dtype, amax)};
    return {scalar::ModelOptFp8Scale(amax), Rounded(tile.dtype, scalar::ModelOptFp8Scale(amax))};
  };
  QUERN_RETURN_IF_ERROR(ForEachBand(tile, work, [&](int64_t row, FloatTile band) -> absl::Status {
    std::vector<FloatScale> scales;
    if (spec_.strategy == Strategy::kTensor) {
      scales.push_back(given(observed->amax));
    } else if (per_part) {
      const bool block = spec_.strategy == Strategy::kBlock;
      const int64_t count = block ? Blocks(tile.cols()) : band.rows;
      std::vector<float> amax(static_cast<size_t>(count));
      if (observed != nullptr) {
        const int64_t first = block ? row / kBlock * observed->columns + tile.col_begin / kBlock : row;
        if (first + count > static_cast<int64_t>(observed->parts.size())) {
          return absl::InternalError(absl::StrCat("no statistics are kept for row ", row));
        }
        std::copy_n(observed->parts.begin() + first, count, amax.begin());
      } else {
        ObserveAmax(band, amax.data(), block ? 0 : 1);
      }
      for (int64_t i = 0; Searches() && i < count; ++i) {
        // The largest magnitude that leaves the least error, of those that are shrunk.
        float& largest = amax[static_cast<size_t>(i)];
        const auto shrunk = [&](int candidate) {
          const float magnitude = largest * search.Shrink(candidate);
          return work.format.precise ? magnitude : Rounded(tile.dtype, magnitude);
        };
        FloatScale candidates[scalar::kShrinkCandidates];
        for (int candidate = 0; candidate < scalar::kShrinkCandidates; ++candidate) candidates[candidate] = given(shrunk(candidate));
        const float factor = scalar::DifferenceFactor(candidates[0].divisor);
        FloatTile part = band;
        scalar::RangeSearch of_part = search;
        if (block) {
          part.columns = std::min(kBlock, band.columns - i * kBlock);
          part.elements += i * kBlock * BytesPerElement(tile.dtype);
          if (of_part.importance != nullptr) of_part.importance += i * kBlock;
        } else {
          part.rows = 1;
          part.elements += i * band.element_stride;
        }
        double sums[scalar::kShrinkCandidates] = {};
        for (int64_t r = 0; r < part.rows; ++r, part.elements += band.element_stride) {
          double of_row[scalar::kShrinkCandidates];
          ErrorsOfScales(part, of_part, candidates, scalar::kShrinkCandidates, factor, of_row);
          for (int candidate = 0; candidate < scalar::kShrinkCandidates; ++candidate) sums[candidate] += of_row[candidate];
        }
        int best = 0;
        double least = static_cast<double>(scalar::FloatOf(0x7F800000));
        for (int candidate = 0; candidate < scalar::kShrinkCandidates; ++candidate) {
          if (sums[candidate] < least) {
            least = sums[candidate];
            best = candidate;
          }
        }
        largest = shrunk(best);
      }
      for (int64_t i = 0; i < count; ++i) {
        scales.push_back(given(amax[static_cast<size_t>(i)]));
        std::string bytes;
        AppendFloat(bytes, scale_dtype, scales.back().divisor);
        if (!block) {
          std::memcpy(AddressIn(regions[1], row + i, 0), bytes.data(), bytes.size());
          continue;
        }
        unsigned char* at = AddressIn(regions[1], row / kBlock, (tile.col_begin / kBlock + i) * scale_bytes);
        for (size_t byte = 0; byte < bytes.size(); ++byte) at[byte] |= static_cast<unsigned char>(bytes[byte]);
      }
      band.given_stride = block ? 0 : 1;
    }
    band.given = is_fp8() ? scales.data() : nullptr;
    FloatOptions options;
    options.replace_nonfinite = nonfinite == NonfinitePolicy::kClamp;
    options.errors = errors.data() + (row - tile.row_begin);
    if (Searches() && is_nvfp4()) {
      SearchFloatScales(band, search);
      options.scales_chosen = true;
    }
    scalar::Problem problem = EncodeFloats(band, options);
    problem.row += row - tile.row_begin;
    return ProblemStatus(problem, tile, work.group);
  }));
  // Of MX a group next to the end of D always comes to this: its power of two is the next one.
  if (scaling_ == FloatScaling::kMx) return absl::OkStatus();
  return CheckFiniteErrors(spec_, tile, errors);
}

absl::Status FloatScheme::Decode(const Tile& tile, absl::Span<const RegionBuffer> regions, std::byte* out) const {
  QUERN_RETURN_IF_ERROR(CheckTile(tile, 1, ColumnMultiple()));
  QUERN_ASSIGN_OR_RETURN(FloatTile work, Resolve(tile, regions));
  if (is_nvfp4()) work.set_scale = ReadScale(reinterpret_cast<const unsigned char*>(regions[2].data), DType::kF32);
  const DType scale_dtype = ScaleDType(tile.dtype);
  const int64_t scale_bytes = BytesPerElement(scale_dtype);
  return ForEachBand(tile, work, [&](int64_t row, FloatTile band) -> absl::Status {
    std::vector<FloatScale> scales;
    const auto add = [&](const unsigned char* at) {
      const float scale = ReadScale(at, scale_dtype);
      scales.push_back({scale, is_modelopt() ? Rounded(tile.dtype, scale) : scale});
    };
    switch (spec_.strategy) {
      case Strategy::kTensor:
        add(reinterpret_cast<const unsigned char*>(regions[1].data));
        break;
      case Strategy::kChannel:
        for (int64_t i = 0; i < band.rows; ++i) add(AddressIn(regions[1], row + i, 0));
        band.given_stride = 1;
        break;
      case Strategy::kBlock:
        for (int64_t i = 0; i < Blocks(tile.cols()); ++i) {
          add(AddressIn(regions[1], row / kBlock, (tile.col_begin / kBlock + i) * scale_bytes));
        }
        break;
      case Strategy::kGroup:
      case Strategy::kTensorGroup:
        break;
    }
    band.given = is_fp8() ? scales.data() : nullptr;
    DecodeFloats(band, reinterpret_cast<unsigned char*>(out) + (row - tile.row_begin) * tile.row_stride, tile.row_stride);
    return absl::OkStatus();
  });
}

}  // namespace quern::quant
