"""What --export modelopt writes: ModelOpt's own quantizers and converter give the same bytes and the same config."""

import json

import pytest
import safetensors.torch
import torch
from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
from modelopt.torch.export.quant_utils import to_quantized_weight
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config, ModelOptMixedPrecisionConfig, ModelOptNvFp4Config

import checkpoints
import oracle
from test_configs import recipe_text

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
        if "NVFP4" in what:
            scale_2 = shared_amax(source, module) / (6 * 448)
            packed, scale, _ = NVFP4QTensor.quantize(weight, 16, weights_scaling_factor_2=scale_2)
            theirs = {"weight": packed._quantized_data, "weight_scale": scale.view(torch.float8_e4m3fn), "weight_scale_2": scale_2}
        else:
            amax = shared_amax(source, module) if what == "FP8" else weight.abs().amax(dim=1).float()
            scale = amax / 448
            theirs = {"weight": to_quantized_weight(weight, scale, "fp8" if what == "FP8" else "fp8_pc_pt"), "weight_scale": scale}
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
