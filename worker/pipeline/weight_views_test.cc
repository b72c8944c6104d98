// Weights that are not dense rows: transposed, interleaved, far apart, encoded; against the values taken one by one.
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "worker/pipeline/strided_copy.h"
#include "worker/pipeline/test_shard_task.h"

namespace quern::worker {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr char kThreeBitsReference[] = "int3 group=32 asymmetric observer=minmax numerics=reference";
constexpr char kEightBits[] = "int8 group=128 symmetric observer=minmax numerics=reference";

unsigned Seed() {
  const char* const given = std::getenv("QUERN_TEST_SEED");
  return given != nullptr ? static_cast<unsigned>(std::atoi(given)) : 4;
}

TEST(StridedCopyTest, EveryShapeAndStride) {
  std::mt19937 random(1);
  for (const int element : {1, 2, 4}) {
    for (int i = 0; i < 200; ++i) {
      const int64_t rows = 1 + random() % 70, cols = 1 + random() % 70, step = element * (1 + random() % 3);
      const int64_t out_stride = cols * element + random() % 9;
      std::vector<std::byte> source(static_cast<size_t>(rows * step + 64));
      for (std::byte& byte : source) byte = static_cast<std::byte>(random());
      std::vector<const std::byte*> columns;
      for (int64_t col = 0; col < cols; ++col) columns.push_back(source.data() + random() % 32);
      std::vector<std::byte> out(static_cast<size_t>(rows * out_stride)), expected = out;
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t col = 0; col < cols; ++col) {
          std::copy_n(columns[col] + row * step, element, expected.begin() + row * out_stride + col * element);
        }
      }
      CopyColumns(columns.data(), cols, rows, step, element, out.data(), out_stride);
      ASSERT_EQ(out, expected) << rows << " x " << cols << ", element " << element << ", step " << step;
      std::vector<std::byte> row(static_cast<size_t>(rows * element)), expected_row = row;
      for (int64_t r = 0; r < rows; ++r) std::copy_n(columns[0] + r * step, element, expected_row.begin() + r * element);
      CopyRow(columns[0], step, rows, element, row.data());
      ASSERT_EQ(row, expected_row);
    }
  }
}

class WeightViewsTest : public RunTaskTest {};

// Experts stored [columns, rows], gate and up as halves or interleaved.
TEST_F(WeightViewsTest, TransposedStacks) {
  for (const char* const dtype : {"BF16", "F16", "F32"}) {
    SCOPED_TRACE(dtype);
    ShardTask task(dir_.path());
    task.AddBytes(1);
    const int64_t element = dtype == std::string("F32") ? 4 : 2;
    constexpr int64_t kHidden = 288, kInner = 70, kExperts = 3;
    const uint64_t stack = task.AddWeight("gate_up", dtype, kExperts * kHidden, 2 * kInner);
    const int64_t row = 2 * kInner * element;
    for (int64_t expert = 0; expert < kExperts; ++expert) {
      const uint64_t slice = stack + expert * kHidden * row;
      for (const int64_t half : {0, 1}) {
        const TestSource of_halves = task.Strided("halves", dtype, slice + half * kInner * element, kInner, kHidden, element, row);
        task.Quantize(absl::StrCat("halves", expert, half), half == 0 ? kGroup32 : kChannel, of_halves, {});
        const TestSource interleaved = task.Strided("interleaved", dtype, slice + half * element, kInner, kHidden, 2 * element, row);
        task.Quantize(absl::StrCat("interleaved", expert, half), kThreeBitsReference, interleaved, {});
      }
      // The other way around: every second column.
      task.Quantize(absl::StrCat("columns", expert), kGroup32, task.Strided("columns", dtype, slice, kHidden, 64, row, 2 * element), {});
    }
    task.Quantize("one row", kGroup32, task.Strided("one row", dtype, stack, 1, kHidden, element, row), {});
    task.Quantize("one column", kChannel, task.Strided("one column", dtype, stack, kHidden, 1, row, 999), {});
    task.Finish();
    for (const ReaderMode mode : kModes) ExpectRightAndEqual(task, Options(kMinimumTaskMemory, 2, mode));
  }
}

// With the least pool these take several slabs, run by run or in spans, and their side tensors each place.
TEST_F(WeightViewsTest, TransposedWeightsLargerThanTheirPartOfThePool) {
  ShardTask task(dir_.path());
  const uint64_t stack = task.AddWeight("stack", "BF16", 2048, 4000);  // [columns, rows]
  task.Quantize("narrow", kGroup32, task.Strided("narrow", "BF16", stack, 500, 2048, 2, 8000), {});
  task.Copy("between", stack, 12345);
  task.Quantize("whole", kSmallGroups, task.Strided("whole", "BF16", stack, 4000, 2048, 2, 8000), {});
  task.Quantize("second half", kEightBits, task.Strided("second half", "BF16", stack + 4000, 2000, 2048, 2, 8000), {});
  task.Quantize("odd rows", kThreeBitsReference, task.Strided("odd rows", "BF16", stack + 2, 2000, 2048, 4, 8000), {});
  task.Quantize("long rows", kThreeBitsReference, task.Strided("long rows", "BF16", stack, 33, 48 * 1024, 2, 160), {});
  task.Finish();
  ExpectRightAndEqual(task, Options(kMinimumTaskMemory, 3));
  ExpectRightAndEqual(task, Options(100 * kMiB, 2));
}

