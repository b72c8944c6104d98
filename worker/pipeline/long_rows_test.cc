// Every kind of scheme on rows that are longer than all buffers together.
#include <string>
#include <vector>

#include "base/byte_size.h"
#include "quant/scheme.h"
#include "worker/pipeline/test_shard_task.h"

namespace quern::worker {
namespace {

// One preset for each kind of tensors and scales.
constexpr const char* kPresets[] = {"W4A16",     "W3A16_ASYM", "W8A8",     "FP8A16",  "FP8_DYNAMIC",
                                    "FP8_BLOCK", "NVFP4A16",   "MXFP4A16", "MXFP8A16"};

std::vector<std::string> Schemes() {
  std::vector<std::string> schemes;
  for (const char* const name : kPresets) {
    const quant::SchemeSpec spec = quant::PresetScheme(name).value();
    schemes.push_back(spec.ToString());
    if (const absl::StatusOr<quant::SchemeSpec> other = quant::ToModelOpt(spec); other.ok()) schemes.push_back(other->ToString());
  }
  for (const char* const text :
       {"int4 tensor asymmetric observer=minmax numerics=reference", "int8 channel asymmetric observer=minmax numerics=reference",
        "float8 tensor symmetric observer=minmax numerics=reference",
        "float8 tensor symmetric observer=minmax numerics=reference scale=f32 convention=modelopt",
        "plain32 tensor symmetric observer=minmax numerics=reference"}) {
    schemes.emplace_back(text);
  }
  return schemes;
}

TEST_F(RunTaskTest, RowsLongerThanTheMemory) {
  constexpr int64_t kColumns = 9 * 1024 * 1024;
  static_assert(kColumns * 2 > static_cast<int64_t>(kMinimumTaskMemory));
  ShardTask task(dir_.path());
  const TestSource weight = task.Dense("wide", "BF16", task.AddWeight("wide", "BF16", 2, kColumns), 2, kColumns);
  for (const std::string& scheme : Schemes()) {
    ShardTask::Options options;
    if (quant::Scheme::For(quant::SchemeSpec::Parse(scheme).value()).value()->SharesSetScale()) {
      options.key = scheme;
      options.set = {weight};
    }
    task.Quantize(scheme, scheme, weight, options);
  }
  task.Finish();
  ASSERT_TRUE(task.valid());
  ExpectRightAndEqual(task, Options());
}

TEST_F(RunTaskTest, SearchesOverRowsLongerThanTheTilesOfOtherTasks) {
  struct Case {
    const char* dtype;
    int64_t rows, cols, together;
    std::vector<const char*> schemes;
  };
  const Case cases[] = {
      {"F32",
       2,
       4'400'000,
       1,
       {"int4 channel asymmetric observer=mse numerics=reference", "float8 channel symmetric observer=mse numerics=reference"}},
      {"BF16", 131, 66048, 128, {"float8 block=128 symmetric observer=mse numerics=reference"}},
      {"F32", 3, 1'500'032, 3, {"float8 block=128 symmetric observer=mse numerics=reference"}},
  };
  for (const Case& one : cases) {
    ShardTask task(dir_.path());
    const TestSource weight = task.Dense("wide", one.dtype, task.AddWeight("wide", one.dtype, one.rows, one.cols), one.rows, one.cols);
    for (const char* const scheme : one.schemes) task.Quantize(scheme, scheme, weight, {});
    task.Finish();
    ASSERT_TRUE(task.valid());
    const uint64_t least = TileMemory(TileOf(static_cast<uint64_t>(one.together * one.cols) * (one.dtype[0] == 'F' ? 4 : 2)));
    ASSERT_GT(least, 256 * kMiB);
    task.spec().set_minimum_memory(least);
    EXPECT_EQ(FailureOf(Fails(task, Options(least - 1))).reason(), quern::v1::MEMORY_TOO_SMALL);
    for (const uint64_t memory : {least, 3 * least}) ExpectRightAndEqual(task, Options(memory));
  }
}

}  // namespace
}  // namespace quern::worker
