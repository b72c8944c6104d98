// Distributes tensors over output shards.
//
// Blocks (a module, or a fused set) are never cut. They are ordered: what comes before the layers, the layers by number, what comes after;
// inside by natural name. A shard is closed when the next layer would overflow it; a layer that is larger than a shard is cut between its
// blocks; a block that is larger has a shard of its own. Sizes count the header. Pure.
#ifndef QUERN_DAEMON_PLANNER_SHARD_LAYOUT_H_
#define QUERN_DAEMON_PLANNER_SHARD_LAYOUT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "checkpoint/family.h"
#include "checkpoint/model_config.h"
#include "checkpoint/safetensors.h"

namespace quern::daemon {

inline constexpr uint64_t kDefaultMaxShardSize = uint64_t{2} << 30;
inline constexpr uint64_t kMaxTensorsPerShard = 8192;

enum class Phase { kBeforeLayers, kLayer, kAfterLayers };

struct Place {
  Phase phase = Phase::kAfterLayers;
  uint32_t layer = 0;  // of kLayer
  friend bool operator==(const Place&, const Place&) = default;
};

// Where a module stands in the order of shards.
Place PlaceOf(const checkpoint::ModuleIdentity& identity, const checkpoint::ModelConfig& config);

struct LayoutBlock {
  Place place;
  std::string natural_key;  // NaturalKey of its first module
  uint64_t bytes = 0;       // of the tensors
  uint64_t tensors = 0;
  uint64_t header_bytes = 0;  // sum of HeaderEntryBound
};

// At least the bytes that the tensor takes in a header.
uint64_t HeaderEntryBound(absl::string_view name, size_t dimensions);

// Indices into `blocks`, for each shard in the order of the file.
std::vector<std::vector<size_t>> LayOutShards(const std::vector<LayoutBlock>& blocks, uint64_t max_shard_size);

// "model-00001-of-00012.safetensors", or "model.safetensors" when it is the only one. `index` counts from 0.
std::string ShardName(size_t index, size_t count);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_PLANNER_SHARD_LAYOUT_H_
