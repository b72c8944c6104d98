"""Every scheme, observer and export: what `quern dequantize` gives is, bit for bit, what the format's own library decodes."""

import json

import pytest
import torch
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from modelopt.torch.quantization.qtensor.fp8_tensor import FP8QTensor

import checkpoints
import one_layer_each
import oracle

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
PRESETS = [name for name in PRESET_SCHEMES if name != "UNQUANTIZED"] + ["FP8A16", "W2A16_ASYM", "W3A16_ASYM", "W8A16_ASYM"]
SEARCHED = ("W3A16", "W4A16", "W4A16_ASYM", "W8A16", "W8A8", "W4A8", "FP8_DYNAMIC", "NVFP4A16", "NVFP4")
COMPRESSED_TENSORS = [f"scheme: {name}" for name in PRESETS]
COMPRESSED_TENSORS += [f"scheme: {name}, observer: {observer}" for name in SEARCHED for observer in ("mse", "imatrix_mse")]
COMPRESSED_TENSORS += [f"scheme: {name}, observer: nvfp4_sweep" for name in ("NVFP4A16", "NVFP4")]
COMPRESSED_TENSORS += [f"scheme: {name}, group_size: channel" for name in ("W4A16", "W4A16_ASYM", "W8A16")]
COMPRESSED_TENSORS += [f"weights: {{num_bits: {bits}, type: int, strategy: tensor, symmetric: {symmetric}}}"
                       for bits in (4, 8) for symmetric in ("true", "false")]
COMPRESSED_TENSORS += [f"weights: {{num_bits: {bits}, type: int, strategy: {strategy}, symmetric: false}}, "
                       "input_activations: {num_bits: 8, type: int, strategy: token, dynamic: true, symmetric: true}"
                       for bits in (4, 8) for strategy in ("tensor", "channel")]
MODELOPT = ["scheme: FP8", "scheme: FP8_DYNAMIC", "scheme: NVFP4", "scheme: NVFP4A16"]
MODELOPT += [f"scheme: {name}, observer: {observer}" for name in ("NVFP4", "NVFP4A16")
             for observer in ("mse", "imatrix_mse", "nvfp4_sweep")]
MODELOPT += [f"scheme: FP8_DYNAMIC, observer: {observer}" for observer in ("mse", "imatrix_mse")]


def weights_for(schemes, dtype, rows=37, columns=256):
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(len(schemes), rows, columns, generator=generator) * torch.exp(torch.randn(columns, generator=generator) / 2) / 16
    return [w.to(dtype) for w in values]


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def reported(out):
    return {m["module"]: m["error"]["sum_squared_error"] for m in json.loads((out / "quern_manifest.json").read_text())["modules"]}


def squared(difference):
    return pytest.approx(float(difference.square().sum()), rel=1e-12, abs=0)


def plain(quern, out, dtype):
    process = quern("dequantize", out, "-o", out.parent / "plain", "--dtype", dtype.lower())
    assert process.returncode == 0, process.stderr
    return checkpoints.contents(out.parent / "plain")


@pytest.mark.parametrize("source,target", (("BF16", "BF16"), ("F16", "F16"), ("F32", "F32"), ("BF16", "F32"), ("F32", "BF16")))
def test_compressed_tensors(quern, quantization_config, tmp_path, source, target):
    weights = weights_for(COMPRESSED_TENSORS, DTYPES[source])
    out = one_layer_each.quantize(quern, tmp_path, weights, COMPRESSED_TENSORS)
    stored, values, config, errors = checkpoints.contents(out), plain(quern, out, target), quantization_config(out), reported(out)
    for i, scheme in enumerate(COMPRESSED_TENSORS):
        module = one_layer_each.module(i)
        decompressed = oracle.decompress(stored, config, module)
        assert errors[module] == squared(weights[i].double() - decompressed.to(DTYPES[source]).double()), scheme
        theirs = decompressed.to(DTYPES[target])
        ours = oracle.as_tensor(values[f"{module}.weight"])
        assert ours.dtype == theirs.dtype and torch.equal(bits(ours), bits(theirs)), scheme
        # No scheme is so bad as to be another's values.
        assert (ours.float() - weights[i].float()).norm() < 0.7 * weights[i].float().norm(), scheme


def _decoded_by_modelopt(tensors, shape, dtype):
    scale = tensors["weight_scale"]
    if tensors["weight"].dtype == torch.uint8:
        tensor = NVFP4QTensor(shape, dtype, tensors["weight"])
        return tensor.dequantize(dtype, scale=scale, double_scale=tensors["weight_scale_2"], block_sizes={-1: 16})
    return FP8QTensor(shape, dtype, tensors["weight"]).dequantize(dtype, scale=scale if scale.dim() == 0 else scale[:, None])


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_modelopt(quern, tmp_path, source, target):
    """Its files do not say what dtype the weights had: the library decodes to the one that it is asked for."""
    weights = weights_for(MODELOPT, DTYPES[source])
    out = one_layer_each.quantize(quern, tmp_path, weights, MODELOPT, "--export", "modelopt")
    stored, values, errors = checkpoints.contents(out), plain(quern, out, target), reported(out)
    for i, scheme in enumerate(MODELOPT):
        module = one_layer_each.module(i)
        tensors = {n[len(module) + 1:]: oracle.as_tensor(t) for n, t in stored.items() if n.startswith(module + ".")}
        as_source = _decoded_by_modelopt(tensors, weights[i].shape, DTYPES[source])
        assert errors[module] == squared(weights[i].double() - as_source.double()), scheme
        theirs = _decoded_by_modelopt(tensors, weights[i].shape, DTYPES[target])
        ours = oracle.as_tensor(values[f"{module}.weight"])
        assert ours.dtype == theirs.dtype and torch.equal(bits(ours), bits(theirs)), scheme
        assert (ours.float() - weights[i].float()).norm() < 0.2 * weights[i].float().norm(), scheme
    verified = quern("verify", out.parent / "plain", "--against", out)
    assert verified.returncode == 0, verified.stderr + verified.stdout
