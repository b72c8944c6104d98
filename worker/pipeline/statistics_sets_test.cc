// Schemes with scales of a whole tensor or set, and those whose blocks span rows: sets held in memory or read twice, inputs of modules.
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "quant/scheme.h"
#include "worker/pipeline/test_shard_task.h"

namespace quern::worker {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr char kNvfp4Static[] = "float4 tensor_group=16 symmetric observer=minmax numerics=reference scale=e4m3 activations=nvfp4_static";
constexpr char kFp8Static[] = "float8 tensor symmetric observer=minmax numerics=reference activations=fp8_static";
constexpr char kFp8Tensor[] = "float8 tensor symmetric observer=minmax numerics=reference";
constexpr char kFp8ChannelToken[] = "float8 channel symmetric observer=minmax numerics=reference activations=fp8_token";
constexpr char kFp8BlockGroup128[] = "float8 block=128 symmetric observer=minmax numerics=reference activations=fp8_group128";
constexpr char kFp8BlockF32[] = "float8 block=128 symmetric observer=minmax numerics=reference scale=f32";
constexpr char kMxfp8[] = "float8 group=32 symmetric observer=minmax numerics=reference scale=e8m0";
constexpr char kImportance[] = "int4 group=32 asymmetric observer=importance numerics=reference";
constexpr char kChannelMse[] = "int8 channel symmetric observer=mse numerics=reference";
constexpr char kPlainBf16[] = "plain16 tensor symmetric observer=minmax numerics=reference scale=bf16";
constexpr char kPlainF16[] = "plain16 tensor symmetric observer=minmax numerics=reference";
constexpr char kPlainF32[] = "plain32 tensor symmetric observer=minmax numerics=reference";

std::string ModelOpt(const std::string& scheme) { return quant::ToModelOpt(quant::SchemeSpec::Parse(scheme).value()).value().ToString(); }

uint64_t Bytes(const TestSource& source) { return source.values.size(); }

class StatisticsSetsTest : public RunTaskTest {
 protected:
  // Weights of a set under one key, and weights between them, in this order of units.
  static void QuantizeAll(ShardTask& task, const std::string& scheme,
                          const std::vector<std::pair<std::string, std::vector<TestSource>>>& sets, const std::vector<TestSource>& order) {
    for (size_t i = 0; i < order.size(); ++i) {
      for (const auto& [key, set] : sets) {
        for (const TestSource& member : set) {
          if (member.view.tensor() != order[i].view.tensor()) continue;
          ShardTask::Options options;
          options.key = key;
          options.set = set;
          task.Quantize(absl::StrCat(order[i].view.tensor(), i), scheme, order[i], options);
        }
      }
    }
  }

