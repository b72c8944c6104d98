#include "checkpoint/synthetic.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"

namespace quern::checkpoint {
namespace {

// Bounds that no model comes near: they keep products of dimensions far from 64 bits and the list of tensors in memory.
constexpr uint64_t kMaxDimension = uint64_t{1} << 24;
constexpr uint64_t kMaxTensors = 4'000'000;

// Normal weights of trained models have about the size of their initialisation: fan-in for what reads the residual stream.
double FanIn(uint64_t columns) { return 1.0 / std::sqrt(static_cast<double>(columns)); }
constexpr double kEmbeddingDeviation = 0.02;
constexpr double kCorrectionBiasDeviation = 0.01;

struct Dimensions {
  uint64_t layers, experts, hidden, intermediate, vocab;
  uint64_t head_dim = 0;
  uint64_t units = 0;  // hidden / head_dim: the number of heads that are as wide together as the residual stream
  DType dtype = DType::kBF16;
};

// The largest divisor of `units` that is at most `limit`: heads of keys and values must divide those of queries.
uint64_t KeyValueHeads(uint64_t units, uint64_t limit) {
  for (uint64_t heads = std::max<uint64_t>(limit, 1); heads > 1; --heads) {
    if (units % heads == 0) return heads;
  }
  return 1;
}

absl::StatusOr<Dimensions> MakeDimensions(const SyntheticOptions& options, const Dimensions& full) {
  const auto or_full = [](uint32_t wanted, uint64_t usual) { return wanted == 0 ? usual : wanted; };
  Dimensions d = full;
  d.layers = options.layers;
  d.experts = or_full(options.experts, full.experts);
  d.hidden = or_full(options.hidden, full.hidden);
  d.intermediate = or_full(options.intermediate, full.intermediate);
  d.vocab = or_full(options.vocab, full.vocab);
  d.dtype = options.dtype;
  if (options.layers == 0) return absl::InvalidArgumentError("the number of layers must be at least 1");
  if (full.experts == 0 && options.experts != 0) {
    return absl::InvalidArgumentError(absl::StrCat("family ", options.family, " has no experts"));
  }
  for (const auto& [name, value] : {std::pair<absl::string_view, uint64_t>{"hidden", d.hidden},
                                    {"intermediate", d.intermediate},
                                    {"vocab", d.vocab},
                                    {"experts", d.experts}}) {
    if (value > kMaxDimension) return absl::InvalidArgumentError(absl::StrCat(name, " is ", value, ", more than ", kMaxDimension));
  }
  if (d.layers * (3 * std::max<uint64_t>(d.experts, 1) + 16) > kMaxTensors) {
    return absl::InvalidArgumentError(absl::StrCat(d.layers, " layers of ", d.experts, " experts are more than ", kMaxTensors, " tensors"));
  }
  for (const uint64_t width : {128, 64, 32, 16}) {
    if (d.hidden % width != 0 || d.hidden / width < 4) continue;
    d.head_dim = width;
    d.units = d.hidden / width;
    break;
  }
  if (d.head_dim == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("hidden is ", d.hidden, "; it must be a multiple of 16 and at least 64, to be cut into heads"));
  }
  if (d.dtype != DType::kBF16 && d.dtype != DType::kF16 && d.dtype != DType::kF32) {
    return absl::InvalidArgumentError(absl::StrCat("weights of dtype ", DTypeName(d.dtype), " cannot be made: BF16, F16 or F32"));
  }
  return d;
}

// transformers' name of a dtype.
absl::string_view TorchName(DType dtype) {
  if (dtype == DType::kF32) return "float32";
  return dtype == DType::kF16 ? "float16" : "bfloat16";
}

// Collects tensors in order.
class Builder {
 public:
  explicit Builder(const Dimensions& d) : d_(d) {}

