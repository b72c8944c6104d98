"""llm-compressor and compressed-tensors, asked for the same things that Quern is asked for."""

import re

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from compressed_tensors.compressors import compress_module
from llmcompressor import model_free_ptq
from llmcompressor.entrypoints.model_free.lifecycle import calibrate_weight, initialize_quantized_linear
from loguru import logger

logger.remove()

# What Quern never quantizes unless it is named: llm-compressor has to be told.
IGNORE = ["lm_head", r"re:.*embed_tokens$", r"re:.*\.gate$", r"re:.*shared_expert_gate$", r"re:.*\.router$"]
TARGETS = {"Linear": ["Linear"], "routed_experts": [r"re:.*\.experts\.\d+\.\w+$"]}


def scheme_for(name, group, targets):
    scheme = preset_name_to_scheme(name, list(TARGETS[targets]))
    if group == "channel":
        scheme.weights.strategy, scheme.weights.group_size = "channel", None
    else:
        scheme.weights.strategy, scheme.weights.group_size = "group", int(group)
    scheme.weights.observer = "memoryless_minmax"
    return scheme


def _model_free_ptq(source, out, scheme):
    """Returns the error that it raised, or None."""
    try:
        model_free_ptq(str(source), str(out), scheme=scheme, ignore=IGNORE, max_workers=2, device="cpu")
    except Exception as error:  # whatever it raises is its refusal
        return error
    return None


def quantize(source, out, name, group, targets):
    """Returns the error that model_free_ptq raised, or None."""
    return _model_free_ptq(source, out, scheme_for(name, group, targets))


def quantize_preset(source, out, name):
    """The same for all linear weights, with a preset as it is."""
    scheme = preset_name_to_scheme(name, ["Linear"])
    scheme.weights.observer = "memoryless_minmax"
    return _model_free_ptq(source, out, scheme)


def compress_weight(weight, name):
    """Tensors by suffix: what model_free_ptq does with one weight under a preset."""
    scheme = preset_name_to_scheme(name, ["Linear"])
    scheme.weights.observer = "memoryless_minmax"
    module = initialize_quantized_linear(weight, scheme, "cpu")
    calibrate_weight(module)
    compress_module(module)
    return module.state_dict()


def targeted(tensors, targets):
    """Modules that a target means, from {tensor: (dtype, shape)}."""
    for name, (_, shape) in tensors.items():
        module, _, parameter = name.rpartition(".")
        if parameter != "weight" or len(shape) != 2 or module.endswith("norm"):
            continue
        if any(module == i or (i.startswith("re:") and re.match(i[3:], module)) for i in IGNORE):
            continue
        if targets == "Linear" or re.match(TARGETS[targets][0][3:], module):
            yield module, shape


def scheme_of(config, module):
    """The scheme that compressed-tensors' own matching gives a module by its name."""
    parsed = QuantizationConfig.model_validate({k: v for k, v in config.items() if k not in ("version", "transform_config")})
    for scheme in parsed.config_groups.values():
        for target in scheme.targets:
            if target == "Linear" or target == module or (target.startswith("re:") and re.match(target[3:], module)):
                return scheme
    return None


def _to_torch(dtype, shape, data):
    kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32, "I64": torch.int64,
             "I8": torch.int8, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}
    if not data:
        return torch.empty(shape, dtype=kinds[dtype])
    return torch.frombuffer(bytearray(data), dtype=kinds[dtype]).reshape(shape)


def decompress(tensors, config, module):
    """The weight of one module through compressed-tensors' own decompression; `tensors` as checkpoints.contents gives them."""
    scheme = scheme_of(config, module)
    state = {n[len(module) + 1:]: _to_torch(*t) for n, t in tensors.items() if n.startswith(module + ".")}
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    return compressor.decompress(state, scheme)["weight"]


def as_tensor(entry):
    return _to_torch(*entry)
