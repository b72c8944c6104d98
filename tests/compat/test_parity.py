"""Quantized tensors have llm-compressor's bytes, all others the source's."""

import json
import re

import pytest

import checkpoints
import oracle

SCHEMES = ("W4A16", "W4A16_ASYM", "W8A16")
GROUPS = ("32", "128", "channel")
TARGETS = ("Linear", "routed_experts")


def names_in(message):
    """Module names of an error message; "layers.{0,2-3}.x" stands for three."""
    names = set(re.findall(r"[\w.{},-]+", message))
    while any("{" in name for name in names):
        for name in [n for n in names if "{" in n]:
            names.remove(name)
            head, _, rest = name.partition("{")
            numbers, _, tail = rest.partition("}")
            for part in numbers.split(","):
                first, _, last = part.partition("-")
                names |= {f"{head}{i}{tail}" for i in range(int(first), int(last or first) + 1)}
    return names


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("model", checkpoints.MODELS)
def test_bytes_equal_llm_compressor(quantized, checkpoint, model, scheme, group, targets):
    source_shapes = checkpoints.shapes(checkpoint(model))
    modules = dict(oracle.targeted(source_shapes, targets))
    pair = quantized(model, scheme, group, targets)
    if not modules:  # a dense model has no routed experts
        assert pair.process.returncode == 1
        assert "matches" in pair.process.stderr and targets in pair.process.stderr
        assert not pair.ours.exists(), "a refused job leaves nothing behind"
        return
    if group != "channel" and any(shape[1] % int(group) for shape in modules.values()):
        assert pair.refusal is not None, "llm-compressor is expected to refuse a group that does not divide"
        assert pair.process.returncode == 1
        assert {m for m, shape in modules.items() if shape[1] % int(group)} <= names_in(pair.process.stderr)
        assert not pair.ours.exists(), "a refused job leaves nothing behind"
        return
    assert pair.refusal is None, pair.refusal
    assert pair.process.returncode == 0, pair.process.stderr

    source, ours, theirs = (checkpoints.contents(d) for d in (pair.source, pair.ours, pair.theirs))
    assert sorted(ours) == sorted(theirs)
    quantized_count = 0
    for name, tensor in ours.items():
        module = name.rpartition(".")[0]
        if module in modules:
            assert tensor[:2] == theirs[name][:2], name
            assert tensor[2] == theirs[name][2], f"{name}: bytes differ from llm-compressor's"
            quantized_count += 1
        else:
            assert tensor == source[name], f"{name}: bytes differ from the source's"
    suffixes = 4 if scheme.endswith("ASYM") else 3
    assert quantized_count == suffixes * len(modules)

    index = pair.ours / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        assert weight_map == {n: p.name for p, header, _ in checkpoints.headers(pair.ours) for n in header}


def test_micro_o_proj_does_not_divide_by_128(quantized):
    pair = quantized("laguna-micro", "W4A16", "128", "Linear")
    assert pair.refusal is not None
    assert pair.process.returncode == 1
    assert "model.layers.1.self_attn.o_proj" in names_in(pair.process.stderr)
