// Support of the pipeline's tests: a task that writes a shard, and what that shard must be, made tensor by tensor in memory.
#ifndef QUERN_WORKER_PIPELINE_TEST_SHARD_TASK_H_
#define QUERN_WORKER_PIPELINE_TEST_SHARD_TASK_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/status_matchers.h"
#include "base/task_memory.h"
#include "quern/v1/plan.pb.h"
#include "worker/pipeline/run_task.h"

namespace quern::worker {

// Schemes that several tests use.
inline constexpr char kGroup32[] = "int4 group=32 asymmetric observer=minmax numerics=reference";
inline constexpr char kSmallGroups[] = "int5 group=8 asymmetric observer=minmax numerics=reference";
inline constexpr char kThreeBits[] = "int3 group=32 asymmetric observer=minmax numerics=precise";
inline constexpr char kChannel[] = "int8 channel symmetric observer=minmax numerics=reference";
inline constexpr char kNvfp4[] = "float4 tensor_group=16 symmetric observer=minmax numerics=reference scale=e4m3";
inline constexpr char kMxfp4[] = "float4 group=32 symmetric observer=minmax numerics=reference scale=e8m0";

constexpr ReaderMode kModes[] = {ReaderMode::kAuto, ReaderMode::kDirect, ReaderMode::kBuffered, ReaderMode::kMmap};

// A weight as the plan names it, and its values: dense rows.
struct TestSource {
  quern::v1::TensorView view;
  std::string values;
};

class ShardTask {
 public:
  explicit ShardTask(const std::string& directory);

  // The bytes of the source file, and of a second one.
  std::string& source() { return files_[0]; }
  std::string& other() { return files_[1]; }
  void AddBytes(uint64_t size) { source().append(size, 'x'); }
  // A weight of "realistic" values. Returns its offset in the source.
  uint64_t AddWeight(const std::string& name, const std::string& dtype, int64_t rows, int64_t cols);

  // Views of what the source holds: rows `row_stride` bytes apart (0: dense); elements of a row `col_stride` bytes apart.
  TestSource Dense(const std::string& name, const std::string& dtype, uint64_t offset, int64_t rows, int64_t cols,
                   int64_t row_stride = 0) const;
  TestSource Strided(const std::string& name, const std::string& dtype, uint64_t offset, int64_t rows, int64_t cols, int64_t row_stride,
                     int64_t col_stride) const;
  // Values of a dtype encoded by a scheme and added to the source: region rows `gap` bytes apart, computed and every second region in the
  // other file with `spread`.
  TestSource Encoded(const std::string& name, const std::string& dtype, const std::string& scheme, int64_t rows, int64_t cols,
                     uint64_t gap = 0, bool spread = false);

  // Units, in the order of the shard.
  void Copy(const std::string& name, uint64_t offset, uint64_t size);
  void Generate(const std::string& name, const std::string& dtype, uint64_t rows, uint64_t cols);
  void Quantize(const std::string& module, const std::string& scheme, const std::string& dtype, uint64_t offset, int64_t rows, int64_t cols,
                int64_t row_stride = 0, const std::string& nonfinite = "fail");
  struct Options {
    std::vector<TestSource> set = {};  // all weights that share the scale
    std::string key = {};
    std::string nonfinite = "fail";
    std::optional<float> activation_amax = {};
    std::vector<float> importance = {};
  };
  quern::v1::QuantizeUnit* Quantize(const std::string& module, const std::string& scheme, const TestSource& weight, const Options& options);

  // Weights as plain values in one tensor: expert after expert, `parts` of each together. `transposed`: [experts, cols, parts * rows],
  // where the rows of parts alternate if they are `interleaved`; else [experts, parts * rows, cols].
  void Stack(const std::string& name, const std::string& scheme, const std::vector<TestSource>& weights, size_t parts, bool transposed,
             bool interleaved);

  // Writes the source files; the spec then carries their evidence.
  void Finish();

  quern::v1::TaskSpec& spec() { return spec_; }
  const std::string& expected() const { return expected_; }
  const std::vector<quern::v1::ModuleError>& errors() const { return errors_; }
  const std::vector<quern::v1::ViewDigest>& digests() const { return digests_; }
  bool valid() const { return valid_; }
  // The task that checks the shard at `path` against the source.
  quern::v1::TaskSpec CompareSpec(const std::string& path) const;

 private:
  void AddOutput(quern::v1::OutputTensor* output, const std::string& name, const std::string& dtype, const std::vector<uint64_t>& shape,
                 uint64_t size);
  void AddDigest(const std::string& tensor, const std::vector<uint64_t>& rows);

  const std::string directory_;
  std::string files_[2];
  std::string expected_;
  uint64_t next_ = 4096;
  bool valid_ = true;
  quern::v1::TaskSpec spec_;
  std::vector<quern::v1::ModuleError> errors_;
  std::vector<quern::v1::ViewDigest> digests_;
};

class RunTaskTest : public testing::Test {
 protected:
  TaskOptions Options(uint64_t memory = kMinimumTaskMemory, int threads = 2, ReaderMode reader = ReaderMode::kAuto) const;
  TaskOptions ReadOptions(ReaderMode reader = ReaderMode::kAuto, uint64_t memory = kMinimumTaskMemory) const;

  // Runs the task and compares all that it gives. Returns its result.
  quern::v1::TaskResult ExpectRight(ShardTask& task, const TaskOptions& options);
  // Then compares the shard with its source, and removes it.
  void ExpectRightAndEqual(ShardTask& task, const TaskOptions& options);
  absl::Status Fails(const ShardTask& task, const TaskOptions& options);

  const TempDir dir_ = TempDir::Make("run_task").value();
  const std::string output_ = JoinPath(dir_.path(), "shard");
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_PIPELINE_TEST_SHARD_TASK_H_
