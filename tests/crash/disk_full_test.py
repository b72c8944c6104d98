#!/usr/bin/env python3
"""A disk that is full: before the job, and in the midst of it. The job fails with "disk full" and the bytes needed, the source stays as
it is, and the job completes after space is freed. Needs root to mount a small tmpfs."""

import argparse
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import harness
from harness import check


class DiskFullTest:
    def __init__(self, arguments, sandbox):
        self.sandbox = sandbox
        self.disk = sandbox.directory / "disk"
        self.disk.mkdir()
        self.out = self.disk / "out"
        self.ballast = self.disk / "ballast"
        self.source = arguments.source.resolve() if arguments.source else self.make_source()

    def make_source(self):
        """Large enough to be caught at work."""
        source = self.sandbox.directory / "source"
        status, _, err = self.sandbox.run([self.sandbox.programs.quern, "synth", source, "--family", "qwen3_moe", "--layers", "4", "--experts", "16",
                                           "--hidden", "1024", "--intermediate", "1024", "--vocab", "4096", "--seed", "1"])
        check(status == 0, f"synth failed with {status}:\n{err}")
        return source

    def command(self, out):
        shard_size = max(harness.shards_size(self.source) // 20, 64 << 10)
        return [self.sandbox.programs.quern, "quantize", self.source, "-o", out, *harness.JOB, "--max-shard-size", shard_size, "--memory", "64MiB"]

    def fill(self):
        """Takes all the space that is left."""
        with open(self.ballast, "ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12):
                try:
                    while True:
                        file.write(b"\0" * size)
                except OSError:
                    pass

    def expect_disk_full(self, when, status, said):
        check(status == 1, f"{when}: exit status {status}:\n{said}")
        check("disk full" in said, f"{when}: the message does not say \"disk full\":\n{said}")
        check(re.search(r"\d+ bytes|\d(\.\d+)? [KMGT]iB", said), f"{when}: the message does not say how many bytes are needed:\n{said}")
        self.sandbox.wait_until_empty()

    def expect_completion(self, when):
        status, _, err = self.sandbox.run(self.command(self.out))
        check(status == 0, f"{when}: after space was freed the job failed with {status}:\n{err}")
        difference = harness.tree_difference(harness.tree(self.out), self.reference)
        check(not difference, f"{when}: the result differs: {difference}")
        harness.check_history(self.out)
        self.sandbox.wait_until_empty()
        self.sandbox.check_nothing_left(self.out)
        shutil.rmtree(self.out)

    def full_before(self):
        when = "full before the job"
        self.fill()
        status, out, err = self.sandbox.run(self.command(self.out))
        self.expect_disk_full(when, status, err + out)
        self.ballast.unlink()
        self.expect_completion(when)

    def full_in_the_midst(self, wanted_files):
        """Fills the disk once `wanted_files` attempts have begun. Returns False when the job was faster."""
        when = f"full after {wanted_files} shards were begun"
        attempts = self.out / ".quern" / "attempts"
        log = self.sandbox.log
        said_before = log.stat().st_size if log.exists() else 0
        process = self.sandbox.start(self.command(self.out))
        while process.poll() is None and not (attempts.is_dir() and len(list(attempts.iterdir())) >= wanted_files):
            time.sleep(0.001)
        self.fill()
        try:
            status = process.wait(120)
        except subprocess.TimeoutExpired:
            raise harness.Failure(f"{when}: the job hangs: {harness.describe(self.sandbox)}") from None
        caught = status != 0
        if caught:
            self.expect_disk_full(when, status, log.read_bytes()[said_before:].decode(errors="replace"))
        self.ballast.unlink()
        if caught:
            self.expect_completion(when)
            print(f"disk full: {when}", flush=True)
        else:
            self.sandbox.wait_until_empty()
            shutil.rmtree(self.out)
        return caught

    def run(self):
        reference = self.sandbox.directory / "reference"
        status, _, err = self.sandbox.run(self.command(reference))
        check(status == 0, f"the run with enough space failed with {status}:\n{err}")
        self.reference = harness.tree(reference)
        source_tree = harness.tree(self.source)
        size = harness.shards_size(reference)
        # Room for the result, its state and attempts in flight, as the plan asks for.
        harness.mount_tmpfs(self.disk, 3 * size + 256 * harness.MIB)
        try:
            self.full_before()
            caught = [files for files in (1, 3, 6) if any(self.full_in_the_midst(files) for _ in range(5))]
            check(caught, "the disk could not be filled while the job was running")
            check(harness.tree(self.source) == source_tree, "the source was changed")
        finally:
            harness.kill_all(self.sandbox)
            harness.unmount(self.disk)
        return len(caught)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="build directory, or the directory of the programs")
    parser.add_argument("--source", type=Path, help="default: a synthetic checkpoint")
    arguments = parser.parse_args()
    harness.need_root("mounting a small tmpfs")

    def test():
        with harness.Sandbox(harness.Programs(arguments.bin)) as sandbox:
            moments = DiskFullTest(arguments, sandbox).run()
        print(f"disk_full_test: before the job and at {moments} moments of it: ok")

    return harness.main(test)


if __name__ == "__main__":
    sys.exit(main())
