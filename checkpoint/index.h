// model.safetensors.index.json: which shard has which tensor.
#ifndef QUERN_CHECKPOINT_INDEX_H_
#define QUERN_CHECKPOINT_INDEX_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace quern::checkpoint {

struct ShardIndex {
  std::map<std::string, std::string> weight_map;  // tensor -> file name, without directories
  std::optional<uint64_t> total_size;             // of metadata; often stale
  std::optional<std::string> total_parameters;    // JSON text of the number, kept as it is
};

// Hostile input: entries that are no plain file name (separators, "..", empty) are refused by name, as are duplicate keys.
absl::StatusOr<ShardIndex> ParseShardIndex(absl::string_view text, absl::string_view path);

// The file's text: metadata, then weight_map sorted by tensor name, indent 2, newline at the end.
std::string BuildShardIndex(const ShardIndex& index);

}  // namespace quern::checkpoint

#endif  // QUERN_CHECKPOINT_INDEX_H_
