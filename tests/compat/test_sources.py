"""Layouts of checkpoints as they are published: experts in stacks, weights that are quantized already."""

import pytest
import torch

import checkpoints
import oracle
import stacked
from test_formats import SCHEMES, compare


@pytest.mark.parametrize("scheme", ("W4A16_ASYM", "NVFP4A16"))
@pytest.mark.parametrize("layout", (stacked.qwen3_vl_moe, stacked.qwen3_5_moe))
def test_stacks_are_cut_by_the_model_type(quern, family_checkpoint, tmp_path, layout, scheme):
    expected = layout(family_checkpoint("qwen3_moe"), tmp_path / "source")
    group = ("--group-size", "32") if scheme.startswith("W4") else ()
    process = quern("quantize", tmp_path / "source", "-o", tmp_path / "out", "--scheme", scheme, *group, "--targets", "routed_experts")
    assert process.returncode == 0, process.stderr
    assert compare(expected, SCHEMES[scheme], tmp_path / "out") == len(expected)
    assert quern("verify", tmp_path / "out", "--against", tmp_path / "source").returncode == 0


def test_mxfp4_experts_are_decoded(quern, family_checkpoint, tmp_path):
    expected = stacked.mxfp4_gpt_oss(family_checkpoint("gpt_oss"), tmp_path / "source")
    process = quern("quantize", tmp_path / "source", "-o", tmp_path / "out", "--scheme", "FP8_DYNAMIC", "--targets", "routed_experts")
    assert process.returncode == 0, process.stderr
    assert compare(expected, SCHEMES["FP8_DYNAMIC"], tmp_path / "out") == len(expected)


def test_int4_is_requantized_only_when_allowed(quern, family_checkpoint, tmp_path):
    expected = stacked.int4_experts(family_checkpoint("qwen3_moe"), tmp_path / "source")
    arguments = ("quantize", tmp_path / "source", "-o", tmp_path / "out", "--scheme", "FP8_DYNAMIC", "--targets", "routed_experts")
    process = quern(*arguments)
    assert process.returncode == 1 and "--allow-requantize" in process.stderr
    process = quern(*arguments, "--allow-requantize")
    assert process.returncode == 0, process.stderr
    assert compare(expected, SCHEMES["FP8_DYNAMIC"], tmp_path / "out") == len(expected)
    process = quern("dequantize", tmp_path / "source", "-o", tmp_path / "plain")
    assert process.returncode == 0, process.stderr
    plain = checkpoints.contents(tmp_path / "plain")
    for module, value in expected.items():
        assert torch.equal(oracle.as_tensor(plain[module + ".weight"]), value), module
