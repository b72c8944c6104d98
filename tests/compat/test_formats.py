"""Every scheme has the oracle's bytes, from every family and every dtype; docs/formats.md holds the table of what these tests find."""

import json

import pytest
import torch

import checkpoints
import families
import oracle
import parity_table
import reference

# Scheme -> tensors by suffix of a weight, from the definitions in PyTorch. `amax` is that of the fused set.
SCHEMES = {
    "W3A16": lambda w, amax: reference.pack_quantized(w, 3, 32),
    "W4A16": lambda w, amax: reference.pack_quantized(w, 4, 32),
    "W4A16_ASYM": lambda w, amax: reference.pack_quantized(w, 4, 32, symmetric=False),
    "W8A16": lambda w, amax: reference.pack_quantized(w, 8, 32),
    "W8A8": lambda w, amax: _int_quantized(w),
    "FP8_DYNAMIC": lambda w, amax: reference.fp8(w),
    "FP8_BLOCK": lambda w, amax: reference.fp8(w, 128),
    "NVFP4A16": reference.nvfp4,
    "MXFP4A16": lambda w, amax: reference.mx(w, 4),
    "MXFP8A16": lambda w, amax: reference.mx(w, 8),
}
# The same with other numbers of bits, and with activations that are quantized as a model runs.
RELATED = {f"W{bits}A16": lambda w, amax, bits=bits: reference.pack_quantized(w, bits, 32) for bits in (2, 5, 6, 7)}
RELATED |= {f"W{bits}A16_ASYM": lambda w, amax, bits=bits: reference.pack_quantized(w, bits, 32, symmetric=False) for bits in (2, 3, 8)}
RELATED |= {
    "W4A8": lambda w, amax: _int_quantized(w, 4, 32),
    "FP8A16": SCHEMES["FP8_DYNAMIC"],
    "MXFP4": SCHEMES["MXFP4A16"],
    "MXFP8": SCHEMES["MXFP8A16"],
}
GROUPED = ("W3A16", "W4A16", "W4A16_ASYM", "W8A16", "W4A8", *(name for name in RELATED if "A16" in name and name != "FP8A16"))
MODELOPT = {
    "NVFP4A16": reference.modelopt_nvfp4,
    "FP8_DYNAMIC": lambda w, amax: reference.modelopt_fp8(w, per_channel=True),
}


def _int_quantized(weight, bits=8, group=None):
    codes, scale, _ = reference.integer(weight, bits, group)
    return {"weight": codes.to(torch.int8), "weight_scale": scale}


def as_bytes(tensor):
    return tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()


def compare(weights, expected, output):
    """Bytes of all quantized modules of an output equal the expected ones; returns the number of modules."""
    stored = checkpoints.contents(output)
    by_module = {}
    for name, entry in stored.items():
        module, _, suffix = name.rpartition(".")
        by_module.setdefault(module, {})[suffix] = entry
    for module, weight in weights.items():
        tensors = expected(weight, families.set_amax(weights, module))
        found = by_module.get(module, {})
        assert sorted(s for s in found if s != "bias") == sorted(tensors), module
        for suffix, tensor in tensors.items():
            assert tuple(found[suffix][1]) == tuple(tensor.shape), f"{module}.{suffix}"
            assert found[suffix][2] == as_bytes(tensor), f"{module}.{suffix}: bytes differ from the definition"
    return len(weights)


def quantize(quern, source, out, scheme, *options):
    group = ("--group-size", "32") if scheme in GROUPED else ()
    process = quern("quantize", source, "-o", out, "--scheme", scheme, *group, "--targets", "Linear", "--max-shard-size", "1MiB", *options)
    assert process.returncode == 0, process.stderr


def run(quern, source, out, scheme, *options):
    quantize(quern, source, out, scheme, *options)
    verified = quern("verify", out, "--against", source)
    assert verified.returncode == 0, verified.stderr + verified.stdout


