// Gathers the tensors and units of one output shard and gives them their offsets.
#ifndef QUERN_DAEMON_PLANNER_SHARD_WRITER_H_
#define QUERN_DAEMON_PLANNER_SHARD_WRITER_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "base/dtype.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/safetensors.h"
#include "daemon/planner/source_modules.h"
#include "quern/v1/plan.pb.h"

namespace quern::daemon {

// A tensor of an output before it has an offset.
struct NewTensor {
  std::string name;
  DType dtype;
  std::vector<uint64_t> shape;
  uint64_t bytes = 0;
};

// Bytes of a tensor; the caller knows that they fit 64 bits.
uint64_t TensorBytes(DType dtype, const std::vector<uint64_t>& shape);

// Fills TaskSpec::source_files with the files that views name, each once, and numbers them.
class TaskSources {
 public:
  // `files` of the summary stand in the order of the checkpoint's shards. All outlive this.
  TaskSources(const checkpoint::Checkpoint& checkpoint, const quern::v1::PlanSummary& files, quern::v1::TaskSpec& task)
      : checkpoint_(checkpoint), files_(files), task_(task) {}

  quern::v1::TensorView Weight(const SourceWeight& weight);
  // The tensor's bytes as one row of U8.
  quern::v1::TensorView Bytes(const checkpoint::TensorLocation& location);

 private:
  quern::v1::TensorView Start(const checkpoint::TensorLocation& location);

  const checkpoint::Checkpoint& checkpoint_;
  const quern::v1::PlanSummary& files_;
  quern::v1::TaskSpec& task_;
  absl::flat_hash_map<uint32_t, uint32_t> numbers_;
};

class ShardWriter {
 public:
  explicit ShardWriter(quern::v1::TaskSpec& task) : task_(task) {}

  // Places the next tensor; Finish corrects the offset, which counts from the start of the data until then. The pointer must stay valid
  // until Finish.
  void Place(NewTensor tensor, quern::v1::OutputTensor* output);
  // Names the tensor that was placed last once more, for another unit that fills a part of it.
  void PlaceAgain(quern::v1::OutputTensor* output);
  quern::v1::ShardUnit* AddUnit() { return task_.mutable_write_shard()->add_units(); }
  // Writes header and sizes into the task; returns the number of tensors.
  uint64_t Finish();

 private:
  quern::v1::TaskSpec& task_;
  std::vector<checkpoint::TensorInfo> tensors_;
  std::vector<quern::v1::OutputTensor*> outputs_;
  uint64_t end_ = 0;
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_PLANNER_SHARD_WRITER_H_
