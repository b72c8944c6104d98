import json
import os
import subprocess
from pathlib import Path

import pytest
import safetensors.torch
import torch

import checkpoints
import families
import oracle
import parity_table


def pytest_sessionfinish(session, exitstatus):
    """A session that ran all tests of a file with success has found the whole table of that file."""
    option = session.config.option
    if exitstatus != 0 or option.collectonly or option.keyword or any("::" in str(a) for a in session.config.args):
        return
    ran = {item.path.name for item in session.items}
    faults = [parity_table.check_or_write(table) for table in parity_table.TABLES if table.test_file in ran]
    for fault in filter(None, faults):
        print(f"\n{fault}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def quern():
    """Runs the program under test; returns the finished process."""
    program = Path(os.environ["QUERN_BUILD"]) / "client" / "quern"
    assert program.exists(), f"{program} is not built"

    def run(*arguments):
        return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=300)

    return run


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Directory of a model by name; made once where transformers makes it."""
    made = {}

    def get(name):
        if name in checkpoints.TRAINED:
            directory = checkpoints.TRAINED[name]
            if not directory.exists():
                message = f"{directory} is not there: this test needs the trained checkpoint beside the tree"
                if checkpoints.in_ci():
                    pytest.fail(message)
                pytest.skip(message)
            return directory
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            checkpoints.make(name, made[name])
        return made[name]

    return get


@pytest.fixture(scope="session")
def family_checkpoint(tmp_path_factory):
    """Directory of a tiny model of a family, made once."""
    made = {}

    def get(family, dtype="BF16"):
        if (family, dtype) not in made:
            made[family, dtype] = tmp_path_factory.mktemp(f"{family}-{dtype}")
            if dtype == "BF16":
                families.make(family, made[family, dtype])
            else:
                families.cast(get(family), made[family, dtype], {"F16": torch.float16, "F32": torch.float32}[dtype])
        return made[family, dtype]

    return get


class Pair:
    """The same request carried out by Quern and by llm-compressor."""

    def __init__(self, name, source, ours, theirs, process, refusal, request):
        self.name, self.source, self.ours, self.theirs = name, source, ours, theirs
        self.process, self.refusal, self.request = process, refusal, request


@pytest.fixture(scope="session")
def quantized(quern, checkpoint, tmp_path_factory):
    """(model, scheme, group, targets) -> Pair, each quantized once in a session."""
    pairs = {}

    def get(model, scheme, group, targets):
        key = (model, scheme, group, targets)
        if key not in pairs:
            name = f"{model}-{scheme}-{group}-{targets}"
            source, base = checkpoint(model), tmp_path_factory.mktemp(name)
            process = quern("quantize", source, "-o", base / "ours", "--scheme", scheme, "--group-size", group, "--targets", targets,
                            "--max-shard-size", "1MiB", "--json")
            refusal = oracle.quantize(source, base / "theirs", scheme, group, targets)
            pairs[key] = Pair(name, source, base / "ours", base / "theirs", process, refusal, key)
        return pairs[key]

    get.pairs = pairs
    return get


@pytest.fixture(scope="session")
def quantization_config():
    return lambda directory: json.loads((Path(directory) / "config.json").read_text())["quantization_config"]


@pytest.fixture(scope="session")
def activation_scales(checkpoint, tmp_path_factory):
    """A file with an amax for every 2-D weight of a model."""

    def get(model):
        path = tmp_path_factory.mktemp("scales") / "scales.safetensors"
        shapes = checkpoints.shapes(checkpoint(model))
        modules = sorted(n.removesuffix(".weight") for n, (_, shape) in shapes.items() if n.endswith(".weight") and len(shape) == 2)
        safetensors.torch.save_file({m: torch.tensor(1.0 + i / 8) for i, m in enumerate(modules)}, path)
        return path

    return get


@pytest.fixture(scope="session")
def plan(quern, checkpoint):
    def get(model, *arguments):
        process = quern("plan", checkpoint(model), *arguments, "--json")
        assert process.returncode == 0, process.stderr
        return json.loads(process.stdout)["summary"]

    return get
