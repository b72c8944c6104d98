#include "daemon/planner/scheme_config.h"

#include <nlohmann/json.hpp>
#include <optional>

#include "base/status_macros.h"
#include "daemon/recipe/quantization_args.h"

namespace quern::daemon {
namespace {

using Json = nlohmann::json;

Json TextOrNull(const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); }

Json ArgsJson(const QuantizationArgs& args) {
  Json json = {{"actorder", nullptr},
               {"block_structure", nullptr},
               {"dynamic", args.dynamic == QuantizationArgs::Dynamic::kTrue},
               {"group_size", nullptr},
               {"num_bits", args.num_bits},
               {"observer", TextOrNull(args.observer)},
               {"observer_kwargs", Json::object()},
               {"scale_dtype", TextOrNull(args.scale_dtype)},
               {"strategy", args.strategy},
               {"symmetric", args.symmetric},
               {"type", args.type},
               {"zp_dtype", TextOrNull(args.zp_dtype)}};
  if (args.dynamic == QuantizationArgs::Dynamic::kLocal) json["dynamic"] = "local";
  if (args.group_size.has_value()) json["group_size"] = *args.group_size;
  if (args.block_rows.has_value()) json["block_structure"] = {*args.block_rows, *args.block_columns};
  return json;
}

}  // namespace

absl::StatusOr<Json> GroupConfig(const quant::SchemeSpec& spec) {
  QUERN_ASSIGN_OR_RETURN(const QuantizationArgs weights, WeightArgs(spec));
  const std::optional<QuantizationArgs> inputs = InputArgs(spec.activations);
  return Json{{"format", std::string(quant::FormatName(spec))},
              {"input_activations", inputs.has_value() ? ArgsJson(*inputs) : Json(nullptr)},
              {"output_activations", nullptr},
              {"weights", ArgsJson(weights)}};
}

std::string ConfigFormat(const std::vector<quant::SchemeSpec>& schemes) {
  std::string format;
  for (const quant::SchemeSpec& scheme : schemes) {
    const std::string own(quant::FormatName(scheme));
    if (!format.empty() && format != own) return "mixed-precision";
    format = own;
  }
  return format;
}

}  // namespace quern::daemon
