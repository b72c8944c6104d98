#!/usr/bin/env python3
"""Makes float_rtn.safetensors beside this file: weights, and digests of what the libraries of the formats make of them.

Run with the compat tests' virtual environment. For FP8 (tensor, channel, block), NVFP4, MXFP4 and MXFP8 the steps of `model_free_ptq` quantize
small weights of BF16, F16 and F32; nvidia-modelopt's quantizers do the same for FP8 (tensor, channel) and NVFP4. Beside the SHA-256 of each stored
tensor stand that of what compressed-tensors decompresses, or ModelOpt's tensors dequantize, to, rounded to the dtype of the weight, and that of the
error figures of each row, summed as quant/row_error.h says.

Names: "<dtype>.<shape>.weight" is a source; "<dtype>.<shape>.<scheme>.<suffix>" belongs to it, with the suffixes of the format, `decoded` and
`errors`, all U8 [32]. The scheme "nvfp4_set" quantizes "wide" and "block" with one global scale over the two.

What the libraries do not define is left out: outliers stay below 1.75 * 2^15 (F16), where compressed-tensors' MX scales become infinite, and
F32 rows of subnormals, whose scales are so coarse that ModelOpt's quotients leave the range and become NaN. Where ModelOpt would divide by the
scale 0 of a row of zeros, the scale is 1.
"""

import hashlib
import pathlib

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from llmcompressor.entrypoints.model_free.converter import ModelFreePtqConverter
from llmcompressor.entrypoints.model_free.validate import validate_config
from make_golden import DTYPES, make_weight, row_errors
from modelopt.torch.export.quant_utils import from_quantized_weight, to_quantized_weight
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import save_file

# "block" ends inside a block of rows and of columns, "odd" inside a unit of 32 columns.
SHAPES = {"wide": (35, 256), "block": (131, 160), "odd": (3, 130), "row": (1, 32)}


def fp8(strategy):
    args = QuantizationArgs(num_bits=8, type="float", strategy=strategy, symmetric=True, dynamic=False, observer="memoryless_minmax")
    return QuantizationScheme(targets=["Linear"], weights=args)


SCHEMES = {
    "fp8_tensor": fp8("tensor"),
    "fp8_channel": fp8("channel"),
    "fp8_block": preset_name_to_scheme("FP8_BLOCK", ["Linear"]),
    "nvfp4": preset_name_to_scheme("NVFP4A16", ["Linear"]),
    "mxfp4": preset_name_to_scheme("MXFP4A16", ["Linear"]),
    "mxfp8": preset_name_to_scheme("MXFP8A16", ["Linear"]),
}
COLUMNS = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}


def compressed(scheme, weights):
    """The tensors of each weight by suffix. Weights under names that are fused share their global scale."""
    converter = ModelFreePtqConverter(validate_config(None, scheme, []))
    prefix = "model.layers.0.self_attn."
    tensors = converter.process({f"{prefix}{name}.weight": weight.clone() for name, weight in weights.items()})
    return {n: {k.rsplit(".", 1)[1]: v.detach() for k, v in tensors.items() if k.startswith(f"{prefix}{n}.")} for n in weights}


def decompressed(scheme, tensors):
    compressor = BaseCompressor.get_value_from_registry(infer_module_format(torch.nn.Linear, scheme).value)
    return compressor.decompress(dict(tensors), scheme)["weight"].detach()


def modelopt(weight):
    """(scheme, tensors, dequantized weight) of each of ModelOpt's."""
    amax = weight.float().abs().max()
    if weight.shape[1] % 16 == 0:
        quantized, scale, scale_2 = NVFP4QTensor.quantize(weight.clone(), 16)
        tensors = {"weight": quantized._quantized_data, "weight_scale": scale, "weight_scale_2": scale_2}
        yield "modelopt_nvfp4", tensors, quantized.dequantize(dtype=weight.dtype, scale=scale, double_scale=scale_2, block_sizes={-1: 16})
    scale = amax / 448
    quantized = to_quantized_weight(weight, scale, "fp8")
    yield "modelopt_fp8", {"weight": quantized, "weight_scale": scale}, from_quantized_weight(quantized, scale, "fp8", weight.dtype)
    scale = weight.float().abs().amax(-1) / 448
    if weight.dtype != torch.float32 or weight.shape[0] < 20:
        scale[scale == 0] = 1
        quantized = to_quantized_weight(weight, scale, "fp8_pc_pt")
        decoded = quantized.to(weight.dtype) * scale[:, None].to(weight.dtype)
        yield "modelopt_fp8_channel", {"weight": quantized, "weight_scale": scale}, decoded


def digest(tensor):
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return torch.tensor(list(hashlib.sha256(raw).digest()), dtype=torch.uint8)


def main():
    golden = {}

    def add(prefix, weight, tensors, decoded):
        decoded = decoded.to(weight.dtype)
        for suffix, tensor in {**tensors, "decoded": decoded, "errors": row_errors(weight, decoded)}.items():
            golden[f"{prefix}.{suffix}"] = digest(tensor)

    for d, (dtype_name, dtype) in enumerate(DTYPES.items()):
        weights = {name: make_weight(dtype, shape, 31 * d + s) for s, (name, shape) in enumerate(SHAPES.items()) if name != "row"}
        weights["row"] = weights["wide"][7:8, :32].clone()
        if dtype == torch.float16:
            for weight in weights.values():
                weight.clamp_(-50000, 50000)
        for name, weight in weights.items():
            golden[f"{dtype_name}.{name}.weight"] = weight
            for scheme_name, scheme in SCHEMES.items():
                if weight.shape[1] % COLUMNS.get(scheme_name, 1) == 0:
                    tensors = compressed(scheme, {"o_proj": weight})["o_proj"]
                    add(f"{dtype_name}.{name}.{scheme_name}", weight, tensors, decompressed(scheme, tensors))
            for scheme_name, tensors, decoded in modelopt(weight):
                add(f"{dtype_name}.{name}.{scheme_name}", weight, tensors, decoded)
        # The names of a fused set; the third has another width, which the set does not mind.
        scheme = SCHEMES["nvfp4"]
        members = {"q_proj": weights["wide"], "k_proj": weights["block"], "v_proj": weights["row"]}
        for (member, tensors), name in zip(compressed(scheme, members).items(), ("wide", "block", "row")):
            add(f"{dtype_name}.{name}.nvfp4_set", members[member], tensors, decompressed(scheme, tensors))
    save_file({k: v.contiguous() for k, v in golden.items()}, pathlib.Path(__file__).with_name("float_rtn.safetensors"))


if __name__ == "__main__":
    main()
