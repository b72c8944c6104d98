#include "checkpoint/family.h"

#include <algorithm>
#include <array>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "checkpoint/family_table.h"

namespace quern::checkpoint {
namespace {

// What may stand before "layers.N." and before the modules outside of layers.
constexpr absl::string_view kPrefixes[] = {
    "model.", "model.language_model.", "language_model.model.", "language_model.", "backbone.", "thinker.model.", ""};

// Other modalities and what joins them to the text model.
constexpr absl::string_view kVisionPrefixes[] = {
    "visual.",
    "model.visual.",
    "thinker.visual.",
    "vision_tower.",
    "model.vision_tower.",
    "vision_model.",
    "model.vision_model.",
    "vision_embedder.",
    "model.vision_embedder.",
    "embed_vision.",
    "model.embed_vision.",
    "multi_modal_projector.",
    "model.multi_modal_projector.",
    "mm_projector.",
    "audio_tower.",
    "model.audio_tower.",
    "thinker.audio_tower.",
    "embed_audio.",
    "model.embed_audio.",
};

constexpr absl::string_view kMtpPrefixes[] = {"mtp.", "model.mtp."};

// What a tensor's name may end in behind its module's, besides storage parameters. A name that ends in none of these is a module of its
// own.
constexpr absl::string_view kParameters[] = {
    "weight",      "bias",        "k_scale",          "v_scale", "qweight", "qzeros",  "scales", "e_score_correction_bias",
    "expert_bias", "router_bias", "per_expert_scale", "A_log",   "D",       "dt_bias", "sinks",
};

constexpr absl::string_view kStorageParameters[] = {
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "scale",
    "weight_global_scale",
    "weight_zero_point",
    "weight_g_idx",
    "weight_shape",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "activation_scale",
    "output_scale",
    "pre_quant_scale",
    "g_idx",
    "SCB",
};

// What bitsandbytes stores beside "<module>.weight" stands under that name.
constexpr absl::string_view kWeight = "weight.";

bool IsWeightState(absl::string_view parameter) {
  return absl::ConsumePrefix(&parameter, kWeight) && (parameter == "absmax" || parameter == "quant_map" || parameter == "nested_absmax" ||
                                                      parameter == "nested_quant_map" || absl::StartsWith(parameter, "quant_state."));
}

template <size_t kSize>
bool IsOneOf(const absl::string_view (&names)[kSize], absl::string_view name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

// Takes the component before the first '.' off `name`; all of it when there is no '.'.
absl::string_view TakeComponent(absl::string_view* name) {
  const size_t dot = name->find('.');
  const absl::string_view component = name->substr(0, dot);
  name->remove_prefix(dot == absl::string_view::npos ? name->size() : dot + 1);
  return component;
}

std::optional<uint32_t> ParseNumber(absl::string_view digits) {
  uint32_t number;
  if (digits.empty() || !std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; })) return std::nullopt;
  if (!absl::SimpleAtoi(digits, &number)) return std::nullopt;
  return number;
}

// Whether `name` is `pattern`; `expert` becomes the component at '#'.
bool Matches(absl::string_view pattern, absl::string_view name, absl::string_view* expert) {
  const size_t hash = pattern.find('#');
  if (hash == absl::string_view::npos) return pattern == name;
  const absl::string_view head = pattern.substr(0, hash);
  const absl::string_view tail = pattern.substr(hash + 1);
  if (name.size() <= head.size() + tail.size() || !absl::StartsWith(name, head) || !absl::EndsWith(name, tail)) return false;
  const absl::string_view middle = name.substr(head.size(), name.size() - head.size() - tail.size());
  if (!ParseNumber(middle)) return false;
  *expert = middle;
  return true;
}

absl::string_view LastComponent(absl::string_view module) {
  const size_t dot = module.rfind('.');
  return dot == absl::string_view::npos ? module : module.substr(dot + 1);
}

// Whether one part of a name is what a NameRule says.
bool MatchesPart(absl::string_view pattern, absl::string_view part, absl::string_view* expert) {
  if (pattern == "#") {
    *expert = part;
    return ParseNumber(part).has_value();
  }
  const bool open_begin = absl::ConsumePrefix(&pattern, "*"), open_end = absl::ConsumeSuffix(&pattern, "*");
  if (open_begin && open_end) return absl::StrContains(part, pattern);
  if (open_begin) return absl::EndsWith(part, pattern);
  return open_end ? absl::StartsWith(part, pattern) : part == pattern;
}

// Takes the component behind the last '.' off `name`; all of it when there is no '.'.
absl::string_view TakeLastComponent(absl::string_view* name) {
  const absl::string_view last = LastComponent(*name);
  name->remove_suffix(std::min(name->size(), last.size() + 1));
  return last;
}

// Whether a module's name ends as the rule says.
bool MatchesEnd(absl::string_view pattern, absl::string_view module, absl::string_view* expert) {
  const bool whole = absl::ConsumePrefix(&pattern, "^");
  while (!pattern.empty()) {
    if (module.empty() || !MatchesPart(TakeLastComponent(&pattern), TakeLastComponent(&module), expert)) return false;
  }
  return !whole || module.empty();
}

// Norms have many names (input_layernorm, q_norm, kv_a_layernorm, pre_feedforward_layernorm, enorm) and one ending.
bool IsNorm(absl::string_view module) {
  const absl::string_view last = LastComponent(module);
  return absl::EndsWith(last, "norm") || last == "norm_f";
}

// Tables of positions and the like of other modalities: 2-D, and no linear module.
bool IsEmbedding(absl::string_view module) {
  const absl::string_view last = LastComponent(module);
  return absl::EndsWith(last, "embed") || absl::EndsWith(last, "embedding") || absl::EndsWith(last, "embeddings") ||
         absl::EndsWith(last, "pos_emb");
}

template <size_t N>
bool StartsWithAny(absl::string_view name, const absl::string_view (&prefixes)[N]) {
  return std::any_of(std::begin(prefixes), std::end(prefixes), [&](absl::string_view prefix) { return absl::StartsWith(name, prefix); });
}

// Splits "model.layers.3.mlp.gate" into what stands before the layer's number and behind it.
struct LayerName {
  absl::string_view head;  // "model.layers.3."
  uint32_t layer = 0;
  absl::string_view rest;  // "mlp.gate"; empty for a tensor of the layer itself
};

std::optional<LayerName> SplitNumber(absl::string_view module, absl::string_view rest) {
  const std::optional<uint32_t> layer = ParseNumber(TakeComponent(&rest));
  if (!layer) return std::nullopt;
  return LayerName{module.substr(0, module.size() - rest.size()), *layer, rest};
}

// `mtp`: the name stood behind "mtp.", where layers may be numbered at once ("mtp.0.ffn.gate").
std::optional<LayerName> SplitLayer(absl::string_view module, bool mtp) {
  for (const absl::string_view prefix : kPrefixes) {
    absl::string_view rest = module;
    if (!absl::ConsumePrefix(&rest, prefix) || !absl::ConsumePrefix(&rest, "layers.")) continue;
    if (const std::optional<LayerName> name = SplitNumber(module, rest)) return name;
  }
  return mtp ? SplitNumber(module, module) : std::nullopt;
}

// A name behind whatever stands in front of the layers; nullopt where that is no layer of the language model.
std::optional<LayerName> SplitStackName(absl::string_view module) {
  if (StartsWithAny(module, kVisionPrefixes)) return std::nullopt;
  absl::string_view inner = module;
  const bool mtp_prefix = StartsWithAny(module, kMtpPrefixes);
  if (mtp_prefix) inner.remove_prefix(module.find("mtp.") + 4);
  return SplitLayer(inner, mtp_prefix);
}

// `head`: what stands in front of the rule's pattern.
ExpertStack MakeStack(const StackRule& rule, const ExpertNames& names, absl::string_view head) {
  ExpertStack stack;
  stack.experts = absl::StrCat(head, rule.experts);
  stack.tensor = absl::StrCat(head, rule.pattern, rule.ending);
  stack.base = absl::StrCat(head, rule.pattern);
  if (rule.form != ExpertStack::Form::kValues) stack.base.resize(stack.base.rfind('_'));
  stack.holds = rule.holds;
  stack.form = rule.form;
  stack.transposed = rule.transposed;
  stack.fixed = rule.fixed;
  stack.interleaved = rule.interleaved;
  switch (rule.holds) {
    case ExpertStack::Holds::kGateUp:
      stack.names = {std::string(names.gate), std::string(names.up)};
      break;
    case ExpertStack::Holds::kGate:
      stack.names = {std::string(names.gate)};
      break;
    case ExpertStack::Holds::kUp:
      stack.names = {std::string(names.up)};
      break;
    case ExpertStack::Holds::kDown:
      stack.names = {std::string(names.down)};
      break;
  }
  return stack;
}

// The rule's set in this layer, "#" replaced by the expert's number; empty for none.
std::string SetName(absl::string_view before, const LayerName& name, absl::string_view set, absl::string_view expert) {
  if (set.empty()) return "";
  const size_t hash = set.find('#');
  if (hash == absl::string_view::npos) return absl::StrCat(before, name.head, set);
  return absl::StrCat(before, name.head, set.substr(0, hash), expert, set.substr(hash + 1));
}

// The name of a module as transformers has it, empty where it is the same.
std::string TransformersName(absl::string_view module, absl::Span<const Rename> renames) {
  std::string name = absl::StrCat(".", module, ".");
  bool renamed = false;
  for (const Rename& rename : renames) {
    const size_t at = name.find(std::string(rename.from));
    if (at == std::string::npos) continue;
    name.replace(at, rename.from.size(), std::string(rename.to));
    renamed = true;
  }
  return renamed ? name.substr(1, name.size() - 2) : "";
}

// Role of a module outside of layers.
Role OuterRole(absl::string_view module) {
  for (const absl::string_view prefix : kPrefixes) {
    absl::string_view rest = module;
    if (!absl::ConsumePrefix(&rest, prefix)) continue;
    if (rest == "embed_tokens" || rest == "embed_tokens_per_layer" || rest == "embeddings" || rest == "embed") return Role::kEmbeddings;
    if (rest == "lm_head" || rest == "head") return Role::kLmHead;
  }
  return IsNorm(module) ? Role::kNorms : Role::kOther;
}

constexpr std::array<std::pair<Role, absl::string_view>, 11> kRoleNames = {{
    {Role::kRoutedExperts, "routed_experts"},
    {Role::kSharedExperts, "shared_experts"},
    {Role::kAttention, "attention"},
    {Role::kMlp, "mlp"},
    {Role::kRouter, "router"},
    {Role::kEmbeddings, "embeddings"},
    {Role::kLmHead, "lm_head"},
    {Role::kNorms, "norms"},
    {Role::kMtp, "mtp"},
    {Role::kVision, "vision"},
    {Role::kOther, "other"},
}};

}  // namespace

