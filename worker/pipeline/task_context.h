// What all kinds of tasks share: the pool, the source files with their evidence, reader, engine and output, in the order in which they end.
#ifndef QUERN_WORKER_PIPELINE_TASK_CONTEXT_H_
#define QUERN_WORKER_PIPELINE_TASK_CONTEXT_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file_roots.h"
#include "quern/v1/plan.pb.h"
#include "worker/io/buffer_pool.h"
#include "worker/io/output_file.h"
#include "worker/io/source_reader.h"
#include "worker/io/spill_file.h"
#include "worker/io/uring.h"
#include "worker/pipeline/engine.h"
#include "worker/pipeline/run_task.h"

namespace quern::worker {

class TaskContext {
 public:
  // Checks the memory, opens the source files and compares each with its evidence (SOURCE_CHANGED).
  static absl::StatusOr<std::unique_ptr<TaskContext>> Create(const quern::v1::TaskSpec& spec, const TaskOptions& options,
                                                             TaskControl* control);
  ~TaskContext();

  // Creates the output file of so many bytes; DISK_FULL says how many are needed.
  absl::Status CreateOutput(uint64_t size);
  // Reserves the next bytes of the output, which are at most OutputFile::MaxReserve(). Blocks.
  absl::Status Reserve(uint64_t size);
  // One more file, which no evidence describes: a shard of an output. `path` is the plan's.
  absl::StatusOr<SourceHandle> Open(const std::string& path) const;
  // A file without a name, beside the output or in the spool directory.
  absl::StatusOr<std::unique_ptr<SpillFile>> CreateSpill(uint64_t size) const;
  // Whether the sources still are what they were when the task began.
  absl::Status CheckSourcesAgain() const;
  // Reader, kernel target, times, counters and peak RSS.
  void FillResult(quern::v1::TaskResult* result) const;

  const std::vector<SourceHandle>& sources() const { return sources_; }
  Engine& engine() { return *engine_; }
  OutputFile& output() { return *output_; }
  BufferRing& held() { return *held_; }
  BufferRing& slabs() { return *slabs_; }
  BufferRing& sets() { return *sets_; }
  const PoolLayout& layout() const { return pool_->layout(); }
  const TaskOptions& options() const { return options_; }

  // Bytes that one tile takes of the pool: what is aimed at, and what is never exceeded.
  uint64_t preferred_tile() const;
  uint64_t largest_tile() const;

 private:
  TaskContext(const quern::v1::TaskSpec& spec, const TaskOptions& options, TaskControl* control)
      : spec_(spec), options_(options), control_(control) {}
  // What tells one state of a file on this machine from another.
  struct Identity {
    uint64_t size = 0;
    int64_t mtime_ns = 0;
    uint64_t inode = 0;
    bool operator==(const Identity& other) const = default;
  };
  absl::Status Start();
  absl::StatusOr<SourceHandle> OpenHere(const std::string& path) const;
  // Opens the file and compares it with its evidence.
  absl::Status AddSource(const quern::v1::SourceFile& file);
  static absl::StatusOr<Identity> IdentityOf(const SourceHandle& handle);

  const quern::v1::TaskSpec& spec_;
  const TaskOptions options_;
  TaskControl* const control_;
  absl::Duration began_;
  std::unique_ptr<Uring> uring_;
  std::unique_ptr<BufferPool> pool_;
  std::unique_ptr<BufferRing> input_;
  std::unique_ptr<BufferRing> held_;
  std::unique_ptr<BufferRing> slabs_;
  std::unique_ptr<BufferRing> sets_;
  std::vector<SourceHandle> sources_;
  std::vector<Identity> identities_;  // of the sources when they were opened; of fetched ones nothing
  std::unique_ptr<SourceReader> reader_;
  std::unique_ptr<Engine> engine_;
  std::optional<LinklessTree> output_tree_;
  std::unique_ptr<OutputFile> output_;
};

// The three kinds of work. They fill `result` but for FillResult.
absl::Status RunWriteShard(TaskContext& context, const quern::v1::WriteShard& work, quern::v1::TaskResult* result);
absl::Status RunVerifyFile(TaskContext& context, const quern::v1::VerifyFile& work, quern::v1::TaskResult* result);
absl::Status RunCompareShard(TaskContext& context, const quern::v1::CompareShard& work, quern::v1::TaskResult* result);

}  // namespace quern::worker

#endif  // QUERN_WORKER_PIPELINE_TASK_CONTEXT_H_
