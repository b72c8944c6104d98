#!/usr/bin/env python3
"""A source shard is replaced between two runs by other weights of the same size and header: the second run must notice before it uses
anything that the first one made, must leave OUT alone, and must start over with --overwrite."""

import argparse
import os
import shutil
import struct
import sys
import time
from pathlib import Path

import harness
from harness import check


def other_weights(path, only_one_byte=False):
    """The file's bytes with the lowest bit of weights flipped: finite stays finite, header and size stay."""
    content = bytearray(path.read_bytes())
    start = 8 + struct.unpack("<Q", content[:8])[0]
    if only_one_byte:
        content[start + (len(content) - start) // 2 & ~1] ^= 1
    else:
        for i in range(start, len(content), 2):
            content[i] ^= 1
    return bytes(content)


def replace(path, mode):
    before = path.stat()
    content = other_weights(path, only_one_byte="one byte" in mode)
    if "in place" in mode:
        with open(path, "r+b") as file:
            file.write(content)
    else:
        new = path.with_suffix(".new")
        new.write_bytes(content)
        os.replace(new, path)
    if "mtime restored" in mode:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    check(path.stat().st_size == before.st_size, "the test's own fault: the size changed")


MODES = ["a new file", "a new file, mtime restored", "in place", "in place, mtime restored", "in place, one byte, mtime restored"]


class SwapTest:
    def __init__(self, arguments, sandbox):
        self.sandbox = sandbox
        self.original = arguments.source.resolve()
        self.source = sandbox.directory / "source"
        self.out = sandbox.directory / "out"
        self.shard_size = str(max(harness.shards_size(self.original) // 18, 64 << 10))

    def command(self, out, *more):
        return [self.sandbox.programs.quern, "quantize", self.source, "-o", out, *harness.JOB, "--max-shard-size", self.shard_size,
                "--memory", "64MiB", *more]

    def fresh_source(self):
        for directory in [self.source, self.out]:
            if directory.exists():
                shutil.rmtree(directory)
        self.source.mkdir()
        for path in self.original.iterdir():
            if path.is_file():
                shutil.copyfile(path, self.source / path.name)

    def shard(self):
        return sorted(self.source.glob("*.safetensors"))[0]

    def interrupt_halfway(self, *more):
        """Leaves an unfinished job with at least one finished file in OUT."""
        attempts = self.out / ".quern" / "attempts"
        for turn in range(40):
            process = self.sandbox.start(self.command(self.out, *more))
            while process.poll() is None and not (attempts.is_dir() and len(list(attempts.iterdir())) >= 2):
                time.sleep(0.002)
            harness.kill_all(self.sandbox)
            process.wait()
            if not (self.out / "config.json").exists() and attempts.is_dir() and list(attempts.iterdir()):
                return
            shutil.rmtree(self.out, ignore_errors=True)
        raise harness.Failure("the job could not be caught halfway in 40 tries")

    def expect_noticed(self, mode, *more):
        before = harness.tree(self.out, skip_names=())
        attempts_before = {name: digest for name, digest in before.items() if name.startswith(".quern/attempts/")}
        status, out, err = self.sandbox.run(self.command(self.out, *more))
        name = self.shard().name
        check(status == 1, f"{mode}: the changed source was not refused: exit status {status}\n{err}{out}")
        check(name in err + out and "changed" in err + out, f"{mode}: the message does not say that {name} changed:\n{err}{out}")
        check("--overwrite" in err + out, f"{mode}: the message does not say what to do:\n{err}{out}")
        self.sandbox.wait_until_empty()
        after = harness.tree(self.out, skip_names=())
        check({n: d for n, d in after.items() if not n.startswith(".quern/")} == {n: d for n, d in before.items() if not n.startswith(".quern/")},
              f"{mode}: the refused run changed the result")
        check(attempts_before.items() <= after.items(), f"{mode}: the refused run touched the shards of the first one")

    def expect_started_over(self, mode, *more):
        status, _, err = self.sandbox.run(self.command(self.out, "--overwrite", *more))
        check(status == 0, f"{mode}: --overwrite failed with {status}:\n{err}")
        expected = self.sandbox.directory / "expected"
        status, _, err = self.sandbox.run(self.command(expected, *more))
        check(status == 0, f"{mode}: a fresh run failed with {status}:\n{err}")
        difference = harness.tree_difference(harness.tree(self.out), harness.tree(expected))
        check(not difference, f"{mode}: old shards were reused: {difference}")
        self.sandbox.wait_until_empty()
        self.sandbox.check_nothing_left(self.out)
        shutil.rmtree(expected)

    def run(self):
        for mode in MODES:
            # A byte that no sample covers is what --verify-source is for.
            more = ["--verify-source"] if "one byte" in mode else []
            self.fresh_source()
            self.interrupt_halfway(*more)
            replace(self.shard(), mode)
            self.expect_noticed(f"unfinished, {mode}", *more)
            self.expect_started_over(f"unfinished, {mode}", *more)
            # The same for a finished result.
            replace(self.shard(), mode)
            self.expect_noticed(f"finished, {mode}", *more)
            print(f"noticed: {mode}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="build directory, or the directory of the programs")
    parser.add_argument("--source", type=Path, required=True)
    arguments = parser.parse_args()

    def test():
        with harness.Sandbox(harness.Programs(arguments.bin)) as sandbox:
            SwapTest(arguments, sandbox).run()
        print(f"source_swap_test: {len(MODES)} ways: ok")

    return harness.main(test)


if __name__ == "__main__":
    sys.exit(main())
