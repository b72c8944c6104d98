#!/usr/bin/env python3
"""Quantizes a large checkpoint with every process of the job in one memory cgroup, and watches how much each holds.

Without --source a synthetic Laguna checkpoint of full width is made; three layers are 11.5 GB. No process may be killed, the workers
together may hold the budget and 100 MiB, the coordinator 200 MiB. Needs root for the cgroup."""

import argparse
import re
import sys
import time
from pathlib import Path

import harness
from harness import MIB, check

UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def parse_size(text):
    number, unit = re.fullmatch(r"([\d.]+)\s*([A-Za-z]*)", text).groups()
    return int(float(number) * UNITS[unit.upper()])


def status_field(pid, field):
    """Bytes of a field of /proc/PID/status, 0 when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    match = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    return int(match.group(1)) << 10 if match else 0


class Watch:
    """Largest resident memory seen of each role, all its processes together."""

    def __init__(self, sandbox):
        self.sandbox = sandbox
        self.coordinator = self.workers = self.command = 0

    def look(self, processes):
        together = {"coordinator": 0, "workers": 0, "command": 0}
        for process in processes:
            role = "workers" if process.role in ("supervisor", "executor") else process.role
            if role in together:
                together[role] += status_field(process.pid, "VmRSS")
                # The kernel's own high-water mark sees what falls between two looks.
                if role == "coordinator":
                    self.coordinator = max(self.coordinator, status_field(process.pid, "VmHWM"))
        self.workers = max(self.workers, together["workers"])
        self.command = max(self.command, together["command"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="build directory, or the directory of the programs")
    parser.add_argument("--source", type=Path)
    parser.add_argument("--layers", type=int, default=3, help="layers of the synthetic checkpoint")
    parser.add_argument("--directory", type=Path, help="where to work; needs 20 GB for three layers (default: the temporary directory)")
    parser.add_argument("--memory", default="512MiB")
    parser.add_argument("--limit", default="1GiB", help="of the cgroup")
    parser.add_argument("--verify", action="store_true", help="run quern verify on the result")
    arguments = parser.parse_args()
    harness.need_root("a memory cgroup")
    budget = parse_size(arguments.memory)

    def test():
        with harness.Sandbox(harness.Programs(arguments.bin), parent=arguments.directory) as sandbox:
            quern = sandbox.programs.quern
            source = arguments.source
            if source is None:
                source = sandbox.directory / "source"
                status, _, err = sandbox.run([quern, "synth", source, "--family", "laguna", "--layers", arguments.layers, "--seed", "1"], timeout=3600)
                check(status == 0, f"synth failed with {status}:\n{err}")
            out = sandbox.directory / "out"
            cgroup = harness.MemoryCgroup(parse_size(arguments.limit))
            try:
                started = time.monotonic()
                process = sandbox.start([quern, "quantize", source.resolve(), "-o", out, *harness.JOB, "--memory", arguments.memory],
                                        preexec_fn=cgroup.enter)
                watch = Watch(sandbox)
                processes, listed = [], 0.0
                while process.poll() is None:
                    if time.monotonic() - listed > 0.2:  # listing all of /proc is dear, looking at a few is not
                        processes, listed = sandbox.processes(), time.monotonic()
                    watch.look(processes)
                    time.sleep(0.02)
                seconds = time.monotonic() - started
                kills, peak = cgroup.oom_kills(), cgroup.peak()
                sandbox.wait_until_empty()
            finally:
                harness.kill_all(sandbox)
                cgroup.remove()
            check(process.returncode == 0, f"the job failed with {process.returncode}; see {sandbox.log}")
            check(kills == 0, f"the OOM killer struck {kills} times")
            check(watch.workers > 0 and watch.coordinator > 0, "the processes of the job were not seen")
            check(watch.workers <= budget + 100 * MIB,
                  f"the workers together held {watch.workers / MIB:.0f} MiB, more than the budget of {budget / MIB:.0f} MiB and 100 MiB")
            check(watch.coordinator <= 200 * MIB, f"the coordinator held {watch.coordinator / MIB:.0f} MiB, more than 200 MiB")
            sandbox.check_nothing_left(out)
            if arguments.verify:
                status, said, err = sandbox.run([quern, "verify", out], timeout=3600)
                check(status == 0, f"quern verify ended with {status}:\n{err}{said}")
            size = harness.shards_size(source)
        print(f"memory_test: {size / 1e9:.2f} GB in {seconds:.1f} s, workers {watch.workers / MIB:.0f} MiB (budget {budget / MIB:.0f}), "
              f"coordinator {watch.coordinator / MIB:.0f} MiB, command {watch.command / MIB:.0f} MiB, "
              f"cgroup peak {peak / MIB:.0f} of {parse_size(arguments.limit) / MIB:.0f} MiB with page cache, 0 kills: ok")

    return harness.main(test)


if __name__ == "__main__":
    sys.exit(main())