  TestSource Weight(ShardTask& task, const std::string& name, int64_t rows, int64_t cols, const char* dtype = "BF16") {
    task.AddBytes(2);
    return task.Dense(name, dtype, task.AddWeight(name, dtype, rows, cols), rows, cols);
  }
};

TEST_F(StatisticsSetsTest, ASetThatFitsIsReadOnce) {
  ShardTask task(dir_.path());
  const TestSource k = Weight(task, "k", 64, 512), o = Weight(task, "o", 512, 256), q = Weight(task, "q", 256, 512),
                   v = Weight(task, "v", 65, 512);
  QuantizeAll(task, kNvfp4, {{"qkv", {k, q, v}}, {"o", {o}}}, {k, o, q, v});
  task.Finish();
  for (const ReaderMode mode : kModes) {
    const quern::v1::TaskResult result = ExpectRight(task, Options(kMinimumTaskMemory, 2, mode));
    EXPECT_EQ(result.bytes_read(), Bytes(k) + Bytes(o) + Bytes(q) + Bytes(v));
    ASSERT_TRUE(RemoveFile(output_).ok());
  }
  ExpectRightAndEqual(task, Options(100 * kMiB, 3));
}

TEST_F(StatisticsSetsTest, WeightsThatDoNotFitAreReadTwiceTheOthersOnce) {
  ShardTask task(dir_.path());
  const TestSource k = Weight(task, "k", 512, 1024), q = Weight(task, "q", 4096, 1024), v = Weight(task, "v", 1024, 1024);
  QuantizeAll(task, kNvfp4, {{"qkv", {k, q, v}}}, {k, q, v});
  task.Finish();
  EXPECT_EQ(ExpectRight(task, Options()).bytes_read(), Bytes(k) + 2 * Bytes(q) + Bytes(v));
  ASSERT_TRUE(RemoveFile(output_).ok());
  ExpectRightAndEqual(task, Options());
  EXPECT_EQ(ExpectRight(task, Options(100 * kMiB, 3)).bytes_read(), Bytes(k) + Bytes(q) + Bytes(v));
}

// w2 stands between w1 and w3, which share a scale: what is held for w3 must not keep w2 from going on.
TEST_F(StatisticsSetsTest, SetsWithinSetsDoNotBlockEachOther) {
  for (const int64_t rows : {200, 700, 1300, 1900}) {
    ShardTask task(dir_.path());
    std::vector<std::pair<std::string, std::vector<TestSource>>> sets;
    std::vector<TestSource> order;
    for (int expert = 0; expert < 6; ++expert) {
      const TestSource w1 = Weight(task, absl::StrCat("w1.", expert), rows, 1024);
      const TestSource w2 = Weight(task, absl::StrCat("w2.", expert), 1024, rows / 16 * 16);
      const TestSource w3 = Weight(task, absl::StrCat("w3.", expert), rows, 1024);
      sets.push_back({absl::StrCat(expert), {w1, w3}});
      sets.push_back({absl::StrCat("down", expert), {w2}});
      order.insert(order.end(), {w1, w2, w3});
    }
    QuantizeAll(task, kNvfp4, sets, order);
    task.Finish();
    SCOPED_TRACE(rows);
    ExpectRightAndEqual(task, Options(kMinimumTaskMemory, 1));
    ExpectRightAndEqual(task, Options(kMinimumTaskMemory + 5 * kMiB, 4, ReaderMode::kBuffered));
  }
}

TEST_F(StatisticsSetsTest, MembersOfEveryKindAndMembersThatAreNotEncoded) {
  ShardTask task(dir_.path());
  const uint64_t stack = task.AddWeight("stack", "BF16", 256, 2 * 70);
  const TestSource gate = task.Strided("gate", "BF16", stack, 70, 256, 2, 280);
  const TestSource up = task.Strided("up", "BF16", stack + 140, 70, 256, 2, 280);
  const TestSource encoded = task.Encoded("encoded", "BF16", kFp8BlockF32, 200, 256, 0, true);
  const TestSource elsewhere = Weight(task, "elsewhere", 33, 256);
  const TestSource scaled = task.Encoded("scaled", "BF16", kNvfp4, 50, 256, 3, true);
  QuantizeAll(task, kNvfp4, {{"all", {gate, up, encoded, elsewhere, scaled}}}, {gate, up, encoded, scaled});
  task.Finish();
  ExpectRightAndEqual(task, Options());
  ExpectRightAndEqual(task, Options(100 * kMiB, 3));
}

TEST_F(StatisticsSetsTest, SetsWithoutAKeyAndWeightsAlone) {
  ShardTask task(dir_.path());
  const TestSource a = Weight(task, "a", 100, 256), b = Weight(task, "b", 64, 256), big = Weight(task, "big", 4200, 1024);
  task.Quantize("a", kNvfp4, a, {.set = {a, b}});
  task.Quantize("b", kNvfp4, b, {.set = {b, a}});
  task.Quantize("tensor", kFp8Tensor, a, {});
  task.Quantize("large", kFp8Tensor, big, {});
  task.Finish();
  const quern::v1::TaskResult result = ExpectRight(task, Options());
  EXPECT_EQ(result.bytes_read(), Bytes(a) + Bytes(b) + Bytes(a) + Bytes(b) + Bytes(a) + 2 * Bytes(big));
  ASSERT_TRUE(RemoveFile(output_).ok());
  ExpectRightAndEqual(task, Options());
}

TEST_F(StatisticsSetsTest, ScalesOfActivations) {
  ShardTask task(dir_.path());
  const TestSource a = Weight(task, "a", 100, 256), b = Weight(task, "b", 64, 256, "F16");
  task.Quantize("a", kNvfp4Static, a, {.set = {a}, .key = "a", .activation_amax = 3.5f});
  task.Quantize("b", kFp8Static, b, {.activation_amax = 17.0f});
  task.Quantize("c", ModelOpt(kNvfp4Static), a, {.set = {a}, .key = "c", .activation_amax = 3.5f});
  task.Quantize("d", ModelOpt(kFp8Static), a, {.activation_amax = 0.5f});
  task.Finish();
  ExpectRightAndEqual(task, Options());
  // Who compares without the figures still compares the rest.
  ExpectRight(task, Options());
  quern::v1::TaskSpec compare = task.CompareSpec(output_);
  for (quern::v1::CompareUnit& unit : *compare.mutable_compare_shard()->mutable_units()) unit.mutable_quantize()->clear_activation_amax();
  TaskControl control;
  QUERN_ASSERT_OK_AND_ASSIGN(const quern::v1::TaskResult compared, RunTask(compare, ReadOptions(), &control));
  EXPECT_EQ(compared.mismatches_size(), 0);

  task.spec().mutable_write_shard()->mutable_units(1)->mutable_quantize()->clear_activation_amax();
  ASSERT_TRUE(RemoveFile(output_).ok());
  EXPECT_THAT(Fails(task, Options()), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("largest magnitude of its activations")));
}

