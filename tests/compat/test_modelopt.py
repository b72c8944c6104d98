"""What --export modelopt writes: ModelOpt's own quantizers and converter give the same bytes and the same config."""

import json

import pytest
import safetensors.torch
import torch
from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
from modelopt.torch.export.quant_utils import to_quantized_weight
from modelopt.torch.quantization.calib.mse import NVFP4MSECalibrator
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config, ModelOptMixedPrecisionConfig, ModelOptNvFp4Config

import checkpoints
import one_layer_each
import oracle
from test_configs import recipe_text
from test_formats import as_bytes
from test_unusual import KINDS

ALGORITHMS = {"FP8": "FP8", "FP8_DYNAMIC": "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4": "NVFP4", "NVFP4A16": "W4A16_NVFP4"}
STATIC = ("FP8", "NVFP4")
MIXED = "modelopt-nvfp4-experts-fp8-attention.yaml"
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def arguments_for(what, scales, directory):
    if what == MIXED:
        (directory / "recipe.yaml").write_text(recipe_text(what))
        return "--recipe", directory / "recipe.yaml", "--export", "modelopt"
    files = ("--activation-scales", scales) if what in STATIC else ()
    return "--scheme", what, *files, "--export", "modelopt"


@pytest.mark.parametrize("what", [*ALGORITHMS, MIXED])
def test_config_is_what_the_converter_makes(plan, activation_scales, tmp_path, what):
    summary = plan("laguna-tiny", *arguments_for(what, activation_scales("laguna-tiny"), tmp_path))
    file, config = json.loads(summary["hf_quant_config"]), json.loads(summary["quantization_config"])
    assert config == convert_hf_quant_config_format(file)
    assert file["quantization"]["quant_algo"] == ALGORITHMS.get(what, "MIXED_PRECISION")
    assert file["producer"]["name"] == "modelopt"


@pytest.mark.parametrize("what", ["W4A16", "W8A8", "FP8_BLOCK", "MXFP4A16", "MXFP8A16"])
def test_schemes_that_modelopt_lacks_are_refused(quern, checkpoint, what):
    process = quern("plan", checkpoint("made-llama"), "--scheme", what, "--export", "modelopt")
    assert process.returncode == 1
    assert "ModelOpt" in process.stderr and "NVFP4A16" in process.stderr


@pytest.fixture(scope="session")
def exported(quern, checkpoint, activation_scales, tmp_path_factory):
    outputs = {}

    def get(model, what):
        if (model, what) not in outputs:
            base = tmp_path_factory.mktemp("modelopt")
            process = quern("quantize", checkpoint(model), "-o", base / "out", *arguments_for(what, activation_scales(model), base),
                            "--max-shard-size", "4MiB")
            assert process.returncode == 0, process.stderr
            outputs[(model, what)] = base / "out"
        return outputs[(model, what)]

    return get


def vllm_config(directory):
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    algorithm = config["quant_algo"]
    kind = (ModelOptMixedPrecisionConfig if algorithm == "MIXED_PRECISION"
            else ModelOptNvFp4Config if "NVFP4" in algorithm else ModelOptFp8Config)
    vllm = kind.from_config(config)
    vllm.packed_modules_mapping = FUSED
    return vllm, algorithm


def stored_algorithm(tensors, module):
    """What the tensors of a module are, None for plain weights."""
    dtype = tensors[module + ".weight"][0]
    if dtype == "U8":
        return "NVFP4" if module + ".input_scale" in tensors else "W4A16_NVFP4"
    if dtype == "F8_E4M3":
        return "FP8" if tensors[module + ".weight_scale"][1] == () else "FP8_PER_CHANNEL_PER_TOKEN"
    return None


