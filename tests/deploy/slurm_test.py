#!/usr/bin/env python3
"""A real Slurm (munge, slurmctld, slurmd, all of the test's own, on this machine) places coordinator and workers from deploy/slurm.

Slurm kills the array half-way and starts it again; then the array is drained, as at the end of its time, and another one finishes the job. The
result is that of an uninterrupted `quern quantize`, no finished task ran again, and draining lost no attempt. deploy/slurm/run.sh does the
same without interruptions.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "crash"))
import harness  # noqa: E402
from harness import check  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent
JOB = [*harness.JOB, "--max-shard-size", "256KiB"]


def wait_until(condition, what, seconds=60):
    end = time.monotonic() + seconds
    while not (value := condition()):
        check(time.monotonic() < end, f"{what}: not within {seconds} s")
        time.sleep(0.05)
    return value


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Slurm:
    """One controller and one node. Nothing of an installed Slurm is touched: configuration, keys, ports and state are the sandbox's."""

    def __init__(self, sandbox):
        self.sandbox = sandbox
        self.directory = sandbox.directory / "slurm"
        for name in ["state", "spool", "munge"]:
            (self.directory / name).mkdir(parents=True)
        self.munge = self.directory / "munge"
        key = self.munge / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        # Its path has at most 107 bytes.
        self.socket = sandbox.runtime / "munge"
        sandbox.runtime.chmod(0o755)
        self.conf = self.directory / "slurm.conf"
        node = socket.gethostname().split(".")[0]
        # cred_expire is also how long a requeued job waits before it starts again.
        self.conf.write_text(f"""ClusterName=quern-test
SlurmctldHost={node}(127.0.0.1)
SlurmUser=root
SlurmctldPort={free_port()}
SlurmdPort={free_port()}
AuthType=auth/munge
AuthInfo=socket={self.socket},cred_expire=5
CredType=cred/munge
StateSaveLocation={self.directory}/state
SlurmdSpoolDir={self.directory}/spool
SlurmctldPidFile={self.directory}/slurmctld.pid
SlurmdPidFile={self.directory}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
MpiDefault=none
ReturnToService=2
KillWait=2
SlurmdParameters=config_overrides
NodeName={node} NodeAddr=127.0.0.1 CPUs=18 RealMemory=4096 State=UNKNOWN
PartitionName=test Nodes={node} Default=YES MaxTime=INFINITE State=UP
""")
        sandbox.environment["SLURM_CONF"] = str(self.conf)
        # The three programs and Slurm's, as a user's PATH has them.
        sandbox.environment["PATH"] = f"{sandbox.directory}/bin:{os.environ['PATH']}:/usr/sbin:/sbin"
        self.daemons = []

    def __enter__(self):
        self._daemon(["munged", "--foreground", "--force", "--key-file", self.munge / "key", "--socket", self.socket, "--pid-file",
                      self.munge / "pid", "--log-file", self.munge / "log", "--seed-file", self.munge / "seed"])
        wait_until(self.socket.exists, "munged has a socket")
        self._daemon(["slurmctld", "-D", "-i", "-f", self.conf])
        self._daemon(["slurmd", "-D", "-f", self.conf])
        wait_until(lambda: "idle" in self.ask("sinfo", "-h", "-o", "%T", may_fail=True), "the node is idle")
        return self

    def __exit__(self, *_):
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _daemon(self, arguments):
        program = shutil.which(arguments[0], path=self.sandbox.environment["PATH"])
        self.daemons.append(self.sandbox.start([program, *arguments[1:]], cwd=self.directory))

    def ask(self, *arguments, may_fail=False, **environment):
        run = subprocess.run([str(a) for a in arguments], capture_output=True, text=True, env=self.sandbox.environment | environment,
                             cwd=self.directory, timeout=60)
        check(may_fail or run.returncode == 0, f"{' '.join(map(str, arguments))} failed with {run.returncode}: {run.stderr}")
        return run.stdout.strip()

    def submit_workers(self):
        return self.ask("sbatch", "--parsable", "--array=0-1", "--time=10", ROOT / "deploy/slurm/workers.sbatch", QUERN_FARM=str(self.directory))

    def tasks_of(self, array):
        """Task of the array -> (state, restarts, exit code); "" stands for a job that is none."""
        found = {}
        for line in self.ask("scontrol", "-o", "show", "job", array).splitlines():
            fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
            found[fields.get("ArrayTaskId", "")] = (fields["JobState"], int(fields["Restarts"]), fields["ExitCode"])
        return found


