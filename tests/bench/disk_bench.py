#!/usr/bin/env python3
"""Quantizes a synthetic Laguna checkpoint in pairs with fio moving the same bytes on the same filesystem, and prints the ratio.

Ours and fio's runs alternate, since machines drift. fio works on files of its own: it would overwrite or extend a checkpoint.
With --peer, llm-compressor's model_free_ptq quantizes the same checkpoint once, in the environment of the compatibility tests.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
JOB = ["--scheme", "W4A16_ASYM", "--group-size", "32", "--targets", "routed_experts"]


def size_of(directory):
    return sum(p.stat().st_size for p in directory.glob("*.safetensors"))


def timed(command, **kwargs):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **kwargs)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic() - start, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def drop_caches():
    """So that no run reads from memory; without root both sides read direct anyway."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        pass


def fio(directory, read_bytes, write_bytes):
    """Seconds that fio takes to read and write the same bytes at the same time, both direct, in 4 MiB blocks."""
    common = ["--ioengine=io_uring", "--direct=1", "--bs=4M", "--iodepth=8", "--thread", "--fallocate=posix"]
    align = lambda n: max(n // (4 << 20), 1) * (4 << 20)
    process = subprocess.run(
        ["fio", "--output-format=json", *common,
         "--name=read", "--rw=read", f"--filename={directory}/read", f"--size={align(read_bytes)}",
         "--name=write", "--rw=write", f"--filename={directory}/write", f"--size={align(write_bytes)}", "--end_fsync=1", "--overwrite=0"],
        check=True, capture_output=True, text=True)
    jobs = json.loads(process.stdout)["jobs"]
    (directory / "write").unlink()
    return max(job[job["jobname"]]["runtime"] for job in jobs) / 1000


def peer(source, out):
    env = subprocess.run([ROOT / "tests/compat/setup_env.sh"], check=True, capture_output=True, text=True).stdout.split()[-1]
    code = ("import sys; sys.path.insert(0, sys.argv[1]); import oracle;"
            "error = oracle.quantize(sys.argv[2], sys.argv[3], 'W4A16_ASYM', '32', 'routed_experts');"
            "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(repr(error) if error else 0)")
    start = time.monotonic()
    process = subprocess.run([f"{env}/bin/python", "-c", code, ROOT / "tests/compat", source, out], check=True, capture_output=True, text=True)
    return time.monotonic() - start, int(process.stdout.split()[-1]) * 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=3, help="layers of the synthetic model; 3 are 11.5 GB (default)")
    parser.add_argument("--synth", nargs="*", default=[], help="more options of `quern synth`, such as --hidden=512")
    parser.add_argument("--memory", default="512MiB")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--source", type=Path, help="use this checkpoint instead of making one")
    parser.add_argument("--peer", action="store_true", help="time llm-compressor too (needs 9 GB of memory at full width)")
    arguments = parser.parse_args()
    quern = arguments.build / "client" / "quern"
    base = os.environ.get("QUERN_BENCH_DIR")
    work = Path(tempfile.mkdtemp(prefix="quern-bench.", dir=base))
    try:
        source = arguments.source
        if source is None:
            source = work / "source"
            seconds, _ = timed([quern, "synth", source, "--family", "laguna", "--layers", str(arguments.layers), "--seed", "1", *arguments.synth],
                               stderr=subprocess.DEVNULL)
            print(f"synth: {size_of(source) / 1e9:.2f} GB in {seconds:.1f} s, {size_of(source) / 1e9 / seconds:.2f} GB/s")
        read_bytes, write_bytes, ours, limit = size_of(source), 0, [], []
        scratch = work / "fio"
        scratch.mkdir()
        for run in range(arguments.runs):
            out = work / "out"
            drop_caches()
            seconds, cpu = timed([quern, "quantize", source, "-o", out, *JOB, "--memory", arguments.memory], stderr=subprocess.DEVNULL)
            write_bytes = size_of(out)
            shutil.rmtree(out)
            drop_caches()
            fio_seconds = fio(scratch, read_bytes, write_bytes)
            if run == 0:  # fio laid its files out while the clock ran in some versions: measure on existing ones
                drop_caches()
                fio_seconds = fio(scratch, read_bytes, write_bytes)
            ours.append(seconds)
            limit.append(fio_seconds)
            print(f"pair {run + 1}: quern {seconds:.1f} s ({cpu:.1f} s CPU), fio {fio_seconds:.1f} s, quern reaches {fio_seconds / seconds:.0%} of fio", flush=True)
        print(f"bytes: {read_bytes / 1e9:.2f} GB read, {write_bytes / 1e9:.2f} GB written")
        ratio = statistics.median(f / o for f, o in zip(limit, ours))
        print(f"median: quern {statistics.median(ours):.1f} s, fio (hardware limit) {statistics.median(limit):.1f} s, {ratio:.0%} of the limit")
        if arguments.peer:
            seconds, rss = peer(source, work / "peer")
            print(f"peer: llm-compressor model_free_ptq {seconds:.1f} s, peak RSS {rss / 1e9:.2f} GB")
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    sys.exit(main())
