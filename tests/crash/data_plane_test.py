#!/usr/bin/env python3
"""A worker in a mount namespace of its own, where the source and the output are not to be seen, works for a coordinator through a proxy that
cuts its connections: alone, beside a worker that sees the files, across kills of itself and of the coordinator. The result is fetched from
there too. Every result has the bytes of a run on one machine, and what has come through is not sent again. Needs root."""

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import harness
from harness import MIB, check

CUT = 4 * MIB


class Proxy:
    """Forwards TCP connections to a unix socket and cuts each one after so many bytes of both directions together (0: never)."""

    def __init__(self, target, cut_after):
        self.target = str(target)
        self.cut_after = cut_after
        self.lock = threading.Lock()
        self.forwarded = 0
        self.cuts = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self.listener.close()

    def _accept(self):
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            try:
                far.connect(self.target)
            except OSError:  # the coordinator is away
                near.close()
                far.close()
                continue
            left = [self.cut_after or sys.maxsize]
            for pair in [(near, far), (far, near)]:
                threading.Thread(target=self._forward, args=(*pair, left), daemon=True).start()

    def _forward(self, source, sink, left):
        try:
            while data := source.recv(64 << 10):
                sink.sendall(data)
                with self.lock:
                    self.forwarded += len(data)
                    left[0] -= len(data)
                    cut = left[0] <= 0
                    self.cuts += cut
                if cut:
                    break
        except OSError:
            pass
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


