#!/usr/bin/env python3
"""A farm of several hosts under faults drawn at random, again and again, each time until its job has ended.

A run makes a coordinator host and two worker hosts out of namespaces, submits a job, applies two to five faults (faults.py), and checks that
the job ends as it should, that the result is that of an uninterrupted run, that no finished task ran again, that no more attempts were needed
than the faults explain, and that no process and no file is left over. The same seed draws the same faults: --only R repeats run R.
Needs root.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "crash"))
import farm as farms  # noqa: E402
import faults  # noqa: E402
import harness  # noqa: E402
import hosts  # noqa: E402
from certificates import Certificates  # noqa: E402
from harness import Failure, check  # noqa: E402

# Faults begin within this; a job without any takes somewhat longer.
SPAN = 1.4
# After the last fault is over. A worker may have been told to wait, a task may be tried for the third time.
PATIENCE = 60
# A run that takes longer has come to a standstill.
LONGEST_RUN = 240
TICK = 0.02
ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")


def stand_still(*_):
    raise Failure(f"the run takes longer than {LONGEST_RUN} s")


class WorkerPlan:
    def __init__(self, numbers, hidden):
        self.hidden = hidden
        self.proxied = numbers.random() < 0.6
        self.reader = numbers.choice(["auto", "buffered"])
        self.read_delay_us = numbers.choice([20_000, 30_000, 45_000])

    def __str__(self):
        return f"{'hidden' if self.hidden else 'seeing'}{', proxy' if self.proxied else ''}, {self.reader}, reads take {self.read_delay_us / 1000:.0f} ms"


class Setup:
    """What is drawn for a run."""

    def __init__(self, seed, number):
        numbers = random.Random(f"{seed}:{number}")
        self.workers = [WorkerPlan(numbers, False), WorkerPlan(numbers, numbers.random() < 0.6)]
        # Each kind has its turn.
        deck = random.Random(seed).sample(faults.ALL, len(faults.ALL))
        first = deck[number % len(deck)]
        others = [kind for kind in [*faults.ALL, faults.Kill, faults.Kill] if kind is not first or kind is faults.Kill]
        kinds = [first, *numbers.sample(others, numbers.choice([1, 2, 2, 3, 4]))]
        self.faults = sorted([kind(numbers.uniform(0.05, SPAN), numbers, self) for kind in kinds], key=lambda fault: fault.at)

    def __str__(self):
        lines = [f"worker{i + 1}: {plan}" for i, plan in enumerate(self.workers)]
        return "\n".join("  " + line for line in [*lines, *map(str, self.faults)])


class Poller:
    """Asks for the job without waiting for the answer."""

    def __init__(self, farm, job):
        self.command = [str(word) for word in farm.client("show", job)]
        self.environment = farm.sandbox.environment
        self.process = None
        self.asked_at = 0.0

    def step(self):
        """(when it was asked, the job) once an answer has come."""
        now = time.monotonic()
        if self.process is None:
            if now - self.asked_at >= 0.15:
                self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                                env=self.environment, text=True)
                self.asked_at = now
            return None
        if self.process.poll() is None and now - self.asked_at < 4:
            return None
        status, out = self.close()
        return (self.asked_at, json.loads(out)) if status == 0 else None

    def close(self):
        if self.process is None:
            return None, ""
        self.process.kill()  # nothing to one that has ended
        out, _ = self.process.communicate()
        status, self.process = self.process.returncode, None
        return status, out


class Run:
    def __init__(self, test, number):
        self.test = test
        self.setup = Setup(test.seed, number)
        self.farm = farms.Farm(test, self.setup, test.base / f"run{number}")
        self.to_apply = list(self.setup.faults)
        self.to_undo = []
        self.applied = []
        self.failures = []

    def close(self):
        self.farm.close()

    def run(self):
        began = time.monotonic()
        self.farm.start()
        self.farm.check_ready()
        self.job = self.farm.submit()
        ready = time.monotonic()
        poller = Poller(self.farm, self.job)
        try:
            while (job := self.wait_for_end(poller))["state"] != "SUCCEEDED":
                self.check_failure(job)
                self.retry()
        finally:
            poller.close()
            self.undo(lambda fault: True)
        ended = time.monotonic()
        self.check_result()
        self.times = f"start {ready - began:.1f} s, job {ended - ready:.1f} s, checks and end {time.monotonic() - ended:.1f} s"

    def undo(self, is_over):
        for fault in [fault for fault in self.to_undo if is_over(fault)]:
            self.to_undo.remove(fault)
            fault.undo(self.farm)

    def wait_for_end(self, poller):
        """The ended job, as it is after all faults are over; those that would come after its success do not come."""
        began = time.monotonic()
        calm_since, job = None, None
        while True:
            now = time.monotonic()
            self.undo(lambda fault: fault.at + fault.lasts <= now - began)
            while self.to_apply and self.to_apply[0].at <= now - began:
                fault = self.to_apply.pop(0)
                self.applied.append(fault)
                self.to_undo.append(fault)
                fault.apply(self.farm)
            if calm_since is None and not self.to_apply and not self.to_undo:
                calm_since = now
            self.farm.step()
            if (answer := poller.step()) is not None:
                asked_at, job = answer
                if job["state"] == "SUCCEEDED":
                    self.to_apply.clear()
                    return job
                if job["state"] in ENDED and calm_since is not None and asked_at >= calm_since:
                    return job
            check(calm_since is None or now < calm_since + PATIENCE,
                  f"the job has not ended {PATIENCE} s after the last fault; it is {job and job['state']}; {harness.describe(self.test.sandbox)}")
            time.sleep(TICK)

    def check_failure(self, job):
        reason = job["error"]["reason"]
        allowed = {reason for fault in self.applied for reason in fault.may_fail}
        counted = sum(fault.failures for fault in self.applied)
        check(job["state"] == "FAILED" and (reason in allowed or counted >= farms.MAX_FAILURES),
              f"the job ended {job['state']}, which none of the faults explains: {job['error']}")
        check(len(self.failures) < len(self.applied), f"the job fails again when all faults are over: {job['error']}")
        self.failures.append(reason)

    def retry(self):
        """All faults are over, but for a source that looks like another one: that must be said, and nothing be done."""
        retry = self.farm.client("retry", self.job)
        for fault in self.applied:
            if isinstance(fault, faults.Shrink) and fault.is_touched:
                status, out, err = self.test.sandbox.run(retry, timeout=60)
                check(status == 1 and "changed: modification time" in out + err, f"the job goes on with a source of another time: {status}\n{out}{err}")
                fault.put_time_back()
                fault.is_touched = False
        status, out, err = self.test.sandbox.run(retry, timeout=60)
        check(status == 0, f"retry ended with {status}:\n{out}{err}")

    def check_result(self):
        self.farm.check_ready()
        self.farm.check_processes()
        self.farm.check_left_cleanly()
        out = self.farm.out
        difference = harness.tree_difference(harness.tree(out), self.test.reference)
        check(not difference, f"the result differs: {difference}")
        tasks, grants = harness.check_history(out)
        explained = sum(fault.grants for fault in self.applied)
        check(grants <= tasks + explained, f"{grants} attempts at {tasks} tasks: the faults explain {explained} more")
        self.test.sandbox.check_nothing_left(out)
        left = [str(path) for path in self.farm.directory.glob("tmp.*/*")]
        check(not left, f"files left over: {left}")
        self.tasks, self.more_grants = tasks, grants - tasks
        hidden = {unit.name for unit in self.farm.workers if unit.plan.hidden}
        commits = json.loads((out / ".quern" / "run.json").read_text())["commits"]
        self.streamed = sum(commit["worker"] in hidden for commit in commits)


class ChaosTest:
    def __init__(self, arguments, sandbox):
        self.sandbox = sandbox
        self.base = sandbox.directory.parent
        self.source = arguments.source.resolve()
        self.seed = arguments.seed
        self.verbose = arguments.verbose
        self.shard_size = "96KiB"
        self.preload = self.base / "faulty_host.so"
        self.counts = dict.fromkeys((kind.__name__ for kind in faults.ALL), 0)
        self.failures = 0
        self.tasks = 0
        self.streamed = 0

    def prepare(self):
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-Wall", "-o", self.preload, Path(__file__).parent / "faulty_host.c", "-ldl"], check=True)
        hosts.make_switch()
        self.certificates = Certificates(self.base / "tls", [hosts.SWITCH, f"{hosts.NETWORK}.2"])
        out = self.base / "reference"
        status, _, err = self.sandbox.run([self.sandbox.programs.quern, "quantize", self.source, "-o", out, *harness.JOB, "--max-shard-size",
                                           self.shard_size, "--memory", "64MiB"])
        check(status == 0, f"the uninterrupted run failed with {status}:\n{err}")
        self.reference = harness.tree(out)

    def run(self, numbers):
        self.prepare()
        signal.signal(signal.SIGALRM, stand_still)
        for number in numbers:
            began = time.monotonic()
            run = Run(self, number)
            signal.alarm(LONGEST_RUN)
            try:
                run.run()
            except Failure as failure:
                kept = shutil.copytree(run.farm.directory, f"/tmp/kept-{self.base.name}", ignore=shutil.ignore_patterns("source", "store"))
                raise Failure(f"run {number} of seed {self.seed}:\n{run.setup}\n  applied {len(run.applied)}, failed {run.failures}\n{failure}\n"
                              f"kept for inspection: {kept}; repeat with --seed {self.seed} --only {number}") from None
            finally:
                signal.alarm(0)
                run.close()
            shutil.rmtree(run.farm.directory)
            for fault in run.applied:
                self.counts[type(fault).__name__] += 1
            self.failures += len(run.failures)
            self.tasks += run.tasks
            self.streamed += run.streamed
            if self.verbose:
                print(f"run {number}: {time.monotonic() - began:.1f} s ({run.times}), {run.tasks} tasks, {len(run.applied)} faults, "
                      f"{run.more_grants} attempts more, retried after {run.failures}\n{run.setup}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="build directory, or the directory of the programs")
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="this run alone")
    parser.add_argument("--verbose", action="store_true", help="print every run, not only a failing one")
    parser.add_argument("--base", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    harness.need_root("a network namespace")
    if arguments.base is None:
        return hosts.enter(sys.argv)
    runs = range(arguments.runs) if arguments.only is None else [arguments.only]

    def test():
        with harness.Sandbox(harness.Programs(arguments.bin), inside=arguments.base) as sandbox:
            chaos = ChaosTest(arguments, sandbox)
            chaos.run(runs)
            check(chaos.streamed > 0 or len(runs) < 10, "no task went over the data plane, and some workers saw no files")
        print(", ".join(f"{count} {name}" for name, count in chaos.counts.items()))
        print(f"chaos_test: {len(runs)} runs, {sum(chaos.counts.values())} faults, {chaos.failures} retries, {chaos.streamed} of {chaos.tasks} tasks by "
              f"the data plane, seed {chaos.seed}: ok")

    return hosts.be_init(lambda: harness.main(test))


if __name__ == "__main__":
    sys.exit(main())
