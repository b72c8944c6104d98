"""vllm_decisions.py: what vLLM decides for schemes, without a GPU and without kernels.

Reads a JSON list of [quantization_config of one group, for experts] from stdin, prints a list of what vLLM would make of them: the name of
a class, or "refused: ..." with vLLM's error.
"""
import importlib
import json
import pkgutil
import sys
from types import SimpleNamespace
from unittest import mock

from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors as linear
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors_moe as moe
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import compressed_tensors_moe as choice


class Chosen(Exception):
    """A class has passed its checks, and looks for a kernel."""


def look(*args, **kwargs):
    raise Chosen


config_class = linear.CompressedTensorsConfig
config_class._check_scheme_supported = staticmethod(lambda *args, **kwargs: True)  # as on Hopper
linear.get_current_vllm_config = look
for name, value in list(vars(linear).items()):  # these read the model's config when they are made
    if name.startswith("Compressed") and hasattr(value, "get_min_capability") and value is not config_class:
        sys.modules[value.__module__].get_current_vllm_config = look
        for function in dir(sys.modules[value.__module__]):
            if function.startswith("init_") and function.endswith("kernel"):
                setattr(sys.modules[value.__module__], function, look)
for info in pkgutil.iter_modules(moe.__path__):
    if info.name.endswith("flydsl"):  # ROCm's
        continue
    module = importlib.import_module(f"{moe.__name__}.{info.name}")
    for function in dir(module):
        if function.startswith("select_") and "backend" in function:
            setattr(module, function, look)


def decide(config, experts):
    vllm = config_class.from_config(config)
    (scheme,) = vllm.target_scheme_map.values()
    try:
        if experts:
            vllm.get_scheme_dict = lambda *args: scheme
            vllm._add_fused_moe_to_target_scheme_map = lambda: None
            layer = SimpleNamespace(ckpt_gate_proj_name="g", ckpt_up_proj_name="u", ckpt_down_proj_name="d", moe_config=mock.MagicMock(
                hidden_dim=1024, intermediate_size_per_partition=1024))
            made = choice.CompressedTensorsMoEMethod.get_moe_method(vllm, layer, "experts")
        else:
            made = vllm._get_scheme_from_parts(scheme["weights"], scheme["input_activations"], format=scheme["format"], layer_name="l")
        return type(made).__name__
    except Chosen:
        return "chosen"
    except Exception as error:  # vLLM's own: NotImplementedError, ValueError, RuntimeError, AssertionError, AttributeError
        return f"refused: {type(error).__name__}: {str(error)[:200]}"


print(json.dumps([decide(*case) for case in json.load(sys.stdin)]))
