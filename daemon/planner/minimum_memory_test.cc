#include "daemon/planner/minimum_memory.h"

#include "base/status_matchers.h"
#include "base/task_memory.h"

namespace quern::daemon {
namespace {

quern::v1::QuantizeUnit Unit(const char* scheme, const char* dtype, uint64_t rows, uint64_t cols, int64_t row_stride, int64_t col_stride) {
  quern::v1::QuantizeUnit unit;
  unit.set_scheme(scheme);
  unit.mutable_weight()->set_dtype(dtype);
  unit.mutable_weight()->set_rows(rows);
  unit.mutable_weight()->set_cols(cols);
  unit.mutable_weight()->set_row_stride(row_stride);
  unit.mutable_weight()->set_col_stride(col_stride);
  return unit;
}

constexpr char kGroup[] = "int4 group=32 asymmetric observer=minmax numerics=reference";
constexpr char kBlock[] = "float8 block=128 symmetric observer=minmax numerics=reference";

TEST(MinimumMemoryTest, OnlyGatheredWeightsAndInputsNeedMore) {
  EXPECT_EQ(MinimumMemory(Unit(kGroup, "BF16", 4, 1 << 30, 1 << 30, 2)), kMinimumTaskMemory);
  EXPECT_EQ(MinimumMemory(Unit(kBlock, "F32", 4000, 1 << 30, 1 << 30, 4)), kMinimumTaskMemory);
  EXPECT_EQ(MinimumMemory(Unit(kGroup, "BF16", 4000, 4096, 2, 8000)), kMinimumTaskMemory);
  EXPECT_EQ(MinimumMemory(Unit("nonsense", "BF16", 4000, 4096, 2, 8000)), kMinimumTaskMemory);
  // 32 rows, or 128, of 64 Ki columns.
  EXPECT_EQ(MinimumMemory(Unit(kGroup, "BF16", 4000, 65536, 2, 8000)), 8 * (32 * (2 * 65536 + 128) + 64 * kKiB));
  EXPECT_EQ(MinimumMemory(Unit(kBlock, "F32", 4000, 65536, 4, 16000)), 8 * (128 * (4 * 65536 + 128) + 64 * kKiB));
  EXPECT_EQ(MinimumMemory(Unit(kBlock, "F32", 2, 65536, 4, 16000)), kMinimumTaskMemory);

  // Whole rows, of a channel or a block, are searched over at once; to compare them again, any tile will do.
  const char* const search = "float8 block=128 symmetric observer=mse numerics=reference";
  const quern::v1::QuantizeUnit block = Unit(search, "BF16", 4000, 65536, 2 * 65536, 2);
  EXPECT_EQ(MinimumMemory(block), TileMemory(TileOf(128 * 2 * 65536)));
  EXPECT_EQ(MinimumMemory(block, /*encoded=*/false), kMinimumTaskMemory);
  EXPECT_EQ(MinimumMemory(Unit(search, "F32", 2, 1 << 22, 4 << 22, 4)), TileMemory(TileOf(2 * 4 << 22)));
  const char* const of_rows = "int4 channel asymmetric observer=mse numerics=reference";
  EXPECT_EQ(MinimumMemory(Unit(of_rows, "BF16", 4000, 65536, 2 * 65536, 2)), kMinimumTaskMemory);
  EXPECT_EQ(MinimumMemory(Unit(of_rows, "BF16", 4000, 1 << 23, 2 << 23, 2)), TileMemory(TileOf(2 << 23)));
  // Rows with gaps are read with them, and encoded ones take the codes' memory, too.
  EXPECT_EQ(MinimumMemory(Unit(search, "BF16", 4000, 65536, 3 * 65536, 2)), TileMemory(TileOf(127 * 3 * 65536 + 2 * 65536)));
  quern::v1::QuantizeUnit decoded = Unit(search, "BF16", 4000, 65536, 0, 0);
  decoded.mutable_weight()->set_decode_scheme("float8 channel symmetric observer=minmax numerics=reference");
  quern::v1::TensorView& codes = *decoded.mutable_weight()->add_decode()->mutable_view();
  codes.set_rows(4000);
  codes.set_cols(65536);
  codes.set_row_stride(65536);
  EXPECT_EQ(MinimumMemory(decoded), TileMemory(TileOf(128 * 2 * 65536 + 129 * 65536 + 16 * kKiB)));

  quern::v1::TaskSpec task;
  *task.mutable_write_shard()->add_units()->mutable_quantize() = Unit(kGroup, "BF16", 4, 64, 128, 2);
  quern::v1::QuantizeUnit& unit = *task.mutable_write_shard()->mutable_units(0)->mutable_quantize();
  EXPECT_EQ(MinimumMemory(task), kMinimumTaskMemory);
  unit.add_inputs()->mutable_view()->set_cols(1 << 20);
  EXPECT_EQ(MinimumMemory(task), 8 * (4 * kMiB + 8 * kKiB));
  unit.clear_inputs();
  *unit.add_statistics_set() = Unit(kBlock, "BF16", 4000, 65536, 2, 16000).weight();
  EXPECT_EQ(MinimumMemory(task), 8 * (32 * (2 * 65536 + 128) + 64 * kKiB));
}

}  // namespace
}  // namespace quern::daemon
