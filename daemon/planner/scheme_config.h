// One scheme as quantization_config describes it.
#ifndef QUERN_DAEMON_PLANNER_SCHEME_CONFIG_H_
#define QUERN_DAEMON_PLANNER_SCHEME_CONFIG_H_

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "quant/scheme_spec.h"

namespace quern::daemon {

// A group of config_groups without its targets: format, weights, input_activations (or null) and output_activations (null). Every args
// object has the twelve members that compressed-tensors writes.
absl::StatusOr<nlohmann::json> GroupConfig(const quant::SchemeSpec& spec);

// The top-level "format": that of all schemes, or "mixed-precision".
std::string ConfigFormat(const std::vector<quant::SchemeSpec>& schemes);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_PLANNER_SCHEME_CONFIG_H_
