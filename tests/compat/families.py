"""Tiny models of many families, initialised and saved by transformers itself."""

import torch
import transformers as tf

_TEXT = dict(hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=256,
             max_position_embeddings=128, bos_token_id=0, eos_token_id=1, pad_token_id=2)
_MOE = dict(moe_intermediate_size=64, num_experts_per_tok=2)
_MLA = dict(q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, num_key_value_heads=4)
_VISION = dict(depth=1, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=128, deepstack_visual_indexes=[0])


def _deepseek_v3():
    return tf.DeepseekV3Config(**{**_TEXT, **_MLA}, **_MOE, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1)


def _deepseek_v2():
    return tf.DeepseekV2Config(**{**_TEXT, **_MLA}, **_MOE, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1,
                               topk_method="greedy")


def _qwen3_5_moe():
    return tf.Qwen3_5MoeTextConfig(**_TEXT, **_MOE, num_experts=4, shared_expert_intermediate_size=64, head_dim=32, linear_num_key_heads=2,
                                   linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
                                   layer_types=["linear_attention", "full_attention"])


# Family -> (class of the model, its config)
CONFIGS = {
    "llama": lambda: tf.LlamaConfig(**_TEXT),
    "mistral": lambda: tf.MistralConfig(**_TEXT),
    "qwen2": lambda: tf.Qwen2Config(**_TEXT),
    "qwen3": lambda: tf.Qwen3Config(**_TEXT, head_dim=32),
    "phi3": lambda: tf.Phi3Config(**_TEXT),
    "gemma2": lambda: tf.Gemma2Config(**_TEXT, head_dim=32),
    "gemma3_text": lambda: tf.Gemma3TextConfig(**_TEXT, head_dim=32),
    "olmo2": lambda: tf.Olmo2Config(**_TEXT),
    "qwen2_moe": lambda: tf.Qwen2MoeConfig(**_TEXT, **_MOE, num_experts=4, shared_expert_intermediate_size=64),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**_TEXT, **_MOE, num_experts=4, head_dim=32, mlp_only_layers=[0]),
    "olmoe": lambda: tf.OlmoeConfig(**_TEXT, num_experts=4, num_experts_per_tok=2),
    "qwen3_next": lambda: tf.Qwen3NextConfig(**_TEXT, **_MOE, num_experts=4, shared_expert_intermediate_size=64, head_dim=32, linear_num_key_heads=2,
                                             linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
                                             layer_types=["linear_attention", "full_attention"]),
    "qwen3_5_moe_text": _qwen3_5_moe,
    "qwen3_vl_moe": lambda: tf.Qwen3VLMoeConfig(
        text_config=dict(_TEXT, **_MOE, num_experts=4, head_dim=32, rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[8, 4, 4])),
        vision_config=dict(_VISION, num_position_embeddings=16)),
    "mixtral": lambda: tf.MixtralConfig(**_TEXT, num_local_experts=4, num_experts_per_tok=2),
    "phimoe": lambda: tf.PhimoeConfig(**_TEXT, num_local_experts=4, num_experts_per_tok=2),
    "minimax_m2": lambda: tf.MiniMaxM2Config(**_TEXT, num_local_experts=4, num_experts_per_tok=2, head_dim=32),
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": lambda: tf.Glm4MoeConfig(**_TEXT, **_MOE, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, head_dim=32),
    "gpt_oss": lambda: tf.GptOssConfig(**_TEXT, num_local_experts=4, num_experts_per_tok=2, head_dim=32,
                                       layer_types=["sliding_attention", "full_attention"]),
    "llama4_text": lambda: tf.Llama4TextConfig(**_TEXT, intermediate_size_mlp=256, num_local_experts=4, num_experts_per_tok=1, head_dim=32,
                                               interleave_moe_layer_step=2),
    "hunyuan_v1_moe": lambda: tf.HunYuanMoEV1Config(**_TEXT, num_experts=4, moe_topk=2, head_dim=32),
    "ernie4_5_moe": lambda: tf.Ernie4_5_MoeConfig(**_TEXT, moe_intermediate_size=64, moe_num_experts=4, moe_k=2, moe_num_shared_experts=1,
                                                  moe_layer_start_index=1),
    "granitemoe": lambda: tf.GraniteMoeConfig(**_TEXT, num_local_experts=4, num_experts_per_tok=2),
    "gemma4_text": lambda: tf.Gemma4TextConfig(**_TEXT, **_MOE, num_experts=4, top_k_experts=2, enable_moe_block=True, head_dim=32,
                                               vocab_size_per_layer_input=256, hidden_size_per_layer_input=32),
    "nemotron_h": lambda: tf.NemotronHConfig(**_TEXT, moe_intermediate_size=64, n_routed_experts=4, num_experts_per_tok=2, head_dim=32, mamba_num_heads=4,
                                             mamba_head_dim=16, n_groups=1, ssm_state_size=16, hybrid_override_pattern="ME*"),
}


def make(name, directory, dtype=torch.bfloat16):
    """Initialises a tiny model and saves it as transformers does."""
    torch.manual_seed(sorted(CONFIGS).index(name))
    config = CONFIGS[name]()
    kind = tf.AutoModelForImageTextToText if name == "qwen3_vl_moe" else tf.AutoModelForCausalLM
    model = kind.from_config(config).to(dtype)
    with torch.no_grad():  # experts and others are left empty or zero by some initialisers
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=0.05)
    model.save_pretrained(directory)
