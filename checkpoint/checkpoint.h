// A Hugging Face checkpoint directory, opened by its headers alone. Immutable after Open, so safe to share between threads.
#ifndef QUERN_CHECKPOINT_CHECKPOINT_H_
#define QUERN_CHECKPOINT_CHECKPOINT_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/index.h"
#include "checkpoint/model_config.h"
#include "checkpoint/safetensors.h"

namespace quern::checkpoint {

struct Shard {
  std::string name;  // file name in the directory
  std::string path;  // absolute; may be a link into a Hugging Face cache
  uint64_t size = 0;
  SafetensorsHeader header;
};

// Where a tensor lies.
struct TensorLocation {
  uint32_t shard = 0;                // index into Checkpoint::shards()
  const TensorInfo* info = nullptr;  // owned by the checkpoint
};

class Checkpoint {
 public:
  // `directory` holds config.json and either an index with its shards or model.safetensors (or a single *.safetensors). Preflight
  // errors are collected: every missing file and every tensor that its shard lacks is listed in one message.
  static absl::StatusOr<Checkpoint> Open(const std::string& directory);
  // Locations point into it, so it is moved and never copied.
  Checkpoint(Checkpoint&&) = default;
  Checkpoint& operator=(Checkpoint&&) = default;

  const std::string& directory() const { return directory_; }
  const ModelConfig& config() const { return config_; }
  // Only shards that the index names, in the order of their names.
  const std::vector<Shard>& shards() const { return shards_; }
  // What the source's index said, empty without one.
  const ShardIndex& index() const { return index_; }
  // In the order of shards, then of offsets.
  const std::vector<TensorLocation>& tensors() const { return tensors_; }
  // nullptr when there is no tensor of that name.
  const TensorLocation* Find(absl::string_view name) const;
  // Files to copy beside the shards (tokenizer, chat template, custom code, ...), relative paths, sorted; without config.json.
  const std::vector<std::string>& side_files() const { return side_files_; }
  // Files left behind, each with the reason; shards not named by the index among them.
  const std::vector<std::pair<std::string, std::string>>& skipped_files() const { return skipped_files_; }

 private:
  Checkpoint() = default;
  std::string directory_;
  ModelConfig config_;
  ShardIndex index_;
  std::vector<Shard> shards_;
  std::vector<TensorLocation> tensors_;
  absl::flat_hash_map<std::string, size_t> by_name_;
  std::vector<std::string> side_files_;
  std::vector<std::pair<std::string, std::string>> skipped_files_;
};

// The directory that a user's SRC means: an existing directory, or org/name[@revision] in the local Hugging Face cache ($HF_HUB_CACHE,
// $HF_HOME/hub, ~/.cache/huggingface/hub; revision: a ref such as main, or a commit). Absolute path. NOT_FOUND says where it looked.
absl::StatusOr<std::string> ResolveSource(absl::string_view source);

}  // namespace quern::checkpoint

#endif  // QUERN_CHECKPOINT_CHECKPOINT_H_