TEST_F(StatisticsSetsTest, CompareFindsAChangedGlobalScale) {
  ShardTask task(dir_.path());
  const TestSource a = Weight(task, "a", 100, 256), b = Weight(task, "b", 64, 256);
  QuantizeAll(task, kNvfp4, {{"ab", {a, b}}}, {a, b});
  task.Finish();
  ExpectRight(task, Options());
  std::string changed = task.expected();
  const quern::v1::OutputTensor& scale = task.spec().write_shard().units(1).quantize().outputs(2);
  EXPECT_THAT(scale.name(), HasSubstr("weight_global_scale"));
  changed[scale.offset() + 2] = static_cast<char>(changed[scale.offset() + 2] ^ 1);
  ASSERT_TRUE(WriteFileDurably(output_, changed).ok());
  TaskControl control;
  QUERN_ASSERT_OK_AND_ASSIGN(const quern::v1::TaskResult compared, RunTask(task.CompareSpec(output_), ReadOptions(), &control));
  ASSERT_EQ(compared.mismatches_size(), 2);
  EXPECT_EQ(compared.mismatches(0).offset(), scale.offset());
  EXPECT_THAT(compared.mismatches(0).what(), HasSubstr("not what the source gives"));
  EXPECT_EQ(compared.mismatches(1).tensor(), "b1");
}

// Each way of keeping side tensors, bands and segments, where blocks span 128 rows.
TEST_F(StatisticsSetsTest, BlocksThatSpanRows) {
  ShardTask task(dir_.path());
  const TestSource odd = Weight(task, "odd", 131, 300), few = Weight(task, "few", 1, 256), tall = Weight(task, "tall", 5000, 512),
                   wide = Weight(task, "wide", 300, 12 * 1024), wider = Weight(task, "wider", 140, 40 * 1024, "F32"),
                   from = task.Encoded("from", "BF16", kFp8BlockF32, 300, 9000, 0, true);
  for (const TestSource& weight : {odd, few, tall, wide, wider, from}) {
    task.Quantize(weight.view.tensor(), kFp8BlockGroup128, weight, {});
  }
  task.Quantize("channel", kFp8ChannelToken, wider, {});
  task.Quantize("again", kGroup32, task.Encoded("again", "BF16", kFp8BlockF32, 300, 9024, 9, true), {});
  task.Finish();
  ExpectRightAndEqual(task, Options());
  ExpectRightAndEqual(task, Options(90 * kMiB, 3));
}

