"""Models of types that Quern has no family for, made by transformers: what it quantizes are linear modules, and all of them."""

import json

import pytest
import torch
import transformers

import checkpoints

_COMMON = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=640, intermediate_size=256, max_position_embeddings=64)
_GPT = dict(n_embd=128, n_layer=2, n_head=4)
TYPES = {
    "opt": dict(ffn_dim=256, word_embed_proj_dim=64),
    "gpt_neox": {},
    "gptj": dict(_GPT, rotary_dim=16),
    "codegen": dict(_GPT, rotary_dim=16),
    "gpt_bigcode": _GPT,
    "bloom": dict(n_layer=2, n_head=4),
    "falcon": {},
    "mpt": dict(d_model=128, n_heads=4, n_layers=2, max_seq_len=64),
    "stablelm": {},
    "starcoder2": dict(num_key_value_heads=2),
    "xglm": dict(d_model=128, ffn_dim=256, attention_heads=4, num_layers=2),
    "persimmon": {},
    "lfm2": dict(num_key_value_heads=2, layer_types=["conv", "full_attention"]),
    "afmoe": dict(num_key_value_heads=2, num_experts=4, moe_intermediate_size=64, num_dense_layers=1, head_dim=32),
}


def make(model_type, directory):
    torch.manual_seed(len(model_type))
    config = type(transformers.AutoConfig.for_model(model_type))(**{**_COMMON, **(TYPES | {"gpt2": _GPT, "openai-gpt": _GPT})[model_type]})
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("model_type", TYPES)
def test_linear_modules_are_quantized_and_no_others(quern, tmp_path, model_type):
    model = make(model_type, tmp_path)
    process = quern("plan", tmp_path, "--scheme", "W4A16", "--group-size", "32", "--json")
    assert process.returncode == 0, process.stderr
    plan = json.loads(process.stdout)
    assert any("is not known" in w for w in plan["summary"]["warnings"])
    quantized = {f["tensor"].removesuffix(".weight") for f in plan["fates"] if f["fate"] == "QUANTIZED"}
    left = {f["tensor"].removesuffix(".weight"): f["role"] for f in plan["fates"] if f["fate"] == "COPIED"}
    stored = {n.removesuffix(".weight") for n, _ in checkpoints.shapes(tmp_path).items()}
    linear = {n for n, module in model.named_modules() if isinstance(module, torch.nn.Linear) and n in stored}
    # transformers has experts as stacks, and saves them one by one.
    assert {n for n in quantized if ".experts." not in n} <= linear
    assert quantized and {left[n] for n in linear - quantized} <= {"lm_head", "router"}


@pytest.mark.parametrize("model_type", ("gpt2", "openai-gpt"))
def test_transposed_linears_are_refused(quern, tmp_path, model_type):
    make(model_type, tmp_path)
    process = quern("plan", tmp_path, "--scheme", "W4A16", "--group-size", "32")
    assert process.returncode == 1 and "[in, out]" in process.stderr and "c_attn" in process.stderr
    # Its biases tell where the type does not.
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "nobody-knows"}))
    process = quern("plan", tmp_path, "--scheme", "W4A16", "--group-size", "32")
    assert process.returncode == 1 and "[in, out]" in process.stderr and "c_attn" in process.stderr
