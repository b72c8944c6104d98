"""Weights that break other tools, in every scheme: the bytes are those of llm-compressor's own steps for one weight, or differ as
docs/formats.md says, and what compressed-tensors decodes is finite."""

import json
import struct

import pytest
import torch

import checkpoints
import one_layer_each
import oracle
import reference
from test_formats import as_bytes

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
SCHEMES = ("W3A16", "W4A16", "W4A16_ASYM", "W8A16", "W8A8", "W4A8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "MXFP4A16", "MXFP8A16")


def _base(rows, columns):
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    return torch.randn(rows, columns, generator=generator) / 8


def _group_of_zeros(dtype):
    w = _base(6, 256)
    w[1, :128] = 0
    w[4] = 0
    return w


def _outlier(dtype):
    w = _base(6, 256)
    w[2, 77] = torch.finfo(dtype).max / 4
    w[3, 5] = -torch.finfo(dtype).max / 8
    return w


def _subnormals(dtype):
    w = _base(6, 256)
    w[1] *= torch.finfo(dtype).tiny
    w[2, :128] *= torch.finfo(dtype).tiny / 8
    return w


def _all_subnormal(dtype):
    return _base(6, 256) * torch.finfo(dtype).tiny


def _negative_zeros(dtype):
    w = _base(6, 256)
    w[:, ::3] = -0.0
    w[3] = -0.0
    return w


KINDS = {
    "zeros in groups and rows": _group_of_zeros,
    "nothing but zeros": lambda dtype: torch.zeros(6, 256),
    "one huge outlier": _outlier,
    "subnormal values": _subnormals,
    "nothing but subnormal values": _all_subnormal,
    "negative zeros": _negative_zeros,
    "an odd number of rows": lambda dtype: _base(37, 256),
    "one row": lambda dtype: _base(1, 256),
    "one group": lambda dtype: _base(1, 128),
    "one value everywhere": lambda dtype: torch.full((6, 256), -0.375),
}
CASES = [(scheme, kind) for scheme in SCHEMES for kind in KINDS]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_and_values(quern, quantization_config, tmp_path, dtype):
    weights = [KINDS[kind](DTYPES[dtype]).to(DTYPES[dtype]) for _, kind in CASES]
    out = one_layer_each.quantize(quern, tmp_path, weights, [f"scheme: {scheme}" for scheme, _ in CASES])
    process = quern("dequantize", out, "-o", tmp_path / "plain", "--dtype", dtype.lower())
    assert process.returncode == 0, process.stderr
    stored, plain, config = checkpoints.contents(out), checkpoints.contents(tmp_path / "plain"), quantization_config(out)
    wrong = []
    for i, (scheme, kind) in enumerate(CASES):
        module = one_layer_each.module(i)
        ours = {n[len(module) + 1:]: t[2] for n, t in stored.items() if n.startswith(module + ".")}
        theirs = {suffix: as_bytes(tensor) for suffix, tensor in oracle.compress_weight(weights[i], scheme).items()}
        if ours != theirs:
            wrong.append((scheme, kind))
        decoded = oracle.decompress(stored, config, module)
        if not decoded.isfinite().all():
            wrong.append((scheme, kind, "not finite"))
        value = oracle.as_tensor(plain[f"{module}.weight"])
        if not torch.equal(value.view(torch.uint8), decoded.to(DTYPES[dtype]).contiguous().view(torch.uint8)):
            wrong.append((scheme, kind, "dequantize"))
        if (value[weights[i] == 0] != 0).any():
            wrong.append((scheme, kind, "zeros"))
    assert not wrong


@pytest.mark.parametrize("dtype", DTYPES)
def test_powers_of_two_end_with_the_dtype(quern, tmp_path, dtype):
    """The power of two of a group whose largest magnitude is at least 1.75 times the last one is infinite in compressed-tensors."""
    finfo = torch.finfo(DTYPES[dtype])
    weights, schemes = [], ("MXFP4A16", "MXFP8A16")
    for _ in schemes:
        w = _base(4, 256)
        w[1, 40] = finfo.max
        weights.append(w.to(DTYPES[dtype]))
    out = one_layer_each.quantize(quern, tmp_path, weights, [f"scheme: {scheme}" for scheme in schemes])
    stored = checkpoints.contents(out)
    for i, (scheme, element) in enumerate(zip(schemes, ("weight_packed", "weight"))):
        module = one_layer_each.module(i)
        theirs = oracle.compress_weight(weights[i], scheme)
        ours = {suffix: oracle.as_tensor(stored[f"{module}.{suffix}"]) for suffix in theirs}
        same = torch.ones(4, 8, dtype=torch.bool)
        same[1, 1] = False
        codes = {k: t[element].view(torch.uint8).reshape(4, 8, -1) for k, t in (("ours", ours), ("theirs", theirs))}
        assert torch.equal(ours["weight_scale"][same], theirs["weight_scale"].view(torch.uint8)[same]), scheme
        assert torch.equal(codes["ours"][same], codes["theirs"][same]), scheme
        assert theirs["weight_scale"].view(torch.uint8)[1, 1] == 127 and not (codes["theirs"][1, 1] & 0x7F).any(), scheme
        _, exponent = torch.frexp(torch.tensor(finfo.max))
        assert ours["weight_scale"][1, 1] == 127 + exponent - {"MXFP4A16": 2, "MXFP8A16": 8}[scheme], scheme
        assert (codes["ours"][1, 1] & 0x7F).any(), scheme


def _spoilt(dtype):
    """A weight with three elements that are no finite number, and what they become."""
    w = _base(6, 256).to(dtype)
    clamped = w.clone()
    half = torch.finfo(dtype).max / 2
    for (row, column), value, becomes in (((1, 3), "nan", 0.0), ((2, 200), "inf", half), ((5, 7), "-inf", -half)):
        w[row, column], clamped[row, column] = float(value), becomes
    return w, clamped


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nonfinite_elements_fail_naming_tensor_and_place(quern, tmp_path, scheme):
    weight, _ = _spoilt(torch.bfloat16)
    source = one_layer_each.save(tmp_path / "source", {f"{one_layer_each.module(0)}.weight": weight})
    process = quern("quantize", source, "-o", tmp_path / "out", "--scheme", scheme)
    assert process.returncode == 1
    assert all(part in process.stderr for part in (f"{one_layer_each.module(0)}.weight", "row 1", "column 3", "NaN")), process.stderr


@pytest.mark.parametrize("dtype", DTYPES)
def test_nonfinite_elements_are_replaced_where_asked(quern, quantization_config, tmp_path, dtype):
    weight, clamped = _spoilt(DTYPES[dtype])
    out = one_layer_each.quantize(quern, tmp_path, [weight.clone() for _ in SCHEMES], [f"scheme: {scheme}" for scheme in SCHEMES],
                                  policy="nonfinite: clamp\n")
    stored, config = checkpoints.contents(out), quantization_config(out)
    counted = {m["module"]: m["error"]["nonfinite"] for m in json.loads((out / "quern_manifest.json").read_text())["modules"]}
    for i, scheme in enumerate(SCHEMES):
        module = one_layer_each.module(i)
        assert counted[module] == 3, scheme
        ours = {n[len(module) + 1:]: t[2] for n, t in stored.items() if n.startswith(module + ".")}
        assert oracle.decompress(stored, config, module).isfinite().all(), scheme
        assert ours == {suffix: as_bytes(tensor) for suffix, tensor in oracle.compress_weight(clamped, scheme).items()}, scheme


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_expert_of_zeros(quern, quantization_config, tmp_path, dtype):
    """Each layer has a scheme of its own: expert 0 is all zeros, of expert 1 the gate."""
    tensors = {}
    for layer in range(len(SCHEMES)):
        for expert in (0, 1):
            for leaf, shape in (("gate_proj", (128, 256)), ("up_proj", (128, 256)), ("down_proj", (256, 128))):
                zeros = expert == 0 or leaf == "gate_proj"
                weight = torch.zeros(shape) if zeros else _base(*shape)
                tensors[f"model.layers.{layer}.mlp.experts.{expert}.{leaf}"] = weight.to(DTYPES[dtype])
    source = one_layer_each.save(tmp_path / "source", {f"{n}.weight": t for n, t in tensors.items()}, model_type="qwen3_moe")
    groups = "".join(f'  - {{targets: ["model.layers.{i}.mlp.experts.*"], scheme: {scheme}}}\n' for i, scheme in enumerate(SCHEMES))
    (tmp_path / "recipe.yaml").write_text(f"groups:\n{groups}")
    process = quern("quantize", source, "-o", tmp_path / "out", "--recipe", tmp_path / "recipe.yaml")
    assert process.returncode == 0, process.stderr
    stored, config = checkpoints.contents(tmp_path / "out"), quantization_config(tmp_path / "out")
    for module, weight in tensors.items():
        scheme = SCHEMES[int(module.split(".")[2])]
        ours = {n[len(module) + 1:]: t for n, t in stored.items() if n.startswith(module + ".")}
        assert all(oracle.as_tensor(t).float().isfinite().all() for t in ours.values()), (scheme, module)
        if not weight.any():
            assert not oracle.decompress(stored, config, module).any(), (scheme, module)
        if "experts.0" in module:
            theirs = {suffix: as_bytes(tensor) for suffix, tensor in oracle.compress_weight(weight, scheme).items()}
            assert {suffix: t[2] for suffix, t in ours.items()} == theirs, (scheme, module)


def test_rows_that_end_inside_a_word(quern, tmp_path):
    """Columns and rows that are no multiple of a word's codes: the rest of its bits is 0."""
    shapes = ((3, 256), (1, 250), (5, 33), (37, 1))
    cases = [(bits, symmetric, shape) for bits in range(2, 9) for symmetric in (True, False) for shape in shapes]
    weights = [_base(*shape).to(torch.bfloat16) for _, _, shape in cases]
    schemes = [f"weights: {{num_bits: {bits}, type: int, strategy: channel, symmetric: {str(symmetric).lower()}}}"
               for bits, symmetric, _ in cases]
    stored = checkpoints.contents(one_layer_each.quantize(quern, tmp_path, weights, schemes))
    for i, (bits, symmetric, shape) in enumerate(cases):
        for suffix, tensor in reference.pack_quantized(weights[i], bits, None, symmetric).items():
            assert stored[f"{one_layer_each.module(i)}.{suffix}"][2] == as_bytes(tensor), (bits, symmetric, shape, suffix)


def test_rare_and_empty_tensors_are_copied(quern, tmp_path):
    tensors = {"a.exponents": ("F8_E8M0", [3], b"\x00\x7f\xff"), "a.pairs": ("F4", [2, 8], bytes(range(8))), "a.none": ("F32", [0], b""),
               "a.no_columns": ("BF16", [4, 0], b""), "a.flags": ("BOOL", [2], b"\x01\x00"), "a.count": ("I64", [], b"\x05" + bytes(7)),
               "model.layers.0.mlp.down_proj.weight": ("BF16", [2, 128], as_bytes(_base(2, 128).to(torch.bfloat16)))}
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    source = one_layer_each.save(tmp_path / "source", {})
    text = json.dumps(header).encode()
    (source / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    process = quern("quantize", source, "-o", tmp_path / "out", "--scheme", "W4A16")
    assert process.returncode == 0, process.stderr
    stored = checkpoints.contents(tmp_path / "out")
    for name, (dtype, shape, content) in tensors.items():
        if name.startswith("a."):
            assert stored[name] == (dtype, tuple(shape), content), name
