// Consecutive rows of a weight in memory, whole and dense, as the encoder takes them: for weights that must be gathered, and for those that
// are looked at twice and read once.
#ifndef QUERN_WORKER_PIPELINE_WEIGHT_SLAB_H_
#define QUERN_WORKER_PIPELINE_WEIGHT_SLAB_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quant/scheme.h"
#include "worker/io/buffer_pool.h"
#include "worker/pipeline/engine.h"
#include "worker/pipeline/task_context.h"
#include "worker/pipeline/weight_reader.h"

namespace quern::worker {

class WeightSlab {
 public:
  // Memory that so many rows take.
  static uint64_t BytesFor(const WeightReader& reader, int64_t rows);

  // Starts the steps that fill rows [begin, end) into `memory`, which has BytesFor(their number) bytes; all rows, unless the weight is
  // gathered. By the task's thread. The steps keep the slab alive; they take input buffers.
  static absl::StatusOr<std::shared_ptr<WeightSlab>> Start(TaskContext& context, std::shared_ptr<WeightReader> reader, int64_t begin,
                                                           int64_t end, PoolBuffer memory);

  // Open once the rows are there.
  const std::shared_ptr<Gate>& loaded() const { return loaded_; }
  int64_t row_begin() const { return row_begin_; }
  int64_t row_end() const { return row_end_; }
  // Rows [begin, end) of the weight, all its columns.
  quant::Tile Rows(int64_t begin, int64_t end) const;

 private:
  WeightSlab() = default;
  std::byte* At(int64_t row, int64_t col) const;
  static absl::Status StartReads(TaskContext& context, const std::shared_ptr<WeightSlab>& slab);
  static absl::Status StartTiles(TaskContext& context, const std::shared_ptr<WeightSlab>& slab);
  static absl::Status StartGathering(TaskContext& context, const std::shared_ptr<WeightSlab>& slab);

  std::shared_ptr<WeightReader> reader_;
  int64_t row_begin_ = 0;
  int64_t row_end_ = 0;
  PoolBuffer memory_;
  std::byte* data_ = nullptr;  // element [row_begin, 0]
  int64_t row_stride_ = 0;
  std::shared_ptr<Gate> loaded_ = std::make_shared<Gate>();
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_PIPELINE_WEIGHT_SLAB_H_
