// Files beside the checkpoint that schemes take inputs of modules from: the largest magnitude of a module's activations, and E[x^2] of its
// input channels.
#ifndef QUERN_DAEMON_PLANNER_MODULE_INPUTS_H_
#define QUERN_DAEMON_PLANNER_MODULE_INPUTS_H_

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/dtype.h"
#include "base/file.h"
#include "checkpoint/safetensors.h"
#include "quant/scheme.h"
#include "quern/v1/plan.pb.h"

namespace quern::daemon {

// A module as the files may name it.
struct InputModule {
  std::string name;
  std::string other_name;  // transformers' name, or empty
  uint64_t columns = 0;
  DType dtype = DType::kBF16;  // of the weight
};

class ModuleInputs {
 public:
  // `activation_scales`: F32 scalars "<module>" or "<module>.input_amax"; `importance`: F32 [columns] "<module>". Either may be empty. Adds
  // one SourceFile a file to summary.input_files, with digests of the content only where `with_fingerprints`. Blocks on reads.
  static absl::StatusOr<ModuleInputs> Open(const std::string& activation_scales, const std::string& importance, bool with_fingerprints,
                                           quern::v1::PlanSummary& summary);

  // Sets the inputs that `scheme` needs; the task's source files get the file of importance where a view names it. NOT_FOUND when the
  // files do not have the module (the message names the file and ends before the module's name, so that those of many can follow),
  // INVALID_ARGUMENT for a value of another shape or dtype, an amax of which no scale can be made, or an importance that is negative or not
  // finite. Reads the values.
  absl::Status AddTo(const InputModule& module, const quant::Scheme& scheme, quern::v1::TaskSpec& task, quern::v1::QuantizeUnit& unit);

  // Of entries that no module asked for, and of those whose scale lost digits, by now.
  std::vector<std::string> Warnings() const;

 private:
  struct File {
    quern::v1::SourceFile source;
    UniqueFd fd;
    uint64_t data_start = 0;
    absl::flat_hash_map<std::string, checkpoint::TensorInfo> tensors;  // by the name of the module
    std::set<std::string> unused;
  };
  static absl::StatusOr<File> OpenOne(const std::string& path, bool with_fingerprints, quern::v1::PlanSummary& summary);
  static absl::StatusOr<std::vector<float>> ReadFloats(const File& file, const checkpoint::TensorInfo& info);
  static absl::StatusOr<const checkpoint::TensorInfo*> Find(std::optional<File>& file, const char* option, const InputModule& module);

  std::optional<File> activation_scales_;
  std::optional<File> importance_;
  std::set<std::string> subnormal_;  // modules whose scale of inputs is
};

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_PLANNER_MODULE_INPUTS_H_
