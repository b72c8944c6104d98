"""Layouts of experts that transformers does not save itself, made from a per-expert checkpoint: values are known, so no definition of the
layout is needed but the one here."""

import json
import re
from pathlib import Path

import safetensors.torch
import torch

import checkpoints
import oracle

_EXPERT = re.compile(r"^(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")


def _experts(source):
    """(prefix of the layer's experts) -> [(gate, up, down), ...] and the other tensors."""
    stacks, others = {}, {}
    for name, entry in checkpoints.contents(source).items():
        match = _EXPERT.match(name)
        if not match:
            others[name] = oracle.as_tensor(entry)
            continue
        stacks.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = oracle.as_tensor(entry)
    return {p: [(e[i]["gate_proj"], e[i]["up_proj"], e[i]["down_proj"]) for i in range(len(e))] for p, e in stacks.items()}, others


def _save(directory, tensors, config):
    directory.mkdir()
    safetensors.torch.save_file({n: t.contiguous() for n, t in tensors.items()}, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def _multimodal(config, model_type):
    """The text model's configuration inside that of a model with vision."""
    text = {k: v for k, v in config.items() if k not in ("architectures", "transformers_version")}
    return {"model_type": model_type, "text_config": {**text, "model_type": f"{model_type}_text"}, "tie_word_embeddings": False}


def _language_model(name):
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def qwen3_vl_moe(source, directory):
    """[E, H, 2I], halves gate and up: every expert is stored transposed. Returns module -> weight of all experts."""
    stacks, others = _experts(source)
    tensors = {_language_model(n): t for n, t in others.items()}
    tensors["model.visual.patch_embed.proj.weight"] = torch.randn(32, 3, 2, 4, 4).to(torch.bfloat16)
    tensors["model.visual.blocks.0.mlp.linear_fc1.weight"] = torch.randn(64, 32).to(torch.bfloat16)
    expected = {}
    for prefix, experts in stacks.items():
        prefix = _language_model(prefix)
        tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([g, u]).T for g, u, _ in experts])
        tensors[f"{prefix}.down_proj"] = torch.stack([d.T for _, _, d in experts])
        _expect(expected, prefix, experts)
    _save(directory, tensors, _multimodal(json.loads((Path(source) / "config.json").read_text()), "qwen3_vl_moe"))
    return expected


def qwen3_5_moe(source, directory):
    """[E, 2I, H], halves gate and up."""
    stacks, others = _experts(source)
    tensors = {_language_model(n): t for n, t in others.items()}
    expected = {}
    for prefix, experts in stacks.items():
        prefix = _language_model(prefix)
        tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([g, u]) for g, u, _ in experts])
        tensors[f"{prefix}.down_proj"] = torch.stack([d for _, _, d in experts])
        _expect(expected, prefix, experts)
    _save(directory, tensors, _multimodal(json.loads((Path(source) / "config.json").read_text()), "qwen3_5_moe"))
    return expected


def _expect(expected, prefix, experts):
    for i, (gate, up, down) in enumerate(experts):
        expected[f"{prefix}.{i}.gate_proj"], expected[f"{prefix}.{i}.up_proj"], expected[f"{prefix}.{i}.down_proj"] = gate, up, down


def int4_experts(source, directory):
    """Experts in INT4 groups of 32 as compressed-tensors packs them, all else BF16, as Kimi K2-Thinking is published. Returns module ->
    decoded weight."""
    import reference

    tensors, expected = {}, {}
    for name, entry in checkpoints.contents(source).items():
        tensor = oracle.as_tensor(entry)
        module = name.removesuffix(".weight")
        if not _EXPERT.match(name):
            tensors[name] = tensor
            continue
        for suffix, value in reference.pack_quantized(tensor, 4, 32).items():
            tensors[f"{module}.{suffix}"] = value
        codes, scale, _ = reference.integer(tensor, 4, 32)
        expected[module] = (codes.reshape(codes.shape[0], -1, 32).to(scale.dtype) * scale[..., None]).reshape(tensor.shape)
    config = json.loads((Path(source) / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|down)_proj.*"],
        "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "output_activations": None, "weights": {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False, "observer": "minmax"}}}}
    _save(directory, tensors, config)
    return expected


def mxfp4_gpt_oss(source, directory):
    """gpt-oss as it is published: `_blocks` [E, 2I, H/32, 16] and `_scales`, gate in even rows and up in odd ones. `source` is its BF16
    form as transformers saves it. Returns module -> decoded weight."""
    import families
    import reference

    tensors, expected = {}, {}
    for name, entry in checkpoints.contents(source).items():
        tensor = oracle.as_tensor(entry)
        if not families.is_stack(name, entry[1]):
            tensors[name] = tensor
            continue
        blocks, scales, decoded = [], [], []
        for slab in tensor:
            packed = reference.mx(slab.T.contiguous(), 4)
            blocks.append(packed["weight_packed"].reshape(slab.shape[1], -1, 16))
            scales.append(packed["weight_scale"])
            e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
            codes = torch.stack([packed["weight_packed"] & 15, packed["weight_packed"] >> 4], -1).flatten(1).long()
            power = torch.pow(torch.tensor(2.0), packed["weight_scale"].float() - 127)
            decoded.append((e2m1[codes].reshape(codes.shape[0], -1, 32) * power[..., None]).flatten(1).to(torch.bfloat16))
        tensors[name + "_blocks"], tensors[name + "_scales"] = torch.stack(blocks), torch.stack(scales)
        prefix, _, leaf = name.rpartition(".")
        for i, weight in enumerate(decoded):
            if leaf == "gate_up_proj":
                expected[f"{prefix}.{i}.gate_proj"], expected[f"{prefix}.{i}.up_proj"] = weight[0::2], weight[1::2]
            else:
                expected[f"{prefix}.{i}.down_proj"] = weight
    config = json.loads((Path(source) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    _save(directory, tensors, config)
    return expected
