// Weights written into stacks, whichever way they lie there; against stacks put together element by element.
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "worker/pipeline/stack_slabs.h"
#include "worker/pipeline/strided_copy.h"
#include "worker/pipeline/test_shard_task.h"

namespace quern::worker {
namespace {

using testing::HasSubstr;

constexpr char kBf16[] = "plain16 tensor symmetric observer=minmax numerics=reference scale=bf16";
constexpr char kF16[] = "plain16 tensor symmetric observer=minmax numerics=reference";
constexpr char kF32[] = "plain32 tensor symmetric observer=minmax numerics=reference";
constexpr char kFp8Block[] = "float8 block=128 symmetric observer=minmax numerics=reference";
constexpr char kFp8Channel[] = "float8 channel symmetric observer=minmax numerics=reference";

TEST(CopyTransposedTest, EveryShapeAndStride) {
  std::mt19937 random(3);
  for (const int element : {2, 4}) {
    for (int i = 0; i < 200; ++i) {
      const int64_t rows = 1 + random() % 70, cols = 1 + random() % 70, step = element * (1 + random() % 3);
      const int64_t from_stride = cols * element + random() % 9, out_stride = rows * step + random() % 9;
      std::vector<std::byte> from(static_cast<size_t>(rows * from_stride)), out(static_cast<size_t>(cols * out_stride)), expected = out;
      for (std::byte& byte : from) byte = static_cast<std::byte>(random());
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t col = 0; col < cols; ++col) {
          std::copy_n(from.begin() + row * from_stride + col * element, element, expected.begin() + col * out_stride + row * step);
        }
      }
      CopyTransposed(from.data(), from_stride, rows, cols, element, out.data(), out_stride, step);
      ASSERT_EQ(out, expected) << rows << " x " << cols << ", element " << element << ", step " << step;
    }
  }
}

class StackWriterTest : public RunTaskTest {
 protected:
  // So many weights that are stored in a format.
  static std::vector<TestSource> Encoded(ShardTask& task, const std::string& name, const std::string& scheme, int64_t rows, int64_t cols,
                                         size_t count) {
    std::vector<TestSource> weights;
    for (size_t i = 0; i < count; ++i) weights.push_back(task.Encoded(absl::StrCat(name, i), "BF16", scheme, rows, cols, 0, i % 2 == 1));
    return weights;
  }
};

// Weights in every format as the layouts of families need them.
TEST_F(StackWriterTest, EveryFormatInEveryOrder) {
  ShardTask task(dir_.path());
  int next = 0;
  for (const char* const scheme : {kGroup32, kThreeBits, kChannel, kFp8Block, kFp8Channel, kNvfp4, kMxfp4}) {
    const std::vector<TestSource> weights = Encoded(task, absl::StrCat("w", next), scheme, 70, 288, 6);
    const std::string name = absl::StrCat("stack", next++);
    task.Stack(name + ".halves", kBf16, weights, 2, true, false);
    task.Copy(name + ".copy", 1, 4321);
    task.Stack(name + ".interleaved", kF32, weights, 2, true, true);
    task.Stack(name + ".down", kF16, weights, 1, true, false);
    task.Stack(name + ".straight", kBf16, weights, 2, false, false);
  }
  task.Finish();
  for (const ReaderMode mode : kModes) ExpectRightAndEqual(task, Options(kMinimumTaskMemory, 2, mode));
}

// With the least pool: strips of several columns, and rows that are only read in segments.
TEST_F(StackWriterTest, SlabsLargerThanThePool) {
  ShardTask task(dir_.path());
  task.Stack("wide", kBf16, Encoded(task, "wide", kGroup32, 1100, 2048, 4), 2, true, false);
  task.Stack("blocks", kBf16, Encoded(task, "blocks", kFp8Block, 1000, 1700, 2), 2, true, true);
  task.Stack("long", kF32, Encoded(task, "long", kMxfp4, 75, 32768, 1), 1, true, false);
  const uint64_t plain = task.AddWeight("plain", "BF16", 40, 90112);
  task.Stack("plain", kBf16, {task.Dense("plain", "BF16", plain, 40, 90112)}, 1, true, false);
  task.Stack("narrow", kF16, Encoded(task, "narrow", kThreeBits, 4096, 1024, 1), 1, true, false);
  task.Copy("end", 5, 99);
  task.Finish();
  ExpectRightAndEqual(task, Options(kMinimumTaskMemory, 3));
  ExpectRightAndEqual(task, Options(kMinimumTaskMemory + 5 * kMiB, 1, ReaderMode::kBuffered));
  const uint64_t ample = 256 * kMiB;
  const quern::v1::TaskResult result = ExpectRight(task, Options(ample, 2));
  // Rows of zero points that two tiles share are read with both.
  EXPECT_LT(result.bytes_read(), (task.source().size() + task.other().size()) * 11 / 10) << "where a slab fits, weights are read once";
}

