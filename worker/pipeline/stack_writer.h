// Writes weights as plain values into a stack in which they lie turned over: strips of the stack are put together in memory, tile by tile,
// and then go into the file in order.
//
// A strip is all that the slab has, where that fits the pool's part for slabs; the weights are read once then. Else it is some columns of
// each weight: the figures of rows need whole rows, so that the weights are read once more before the first strip, and what lies between a
// strip's columns in the source may be read with each.
#ifndef QUERN_WORKER_PIPELINE_STACK_WRITER_H_
#define QUERN_WORKER_PIPELINE_STACK_WRITER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/v1/plan.pb.h"
#include "worker/pipeline/module_layout.h"
#include "worker/pipeline/row_fold.h"
#include "worker/pipeline/stack_slabs.h"
#include "worker/pipeline/task_context.h"
#include "worker/pipeline/tiling.h"
#include "worker/pipeline/weight_feed.h"
#include "worker/pipeline/weight_reader.h"

namespace quern::worker {

class StackWriter : public std::enable_shared_from_this<StackWriter> {
 public:
  // `units` are those of the stack, which outlive the writer; the slab is turned over. INVALID_ARGUMENT for a weight that must be gathered
  // from its source itself.
  static absl::StatusOr<std::shared_ptr<StackWriter>> Create(TaskContext* context, absl::Span<const quern::v1::QuantizeUnit* const> units,
                                                             const StackSlab& slab);

  // Starts all steps of the slab. By the task's thread. The steps keep the writer alive.
  absl::Status Start();

  // Of each unit of the slab. Folds are complete once all steps have ended.
  std::shared_ptr<const RowFold> fold(size_t part) const { return parts_[part].fold; }
  quant::Shape2D shape(size_t part) const { return parts_[part].reader->shape(); }

 private:
  struct Part {
    std::shared_ptr<WeightReader> reader;
    ModuleLayout layout;
    std::shared_ptr<RowFold> fold;
    uint64_t offset = 0;  // in the slab
    int64_t row_stride = 0;
    int64_t row_multiple = 1;
    int64_t column_multiple = 1;
  };
  struct Strip;  // of the slab, in memory
  struct Row;    // what segments of a row pass on

  StackWriter(TaskContext* context, const StackSlab& slab) : context_(*context), slab_(slab) {}
  uint64_t TileBytes(const Part& part, int64_t rows, int64_t cols) const;
  absl::StatusOr<int64_t> ChooseColumns() const;
  absl::Status StartFigures(const Part& part);
  absl::Status StartStrip(int64_t col_begin, int64_t col_end, bool with_figures);
  absl::Status StartTile(WeightFeed& feed, const Part& part, const TileRange& range, const std::shared_ptr<Strip>& strip, bool with_figures,
                         const std::shared_ptr<Strand>& strand, const std::shared_ptr<Row>& row);
  // Encodes the tile's rows into `scratch`; adds their figures and puts them into the strip where there is one.
  absl::Status Encode(const Part& part, const TileRange& range, const SourceTile& tile, std::byte* scratch, Strip* strip, bool with_figures,
                      Row* row) const;

  TaskContext& context_;
  const StackSlab slab_;
  int64_t cols_ = 0;  // of each weight
  int64_t element_ = 0;
  std::vector<Part> parts_;
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_PIPELINE_STACK_WRITER_H_
