// Quantizes one module's weight into the output file: its inputs and the statistics of its set first where the scheme needs them, then tile
// by tile.
//
// The first region is streamed: its bytes stand in the output window from the start. Where the others (side tensors) wait for their turn
// depends on the size of the module: in the window itself, which then holds the whole module; else in the pool's held part; else in a spill
// file.
#ifndef QUERN_WORKER_PIPELINE_MODULE_WRITER_H_
#define QUERN_WORKER_PIPELINE_MODULE_WRITER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "quant/scheme.h"
#include "quern/v1/plan.pb.h"
#include "worker/io/buffer_pool.h"
#include "worker/io/spill_file.h"
#include "worker/pipeline/engine.h"
#include "worker/pipeline/module_inputs.h"
#include "worker/pipeline/module_layout.h"
#include "worker/pipeline/row_fold.h"
#include "worker/pipeline/statistics_sets.h"
#include "worker/pipeline/task_context.h"
#include "worker/pipeline/tiling.h"
#include "worker/pipeline/weight_feed.h"
#include "worker/pipeline/weight_reader.h"

namespace quern::worker {

class ModuleWriter : public std::enable_shared_from_this<ModuleWriter> {
 public:
  // `sets` is that of the task and outlives the writer; `unit`, too.
  static absl::StatusOr<std::shared_ptr<ModuleWriter>> Create(TaskContext* context, StatisticsSets* sets,
                                                              const quern::v1::QuantizeUnit& unit);

  // Starts all steps of the module. By the task's thread. The steps keep the writer alive.
  absl::Status Start();
  // Complete once all steps have ended.
  std::shared_ptr<const RowFold> fold() const { return fold_; }
  quant::Shape2D shape() const { return reader_->shape(); }

 private:
  enum class SidePlace { kWindow, kHeld, kSpill };
  struct Block;  // what segments of a block pass on
  struct Band;   // a band while it is encoded

  ModuleWriter(TaskContext* context, StatisticsSets* sets, const quern::v1::QuantizeUnit& unit)
      : context_(*context), sets_(*sets), unit_(unit) {}
  bool IsSide(size_t region) const { return region > 0 || !streams_; }
  absl::StatusOr<Tiling> ChooseTiling(WeightFeed& feed) const;
  absl::Status ChoosePlace(WeightFeed& feed);
  absl::Status StartObserving();
  absl::Status ReserveSides();
  absl::Status StartComputed();
  absl::Status StartTile(WeightFeed& feed, const TileRange& range, const std::shared_ptr<Strand>& strand,
                         const std::shared_ptr<Block>& block);
  absl::Status FlushSides();

  void EncodeBand(const TileRange& range, const std::shared_ptr<const SourceTile>& tile, std::byte* scratch, Step::Done done);
  void EncodeSegment(const TileRange& range, const SourceTile& tile, std::byte* scratch, const std::shared_ptr<Block>& block,
                     Step::Done done);
  const quant::Statistics* statistics() const { return pass_.statistics == nullptr ? nullptr : pass_.statistics->Get(); }
  // Where the tile's part of each region goes. `scratch` holds the spilled parts of `whole`, of which `range` is some rows.
  std::vector<quant::RegionBuffer> Buffers(const TileRange& range, const TileRange& whole, std::byte* scratch) const;
  uint64_t ScratchBytes(const TileRange& range) const;
  absl::Status LoadScratch(const TileRange& range, std::byte* scratch) const;
  absl::Status StoreScratch(const TileRange& range, std::byte* scratch) const;
  // Bytes of the output that are final once rows [begin, end) are encoded.
  void CompleteRows(int64_t begin, int64_t end);
  absl::Status Explain(const absl::Status& status) const;

  TaskContext& context_;
  StatisticsSets& sets_;
  const quern::v1::QuantizeUnit& unit_;
  std::shared_ptr<WeightReader> reader_;
  absl::StatusOr<ModuleLayout> layout_ = absl::InternalError("not made");
  std::shared_ptr<const LoadedInputs> inputs_;
  StatisticsSets::Pass pass_;                  // without statistics where none are needed
  std::vector<std::shared_ptr<Gate>> awaits_;  // of every step that encodes: inputs and statistics
  Tiling tiling_;
  int64_t part_rows_ = 0;  // of a band, that are encoded at once
  bool streams_ = true;
  SidePlace place_ = SidePlace::kWindow;
  std::vector<uint64_t> side_offsets_;  // of each region in the held buffer or the spill file
  uint64_t side_size_ = 0;
  PoolBuffer held_;
  std::unique_ptr<SpillFile> spill_;
  std::shared_ptr<Gate> encoded_ = std::make_shared<Gate>();
  std::shared_ptr<RowFold> fold_ = std::make_shared<RowFold>();
  std::vector<std::string> computed_;  // by region; written by the step that computes them
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_PIPELINE_MODULE_WRITER_H_