TEST_F(StackWriterTest, DifferencesAreFoundWhereValuesLieSpread) {
  ShardTask task(dir_.path());
  task.Stack("stack", kBf16, Encoded(task, "w", kGroup32, 64, 96, 4), 2, true, true);
  task.Finish();
  ExpectRight(task, Options());
  QUERN_ASSERT_OK_AND_ASSIGN(std::string bytes, ReadFileToString(output_));
  const auto compare = [&] {
    TaskControl control;
    return RunTask(task.CompareSpec(output_), ReadOptions(), &control);
  };
  // Column 5, row 7 of the second expert's second part.
  bytes[4096 + 2 * (96 * 128 + 5 * 128 + 2 * 7 + 1)] ^= 1;
  QUERN_ASSERT_OK(RemoveFile(output_));
  QUERN_ASSERT_OK(WriteFileDurably(output_, bytes));
  QUERN_ASSERT_OK_AND_ASSIGN(const quern::v1::TaskResult found, compare());
  ASSERT_EQ(found.mismatches_size(), 1);
  EXPECT_EQ(found.mismatches(0).tensor(), "stack.3");
}

TEST_F(StackWriterTest, NonfiniteValuesFailNamingThePlace) {
  ShardTask task(dir_.path());
  const uint64_t at = task.AddWeight("w", "BF16", 40, 64);
  task.source()[at + 2 * (33 * 64 + 7)] = '\xC0';
  task.source()[at + 2 * (33 * 64 + 7) + 1] = '\x7F';
  task.Stack("stack", kBf16, {task.Dense("w", "BF16", at, 40, 64)}, 1, true, false);
  task.Finish();
  EXPECT_THAT(Fails(task, Options()), StatusIs(kInvalid, HasSubstr("row 33, column 7 is NaN")));
}

TEST_F(StackWriterTest, PlansThatDoNotFillAStackAreRefused) {
  ShardTask task(dir_.path());
  const std::vector<TestSource> weights = Encoded(task, "w", kGroup32, 64, 96, 4);
  task.Stack("stack", kBf16, weights, 2, true, false);
  task.Finish();
  const auto with = [&](int unit, auto change) {
    ShardTask changed = task;
    change(*changed.spec().mutable_write_shard()->mutable_units(unit)->mutable_quantize());
    return Fails(changed, Options());
  };
  using quern::v1::QuantizeUnit;
  EXPECT_THAT(with(1, [](QuantizeUnit& unit) { unit.mutable_place()->set_offset(256); }),
              StatusIs(kInvalid, HasSubstr("does not stand beside stack.0")));
  EXPECT_THAT(with(2, [](QuantizeUnit& unit) { unit.mutable_place()->set_offset(2); }), StatusIs(kInvalid, HasSubstr("placed at 2")));
  EXPECT_THAT(with(2, [](QuantizeUnit& unit) { unit.mutable_place()->set_row_stride(6); }), StatusIs(kInvalid, HasSubstr("alternate")));
  EXPECT_THAT(with(0, [](QuantizeUnit& unit) { unit.mutable_place()->set_col_stride(300); }), StatusIs(kInvalid, HasSubstr("dense rows")));
  EXPECT_THAT(with(0, [](QuantizeUnit& unit) { unit.mutable_place()->set_col_stride(1 << 30); }),
              StatusIs(kInvalid, HasSubstr("dense rows")));
  EXPECT_THAT(with(0, [](QuantizeUnit& unit) { unit.mutable_weight()->set_rows(uint64_t{1} << 62); }), StatusIs(kInvalid));
  EXPECT_THAT(with(3, [](QuantizeUnit& unit) { unit.set_scheme(kF32); }), StatusIs(kInvalid, HasSubstr("only plain values")));
  EXPECT_THAT(with(3, [](QuantizeUnit& unit) { unit.set_scheme(kChannel); }), StatusIs(kInvalid));
  EXPECT_THAT(with(3, [](QuantizeUnit& unit) { unit.mutable_outputs(0)->set_name("other"); }), StatusIs(kInvalid, HasSubstr("planned at")));
  EXPECT_THAT(with(3, [](QuantizeUnit& unit) { unit.clear_place(); }), StatusIs(kInvalid));
  {
    ShardTask shorter = task;
    shorter.spec().mutable_write_shard()->mutable_units()->RemoveLast();
    EXPECT_THAT(Fails(shorter, Options()), StatusIs(kInvalid, HasSubstr("2 modules lie together, 1 are left")));
    shorter.spec().mutable_write_shard()->mutable_units()->RemoveLast();
    EXPECT_THAT(Fails(shorter, Options()), StatusIs(kInvalid, HasSubstr("the last module ends at")));
  }
}

}  // namespace
}  // namespace quern::worker
