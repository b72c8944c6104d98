"""perplexity.py HELDOUT CHECKPOINT...: perplexity of plain-weight or quantized checkpoints on held-out tokens, in F32.

exp of the mean negative log-likelihood of tokens 1..255 of each window of 256; the first 64 windows. A quantized checkpoint is decompressed
through compressed-tensors module by module first, so that layouts that transformers cannot load count too.
"""

import json
import math
import shutil
import sys
import tempfile
from pathlib import Path

import safetensors.torch
import torch
import transformers

import checkpoints
import oracle


def plain(directory, into):
    """Writes the checkpoint with plain weights; returns the directory to load."""
    config = json.loads((Path(directory) / "config.json").read_text())
    quantization = config.pop("quantization_config", None)
    if quantization is None:
        return directory
    tensors = checkpoints.contents(directory)
    modules = {n.rpartition(".")[0] for n in tensors if n.endswith(".weight_packed")}
    weights = {m + ".weight": oracle.decompress(tensors, quantization, m) for m in modules}
    for name, entry in tensors.items():
        if name.rpartition(".")[0] not in modules:
            weights[name] = oracle.as_tensor(entry)
    safetensors.torch.save_file(weights, Path(into) / "model.safetensors", metadata={"format": "pt"})
    (Path(into) / "config.json").write_text(json.dumps(config))
    return into


def perplexity(directory, windows):
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in windows.split(8):
            logp = model(batch).logits[:, :-1].float().log_softmax(-1)
            total -= logp.gather(-1, batch[:, 1:, None]).double().sum().item()
            count += batch[:, 1:].numel()
    return math.exp(total / count)


def main():
    windows = safetensors.torch.load_file(sys.argv[1])["input_ids"].long()[:64]
    for directory in sys.argv[2:]:
        with tempfile.TemporaryDirectory() as into:
            print(f"{directory}: {perplexity(plain(directory, into), windows):.3f}", flush=True)


if __name__ == "__main__":
    main()
