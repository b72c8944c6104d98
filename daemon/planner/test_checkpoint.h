// For tests: small checkpoints written to a temporary directory. Data is zeros where nothing else is said: planning hardly looks at it.
#ifndef QUERN_DAEMON_PLANNER_TEST_CHECKPOINT_H_
#define QUERN_DAEMON_PLANNER_TEST_CHECKPOINT_H_

#include <sys/stat.h>

#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/dtype.h"
#include "base/file.h"
#include "base/status_matchers.h"
#include "checkpoint/index.h"
#include "checkpoint/safetensors.h"
#include "daemon/planner/planner.h"
#include "daemon/planner/shard_writer.h"
#include "quern/v1/jobs.pb.h"

namespace quern::daemon {

struct TestTensor {
  std::string name;
  std::vector<uint64_t> shape;
  DType dtype = DType::kBF16;
  std::string data{};  // the first bytes
};

inline void WriteText(const std::string& path, absl::string_view text) {
  std::ofstream stream(path, std::ios::binary | std::ios::trunc);
  stream.write(text.data(), static_cast<std::streamsize>(text.size()));
  ASSERT_TRUE(stream.flush().good()) << path;
}

// A file of `header` and zeros up to `size`.
inline void WriteSparseShard(const std::string& path, absl::string_view header, uint64_t size) {
  WriteText(path, header);
  ASSERT_EQ(truncate(path.c_str(), static_cast<off_t>(size)), 0) << path;
}

class TestCheckpoint {
 public:
  explicit TestCheckpoint(absl::string_view model_type)
      : directory_(*TempDir::Make("planner_test")), config_(absl::StrCat("{\n  \"model_type\": \"", model_type, "\"\n}\n")) {}

  const std::string& path() const { return directory_.path(); }
  void set_config(std::string config) { config_ = std::move(config); }
  // Goes into the shard that is open.
  void Add(TestTensor tensor) { tensors_.push_back(std::move(tensor)); }
  void Add(std::string name, std::vector<uint64_t> shape) { Add({std::move(name), std::move(shape)}); }
  // One dense layer of Llama's kind.
  void AddDenseLayer(int layer, uint64_t hidden, uint64_t intermediate) {
    const std::string prefix = absl::StrCat("model.layers.", layer, ".");
    for (const char* name : {"input_layernorm", "post_attention_layernorm"}) Add(absl::StrCat(prefix, name, ".weight"), {hidden});
    for (const char* name : {"q_proj", "k_proj", "v_proj", "o_proj"})
      Add(absl::StrCat(prefix, "self_attn.", name, ".weight"), {hidden, hidden});
    for (const char* name : {"gate_proj", "up_proj"}) Add(absl::StrCat(prefix, "mlp.", name, ".weight"), {intermediate, hidden});
    Add(absl::StrCat(prefix, "mlp.down_proj.weight"), {hidden, intermediate});
  }
  void AddOuter(uint64_t vocab, uint64_t hidden) {
    Add("model.embed_tokens.weight", {vocab, hidden});
    Add("model.norm.weight", {hidden});
    Add("lm_head.weight", {vocab, hidden});
  }
  // Ends the shard; tensors added from here on go into another.
  void EndShard(const std::string& name) {
    std::vector<checkpoint::TensorInfo> infos;
    uint64_t end = 0;
    for (const TestTensor& tensor : tensors_) {
      const uint64_t bytes = TensorBytes(tensor.dtype, tensor.shape);
      infos.push_back({tensor.name, tensor.dtype, tensor.shape, end, end + bytes});
      end += bytes;
      index_.weight_map[tensor.name] = name;
    }
    const std::string header = checkpoint::BuildSafetensorsHeader(infos);
    WriteSparseShard(JoinPath(path(), name), header, header.size() + end);
    std::fstream file(JoinPath(path(), name), std::ios::binary | std::ios::in | std::ios::out);
    for (size_t i = 0; i < tensors_.size(); ++i) {
      file.seekp(static_cast<std::streamoff>(header.size() + infos[i].begin));
      file.write(tensors_[i].data.data(), static_cast<std::streamsize>(tensors_[i].data.size()));
    }
    ASSERT_TRUE(file.flush().good()) << name;
    tensors_.clear();
  }
  // Writes what is open as the only shard, or the index of those that were ended, and config.json.
  void Write() {
    if (index_.weight_map.empty()) {
      EndShard("model.safetensors");
    } else {
      if (!tensors_.empty()) EndShard("last.safetensors");
      WriteText(JoinPath(path(), "model.safetensors.index.json"), checkpoint::BuildShardIndex(index_));
    }
    WriteText(JoinPath(path(), "config.json"), config_);
  }

 private:
  TempDir directory_;
  std::string config_;
  std::vector<TestTensor> tensors_;
  checkpoint::ShardIndex index_;
};

inline quern::v1::JobSpec QuantizeJob(const std::string& source, absl::string_view recipe) {
  quern::v1::JobSpec job;
  job.set_operation(quern::v1::QUANTIZE);
  job.mutable_quantize()->set_source(source);
  job.mutable_quantize()->set_recipe(std::string(recipe));
  return job;
}

inline quern::v1::JobSpec DequantizeJob(const std::string& source, const std::string& dtype = "") {
  quern::v1::JobSpec job;
  job.set_operation(quern::v1::DEQUANTIZE);
  job.mutable_dequantize()->set_source(source);
  job.mutable_dequantize()->set_dtype(dtype);
  return job;
}

inline std::vector<std::string> Warnings(const Plan& plan) { return {plan.summary.warnings().begin(), plan.summary.warnings().end()}; }
inline std::vector<std::string> Ignored(const Plan& plan) { return nlohmann::json::parse(plan.summary.quantization_config())["ignore"]; }

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_PLANNER_TEST_CHECKPOINT_H_
