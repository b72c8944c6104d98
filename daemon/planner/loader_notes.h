// What is known of the programs that load a result, for the warnings of a plan.
#ifndef QUERN_DAEMON_PLANNER_LOADER_NOTES_H_
#define QUERN_DAEMON_PLANNER_LOADER_NOTES_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "daemon/planner/emitted_config.h"
#include "quant/scheme_spec.h"

namespace quern::daemon {

// One text for each reason why transformers cannot load the result, or loads other values than were stored, and for what vLLM has no code
// for. Empty when nothing is known to stand in the way. `schemes` are distinct and not empty, as for the config.
std::vector<std::string> LoaderNotes(const std::vector<quant::SchemeSpec>& schemes, const std::vector<ConfigModule>& modules);

// Why vLLM (0.33, on CUDA) does not serve modules in this scheme of compressed-tensors' convention and what to take instead, or empty.
// Which kernels a GPU has, for shapes and group sizes, is not looked at.
absl::string_view VllmObstacle(const quant::SchemeSpec& spec, bool experts);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_PLANNER_LOADER_NOTES_H_
