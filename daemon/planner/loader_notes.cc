#include "daemon/planner/loader_notes.h"

#include <algorithm>
#include <map>
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

// vLLM looks rows of embeddings up with a kernel of its own (CompressedTensorsEmbeddingWNA16Int).
absl::string_view EmbeddingsObstacle(const SchemeSpec& spec) {
  const bool codes = spec.type == NumberType::kInt && spec.symmetric && spec.activations == quant::Activations::kNone;
  const bool rows = spec.strategy == quant::Strategy::kChannel || spec.strategy == quant::Strategy::kGroup;
  if (codes && rows && 32 % spec.num_bits == 0) return "";
  return "its embeddings want symmetric integers of 2, 4 or 8 bits alone with a scale a channel or group: take W4A16";
}

}  // namespace

// As CompressedTensorsConfig._get_scheme_from_parts and CompressedTensorsMoEMethod.get_moe_method decide, with what the classes that they
// choose assert when they are made.
absl::string_view VllmObstacle(const SchemeSpec& spec, bool experts) {
  const bool tensor = spec.strategy == quant::Strategy::kTensor, channel = spec.strategy == quant::Strategy::kChannel;
  const quant::Activations inputs = spec.activations;
  if (spec.type == NumberType::kFloat) {
    if (!tensor && !channel && spec.strategy != quant::Strategy::kBlock) return "";  // NVFP4 and MX, with activations or without
    if (inputs == quant::Activations::kNone) {
      if (experts) return "its experts in FP8 want quantized activations: take FP8_DYNAMIC";
      if (!tensor && !channel) return "its FP8 in blocks wants quantized activations: take FP8_BLOCK";
    }
    if (experts && tensor && inputs != quant::Activations::kFp8Static) {
      return "its experts in FP8 with one scale a tensor want static activations: take FP8, or FP8_DYNAMIC with a scale a channel";
    }
    if (experts && channel && inputs != quant::Activations::kFp8Token) {
      return "its experts in FP8 with a scale a channel want dynamic activations: take FP8_DYNAMIC";
    }
    return "";
  }
  switch (inputs) {
    case quant::Activations::kNone:
      return tensor ? "its kernels of integer weights alone want a scale a channel or group" : "";
    case quant::Activations::kInt8Token:
      if (spec.num_bits != 8 && spec.num_bits != 4) return "its kernels with 8-bit activations have weights of 4 and 8 bits";
      if (!spec.symmetric)
        return "its kernels with 8-bit activations want symmetric weights; asymmetric ones go without (W4A16_ASYM, W8A16_ASYM)";
      if (spec.num_bits == 4) return tensor ? "its kernels of 4-bit weights with 8-bit activations want a scale a channel or group" : "";
      if (spec.strategy == quant::Strategy::kGroup) {
        return "its kernels of 8-bit weights with 8-bit activations want a scale a channel: take W8A8 without a group size, or W8A16";
      }
      return tensor && experts ? "its experts of 8-bit integers with 8-bit activations want a scale a channel: take W8A8" : "";
    case quant::Activations::kFp8Token:
      if (spec.num_bits == 8 && spec.symmetric && (channel || (tensor && !experts))) {
        return "it would quantize the activations to 8-bit integers in place of FP8: take W8A8";
      }
      return spec.num_bits == 4 && spec.symmetric && spec.strategy == quant::Strategy::kGroup && spec.group_size == 128
                 ? ""
                 : "its kernels of integers with FP8 activations want symmetric 4-bit weights in groups of 128: take W4AFP8";
    case quant::Activations::kInt4Token:
      return "it has no kernel for 4-bit activations: take weights alone (W4A16), or W4A8";
    default:
      return "it has no kernel for integer weights with these activations";
  }
}

std::vector<std::string> LoaderNotes(const std::vector<SchemeSpec>& schemes, const std::vector<ConfigModule>& modules) {
  std::vector<std::string> notes;
  std::set<int> of_experts;  // -1: not quantized
  for (const ConfigModule& module : modules) {
    if (module.role == checkpoint::Role::kRoutedExperts) of_experts.insert(module.scheme);
  }
  std::set<std::pair<int, checkpoint::Role>> kinds;
  std::set<checkpoint::Role> roles;
  for (const ConfigModule& module : modules) {
    if (module.scheme < 0) continue;
    kinds.emplace(module.scheme, module.role);
    roles.insert(module.role);
  }
  if (roles.count(checkpoint::Role::kRouter) > 0) {
    notes.push_back("vLLM cannot load this result for most models: it keeps their routers in plain weights");
  }
  if (schemes.front().convention == quant::Convention::kModelOpt) {
    if (roles.count(checkpoint::Role::kEmbeddings) > 0) {
      notes.push_back("vLLM cannot load this result: it keeps embeddings in plain weights where the format is ModelOpt's");
    }
    const bool refused = std::any_of(of_experts.begin(), of_experts.end(), [&](int s) {
      return s >= 0 && schemes[s].num_bits == 8 && schemes[s].strategy == quant::Strategy::kChannel;
    });
    notes.push_back(absl::StrCat("transformers cannot load this result: it does not read the format of ModelOpt",
                                 refused || !notes.empty() ? kPlainInstead : kInstead));
    if (refused) {
      notes.push_back(
          "vLLM cannot load this result: its reader of ModelOpt's format has no FP8_PER_CHANNEL_PER_TOKEN for routed experts; "
          "--export compressed-tensors has");
    }
    return notes;
  }
  std::map<std::pair<int, absl::string_view>, std::vector<absl::string_view>> refused;  // by scheme and reason: roles
  for (const auto& [s, role] : kinds) {
    const absl::string_view why = role == checkpoint::Role::kEmbeddings
                                      ? EmbeddingsObstacle(schemes[s])
                                      : VllmObstacle(schemes[s], role == checkpoint::Role::kRoutedExperts);
    if (!why.empty()) refused[{s, why}].push_back(checkpoint::RoleName(role));
  }
  for (const auto& [scheme, roles] : refused) {
    notes.push_back(absl::StrCat("vLLM cannot serve this result: modules of ", absl::StrJoin(roles, ", "), " are ",
                                 ShortName(schemes[scheme.first]), ", and ", scheme.second));
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