TEST_F(WeightViewsTest, RunsAreReadOneByOneWhereThatIsLess) {
  ShardTask task(dir_.path());
  // Columns 64 KiB apart of which a view takes 8 KiB.
  const uint64_t stack = task.AddWeight("stack", "BF16", 64, 32 * 1024);
  task.Quantize("corner", kGroup32, task.Strided("corner", "BF16", stack + 2000, 4096, 64, 2, 64 * 1024), {});
  // Rows likewise.
  task.Quantize("slice", kGroup32, task.Strided("slice", "BF16", stack + 3000, 64, 4096, 64 * 1024, 2), {});
  task.Finish();
  const quern::v1::TaskResult result = ExpectRight(task, Options());
  EXPECT_EQ(result.bytes_read(), 2 * 64 * 4096 * 2) << "no byte more than the weights have";
}

// A read takes as long as moving some tens of KiB: many small ones would keep a disk waiting.
TEST_F(WeightViewsTest, ShortGapsAreReadAlong) {
  ShardTask task(dir_.path());
  // Columns 16 KiB apart of which a view takes the half.
  const uint64_t stack = task.AddWeight("stack", "BF16", 96, 8 * 1024);
  task.Quantize("half", kGroup32, task.Strided("half", "BF16", stack, 4096, 96, 2, 16 * 1024), {});
  task.Finish();
  const quern::v1::TaskResult result = ExpectRight(task, Options());
  EXPECT_GT(result.bytes_read(), 90 * 16 * 1024);
  EXPECT_LT(result.bytes_read(), 96 * 16 * 1024);
}

TEST_F(WeightViewsTest, RowsThatAreFarApartAndLongerThanThePool) {
  ShardTask task(dir_.path());
  const uint64_t stack = task.AddWeight("stack", "BF16", 3 * 35, 64 * 1024);
  task.Quantize("third", kGroup32, task.Dense("third", "BF16", stack, 35, 64 * 1024, 3 * 128 * 1024), {});
  task.Finish();
  ExpectRightAndEqual(task, Options());
}

TEST_F(WeightViewsTest, AWeightThatCannotBeGatheredSaysHowMuchMemoryItTakes) {
  ShardTask task(dir_.path());
  const uint64_t stack = task.AddWeight("stack", "BF16", 256 * 1024, 32);
  task.Quantize("a", kGroup32, task.Strided("a.weight", "BF16", stack, 32, 256 * 1024, 2, 64), {});
  task.Finish();
  const quern::v1::Failure failure = FailureOf(Fails(task, Options()));
  EXPECT_EQ(failure.reason(), quern::v1::MEMORY_TOO_SMALL);
  EXPECT_THAT(failure.message(), AllOf(HasSubstr("a.weight"), HasSubstr("--memory")));
  EXPECT_GT(failure.bytes_needed(), kMinimumTaskMemory);
  EXPECT_LT(failure.bytes_needed(), 160 * kMiB);
  ExpectRightAndEqual(task, Options(failure.bytes_needed()));
}

