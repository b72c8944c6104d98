#include "daemon/planner/loader_notes.h"

#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/recipe/quantization_args.h"

namespace quern::daemon {
namespace {

using quant::NumberType;
using quant::SchemeSpec;

constexpr char kPlainInstead[] = "; quern dequantize makes plain weights of it that transformers loads";
constexpr char kInstead[] = "; vLLM loads it, and quern dequantize makes plain weights of it that transformers loads";

// Why transformers (5.17 with compressed-tensors 0.19) does not load routed experts in this scheme, or nullptr.
const char* ExpertsObstacle(const SchemeSpec& spec) {
  if (spec.type == NumberType::kInt && !spec.symmetric) return "it wants zero points of asymmetric experts where they are not";
  const absl::string_view format = quant::FormatName(spec);
  if (format == "int-quantized" || format == "mxfp8-quantized") return "it has no code for experts in this format";
  if (spec.strategy == quant::Strategy::kBlock) return "it has no code for experts with a scale a block";
  return nullptr;
}

// Why vLLM (0.33) has no kernel for modules in this scheme, or nullptr. Its reader of the config takes all of them.
const char* VllmObstacle(const SchemeSpec& spec, bool experts) {
  if (spec.type == NumberType::kFloat) {
    return experts && quant::FormatName(spec) == "naive-quantized" ? "its experts in FP8 want quantized activations: take FP8_DYNAMIC"
                                                                   : nullptr;
  }
  switch (spec.activations) {
    case quant::Activations::kInt4Token:
      return "it has no kernel for 4-bit activations";
    case quant::Activations::kInt8Token:
      return spec.num_bits == 8 || spec.num_bits == 4 ? nullptr : "its kernels with 8-bit activations have weights of 4 and 8 bits";
    case quant::Activations::kFp8Token:
      return spec.group_size == 128 ? nullptr : "its kernels of W4AFP8 have groups of 128";
    default:
      return nullptr;
  }
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
  std::set<std::pair<int, bool>> kinds;  // schemes, of routed experts or not
  for (const ConfigModule& module : modules) {
    if (module.scheme >= 0) kinds.emplace(module.scheme, module.role == checkpoint::Role::kRoutedExperts);
    if (module.scheme >= 0 && module.role == checkpoint::Role::kRouter && notes.empty()) {
      notes.push_back("vLLM cannot load this result: it keeps routers in plain weights");
    }
  }
  for (const auto& [s, experts] : kinds) {
    const char* const why = VllmObstacle(schemes[s], experts);
    if (why == nullptr) continue;
    notes.push_back(absl::StrCat("vLLM cannot serve this result: ", experts ? "routed experts" : "linear modules", " are ",
                                 ShortName(schemes[s]), ", and ", why));
  }
  const absl::string_view instead = notes.empty() ? kInstead : kPlainInstead;
  if (of_experts.size() > 1) {
    std::vector<std::string> names;
    for (int s : of_experts) names.push_back(s < 0 ? "not quantized" : ShortName(schemes[s]));
    notes.push_back(absl::StrCat("transformers cannot load this result: routed experts differ between layers (", absl::StrJoin(names, ", "),
                                 "), and it takes one scheme for all of them", instead));
  }
  for (int s : of_experts) {
    if (s < 0) continue;
    if (const char* why = ExpertsObstacle(schemes[s]); why != nullptr) {
      notes.push_back(
          absl::StrCat("transformers cannot load this result: routed experts are ", ShortName(schemes[s]), ", and ", why, instead));
    } else if (quant::FormatName(schemes[s]) == "nvfp4-pack-quantized") {
      notes.push_back(absl::StrCat("transformers loads wrong values of this result, without an error: routed experts are ",
                                   ShortName(schemes[s]), ", whose global scales it leaves out", instead));
    }
  }
  return notes;
}

}  // namespace quern::daemon
