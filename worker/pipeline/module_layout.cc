#include "worker/pipeline/module_layout.h"

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace quern::worker {

absl::StatusOr<ModuleLayout> ModuleLayout::For(const quern::v1::QuantizeUnit& unit, DType dtype, quant::Shape2D shape) {
  ModuleLayout layout;
  layout.dtype_ = dtype;
  layout.shape_ = shape;
  const std::string what = absl::StrCat("module ", unit.module());
  QUERN_ASSIGN_OR_RETURN(const quant::SchemeSpec spec, quant::SchemeSpec::Parse(unit.scheme()));
  QUERN_ASSIGN_OR_RETURN(layout.scheme_, quant::Scheme::For(spec));
  if (unit.nonfinite() == "clamp") {
    layout.nonfinite_ = quant::NonfinitePolicy::kClamp;
  } else if (unit.nonfinite() != "fail" && !unit.nonfinite().empty()) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": unknown policy \"", unit.nonfinite(), "\" for NaN and Inf"));
  }
  absl::StatusOr<std::vector<RegionExtent>> extents = RegionExtent::For(*layout.scheme_, dtype, shape);
  if (!extents.ok()) return Annotate(extents.status(), what);
  if (static_cast<size_t>(unit.outputs_size()) != extents->size()) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": the plan has ", unit.outputs_size(), " tensors, the scheme ", extents->size()));
  }
  if (unit.has_place()) {
    if (extents->size() != 1) return absl::InvalidArgumentError(absl::StrCat(what, ": only plain values can go into a stack"));
    QUERN_RETURN_IF_ERROR(Annotate(layout.AddPlaced(unit, std::move(extents->front())), what));
    return layout;
  }
  for (int i = 0; i < unit.outputs_size(); ++i) {
    const quern::v1::OutputTensor& output = unit.outputs(i);
    RegionPlace place(std::move((*extents)[static_cast<size_t>(i)]), output.offset());
    if (place.size() != output.size() || (i > 0 && place.offset() != layout.regions_.back().offset() + layout.regions_.back().size())) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", output.name(), ": the plan gives it ", output.size(), " bytes at ",
                                                     output.offset(), ", the scheme stores ", place.size(), " behind the tensor before"));
    }
    layout.size_ += place.size();
    layout.has_computed_ |= place.computed();
    layout.regions_.push_back(std::move(place));
  }
  return layout;
}

absl::Status ModuleLayout::AddPlaced(const quern::v1::QuantizeUnit& unit, RegionExtent extent) {
  const quern::v1::OutputTensor& output = unit.outputs(0);
  const quern::v1::StackPlace& place = unit.place();
  const int bits = BitsPerElement(extent.region().dtype);
  const int64_t element = bits / 8;
  if (!extent.has_rows() || bits % 8 != 0 || output.dtype() != std::string(DTypeName(extent.region().dtype)) ||
      extent.bytes_per_row() != shape_.cols * element || extent.size() != static_cast<uint64_t>(shape_.rows * extent.bytes_per_row())) {
    return absl::InvalidArgumentError("only plain values can go into a stack");
  }
  if (place.row_stride() < element || place.col_stride() < element ||
      __int128{place.offset()} + __int128{shape_.rows - 1} * place.row_stride() + __int128{shape_.cols - 1} * place.col_stride() + element >
          output.size()) {
    return absl::InvalidArgumentError(absl::StrCat("its place leads out of the ", output.size(), " bytes of tensor ", output.name()));
  }
  strided_ = place.col_stride() != element || place.row_stride() != extent.bytes_per_row();
  size_ = extent.size();
  regions_.emplace_back(std::move(extent), output.offset() + place.offset());
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> ModuleLayout::ComputedRegions(const quant::Statistics* statistics,
                                                                       const quant::ModuleInputs& inputs) const {
  QUERN_ASSIGN_OR_RETURN(std::vector<std::string> computed, scheme_->ComputedRegions(dtype_, shape_, statistics, inputs));
  std::vector<std::string> by_region(regions_.size());
  size_t next = 0;
  for (size_t i = 0; i < regions_.size(); ++i) {
    if (!regions_[i].computed()) continue;
    if (next == computed.size() || computed[next].size() != regions_[i].size()) {
      return absl::InternalError(absl::StrCat("scheme \"", scheme_->spec().ToString(), "\" computes ", regions_[i].region().suffix,
                                              " with another size than it says"));
    }
    by_region[i] = std::move(computed[next++]);
  }
  if (next != computed.size()) {
    return absl::InternalError(absl::StrCat("scheme \"", scheme_->spec().ToString(), "\" computes more regions than it says"));
  }
  return by_region;
}

}  // namespace quern::worker
