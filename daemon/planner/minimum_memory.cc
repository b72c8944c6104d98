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

// Of a scheme that searches over whole rows: their values, and what they are decoded from.
uint64_t SearchMemory(const quern::v1::TensorView& view, const quant::Scheme& scheme) {
  const absl::StatusOr<DType> dtype = ParseDType(view.dtype());
  const uint64_t rows = std::min(view.rows(), static_cast<uint64_t>(scheme.RowsSearchedWhole()));
  if (!dtype.ok() || rows == 0 || view.cols() == 0) return 0;
  const uint64_t row_bytes = view.cols() * static_cast<uint64_t>(BytesPerElement(*dtype));
  // Rows that are further apart are gathered, and have the memory of that.
  const auto stride = static_cast<uint64_t>(std::max<int64_t>(view.decode_scheme().empty() ? view.row_stride() : 0, 0));
  uint64_t bytes = (rows - 1) * std::clamp(stride, row_bytes, 2 * row_bytes) + row_bytes;
  for (const quern::v1::DecodeInput& input : view.decode()) {
    // A row of the region more than the rows need at least, and between rows what is not worth a read of its own.
    constexpr uint64_t kMostBetween = 48 * kKiB;
    const quern::v1::TensorView& region = input.view();
    const uint64_t most = region.cols() + kMostBetween;
    const uint64_t apart = std::clamp(static_cast<uint64_t>(std::max<int64_t>(region.row_stride(), 0)), region.cols(), most);
    bytes += std::min(region.rows(), rows + 1) * apart + 16 * kKiB;
  }
  return TileMemory(TileOf(bytes));
}

}  // namespace

uint64_t MinimumMemory(const quern::v1::QuantizeUnit& unit, bool encoded) {
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
  if (encoded) memory = std::max(memory, SearchMemory(unit.weight(), **scheme));
  if (unit.has_place() && unit.outputs_size() == 1) memory = std::max(memory, StackMemory(unit, **scheme));
  for (const quern::v1::DecodeInput& input : unit.inputs()) memory = std::max(memory, InputsMemory(input.view().cols() * sizeof(float)));
  return memory;
}

uint64_t MinimumMemory(const quern::v1::TaskSpec& task) {
  uint64_t memory = kMinimumTaskMemory;
  for (const quern::v1::ShardUnit& unit : task.write_shard().units()) {
    if (unit.has_quantize()) memory = std::max(memory, MinimumMemory(unit.quantize(), /*encoded=*/true));
  }
  for (const quern::v1::CompareUnit& unit : task.compare_shard().units()) {
    if (unit.has_quantize()) memory = std::max(memory, MinimumMemory(unit.quantize(), /*encoded=*/false));
  }
  return memory;
}

}  // namespace quern::daemon
