#include "checkpoint/family.h"

#include <map>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/synthetic.h"

namespace quern::checkpoint {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::Optional;

ModelConfig Config(absl::string_view model_type, uint64_t layers = 61) {
  ModelConfig config;
  config.model_type = std::string(model_type);
  config.num_hidden_layers = layers;
  return config;
}

ModuleIdentity Identify(absl::string_view model_type, absl::string_view tensor) {
  const ModelConfig config = Config(model_type);
  return Family::For(config).Identify(tensor, config);
}

TEST(FamilyTest, RoleNamesReadBack) {
  for (const char* name :
       {"routed_experts", "shared_experts", "attention", "mlp", "router", "embeddings", "lm_head", "norms", "mtp", "vision", "other"}) {
    const std::optional<Role> role = ParseRole(name);
    ASSERT_TRUE(role.has_value()) << name;
    EXPECT_EQ(RoleName(*role), name);
  }
  EXPECT_EQ(ParseRole("experts"), std::nullopt);
}

TEST(FamilyTest, KnownModelTypesHaveTheirFamily) {
  EXPECT_THAT(Family::KnownModelTypes(),
              AllOf(Contains("laguna"), Contains("llama"), Contains("mistral"), Contains("qwen2"), Contains("qwen3"), Contains("qwen2_moe"),
                    Contains("qwen3_moe"), Contains("olmoe"), Contains("mixtral"), Contains("deepseek_v3")));
  for (const std::string& type : Family::KnownModelTypes()) EXPECT_TRUE(Family::For(Config(type)).known()) << type;
  EXPECT_FALSE(Family::For(Config("new_model")).known());
  EXPECT_EQ(Family::For(Config("")).name(), "generic");
}

struct Expected {
  const char* model_type;
  const char* tensor;
  Role role;
  const char* fused_set = "";
};

struct ExpectedScale {
  const char* model_type;
  const char* tensor;
  const char* scale_set;
};

TEST(FamilyTest, RolesAndFusedSets) {
  const Expected cases[] = {
      {"laguna", "model.embed_tokens.weight", Role::kEmbeddings},
      {"laguna", "lm_head.weight", Role::kLmHead},
      {"laguna", "model.norm.weight", Role::kNorms},
      {"laguna", "model.layers.3.input_layernorm.weight", Role::kNorms},
      {"laguna", "model.layers.3.self_attn.q_proj.weight", Role::kAttention, "model.layers.3.self_attn.qkv"},
      {"laguna", "model.layers.3.self_attn.k_proj.weight", Role::kAttention, "model.layers.3.self_attn.qkv"},
      {"laguna", "model.layers.3.self_attn.v_proj.weight", Role::kAttention, "model.layers.3.self_attn.qkv"},
      {"laguna", "model.layers.3.self_attn.o_proj.weight", Role::kAttention},
      {"laguna", "model.layers.3.self_attn.g_proj.weight", Role::kOther},
      {"laguna", "model.layers.3.self_attn.q_norm.weight", Role::kNorms},
      {"laguna", "model.layers.0.mlp.gate_proj.weight", Role::kMlp, "model.layers.0.mlp.gate_up"},
      {"laguna", "model.layers.0.mlp.up_proj.weight", Role::kMlp, "model.layers.0.mlp.gate_up"},
      {"laguna", "model.layers.0.mlp.down_proj.weight", Role::kMlp},
      {"laguna", "model.layers.1.mlp.gate.weight", Role::kRouter},
      {"laguna", "model.layers.1.mlp.experts.e_score_correction_bias", Role::kRouter},
      {"laguna", "model.layers.1.mlp.experts.17.gate_proj.weight", Role::kRoutedExperts, "model.layers.1.mlp.experts.17"},
      {"laguna", "model.layers.1.mlp.experts.17.down_proj.weight", Role::kRoutedExperts, "model.layers.1.mlp.experts.17"},
      {"laguna", "model.layers.1.mlp.shared_expert.up_proj.weight", Role::kSharedExperts, "model.layers.1.mlp.shared_expert"},
      {"laguna", "model.layers.1.mlp.shared_expert.down_proj.weight", Role::kSharedExperts, "model.layers.1.mlp.shared_expert"},
      {"llama", "model.layers.12.self_attn.q_proj.bias", Role::kAttention, "model.layers.12.self_attn.qkv"},
      {"mistral", "model.layers.1.mlp.down_proj.weight", Role::kMlp},
      {"gemma2", "model.layers.1.pre_feedforward_layernorm.weight", Role::kNorms},
      {"qwen3", "model.layers.1.self_attn.k_norm.weight", Role::kNorms},
      {"qwen2_moe", "model.layers.1.mlp.shared_expert_gate.weight", Role::kRouter},
      {"qwen2_moe", "model.layers.1.mlp.shared_expert.gate_proj.weight", Role::kSharedExperts, "model.layers.1.mlp.shared_expert"},
      {"qwen3_moe", "model.layers.1.mlp.experts.0.up_proj.weight", Role::kRoutedExperts, "model.layers.1.mlp.experts.0"},
      {"olmoe", "model.layers.1.mlp.gate.weight", Role::kRouter},
      {"mixtral", "model.layers.1.block_sparse_moe.gate.weight", Role::kRouter},
      {"mixtral", "model.layers.1.block_sparse_moe.experts.7.w1.weight", Role::kRoutedExperts, "model.layers.1.block_sparse_moe.experts.7"},
      {"mixtral", "model.layers.1.block_sparse_moe.experts.7.w2.weight", Role::kRoutedExperts, "model.layers.1.block_sparse_moe.experts.7"},
      {"minimax_m2", "model.layers.1.block_sparse_moe.e_score_correction_bias", Role::kRouter},
      {"deepseek_v3", "model.layers.4.self_attn.q_a_proj.weight", Role::kAttention, "model.layers.4.self_attn.qkv_a"},
      {"deepseek_v3", "model.layers.4.self_attn.kv_a_proj_with_mqa.weight", Role::kAttention, "model.layers.4.self_attn.qkv_a"},
      {"deepseek_v3", "model.layers.4.self_attn.q_b_proj.weight", Role::kAttention},
      {"deepseek_v3", "model.layers.4.self_attn.kv_b_proj.weight", Role::kAttention},
      {"deepseek_v3", "model.layers.4.self_attn.kv_a_layernorm.weight", Role::kNorms},
      {"deepseek_v3", "model.layers.4.mlp.gate.e_score_correction_bias", Role::kRouter},
      {"deepseek_v3", "model.layers.4.mlp.shared_experts.gate_proj.weight", Role::kSharedExperts, "model.layers.4.mlp.shared_experts"},
      {"deepseek_v3", "model.layers.4.mlp.experts.3.gate_proj.weight_scale_inv", Role::kRoutedExperts, "model.layers.4.mlp.experts.3"},
      {"new_model", "model.layers.4.mlp.experts.3.gate_proj.weight", Role::kRoutedExperts, "model.layers.4.mlp.experts.3"},
      {"new_model", "model.layers.4.mixer.in_proj.weight", Role::kOther},
      {"new_model", "model.visual.blocks.0.mlp.gate_proj.weight", Role::kVision},
      {"new_model", "model.language_model.layers.2.self_attn.q_proj.weight", Role::kAttention,
       "model.language_model.layers.2.self_attn.qkv"},
      {"new_model", "language_model.model.layers.2.mlp.up_proj.weight", Role::kMlp, "language_model.model.layers.2.mlp.gate_up"},
      {"new_model", "something.weight", Role::kOther},
  };
  for (const Expected& expected : cases) {
    const ModuleIdentity identity = Identify(expected.model_type, expected.tensor);
    EXPECT_EQ(RoleName(identity.role), RoleName(expected.role)) << expected.model_type << " " << expected.tensor;
    EXPECT_EQ(identity.fused_set, expected.fused_set) << expected.model_type << " " << expected.tensor;
  }
}

TEST(FamilyTest, ScaleSetsAreWhatEnginesFuse) {
  const ExpectedScale cases[] = {
      {"laguna", "model.layers.3.self_attn.q_proj.weight", "model.layers.3.self_attn.qkv"},
      {"laguna", "model.layers.3.self_attn.o_proj.weight", ""},
      {"laguna", "model.layers.3.mlp.experts.5.gate_proj.weight", "model.layers.3.mlp.experts.5.gate_up"},
      {"laguna", "model.layers.3.mlp.experts.5.up_proj.weight", "model.layers.3.mlp.experts.5.gate_up"},
      {"laguna", "model.layers.3.mlp.experts.5.down_proj.weight", ""},
      {"laguna", "model.layers.3.mlp.shared_expert.up_proj.weight", "model.layers.3.mlp.shared_expert.gate_up"},
      {"laguna", "model.layers.3.mlp.shared_expert.down_proj.weight", ""},
      {"mixtral", "model.layers.3.block_sparse_moe.experts.5.w1.weight", "model.layers.3.block_sparse_moe.experts.5.w13"},
      {"mixtral", "model.layers.3.block_sparse_moe.experts.5.w3.weight", "model.layers.3.block_sparse_moe.experts.5.w13"},
      {"mixtral", "model.layers.3.block_sparse_moe.experts.5.w2.weight", ""},
      {"deepseek_v3", "model.layers.3.self_attn.q_a_proj.weight", "model.layers.3.self_attn.qkv_a"},
      {"qwen3_5_moe", "model.language_model.layers.3.linear_attn.in_proj_qkv.weight",
       "model.language_model.layers.3.linear_attn.in_proj_qkvz"},
      {"qwen3_5_moe", "model.language_model.layers.3.linear_attn.in_proj_z.weight",
       "model.language_model.layers.3.linear_attn.in_proj_qkvz"},
      {"qwen3_next", "model.layers.3.linear_attn.in_proj_qkvz.weight", ""},
      {"nemotron_h", "backbone.layers.3.mixer.experts.5.up_proj.weight", ""},
      {"deepseek_v4", "layers.3.ffn.experts.5.w3.weight", "layers.3.ffn.experts.5.w13"},
      {"deepseek_v4", "mtp.0.ffn.experts.5.w3.weight", "mtp.0.ffn.experts.5.w13"},
  };
  for (const ExpectedScale& expected : cases) {
    EXPECT_EQ(Identify(expected.model_type, expected.tensor).scale_set, expected.scale_set) << expected.tensor;
  }
}

// One whole layer of each family: nothing that can be quantized is `other`, but where it is said.
TEST(FamilyTest, LayersOfAllFamilies) {
  struct Layer {
    const char* model_type;
    const char* prefix;
    std::map<std::string, Role> modules;
  };
  constexpr Role kE = Role::kRoutedExperts, kS = Role::kSharedExperts, kA = Role::kAttention, kM = Role::kMlp, kR = Role::kRouter;
  const Layer layers[] = {
      {"qwen3_vl_moe",
       "model.language_model.layers.3.",
       {{"self_attn.q_proj.weight", kA}, {"mlp.experts.gate_up_proj", kE}, {"mlp.experts.down_proj", kE}, {"mlp.gate.weight", kR}}},
      {"qwen3_next",
       "model.layers.3.",
       {{"linear_attn.in_proj_qkvz.weight", kA},
        {"linear_attn.out_proj.weight", kA},
        {"linear_attn.in_proj_ba.weight", Role::kOther},
        {"mlp.experts.7.down_proj.weight", kE},
        {"mlp.shared_expert.down_proj.weight", kS},
        {"mlp.shared_expert_gate.weight", kR}}},
      {"qwen3_5_moe_text",
       "model.language_model.layers.3.",
       {{"linear_attn.in_proj_qkv.weight", kA}, {"linear_attn.in_proj_z.weight", kA}, {"mlp.experts.7.gate_proj.weight", kE}}},
      {"deepseek_v32",
       "model.layers.3.",
       {{"self_attn.kv_b_proj.weight", kA},
        {"self_attn.indexer.weights_proj.weight", kR},
        {"self_attn.indexer.wk.weight", kR},
        {"mlp.experts.7.gate_proj.weight_scale_inv", kE}}},
      {"deepseek_v4",
       "layers.3.",
       {{"attn.wq_a.weight", kA},
        {"attn.wkv.weight", kA},
        {"attn.wo_b.weight", kA},
        {"ffn.gate.bias", kR},
        {"ffn.experts.7.w1.scale", kE},
        {"ffn.shared_experts.w2.weight", kS}}},
      {"glm4_moe", "model.layers.3.", {{"self_attn.q_proj.bias", kA}, {"mlp.gate.e_score_correction_bias", kR}}},
      {"glm_moe_dsa", "model.layers.3.", {{"self_attn.q_a_proj.weight", kA}, {"mlp.shared_experts.up_proj.weight", kS}}},
      {"gpt_oss",
       "model.layers.3.",
       {{"self_attn.q_proj.weight", kA},
        {"mlp.router.weight", kR},
        {"mlp.router.bias", kR},
        {"mlp.experts.gate_up_proj_blocks", kE},
        {"mlp.experts.gate_up_proj", kE},
        {"mlp.experts.down_proj_bias", kE},
        {"mlp.experts.7.gate_proj.weight", kE}}},
      {"minimax_m2",
       "model.layers.3.",
       {{"block_sparse_moe.experts.7.w1.weight_scale_inv", kE},
        {"block_sparse_moe.gate.weight", kR},
        {"block_sparse_moe.e_score_correction_bias", kR}}},
      {"llama4_text",
       "language_model.model.layers.3.",
       {{"self_attn.q_proj.weight", kA},
        {"feed_forward.experts.gate_up_proj", kE},
        {"feed_forward.experts.7.up_proj.weight", kE},
        {"feed_forward.router.weight", kR},
        {"feed_forward.shared_expert.up_proj.weight", kS},
        {"feed_forward.up_proj.weight", kM}}},
      {"kimi_k2", "language_model.model.layers.3.", {{"mlp.experts.7.gate_proj.weight_packed", kE}, {"self_attn.q_b_proj.weight", kA}}},
      {"hunyuan_v1_moe",
       "model.layers.3.",
       {{"mlp.gate.wg.weight", kR}, {"mlp.shared_mlp.up_proj.weight", kS}, {"self_attn.query_layernorm.weight", Role::kNorms}}},
      {"ernie4_5_moe",
       "model.layers.3.",
       {{"mlp.moe_statics.e_score_correction_bias", kR}, {"mlp.experts.7.up_proj.weight", kE}, {"mlp.gate.weight", kR}}},
      {"gemma4_text",
       "model.language_model.layers.3.",
       {{"experts.gate_up_proj", kE},
        {"experts.7.down_proj.weight", kE},
        {"router.proj.weight", kR},
        {"router.scale", kR},
        {"mlp.up_proj.weight", kM}}},
      {"granitemoe",
       "model.layers.3.",
       {{"block_sparse_moe.input_linear.weight", kE},
        {"block_sparse_moe.experts.7.gate_proj.weight", kE},
        {"block_sparse_moe.router.layer.weight", kR},
        {"shared_mlp.input_linear.weight", kS}}},
      {"step3p5",
       "model.layers.3.",
       {{"moe.gate_proj.weight", kE},
        {"moe.experts.7.gate_proj.weight", kE},
        {"moe.gate.weight", kR},
        {"share_expert.up_proj.weight", kS}}},
      {"nemotron_h",
       "backbone.layers.3.",
       {{"mixer.experts.7.up_proj.weight", kE},
        {"mixer.gate.weight", kR},
        {"mixer.shared_experts.up_proj.weight", kS},
        {"mixer.k_proj.weight", kA},
        {"mixer.in_proj.weight", Role::kOther},
        {"norm.weight", Role::kNorms}}},
      {"phi3", "model.layers.3.", {{"self_attn.qkv_proj.weight", kA}, {"mlp.gate_up_proj.weight", kM}}},
  };
  for (const Layer& layer : layers) {
    EXPECT_TRUE(Family::For(Config(layer.model_type)).known()) << layer.model_type;
    for (const auto& [tensor, role] : layer.modules) {
      const ModuleIdentity identity = Identify(layer.model_type, absl::StrCat(layer.prefix, tensor));
      EXPECT_EQ(RoleName(identity.role), RoleName(role)) << layer.model_type << " " << tensor;
      EXPECT_THAT(identity.layer, Optional(3u)) << layer.model_type << " " << tensor;
    }
  }
  EXPECT_EQ(Identify("nemotron_h", "backbone.embeddings.weight").role, Role::kEmbeddings);
  EXPECT_EQ(Identify("deepseek_v4", "embed.weight").role, Role::kEmbeddings);
  EXPECT_EQ(Identify("deepseek_v4", "head.weight").role, Role::kLmHead);
  EXPECT_EQ(Identify("qwen3_vl_moe", "model.visual.pos_embed.weight").role, Role::kEmbeddings);
  EXPECT_EQ(Identify("qwen3_vl_moe", "model.visual.blocks.0.attn.qkv.weight").role, Role::kVision);
  EXPECT_EQ(Identify("gemma4", "model.audio_tower.layers.0.self_attn.q_proj.weight").role, Role::kVision);
}

TEST(FamilyTest, NumbersAndParameters) {
  const ModuleIdentity expert = Identify("laguna", "model.layers.12.mlp.experts.255.down_proj.weight");
  EXPECT_EQ(expert.module, "model.layers.12.mlp.experts.255.down_proj");
  EXPECT_EQ(expert.parameter, "weight");
  EXPECT_THAT(expert.layer, Optional(12u));
  EXPECT_THAT(expert.expert, Optional(255u));
  const ModuleIdentity scale = Identify("deepseek_v3", "model.layers.4.mlp.down_proj.weight_scale_inv");
  EXPECT_EQ(scale.module, "model.layers.4.mlp.down_proj");
  EXPECT_EQ(scale.parameter, "weight_scale_inv");
  const ModuleIdentity stack = Identify("qwen3_moe", "model.layers.4.mlp.experts.gate_up_proj");
  EXPECT_EQ(stack.module, "model.layers.4.mlp.experts.gate_up_proj");
  EXPECT_EQ(stack.parameter, "");
  EXPECT_EQ(stack.role, Role::kRoutedExperts);
  EXPECT_EQ(stack.expert, std::nullopt);
  EXPECT_EQ(Identify("laguna", "lm_head.weight").layer, std::nullopt);
}

TEST(FamilyTest, LayersBehindTheLastAreMtpWhateverTheyHold) {
  for (const char* tensor :
       {"model.layers.61.mlp.experts.3.gate_proj.weight", "model.layers.61.eh_proj.weight", "model.layers.61.enorm.weight",
        "model.layers.61.shared_head.head.weight", "model.layers.61.embed_tokens.weight"}) {
    EXPECT_EQ(Identify("deepseek_v3", tensor).role, Role::kMtp) << tensor;
  }
  EXPECT_EQ(Identify("deepseek_v3", "model.layers.60.mlp.experts.3.gate_proj.weight").role, Role::kRoutedExperts);
  EXPECT_EQ(Identify("deepseek_v3", "model.layers.61.mlp.experts.3.gate_proj.weight").fused_set, "model.layers.61.mlp.experts.3");
  const ModuleIdentity rooted = Identify("new_model", "mtp.layers.0.mlp.experts.3.gate_proj.weight");
  EXPECT_EQ(rooted.role, Role::kMtp);
  EXPECT_EQ(rooted.fused_set, "mtp.layers.0.mlp.experts.3");
}

TEST(FamilyTest, NamesThatTransformersGives) {
  EXPECT_EQ(Identify("laguna", "model.layers.1.mlp.shared_expert.up_proj.weight").transformers_name,
            "model.layers.1.mlp.shared_experts.up_proj");
  EXPECT_EQ(Identify("laguna", "model.layers.1.mlp.gate.weight").transformers_name, "");
  EXPECT_EQ(Identify("qwen2_moe", "model.layers.1.mlp.shared_expert.up_proj.weight").transformers_name, "");
  EXPECT_EQ(Identify("mixtral", "model.layers.1.block_sparse_moe.gate.weight").transformers_name, "model.layers.1.mlp.gate");
  EXPECT_EQ(Identify("phimoe", "model.layers.1.block_sparse_moe.gate.weight").transformers_name, "model.layers.1.mlp.router");
  EXPECT_EQ(Identify("nemotron_h", "backbone.layers.1.mixer.in_proj.weight").transformers_name, "model.layers.1.mixer.in_proj");
  EXPECT_EQ(Identify("granitemoe", "model.layers.1.block_sparse_moe.router.layer.weight").transformers_name,
            "model.layers.1.block_sparse_moe.router");
  EXPECT_EQ(Identify("deepseek_v4", "layers.1.ffn.shared_experts.w1.weight").transformers_name, "layers.1.mlp.shared_experts.gate_proj");
}

TEST(FamilyTest, OddNamesAreOther) {
  for (const char* tensor :
       {"", ".", "weight", "model.layers.", "model.layers.x.mlp.gate_proj.weight", "model.layers.99999999999.mlp.gate_proj.weight",
        "model.layers.-1.mlp.gate_proj.weight", "model.layers.1.mlp.experts.99999999999.gate_proj.weight",
        "model.layers.1.mlp.experts..gate_proj.weight", "model.layers.1.mlp.experts.1x.gate_proj.weight", "model.layers.1.weight",
        "xmodel.layers.1.mlp.gate_proj.weight"}) {
    const ModuleIdentity identity = Identify("laguna", tensor);
    EXPECT_EQ(RoleName(identity.role), "other") << tensor;
    EXPECT_EQ(identity.fused_set, "") << tensor;
  }
}

TEST(FamilyTest, UsualNamesOfUnknownTypesWhereverTheyStand) {
  const Expected cases[] = {
      {"new", "transformer.wte.weight", Role::kEmbeddings},
      {"new", "wpe.weight", Role::kEmbeddings},
      {"new", "shared.weight", Role::kEmbeddings},
      {"new", "model.shared.weight", Role::kEmbeddings},
      {"new", "encoder.block.0.mlp.shared.weight", Role::kOther},
      {"new", "model.decoder.embed_positions.weight", Role::kEmbeddings},
      {"new", "gpt_neox.embed_in.weight", Role::kEmbeddings},
      {"new", "embeddings.token_type_embeddings.weight", Role::kEmbeddings},
      {"new", "transformer.embedding.word_embeddings.weight", Role::kEmbeddings},
      {"new", "class_embedding.weight", Role::kEmbeddings},
      {"new", "model.pos_embed.weight", Role::kEmbeddings},
      {"new", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", Role::kEmbeddings},
      {"new", "embed_out.weight", Role::kLmHead},
      {"new", "transformer.output_layer.weight", Role::kLmHead},
      {"new", "output.weight", Role::kLmHead},
      {"new", "transformer.h.0.attn.output.weight", Role::kOther},
      {"new", "transformer.blocks.0.ffn.router.layer.weight", Role::kRouter},
      {"new", "model.layers.0.mlp.router.classifier.weight", Role::kRouter},
      {"new", "model.layers.0.mlp.router.router_mlp.fc1.weight", Role::kRouter},
      {"new", "model.layers.0.block.gate.weight", Role::kRouter},
      {"new", "model.layers.0.moe_router.weight", Role::kRouter},
      {"new", "encoder.layers.3.moe.wg.weight", Role::kRouter},
      {"new", "model.layers.0.feed_forward.gate_proj.weight", Role::kMlp, "model.layers.0.feed_forward.gate_up"},
      {"new", "transformer.h.0.attn.k_proj.weight", Role::kAttention, "transformer.h.0.attn.qkv"},
      {"new", "transformer.h.0.mlp.gate_proj.weight", Role::kMlp, "transformer.h.0.mlp.gate_up"},
      {"new", "transformer.h.0.ffn.experts.3.w3.weight", Role::kRoutedExperts, "transformer.h.0.ffn.experts.3"},
      {"new", "transformer.h.0.ffn.experts.3.out.weight", Role::kRoutedExperts, "transformer.h.0.ffn.experts.3"},
      {"new", "transformer.h.0.ffn.experts.mlp.w1", Role::kRoutedExperts, "transformer.h.0.ffn.experts.mlp"},
      {"new", "transformer.h.0.ffn.shared_expert.w1.weight", Role::kSharedExperts, "transformer.h.0.ffn.shared_expert"},
      {"new", "transformer.h.0.ln_1.weight", Role::kOther},
      {"new", "model.layers.0.linear_attn.in_proj_b.weight", Role::kOther, "model.layers.0.linear_attn.in_proj_ba"},
      // Of types that somebody described, only what was described.
      {"llama", "transformer.wte.weight", Role::kOther},
      {"llama", "model.layers.0.block.gate.weight", Role::kOther},
  };
  for (const Expected& expected : cases) {
    const ModuleIdentity identity = Identify(expected.model_type, expected.tensor);
    EXPECT_EQ(RoleName(identity.role), RoleName(expected.role)) << expected.tensor;
    EXPECT_EQ(identity.fused_set, expected.fused_set) << expected.tensor;
  }
  const ModuleIdentity expert = Identify("new", "transformer.h.0.ffn.experts.3.w3.weight");
  EXPECT_EQ(expert.scale_set, "transformer.h.0.ffn.experts.3.w13");
  EXPECT_THAT(expert.expert, Optional(3u));
  EXPECT_EQ(Identify("new", "transformer.h.0.ffn.experts.mlp.w1").expert, std::nullopt);
}

TEST(FamilyTest, TypesThatStoreLinearsTransposed) {
  for (const char* type : {"gpt2", "openai-gpt", "imagegpt", "jais"}) EXPECT_TRUE(Family::For(Config(type)).transposed_linears()) << type;
  for (const char* type : {"gpt_bigcode", "gpt_neox", "llama", "new"}) EXPECT_FALSE(Family::For(Config(type)).transposed_linears()) << type;
  EXPECT_EQ(Identify("gpt2", "transformer.wte.weight").role, Role::kEmbeddings);
  EXPECT_EQ(Identify("gpt2", "h.0.attn.c_attn.weight").role, Role::kOther);
}

// "mlp.gate [8,64], conv1d [64,1,4], shared_expert_gate [1,64], 1-D weights": roles that are never quantized by default
TEST(FamilyCases, RoutersAreRecognisedInEveryFamily) {
  for (const std::string& type : Family::KnownModelTypes()) {
    const std::string name = type == "mixtral" || type == "minimax_m2" ? "block_sparse_moe.gate" : "mlp.gate";
    const ModuleIdentity identity = Identify(type, absl::StrCat("model.layers.1.", name, ".weight"));
    EXPECT_THAT(identity.role, testing::AnyOf(Role::kRouter, Role::kOther)) << type;
  }
  for (const char* type : {"laguna", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe", "new_model"}) {
    EXPECT_EQ(Identify(type, "model.layers.1.mlp.gate.weight").role, Role::kRouter) << type;
  }
  EXPECT_EQ(Identify("new_model", "model.layers.1.mlp.shared_expert_gate.weight").role, Role::kRouter);
  EXPECT_EQ(Identify("new_model", "model.layers.1.linear_attn.conv1d.weight").role, Role::kOther);
}

// "tiny Mixtral with w1/w2/w3": names kept; the three are one set
TEST(FamilyCases, MixtralExpertsAreOneSetWithTheirOwnNames) {
  std::set<std::string> sets;
  for (const char* name : {"w1", "w2", "w3"}) {
    const ModuleIdentity identity = Identify("mixtral", absl::StrCat("model.layers.0.block_sparse_moe.experts.2.", name, ".weight"));
    EXPECT_EQ(identity.module, absl::StrCat("model.layers.0.block_sparse_moe.experts.2.", name));
    sets.insert(identity.fused_set);
  }
  EXPECT_THAT(sets, testing::ElementsAre("model.layers.0.block_sparse_moe.experts.2"));
}

TEST(FamilyTest, TrainedCheckpointHasTheseCounts) {
  QUERN_ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open("tests/data/laguna-micro"));
  const Family& family = Family::For(checkpoint.config());
  std::map<std::string, int> counts;
  for (const TensorLocation& location : checkpoint.tensors()) {
    ++counts[std::string(RoleName(family.Identify(location.info->name, checkpoint.config()).role))];
  }
  const std::map<std::string, int> expected = {{"attention", 16},    {"embeddings", 1}, {"lm_head", 1},         {"mlp", 3},
                                               {"norms", 17},        {"other", 4},      {"routed_experts", 72}, {"router", 6},
                                               {"shared_experts", 9}};
  EXPECT_EQ(counts, expected);
}

TEST(FamilyTest, EverySyntheticWeightHasARole) {
  for (const char* name : {"laguna", "qwen3_moe", "mixtral", "llama"}) {
    SyntheticOptions options;
    options.family = name;
    options.layers = 2;
    options.hidden = 64;
    options.intermediate = 32;
    options.vocab = 32;
    if (options.family != "llama") options.experts = 4;
    QUERN_ASSERT_OK_AND_ASSIGN(const SyntheticModel model, DescribeSynthetic(options));
    QUERN_ASSERT_OK_AND_ASSIGN(const ModelConfig config, ParseModelConfig(model.config, "config.json"));
    const Family& family = Family::For(config);
    EXPECT_EQ(family.name(), name);
    for (const SyntheticTensor& tensor : model.tensors) {
      const ModuleIdentity identity = family.Identify(tensor.name, config);
      EXPECT_EQ(identity.role == Role::kOther, absl::StrContains(tensor.name, "g_proj")) << tensor.name;
    }
  }
}

}  // namespace
}  // namespace quern::checkpoint
