#include "checkpoint/family_table.h"

namespace quern::checkpoint {
namespace {

using Holds = ExpertStack::Holds;
using Form = ExpertStack::Form;
using Modules = absl::Span<const ModuleRule>;
using Stacks = absl::Span<const StackRule>;

// ---- Modules that several families share. Norms, embeddings and lm_head need no rule: see family.cc.

constexpr ModuleRule kAttention[] = {
    {"self_attn.q_proj", Role::kAttention, "self_attn.qkv"},
    {"self_attn.k_proj", Role::kAttention, "self_attn.qkv"},
    {"self_attn.v_proj", Role::kAttention, "self_attn.qkv"},
    {"self_attn.qkv_proj", Role::kAttention},
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

// DeepSeek's sparse attention. Engines keep the indexer's key and weights as one plain matrix, so these two are like a router: what
// chooses.
constexpr ModuleRule kIndexer[] = {
    {"self_attn.indexer.wq_b", Role::kOther},
    {"self_attn.indexer.wk", Role::kRouter},
    {"self_attn.indexer.weights_proj", Role::kRouter},
};

// Gated delta nets. Qwen3-Next has qkvz and ba in one tensor each, Qwen3.5 in two, which engines fuse.
constexpr ModuleRule kLinearAttention[] = {
    {"linear_attn.in_proj_qkvz", Role::kAttention},
    {"linear_attn.in_proj_qkv", Role::kAttention, "linear_attn.in_proj_qkvz"},
    {"linear_attn.in_proj_z", Role::kAttention, "linear_attn.in_proj_qkvz"},
    {"linear_attn.in_proj_ba", Role::kOther},
    {"linear_attn.in_proj_b", Role::kOther, "linear_attn.in_proj_ba"},
    {"linear_attn.in_proj_a", Role::kOther, "linear_attn.in_proj_ba"},
    {"linear_attn.out_proj", Role::kAttention},
};

constexpr ModuleRule kMlp[] = {
    {"mlp.gate_proj", Role::kMlp, "mlp.gate_up"},
    {"mlp.up_proj", Role::kMlp, "mlp.gate_up"},
    {"mlp.gate_up_proj", Role::kMlp},
    {"mlp.down_proj", Role::kMlp},
};

constexpr ModuleRule kFeedForward[] = {
    {"feed_forward.gate_proj", Role::kMlp, "feed_forward.gate_up"},
    {"feed_forward.up_proj", Role::kMlp, "feed_forward.gate_up"},
    {"feed_forward.down_proj", Role::kMlp},
};

constexpr ModuleRule kExperts[] = {
    {"mlp.experts.#.gate_proj", Role::kRoutedExperts, "mlp.experts.#.gate_up", "mlp.experts.#"},
    {"mlp.experts.#.up_proj", Role::kRoutedExperts, "mlp.experts.#.gate_up", "mlp.experts.#"},
    {"mlp.experts.#.down_proj", Role::kRoutedExperts, "", "mlp.experts.#"},
    {"mlp.experts.gate_up_proj", Role::kRoutedExperts, "", "mlp.experts"},
    {"mlp.experts.down_proj", Role::kRoutedExperts, "", "mlp.experts"},
    {"mlp.gate", Role::kRouter},
};

// Laguna and others put the router's correction bias beside the experts.
constexpr ModuleRule kExpertsBias[] = {{"mlp.experts", Role::kRouter}};

constexpr ModuleRule kSharedExpert[] = {
    {"mlp.shared_expert.gate_proj", Role::kSharedExperts, "mlp.shared_expert.gate_up", "mlp.shared_expert"},
    {"mlp.shared_expert.up_proj", Role::kSharedExperts, "mlp.shared_expert.gate_up", "mlp.shared_expert"},
    {"mlp.shared_expert.down_proj", Role::kSharedExperts, "", "mlp.shared_expert"},
    {"mlp.shared_expert_gate", Role::kRouter},
};

constexpr ModuleRule kSharedExperts[] = {
    {"mlp.shared_experts.gate_proj", Role::kSharedExperts, "mlp.shared_experts.gate_up", "mlp.shared_experts"},
    {"mlp.shared_experts.up_proj", Role::kSharedExperts, "mlp.shared_experts.gate_up", "mlp.shared_experts"},
    {"mlp.shared_experts.down_proj", Role::kSharedExperts, "", "mlp.shared_experts"},
};

// w1 is the gate, w3 up, w2 down. transformers calls the block "mlp" when it saves anew.
constexpr ModuleRule kBlockSparseExperts[] = {
    {"block_sparse_moe.experts.#.w1", Role::kRoutedExperts, "block_sparse_moe.experts.#.w13", "block_sparse_moe.experts.#"},
    {"block_sparse_moe.experts.#.w3", Role::kRoutedExperts, "block_sparse_moe.experts.#.w13", "block_sparse_moe.experts.#"},
    {"block_sparse_moe.experts.#.w2", Role::kRoutedExperts, "", "block_sparse_moe.experts.#"},
    {"block_sparse_moe.experts.gate_up_proj", Role::kRoutedExperts, "", "block_sparse_moe.experts"},
    {"block_sparse_moe.experts.down_proj", Role::kRoutedExperts, "", "block_sparse_moe.experts"},
    {"block_sparse_moe.gate", Role::kRouter},
    {"block_sparse_moe", Role::kRouter},  // its e_score_correction_bias
    {"mlp.experts.#.w1", Role::kRoutedExperts, "mlp.experts.#.w13", "mlp.experts.#"},
    {"mlp.experts.#.w3", Role::kRoutedExperts, "mlp.experts.#.w13", "mlp.experts.#"},
    {"mlp.experts.#.w2", Role::kRoutedExperts, "", "mlp.experts.#"},
    {"mlp.experts.gate_up_proj", Role::kRoutedExperts, "", "mlp.experts"},
    {"mlp.experts.down_proj", Role::kRoutedExperts, "", "mlp.experts"},
    {"mlp.gate", Role::kRouter},
    {"mlp.router", Role::kRouter},
    {"mlp", Role::kRouter},
};

// ---- Modules of one family.

constexpr ModuleRule kLlama4[] = {
    {"feed_forward.experts.#.gate_proj", Role::kRoutedExperts, "feed_forward.experts.#.gate_up", "feed_forward.experts.#"},
    {"feed_forward.experts.#.up_proj", Role::kRoutedExperts, "feed_forward.experts.#.gate_up", "feed_forward.experts.#"},
    {"feed_forward.experts.#.down_proj", Role::kRoutedExperts, "", "feed_forward.experts.#"},
    {"feed_forward.experts.gate_up_proj", Role::kRoutedExperts, "", "feed_forward.experts"},
    {"feed_forward.experts.down_proj", Role::kRoutedExperts, "", "feed_forward.experts"},
    {"feed_forward.router", Role::kRouter},
    {"feed_forward.shared_expert.gate_proj", Role::kSharedExperts, "feed_forward.shared_expert.gate_up", "feed_forward.shared_expert"},
    {"feed_forward.shared_expert.up_proj", Role::kSharedExperts, "feed_forward.shared_expert.gate_up", "feed_forward.shared_expert"},
    {"feed_forward.shared_expert.down_proj", Role::kSharedExperts, "", "feed_forward.shared_expert"},
};

constexpr ModuleRule kGptOss[] = {
    {"mlp.router", Role::kRouter},
    {"mlp.experts.gate_up_proj_blocks", Role::kRoutedExperts, "", "mlp.experts"},
    {"mlp.experts.gate_up_proj_scales", Role::kRoutedExperts, "", "mlp.experts"},
    {"mlp.experts.gate_up_proj_bias", Role::kRoutedExperts, "", "mlp.experts"},
    {"mlp.experts.down_proj_blocks", Role::kRoutedExperts, "", "mlp.experts"},
    {"mlp.experts.down_proj_scales", Role::kRoutedExperts, "", "mlp.experts"},
    {"mlp.experts.down_proj_bias", Role::kRoutedExperts, "", "mlp.experts"},
};

constexpr ModuleRule kDeepseekV4[] = {
    {"ffn.experts.#.w1", Role::kRoutedExperts, "ffn.experts.#.w13", "ffn.experts.#"},
    {"ffn.experts.#.w3", Role::kRoutedExperts, "ffn.experts.#.w13", "ffn.experts.#"},
    {"ffn.experts.#.w2", Role::kRoutedExperts, "", "ffn.experts.#"},
    {"ffn.shared_experts.w1", Role::kSharedExperts, "ffn.shared_experts.w13", "ffn.shared_experts"},
    {"ffn.shared_experts.w3", Role::kSharedExperts, "ffn.shared_experts.w13", "ffn.shared_experts"},
    {"ffn.shared_experts.w2", Role::kSharedExperts, "", "ffn.shared_experts"},
    {"ffn.gate", Role::kRouter},
    {"attn.wq_a", Role::kAttention, "attn.wqkv_a"},
    {"attn.wkv", Role::kAttention, "attn.wqkv_a"},
    {"attn.wq_b", Role::kAttention},
    {"attn.wo_a", Role::kAttention},
    {"attn.wo_b", Role::kAttention},
    {"attn.compressor.wkv", Role::kOther, "attn.compressor.wkv_wgate"},
    {"attn.compressor.wgate", Role::kOther, "attn.compressor.wkv_wgate"},
    {"attn.indexer.wq_b", Role::kOther},
    {"attn.indexer.weights_proj", Role::kRouter},
    {"attn.indexer.compressor.wkv", Role::kOther, "attn.indexer.compressor.wkv_wgate"},
    {"attn.indexer.compressor.wgate", Role::kOther, "attn.indexer.compressor.wkv_wgate"},
};

constexpr ModuleRule kHunyuan[] = {
    {"mlp.gate.wg", Role::kRouter},
    {"mlp.router.gate", Role::kRouter},
    {"mlp", Role::kRouter},  // its expert_bias
    {"mlp.shared_mlp.gate_proj", Role::kSharedExperts, "mlp.shared_mlp.gate_up", "mlp.shared_mlp"},
    {"mlp.shared_mlp.up_proj", Role::kSharedExperts, "mlp.shared_mlp.gate_up", "mlp.shared_mlp"},
    {"mlp.shared_mlp.down_proj", Role::kSharedExperts, "", "mlp.shared_mlp"},
};

constexpr ModuleRule kErnie[] = {{"mlp.moe_statics", Role::kRouter}};

constexpr ModuleRule kGemma4[] = {
    {"experts.#.gate_proj", Role::kRoutedExperts, "experts.#.gate_up", "experts.#"},
    {"experts.#.up_proj", Role::kRoutedExperts, "experts.#.gate_up", "experts.#"},
    {"experts.#.down_proj", Role::kRoutedExperts, "", "experts.#"},
    {"experts.gate_up_proj", Role::kRoutedExperts, "", "experts"},
    {"experts.down_proj", Role::kRoutedExperts, "", "experts"},
    {"router.proj", Role::kRouter},
    {"router", Role::kRouter},  // its scales
};

constexpr ModuleRule kGraniteMoe[] = {
    {"block_sparse_moe.experts.#.gate_proj", Role::kRoutedExperts, "block_sparse_moe.experts.#.gate_up", "block_sparse_moe.experts.#"},
    {"block_sparse_moe.experts.#.up_proj", Role::kRoutedExperts, "block_sparse_moe.experts.#.gate_up", "block_sparse_moe.experts.#"},
    {"block_sparse_moe.experts.#.down_proj", Role::kRoutedExperts, "", "block_sparse_moe.experts.#"},
    {"block_sparse_moe.input_linear", Role::kRoutedExperts, "", "block_sparse_moe.experts"},
    {"block_sparse_moe.output_linear", Role::kRoutedExperts, "", "block_sparse_moe.experts"},
    {"block_sparse_moe.experts.gate_up_proj", Role::kRoutedExperts, "", "block_sparse_moe.experts"},
    {"block_sparse_moe.experts.down_proj", Role::kRoutedExperts, "", "block_sparse_moe.experts"},
    {"block_sparse_moe.router.layer", Role::kRouter},
    {"block_sparse_moe.router", Role::kRouter},
    {"shared_mlp.input_linear", Role::kSharedExperts, "", "shared_mlp"},
    {"shared_mlp.output_linear", Role::kSharedExperts, "", "shared_mlp"},
};

constexpr ModuleRule kStep[] = {
    {"moe.experts.#.gate_proj", Role::kRoutedExperts, "moe.experts.#.gate_up", "moe.experts.#"},
    {"moe.experts.#.up_proj", Role::kRoutedExperts, "moe.experts.#.gate_up", "moe.experts.#"},
    {"moe.experts.#.down_proj", Role::kRoutedExperts, "", "moe.experts.#"},
    {"moe.gate_proj", Role::kRoutedExperts, "", "moe.experts"},
    {"moe.up_proj", Role::kRoutedExperts, "", "moe.experts"},
    {"moe.down_proj", Role::kRoutedExperts, "", "moe.experts"},
    {"moe.gate", Role::kRouter},
    {"moe", Role::kRouter},  // its router_bias
    {"share_expert.gate_proj", Role::kSharedExperts, "share_expert.gate_up", "share_expert"},
    {"share_expert.up_proj", Role::kSharedExperts, "share_expert.gate_up", "share_expert"},
    {"share_expert.down_proj", Role::kSharedExperts, "", "share_expert"},
};

// Layers are mamba, attention, dense or mixture, all called "mixer". Experts have no gate.
constexpr ModuleRule kNemotronH[] = {
    {"mixer.experts.#.up_proj", Role::kRoutedExperts, "", "mixer.experts.#"},
    {"mixer.experts.#.down_proj", Role::kRoutedExperts, "", "mixer.experts.#"},
    {"mixer.experts.up_proj", Role::kRoutedExperts, "", "mixer.experts"},
    {"mixer.experts.down_proj", Role::kRoutedExperts, "", "mixer.experts"},
    {"mixer.gate", Role::kRouter},
    {"mixer.shared_experts.up_proj", Role::kSharedExperts, "", "mixer.shared_experts"},
    {"mixer.shared_experts.down_proj", Role::kSharedExperts, "", "mixer.shared_experts"},
    {"mixer.q_proj", Role::kAttention, "mixer.qkv"},
    {"mixer.k_proj", Role::kAttention, "mixer.qkv"},
    {"mixer.v_proj", Role::kAttention, "mixer.qkv"},
    {"mixer.o_proj", Role::kAttention},
    {"mixer.up_proj", Role::kMlp},
    {"mixer.down_proj", Role::kMlp},
};

// ---- Usual names, wherever they stand. What is wrongly taken for an embedding or a router stays as it is; what is wrongly taken for a
// linear module makes a result that no engine loads.

constexpr NameRule kUsualNames[] = {
    {"*router*", Role::kRouter},
    {"router.*", Role::kRouter},
    {"router.*.*", Role::kRouter},
    {"gate", Role::kRouter},
    {"gate.wg", Role::kRouter},
    {"wg", Role::kRouter},
    {"shared_expert_gate", Role::kRouter},
    {"lm_head", Role::kLmHead},
    {"embed_out", Role::kLmHead},
    {"output_layer", Role::kLmHead},
    {"^output", Role::kLmHead},
    {"^model.output", Role::kLmHead},
    {"wte", Role::kEmbeddings},
    {"wpe", Role::kEmbeddings},
    {"*embed", Role::kEmbeddings},
    {"*embeds", Role::kEmbeddings},
    {"*embedding", Role::kEmbeddings},
    {"*embeddings", Role::kEmbeddings},
    {"embed_*", Role::kEmbeddings},
    {"emb", Role::kEmbeddings},
    {"*_emb", Role::kEmbeddings},
    {"^shared", Role::kEmbeddings},  // of T5
    {"^model.shared", Role::kEmbeddings},
    {"*relative_attention_bias", Role::kEmbeddings},
    {"shared_expert*.gate_proj", Role::kSharedExperts, "gate_up"},
    {"shared_expert*.up_proj", Role::kSharedExperts, "gate_up"},
    {"shared_expert*.w1", Role::kSharedExperts, "w13"},
    {"shared_expert*.w3", Role::kSharedExperts, "w13"},
    {"shared_expert*.*", Role::kSharedExperts},
    {"experts.#.gate_proj", Role::kRoutedExperts, "gate_up"},
    {"experts.#.up_proj", Role::kRoutedExperts, "gate_up"},
    {"experts.#.w1", Role::kRoutedExperts, "w13"},
    {"experts.#.w3", Role::kRoutedExperts, "w13"},
    {"experts.#.*", Role::kRoutedExperts},
    {"experts.#.*.*", Role::kRoutedExperts},
    {"experts.*", Role::kRoutedExperts},
    {"experts.*.*", Role::kRoutedExperts},
    {"q_proj", Role::kAttention, "qkv"},
    {"k_proj", Role::kAttention, "qkv"},
    {"v_proj", Role::kAttention, "qkv"},
    {"o_proj", Role::kAttention},
    {"gate_proj", Role::kMlp, "gate_up"},
    {"up_proj", Role::kMlp, "gate_up"},
    {"down_proj", Role::kMlp},
};

// ---- Stacks of experts.

// What transformers saves when it does not write experts one by one.
constexpr StackRule kStacks[] = {
    {"mlp.experts.gate_up_proj", Holds::kGateUp, false, false, false, Form::kValues, "mlp.experts"},
    {"mlp.experts.down_proj", Holds::kDown, false, false, false, Form::kValues, "mlp.experts"},
};

constexpr StackRule kTransposedStacks[] = {
    {"mlp.experts.gate_up_proj", Holds::kGateUp, true, false, false, Form::kValues, "mlp.experts"},
    {"mlp.experts.down_proj", Holds::kDown, true, false, false, Form::kValues, "mlp.experts"},
};

constexpr StackRule kBlockSparseStacks[] = {
    {"block_sparse_moe.experts.gate_up_proj", Holds::kGateUp, false, false, false, Form::kValues, "block_sparse_moe.experts"},
    {"block_sparse_moe.experts.down_proj", Holds::kDown, false, false, false, Form::kValues, "block_sparse_moe.experts"},
};

constexpr StackRule kLlama4Stacks[] = {
    {"feed_forward.experts.gate_up_proj", Holds::kGateUp, true, true, false, Form::kValues, "feed_forward.experts"},
    {"feed_forward.experts.down_proj", Holds::kDown, true, true, false, Form::kValues, "feed_forward.experts"},
};

constexpr StackRule kGptOssStacks[] = {
    {"mlp.experts.gate_up_proj", Holds::kGateUp, true, true, true, Form::kValues, "mlp.experts"},
    {"mlp.experts.down_proj", Holds::kDown, true, true, false, Form::kValues, "mlp.experts"},
    {"mlp.experts.gate_up_proj_blocks", Holds::kGateUp, false, true, true, Form::kBlocks, "mlp.experts"},
    {"mlp.experts.down_proj_blocks", Holds::kDown, false, true, false, Form::kBlocks, "mlp.experts"},
    {"mlp.experts.gate_up_proj_scales", Holds::kGateUp, false, true, true, Form::kScales, "mlp.experts"},
    {"mlp.experts.down_proj_scales", Holds::kDown, false, true, false, Form::kScales, "mlp.experts"},
    {"mlp.experts.gate_up_proj_bias", Holds::kGateUp, false, true, true, Form::kBias, "mlp.experts"},
    {"mlp.experts.down_proj_bias", Holds::kDown, false, true, false, Form::kBias, "mlp.experts"},
};

constexpr StackRule kGemma4Stacks[] = {
    {"experts.gate_up_proj", Holds::kGateUp, false, false, false, Form::kValues, "experts"},
    {"experts.down_proj", Holds::kDown, false, false, false, Form::kValues, "experts"},
};

constexpr StackRule kGraniteStacks[] = {
    {"block_sparse_moe.input_linear", Holds::kGateUp, false, true, false, Form::kValues, "block_sparse_moe.experts", ".weight"},
    {"block_sparse_moe.output_linear", Holds::kDown, false, true, false, Form::kValues, "block_sparse_moe.experts", ".weight"},
};

constexpr StackRule kStepStacks[] = {
    {"moe.gate_proj", Holds::kGate, false, true, false, Form::kValues, "moe.experts", ".weight"},
    {"moe.up_proj", Holds::kUp, false, true, false, Form::kValues, "moe.experts", ".weight"},
    {"moe.down_proj", Holds::kDown, false, true, false, Form::kValues, "moe.experts", ".weight"},
};

constexpr StackRule kNemotronHStacks[] = {
    {"mixer.experts.up_proj", Holds::kUp, false, true, false, Form::kValues, "mixer.experts"},
    {"mixer.experts.down_proj", Holds::kDown, false, true, false, Form::kValues, "mixer.experts"},
};

// ---- What transformers renames.

constexpr Rename kLagunaRenames[] = {{".mlp.shared_expert.", ".mlp.shared_experts."}};
constexpr Rename kBlockSparseRenames[] = {{".block_sparse_moe.", ".mlp."}};
constexpr Rename kPhimoeRenames[] = {{".block_sparse_moe.", ".mlp."}, {".mlp.gate.", ".mlp.router."}};
constexpr Rename kGraniteMoeRenames[] = {{".block_sparse_moe.router.layer.", ".block_sparse_moe.router."}};
constexpr Rename kNemotronHRenames[] = {{".backbone.", ".model."}};
constexpr Rename kHyV3Renames[] = {{".mlp.shared_mlp.", ".mlp.shared_experts."}, {".mlp.router.gate.", ".mlp.gate."}};
constexpr Rename kStepRenames[] = {{".share_expert.", ".mlp.shared_experts."}, {".moe.gate.", ".mlp.gate."}};
constexpr Rename kDeepseekV4Renames[] = {
    {".attn.", ".self_attn."},
    {".ffn.", ".mlp."},
    {".wq_a.", ".q_a_proj."},
    {".self_attn.wq_b.", ".self_attn.q_b_proj."},
    {".wkv.", ".kv_proj."},
    {".wgate.", ".gate_proj."},
    {".wo_a.", ".o_a_proj."},
    {".wo_b.", ".o_b_proj."},
    {".shared_experts.w1.", ".shared_experts.gate_proj."},
    {".shared_experts.w2.", ".shared_experts.down_proj."},
    {".shared_experts.w3.", ".shared_experts.up_proj."},
};

// ---- Lists of rules. They are tried in order.

constexpr Modules kLagunaModules[] = {kExperts, kSharedExpert, kSharedExperts, kExpertsBias, kAttention, kMlp};
constexpr Modules kDenseModules[] = {kAttention, kMlp};
constexpr Modules kMoeModules[] = {kExperts, kExpertsBias, kAttention, kMlp};
constexpr Modules kSharedMoeModules[] = {kExperts, kSharedExpert, kSharedExperts, kAttention, kMlp};
constexpr Modules kQwenNextModules[] = {kExperts, kSharedExpert, kSharedExperts, kAttention, kLinearAttention, kMlp};
constexpr Modules kMixtralModules[] = {kBlockSparseExperts, kAttention};
constexpr Modules kDeepseekModules[] = {kExperts, kSharedExperts, kExpertsBias, kLatentAttention, kIndexer, kMlp};
constexpr Modules kDeepseekV4Modules[] = {kDeepseekV4};
constexpr Modules kGlmModules[] = {kExperts, kSharedExperts, kExpertsBias, kAttention, kMlp};
constexpr Modules kGptOssModules[] = {kGptOss, kExperts, kAttention};
constexpr Modules kLlama4Modules[] = {kLlama4, kAttention, kFeedForward};
constexpr Modules kHunyuanModules[] = {kHunyuan, kExperts, kSharedExperts, kAttention, kMlp};
constexpr Modules kErnieModules[] = {kErnie, kExperts, kSharedExperts, kAttention, kMlp};
constexpr Modules kGemma4Modules[] = {kGemma4, kAttention, kMlp};
constexpr Modules kGraniteMoeModules[] = {kGraniteMoe, kAttention, kMlp};
constexpr Modules kStepModules[] = {kStep, kAttention, kMlp};
constexpr Modules kNemotronHModules[] = {kNemotronH};
constexpr Modules kGenericModules[] = {kExperts,         kSharedExpert,    kSharedExperts, kExpertsBias, kBlockSparseExperts, kAttention,
                                       kLinearAttention, kLatentAttention, kIndexer,       kMlp,         kFeedForward};

constexpr Stacks kUsualStacks[] = {kStacks};
constexpr Stacks kQwen3VlStacks[] = {kTransposedStacks};
constexpr Stacks kMixtralStacks[] = {kBlockSparseStacks, kStacks};
constexpr Stacks kLlama4AllStacks[] = {kLlama4Stacks};
constexpr Stacks kGptOssAllStacks[] = {kGptOssStacks};
constexpr Stacks kGemma4AllStacks[] = {kGemma4Stacks};
constexpr Stacks kGraniteAllStacks[] = {kGraniteStacks, kBlockSparseStacks};
constexpr Stacks kStepAllStacks[] = {kStepStacks};
constexpr Stacks kNemotronHAllStacks[] = {kNemotronHStacks};

constexpr ExpertNames kUsualProjections;
constexpr ExpertNames kW123 = {"w1", "w3", "w2"};

// ---- Types, as `model_type` spells them; that of the text model where a config has one inside.

constexpr absl::string_view kLagunaTypes[] = {"laguna"};
constexpr absl::string_view kLlamaTypes[] = {"llama",   "mistral", "ministral", "ministral3", "smollm3", "arcee",  "seed_oss",
                                             "granite", "glm4",    "ernie4_5",  "exaone4",    "cohere",  "cohere2"};
constexpr absl::string_view kQwen2Types[] = {"qwen2", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_vl", "qwen2_5_vl"};
constexpr absl::string_view kQwen3Types[] = {"qwen3", "qwen3_vl_text"};
constexpr absl::string_view kGemmaTypes[] = {"gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text"};
constexpr absl::string_view kOlmoTypes[] = {"olmo", "olmo2", "olmo3"};
constexpr absl::string_view kPhi3Types[] = {"phi3", "glm"};
constexpr absl::string_view kQwen2MoeTypes[] = {"qwen2_moe"};
constexpr absl::string_view kQwen3MoeTypes[] = {"qwen3_moe", "qwen3_omni_moe_text", "flex_olmo", "solar_open", "exaone_moe"};
constexpr absl::string_view kOlmoeTypes[] = {"olmoe"};
constexpr absl::string_view kQwen3VlMoeTypes[] = {"qwen3_vl_moe", "qwen3_vl_moe_text"};
constexpr absl::string_view kQwen3NextTypes[] = {"qwen3_next"};
constexpr absl::string_view kQwen35Types[] = {"qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"};
constexpr absl::string_view kMixtralTypes[] = {"mixtral"};
constexpr absl::string_view kPhimoeTypes[] = {"phimoe"};
constexpr absl::string_view kMinimaxTypes[] = {"minimax_m2"};
constexpr absl::string_view kDeepseekTypes[] = {"deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2",
                                                "kimi_k25",    "glm_moe_dsa", "glm4_moe_lite"};
constexpr absl::string_view kDeepseekV4Types[] = {"deepseek_v4"};
constexpr absl::string_view kGlmTypes[] = {"glm4_moe", "glm4v_moe", "glm4v_moe_text", "dots1"};
constexpr absl::string_view kGptOssTypes[] = {"gpt_oss"};
constexpr absl::string_view kLlama4Types[] = {"llama4", "llama4_text"};
constexpr absl::string_view kHunyuanTypes[] = {"hunyuan_v1_moe", "hunyuan_v1_dense", "hunyuan"};
constexpr absl::string_view kHyV3Types[] = {"hy_v3"};
constexpr absl::string_view kErnieTypes[] = {"ernie4_5_moe", "ernie4_5_vl_moe", "ernie4_5_moe_vl"};
constexpr absl::string_view kGemma4Types[] = {"gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"};
constexpr absl::string_view kGraniteMoeTypes[] = {"granitemoe", "granitemoeshared", "granitemoehybrid"};
constexpr absl::string_view kStepTypes[] = {"step3p5", "step3p7", "step3p7_text"};
constexpr absl::string_view kNemotronHTypes[] = {"nemotron_h"};
constexpr absl::string_view kGpt2Types[] = {"gpt2", "openai-gpt", "imagegpt", "jais"};

constexpr char kGptOssNote[] =
    "experts of gpt-oss become modules of their own (experts.E.gate_proj, up_proj, down_proj; the biases stay in one tensor): vLLM 0.33 "
    "loads "
    "gpt-oss in its own MXFP4 only and passes over such modules";

// Multi-token prediction needs no rule: it is whatever lies in layers behind the last one of the config, or below "mtp.".
constexpr FamilyRules kFamilies[] = {
    {"laguna", kLagunaTypes, kLagunaModules, kUsualStacks, kUsualProjections, kLagunaRenames, ""},
    {"llama", kLlamaTypes, kDenseModules, {}, kUsualProjections, {}, ""},
    {"qwen2", kQwen2Types, kDenseModules, {}, kUsualProjections, {}, ""},
    {"qwen3", kQwen3Types, kDenseModules, {}, kUsualProjections, {}, ""},
    {"gemma", kGemmaTypes, kDenseModules, {}, kUsualProjections, {}, ""},
    {"gemma4", kGemma4Types, kGemma4Modules, kGemma4AllStacks, kUsualProjections, {}, "", true},
    {"olmo", kOlmoTypes, kDenseModules, {}, kUsualProjections, {}, ""},
    {"phi3", kPhi3Types, kDenseModules, {}, kUsualProjections, {}, ""},
    {"qwen2_moe", kQwen2MoeTypes, kSharedMoeModules, kUsualStacks, kUsualProjections, {}, ""},
    {"qwen3_moe", kQwen3MoeTypes, kMoeModules, kUsualStacks, kUsualProjections, {}, ""},
    {"qwen3_vl_moe", kQwen3VlMoeTypes, kMoeModules, kQwen3VlStacks, kUsualProjections, {}, "", true},
    {"qwen3_next", kQwen3NextTypes, kQwenNextModules, kUsualStacks, kUsualProjections, {}, ""},
    {"qwen3_5", kQwen35Types, kQwenNextModules, kUsualStacks, kUsualProjections, {}, ""},
    {"olmoe", kOlmoeTypes, kMoeModules, kUsualStacks, kUsualProjections, {}, ""},
    {"mixtral", kMixtralTypes, kMixtralModules, kMixtralStacks, kW123, kBlockSparseRenames, ""},
    {"phimoe", kPhimoeTypes, kMixtralModules, kMixtralStacks, kW123, kPhimoeRenames, ""},
    {"minimax_m2", kMinimaxTypes, kMixtralModules, kMixtralStacks, kW123, kBlockSparseRenames, ""},
    {"deepseek_v3", kDeepseekTypes, kDeepseekModules, kUsualStacks, kUsualProjections, {}, ""},
    {"deepseek_v4", kDeepseekV4Types, kDeepseekV4Modules, {}, kW123, kDeepseekV4Renames, ""},
    {"glm4_moe", kGlmTypes, kGlmModules, kUsualStacks, kUsualProjections, {}, ""},
    {"gpt_oss", kGptOssTypes, kGptOssModules, kGptOssAllStacks, kUsualProjections, {}, kGptOssNote, true},
    {"llama4", kLlama4Types, kLlama4Modules, kLlama4AllStacks, kUsualProjections, {}, "", true},
    {"hunyuan", kHunyuanTypes, kHunyuanModules, kUsualStacks, kUsualProjections, {}, ""},
    {"hy_v3", kHyV3Types, kHunyuanModules, kUsualStacks, kUsualProjections, kHyV3Renames, ""},
    {"ernie4_5", kErnieTypes, kErnieModules, kUsualStacks, kUsualProjections, {}, ""},
    {"granitemoe", kGraniteMoeTypes, kGraniteMoeModules, kGraniteAllStacks, kUsualProjections, kGraniteMoeRenames, "", true},
    {"step3p5", kStepTypes, kStepModules, kStepAllStacks, kUsualProjections, kStepRenames, "", true},
    {"nemotron_h", kNemotronHTypes, kNemotronHModules, kNemotronHAllStacks, kUsualProjections, kNemotronHRenames, ""},
    {"gpt2", kGpt2Types, {}, {}, kUsualProjections, {}, "", false, kUsualNames, true},
};

constexpr FamilyRules kGeneric = {"generic", {}, kGenericModules, {}, kUsualProjections, {}, "", false, kUsualNames};

}  // namespace

absl::Span<const FamilyRules> AllFamilies() { return kFamilies; }
const FamilyRules& GenericFamily() { return kGeneric; }

}  // namespace quern::checkpoint