  void Linear(const std::string& module, uint64_t rows, uint64_t columns, double scale = 1.0) {
    Add(module + ".weight", {rows, columns}, "normal", scale * FanIn(columns));
  }
  // What writes to the residual stream is smaller, the more layers add to it.
  void Output(const std::string& module, uint64_t rows, uint64_t columns) {
    Linear(module, rows, columns, 1.0 / std::sqrt(2.0 * static_cast<double>(d_.layers)));
  }
  void Norm(const std::string& module, uint64_t size) { Add(module + ".weight", {size}, "ones", 0); }
  void CorrectionBias(const std::string& name) { Add(name, {d_.experts}, "normal", kCorrectionBiasDeviation); }
  void Embedding() { Add("model.embed_tokens.weight", {d_.vocab, d_.hidden}, "normal", kEmbeddingDeviation); }
  void Head() {
    Norm("model.norm", d_.hidden);
    Linear("lm_head", d_.vocab, d_.hidden);
  }
  void Attention(const std::string& layer, uint64_t heads, uint64_t key_value_heads) {
    const std::string attention = layer + "self_attn.";
    Linear(attention + "q_proj", heads * d_.head_dim, d_.hidden);
    Linear(attention + "k_proj", key_value_heads * d_.head_dim, d_.hidden);
    Linear(attention + "v_proj", key_value_heads * d_.head_dim, d_.hidden);
    Output(attention + "o_proj", d_.hidden, heads * d_.head_dim);
  }
  void HeadNorms(const std::string& layer) {
    Norm(layer + "self_attn.q_norm", d_.head_dim);
    Norm(layer + "self_attn.k_norm", d_.head_dim);
  }
  void LayerNorms(const std::string& layer) {
    Norm(layer + "input_layernorm", d_.hidden);
    Norm(layer + "post_attention_layernorm", d_.hidden);
  }
  // gate, up and down under `module`, or w1, w3 and w2.
  void GatedMlp(const std::string& module, uint64_t intermediate,
                std::array<absl::string_view, 3> names = {"gate_proj", "up_proj", "down_proj"}) {
    Linear(absl::StrCat(module, ".", names[0]), intermediate, d_.hidden);
    Linear(absl::StrCat(module, ".", names[1]), intermediate, d_.hidden);
    Output(absl::StrCat(module, ".", names[2]), d_.hidden, intermediate);
  }
  std::vector<SyntheticTensor> Take() { return std::move(tensors_); }

 private:
  void Add(std::string name, std::vector<uint64_t> shape, absl::string_view distribution, double deviation) {
    tensors_.push_back({std::move(name), d_.dtype, std::move(shape), std::string(distribution), deviation});
  }

