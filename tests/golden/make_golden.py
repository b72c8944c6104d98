#!/usr/bin/env python3
"""Makes integer_rtn.safetensors beside this file: weights, and what llm-compressor and compressed-tensors make of them.

Run with the compat tests' virtual environment. For every width 2..8, symmetric and asymmetric, groups of 32 and 128, one scale a row and one for
the whole weight, and BF16, F16 and F32, weights only (`pack-quantized`) and for 4 and 8 bits also with INT8 activations (`int-quantized`), the steps of `model_free_ptq` quantize small weights; the tensors are stored byte for byte. Beside them stand the SHA-256 of what
compressed-tensors decompresses them to, and the error figures of each row, summed as quant/row_error.h says.

Names: "<dtype>.<shape>.weight" is a source; "<dtype>.<shape>.w<bits>[a8].<sym|asym>.<32|128|channel|tensor>.<suffix>" belongs to it, with the
suffixes weight_packed or weight, weight_scale, weight_zero_point (asymmetric), weight_shape, decoded_sha256 (U8 [32]) and errors (F64 [rows, 3]: squared error, squares, largest error).
"""

import hashlib
import itertools
import pathlib

import numpy as np
import torch
from compressed_tensors.compressors import IntQuantizationCompressor, PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor.entrypoints.model_free.converter import ModelFreePtqConverter
from llmcompressor.entrypoints.model_free.validate import validate_config
from safetensors.torch import save_file

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
# Odd numbers of rows, so that zero points end inside a word; 130 columns end inside a word of codes.
SHAPES = {"wide": (35, 256), "odd": (3, 130)}
STRATEGIES = {"32": ("group", 32), "128": ("group", 128), "channel": ("channel", None), "tensor": ("tensor", None)}


def make_weight(dtype, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    rows, columns = shape
    weight = torch.randn(rows, columns, generator=generator) * torch.exp(torch.randn(rows, 1, generator=generator)) * 0.05
    weight[0, 5] = 3.0  # an outlier
    weight[1] = 0  # a row, and below a group, of zeros
    weight[2, :32] = weight[2, :32].abs() + 0.01  # only positive
    weight[2, 32:64] = -weight[2, 32:64].abs() - 0.01
    if rows > 3:
        weight[3, 32:64] = 0
        weight[3, 0:32] = -0.0
        weight[3, 64:96] = -0.0
        weight[3, 70] = 1.0
        tiny = torch.finfo(dtype).smallest_normal
        step = tiny * torch.finfo(dtype).eps  # the smallest subnormal
        weight[4] = torch.randint(-40, 41, (columns,), generator=generator).double().mul(step).float()  # subnormal scales, some of them 0
        weight[5] = torch.randint(-3, 4, (columns,), generator=generator).double().mul(step).float()
        weight[6] = torch.randint(-200, 201, (columns,), generator=generator).double().mul(tiny / 8).float()
        weight[7] = torch.randint(-8, 8, (columns,), generator=generator).float() / 16  # many ties
        weight[8] = torch.randint(-15, 16, (columns,), generator=generator).float() / 2
        weight[9] = torch.randn(columns, generator=generator) * (3000 if dtype == torch.float16 else 1e30)
        weight[10, ::2] = 1e-30
        weight[11] = 0.75
        weight[12] = -0.75
    return weight.to(dtype)


def row_errors(source, decoded):
    """Lane i % 16 takes element i; each product is rounded, then added; the lanes fold 16 -> 8 -> 4 -> 2 -> 1."""
    x = source.double().numpy()
    d = x - decoded.double().numpy()
    rows, columns = x.shape
    padded = -columns % 16
    out = np.zeros((rows, 3))
    for k, product in enumerate((d * d, x * x)):
        lanes = np.pad(product, ((0, 0), (0, padded))).reshape(rows, -1, 16)
        total = np.zeros((rows, 16))
        for step in range(lanes.shape[1]):
            total = total + lanes[:, step]
        while total.shape[1] > 1:
            half = total.shape[1] // 2
            total = total[:, :half] + total[:, half:]
        out[:, k] = total[:, 0]
    out[:, 2] = np.abs(d).max(1)
    return torch.from_numpy(out)


def quantize(weights, scheme):
    """What `model_free_ptq` does with a shard between loading and saving it: saving fails where the packed columns are no multiple of `bits`."""
    converter = ModelFreePtqConverter(validate_config(None, scheme, []))
    tensors = converter.process({f"model.{name.replace('.', '_')}.weight": weight for name, weight in weights.items()})
    by_name = {}
    for name in weights:
        prefix = f"model.{name.replace('.', '_')}."
        by_name[name] = {key[len(prefix):]: value for key, value in tensors.items() if key.startswith(prefix)}
    return by_name


def main():
    golden = {}
    weights = {}
    for d, (dtype_name, dtype) in enumerate(DTYPES.items()):
        for s, (shape_name, shape) in enumerate(SHAPES.items()):
            weights[f"{dtype_name}.{shape_name}"] = make_weight(dtype, shape, 17 * d + s)
    golden.update({f"{name}.weight": weight for name, weight in weights.items()})
    for bits, activations, symmetric in itertools.product(range(2, 9), (None, "int8_token"), (True, False)):
        if activations is None or bits in (4, 8):
            for strategy_name, (strategy, group_size) in STRATEGIES.items():
                if activations and strategy_name == "128":
                    continue
                args = QuantizationArgs(num_bits=bits, type="int", strategy=strategy, group_size=group_size, symmetric=symmetric, dynamic=False,
                                        observer="memoryless_minmax")
                token = QuantizationArgs(num_bits=8, type="int", strategy="token", symmetric=True, dynamic=True, observer=None)
                scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=token if activations else None)
                compressor = IntQuantizationCompressor if activations else PackedQuantizationCompressor
                used = {n: w for n, w in weights.items() if group_size is None or w.shape[1] % group_size == 0}
                for name, tensors in quantize(used, scheme).items():
                    prefix = f"{name}.w{bits}{'a8' if activations else ''}.{'sym' if symmetric else 'asym'}.{strategy_name}"
                    for suffix, tensor in tensors.items():
                        golden[f"{prefix}.{suffix}"] = tensor
                    decoded = compressor.decompress(tensors, scheme)["weight"]
                    assert decoded.dtype == used[name].dtype
                    raw = decoded.contiguous().view(torch.uint8).numpy().tobytes()
                    golden[f"{prefix}.decoded_sha256"] = torch.tensor(list(hashlib.sha256(raw).digest()), dtype=torch.uint8)
                    golden[f"{prefix}.errors"] = row_errors(used[name], decoded)
    save_file({k: v.contiguous() for k, v in golden.items()}, pathlib.Path(__file__).with_name("integer_rtn.safetensors"))


if __name__ == "__main__":
    main()
