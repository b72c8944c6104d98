"""`quern dequantize` gives the values that the format's own library decompresses to, in a checkpoint that transformers loads."""

import json
import shutil
import tempfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers

import checkpoints
import families
import oracle
import stacked
from test_formats import GROUPED, MODELOPT, SCHEMES, run


# Families that transformers loads with all experts of a layer in one tensor, and in no other form.
STACKED = ("llama4_text", "gpt_oss", "granitemoe", "gemma4_text", "qwen3_vl_moe")


def logits(directory):
    vision = "vision_config" in json.loads((Path(directory) / "config.json").read_text())
    loader = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
    model = loader.from_pretrained(directory, dtype=torch.bfloat16).eval()
    ids = torch.randint(0, 512, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(ids).logits


def plain_with(family, source, values, directory):
    """The source with the weights of `values` in place of its own."""
    tensors = {name: oracle.as_tensor(entry) for name, entry in checkpoints.contents(source).items()}
    weights = {name.removesuffix(".weight"): tensor for name, tensor in tensors.items() if name.endswith(".weight")}
    for name, tensor in tensors.items():
        if families.is_stack(name, tensor.shape):
            weights.update(families.stack_views(family, name, tensor))
    for module, value in values.items():
        weights[module].copy_(value)
    safetensors.torch.save_file(tensors, Path(directory) / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(Path(source) / "config.json", directory)
    return directory


@pytest.mark.parametrize("family", ("llama", "qwen3_moe"))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_and_logits_are_those_of_compressed_tensors(quern, family_checkpoint, quantization_config, tmp_path, scheme, family):
    source = family_checkpoint(family)
    run(quern, source, tmp_path / "out", scheme)
    process = quern("dequantize", tmp_path / "out", "-o", tmp_path / "plain")
    assert process.returncode == 0, process.stderr
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())

    stored, config = checkpoints.contents(tmp_path / "out"), quantization_config(tmp_path / "out")
    values = {m: oracle.decompress(stored, config, m).to(torch.bfloat16) for m in families.linear_weights(family, source)}
    plain = checkpoints.contents(tmp_path / "plain")
    assert sorted(plain) == sorted(checkpoints.contents(source))
    for module, value in values.items():
        assert torch.equal(oracle.as_tensor(plain[module + ".weight"]), value), module
    with tempfile.TemporaryDirectory() as directory:
        assert torch.equal(logits(tmp_path / "plain"), logits(plain_with(family, source, values, directory)))


@pytest.fixture(scope="session")
def stacked_checkpoint(family_checkpoint, tmp_path_factory):
    made = {}

    def get(family):
        if family != "qwen3_vl_moe":
            return family_checkpoint(family)
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            families.make_qwen3_vl_moe(made[family])
        return made[family]

    return get


def _holds(plain, source, family, values):
    """The checkpoint has the tensors of the source with these weights, and what transformers makes of both is the same."""
    contents = checkpoints.contents(plain)
    assert {n: (e[0], sorted(e[1])) for n, e in contents.items()} == {n: (e[0], sorted(e[1])) for n, e in checkpoints.contents(source).items()}
    with tempfile.TemporaryDirectory() as directory:
        assert torch.equal(logits(plain), logits(plain_with(family, source, values, directory)))


@pytest.mark.parametrize("family", STACKED)
@pytest.mark.parametrize("scheme", ("W4A16_ASYM", "FP8_DYNAMIC", "NVFP4A16"))
def test_experts_become_the_stacks_that_transformers_loads(quern, stacked_checkpoint, quantization_config, tmp_path, scheme, family):
    source = stacked_checkpoint(family)
    run(quern, source, tmp_path / "out", scheme)
    process = quern("dequantize", tmp_path / "out", "-o", tmp_path / "plain", "--max-shard-size", "1MiB")
    assert process.returncode == 0, process.stderr
    stored, config = checkpoints.contents(tmp_path / "out"), quantization_config(tmp_path / "out")
    weights = families.linear_weights(family, source)
    assert any(families.is_routed(module) for module in weights)
    _holds(tmp_path / "plain", source, family, {m: oracle.decompress(stored, config, m).to(torch.bfloat16) for m in weights})
    for against in ((), ("--against", tmp_path / "out")):
        verified = quern("verify", tmp_path / "plain", *against)
        assert verified.returncode == 0, verified.stderr + verified.stdout


def test_published_gpt_oss_becomes_what_transformers_loads(quern, family_checkpoint, tmp_path):
    """From MXFP4 blocks in stacks to the stacks of plain values."""
    source = family_checkpoint("gpt_oss")
    expected = stacked.mxfp4_gpt_oss(source, tmp_path / "blocks")
    process = quern("dequantize", tmp_path / "blocks", "-o", tmp_path / "plain")
    assert process.returncode == 0, process.stderr
    _holds(tmp_path / "plain", source, "gpt_oss", expected)
    verified = quern("verify", tmp_path / "plain", "--against", tmp_path / "blocks")
    assert verified.returncode == 0, verified.stderr + verified.stdout


def _modelopt_values(scheme, tensors):
    """ModelOpt's own formulas."""
    if scheme == "FP8_DYNAMIC":
        return tensors["weight"].to(torch.bfloat16) * tensors["weight_scale"].to(torch.bfloat16)[:, None]
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = torch.stack([tensors["weight"] & 15, tensors["weight"] >> 4], -1).flatten(1).long()
    scale = tensors["weight_scale"].float() * tensors["weight_scale_2"]
    return (e2m1[codes].reshape(codes.shape[0], -1, 16) * scale[..., None]).flatten(1).to(torch.bfloat16)


@pytest.mark.parametrize("scheme", MODELOPT)
def test_modelopt_outputs_decode_by_its_formula(quern, family_checkpoint, tmp_path, scheme):
    source = family_checkpoint("qwen3_moe")
    run(quern, source, tmp_path / "out", scheme, "--export", "modelopt")
    process = quern("dequantize", tmp_path / "out", "-o", tmp_path / "plain")
    assert process.returncode == 0, process.stderr
    stored, plain = checkpoints.contents(tmp_path / "out"), checkpoints.contents(tmp_path / "plain")
    for module in families.linear_weights("qwen3_moe", source):
        tensors = {n[len(module) + 1:]: oracle.as_tensor(e) for n, e in stored.items() if n.startswith(module + ".")}
        assert torch.equal(oracle.as_tensor(plain[module + ".weight"]), _modelopt_values(scheme, tensors)), module


def _fp8_block_source(source, directory):
    """A checkpoint as DeepSeek publishes them: F8_E4M3 weights with one F32 scale for each 128x128 block, scales in a file of their own."""
    weights, scales = {}, {}
    expected = {}
    for name, entry in checkpoints.contents(source).items():
        tensor = oracle.as_tensor(entry)
        module, _, parameter = name.rpartition(".")
        if ".mlp." not in name and ".self_attn." not in name or parameter != "weight" or tensor.dim() != 2 or module.endswith(("norm", ".gate")):
            weights[name] = tensor
            continue
        rows, cols = tensor.shape
        padded = torch.nn.functional.pad(tensor.float(), (0, -cols % 128, 0, -rows % 128))
        blocks = padded.reshape(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
        scale = blocks.abs().amax((1, 3)) / 448
        quantized = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        weights[name] = quantized.reshape(padded.shape)[:rows, :cols].contiguous()
        scales[f"{module}.weight_scale_inv"] = scale
        decoded = quantized.float() * scale[:, None, :, None]
        expected[module] = decoded.reshape(padded.shape)[:rows, :cols].to(torch.bfloat16)
    safetensors.torch.save_file(weights, directory / "model-00001-of-00002.safetensors")
    safetensors.torch.save_file(scales, directory / "model-00002-of-00002.safetensors")
    weight_map = {n: "model-00001-of-00002.safetensors" for n in weights} | {n: "model-00002-of-00002.safetensors" for n in scales}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((Path(source) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (directory / "config.json").write_text(json.dumps(config))
    return expected


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=("BF16", "F16", "F32"))
@pytest.mark.parametrize("scale_dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_fp8_block_values_are_rounded_once(quern, family_checkpoint, tmp_path, scale_dtype, dtype):
    """As transformers does: the product in F32, rounded to what is asked for."""
    (tmp_path / "source").mkdir()
    expected = _fp8_block_source(family_checkpoint("llama"), tmp_path / "source")
    shards = [tmp_path / "source" / f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    scales = {n: t.to(scale_dtype) for n, t in safetensors.torch.load_file(shards[1]).items()}
    safetensors.torch.save_file(scales, shards[1])
    weights = safetensors.torch.load_file(shards[0])
    name = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[dtype]
    process = quern("dequantize", tmp_path / "source", "-o", tmp_path / "plain", "--dtype", name)
    assert process.returncode == 0, process.stderr
    plain = checkpoints.contents(tmp_path / "plain")
    for module in expected:
        weight = weights[module + ".weight"]
        scale = scales[module + ".weight_scale_inv"].float().repeat_interleave(128, 0).repeat_interleave(128, 1)
        product = weight.float() * scale[:weight.shape[0], :weight.shape[1]]
        assert torch.equal(oracle.as_tensor(plain[module + ".weight"]), product.to(dtype)), module
    verified = quern("verify", tmp_path / "plain", "--against", tmp_path / "source")
    assert verified.returncode == 0, verified.stderr + verified.stdout


def test_fp8_block_sources_are_decoded_on_the_fly(quern, family_checkpoint, tmp_path):
    """Partial edge blocks (kv_a has 160 rows), scales in another shard, once targeted and once ignored."""
    source = tmp_path / "source"
    source.mkdir()
    expected = _fp8_block_source(family_checkpoint("deepseek_v3"), source)
    assert any(value.shape[0] % 128 for value in expected.values())
    process = quern("dequantize", source, "-o", tmp_path / "plain")
    assert process.returncode == 0, process.stderr
    plain = checkpoints.contents(tmp_path / "plain")
    for module, value in expected.items():
        assert torch.equal(oracle.as_tensor(plain[module + ".weight"]), value), module
    assert not any(n.endswith("scale_inv") for n in plain)

    process = quern("quantize", source, "-o", tmp_path / "out", "--scheme", "W4A16", "--group-size", "32", "--targets", "routed_experts")
    assert process.returncode == 0, process.stderr
    out = checkpoints.contents(tmp_path / "out")
    for module, value in expected.items():
        if families.is_routed(module):
            for suffix, tensor in SCHEMES["W4A16"](value, None).items():
                assert out[f"{module}.{suffix}"][2] == tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes(), module
        else:
            assert torch.equal(oracle.as_tensor(out[module + ".weight"]), value), module
    assert not any(n.endswith("scale_inv") for n in out)
    assert quern("verify", tmp_path / "out", "--against", source).returncode == 0