  const Dimensions& d_;
  std::vector<SyntheticTensor> tensors_;
};

std::string LayerPrefix(uint64_t layer) { return absl::StrCat("model.layers.", layer, "."); }

// A JSON list of `make(layer)` for every layer.
template <typename Make>
std::string List(uint64_t layers, Make make) {
  std::vector<std::string> values;
  for (uint64_t layer = 0; layer < layers; ++layer) values.push_back(absl::StrCat("    ", make(layer)));
  return absl::StrCat("[\n", absl::StrJoin(values, ",\n"), "\n  ]");
}

// Members in the order of the config's file, which is sorted as transformers writes it.
std::string Config(std::vector<std::pair<std::string, std::string>> members) {
  std::sort(members.begin(), members.end());
  std::vector<std::string> lines;
  for (const auto& [key, value] : members) lines.push_back(absl::StrCat("  \"", key, "\": ", value));
  return absl::StrCat("{\n", absl::StrJoin(lines, ",\n"), "\n}\n");
}

std::string Quoted(absl::string_view text) { return absl::StrCat("\"", text, "\""); }

// Members that all families have.
std::vector<std::pair<std::string, std::string>> CommonMembers(const Dimensions& d, absl::string_view model_type,
                                                               absl::string_view architecture) {
  return {
      {"architectures", absl::StrCat("[\n    ", Quoted(architecture), "\n  ]")},
      {"attention_bias", "false"},
      {"attention_dropout", "0.0"},
      {"bos_token_id", d.vocab > 1 ? "1" : "0"},
      {"dtype", Quoted(TorchName(d.dtype))},
      {"eos_token_id", d.vocab > 2 ? "2" : "0"},
      {"head_dim", absl::StrCat(d.head_dim)},
      {"hidden_act", Quoted("silu")},
      {"hidden_size", absl::StrCat(d.hidden)},
      {"initializer_range", "0.02"},
      {"model_type", Quoted(model_type)},
      {"num_hidden_layers", absl::StrCat(d.layers)},
      {"tie_word_embeddings", "false"},
      {"use_cache", "true"},
      {"vocab_size", absl::StrCat(d.vocab)},
  };
}

void Append(std::vector<std::pair<std::string, std::string>>& members, std::vector<std::pair<std::string, std::string>> more) {
  members.insert(members.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
}

std::string RopeParameters(absl::string_view theta) {
  return absl::StrCat("{\n    \"rope_theta\": ", theta, ",\n    \"rope_type\": \"default\"\n  }");
}

// The sizes of Laguna S 2.1.
SyntheticModel Laguna(const Dimensions& d) {
  const auto full = [](uint64_t layer) { return layer % 4 == 0; };
  // 48 heads in layers of full attention and 72 in the others, at 24 heads' width of the residual stream.
  const auto heads = [&](uint64_t layer) { return (full(layer) ? 2 : 3) * d.units; };
  const uint64_t key_value_heads = KeyValueHeads(d.units, d.units / 3);
  const uint64_t dense_intermediate = 4 * d.hidden;

  Builder builder(d);
  builder.Embedding();
  for (uint64_t layer = 0; layer < d.layers; ++layer) {
    const std::string prefix = LayerPrefix(layer);
    builder.Attention(prefix, heads(layer), key_value_heads);
    builder.Linear(prefix + "self_attn.g_proj", heads(layer), d.hidden);
    builder.HeadNorms(prefix);
    builder.LayerNorms(prefix);
    if (layer == 0) {
      builder.GatedMlp(prefix + "mlp", dense_intermediate);
      continue;
    }
    builder.Linear(prefix + "mlp.gate", d.experts, d.hidden);
    builder.CorrectionBias(prefix + "mlp.experts.e_score_correction_bias");
    for (uint64_t expert = 0; expert < d.experts; ++expert) {
      builder.GatedMlp(absl::StrCat(prefix, "mlp.experts.", expert), d.intermediate);
    }
    builder.GatedMlp(prefix + "mlp.shared_expert", d.intermediate);
  }
  builder.Head();

  auto members = CommonMembers(d, "laguna", "LagunaForCausalLM");
  Append(members,
         {
             {"gating", Quoted("per-head")},
             {"intermediate_size", absl::StrCat(dense_intermediate)},
             {"layer_types", List(d.layers, [&](uint64_t layer) { return Quoted(full(layer) ? "full_attention" : "sliding_attention"); })},
             {"max_position_embeddings", "1048576"},
             {"mlp_layer_types", List(d.layers, [](uint64_t layer) { return Quoted(layer == 0 ? "dense" : "sparse"); })},
             {"mlp_only_layers", "[\n    0\n  ]"},
             {"moe_apply_router_weight_on_input", "false"},
             {"moe_intermediate_size", absl::StrCat(d.intermediate)},
             {"moe_routed_scaling_factor", "2.5"},
             {"moe_router_logit_softcapping", "0.0"},
             {"norm_topk_prob", "true"},
             {"num_attention_heads", absl::StrCat(2 * d.units)},
             {"num_attention_heads_per_layer", List(d.layers, [&](uint64_t layer) { return absl::StrCat(heads(layer)); })},
             {"num_experts", absl::StrCat(d.experts)},
             {"num_experts_per_tok", absl::StrCat(std::min<uint64_t>(10, d.experts))},
             {"num_key_value_heads", absl::StrCat(key_value_heads)},
             {"output_router_logits", "false"},
             {"rms_norm_eps", "1e-06"},
             {"rope_parameters",
              "{\n    \"full_attention\": {\n      \"attention_factor\": 1.4852030263919618,\n      \"beta_fast\": 32.0,\n"
              "      \"beta_slow\": 1.0,\n      \"factor\": 128.0,\n      \"original_max_position_embeddings\": 8192,\n"
              "      \"partial_rotary_factor\": 0.5,\n      \"rope_theta\": 500000.0,\n      \"rope_type\": \"yarn\"\n    },\n"
              "    \"sliding_attention\": {\n      \"partial_rotary_factor\": 1.0,\n      \"rope_theta\": 10000.0,\n"
              "      \"rope_type\": \"default\"\n    }\n  }"},
             {"router_aux_loss_coef", "0.001"},
             {"shared_expert_intermediate_size", absl::StrCat(d.intermediate)},
             {"sliding_window", "512"},
         });
  return {builder.Take(), Config(std::move(members))};
}

// The sizes of Qwen3-30B-A3B.
SyntheticModel Qwen3Moe(const Dimensions& d) {
  const uint64_t heads = 2 * d.units;
  const uint64_t key_value_heads = KeyValueHeads(d.units, d.units / 4);
  Builder builder(d);
  builder.Embedding();
  for (uint64_t layer = 0; layer < d.layers; ++layer) {
    const std::string prefix = LayerPrefix(layer);
    builder.Attention(prefix, heads, key_value_heads);
    builder.HeadNorms(prefix);
    builder.LayerNorms(prefix);
    builder.Linear(prefix + "mlp.gate", d.experts, d.hidden);
    for (uint64_t expert = 0; expert < d.experts; ++expert) {
      builder.GatedMlp(absl::StrCat(prefix, "mlp.experts.", expert), d.intermediate);
    }
  }
  builder.Head();

  auto members = CommonMembers(d, "qwen3_moe", "Qwen3MoeForCausalLM");
  Append(members, {
                      {"decoder_sparse_step", "1"},
                      {"intermediate_size", absl::StrCat(3 * d.hidden)},
                      {"max_position_embeddings", "40960"},
                      {"mlp_only_layers", "[]"},
                      {"moe_intermediate_size", absl::StrCat(d.intermediate)},
                      {"norm_topk_prob", "true"},
                      {"num_attention_heads", absl::StrCat(heads)},
                      {"num_experts", absl::StrCat(d.experts)},
                      {"num_experts_per_tok", absl::StrCat(std::min<uint64_t>(8, d.experts))},
                      {"num_key_value_heads", absl::StrCat(key_value_heads)},
                      {"output_router_logits", "false"},
                      {"rms_norm_eps", "1e-06"},
                      {"rope_parameters", RopeParameters("1000000.0")},
                      {"router_aux_loss_coef", "0.001"},
                      {"sliding_window", "null"},
                      {"use_sliding_window", "false"},
                  });
  return {builder.Take(), Config(std::move(members))};
}

// The sizes of Mixtral 8x7B.
SyntheticModel Mixtral(const Dimensions& d) {
  const uint64_t key_value_heads = KeyValueHeads(d.units, d.units / 4);
  Builder builder(d);
  builder.Embedding();
  for (uint64_t layer = 0; layer < d.layers; ++layer) {
    const std::string prefix = LayerPrefix(layer);
    builder.Attention(prefix, d.units, key_value_heads);
    builder.LayerNorms(prefix);
    builder.Linear(prefix + "block_sparse_moe.gate", d.experts, d.hidden);
    for (uint64_t expert = 0; expert < d.experts; ++expert) {
      builder.GatedMlp(absl::StrCat(prefix, "block_sparse_moe.experts.", expert), d.intermediate, {"w1", "w3", "w2"});
    }
  }
  builder.Head();

  auto members = CommonMembers(d, "mixtral", "MixtralForCausalLM");
  Append(members, {
                      {"intermediate_size", absl::StrCat(d.intermediate)},
                      {"max_position_embeddings", "32768"},
                      {"num_attention_heads", absl::StrCat(d.units)},
                      {"num_experts_per_tok", absl::StrCat(std::min<uint64_t>(2, d.experts))},
                      {"num_key_value_heads", absl::StrCat(key_value_heads)},
                      {"num_local_experts", absl::StrCat(d.experts)},
                      {"output_router_logits", "false"},
                      {"rms_norm_eps", "1e-05"},
                      {"rope_parameters", RopeParameters("1000000.0")},
                      {"router_aux_loss_coef", "0.02"},
                      {"router_jitter_noise", "0.0"},
                      {"sliding_window", "null"},
                  });
  return {builder.Take(), Config(std::move(members))};
}

// The sizes of Llama 3.1 8B.
SyntheticModel Llama(const Dimensions& d) {
  const uint64_t key_value_heads = KeyValueHeads(d.units, d.units / 4);
  Builder builder(d);
  builder.Embedding();
  for (uint64_t layer = 0; layer < d.layers; ++layer) {
    const std::string prefix = LayerPrefix(layer);
    builder.Attention(prefix, d.units, key_value_heads);
    builder.LayerNorms(prefix);
    builder.GatedMlp(prefix + "mlp", d.intermediate);
  }
  builder.Head();

  auto members = CommonMembers(d, "llama", "LlamaForCausalLM");
  Append(members,
         {
             {"intermediate_size", absl::StrCat(d.intermediate)},
             {"max_position_embeddings", "131072"},
             {"mlp_bias", "false"},
             {"num_attention_heads", absl::StrCat(d.units)},
             {"num_key_value_heads", absl::StrCat(key_value_heads)},
             {"rms_norm_eps", "1e-05"},
             {"rope_parameters",
              "{\n    \"factor\": 8.0,\n    \"high_freq_factor\": 4.0,\n    \"low_freq_factor\": 1.0,\n"
              "    \"original_max_position_embeddings\": 8192,\n    \"rope_theta\": 500000.0,\n    \"rope_type\": \"llama3\"\n  }"},
         });
  return {builder.Take(), Config(std::move(members))};
}

struct SyntheticFamily {
  absl::string_view name;
  Dimensions full;
  SyntheticModel (*describe)(const Dimensions& d);
};

constexpr SyntheticFamily kSyntheticFamilies[] = {
    {"laguna", {.layers = 48, .experts = 256, .hidden = 3072, .intermediate = 1024, .vocab = 100352}, Laguna},
    {"qwen3_moe", {.layers = 48, .experts = 128, .hidden = 2048, .intermediate = 768, .vocab = 151936}, Qwen3Moe},
    {"mixtral", {.layers = 32, .experts = 8, .hidden = 4096, .intermediate = 14336, .vocab = 32000}, Mixtral},
    {"llama", {.layers = 32, .experts = 0, .hidden = 4096, .intermediate = 14336, .vocab = 128256}, Llama},
};

}  // namespace

absl::StatusOr<SyntheticModel> DescribeSynthetic(const SyntheticOptions& options) {
  std::vector<absl::string_view> known;
  for (const SyntheticFamily& family : kSyntheticFamilies) {
    if (family.name == options.family) {
      QUERN_ASSIGN_OR_RETURN(const Dimensions dimensions, MakeDimensions(options, family.full));
      return family.describe(dimensions);
    }
    known.push_back(family.name);
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown family \"", options.family, "\"; known are ", absl::StrJoin(known, ", ")));
}

}  // namespace quern::checkpoint
