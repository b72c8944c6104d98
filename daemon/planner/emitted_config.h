// The quantization_config that describes a plan's result to vLLM and transformers, in the format of compressed-tensors.
//
// Targets are patterns ("re:.*\.mlp\.experts\.\d+\.(down_proj|gate_proj|up_proj)$") or exact names, never a class name: a class name would
// also catch linear modules that are left unquantized. Patterns are checked against all names: a group's match its modules and no others.
#ifndef QUERN_DAEMON_PLANNER_EMITTED_CONFIG_H_
#define QUERN_DAEMON_PLANNER_EMITTED_CONFIG_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/family.h"
#include "quant/scheme_spec.h"

namespace quern::daemon {

// The version of compressed-tensors whose format is written.
inline constexpr char kCompressedTensorsVersion[] = "0.19.0";

// A module with a 2-D weight.
struct ConfigModule {
  std::string name;               // in the file
  std::string transformers_name;  // where it differs, else empty
  checkpoint::Role role = checkpoint::Role::kOther;
  bool expert = false;  // one of several experts, numbered
  int scheme = -1;      // index into the schemes, -1: not quantized
};

// JSON, indent 2, keys sorted. `schemes` are distinct and in the order of the groups.
absl::StatusOr<std::string> BuildQuantizationConfig(const std::vector<quant::SchemeSpec>& schemes,
                                                    const std::vector<ConfigModule>& modules);

// What `quantization_config` says of each module differs from `modules`: one text each, at most `limit`; empty when all agree.
// INVALID_ARGUMENT when the text is no such config.
absl::StatusOr<std::vector<std::string>> CheckQuantizationConfig(absl::string_view quantization_config,
                                                                 const std::vector<quant::SchemeSpec>& schemes,
                                                                 const std::vector<ConfigModule>& modules, size_t limit);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_PLANNER_EMITTED_CONFIG_H_