class Farm:
    """The standing coordinator, and what is asked of it."""

    def __init__(self, sandbox, slurm):
        self.sandbox = sandbox
        self.address = f"unix:{sandbox.runtime}/quern.sock"
        sandbox.environment["QUERN_SERVER"] = self.address
        (slurm.directory / "farm.env").write_text(f"""QUERN_SERVER={self.address}
QUERN_WORKER_FLAGS=
QUERN_CLIENT_FLAGS=
QUERND_STATE={sandbox.directory}/jobs
QUERND_FLAGS="--listen {self.address} --allow-root {sandbox.directory}"
""")
        self.slurm = slurm
        self.coordinator = slurm.ask("sbatch", "--parsable", ROOT / "deploy/slurm/coordinator.sbatch", QUERN_FARM=str(slurm.directory))
        wait_until(lambda: self.sandbox.run([sandbox.programs.quern, "jobs"])[0] == 0, "the coordinator answers")

    def ask(self, *arguments):
        status, out, err = self.sandbox.run([self.sandbox.programs.quern, *arguments, "--json"])
        check(status == 0, f"quern {' '.join(map(str, arguments))} failed with {status}: {out}{err}")
        return json.loads(out)

    def stop(self):
        self.slurm.ask("scancel", "--batch", "--signal=TERM", self.coordinator)
        state = wait_until(lambda: next((s for s in self.slurm.tasks_of(self.coordinator).values() if s[0] not in ("RUNNING", "COMPLETING")), None),
                           "the coordinator stops")
        check(state == ("COMPLETED", 0, "0:0"), f"the coordinator ended as {state}")

    def progress(self, job):
        """(committed tasks, all tasks); checks that the job runs or has ended well."""
        shown = next(shown for shown in self.ask("jobs")["jobs"] if shown["name"] == job)
        check(shown["state"] not in ("FAILED", "CANCELLED"), f"{job} is {shown['state']}: {shown.get('error')}")
        progress = shown.get("progress", {})
        return int(progress.get("tasks_done", 0)), int(progress.get("tasks_total", 0))

    def lost(self, job):
        """How many attempts were lost with their worker; none may have failed."""
        states = [attempt["state"] for task in self.ask("tasks", job)["tasks"] for attempt in task.get("attempts", [])]
        check("COMMITTED" in states, f"the history of {job} is missing")
        check("FAILED" not in states, f"{states.count('FAILED')} attempts of {job} failed")
        return states.count("LOST")


def check_time_left(sandbox):
    """Workers know that the array ends ten minutes after its start."""
    workers = [process for process in sandbox.processes() if process.role == "supervisor"]
    for worker in workers:
        words = Path(f"/proc/{worker.pid}/cmdline").read_text().split("\0")
        left = words[words.index("--available-for") + 1] if "--available-for" in words else "no time"
        check(left[-1] == "s" and 480 <= int(left[:-1]) <= 540, f"a worker was told that it is available for {left}: {words}")
    check(len(workers) == 2, f"{len(workers)} workers run, wanted 2")


def half_way(farm, job, least):
    def reached():
        done, total = farm.progress(job)
        check(not total or done < total, f"{job} ended before it could be interrupted")
        return done if done >= least else 0
    return wait_until(reached, f"{least} tasks are done")


def check_result(reference, out):
    difference = harness.tree_difference(harness.tree(reference), harness.tree(out))
    check(not difference, f"{out} differs from what an uninterrupted run wrote: {difference}")