// Makes the families of the tables, once.
class FamilyRegistry {
 public:
  static Family Make(const FamilyRules& rules, bool known) {
    Family family;
    family.name_ = std::string(rules.name);
    family.known_ = known;
    family.rules_ = &rules;
    return family;
  }

  // By model_type, never destroyed.
  static const absl::flat_hash_map<absl::string_view, Family>& ByModelType() {
    static const auto* const table = [] {
      auto* families = new absl::flat_hash_map<absl::string_view, Family>();
      for (const FamilyRules& rules : AllFamilies()) {
        for (const absl::string_view type : rules.model_types) families->emplace(type, Make(rules, true));
      }
      return families;
    }();
    return *table;
  }

  static const Family& Generic() {
    static const Family* const generic = new Family(Make(GenericFamily(), false));
    return *generic;
  }
};

absl::string_view RoleName(Role role) {
  for (const auto& [known, name] : kRoleNames) {
    if (known == role) return name;
  }
  return "other";
}

std::optional<Role> ParseRole(absl::string_view name) {
  for (const auto& [role, known] : kRoleNames) {
    if (known == name) return role;
  }
  return std::nullopt;
}

const Family& Family::For(const ModelConfig& config) {
  const auto& families = FamilyRegistry::ByModelType();
  for (const std::string* type : {&config.model_type, &config.outer_model_type}) {
    const auto found = families.find(*type);
    if (found != families.end()) return found->second;
  }
  return FamilyRegistry::Generic();
}