# All schemes on two families, three on each of the others; all dtypes on one, and two schemes in turn in them on each of the others.
CASES = [(scheme, "BF16", family) for scheme in SCHEMES for family in ("llama", "qwen3_moe")]
CASES += [(scheme, "BF16", family) for family in families.FAMILIES if family not in ("llama", "qwen3_moe")
          for scheme in ("W4A16_ASYM", "FP8_DYNAMIC", "NVFP4A16")]
CASES += [(scheme, dtype, "llama") for scheme in SCHEMES for dtype in ("F16", "F32")]
CASES += [(scheme, "BF16", family) for scheme in RELATED for family in ("llama", "qwen3_moe")]
CASES += [(list(SCHEMES)[(i + turn) % len(SCHEMES)], dtype, family) for i, family in enumerate(families.FAMILIES) if family != "llama"
          for turn, dtype in ((0, "F16"), (5, "F32"))]


@pytest.mark.parametrize("scheme,dtype,family", CASES)
def test_bytes_equal_the_definition(quern, family_checkpoint, tmp_path, scheme, dtype, family):
    source = family_checkpoint(family, dtype)
    weights = families.linear_weights(family, source)
    run(quern, source, tmp_path / "out", scheme)
    with parity_table.DEFINITIONS.row(scheme, dtype, family):
        assert compare(weights, (SCHEMES | RELATED)[scheme], tmp_path / "out") > 0
    others = {n: e for n, e in checkpoints.contents(source).items()
              if n.removesuffix(".weight") not in weights and not families.is_stack(n, e[1])}
    stored = checkpoints.contents(tmp_path / "out")
    for name, entry in others.items():
        assert stored[name] == entry, f"{name}: bytes differ from the source's"


@pytest.mark.parametrize("family", ("llama", "qwen3_moe", "deepseek_v3", "llama4_text"))
@pytest.mark.parametrize("scheme", MODELOPT)
def test_modelopt_export_equals_the_definition(quern, family_checkpoint, tmp_path, scheme, family):
    source = family_checkpoint(family)
    weights = families.linear_weights(family, source)
    run(quern, source, tmp_path / "out", scheme, "--export", "modelopt")
    with parity_table.DEFINITIONS.row(f"{scheme} --export modelopt", "BF16", family):
        compare(weights, MODELOPT[scheme], tmp_path / "out")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("model", checkpoints.TRAINED)
def test_trained_checkpoints(quern, checkpoint, quantization_config, tmp_path, scheme, model):
    """The trained checkpoints, compared with the definition; compressed-tensors decompresses to the error that was reported."""
    source = checkpoint(model)
    weights = {m: w for m, w in families.linear_weights("laguna", source).items()}
    if scheme == "FP8_BLOCK" or any(w.shape[1] % 32 for w in weights.values()):
        weights = {m: w for m, w in weights.items() if families.is_routed(m)}
    out = tmp_path / "out"
    group = ("--group-size", "32") if scheme in GROUPED else ()
    targets = "Linear" if len(weights) == len(families.linear_weights("laguna", source)) else "routed_experts"
    process = quern("quantize", source, "-o", out, "--scheme", scheme, *group, "--targets", targets)
    assert process.returncode == 0, process.stderr
    with parity_table.DEFINITIONS.row(scheme, "BF16", model):
        compare(weights, SCHEMES[scheme], out)
    stored, config = checkpoints.contents(out), quantization_config(out)
    errors = {m["module"]: m["error"] for m in json.loads((out / "quern_manifest.json").read_text())["modules"]}
    for module in list(weights)[:: max(1, len(weights) // 20)]:
        value = oracle.decompress(stored, config, module)
        difference = weights[module].double() - value.to(weights[module].dtype).double()
        assert errors[module]["sum_squared_error"] == pytest.approx(float((difference ** 2).sum()), rel=1e-12, abs=0)
        assert errors[module]["max_abs_error"] == float(difference.abs().max())
