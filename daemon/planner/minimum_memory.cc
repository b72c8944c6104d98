#include "daemon/planner/minimum_memory.h"

#include <algorithm>

#include "absl/status/statusor.h"
#include "base/dtype.h"
#include "base/task_memory.h"
#include "quant/scheme.h"

namespace quern::daemon {

uint64_t MinimumMemory(const quern::v1::QuantizeUnit& unit) {
  uint64_t memory = kMinimumTaskMemory;
  const absl::StatusOr<quant::SchemeSpec> spec = quant::SchemeSpec::Parse(unit.scheme());
  if (!spec.ok()) return memory;
  const absl::StatusOr<const quant::Scheme*> scheme = quant::Scheme::For(*spec);
  if (!scheme.ok()) return memory;
  const auto multiple = static_cast<uint64_t>((*scheme)->RowMultiple());
  const auto gather = [&](const quern::v1::TensorView& view) {
    const absl::StatusOr<DType> dtype = ParseDType(view.dtype());
    if (!dtype.ok() || !view.decode_scheme().empty() || view.cols() <= 1 || view.col_stride() == BytesPerElement(*dtype)) return;
    // Rows are spread a little, see WeightSlab.
    const uint64_t row_bytes = view.cols() * static_cast<uint64_t>(BytesPerElement(*dtype)) + 128;
    memory = std::max(memory, GatherMemory(std::min(view.rows(), multiple) * row_bytes));
  };
  gather(unit.weight());
  for (const quern::v1::TensorView& view : unit.statistics_set()) gather(view);
  const bool whole_rows = spec->strategy == quant::Strategy::kChannel || spec->strategy == quant::Strategy::kBlock;
  if (whole_rows && spec->observer != quant::Observer::kMinMax) {
    // A weight in blocks of 128 rows is decoded in such blocks.
    const uint64_t rows = std::min<uint64_t>(unit.weight().rows(), unit.weight().decode_scheme().empty() ? multiple : 128);
    const absl::StatusOr<DType> dtype = ParseDType(unit.weight().dtype());
    if (dtype.ok())
      memory = std::max(memory, WholeRowsMemory(rows * unit.weight().cols() * static_cast<uint64_t>(BytesPerElement(*dtype))));
  }
  for (const quern::v1::DecodeInput& input : unit.inputs()) memory = std::max(memory, InputsMemory(input.view().cols() * sizeof(float)));
  return memory;
}

uint64_t MinimumMemory(const quern::v1::TaskSpec& task) {
  uint64_t memory = kMinimumTaskMemory;
  for (const quern::v1::ShardUnit& unit : task.write_shard().units()) {
    if (unit.has_quantize()) memory = std::max(memory, MinimumMemory(unit.quantize()));
  }
  for (const quern::v1::CompareUnit& unit : task.compare_shard().units()) {
    if (unit.has_quantize()) memory = std::max(memory, MinimumMemory(unit.quantize()));
  }
  return memory;
}

}  // namespace quern::daemon
