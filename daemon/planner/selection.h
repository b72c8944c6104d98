// Which modules of a checkpoint a recipe quantizes, how, and why not the others.
#ifndef QUERN_DAEMON_PLANNER_SELECTION_H_
#define QUERN_DAEMON_PLANNER_SELECTION_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/family.h"
#include "daemon/recipe/recipe.h"
#include "quant/scheme.h"
#include "quern/v1/plan.pb.h"

namespace quern::daemon {

struct SelectedModule {
  checkpoint::ModuleIdentity identity;    // of its weight, or of its first tensor
  std::vector<size_t> tensors;            // indices into Checkpoint::tensors()
  std::optional<size_t> matrix;           // the tensor that is its 2-D ".weight", whatever its dtype
  const quant::Scheme* scheme = nullptr;  // null: copied
  std::string reason;                     // the target that chose it, or why it is copied
};

struct Selection {
  std::vector<SelectedModule> modules;  // in the order of their first tensors
  std::vector<quern::v1::PatternMatch> patterns;
  std::vector<std::string> warnings;
};

// Of a config whose model_type no family knows.
std::string UnknownTypeWarning(const checkpoint::ModelConfig& config);

// Precedence: the user's ignore; an exact name or role as target; the default ignore (what is no 2-D linear weight, routers, embeddings,
// lm_head); other targets. The first group that matches wins. INVALID_ARGUMENT lists all that headers show to be wrong: targets that match
// nothing, weights that a scheme does not fit, fused sets in which modules differ, weights that are quantized already, stacks of experts.
// Pure and CPU-bound.
absl::StatusOr<Selection> SelectModules(const checkpoint::Checkpoint& checkpoint, const Recipe& recipe);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_PLANNER_SELECTION_H_
