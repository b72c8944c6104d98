#!/usr/bin/env python3
"""Makes observers.safetensors beside this file: the error of each group that llm-compressor's searching observers leave.

Run with the compat tests' virtual environment, after make_golden.py, whose weights it takes. The observers `memoryless_mse` and `imatrix_mse` choose
scales, compressed-tensors quantizes and dequantizes with them, and the error of each group is summed in F64 with the observer's own norm: the sum of
|y - x|^2.4, or of |y - x|^3 times the importance of the column over the mean importance.

Names: "importance.<shape>" F32 [columns]; "<dtype>.<shape>.w<bits>.<sym|asym>.<32|128|channel>.<mse|importance>" F64 [rows, groups].
"""

import pathlib

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import fake_quantize
from llmcompressor.observers import Observer
from safetensors.torch import load_file, save_file

DTYPES = ("bf16", "f16", "f32")
SHAPES = {"wide": (35, 256), "odd": (3, 130)}
STRATEGIES = {"32": ("group", 32), "128": ("group", 128), "channel": ("channel", None)}


def make_importance(columns, seed):
    generator = torch.Generator().manual_seed(seed)
    importance = torch.exp(2 * torch.randn(columns, generator=generator))
    importance[7] = 0
    importance[11] *= 1000
    importance[64:96] = 0  # a group that nothing reaches
    return importance


def group_errors(weight, observer_name, importance, args):
    observer = Observer.load_from_registry(observer_name, base_name="weight", args=args)
    if importance is not None:
        observer._imatrix_sum = importance.clone()
        observer._imatrix_count = torch.tensor(1)
    observer(weight)
    parameters = observer.get_qparams()
    decoded = fake_quantize(weight, parameters["scale"], parameters["zero_point"], args)
    difference = (decoded.double() - weight.double()).abs()
    if importance is None:
        error = difference**2.4
    else:
        error = difference**3 * (importance.double() / importance.double().mean())
    return error.reshape(weight.shape[0], -1, args.group_size or weight.shape[1]).sum(-1)


def main():
    here = pathlib.Path(__file__).parent
    weights = load_file(here / "integer_rtn.safetensors")
    golden = {f"importance.{name}": make_importance(shape[1], 5 + i) for i, (name, shape) in enumerate(SHAPES.items())}
    for dtype in DTYPES:
        for shape, (_, columns) in SHAPES.items():
            weight = weights[f"{dtype}.{shape}.weight"]
            for bits in (2, 3, 4, 8):
                for symmetric in (True, False):
                    for strategy_name, (strategy, group_size) in STRATEGIES.items():
                        if group_size and columns % group_size:
                            continue
                        for short, name in (("mse", "memoryless_mse"), ("importance", "imatrix_mse")):
                            args = QuantizationArgs(num_bits=bits, type="int", strategy=strategy, group_size=group_size, symmetric=symmetric,
                                                    dynamic=False, observer=name)
                            importance = golden[f"importance.{shape}"] if short == "importance" else None
                            key = f"{dtype}.{shape}.w{bits}.{'sym' if symmetric else 'asym'}.{strategy_name}.{short}"
                            golden[key] = group_errors(weight, name, importance, args)
    save_file({k: v.contiguous() for k, v in golden.items()}, here / "observers.safetensors")


if __name__ == "__main__":
    main()
