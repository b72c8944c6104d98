"""Checkpoints that the compatibility tests quantize, and reading them as bytes."""

import json
import os
import struct
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
TRAINED = {
    "laguna-micro": ROOT / "tests" / "data" / "laguna-micro",
    "laguna-tiny": ROOT.parent / "shared" / "models" / "laguna-tiny",
}
MADE = ("made-laguna", "made-qwen3_moe", "made-mixtral", "made-llama")
MODELS = (*TRAINED, *MADE)

_COMMON = dict(
    hidden_size=256, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=512, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=2,
)


def _made_config(name):
    if name == "made-llama":
        return transformers.LlamaConfig(**_COMMON, tie_word_embeddings=False)
    if name == "made-mixtral":
        return transformers.MixtralConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2)
    if name == "made-qwen3_moe":
        return transformers.Qwen3MoeConfig(
            **_COMMON, head_dim=64, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2,
            decoder_sparse_step=1, mlp_only_layers=[0])
    trained = json.loads((TRAINED["laguna-micro"] / "config.json").read_text())
    for key in ("architectures", "transformers_version", "model_type"):
        trained.pop(key, None)
    trained.update(hidden_size=256, intermediate_size=384, num_hidden_layers=3, vocab_size=512, head_dim=64,
                   layer_types=trained["layer_types"][:3], mlp_layer_types=trained["mlp_layer_types"][:3],
                   num_attention_heads_per_layer=[4, 6, 6], num_attention_heads=4, num_key_value_heads=2, num_experts=4,
                   moe_intermediate_size=128, shared_expert_intermediate_size=128)
    return transformers.LagunaConfig(**trained)


def make(name, directory):
    """Initialises a tiny model with transformers itself and saves it as transformers does."""
    torch.manual_seed(MODELS.index(name))
    model = transformers.AutoModelForCausalLM.from_config(_made_config(name)).to(torch.bfloat16)
    model.save_pretrained(directory, max_shard_size="2MB")


def headers(directory):
    """Yields (path, header, start of the data) for each shard."""
    for path in sorted(Path(directory).glob("*.safetensors")):
        with open(path, "rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        yield path, header, 8 + length


def shapes(directory):
    return {name: (info["dtype"], info["shape"]) for _, header, _ in headers(directory) for name, info in header.items()}


def contents(directory):
    """Tensor name -> (dtype, shape, bytes). A name in two shards is an error."""
    tensors = {}
    for path, header, start in headers(directory):
        data = path.read_bytes()[start:]
        for name, info in header.items():
            assert name not in tensors, f"{name} is in two shards of {directory}"
            begin, end = info["data_offsets"]
            tensors[name] = (info["dtype"], tuple(info["shape"]), data[begin:end])
    return tensors


def in_ci():
    return os.environ.get("CI", "") not in ("", "0", "false")