std::vector<std::string> Family::KnownModelTypes() {
  std::vector<std::string> types;
  for (const auto& [type, family] : FamilyRegistry::ByModelType()) types.emplace_back(type);
  std::sort(types.begin(), types.end());
  return types;
}

bool IsBitsandbytesParameter(absl::string_view parameter) { return parameter == "SCB" || IsWeightState(parameter); }

bool IsStorageParameter(absl::string_view parameter) { return IsOneOf(kStorageParameters, parameter) || IsWeightState(parameter); }

ModuleIdentity Family::Identify(absl::string_view tensor_name, const ModelConfig& config) const {
  ModuleIdentity identity;
  absl::string_view module = tensor_name;
  const absl::string_view last = LastComponent(tensor_name);
  if (last.size() < tensor_name.size() && (IsOneOf(kParameters, last) || IsOneOf(kStorageParameters, last))) {
    module.remove_suffix(last.size() + 1);
    identity.parameter = std::string(last);
  } else if (const size_t weight = tensor_name.rfind(".weight.");
             weight != absl::string_view::npos && IsWeightState(tensor_name.substr(weight + 1))) {
    module = tensor_name.substr(0, weight);
    identity.parameter = std::string(tensor_name.substr(weight + 1));
  }
  identity.module = std::string(module);
  identity.transformers_name = TransformersName(module, rules_->renames);

  if (StartsWithAny(module, kVisionPrefixes)) {
    identity.role = IsEmbedding(module) ? Role::kEmbeddings : Role::kVision;
    return identity;
  }
  absl::string_view inner = module;
  const bool mtp_prefix = StartsWithAny(module, kMtpPrefixes);
  if (mtp_prefix) inner.remove_prefix(module.find("mtp.") + 4);
  const absl::string_view before = module.substr(0, module.size() - inner.size());
  bool described = false;
  if (const std::optional<LayerName> name = SplitLayer(inner, mtp_prefix)) {
    identity.layer = name->layer;
    identity.role = IsNorm(module) ? Role::kNorms : Role::kOther;
    absl::string_view expert;
    for (const auto& group : rules_->modules) {
      const auto rule = std::find_if(group.begin(), group.end(),
                                     [&](const ModuleRule& candidate) { return Matches(candidate.pattern, name->rest, &expert); });
      if (rule == group.end()) continue;
      identity.role = rule->role;
      if (!expert.empty()) identity.expert = ParseNumber(expert);
      identity.scale_set = SetName(before, *name, rule->matrix, expert);
      identity.fused_set = rule->block.empty() ? identity.scale_set : SetName(before, *name, rule->block, expert);
      described = true;
      break;
    }
    if (config.num_hidden_layers && name->layer >= *config.num_hidden_layers) identity.role = Role::kMtp;
  } else {
    identity.role = OuterRole(module);
  }
  if (!described && identity.role == Role::kOther) FindByName(&identity);
  if (mtp_prefix) identity.role = Role::kMtp;
  return identity;
}

