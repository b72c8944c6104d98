// Brings the tiles of one weight to steps, whichever way they come: read as they stand, decoded, out of gathered rows or out of a weight
// that is in memory already.
#ifndef QUERN_WORKER_PIPELINE_WEIGHT_FEED_H_
#define QUERN_WORKER_PIPELINE_WEIGHT_FEED_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quant/scheme.h"
#include "worker/pipeline/engine.h"
#include "worker/pipeline/task_context.h"
#include "worker/pipeline/tiling.h"
#include "worker/pipeline/weight_reader.h"
#include "worker/pipeline/weight_slab.h"

namespace quern::worker {

// A tile in memory. Keeps what it stands in alive, but for the buffer of its step.
class SourceTile {
 public:
  // Rows [begin, end) of the tile, all its columns, decoded now if they must be; `begin` is where the tile begins or a multiple of the row
  // multiple. Thread-safe for disjoint rows.
  absl::StatusOr<quant::Tile> Rows(int64_t begin, int64_t end) const;

 private:
  friend class WeightFeed;
  TileRange range_;
  int element_size_ = 0;
  std::shared_ptr<const WeightSlab> slab_;  // else:
  std::optional<PlannedTile> planned_;
};

// By the task's thread.
class WeightFeed {
 public:
  struct Work {
    uint64_t extra = 0;              // bytes of the step's buffer for the caller
    std::vector<PlannedRead> reads;  // of the caller, into `extra`
    std::shared_ptr<Strand> strand;
    std::shared_ptr<Gate> holds;
    // As Step::compute. `extra` is aligned to kIoBlock and null if there is none.
    std::function<void(const std::shared_ptr<const SourceTile>& tile, std::byte* extra, Step::Done done)> compute;
  };

  // `whole`: the weight is in memory; null: it is read. Steps await all of `awaits`.
  WeightFeed(TaskContext* context, std::shared_ptr<WeightReader> reader, std::shared_ptr<WeightSlab> whole,
             std::vector<std::shared_ptr<Gate>> awaits)
      : context_(*context), reader_(std::move(reader)), whole_(std::move(whole)), awaits_(std::move(awaits)) {}

  const WeightReader& reader() const { return *reader_; }

  // A request with the fields that the source decides; tiles are those of a scheme with the given multiples. MEMORY_TOO_SMALL where the
  // weight must be gathered and does not fit.
  absl::StatusOr<Tiling::Request> StartRequest(int64_t row_multiple, int64_t column_multiple);
  // Bytes of the pool that a tile takes, `extra` not counted.
  uint64_t TileBytes(int64_t rows, int64_t cols) const;

  // Calls `visit` for each tile in order; it calls Start for that tile.
  absl::Status ForEachTile(const Tiling& tiling, const std::function<absl::Status(const TileRange&)>& visit);
  absl::Status Start(const TileRange& range, Work work);

 private:
  bool gathers() const { return slab_rows_ > 0; }
  absl::Status ChooseSlab(int64_t row_multiple);

  TaskContext& context_;
  const std::shared_ptr<WeightReader> reader_;
  const std::shared_ptr<WeightSlab> whole_;
  const std::vector<std::shared_ptr<Gate>> awaits_;
  int64_t slab_rows_ = 0;             // 0: not gathered
  std::shared_ptr<WeightSlab> slab_;  // of the tiles that are being started
};

}  // namespace quern::worker

#endif  // QUERN_WORKER_PIPELINE_WEIGHT_FEED_H_
