// Where the stored regions of a module stand in their file.
#ifndef QUERN_WORKER_PIPELINE_MODULE_LAYOUT_H_
#define QUERN_WORKER_PIPELINE_MODULE_LAYOUT_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/dtype.h"
#include "quant/scheme.h"
#include "quern/v1/plan.pb.h"
#include "worker/pipeline/region_extent.h"

namespace quern::worker {

// One stored tensor of a module and where it stands in its file.
class RegionPlace : public RegionExtent {
 public:
  RegionPlace(RegionExtent extent, uint64_t offset) : RegionExtent(std::move(extent)), offset_(offset) {}
  uint64_t offset() const { return offset_; }

 private:
  uint64_t offset_;
};

class ModuleLayout {
 public:
  // INVALID_ARGUMENT where the unit's outputs are not what its scheme stores.
  static absl::StatusOr<ModuleLayout> For(const quern::v1::QuantizeUnit& unit, DType dtype, quant::Shape2D shape);

  const quant::Scheme& scheme() const { return *scheme_; }
  const std::vector<RegionPlace>& regions() const { return regions_; }
  quant::NonfinitePolicy nonfinite() const { return nonfinite_; }
  // Plain values that do not stand row after row, but somehow in a tensor with others (StackPlace): the region's offset is that of element
  // [0, 0] then, and says nothing of the others.
  bool strided() const { return strided_; }
  uint64_t begin() const { return regions_.front().offset(); }
  uint64_t size() const { return size_; }  // of all regions, which follow each other
  bool has_computed() const { return has_computed_; }

  // Bytes of every region with `computed`, by region; the others' are empty. INTERNAL where the scheme gives something else than it says.
  absl::StatusOr<std::vector<std::string>> ComputedRegions(const quant::Statistics* statistics, const quant::ModuleInputs& inputs) const;

 private:
  absl::Status AddPlaced(const quern::v1::QuantizeUnit& unit, RegionExtent extent);

  const quant::Scheme* scheme_ = nullptr;
  DType dtype_ = DType::kBF16;
  quant::Shape2D shape_;
  quant::NonfinitePolicy nonfinite_ = quant::NonfinitePolicy::kFail;
  std::vector<RegionPlace> regions_;
  uint64_t size_ = 0;
  bool has_computed_ = false;
  bool strided_ = false;
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_PIPELINE_MODULE_LAYOUT_H_
