"""Checkpoints with one weight for each case: a single run quantizes every scheme."""

import json
from pathlib import Path

import safetensors.torch
import torch


def module(index):
    return f"model.layers.{index}.mlp.down_proj"


def save(directory, tensors, model_type="llama"):
    directory.mkdir()
    safetensors.torch.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({"model_type": model_type, "hidden_size": 256}))
    return directory


def quantize(quern, directory, weights, schemes, *options, policy=""):
    """Writes the source, a recipe that gives weight i the i-th scheme (members of a recipe's group, as text), and the files that some
    schemes need; returns the output's directory."""
    directory = Path(directory)
    source = save(directory / "source", {f"{module(i)}.weight": w for i, w in enumerate(weights)})
    groups = "".join(f"  - {{targets: [{module(i)}], {scheme}}}\n" for i, scheme in enumerate(schemes))
    (directory / "recipe.yaml").write_text(f"groups:\n{groups}{policy}")
    arguments = ["quantize", source, "-o", directory / "out", "--recipe", directory / "recipe.yaml", *options]
    if any(f"{s},".startswith(("scheme: FP8,", "scheme: NVFP4,")) for s in schemes):
        amax = {module(i): torch.tensor(1.0 + i / 8) for i in range(len(weights))}
        safetensors.torch.save_file(amax, directory / "activations.safetensors")
        arguments += ["--activation-scales", directory / "activations.safetensors"]
    if any("imatrix" in s for s in schemes):
        generator = torch.Generator().manual_seed(1)
        safetensors.torch.save_file({module(i): torch.rand(w.shape[1], generator=generator) for i, w in enumerate(weights)},
                                    directory / "importance.safetensors")
        arguments += ["--importance", directory / "importance.safetensors"]
    process = quern(*arguments)
    assert process.returncode == 0, process.stderr
    return directory / "out"
