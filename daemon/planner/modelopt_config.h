// The two descriptions of a result in the format of ModelOpt: hf_quant_config.json, and quantization_config of config.json, which is what
// ModelOpt's converter makes of the first.
#ifndef QUERN_DAEMON_PLANNER_MODELOPT_CONFIG_H_
#define QUERN_DAEMON_PLANNER_MODELOPT_CONFIG_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/planner/emitted_config.h"
#include "quant/scheme_spec.h"

namespace quern::daemon {

// The version of ModelOpt whose format is written. Loaders look for the producer "modelopt" before they read anything else.
inline constexpr char kModelOptVersion[] = "0.47.0";
inline constexpr char kHfQuantConfigName[] = "hf_quant_config.json";

struct ModelOptConfigs {
  std::string hf_quant_config;      // a whole file, with a newline at its end
  std::string quantization_config;  // a JSON value
};

// With one algorithm the modules left alone are `exclude_modules`, with several (MIXED_PRECISION) every quantized module is listed too.
// Loaders take an excluded name for a text that quantized names must not contain: where one does contain it ("a.gate" and "a.gate_proj"),
// that one is left out, and the modules are listed whatever the number of algorithms, since what is not listed is not quantized.
// INVALID_ARGUMENT for a scheme that is not in the convention of ModelOpt.
absl::StatusOr<ModelOptConfigs> BuildModelOptConfigs(const std::vector<quant::SchemeSpec>& schemes,
                                                     const std::vector<ConfigModule>& modules);

// What the two texts say differs from each other or from `modules`: one text each, at most `limit`. INVALID_ARGUMENT when one of them is no
// such config.
absl::StatusOr<std::vector<std::string>> CheckModelOptConfigs(absl::string_view hf_quant_config, absl::string_view quantization_config,
                                                              const std::vector<quant::SchemeSpec>& schemes,
                                                              const std::vector<ConfigModule>& modules, size_t limit);

// ModelOpt's name of a scheme in its convention: "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4".
absl::StatusOr<std::string> ModelOptAlgorithm(const quant::SchemeSpec& spec);

}  // namespace quern::daemon

#endif  // QUERN_DAEMON_PLANNER_MODELOPT_CONFIG_H_