class DataPlaneTest:
    def __init__(self, programs, sandbox):
        self.programs = programs
        self.sandbox = sandbox
        self.files = sandbox.directory / "files"  # what the worker elsewhere does not see
        self.files.mkdir()
        self.source = self.files / "source"
        self.socket = sandbox.runtime / "s"
        self.jobs = 0

    def elsewhere(self, arguments):
        """The command line in a mount namespace where the files are hidden."""
        return ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', self.files, *arguments]

    def start_coordinator(self):
        process = self.sandbox.start([self.programs.quernd, "--state-dir", self.sandbox.directory / "coordinator", "--listen", f"unix:{self.socket}",
                                      "--allow-root", self.files])
        end = time.monotonic() + 30
        while self.quern("jobs", quiet=True)[0] != 0:
            check(time.monotonic() < end and process.poll() is None, "the coordinator does not answer")
            time.sleep(0.05)
        return process

    def worker(self, name, server):
        return [self.programs.worker, "--server", server, "--name", name, "--memory", "64MiB", "--threads", "1"]

    def quern(self, *arguments, quiet=False):
        command = [self.programs.quern, *arguments, "--server", f"unix:{self.socket}"]
        if quiet:
            return self.sandbox.run(command)
        status, out, err = self.sandbox.run(command)
        check(status == 0, f"{' '.join(map(str, arguments))} failed with {status}:\n{err}")
        return out

    def submit(self, directory=None):
        self.jobs += 1
        out = (directory or self.files) / f"out{self.jobs}"
        job = self.quern("submit", self.source, "-o", out, *harness.JOB, "--max-shard-size", "6MiB", "--detach").strip()
        return job, out

    def job(self, name):
        return json.loads(self.quern("show", name, "--json"))

    def wait(self, name, until, what, seconds=300):
        end = time.monotonic() + seconds
        while True:
            job = self.job(name)
            if until(job):
                return job
            check(job["state"] in ("QUEUED", "RUNNING", "PUBLISHING"), f"{what}: {name} is {job['state']}: {job.get('error')}")
            check(time.monotonic() < end, f"{what}: {name} is not done after {seconds} s: {job}")
            time.sleep(0.05)

    def finish(self, name, out, what):
        self.wait(name, lambda job: job["state"] == "SUCCEEDED", what)
        difference = harness.tree_difference(harness.tree(out), self.reference)
        check(not difference, f"{what}: the result differs: {difference}")
        run = json.loads((out / ".quern" / "run.json").read_text())
        tasks, grants = harness.check_history(out)
        print(f"data plane: {what}: {tasks} tasks, {grants} grants", flush=True)
        return run, tasks, grants

    def stop(self, process):
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            raise harness.Failure(f"a worker does not end: {harness.describe(self.sandbox)}") from None

    def cut_connections(self):
        what = "connections are cut"
        proxy = Proxy(self.socket, CUT)
        worker = self.sandbox.start(self.elsewhere(self.worker("elsewhere", proxy.address)))
        name, out = self.submit()
        _, tasks, grants = self.finish(name, out, what)
        self.stop(worker)
        needed = self.source_bytes + harness.shards_size(out)
        # Connections that are idle are given up, and their next ones have a full share again.
        check(proxy.cuts >= needed // CUT * 3 // 4, f"{what}: only {proxy.cuts} times for {needed} bytes")
        check(grants == tasks, f"{what}: {grants} grants of {tasks} tasks: attempts were begun again")
        # A cut may lose the chunk that was under way in each direction, and what was on its way within the machine.
        allowed = needed * 1.05 + proxy.cuts * 2 * MIB
        check(proxy.forwarded < allowed, f"{what}: {proxy.forwarded} bytes were sent for {needed}, with {proxy.cuts} cuts")
        print(f"data plane: {proxy.cuts} cuts, {proxy.forwarded / needed:.3f} bytes sent for each that was needed", flush=True)
        proxy.close()

    def both_kinds(self):
        what = "a worker that sees the files and one that does not"
        proxy = Proxy(self.socket, 0)
        blind = self.sandbox.start(self.elsewhere(self.worker("elsewhere", proxy.address)))
        name, out = self.submit()
        self.wait(name, lambda job: job.get("progress", {}).get("tasks_running", 0) > 0, what)
        # The same files under another name.
        other = self.sandbox.directory / "view"
        other.mkdir(exist_ok=True)
        mapped = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" "$1" && mount -t tmpfs none "$0" && shift && exec "$@"', self.files, other]
        seeing = self.sandbox.start([*mapped, *self.worker("here", f"unix:{self.socket}"), "--map", f"{self.files}={other}"])
        run, tasks, grants = self.finish(name, out, what)
        check(grants == tasks, f"{what}: {grants} grants of {tasks} tasks")
        by = {grant["worker"] for grant in run["grants"]}
        check(by == {"elsewhere", "here"}, f"{what}: the work was done by {by}")
        self.stop(blind)
        self.stop(seeing)
        check(proxy.forwarded < self.source_bytes + harness.shards_size(out), f"{what}: everything was sent")
        proxy.close()

    def killed_worker(self):
        what = "the worker is killed"
        proxy = Proxy(self.socket, 0)
        name, out = self.submit()
        for turn in range(3):
            worker = self.sandbox.start(self.elsewhere(self.worker("elsewhere", proxy.address)))
            self.wait(name, lambda job: job.get("progress", {}).get("tasks_done", 0) > turn and
                      job.get("progress", {}).get("tasks_running", 0) > 0, what)
            for process in self.sandbox.processes():
                if process.role in ("supervisor", "executor"):
                    process.kill()
            worker.wait()
        worker = self.sandbox.start(self.elsewhere(self.worker("elsewhere", proxy.address)))
        self.finish(name, out, what)
        self.stop(worker)
        left = [path.name for path in (out / ".quern").iterdir()]
        check(left == ["run.json"], f"{what}: {left} is left in {out}/.quern")
        proxy.close()

    def killed_coordinator(self):
        what = "the coordinator is killed"
        proxy = Proxy(self.socket, 0)
        worker = self.sandbox.start(self.elsewhere(self.worker("elsewhere", proxy.address)))
        name, out = self.submit()
        for turn in range(3):
            before = proxy.forwarded
            end = time.monotonic() + 60
            while proxy.forwarded < before + 10 * MIB and self.job(name)["state"] != "SUCCEEDED":
                check(time.monotonic() < end, f"{what}: nothing moves")
                time.sleep(0.01)
            self.coordinator.kill()
            self.coordinator.wait()
            self.coordinator = self.start_coordinator()
        _, tasks, grants = self.finish(name, out, what)
        check(grants == tasks, f"{what}: {grants} grants of {tasks} tasks: attempts were begun again")
        self.stop(worker)
        proxy.close()
        return name, out

    def full_disk(self):
        """The disk that shards are streamed to has room for some of them only, then for all."""
        what = "the coordinator's disk is full"
        disk = self.files / "disk"
        disk.mkdir()
        size = sum(file.stat().st_size for file in (self.files / "reference").glob("*.safetensors"))
        harness.mount_tmpfs(disk, 2 * size + 64 * MIB)
        try:
            ballast = disk / "ballast"
            with open(ballast, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, 2 * size + 64 * MIB - size // 2)
            worker = self.sandbox.start(self.elsewhere(self.worker("elsewhere", f"unix:{self.socket}")))
            name, out = self.submit(disk)
            failed = self.wait(name, lambda job: job["state"] == "FAILED", what)
            error = failed["error"]
            check(error["reason"] == "DISK_FULL" and re.search(r"needs \d+ bytes", error["message"]), f"{what}: {error}")
            done = int(failed["progress"]["tasks_done"])
            check(done > 0, f"{what}: no shard had room: {failed}")
            # Again: nothing has changed.
            self.quern("retry", name)
            again = self.wait(name, lambda job: job["state"] == "FAILED", what)
            check(again["error"]["reason"] == "DISK_FULL" and int(again["progress"]["tasks_done"]) >= done, f"{what}: {again}")
            ballast.unlink()
            self.quern("retry", name)
            self.finish(name, out, what)
            self.stop(worker)
        finally:
            harness.unmount(disk)

    def download(self, name, out):
        what = "the result is fetched"
        target = self.sandbox.directory / "fetched"
        size = sum(path.stat().st_size for path in out.iterdir() if path.is_file())
        proxy = Proxy(self.socket, CUT)
        command = self.elsewhere([self.programs.quern, "download", name, "-o", target, "--server", proxy.address])
        for turn in range(2):
            before = proxy.forwarded
            process = self.sandbox.start(command)
            while proxy.forwarded < before + 5 * MIB and process.poll() is None:
                time.sleep(0.001)
            process.kill()
            process.wait()
            check(not (target / "config.json").exists(), f"{what}: it was faster than the test")
        status, _, err = self.sandbox.run(command)
        check(status == 0, f"{what}: exit status {status}:\n{err}")
        difference = harness.tree_difference(harness.tree(target), harness.tree(out))
        check(not difference, f"{what}: it differs: {difference}")
        check(proxy.forwarded < size * 1.05 + (proxy.cuts + 2) * 2 * MIB, f"{what}: {proxy.forwarded} bytes came for {size}, {proxy.cuts} cuts")
        (target / "config.json").write_text("mine")
        status, _, err = self.sandbox.run(command)
        check(status == 1 and "config.json" in err and (target / "config.json").read_text() == "mine", f"{what}: over a file of another: {err}")
        print(f"data plane: {what}: {proxy.cuts} cuts, {proxy.forwarded / size:.3f} bytes came for each that was needed", flush=True)
        shutil.rmtree(target)
        proxy.close()

    def run(self):
        status, _, err = self.sandbox.run([self.programs.quern, "synth", self.source, "--family", "qwen3_moe", "--layers", "2", "--experts", "8", "--hidden",
                                           "1024", "--intermediate", "1024", "--vocab", "2048", "--seed", "1"])
        check(status == 0, f"synth failed with {status}:\n{err}")
        self.source_bytes = harness.shards_size(self.source)
        source_tree = harness.tree(self.source)
        reference = self.files / "reference"
        status, _, err = self.sandbox.run([self.programs.quern, "quantize", self.source, "-o", reference, *harness.JOB, "--max-shard-size", "6MiB"])
        check(status == 0, f"the run on one machine failed with {status}:\n{err}")
        self.reference = harness.tree(reference)
        status, _, err = self.sandbox.run(self.elsewhere(["test", "!", "-e", self.source]))
        if status != 0:
            harness.skip(f"no mount namespace can be made here: {err.strip()}")
        self.coordinator = self.start_coordinator()
        self.cut_connections()
        self.both_kinds()
        self.killed_worker()
        name, out = self.killed_coordinator()
        self.download(name, out)
        self.full_disk()
        self.coordinator.terminate()
        self.coordinator.wait(30)
        check(harness.tree(self.source) == source_tree, "the source was changed")
        self.sandbox.wait_until_empty()
        for directory in (self.sandbox.directory / "tmp", self.sandbox.directory / "home"):
            left = [str(path) for path in directory.rglob("*") if path.is_file()]
            check(not left, f"files left over: {left}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="build directory, or the directory of the programs")
    arguments = parser.parse_args()
    harness.need_root("hiding files from a worker in a mount namespace")

    def test():
        programs = harness.Programs(arguments.bin)
        with harness.Sandbox(programs) as sandbox:
            DataPlaneTest(programs, sandbox).run()
        print("data_plane_test: ok")

    return harness.main(test)


if __name__ == "__main__":
    sys.exit(main())