TEST_F(WeightViewsTest, EncodedWeightsAreDecoded) {
  ShardTask task(dir_.path());
  const TestSource four = task.Encoded("four", "BF16", kGroup32, 100, 256);
  const TestSource gaps = task.Encoded("gaps", "BF16", kEightBits, 70, 256, 300);
  const TestSource far = task.Encoded("far", "F32", kThreeBitsReference, 67, 96, 50'000);
  const TestSource spread = task.Encoded("spread", "F16", kGroup32, 33, 64, 0, true);
  const TestSource channel = task.Encoded("channel", "BF16", kChannel, 33, 100, 7, true);
  task.Quantize("a", kEightBits, four, {});
  task.Quantize("b", kGroup32, gaps, {});
  task.Quantize("c", kChannel, far, {});
  task.Quantize("d", kThreeBitsReference, spread, {});
  task.Quantize("e", kChannel, channel, {});
  task.Finish();
  for (const ReaderMode mode : kModes) ExpectRightAndEqual(task, Options(kMinimumTaskMemory, 2, mode));
}

// Bands and segments of the encoder, from rows and parts of rows of the source's regions.
TEST_F(WeightViewsTest, LongEncodedRows) {
  ShardTask task(dir_.path());
  const TestSource wide = task.Encoded("wide", "BF16", kThreeBitsReference, 67, 96 * 1024);
  const TestSource groups = task.Encoded("groups", "BF16", kSmallGroups, 35, 64 * 1024, 100, true);
  const TestSource many = task.Encoded("many", "BF16", kGroup32, 1500, 4096);
  task.Quantize("a", kGroup32, wide, {});
  task.Quantize("b", kSmallGroups, wide, {});
  task.Quantize("c", kChannel, groups, {});
  task.Quantize("d", kEightBits, many, {});
  task.Finish();
  ExpectRightAndEqual(task, Options());
  ExpectRightAndEqual(task, Options(200 * kMiB, 3));
}

TEST_F(WeightViewsTest, RandomShapesAndViews) {
  const unsigned seed = Seed();
  std::mt19937 random(seed);
  const auto pick = [&](int64_t low, int64_t high) { return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1)); };
  const char* const schemes[] = {kGroup32, kThreeBitsReference, kChannel};
  const char* const dtypes[] = {"BF16", "F16", "F32"};
  for (int round = 0; round < 12; ++round) {
    ShardTask task(dir_.path());
    for (int i = 0; i < 6; ++i) {
      const char* const dtype = dtypes[pick(0, 2)];
      const int64_t element = dtype == std::string("F32") ? 4 : 2;
      const int64_t rows = pick(1, round < 8 ? 200 : 1200), cols = 32 * pick(1, round < 8 ? 12 : 60);
      const int64_t gap = pick(0, 2);
      TestSource weight;
      switch (pick(0, 3)) {
        case 0: {
          const uint64_t at = task.AddWeight("w", dtype, rows, cols + gap * 40);
          weight = task.Dense(absl::StrCat("dense", i), dtype, at, rows, cols, (cols + gap * 40) * element);
          break;
        }
        case 1: {
          const uint64_t at = task.AddWeight("w", dtype, cols, rows + gap * 40);
          weight = task.Strided(absl::StrCat("transposed", i), dtype, at, rows, cols, element, (rows + gap * 40) * element);
          break;
        }
        case 2: {
          const uint64_t at = task.AddWeight("w", dtype, cols, rows * (gap + 1));
          weight = task.Strided(absl::StrCat("interleaved", i), dtype, at, rows, cols, (gap + 1) * element, rows * (gap + 1) * element);
          break;
        }
        default:
          weight =
              task.Encoded(absl::StrCat("encoded", i), dtype, schemes[pick(0, 2)], rows, cols, static_cast<uint64_t>(gap * 777), gap == 1);
      }
      task.AddBytes(static_cast<uint64_t>(pick(0, 5)));
      task.Quantize(absl::StrCat("module", i), schemes[pick(0, 2)], weight, {});
    }
    task.Finish();
    const uint64_t memory = kMinimumTaskMemory + random() % (round % 2 == 0 ? 1 : 64 * kMiB);
    SCOPED_TRACE(absl::StrCat("seed ", seed, " round ", round, " memory ", memory));
    ExpectRightAndEqual(task, Options(memory, 1 + round % 3, kModes[round % 4]));
    if (HasFailure()) return;
  }
}

TEST_F(WeightViewsTest, PlansThatLieAboutEncodedWeightsAreRefused) {
  const auto expect_refused = [&](const char* what, const std::function<void(quern::v1::TensorView&)>& change) {
    ShardTask task(dir_.path());
    const TestSource weight = task.Encoded("w", "BF16", kGroup32, 64, 64);
    task.Quantize("a", kGroup32, weight, {});
    task.Finish();
    change(*task.spec().mutable_write_shard()->mutable_units(0)->mutable_quantize()->mutable_weight());
    EXPECT_THAT(Fails(task, Options()), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(what)));
    EXPECT_FALSE(FileExists(output_));
  };
  using View = quern::v1::TensorView;
  const auto region = [](View& view, int i) { return view.mutable_decode(i)->mutable_view(); };
  expect_refused("five to eight words", [](View& view) { view.set_decode_scheme("nothing"); });
  expect_refused("no scheme", [](View& view) { view.clear_decode_scheme(); });
  expect_refused("no source file", [&](View& view) { region(view, 1)->set_file(9); });
  expect_refused("leads out of", [&](View& view) { region(view, 0)->set_offset(UINT64_MAX - 5); });
  expect_refused("leads out of", [&](View& view) { region(view, 0)->set_row_stride(1 << 20); });
  expect_refused("overlaps", [&](View& view) { region(view, 0)->set_row_stride(31); });
  expect_refused("overlaps", [&](View& view) { region(view, 0)->set_row_stride(INT64_MIN); });
  expect_refused("gaps", [&](View& view) { region(view, 0)->set_col_stride(2); });
  expect_refused("the scheme stores U8 [64, 32]", [&](View& view) { region(view, 0)->set_rows(65); });
  expect_refused("the scheme stores U8 [64, 4]", [&](View& view) { region(view, 1)->set_cols(1); });
  expect_refused("the scheme stores", [](View& view) { view.set_rows(65); });
  expect_refused("too large", [](View& view) { view.set_rows(uint64_t{1} << 62); });
  expect_refused("too large", [](View& view) { view.set_cols(UINT64_MAX); });
  expect_refused("multiple of the group size", [](View& view) { view.set_cols(63); });
  expect_refused("does not say where its weight_scale", [](View& view) {
    while (view.decode_size() > 1) view.mutable_decode()->RemoveLast();
  });
  expect_refused("tensors to decode it with", [](View& view) { *view.add_decode() = view.decode(0); });
  expect_refused("a view of bytes", [&](View& view) { region(view, 0)->set_decode_scheme(kGroup32); });
}

}  // namespace
}  // namespace quern::worker
