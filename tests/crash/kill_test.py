#!/usr/bin/env python3
"""Kills `quern quantize` at random instants, runs it again, and checks that the result is that of an uninterrupted run.

Targets are the command, the coordinator, the worker's supervisor, its executor, or all of them at once; a run is killed one to three
times. The same seed gives the same targets and instants: --only R repeats run R.
"""

import argparse
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import harness
from harness import Failure, check

TARGETS = ["command", "coordinator", "supervisor", "executor", "all"]


class KillTest:
    def __init__(self, arguments, sandbox):
        self.sandbox = sandbox
        self.source = arguments.source.resolve()
        self.seed = arguments.seed
        # A quantized checkpoint has about half of the source's bytes: that makes about nine tasks.
        self.shard_size = arguments.max_shard_size or str(max(harness.shards_size(self.source) // 18, 64 << 10))
        self.out = sandbox.directory / "out"
        self.kills = 0
        self.by_target = dict.fromkeys(TARGETS, 0)

    def command(self, out):
        return [self.sandbox.programs.quern, "quantize", self.source, "-o", out, *harness.JOB, "--max-shard-size", self.shard_size,
                "--memory", "64MiB"]

    def make_reference(self):
        self.source_tree = harness.tree(self.source)
        reference = self.sandbox.directory / "reference"
        started = time.monotonic()
        status, _, err = self.sandbox.run(self.command(reference))
        self.duration = time.monotonic() - started
        check(status == 0, f"the uninterrupted run failed with {status}:\n{err}")
        self.sandbox.wait_until_empty()
        self.sandbox.check_nothing_left(reference)
        self.reference = harness.tree(reference)
        tasks, _ = harness.check_history(reference)
        check(tasks >= 4, f"{tasks} tasks are too few to be interrupted between; give a smaller --max-shard-size")
        print(f"uninterrupted: {tasks} tasks in {self.duration:.2f} s", flush=True)

    def kill_once(self, random_numbers):
        """Starts the command and kills at an instant. Returns (killed, exit status of the command if it came to its end)."""
        target = random_numbers.choice(TARGETS)
        instant = random_numbers.uniform(0, self.duration)
        process = self.sandbox.start(self.command(self.out))
        try:
            process.wait(instant)
            return None, process.returncode
        except subprocess.TimeoutExpired:
            pass
        if target == "all":
            killed = harness.kill_all(self.sandbox) > 0
        else:
            victims = [p for p in self.sandbox.processes() if p.role == target]
            killed = any([victim.kill() for victim in victims])
        self.history.append(f"{target} at {instant:.3f} s{'' if killed else ' (not there)'}")
        if killed:
            self.kills += 1
            self.by_target[target] += 1
        try:
            status = process.wait(120)
        except subprocess.TimeoutExpired:
            raise Failure(f"the command hangs after the kill: {harness.describe(self.sandbox)}") from None
        self.sandbox.wait_until_empty()
        if target in ("supervisor", "executor"):
            check(status == 0, f"the command gave up with {status} although only the {target} was killed")
        return killed, status

    def one_run(self, number):
        random_numbers = random.Random(f"{self.seed}:{number}")
        wanted = random_numbers.choice([1, 1, 2, 3])
        self.history = []
        killed = 0
        # A kill may come too late or find nobody: then it is tried again, on a fresh output if the job is done.
        for _ in range(50):
            happened, status = self.kill_once(random_numbers)
            killed += bool(happened)
            if killed >= wanted:
                break
            if status == 0:
                if killed > 0:
                    break
                self.check_result()
                shutil.rmtree(self.out)
        check(killed > 0, "no kill hit")
        status, _, err = self.sandbox.run(self.command(self.out))
        check(status == 0, f"the run after the kills failed with {status}:\n{err}")
        self.check_result()
        shutil.rmtree(self.out)

    def check_result(self):
        self.sandbox.wait_until_empty()
        self.sandbox.check_nothing_left(self.out)
        now = harness.tree(self.out)
        check(now == self.reference, f"the result differs: {harness.tree_difference(now, self.reference)}")
        harness.check_history(self.out)

    def run(self, runs):
        self.make_reference()
        for number in runs:
            try:
                self.one_run(number)
            except Failure as failure:
                raise Failure(f"run {number} of seed {self.seed}, killed: {'; '.join(self.history) or 'nothing yet'}: {failure}\n"
                              f"log: {self.sandbox.log}; repeat with --seed {self.seed} --only {number}") from None
        check(harness.tree(self.source) == self.source_tree, "the source was changed")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="build directory, or the directory of the programs")
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="this run alone")
    parser.add_argument("--max-shard-size", help="default: what makes about nine tasks")
    arguments = parser.parse_args()
    runs = range(arguments.runs) if arguments.only is None else [arguments.only]

    def test():
        with harness.Sandbox(harness.Programs(arguments.bin)) as sandbox:
            kill_test = KillTest(arguments, sandbox)
            kill_test.run(runs)
        targets = ", ".join(f"{count} {target}" for target, count in kill_test.by_target.items())
        print(f"killed: {targets}")
        print(f"kill_test: {len(runs)} runs, {kill_test.kills} kills, seed {arguments.seed}: ok")

    return harness.main(test)


if __name__ == "__main__":
    sys.exit(main())
