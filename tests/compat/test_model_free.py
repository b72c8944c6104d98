"""Floats and W8A8 beside llm-compressor's `model_free_ptq`: equal bytes, or a difference whose cause is shown (docs/formats.md).

Of each difference the test computes beforehand, from the source alone, which modules it concerns and what llm-compressor makes of them.
So it fails when llm-compressor mends one, and when there is another.
"""

import re
import shutil

import pytest
import safetensors.torch

import checkpoints
import families
import oracle
import parity_table
from test_formats import SCHEMES, as_bytes, quantize

NAMES = ("W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "MXFP4A16", "MXFP8A16")
# All schemes on a dense model and on one of experts; of the others, one scheme of each kind.
CASES = [(scheme, family) for scheme in NAMES for family in ("llama", "qwen3_moe")]
CASES += [(scheme, family) for family in ("laguna-micro", "mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "llama4_text")
          for scheme in ("FP8_DYNAMIC", "NVFP4A16")]

# What llm-compressor gives one global scale, by the names of the weights.
_FUSED_THERE = (r"(attn|attention)\.([qkv]_proj)$", r"mlp\.((?:gate|up)_proj)$", r"\.(w[13])$")
_KINDS = (
    (r"\.experts\.\d+\.(gate|up)_proj$", "gate and up of routed experts"),
    (r"\.shared_experts?\.(gate|up)_proj$", "gate and up of shared experts"),
    (r"\.feed_forward\.(gate|up)_proj$", "gate and up of feed_forward"),
    (r"\.(q_a_proj|kv_a_proj_with_mqa)$", "q_a and kv_a"),
)
TRANSPOSED = ("gpt_oss", "llama4_text")


def amax_there(weights, module):
    """Largest magnitude over the weights with which llm-compressor gives this one a global scale."""
    if any(re.search(pattern, module) for pattern in _FUSED_THERE):
        return families.set_amax(weights, module)
    return weights[module].float().abs().max()


def cut_there(source):
    """Modules of stacks as llm-compressor cuts them: along the first axis of each expert's matrix, whatever the model."""
    cut = {}
    for name, entry in source.items():
        if not families.is_stack(name, entry[1]):
            continue
        base, _, leaf = name.rpartition(".")
        for expert, slab in enumerate(oracle.as_tensor(entry)):
            parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
            for part, rows in zip(parts, slab.chunk(len(parts))):
                cut[f"{base}.{expert}.{part}"] = rows.contiguous()
    return cut


def in_one_file(source, directory):
    directory.mkdir()
    tensors = {name: oracle.as_tensor(entry) for name, entry in checkpoints.contents(source).items()}
    safetensors.torch.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(source / "config.json", directory)
    return directory


def expect(scheme, weight, amax):
    return {suffix: as_bytes(tensor) for suffix, tensor in SCHEMES[scheme](weight, amax).items()}


def found(contents, module):
    """Bytes of a module's tensors by suffix, but for its bias."""
    return {n[len(module) + 1:]: t[2] for n, t in contents.items() if n.rpartition(".")[0] == module and not n.endswith(".bias")}


@pytest.mark.parametrize("scheme,family", CASES)
def test_bytes_equal_but_where_the_cause_is_known(quern, checkpoint, family_checkpoint, tmp_path, scheme, family):
    trained = family in checkpoints.TRAINED
    source = checkpoint(family) if trained else family_checkpoint(family)
    weights = families.linear_weights("laguna" if trained else family, source)
    quantize(quern, source, tmp_path / "ours", scheme)
    refusal = oracle.quantize_preset(source, tmp_path / "theirs", scheme)
    cut_sets = (scheme, family) == ("NVFP4A16", "mixtral")
    if cut_sets:  # its first file ends between the w1 and the w3 of some experts
        assert "twice before completing set" in str(refusal)
        refusal = oracle.quantize_preset(in_one_file(source, tmp_path / "whole"), tmp_path / "theirs", scheme)
    assert refusal is None, refusal

    contents, ours, theirs = (checkpoints.contents(d) for d in (source, tmp_path / "ours", tmp_path / "theirs"))
    cut = cut_there(contents) if family in TRANSPOSED else {}
    assert all(module in weights for module in cut)
    differing, differing_scales = set(), set()
    for module, weight in weights.items():
        amax, amax_of_theirs = families.set_amax(weights, module), amax_there(weights, module)
        here = found(ours, module)
        assert here == expect(scheme, weight, amax), module
        if module in cut:
            there = expect(scheme, cut[module], cut[module].float().abs().max())
            assert there != here, f"{module}: a stack that is stored [in, out] is cut right"
            differing.add(module)
        else:
            there = expect(scheme, weight, amax_of_theirs)
            if there != here:
                assert scheme == "NVFP4A16" and amax_of_theirs < amax, module
                differing_scales.add(module)
        assert found(theirs, module) == there, f"{module}: not what llm-compressor is known to make"

    # All other tensors are the source's, here and there.
    for name, entry in contents.items():
        if name.rpartition(".")[0] not in weights and not families.is_stack(name, entry[1]):
            assert ours[name] == entry == theirs[name], name
    assert sorted(ours) == sorted(theirs)

    kinds = [kind for pattern, kind in _KINDS if any(re.search(pattern, m) for m in differing_scales)]
    assert all(any(re.search(pattern, m) for pattern, _ in _KINDS) for m in differing_scales)
    reasons = [f"{', '.join(kinds)}: no common global scale there"] if kinds else []
    reasons += ["routed experts: cut along the wrong axis there"] if differing else []
    reasons += ["checkpoints whose files end within a set, which it refuses"] if cut_sets else []
    parity_table.MODEL_FREE.add(scheme, "BF16", family, "equal" + (f", but for {'; '.join(reasons)}" if reasons else ""))


@pytest.mark.parametrize("scheme", ("FP8", "NVFP4"))
def test_static_activations_are_refused_there(family_checkpoint, tmp_path, scheme):
    refusal = oracle.quantize_preset(family_checkpoint("llama"), tmp_path / "theirs", scheme)
    assert refusal is not None and "cannot calibrate activations" in str(refusal)
    parity_table.MODEL_FREE.add(scheme, "any", "any", "refused there: measured activations are needed")


def test_fp8_blocks_that_do_not_divide_the_columns_fail_there(quern, checkpoint, tmp_path):
    """laguna-micro's o_proj has 192 columns in some layers."""
    source = checkpoint("laguna-micro")
    weights = families.linear_weights("laguna", source)
    assert any(w.shape[1] % 128 for w in weights.values())
    assert oracle.quantize_preset(source, tmp_path / "theirs", "FP8_BLOCK") is not None
    quantize(quern, source, tmp_path / "ours", "FP8_BLOCK")
    ours = checkpoints.contents(tmp_path / "ours")
    for module, weight in weights.items():
        assert found(ours, module) == expect("FP8_BLOCK", weight, None), module
    parity_table.MODEL_FREE.add("FP8_BLOCK", "BF16", "laguna-micro", "it fails there: columns that are no multiple of 128")
