#!/usr/bin/env python3
"""Makes observers.safetensors beside this file: the error of each group that llm-compressor's searching observers leave.

Run with the compat tests' virtual environment, after make_golden.py, whose weights it takes. The observers `memoryless_mse` and `imatrix_mse` choose
scales, compressed-tensors quantizes and dequantizes with them, and the error of each group is summed in F64 with the observer's own norm: the sum of
|y - x|^2.4, or of |y - x|^3 times the importance of the column over the mean importance.

Names: "importance.<shape>" F32 [columns]; "<dtype>.<shape>.w<bits>.<sym|asym>.<32|128|channel>.<mse|importance>" F64 [rows, groups];
"<dtype>.<shape>.fp8.<mse|importance>" F64 [rows, 1]; "<dtype>.block.fp8_block.mse" F64 [row blocks, column blocks]. Of NVFP4, whose global scale moves
with what `nvfp4_expanded_mse` and `imatrix_mse` choose:
"<dtype>.<shape>.nvfp4.<mse|importance>" F32 [rows, groups], the largest magnitude chosen for each block, and ".total" F64 [1], the error that is left
in all with the global scale that follows. "<dtype>.<normal|rows|equal>.weight" are more weights for it. Each row of "<dtype>.tiny<16|64|256>.weight" is a
tensor of its own: "<dtype>.tiny<..>.totals" F64 [rows] is what `nvfp4_expanded_mse` leaves of it.
"""

import pathlib

import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle import fake_quantize
from llmcompressor.observers import Observer
from safetensors.torch import load_file, save_file

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
SHAPES = {"wide": (35, 256), "odd": (3, 130)}
STRATEGIES = {"32": ("group", 32), "128": ("group", 128), "channel": ("channel", None)}


def make_importance(columns, seed):
    generator = torch.Generator().manual_seed(seed)
    importance = torch.exp(2 * torch.randn(columns, generator=generator))
    importance[7] = 0
    importance[11] *= 1000
    importance[64:96] = 0  # a group that nothing reaches
    return importance


def more_weights():
    generator = torch.Generator().manual_seed(77)
    equal = torch.rand(8, 16, 16, generator=generator) - 0.5
    equal[:, :, 3] = 0.5  # every block could be expanded, which a global scale made of the largest magnitude does not allow
    return {
        "normal": torch.randn(24, 256, generator=generator) * 0.02,
        "rows": torch.randn(24, 128, generator=generator) * torch.exp(torch.randn(24, 1, generator=generator)),
        "equal": equal.reshape(8, 256),
    }


def block_weight():
    generator = torch.Generator().manual_seed(8)
    weight = torch.randn(256, 128, generator=generator) * torch.exp(torch.randn(256, 1, generator=generator))
    weight[200, 100] = 90  # an outlier
    return weight


def tiny_tensors(columns):
    generator = torch.Generator().manual_seed(columns)
    normal = torch.randn(24, columns, generator=generator) * torch.exp(torch.randn(24, 1, generator=generator) * 3)
    heavy = torch.randn(24, columns, generator=generator) ** 3
    return torch.cat([normal, heavy])


def observe(weight, observer_name, importance, args):
    observer = Observer.load_from_registry(observer_name, base_name="weight", args=args)
    if importance is not None:
        observer._imatrix_sum = importance.clone()
        observer._imatrix_count = torch.tensor(1)
    observer(weight)
    chosen = torch.maximum(observer.min_vals.abs(), observer.max_vals.abs())
    parameters = observer.get_qparams()
    decoded = fake_quantize(weight, parameters["scale"], parameters["zero_point"], args, global_scale=parameters["global_scale"])
    if parameters["global_scale"] is not None:
        decoded = decoded.bfloat16().to(weight.dtype)  # as it is decompressed
    difference = (decoded.double() - weight.double()).abs()
    if importance is None:
        error = difference**2.4
    else:
        error = difference**3 * (importance.double() / importance.double().mean())
    return chosen, error.reshape(weight.shape[0], -1, args.group_size or weight.shape[1]).sum(-1)


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
                            _, golden[key] = observe(weight, name, importance, args)
    nvfp4 = preset_name_to_scheme("NVFP4A16", ["Linear"]).weights
    fp8 = preset_name_to_scheme("FP8_DYNAMIC", ["Linear"]).weights
    for dtype, torch_dtype in DTYPES.items():
        used = {"wide": weights[f"{dtype}.wide.weight"]} | {name: weight.to(torch_dtype) for name, weight in more_weights().items()}
        for shape, weight in used.items():
            if shape != "wide":
                golden[f"{dtype}.{shape}.weight"] = weight
            importance = golden["importance.wide"][: weight.shape[1]]
            for short, name in (("mse", "nvfp4_expanded_mse"), ("importance", "imatrix_mse")):
                args = nvfp4.model_copy(update={"observer": name})
                chosen, error = observe(weight, name, importance if short == "importance" else None, args)
                golden[f"{dtype}.{shape}.nvfp4.{short}"] = chosen.float()
                golden[f"{dtype}.{shape}.nvfp4.{short}.total"] = error.sum().reshape(1)
            for short, name in (("mse", "memoryless_mse"), ("importance", "imatrix_mse")):
                args = fp8.model_copy(update={"observer": name})
                _, golden[f"{dtype}.{shape}.fp8.{short}"] = observe(weight, name, importance if short == "importance" else None, args)
        for columns in (16, 64, 256):
            tiny = tiny_tensors(columns).to(torch_dtype)
            golden[f"{dtype}.tiny{columns}.weight"] = tiny
            args = nvfp4.model_copy(update={"observer": "nvfp4_expanded_mse"})
            totals = [observe(tiny[row : row + 1], "nvfp4_expanded_mse", None, args)[1].sum() for row in range(len(tiny))]
            golden[f"{dtype}.tiny{columns}.totals"] = torch.stack(totals)
        fp8_block = preset_name_to_scheme("FP8_BLOCK", ["Linear"]).weights.model_copy(update={"observer": "memoryless_mse"})
        weight = block_weight().to(torch_dtype)
        golden[f"{dtype}.block.weight"] = weight
        observer = Observer.load_from_registry("memoryless_mse", base_name="weight", args=fp8_block)
        observer(weight)
        parameters = observer.get_qparams()
        decoded = fake_quantize(weight, parameters["scale"], parameters["zero_point"], fp8_block)
        error = (decoded.double() - weight.double()).abs() ** 2.4
        golden[f"{dtype}.block.fp8_block.mse"] = error.reshape(2, 128, 1, 128).sum((1, 3))
    save_file({k: v.contiguous() for k, v in golden.items()}, here / "observers.safetensors")


if __name__ == "__main__":
    main()
