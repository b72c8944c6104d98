#include "daemon/planner/loader_notes.h"

#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/recipe/quantization_args.h"

namespace quern::daemon {
namespace {

using quant::NumberType;
using quant::SchemeSpec;

constexpr char kInstead[] = "; vLLM loads it, and quern dequantize makes plain weights of it that transformers loads";

// Why transformers (5.17 with compressed-tensors 0.19) does not load routed experts in this scheme, or nullptr.
const char* ExpertsObstacle(const SchemeSpec& spec) {
  if (spec.type == NumberType::kInt && !spec.symmetric) return "it wants zero points of asymmetric experts where they are not";
  const absl::string_view format = quant::FormatName(spec);
  if (format == "int-quantized" || format == "mxfp8-quantized") return "it has no code for experts in this format";
  if (spec.strategy == quant::Strategy::kBlock) return "it has no code for experts with a scale a block";
  return nullptr;
}

}  // namespace

std::vector<std::string> LoaderNotes(const std::vector<SchemeSpec>& schemes, const std::vector<ConfigModule>& modules) {
  std::vector<std::string> notes;
  std::set<int> of_experts;  // -1: not quantized
  for (const ConfigModule& module : modules) {
    if (module.role == checkpoint::Role::kRoutedExperts) of_experts.insert(module.scheme);
  }
  if (schemes.front().convention == quant::Convention::kModelOpt) {
    notes.push_back(absl::StrCat("transformers cannot load this result: it does not read the format of ModelOpt", kInstead));
    for (int s : of_experts) {
      if (s >= 0 && schemes[s].num_bits == 8 && schemes[s].strategy == quant::Strategy::kChannel) {
        notes.push_back(
            "vLLM cannot load this result: its reader of ModelOpt's format has no FP8_PER_CHANNEL_PER_TOKEN for routed experts; "
            "--export compressed-tensors has");
      }
    }
    return notes;
  }
  if (of_experts.size() > 1) {
    std::vector<std::string> names;
    for (int s : of_experts) names.push_back(s < 0 ? "not quantized" : ShortName(schemes[s]));
    notes.push_back(absl::StrCat("transformers cannot load this result: routed experts differ between layers (", absl::StrJoin(names, ", "),
                                 "), and it takes one scheme for all of them", kInstead));
  }
  for (int s : of_experts) {
    if (s < 0) continue;
    if (const char* why = ExpertsObstacle(schemes[s]); why != nullptr) {
      notes.push_back(
          absl::StrCat("transformers cannot load this result: routed experts are ", ShortName(schemes[s]), ", and ", why, kInstead));
    } else if (quant::FormatName(schemes[s]) == "nvfp4-pack-quantized") {
      notes.push_back(absl::StrCat("transformers loads wrong values of this result, without an error: routed experts are ",
                                   ShortName(schemes[s]), ", whose global scales it leaves out", kInstead));
    }
  }
  return notes;
}

}  // namespace quern::daemon
