#include "checkpoint/family.h"

#include <algorithm>
#include <array>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"

namespace quern::checkpoint {
namespace {

// Role of the modules of a layer whose name behind "layers.N." is `pattern`. A component "#" stands for the number of an expert. Modules
// with the same `set` (where "#" is that number again) in one layer are a fused set.
struct ModuleRule {
  absl::string_view pattern;
  Role role;
  absl::string_view set = "";
};

// transformers renames this part of a module's name as it loads.
struct Rename {
  absl::string_view from;
  absl::string_view to;
};

using Rules = absl::Span<const ModuleRule>;

// Rules that several families share. Norms need none: see IsNorm.

constexpr ModuleRule kAttention[] = {
    {"self_attn.q_proj", Role::kAttention, "self_attn.qkv"},
    {"self_attn.k_proj", Role::kAttention, "self_attn.qkv"},
    {"self_attn.v_proj", Role::kAttention, "self_attn.qkv"},
    {"self_attn.qkv_proj", Role::kAttention, "self_attn.qkv"},
    {"self_attn.o_proj", Role::kAttention},
};

// Multi-head latent attention. Engines fuse the two projections down to the latent spaces.
constexpr ModuleRule kLatentAttention[] = {
    {"self_attn.q_a_proj", Role::kAttention, "self_attn.qkv_a"},
    {"self_attn.kv_a_proj_with_mqa", Role::kAttention, "self_attn.qkv_a"},
    {"self_attn.q_b_proj", Role::kAttention},
    {"self_attn.kv_b_proj", Role::kAttention},
    {"self_attn.q_proj", Role::kAttention},
    {"self_attn.o_proj", Role::kAttention},
};

constexpr ModuleRule kMlp[] = {
    {"mlp.gate_proj", Role::kMlp, "mlp.gate_up"},
    {"mlp.up_proj", Role::kMlp, "mlp.gate_up"},
    {"mlp.gate_up_proj", Role::kMlp, "mlp.gate_up"},
    {"mlp.down_proj", Role::kMlp},
};

constexpr ModuleRule kExperts[] = {
    {"mlp.experts.#.gate_proj", Role::kRoutedExperts, "mlp.experts.#"},
    {"mlp.experts.#.up_proj", Role::kRoutedExperts, "mlp.experts.#"},
    {"mlp.experts.#.down_proj", Role::kRoutedExperts, "mlp.experts.#"},
    // All experts in one tensor.
    {"mlp.experts.gate_up_proj", Role::kRoutedExperts, "mlp.experts"},
    {"mlp.experts.down_proj", Role::kRoutedExperts, "mlp.experts"},
    {"mlp.gate", Role::kRouter},
};

// Laguna and others put the router's correction bias beside the experts.
constexpr ModuleRule kExpertsBias[] = {{"mlp.experts", Role::kRouter}};

constexpr ModuleRule kSharedExpert[] = {
    {"mlp.shared_expert.gate_proj", Role::kSharedExperts, "mlp.shared_expert"},
    {"mlp.shared_expert.up_proj", Role::kSharedExperts, "mlp.shared_expert"},
    {"mlp.shared_expert.down_proj", Role::kSharedExperts, "mlp.shared_expert"},
    {"mlp.shared_expert_gate", Role::kRouter},
};

constexpr ModuleRule kSharedExperts[] = {
    {"mlp.shared_experts.gate_proj", Role::kSharedExperts, "mlp.shared_experts"},
    {"mlp.shared_experts.up_proj", Role::kSharedExperts, "mlp.shared_experts"},
    {"mlp.shared_experts.down_proj", Role::kSharedExperts, "mlp.shared_experts"},
};

// w1 is the gate, w3 up, w2 down.
constexpr ModuleRule kBlockSparseExperts[] = {
    {"block_sparse_moe.experts.#.w1", Role::kRoutedExperts, "block_sparse_moe.experts.#"},
    {"block_sparse_moe.experts.#.w3", Role::kRoutedExperts, "block_sparse_moe.experts.#"},
    {"block_sparse_moe.experts.#.w2", Role::kRoutedExperts, "block_sparse_moe.experts.#"},
    {"block_sparse_moe.gate", Role::kRouter},
    {"block_sparse_moe", Role::kRouter},  // its e_score_correction_bias
};

constexpr Rename kLagunaRenames[] = {{".mlp.shared_expert.", ".mlp.shared_experts."}};
constexpr Rename kBlockSparseRenames[] = {{".block_sparse_moe.", ".mlp."}};

constexpr Rules kLagunaRules[] = {kExperts, kSharedExpert, kExpertsBias, kAttention, kMlp};
constexpr Rules kDenseRules[] = {kAttention, kMlp};
constexpr Rules kMoeRules[] = {kExperts, kAttention, kMlp};
constexpr Rules kSharedMoeRules[] = {kExperts, kSharedExpert, kAttention, kMlp};
constexpr Rules kMixtralRules[] = {kBlockSparseExperts, kAttention};
constexpr Rules kDeepseekRules[] = {kExperts, kSharedExperts, kLatentAttention, kMlp};
constexpr Rules kGlmRules[] = {kExperts, kSharedExperts, kAttention, kMlp};
// A model of an unknown type: whatever has the usual names.
constexpr Rules kGenericRules[] = {kExperts,         kSharedExpert, kSharedExperts, kExpertsBias, kBlockSparseExperts, kAttention,
                                   kLatentAttention, kMlp};

constexpr absl::string_view kLagunaTypes[] = {"laguna"};
constexpr absl::string_view kLlamaTypes[] = {"llama", "mistral", "ministral", "smollm3"};
constexpr absl::string_view kQwen2Types[] = {"qwen2"};
constexpr absl::string_view kQwen3Types[] = {"qwen3"};
constexpr absl::string_view kGemmaTypes[] = {"gemma", "gemma2", "gemma3_text"};
constexpr absl::string_view kOlmoTypes[] = {"olmo", "olmo2", "olmo3"};
constexpr absl::string_view kPhi3Types[] = {"phi3"};
constexpr absl::string_view kQwen2MoeTypes[] = {"qwen2_moe"};
constexpr absl::string_view kQwen3MoeTypes[] = {"qwen3_moe"};
constexpr absl::string_view kOlmoeTypes[] = {"olmoe"};
constexpr absl::string_view kMixtralTypes[] = {"mixtral"};
constexpr absl::string_view kMinimaxTypes[] = {"minimax_m2"};
constexpr absl::string_view kDeepseekTypes[] = {"deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"};
constexpr absl::string_view kGlmTypes[] = {"glm4_moe"};

// What may stand before "layers.N." and before the modules outside of layers.
constexpr absl::string_view kPrefixes[] = {"model.", "model.language_model.", "language_model.model.", "language_model.", ""};

constexpr absl::string_view kVisionPrefixes[] = {
    "visual.",       "model.visual.",       "vision_tower.",          "model.vision_tower.",
    "vision_model.", "model.vision_model.", "multi_modal_projector.", "model.multi_modal_projector.",
};

constexpr absl::string_view kMtpPrefixes[] = {"mtp.", "model.mtp."};

// What a tensor's name may end in behind its module's. A name that ends in none of these is a module of its own.
constexpr absl::string_view kParameters[] = {
    "weight",
    "bias",
    "weight_scale_inv",
    "weight_scale",
    "weight_scale_2",
    "weight_packed",
    "weight_shape",
    "weight_zero_point",
    "weight_global_scale",
    "weight_g_idx",
    "input_scale",
    "input_global_scale",
    "k_scale",
    "v_scale",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "e_score_correction_bias",
    "A_log",
    "D",
    "dt_bias",
    "sinks",
};

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

// Norms have many names (input_layernorm, q_norm, kv_a_layernorm, pre_feedforward_layernorm, enorm) and one ending.
bool IsNorm(absl::string_view module) { return absl::EndsWith(LastComponent(module), "norm"); }

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

std::optional<LayerName> SplitLayer(absl::string_view module) {
  for (const absl::string_view prefix : kPrefixes) {
    absl::string_view rest = module;
    if (!absl::ConsumePrefix(&rest, prefix) || !absl::ConsumePrefix(&rest, "layers.")) continue;
    const std::optional<uint32_t> layer = ParseNumber(TakeComponent(&rest));
    if (!layer) continue;
    return LayerName{module.substr(0, module.size() - rest.size()), *layer, rest};
  }
  return std::nullopt;
}

// Role of a module outside of layers.
Role OuterRole(absl::string_view module) {
  for (const absl::string_view prefix : kPrefixes) {
    absl::string_view rest = module;
    if (!absl::ConsumePrefix(&rest, prefix)) continue;
    if (rest == "embed_tokens") return Role::kEmbeddings;
    if (rest == "lm_head") return Role::kLmHead;
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

struct Family::Rules {
  absl::string_view name;
  absl::Span<const absl::string_view> model_types;
  absl::Span<const absl::Span<const ModuleRule>> modules;
  absl::Span<const Rename> renames;
};

struct FamilyTable {
  // One line a family. Multi-token prediction needs none: it is whatever lies in layers behind the last one of the config.
  static constexpr Family::Rules kRules[] = {
      {"laguna", kLagunaTypes, kLagunaRules, kLagunaRenames},
      {"llama", kLlamaTypes, kDenseRules, {}},
      {"qwen2", kQwen2Types, kDenseRules, {}},
      {"qwen3", kQwen3Types, kDenseRules, {}},
      {"gemma", kGemmaTypes, kDenseRules, {}},
      {"olmo", kOlmoTypes, kDenseRules, {}},
      {"phi3", kPhi3Types, kDenseRules, {}},
      {"qwen2_moe", kQwen2MoeTypes, kSharedMoeRules, {}},
      {"qwen3_moe", kQwen3MoeTypes, kMoeRules, {}},
      {"olmoe", kOlmoeTypes, kMoeRules, {}},
      {"mixtral", kMixtralTypes, kMixtralRules, kBlockSparseRenames},
      {"minimax_m2", kMinimaxTypes, kMixtralRules, kBlockSparseRenames},
      {"deepseek_v3", kDeepseekTypes, kDeepseekRules, {}},
      {"glm4_moe", kGlmTypes, kGlmRules, {}},
  };
  static constexpr Family::Rules kGeneric = {"generic", {}, kGenericRules, {}};

  static Family Make(const Family::Rules& rules, bool known) {
    Family family;
    family.name_ = std::string(rules.name);
    family.known_ = known;
    family.rules_ = &rules;
    return family;
  }

  // Families by model_type, never destroyed.
  static const absl::flat_hash_map<absl::string_view, Family>& ByModelType() {
    static const auto* const table = [] {
      auto* families = new absl::flat_hash_map<absl::string_view, Family>();
      for (const Family::Rules& rules : kRules) {
        for (const absl::string_view type : rules.model_types) families->emplace(type, Make(rules, true));
      }
      return families;
    }();
    return *table;
  }

  static const Family& Generic() {
    static const Family* const generic = new Family(Make(kGeneric, false));
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
  const auto& families = FamilyTable::ByModelType();
  const auto found = families.find(config.model_type);
  return found == families.end() ? FamilyTable::Generic() : found->second;
}

std::vector<std::string> Family::KnownModelTypes() {
  std::vector<std::string> types;
  for (const auto& [type, family] : FamilyTable::ByModelType()) types.emplace_back(type);
  std::sort(types.begin(), types.end());
  return types;
}

ModuleIdentity Family::Identify(absl::string_view tensor_name, const ModelConfig& config) const {
  ModuleIdentity identity;
  absl::string_view module = tensor_name;
  const absl::string_view last = LastComponent(tensor_name);
  if (last.size() < tensor_name.size() && std::find(std::begin(kParameters), std::end(kParameters), last) != std::end(kParameters)) {
    module.remove_suffix(last.size() + 1);
    identity.parameter = std::string(last);
  }
  identity.module = std::string(module);
  for (const Rename& rename : rules_->renames) {
    const size_t at = module.find(rename.from);
    if (at == absl::string_view::npos) continue;
    identity.transformers_name = absl::StrCat(module.substr(0, at), rename.to, module.substr(at + rename.from.size()));
    break;
  }

  if (StartsWithAny(module, kVisionPrefixes)) {
    identity.role = Role::kVision;
    return identity;
  }
  absl::string_view inner = module;
  const bool mtp_prefix = StartsWithAny(module, kMtpPrefixes);
  if (mtp_prefix) inner.remove_prefix(module.find("mtp.") + 4);
  const absl::string_view before = module.substr(0, module.size() - inner.size());
  if (const std::optional<LayerName> name = SplitLayer(inner)) {
    identity.layer = name->layer;
    identity.role = IsNorm(module) ? Role::kNorms : Role::kOther;
    absl::string_view expert;
    for (const auto& group : rules_->modules) {
      const auto rule = std::find_if(group.begin(), group.end(),
                                     [&](const ModuleRule& candidate) { return Matches(candidate.pattern, name->rest, &expert); });
      if (rule == group.end()) continue;
      identity.role = rule->role;
      if (!expert.empty()) identity.expert = ParseNumber(expert);
      if (!rule->set.empty()) {
        const size_t hash = rule->set.find('#');
        identity.fused_set = absl::StrCat(before, name->head, rule->set.substr(0, hash));
        if (hash != absl::string_view::npos) absl::StrAppend(&identity.fused_set, expert, rule->set.substr(hash + 1));
      }
      break;
    }
    if (config.num_hidden_layers && name->layer >= *config.num_hidden_layers) identity.role = Role::kMtp;
  } else {
    identity.role = OuterRole(module);
  }
  if (mtp_prefix) identity.role = Role::kMtp;
  return identity;
}

}  // namespace quern::checkpoint
