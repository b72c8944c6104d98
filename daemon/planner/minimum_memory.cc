#include "daemon/planner/minimum_memory.h"

#include <algorithm>
#include <numeric>

#include "absl/status/statusor.h"
#include "base/dtype.h"
#include "base/task_memory.h"
#include "quant/scheme.h"

namespace quern::daemon {

namespace {

// Of a weight that is turned over or spread in a stack: strips of the stack are put together in memory, and its rows are gathered again to
// be compared.
uint64_t StackMemory(const quern::v1::QuantizeUnit& unit, const quant::Scheme& scheme) {
  const absl::StatusOr<DType> dtype = ParseDType(unit.outputs(0).dtype());
  if (!dtype.ok() || BitsPerElement(*dtype) % 8 != 0) return 0;
  const int64_t element = BytesPerElement(*dtype);
  const auto cols = static_cast<int64_t>(unit.weight().cols());
  if (unit.place().col_stride() == element && unit.place().row_stride() == cols * element) return 0;
  int64_t row_multiple = scheme.RowMultiple(), column_multiple = scheme.ColumnMultiple();
  const absl::StatusOr<quant::SchemeSpec> spec = quant::SchemeSpec::Parse(unit.weight().decode_scheme());
  if (spec.ok()) {
    const absl::StatusOr<const quant::Scheme*> decoder = quant::Scheme::For(*spec);
    if (decoder.ok()) {
      row_multiple = std::lcm(row_multiple, (*decoder)->RowMultiple());
      column_multiple = std::lcm(column_multiple, (*decoder)->ColumnMultiple());
    }
  }
  const int64_t strip = std::min(cols, column_multiple) * unit.place().col_stride();
  const int64_t rows = std::min(static_cast<int64_t>(unit.weight().rows()), row_multiple) * (cols * element + 128);
  return GatherMemory(static_cast<uint64_t>(std::max(strip, rows)));
}

}  // namespace

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
  if (unit.has_place() && unit.outputs_size() == 1) memory = std::max(memory, StackMemory(unit, **scheme));
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