@pytest.mark.parametrize("what", [*ALGORITHMS, MIXED])
def test_vllm_reads_every_module_as_it_is_stored(exported, what):
    directory = exported("laguna-tiny", what)
    vllm, algorithm = vllm_config(directory)
    tensors = checkpoints.contents(directory)
    seen = set()
    for name, (_, shape, _) in tensors.items():
        module, _, parameter = name.rpartition(".")
        if parameter != "weight" or len(shape) != 2 or "embed" in module:
            continue
        parent, _, leaf = module.rpartition(".")
        lookup = module
        if ".experts." in module:
            lookup = module.partition(".experts.")[0] + ".experts"
        for fused, parts in FUSED.items():
            if leaf in parts and lookup == module:
                lookup = f"{parent}.{fused}"
        answer = None
        if not vllm.is_layer_excluded(lookup):
            answer = vllm._resolve_quant_algo(lookup) if algorithm == "MIXED_PRECISION" else algorithm
        assert answer == stored_algorithm(tensors, module), module
        seen.add(answer)
    assert len(seen) == (3 if what == MIXED else 2)


def shared_amax(source, module):
    """Of the weights that have one scale: q/k/v, and gate/up of one MLP."""
    parent, _, leaf = module.rpartition(".")
    parts = next((p for p in FUSED.values() if leaf in p), [leaf])
    return max(oracle.as_tensor(source[f"{parent}.{p}.weight"]).abs().max().float() for p in parts)


def quantized_by_modelopt(what, weight, amax):
    """Tensors by suffix, but for the scale of activations. `amax` is that of the set."""
    if "NVFP4" in what:
        scale_2 = amax.float() / (6 * 448)
        packed, scale, _ = NVFP4QTensor.quantize(weight, 16, weights_scaling_factor_2=scale_2)
        return {"weight": packed._quantized_data, "weight_scale": scale.view(torch.float8_e4m3fn), "weight_scale_2": scale_2}
    scale = (amax if what == "FP8" else weight.abs().amax(dim=1)).float() / 448
    return {"weight": to_quantized_weight(weight, scale, "fp8" if what == "FP8" else "fp8_pc_pt"), "weight_scale": scale}


@pytest.mark.parametrize("model", ["laguna-tiny", "made-qwen3_moe"])
@pytest.mark.parametrize("what", ALGORITHMS)
def test_bytes_are_those_of_modelopts_quantizers(exported, checkpoint, what, model):
    directory = exported(model, what)
    tensors, source = checkpoints.contents(directory), checkpoints.contents(checkpoint(model))
    modules = [m["module"] for m in json.loads((directory / "quern_manifest.json").read_text())["modules"]]
    assert modules
    for module in modules:
        weight = oracle.as_tensor(source[module + ".weight"])
        ours = {n[len(module) + 1:]: oracle.as_tensor(t) for n, t in tensors.items() if n.startswith(module + ".")}
        theirs = quantized_by_modelopt(what, weight, shared_amax(source, module))
        assert set(ours) - {"input_scale"} == set(theirs), module
        for name, value in theirs.items():
            assert ours[name].shape == value.shape, (module, name)
            assert torch.equal(ours[name].view(torch.uint8) if value.dtype == torch.float8_e4m3fn else ours[name],
                               value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value), (module, name)


@pytest.mark.parametrize("what", STATIC)
def test_input_scales_are_amax_over_the_largest_value(exported, activation_scales, what):
    directory = exported("laguna-tiny", what)
    amax = safetensors.torch.load_file(activation_scales("laguna-tiny"))
    tensors = checkpoints.contents(directory)
    for module in (m["module"] for m in json.loads((directory / "quern_manifest.json").read_text())["modules"]):
        scale = oracle.as_tensor(tensors[module + ".input_scale"])
        assert scale == amax[module] / (448 if what == "FP8" else 6 * 448), module


def test_verify_knows_the_export(quern, exported, checkpoint):
    directory = exported("laguna-tiny", MIXED)
    process = quern("verify", directory, "--against", checkpoint("laguna-tiny"))
    assert process.returncode == 0, process.stdout + process.stderr
    manifest = json.loads((directory / "quern_manifest.json").read_text())
    assert manifest["export_format"] == "modelopt"
    assert "hf_quant_config.json" in [f["name"] for f in manifest["files"]]