TEST_F(StatisticsSetsTest, EveryFloatSchemeOnRandomViews) {
  const char* const given = std::getenv("QUERN_TEST_SEED");
  const unsigned seed = given != nullptr ? static_cast<unsigned>(std::atoi(given)) : 11;
  std::mt19937 random(seed);
  const auto pick = [&](int64_t low, int64_t high) { return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1)); };
  const std::vector<std::string> schemes = {kNvfp4, kFp8Tensor, kFp8ChannelToken, kFp8BlockGroup128,         kMxfp4,
                                            kMxfp8, kGroup32,   ModelOpt(kNvfp4), ModelOpt(kFp8ChannelToken)};
  const std::vector<std::string> stored = {kFp8BlockF32, kNvfp4, kMxfp4, kFp8Tensor, kFp8ChannelToken};
  const char* const dtypes[] = {"BF16", "F16", "F32"};
  for (int round = 0; round < 14; ++round) {
    ShardTask task(dir_.path());
    std::vector<TestSource> weights;
    const int64_t cols = 32 * pick(1, round < 8 ? 16 : 90);
    for (int i = 0; i < 6; ++i) {
      const char* const dtype = dtypes[pick(0, 2)];
      const int64_t element = dtype == std::string("F32") ? 4 : 2;
      const int64_t rows = pick(1, round < 8 ? 300 : 1500);
      const std::string name = absl::StrCat("w", i);
      task.AddBytes(static_cast<uint64_t>(pick(0, 3)));
      switch (pick(0, 2)) {
        case 0:
          weights.push_back(task.Dense(name, dtype, task.AddWeight("w", dtype, rows, cols), rows, cols));
          break;
        case 1: {
          const uint64_t at = task.AddWeight("w", dtype, cols, rows + 5);
          weights.push_back(task.Strided(name, dtype, at, rows, cols, element, (rows + 5) * element));
          break;
        }
        default:
          weights.push_back(task.Encoded(name, "BF16", stored[static_cast<size_t>(pick(0, 4))], rows, cols, 0, pick(0, 1) == 1));
      }
    }
    const std::string& scheme = schemes[static_cast<size_t>(round) % schemes.size()];
    const bool shares = quant::Scheme::For(quant::SchemeSpec::Parse(scheme).value()).value()->SharesSetScale();
    for (int i = 0; i < 6; ++i) {
      ShardTask::Options options;
      if (shares) {
        options.key = i % 2 == 0 ? "even" : "odd";
        for (int member = i % 2; member < 6; member += 2) options.set.push_back(weights[static_cast<size_t>(member)]);
      }
      task.Quantize(absl::StrCat("module", i), scheme, weights[static_cast<size_t>(i)], options);
      if (i == 3) task.Quantize("other", schemes[static_cast<size_t>(pick(3, 6))], weights[0], {});
    }
    task.Finish();
    const uint64_t memory = kMinimumTaskMemory + random() % (round % 2 == 0 ? 1 : 64 * kMiB);
    SCOPED_TRACE(absl::StrCat("seed ", seed, " round ", round, " memory ", memory, " scheme ", scheme));
    ExpectRightAndEqual(task, Options(memory, 1 + round % 3, kModes[round % 4]));
    if (HasFailure()) return;
  }
}

TEST_F(StatisticsSetsTest, QuantizedWeightsBecomePlainOnes) {
  ShardTask task(dir_.path());
  int next = 0;
  for (const std::string& stored : std::vector<std::string>{kNvfp4, kFp8Tensor, kFp8ChannelToken, kFp8BlockGroup128, kFp8BlockF32, kMxfp4,
                                                            kMxfp8, kGroup32, ModelOpt(kNvfp4), ModelOpt(kFp8ChannelToken)}) {
    for (const char* const plain : {kPlainBf16, kPlainF16, kPlainF32}) {
      const bool large = next % 7 == 0;
      const TestSource source =
          task.Encoded(absl::StrCat("stored", next), "BF16", stored, large ? 1500 : 131, large ? 2048 : 320, 0, next % 2 == 1);
      task.Quantize(absl::StrCat("module", next), plain, source, {});
      ++next;
    }
  }
  const TestSource same = Weight(task, "same", 3000, 1000);
  task.Quantize("same", kPlainBf16, same, {});
  task.Finish();
  ExpectRightAndEqual(task, Options());
  ExpectRightAndEqual(task, Options(64 * kMiB, 3));
}

TEST_F(StatisticsSetsTest, SearchesOverWholeRowsSayHowMuchMemoryTheyTake) {
  ShardTask task(dir_.path());
  const TestSource wide = Weight(task, "wide", 3, 2 * 1024 * 1024);
  task.Quantize("wide", kChannelMse, wide, {});
  task.Finish();
  const quern::v1::Failure failure = FailureOf(Fails(task, Options()));
  EXPECT_EQ(failure.reason(), quern::v1::MEMORY_TOO_SMALL);
  EXPECT_THAT(failure.message(), AllOf(HasSubstr("wide"), HasSubstr("needs whole"), HasSubstr("--memory")));
  EXPECT_LT(failure.bytes_needed(), 100 * kMiB);
  ExpectRightAndEqual(task, Options(failure.bytes_needed()));
}

TEST_F(StatisticsSetsTest, RowsThatDoNotFitTogetherAreSearchedOneByOne) {
  ShardTask task(dir_.path());
  const TestSource wide = Weight(task, "wide", 67, 64 * 1024);
  int next = 0;
  for (const char* const scheme : {kChannelMse, "int3 channel asymmetric observer=mse numerics=reference",
                                   "float8 channel symmetric observer=mse numerics=reference"}) {
    task.Quantize(absl::StrCat("module", next++), scheme, wide, {});
  }
  task.Finish();
  ExpectRightAndEqual(task, Options());
  ExpectRightAndEqual(task, Options(80 * kMiB, 3));
}

