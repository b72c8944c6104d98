#!/usr/bin/env python3
"""Real kills by the OOM killer: a worker in a memory cgroup that is too small for its --memory, a coordinator outside of it.

With a cgroup that holds a smaller budget the task is tried again with less memory and succeeds; with one that holds none the job fails and
says which task, which limit, and what to do. The coordinator lives through both. Needs root for the cgroup."""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import harness
from harness import MIB, check


class OomTest:
    def __init__(self, arguments, sandbox):
        self.sandbox = sandbox
        self.programs = sandbox.programs
        self.source = arguments.source.resolve() if arguments.source else self.make_source()
        self.address = f"unix:{sandbox.runtime}/q.sock"

    def make_source(self):
        """Large enough to fill any buffer pool."""
        source = self.sandbox.directory / "source"
        status, _, err = self.sandbox.run([self.programs.quern, "synth", source, "--family", "qwen3_moe", "--layers", "2", "--experts", "32",
                                           "--hidden", "2048", "--intermediate", "1024", "--vocab", "4096", "--seed", "1"])
        check(status == 0, f"synth failed with {status}:\n{err}")
        return source

    def ask(self, *arguments):
        status, out, err = self.sandbox.run([self.programs.quern, *arguments, "--server", self.address, "--json"], timeout=60)
        check(status in (0, 1), f"quern {' '.join(arguments)}: exit status {status}\n{err}")
        return json.loads(out)

    def start_coordinator(self):
        self.coordinator = self.sandbox.start([self.programs.quernd, "--state-dir", self.sandbox.directory / "daemon", "--listen", self.address,
                                               "--allow-root", self.sandbox.directory, "--allow-root", self.source])
        for _ in range(300):
            if (self.sandbox.runtime / "q.sock").exists():
                return
            check(self.coordinator.poll() is None, f"quernd ended at once; see {self.sandbox.log}")
            time.sleep(0.05)
        raise harness.Failure("quernd does not listen")

    def check_coordinator_lives(self):
        check(self.coordinator.poll() is None, f"the coordinator ended with {self.coordinator.returncode}")
        self.ask("jobs")

    def run_job(self, limit, memory, name):
        """The job's end with a worker in a cgroup of `limit` bytes: (job, tasks, kills)."""
        out = self.sandbox.directory / name
        cgroup = harness.MemoryCgroup(limit)
        worker = None
        try:
            job = self.ask("submit", str(self.source), "-o", str(out), *harness.JOB, "--max-shard-size", "64MiB", "--detach")["name"]
            end = time.monotonic() + 300
            start_worker = lambda: self.sandbox.start(
                [self.programs.worker, "--server", self.address, "--memory", memory, "--threads", "2", "--device", "cpu", "--name", name],
                preexec_fn=cgroup.enter)
            worker = start_worker()
            while (state := self.ask("show", job)) and state["state"] not in ("SUCCEEDED", "FAILED", "CANCELLED"):
                check(time.monotonic() < end, f"{name}: the job is still {state['state']} after 300 s")
                if worker.poll() is not None:  # the whole of it was killed: a service manager starts it again
                    worker = start_worker()
                self.check_coordinator_lives()
                time.sleep(0.2)
            return state, self.ask("tasks", job)["tasks"], cgroup.oom_kills(), out
        finally:
            if worker is not None and worker.poll() is None:
                worker.terminate()
                try:
                    worker.wait(30)
                except subprocess.TimeoutExpired:
                    pass
            for process in self.sandbox.processes():
                if process.role in ("supervisor", "executor"):
                    process.kill()
            cgroup.remove()

    def retried_with_less(self):
        status, _, err = self.sandbox.run([self.programs.quern, "quantize", self.source, "-o", self.sandbox.directory / "reference", *harness.JOB,
                                           "--max-shard-size", "64MiB", "--memory", "64MiB"])
        check(status == 0, f"the run without a limit failed with {status}:\n{err}")
        job, tasks, kills, out = self.run_job(100 * MIB, "512MiB", "enough")
        check(job["state"] == "SUCCEEDED", f"with 100 MiB the job ended {job['state']}: {job.get('error')}")
        check(kills > 0, "nothing was killed: the cgroup is not small enough for this test")
        attempts = [attempt for task in tasks for attempt in task["attempts"]]
        killed = [attempt for attempt in attempts if attempt["reason"] == "OUT_OF_MEMORY"]
        check(killed, f"no attempt says OUT_OF_MEMORY: {attempts}")
        for task in tasks:
            amounts = [int(attempt["memory"]) for attempt in task["attempts"]]
            check(all(b <= a for a, b in zip(amounts, amounts[1:])), f"{task['name']}: memory grew from attempt to attempt: {amounts}")
            for before, after in zip(task["attempts"], task["attempts"][1:]):
                if before["reason"] == "OUT_OF_MEMORY":
                    check(int(after["memory"]) < int(before["memory"]), f"{task['name']}: tried again with as much memory: {amounts}")
        difference = harness.tree_difference(harness.tree(out), harness.tree(self.sandbox.directory / "reference"))
        check(not difference, f"the result differs: {difference}")
        print(f"retried with less: {kills} kills, {len(killed)} attempts out of memory, job succeeded", flush=True)

    def never_enough(self):
        job, tasks, kills, _ = self.run_job(26 * MIB, "256MiB", "never")
        check(job["state"] == "FAILED", f"with 26 MiB the job ended {job['state']}")
        check(kills > 0, "nothing was killed: the cgroup is not small enough for this test")
        error = job["error"]
        check(error["reason"] == "OUT_OF_MEMORY", f"the reason is {error}")
        check(error["task"].startswith(job["name"] + "/tasks/"), f"the error names no task: {error}")
        check("MiB" in error["message"] and "limit" in error["message"], f"the message names no limit: {error}")
        check("--memory" in error["message"] or "raise" in error["message"], f"the message says not what to do: {error}")
        print(f"never enough: {kills} kills, then: {error['message']}", flush=True)

    def run(self):
        self.start_coordinator()
        self.retried_with_less()
        self.never_enough()
        self.check_coordinator_lives()
        self.coordinator.terminate()
        check(self.coordinator.wait(30) == 0, f"quernd ended with {self.coordinator.returncode} when it was asked to")
        self.sandbox.wait_until_empty()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="build directory, or the directory of the programs")
    parser.add_argument("--source", type=Path, help="default: a synthetic checkpoint")
    arguments = parser.parse_args()
    harness.need_root("a memory cgroup")

    def test():
        with harness.Sandbox(harness.Programs(arguments.bin)) as sandbox:
            OomTest(arguments, sandbox).run()
        print("oom_test: ok")

    return harness.main(test)


if __name__ == "__main__":
    sys.exit(main())
