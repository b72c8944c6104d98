// Which modules of a checkpoint a recipe quantizes, how, and why not the others.
#ifndef QUERN_DAEMON_PLANNER_SELECTION_H_
#define QUERN_DAEMON_PLANNER_SELECTION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/expert_stack.h"
#include "checkpoint/family.h"
#include "daemon/planner/source_modules.h"
#include "daemon/recipe/recipe.h"
#include "quant/scheme.h"
#include "quern/v1/plan.pb.h"

namespace quern::daemon {

// A tensor of the result that holds the weights of several modules: all experts of a layer.
struct StackedOutput {
  std::string tensor;
  std::string module;  // the tensor's name as that of a module
  std::string block;   // stacks with the same one lie in one shard
  std::vector<uint64_t> shape;
};

struct SelectedModule {
  checkpoint::ModuleIdentity identity;    // of its weight, or of its first tensor
  std::optional<SourceWeight> weight;     // 2-D, whatever its dtype
  std::vector<size_t> tensors;            // copied beside the weight, or all: indices into Checkpoint::tensors()
  std::vector<size_t> storage;            // tensors that say how a weight was stored: dropped, since the weight is stored anew
  const quant::Scheme* scheme = nullptr;  // null: copied
  bool dequantized = false;               // `scheme` only stores the values of a weight that was in a quantized format
  std::string reason;                     // the target that chose it, or why it is copied
  // Where the weight's plain values go when it has no tensor of its own: `slice` of it, in elements. Modules of one stack stand together.
  std::shared_ptr<const StackedOutput> stack = {};
  checkpoint::StackSlice slice = {};

  bool quantized() const { return scheme != nullptr && !dequantized; }
};

struct Selection {
  std::vector<SelectedModule> modules;  // in the order of their first tensors
  // Modules that are in the file as slices of a stack of experts that is copied as it is. Inference engines look the first expert's up.
  std::vector<checkpoint::ModuleIdentity> unnamed;
  std::vector<size_t> strays;  // SourceModules::strays: dropped
  std::vector<quern::v1::PatternMatch> patterns;
  std::vector<std::string> warnings;
};

// Of a config whose model_type no family knows.
std::string UnknownTypeWarning(const checkpoint::ModelConfig& config);

// Precedence: the user's ignore; an exact name or role as target; the default ignore (what is no 2-D linear weight, routers, embeddings,
// lm_head); other targets. The first group that matches wins. Stacks of experts count as the modules of their experts; patterns may also
// name the stack. A stack without a quantized expert is copied as it is. A weight that is stored in a quantized format and is not quantized
// anew becomes plain BF16: a result has one quantization_config, which could not say what the old format was.
//
// INVALID_ARGUMENT lists all that headers show to be wrong: targets that match nothing, weights that a scheme does not fit, sets of modules
// that engines use as one and that differ, weights that cannot be read, and weights of an integer format that are to be quantized anew
// without `allow_requantize`. Reads little beside headers.
absl::StatusOr<Selection> SelectModules(const checkpoint::Checkpoint& checkpoint, const Recipe& recipe, bool allow_requantize);

// All weights in a quantized format as plain values of `dtype`, everything else copied. Experts of families that are loaded as stacks only
// go into stacks. INVALID_ARGUMENT when there is no such weight, or one that cannot be read.
absl::StatusOr<Selection> SelectStored(const checkpoint::Checkpoint& checkpoint, DType dtype);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_PLANNER_SELECTION_H_
