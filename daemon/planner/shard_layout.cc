#include "daemon/planner/shard_layout.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "absl/strings/str_format.h"

namespace quern::daemon {
namespace {

constexpr uint64_t kHeaderAlignment = 4096;
// Length, braces and "__metadata__".
constexpr uint64_t kHeaderFixed = 64;

struct Fill {
  uint64_t bytes = 0;
  uint64_t tensors = 0;
  uint64_t header_bytes = 0;

  Fill Plus(const Fill& other) const { return {bytes + other.bytes, tensors + other.tensors, header_bytes + other.header_bytes}; }
  bool Fits(uint64_t max_shard_size) const {
    const uint64_t header = (kHeaderFixed + header_bytes + kHeaderAlignment - 1) / kHeaderAlignment * kHeaderAlignment;
    return tensors <= kMaxTensorsPerShard && bytes <= max_shard_size && header <= max_shard_size - bytes;
  }
};

}  // namespace

Place PlaceOf(const checkpoint::ModuleIdentity& identity, const checkpoint::ModelConfig& config) {
  using checkpoint::Role;
  if (identity.role == Role::kVision) return {Phase::kBeforeLayers, 0};
  // A multi-token-prediction head either counts its layers on from the model's last or has a numbering of its own.
  const bool own_numbering =
      identity.role == Role::kMtp && identity.layer.has_value() && identity.layer < config.num_hidden_layers.value_or(0);
  if (identity.layer.has_value() && !own_numbering) return {Phase::kLayer, *identity.layer};
  return {identity.role == Role::kEmbeddings ? Phase::kBeforeLayers : Phase::kAfterLayers, 0};
}

uint64_t HeaderEntryBound(absl::string_view name, size_t dimensions) {
  // {"name":{"dtype":"F8_E4M3FNUZ","shape":[...],"data_offsets":[...]}}, numbers of at most 20 digits; every byte of the name may be
  // escaped.
  uint64_t escaped = 0;
  for (unsigned char c : name) escaped += c < 0x20 || c == '"' || c == '\\' || c >= 0x7f ? 6 : 1;
  return escaped + 64 + 21 * (dimensions + 2);
}

std::vector<std::vector<size_t>> LayOutShards(const std::vector<LayoutBlock>& blocks, uint64_t max_shard_size) {
  std::vector<size_t> order(blocks.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto key = [&](size_t i) { return std::tie(blocks[i].place.phase, blocks[i].place.layer, blocks[i].natural_key); };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return key(a) < key(b); });

  std::vector<std::vector<size_t>> shards;
  std::vector<size_t> current;
  Fill fill;
  const auto close = [&] {
    if (!current.empty()) shards.push_back(std::move(current));
    current.clear();
    fill = {};
  };
  const auto fill_of = [&](size_t i) { return Fill{blocks[order[i]].bytes, blocks[order[i]].tensors, blocks[order[i]].header_bytes}; };
  for (size_t begin = 0; begin < order.size();) {
    const Place place = blocks[order[begin]].place;
    size_t end = begin + 1;
    Fill segment = fill_of(begin);
    for (; end < order.size() && place.phase == Phase::kLayer && blocks[order[end]].place == place; ++end) {
      segment = segment.Plus(fill_of(end));
    }
    if (!fill.Plus(segment).Fits(max_shard_size)) close();
    for (size_t i = begin; i < end; ++i) {
      const Fill block = fill_of(i);
      if (!fill.Plus(block).Fits(max_shard_size)) close();
      current.push_back(order[i]);
      fill = fill.Plus(block);
    }
    begin = end;
  }
  close();
  return shards;
}

std::string ShardName(size_t index, size_t count) {
  if (count == 1) return "model.safetensors";
  return absl::StrFormat("model-%05d-of-%05d.safetensors", index + 1, count);
}

}  // namespace quern::daemon
