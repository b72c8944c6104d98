// What a checkpoint's own quantization_config says of the weights that its files hold: as much as their tensors do not show themselves.
#ifndef QUERN_DAEMON_PLANNER_STORED_FORMAT_H_
#define QUERN_DAEMON_PLANNER_STORED_FORMAT_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/family.h"
#include "checkpoint/model_config.h"
#include "quant/scheme_spec.h"

namespace quern::daemon {

class StoredFormat {
 public:
  // An empty config, or one of a method that has nothing to say, gives a format without groups. INVALID_ARGUMENT when the text is no JSON
  // object, or a member that is read here is not what it must be: the message names file, group and key and says what was found.
  static absl::StatusOr<StoredFormat> Parse(const checkpoint::ModelConfig& config);

  // quant_method, for example "compressed-tensors", "modelopt", "fp8"; empty when the config has none.
  const std::string& method() const { return method_; }
  // How the integers of a module in compressed-tensors' format are to be read: activations and observer are left out. Null when no group of
  // integers targets the module.
  const quant::SchemeSpec* IntegersOf(const checkpoint::ModuleIdentity& module) const;
  // Rows and columns of a block that shares a scale of FP8, where the config says so (weight_block_size, or the block_structure of a group
  // that targets the module).
  std::optional<std::pair<int64_t, int64_t>> BlockOf(const checkpoint::ModuleIdentity& module) const;

 private:
  struct Group;
  std::string method_;
  static const Group* Find(const std::vector<std::shared_ptr<const Group>>& groups, const checkpoint::ModuleIdentity& module);

  std::vector<std::shared_ptr<const Group>> groups_;  // of integers
  std::vector<std::shared_ptr<const Group>> blocks_;  // of FP8 in blocks
  std::optional<std::pair<int64_t, int64_t>> block_;  // of everything
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_PLANNER_STORED_FORMAT_H_
