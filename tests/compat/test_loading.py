"""What loads a checkpoint takes ours as it takes llm-compressor's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import checkpoints
import oracle
from test_parity import GROUPS, SCHEMES, TARGETS

HERE = Path(__file__).resolve().parent


def outputs(quantized):
    """Every request of the parity tests that ends in an output."""
    for model in checkpoints.MODELS:
        for scheme in SCHEMES:
            for group in GROUPS:
                for targets in TARGETS:
                    pair = quantized(model, scheme, group, targets)
                    if pair.process.returncode == 0:
                        yield pair


def test_vllm_reads_every_module_as_it_is_stored(quantized):
    pairs = list(outputs(quantized))
    assert len(pairs) > 50
    process = subprocess.run([sys.executable, HERE / "vllm_schemes.py", *(str(p.ours) for p in pairs)], capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-2000:]
    assert process.stdout.count(" 0 that vLLM would read differently") == len(pairs)


def logits(directory, vocab):
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    ids = torch.randint(0, vocab, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(ids).logits


# Layouts that transformers' own loader handles: symmetric experts, dense models in every scheme.
LOADS = [(model, scheme, targets)
         for model in checkpoints.MODELS for scheme in SCHEMES for targets in TARGETS
         if not (model == "made-llama" and targets == "routed_experts")
         and (model == "made-llama" or not scheme.endswith("ASYM"))]


@pytest.mark.parametrize("model,scheme,targets", LOADS)
def test_transformers_gives_the_logits_of_llm_compressors_output(quantized, model, scheme, targets):
    pair = quantized(model, scheme, "32", targets)
    assert pair.process.returncode == 0, pair.process.stderr
    vocab = json.loads((pair.source / "config.json").read_text())["vocab_size"]
    ours = logits(pair.ours, vocab)
    reference = dense_logits(pair, vocab)
    assert torch.isfinite(ours).all()
    assert torch.equal(ours, reference)


def dense_logits(pair, vocab):
    """Logits of the source with each quantized weight replaced by compressed-tensors' decompression of llm-compressor's output. The
    config that llm-compressor writes does not load everywhere (a `Linear` target with a short ignore list); its tensors do."""
    model = transformers.AutoModelForCausalLM.from_pretrained(pair.source, dtype=torch.bfloat16).eval()
    return _with_plain_weights(pair, model, vocab)


def _with_plain_weights(pair, model, vocab):
    import safetensors.torch
    import shutil
    import tempfile

    theirs = checkpoints.contents(pair.theirs)
    config = json.loads((pair.theirs / "config.json").read_text())["quantization_config"]
    modules = dict(oracle.targeted(checkpoints.shapes(pair.source), pair.request[3]))
    with tempfile.TemporaryDirectory() as directory:
        plain = {}
        for name, entry in checkpoints.contents(pair.source).items():
            module = name.rpartition(".")[0]
            plain[name] = oracle.decompress(theirs, config, module) if module in modules else oracle.as_tensor(entry)
        safetensors.torch.save_file(plain, Path(directory) / "model.safetensors", metadata={"format": "pt"})
        shutil.copy(pair.source / "config.json", directory)
        return logits(directory, vocab)


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("model", checkpoints.MODELS)
def test_modules_decompress_to_the_same_values(quantized, quantization_config, model, scheme, group, targets):
    pair = quantized(model, scheme, group, targets)
    if pair.process.returncode != 0:
        assert pair.refusal is not None or model == "made-llama"
        return
    ours, theirs = checkpoints.contents(pair.ours), checkpoints.contents(pair.theirs)
    config, their_config = quantization_config(pair.ours), quantization_config(pair.theirs)
    modules = dict(oracle.targeted(checkpoints.shapes(pair.source), targets))
    manifest = json.loads((pair.ours / "quern_manifest.json").read_text())
    errors = {m["module"]: m["error"] for m in manifest["modules"]}
    source = checkpoints.contents(pair.source)
    assert sorted(errors) == sorted(modules)
    for module in modules:
        value = oracle.decompress(ours, config, module)
        assert torch.equal(value, oracle.decompress(theirs, their_config, module)), module
        # The error that Quern reported is the error of what compressed-tensors decompresses.
        difference = oracle.as_tensor(source[module + ".weight"]).double() - value.double()
        assert errors[module]["sum_squared_error"] == pytest.approx(float((difference ** 2).sum()), rel=1e-12, abs=0)
        assert errors[module]["max_abs_error"] == float(difference.abs().max())
