"""quantization_config says what compressed-tensors says of the same schemes, and what vLLM and transformers make of it is what is stored."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

import checkpoints
import one_layer_each
import oracle

HERE = Path(__file__).resolve().parent
RECIPES = HERE.parents[1] / "docs" / "recipes"
PRESETS = [name for name in PRESET_SCHEMES if name != "UNQUANTIZED"]
STATIC = ("FP8", "NVFP4")  # scales of activations come from a file
# transformers (5.17) finds one scheme for all routed experts, and has code for these.
LOADS_EXPERTS = ("W4A16", "W8A16", "FP8_DYNAMIC", "MXFP4A16")


def group_size(name):
    return ("--group-size", "32") if preset_name_to_scheme(name, []).weights.group_size == 128 else ()


@pytest.mark.parametrize("name", PRESETS)
def test_groups_are_those_of_compressed_tensors(plan, activation_scales, name):
    model = "made-llama"
    files = ("--activation-scales", activation_scales(model)) if name in STATIC else ()
    summary = plan(model, "--scheme", name, *group_size(name), *files)
    config = json.loads(summary["quantization_config"])
    assert list(config["config_groups"]) == ["group_0"]
    ours = config["config_groups"]["group_0"]

    scheme = preset_name_to_scheme(name, ours["targets"])
    if group_size(name):
        scheme.weights.group_size = 32
    scheme.weights.observer = "memoryless_minmax"  # null there; we name what was done
    scheme.format = infer_module_format(torch.nn.Linear, scheme)
    theirs = json.loads(QuantizationConfig(config_groups={"g": scheme}).model_dump_json())["config_groups"]["g"]
    assert ours == theirs
    assert config["format"] == theirs["format"]


@pytest.mark.parametrize("name", STATIC)
def test_static_scales_are_refused_without_their_file(quern, checkpoint, name):
    process = quern("plan", checkpoint("made-llama"), "--scheme", name)
    assert process.returncode == 1
    assert "--activation-scales" in process.stderr
    assert {"FP8": "FP8_DYNAMIC", "NVFP4": "NVFP4A16"}[name] in process.stderr


def recipe_text(name):
    """A recipe of docs/recipes; layers of a model with 48 of them become those of one with 6."""
    text = (RECIPES / name).read_text()
    for there, here in (("(2|3|43|44|45)", "(2|4)"), ("(1|46|47)", "(1|5)"), ("([0-7]|4[4-7])", "([0-1]|5)")):
        text = text.replace(there, here)
    return text


@pytest.fixture(scope="session")
def made(quern, checkpoint, activation_scales, tmp_path_factory):
    """(model, recipe file or preset) -> directory, quantized once in a session."""
    outputs = {}

    def get(model, what):
        if (model, what) not in outputs:
            base = tmp_path_factory.mktemp("made")
            if what.endswith(".yaml"):
                (base / "recipe.yaml").write_text(recipe_text(what))
                arguments = ("--recipe", base / "recipe.yaml")
            else:
                arguments = ("--scheme", what, *group_size(what))
                if what in STATIC:
                    arguments += ("--activation-scales", activation_scales(model))
            process = quern("quantize", checkpoint(model), "-o", base / "out", *arguments, "--max-shard-size", "4MiB")
            assert process.returncode == 0, process.stderr
            outputs[(model, what)] = base / "out"
        return outputs[(model, what)]

    return get


MIXED = sorted(p.name for p in RECIPES.glob("*.yaml") if not p.name.startswith("modelopt"))


def test_every_recipe_of_the_docs_is_tested():
    assert len(MIXED) == 4


def test_vllm_reads_every_module_as_it_is_stored(made):
    """One process for all: to import vLLM takes longer than what it is asked."""
    whats = [*MIXED, "W8A8", "W4A8", "FP8_DYNAMIC", "FP8_BLOCK", "FP8", "NVFP4A16", "NVFP4", "MXFP4A16", "MXFP8A16"]
    directories = [made("laguna-tiny", what) for what in whats]
    process = subprocess.run([sys.executable, HERE / "vllm_schemes.py", *directories], capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-2000:]
    assert process.stdout.count(" 0 that vLLM would read differently") == len(directories)


INT8_TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FP8_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def weights(kind, bits, strategy, group=None, symmetric=True):
    args = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric}
    return args | ({"group_size": group} if group else {})


def schemes_of_recipes():
    for bits in range(2, 9):
        for strategy, group in (("tensor", None), ("channel", None), ("group", 32), ("group", 128)):
            for symmetric in (True, False):
                for inputs in (None, INT8_TOKENS | {"num_bits": 4}, INT8_TOKENS, FP8_TOKENS):
                    yield weights("int", bits, strategy, group, symmetric), inputs
    for strategy in ("tensor", "channel"):
        for inputs in (None, FP8_TOKENS):
            yield weights("float", 8, strategy), inputs
    block = weights("float", 8, "block") | {"block_structure": [128, 128]}
    yield block, None
    yield block, FP8_TOKENS | {"strategy": "group", "group_size": 128}
    for bits in (4, 8):
        mx = weights("float", bits, "group", 32) | {"scale_dtype": "torch.uint8"}
        yield mx, None
        yield mx, FP8_TOKENS | {"num_bits": bits, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    yield weights("float", 4, "tensor_group", 16), None


def what_distinguishes(arguments, inputs):
    keys = ("num_bits", "type", "strategy", "group_size")
    return (*(arguments.get(k) for k in keys), arguments.get("symmetric", True), *((inputs or {}).get(k) for k in keys))


def plan_of_schemes(quern, directory, schemes, experts):
    """A model with one weight for each scheme: the groups of the config, and what the plan says of vLLM."""
    directory.mkdir()
    names = [f"model.layers.{i}.mlp.{'experts.0.' if experts else ''}down_proj" for i in range(len(schemes))]
    source = one_layer_each.save(directory / "source", {f"{n}.weight": torch.zeros(16, 128, dtype=torch.bfloat16) for n in names}, "qwen3_moe")
    groups = [{"targets": [name], "weights": arguments} | ({"input_activations": inputs} if inputs else {})
              for name, (arguments, inputs) in zip(names, schemes, strict=True)]
    (directory / "recipe.yaml").write_text(json.dumps({"groups": groups}))
    process = quern("plan", source, "--recipe", directory / "recipe.yaml", "--json")
    assert process.returncode == 0, process.stderr
    summary = json.loads(process.stdout)["summary"]
    config = json.loads(summary["quantization_config"])
    return config, [w for w in summary.get("warnings", []) if w.startswith("vLLM cannot serve")]


@pytest.mark.parametrize("experts", (False, True))
def test_plan_says_what_vllm_decides(quern, tmp_path, experts):
    """Every scheme that a recipe can express against vLLM's own choice of a class: no word of those that it serves, one of each other."""
    schemes = {what_distinguishes(*scheme): scheme for scheme in schemes_of_recipes()}
    config, _ = plan_of_schemes(quern, tmp_path / "all", list(schemes.values()), experts)
    groups = list(config["config_groups"].values())
    assert len(groups) == len(schemes) > 230
    cases = [(config | {"config_groups": {"group_0": group}, "format": group["format"]}, experts) for group in groups]
    process = subprocess.run([sys.executable, HERE / "vllm_decisions.py"], input=json.dumps(cases), capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    served, refused = [], []
    for group, decision in zip(groups, json.loads(process.stdout.splitlines()[-1]), strict=True):
        weight, inputs = group["weights"], group["input_activations"]
        scheme = schemes[what_distinguishes(weight, inputs)]
        late = weight["strategy"] == "block" and inputs is None  # refused as the weights are loaded (process_weights_after_loading)
        # vLLM takes integers of 8 bits with FP8 activations for W8A8.
        other = inputs is not None and weight["type"] == "int" and inputs["type"] == "float" and weight["num_bits"] != 4
        (refused if decision.startswith("refused") or late or other else served).append(scheme)
    _, warnings = plan_of_schemes(quern, tmp_path / "served", served, experts)
    assert warnings == []
    _, warnings = plan_of_schemes(quern, tmp_path / "refused", refused, experts)
    assert len(warnings) == len(refused) > 100, (warnings, refused)


@pytest.mark.parametrize("what", MIXED)
def test_every_module_decompresses_by_the_group_that_names_it(made, checkpoint, what):
    model = "laguna-tiny"
    out = made(model, what)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    tensors, source = checkpoints.contents(out), checkpoints.contents(checkpoint(model))
    manifest = json.loads((out / "quern_manifest.json").read_text())
    assert manifest["modules"]
    for module in manifest["modules"]:
        value = oracle.decompress(tensors, config, module["module"])
        difference = oracle.as_tensor(source[module["module"] + ".weight"]).double() - value.double()
        assert module["error"]["sum_squared_error"] == pytest.approx(float((difference ** 2).sum()), rel=1e-12, abs=0), module["module"]


def test_plan_tells_what_transformers_cannot_load(plan, tmp_path):
    def told(what):
        if what.endswith(".yaml"):
            (tmp_path / what).write_text(recipe_text(what))
            arguments = ("--recipe", tmp_path / what)
        else:
            arguments = ("--scheme", what, *group_size(what), "--targets", "routed_experts")
        return any("transformers" in warning for warning in plan("laguna-tiny", *arguments)["warnings"])

    assert not any(told(name) for name in LOADS_EXPERTS)
    assert all(told(name) for name in ("W4A16_ASYM", "FP8_BLOCK", "MXFP8A16", "NVFP4A16", "W8A8", "laguna-quality-first.yaml"))


def test_effective_bits_count_scales(plan):
    def bits(name, *arguments):
        roles = {r["role"]: r["bits"] for r in plan("laguna-tiny", "--scheme", name, *arguments, "--targets", "routed_experts")["effective_bits"]}
        return roles["routed_experts"], roles["attention"]

    # A shape of two 64-bit numbers stands beside every packed weight, and one F32 beside NVFP4.
    assert bits("W4A16_ASYM", "--group-size", "32") == (pytest.approx(4.625, abs=3e-3), 16)
    assert bits("NVFP4A16") == (pytest.approx(4.5, abs=1e-3), 16)
    assert bits("FP8_BLOCK") == (pytest.approx(8, abs=2e-3), 16)
    assert bits("MXFP4A16") == (pytest.approx(4.25, abs=1e-3), 16)
