"""Tiny models of many families, initialised and saved by transformers itself, and the weights that each of them holds."""

import re
import shutil

import safetensors.torch
import torch
import transformers

import checkpoints
import oracle

_COMMON = dict(
    hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=512,
    max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=2)
_HEAD = dict(head_dim=64)
_LOCAL = dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=128)
_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
_SHARED = dict(_MOE, shared_expert_intermediate_size=128)
_GROUPED = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, n_group=1, topk_group=1)
_LINEAR_ATTENTION = dict(
    _SHARED, head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
    layer_types=["linear_attention", "full_attention"])

# model_type -> what its configuration has beside _COMMON.
FAMILIES = {
    "llama": dict(tie_word_embeddings=False),
    "mistral": {},
    "qwen2": {},
    "qwen3": _HEAD,
    "olmo2": {},
    "smollm3": {},
    "phi3": {},
    "gemma3_text": dict(_HEAD, sliding_window=64),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "phimoe": _LOCAL,
    "minimax_m2": dict(_LOCAL, **_HEAD),
    "qwen2_moe": _SHARED,
    "qwen3_moe": dict(_MOE, head_dim=64, decoder_sparse_step=1, mlp_only_layers=[0]),
    "olmoe": dict(num_experts=4, num_experts_per_tok=2, intermediate_size=128),
    "qwen3_next": _LINEAR_ATTENTION,
    "qwen3_5_moe_text": _LINEAR_ATTENTION,
    "deepseek_v3": dict(
        _GROUPED, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=128, kv_lora_rank=128, qk_rope_head_dim=32, qk_nope_head_dim=32,
        v_head_dim=64, num_key_value_heads=4),
    "glm4_moe": dict(_GROUPED, n_shared_experts=1, first_k_dense_replace=1, head_dim=64),
    "hunyuan_v1_moe": dict(num_experts=4, moe_topk=2, intermediate_size=128, moe_intermediate_size=128, head_dim=64, num_shared_expert=1),
    "ernie4_5_moe": dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=128, moe_num_shared_experts=1, moe_layer_start_index=1),
    "nemotron_h": dict(_GROUPED, moe_shared_expert_intermediate_size=128, head_dim=64, layers_block_type=["attention", "moe"]),
    "gpt_oss": dict(_LOCAL, head_dim=64, sliding_window=64),
    "llama4_text": dict(
        num_local_experts=4, num_experts_per_tok=1, intermediate_size=128, intermediate_size_mlp=256, head_dim=64, moe_layers=[1]),
    "granitemoe": _LOCAL,
    "gemma4_text": dict(
        num_experts=4, top_k_experts=2, moe_intermediate_size=128, head_dim=64, enable_moe_block=True, vocab_size_per_layer_input=512,
        hidden_size_per_layer_input=64),
}

_ROUTERS = re.compile(r"(\.gate|\.gate\.wg|\.router|\.router\.proj|\.router\.layer|shared_expert_gate)$")


def make(family, directory):
    torch.manual_seed(list(FAMILIES).index(family))
    config = type(transformers.AutoConfig.for_model(family))(**{**_COMMON, **FAMILIES[family]})
    _save(transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16), directory)


def cast(source, directory, dtype):
    """A checkpoint of another dtype, with values that BF16 does not have."""
    directory.mkdir(exist_ok=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, directory)
            continue
        tensors = safetensors.torch.load_file(path)
        tensors = {n: (t.float() * (4 / 3)).to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
        safetensors.torch.save_file(tensors, directory / path.name, metadata={"format": "pt"})


def make_qwen3_vl_moe(directory):
    """A text model with stacks inside of one with vision."""
    torch.manual_seed(len(FAMILIES))
    text = dict(_COMMON, **_MOE, vocab_size=640, head_dim=64, decoder_sparse_step=1)
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10000.0}
    vision = dict(depth=1, hidden_size=64, intermediate_size=64, num_heads=2, out_hidden_size=256, deepstack_visual_indexes=[0],
                  num_position_embeddings=16)
    config = type(transformers.AutoConfig.for_model("qwen3_vl_moe"))(
        text_config=text, vision_config=vision, image_token_id=600, video_token_id=601, vision_start_token_id=602, vision_end_token_id=603)
    _save(transformers.AutoModelForImageTextToText.from_config(config).to(torch.bfloat16), directory)


def _save(model, directory):
    with torch.no_grad():  # initial weights are alike in all channels: make them differ, as trained ones do
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter *= torch.exp(0.5 * torch.randn(parameter.shape[-1], generator=torch.Generator().manual_seed(7)))
    model.save_pretrained(directory, max_shard_size="2MB")


def _halves(rows):
    return rows[: rows.shape[0] // 2], rows[rows.shape[0] // 2:]


def stack_views(family, name, stack):
    """Yields (module, weight [out, in]) of a tensor that holds all experts of a layer, as the model's own forward pass uses it: views."""
    for expert, slab in enumerate(stack):
        base, _, leaf = name.rpartition(".")
        if family in ("gpt_oss", "llama4_text"):  # x @ slab: stored transposed
            slab = slab.T
        if family == "granitemoe":
            base, _, leaf = base.rpartition(".")  # block_sparse_moe.input_linear.weight
            module = f"{base}.experts.{expert}."
        else:
            module = f"{base}.{expert}."
        if leaf in ("gate_up_proj", "input_linear"):
            gate, up = (slab[0::2], slab[1::2]) if family == "gpt_oss" else _halves(slab)
            yield module + "gate_proj", gate
            yield module + "up_proj", up
        else:
            yield module + "down_proj", slab


def is_stack(name, shape):
    return len(shape) == 3 and re.search(r"experts\.(gate_up_proj|down_proj)$|block_sparse_moe\.(input|output)_linear\.weight$", name)


def linear_weights(family, directory):
    """Every module that the target `Linear` means -> its weight, from the files of a checkpoint."""
    weights = {}
    for name, entry in checkpoints.contents(directory).items():
        module, _, parameter = name.rpartition(".")
        shape = entry[1]
        if is_stack(name, shape):
            weights.update((m, w.contiguous()) for m, w in stack_views(family, name, oracle.as_tensor(entry)))
        elif parameter == "weight" and len(shape) == 2 and not _ROUTERS.search(module):
            if not re.search(r"norm$|embed|lm_head", module):
                weights[module] = oracle.as_tensor(entry)
    return weights


def is_routed(module):
    return re.search(r"\.experts\.\d+\.", module) is not None


# Weights that share one global scale: name of the last part -> the parts, in one parent.
_SETS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"),
         ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"))


def set_amax(weights, module):
    """Largest magnitude over the weights that an inference engine fuses with this one."""
    parent, _, leaf = module.rpartition(".")
    members = next((s for s in _SETS if leaf in s), (leaf,))
    return max(weights[f"{parent}.{m}"].float().abs().max() for m in members if f"{parent}.{m}" in weights)