void Family::FindByName(ModuleIdentity* identity) const {
  const absl::string_view module = identity->module;
  absl::string_view expert;
  const auto rule =
      std::find_if(rules_->names.begin(), rules_->names.end(), [&](const NameRule& r) { return MatchesEnd(r.pattern, module, &expert); });
  if (rule == rules_->names.end()) return;
  identity->role = rule->role;
  const absl::string_view parent = absl::StripSuffix(module.substr(0, module.size() - LastComponent(module).size()), ".");
  if (!rule->matrix.empty()) identity->fused_set = identity->scale_set = absl::StrCat(parent, ".", rule->matrix);
  const bool experts = rule->role == Role::kRoutedExperts || rule->role == Role::kSharedExperts;
  if (experts) identity->fused_set = std::string(parent);
  if (absl::StrContains(rule->pattern, "#")) identity->expert = ParseNumber(expert);
}

std::optional<ExpertStack> Family::FindStack(absl::string_view tensor_name) const {
  const absl::string_view module = absl::StripSuffix(tensor_name, ".weight");
  const std::optional<LayerName> name = SplitStackName(module);
  if (!name) return std::nullopt;
  const absl::string_view head = module.substr(0, module.size() - name->rest.size());
  for (const auto& group : rules_->stacks) {
    const auto rule = std::find_if(group.begin(), group.end(), [&](const StackRule& candidate) { return candidate.pattern == name->rest; });
    if (rule == group.end()) continue;
    ExpertStack stack = MakeStack(*rule, rules_->experts, head);
    stack.tensor = std::string(tensor_name);
    return stack;
  }
  return std::nullopt;
}

std::vector<ExpertStack> Family::StacksOf(absl::string_view experts) const {
  std::vector<ExpertStack> stacks;
  if (!rules_->only_stacks) return stacks;
  const std::optional<LayerName> name = SplitStackName(experts);
  if (!name) return stacks;
  const absl::string_view head = experts.substr(0, experts.size() - name->rest.size());
  for (const StackRule& rule : rules_->stacks.front()) {
    if (rule.experts == name->rest && rule.form == ExpertStack::Form::kValues) stacks.push_back(MakeStack(rule, rules_->experts, head));
  }
  return stacks;
}

bool Family::transposed_linears() const { return rules_->transposed_linears; }

absl::string_view Family::stack_note() const { return rules_->stack_note; }

}  // namespace quern::checkpoint