def test_unusual_weights(quern, tmp_path):
    """Their bytes are those of ModelOpt's quantizers; where these divide by a scale of 0, ours have scales of 1 and codes of 0."""
    cases = [(what, kind) for what in ALGORITHMS for kind in KINDS]
    weights = [KINDS[kind](torch.bfloat16).to(torch.bfloat16) for _, kind in cases]
    out = one_layer_each.quantize(quern, tmp_path, weights, [f"scheme: {what}" for what, _ in cases], "--export", "modelopt")
    stored = checkpoints.contents(out)
    divided = set()
    for i, (what, kind) in enumerate(cases):
        module, weight = one_layer_each.module(i), weights[i]
        ours = {n[len(module) + 1:]: t[2] for n, t in stored.items() if n.startswith(module + ".") and not n.endswith("input_scale")}
        theirs = quantized_by_modelopt(what, weight.clone(), weight.abs().max())
        if what == "FP8_DYNAMIC" and (weight == 0).all(1).any():
            divided.add((what, kind))
            rows = (weight == 0).all(1)
            theirs["weight_scale"][rows] = 1
            theirs["weight"].view(torch.uint8)[rows] = weight[rows].signbit().to(torch.uint8) << 7
        elif not weight.any():
            divided.add((what, kind))
            assert not theirs["weight_scale_2" if "NVFP4" in what else "weight_scale"].any()
            theirs = {suffix: torch.ones_like(t.float()).to(t.dtype) for suffix, t in theirs.items()}
            theirs["weight"] = torch.zeros_like(theirs["weight"])
        assert ours == {suffix: as_bytes(tensor) for suffix, tensor in theirs.items()}, (what, kind)
    assert divided == {(what, "nothing but zeros") for what in ALGORITHMS} | {
        ("FP8_DYNAMIC", "zeros in groups and rows"), ("FP8_DYNAMIC", "negative zeros")}


def swept_by_modelopt(weight, amax):
    """The block scales of ModelOpt's own sweep, and each block's error with any scales. On a CPU its calibrator tries all 126; the values of
    a scale come from its quantizer."""
    blocks = weight.float().reshape(-1, 16)
    scale_2 = amax.float() / (6 * 448)

    def values(x, block_amax):
        scale = NVFP4QTensor._cast_per_block_scale_to_fp8(block_amax / 6, amax.float() / 6)
        codes, _, _ = NVFP4QTensor.quantize(x, 16, scale[:, None], scale_2)
        return codes.dequantize(torch.float32, scale=scale[:, None], double_scale=scale_2, block_sizes={-1: 16})

    calibrator = NVFP4MSECalibrator(blocks.abs().amax(1), amax, axis=0, quant_func=values)
    calibrator.collect(blocks)
    scale = NVFP4QTensor._cast_per_block_scale_to_fp8(calibrator.compute_amax() / 6, amax.float() / 6)

    def error(scales):
        return (values(blocks, scales.float().flatten() * amax.float() / 448).double() - blocks.double()).square().sum(1)

    return scale.reshape(weight.shape[0], -1), error


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_sweep_is_modelopts(quern, tmp_path, dtype):
    """Both try all 126 scales and compare products in F32: the bytes are equal."""
    generator = torch.Generator().manual_seed(5)
    weight = (torch.randn(64, 256, generator=generator) * torch.exp(torch.randn(256, generator=generator) / 2) / 16).to(dtype)
    weight[3, 32:48] = 0
    out = one_layer_each.quantize(quern, tmp_path, [weight], ["scheme: NVFP4A16, observer: nvfp4_sweep"], "--export", "modelopt")
    stored, module = checkpoints.contents(out), one_layer_each.module(0)
    ours = oracle.as_tensor(stored[f"{module}.weight_scale"])
    amax = weight.abs().max()
    theirs, error = swept_by_modelopt(weight, amax)
    # All scales are as good for zeros: there the first one, here that of minmax.
    assert theirs[3, 2].float() == 2**-9 and ours[3, 2] == 1
    differs = (ours.view(torch.uint8) != theirs.view(torch.uint8)).flatten()
    differs[3 * 16 + 2] = False
    assert (error(theirs) <= error(ours) * (1 + 1e-5)).all() and (error(ours) <= error(theirs) * (1 + 1e-5)).all()
    assert not differs.any()
    codes = NVFP4QTensor.quantize(weight, 16, ours, amax.float() / (6 * 448))[0]._quantized_data
    assert torch.equal(oracle.as_tensor(stored[f"{module}.weight"]), codes)