def test(arguments):
    harness.need_root("a Slurm of the test's own")
    for program in ["munged", "slurmctld", "slurmd", "sbatch"]:
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
            harness.skip(f"{program} is missing (Debian: slurm-wlm, munge)")
    with harness.Sandbox(harness.Programs(arguments.bin)) as sandbox:
        programs, directory = sandbox.programs, sandbox.directory
        (directory / "bin").mkdir()
        for program in [programs.quern, programs.quernd, programs.worker]:
            (directory / "bin" / program.name).symlink_to(program)
        source = directory / "source"
        status, _, err = sandbox.run([programs.quern, "synth", source, "--family", "laguna", "--layers", 3, "--experts", 72, "--hidden", 512,
                                      "--intermediate", 512, "--vocab", 1024, "--seed", 1])
        check(status == 0, f"synth failed with {status}: {err}")
        status, _, err = sandbox.run([programs.quern, "quantize", source, "-o", directory / "reference", *JOB])
        check(status == 0, f"the uninterrupted run failed with {status}: {err}")

        with Slurm(sandbox) as slurm:
            farm = Farm(sandbox, slurm)
            out = directory / "out"
            status, job, err = sandbox.run([programs.quern, "submit", source, "-o", out, *JOB, "--detach"])
            check(status == 0, f"submit failed with {status}: {err}")
            job = job.strip()

            # Slurm kills the array and starts it again.
            first = slurm.submit_workers()
            done = half_way(farm, job, 4)
            check_time_left(sandbox)
            slurm.ask("scancel", "--batch", "--signal=KILL", first)
            wait_until(lambda: all(state in ("CANCELLED", "FAILED") for state, _, _ in slurm.tasks_of(first).values()), "the array is killed")
            slurm.ask("scontrol", "requeue", first)
            wait_until(lambda: all(restarts == 1 and state == "RUNNING" for state, restarts, _ in slurm.tasks_of(first).values()),
                       "the array runs again")
            after, total = farm.progress(job)
            print(f"array {first} killed after {done} of {total} tasks, started again at {after}", flush=True)
            check(after < total, "the job had ended before the array started again")

            # The signal that Slurm sends before the time limit.
            half_way(farm, job, after + 4)
            lost = farm.lost(job)
            slurm.ask("scancel", "--batch", "--signal=TERM", first)
            wait_until(lambda: all(state not in ("RUNNING", "COMPLETING") for state, _, _ in slurm.tasks_of(first).values()), "the array drains")
            tasks = slurm.tasks_of(first)
            check(all(task == ("COMPLETED", 1, "0:0") for task in tasks.values()), f"the drained array ended as {tasks}")
            drained, total = farm.progress(job)
            check(drained < total, "the job had ended before the array was drained")
            check(farm.lost(job) == lost, "draining lost attempts")
            print(f"{lost} attempts were lost with the killed array; drained after {drained} of {total} tasks", flush=True)

            second = slurm.submit_workers()
            status, _, err = sandbox.run([programs.quern, "watch", job])
            check(status == 0, f"watch ended with {status}: {err}")
            slurm.ask("scancel", "--batch", "--signal=TERM", second)
            wait_until(lambda: all(state == "COMPLETED" for state, _, _ in slurm.tasks_of(second).values()), "the second array leaves")

            check_result(directory / "reference", out)
            shards, grants = harness.check_history(out)
            check(grants <= shards + lost + 4, f"{grants} grants for {shards} tasks, {lost} of them lost and at most 4 stopped")

            again = directory / "again"
            sandbox.environment |= {"QUERN_FARM": str(slurm.directory), "SBATCH_ARRAY_INX": "0-1"}
            status, _, err = sandbox.run([ROOT / "deploy/slurm/run.sh", source, "-o", again, *JOB], cwd=slurm.directory)
            check(status == 0, f"run.sh ended with {status}: {err}")
            check_result(directory / "reference", again)
            wait_until(lambda: slurm.ask("squeue", "-h", "-o", "%A") == farm.coordinator, "the workers of run.sh leave")
            farm.stop()
            print(f"slurm_test: {shards} tasks, {grants} grants: ok")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=Path, required=True, help="build directory, or one with the three programs")
    sys.exit(harness.main(lambda: test(parser.parse_args())))