TEST_F(StatisticsSetsTest, ImportanceDecidesScales) {
  ShardTask task(dir_.path());
  const TestSource a = Weight(task, "a", 100, 1024), b = Weight(task, "b", 3000, 2048, "F32");
  std::mt19937 random(5);
  const auto importance = [&](size_t cols) {
    std::vector<float> values(cols);
    for (float& value : values) value = static_cast<float>(random() % 1000) / 100;
    return values;
  };
  task.Quantize("a", kImportance, a, {.importance = importance(1024)});
  task.Quantize("b", kImportance, b, {.importance = importance(2048)});
  task.Quantize("c", kImportance, a, {.importance = importance(1024)});
  task.Finish();
  for (const ReaderMode mode : kModes) ExpectRightAndEqual(task, Options(kMinimumTaskMemory, 2, mode));
  task.spec().mutable_write_shard()->mutable_units(2)->mutable_quantize()->clear_inputs();
  EXPECT_THAT(Fails(task, Options()), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("importance of its columns")));
}

TEST_F(StatisticsSetsTest, ImportanceIsReadWhole) {
  ShardTask task(dir_.path());
  const TestSource a = Weight(task, "a", 100, 1024);
  ShardTask::Options options;
  options.importance.assign(1024, 0.25f);
  task.Quantize("a", kGroup32, a, options);
  task.Quantize("b", kNvfp4, a, {.set = {a}, .key = "b", .importance = options.importance});
  task.Finish();
  EXPECT_EQ(ExpectRight(task, Options()).bytes_read(), 2 * (Bytes(a) + 4096));
}

TEST_F(StatisticsSetsTest, PlansThatContradictThemselvesAreRefused) {
  const auto expect_refused = [&](const char* what, const std::function<void(quern::v1::QuantizeUnit&, quern::v1::QuantizeUnit&)>& change) {
    ShardTask task(dir_.path());
    const TestSource a = Weight(task, "a", 64, 256), b = Weight(task, "b", 64, 256);
    ShardTask::Options options{.set = {a, b}, .key = "ab"};
    options.importance.assign(256, 1.0f);
    task.Quantize("a", kNvfp4, a, options);
    task.Quantize("b", kNvfp4, b, options);
    task.Finish();
    change(*task.spec().mutable_write_shard()->mutable_units(0)->mutable_quantize(),
           *task.spec().mutable_write_shard()->mutable_units(1)->mutable_quantize());
    EXPECT_THAT(Fails(task, Options()), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(what)));
    EXPECT_FALSE(FileExists(output_));
  };
  using Unit = quern::v1::QuantizeUnit;
  expect_refused("not in the set",
                 [](Unit& a, Unit&) { a.mutable_statistics_set()->RemoveLast(), a.mutable_statistics_set(0)->set_rows(5); });
  expect_refused("other weights", [](Unit&, Unit& b) { b.mutable_statistics_set(0)->set_rows(5); });
  expect_refused("leads out of", [](Unit& a, Unit& b) {
    for (Unit* unit : {&a, &b}) unit->mutable_statistics_set(1)->set_offset(uint64_t{1} << 60);
  });
  expect_refused("the scheme stores 1024", [](Unit&, Unit& b) {
    b.mutable_outputs(2)->set_size(3);
    b.mutable_outputs(1)->set_size(b.outputs(1).size() + 1);
    b.mutable_outputs(2)->set_offset(b.outputs(2).offset() + 1);
  });
  expect_refused("F32 [1, 256]", [](Unit& a, Unit&) { a.mutable_inputs(0)->mutable_view()->set_cols(255); });
  expect_refused("F32 [1, 256]", [](Unit& a, Unit&) { a.mutable_inputs(0)->mutable_view()->set_dtype("I32"); });
  expect_refused("leads out of", [](Unit& a, Unit&) { a.mutable_inputs(0)->mutable_view()->set_offset(1 << 20); });
  expect_refused("is not known", [](Unit& a, Unit&) { a.mutable_inputs(0)->set_role("hessian"); });
  expect_refused("only one importance", [](Unit& a, Unit&) { *a.add_inputs() = a.inputs(0); });
  expect_refused("the importance of column", [](Unit& a, Unit&) { a.mutable_inputs(0)->mutable_view()->set_offset(0); });
  expect_refused("largest magnitude", [](Unit& a, Unit&) { a.set_activation_amax(-1); });
}

TEST_F(StatisticsSetsTest, ASchemeWithoutACommonScaleTakesNoSet) {
  ShardTask task(dir_.path());
  const TestSource a = Weight(task, "a", 64, 256), b = Weight(task, "b", 64, 256);
  task.Quantize("a", kFp8Tensor, a, {.set = {a, b}});
  task.Finish();
  EXPECT_THAT(Fails(task, Options()), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no scale in common")));
}

}  // namespace
}  // namespace quern::worker
