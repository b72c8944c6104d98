"""A coordinator and workers on hosts of their own, each looked after as a service manager would, and what the faults need to get at them."""

import json
import mmap
import os
import shutil
import signal
import socket
import struct
import subprocess
import time

import harness
from harness import MIB, check
from proxy import Proxy
import hosts

LEASE = 2.0
PORT = 7450
RESTART_AFTER = 0.15
# Of a worker's cgroup: enough for it, and soon used up by somebody else.
CGROUP = 112 * MIB
EIO, ESTALE = 5, 116
MAX_FAILURES = 3  # of a task, then its job fails


class Control:
    """The page that faulty_host.c reads, of one unit."""

    FIELDS = ["clock_offset_ns", "read_delay_us", "read_error", "read_errors_left", "write_error", "write_errors_left"]

    def __init__(self, path):
        self.path = path
        path.write_bytes(bytes(8 * len(self.FIELDS)))
        with open(path, "r+b") as file:
            self.page = mmap.mmap(file.fileno(), 0)

    def set(self, **values):
        for name, value in values.items():
            struct.pack_into("<q", self.page, 8 * self.FIELDS.index(name), value)


class Unit:
    """A program on a host. It is started again when it dies of a fault; that it ends of itself is a failure unless `excused`."""

    def __init__(self, farm, name, host, command):
        self.farm = farm
        self.name = name
        self.host = host
        self.command = command
        self.control = Control(farm.directory / f"control.{name}")
        self.log = farm.directory / f"log.{name}"
        self.environment = {
            "QUERN_CHAOS_UNIT": name, "QUERN_CHAOS_CONTROL": str(self.control.path), "QUERN_CHAOS_SOURCE": str(farm.source),
            "QUERN_CHAOS_OUTPUT": str(farm.output_disk), "LD_PRELOAD": str(farm.preload), "TMPDIR": str(farm.directory / f"tmp.{name}")}
        (farm.directory / f"tmp.{name}").mkdir()
        self.cgroup = None
        self.process = None
        self.ended_at = None
        self.excused = False
        self.leaving = False

    def start(self):
        options = {"preexec_fn": self.cgroup.enter} if self.cgroup else {}
        # Preloaded on the host only: nsenter is not to be a faulty one.
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        self.process = self.farm.sandbox.start(self.host.inside(["env", *settings, *self.command()]), log=self.log,
                                               environment={"QUERN_CHAOS_UNIT": self.name}, **options)
        self.host.doors.append(self.process)
        self.ended_at = None

    def step(self, now):
        if self.process is None or self.leaving:
            return
        if self.ended_at is None:
            status = self.process.poll()
            if status is None:
                return
            check(status == -signal.SIGKILL or self.excused, f"{self.name} ended with {status}:\n{self.last_words()}")
            self.ended_at = now
        if self.host.is_up() and now - self.ended_at >= RESTART_AFTER:
            self.start()

    def processes(self, *roles):
        mark = f"QUERN_CHAOS_UNIT={self.name}".encode()
        return [p for p in self.farm.sandbox.processes() if mark in p.environment and (not roles or p.role in roles)]

    def last_words(self, lines=15):
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def leave(self):
        self.leaving = True
        for process in self.processes("coordinator", "supervisor"):
            process.send(signal.SIGTERM)

    def check_left(self, seconds=20):
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise harness.Failure(f"{self.name} does not leave within {seconds} s: {harness.describe(self.farm.sandbox)}\n{self.last_words()}") from None
        check(status == 0, f"{self.name} ended with {status} when it was asked to leave:\n{self.last_words()}")


class Farm:
    """Of one run. `setup`: what was drawn for it (see Setup in chaos_test.py)."""

    def __init__(self, test, setup, directory):
        self.test = test
        self.setup = setup
        self.sandbox = test.sandbox
        self.programs = test.sandbox.programs
        self.preload = test.preload
        self.directory = directory
        self.source = directory / "source"
        self.output_disk = directory / "output"
        self.state_disk = directory / "state"
        self.out = self.output_disk / "out"
        self.socket = self.sandbox.runtime / "q.sock"
        for path in [directory, self.output_disk, self.state_disk]:
            path.mkdir()
        harness.mount_tmpfs(self.output_disk, 32 * MIB)
        harness.mount_tmpfs(self.state_disk, 24 * MIB)
        shutil.copytree(test.source, self.source)
        self.proxies = []
        self.coordinator = Unit(self, "coordinator", self.make_host("coordinator", 2), self.coordinator_command)
        self.workers = [self.make_worker(number, plan) for number, plan in enumerate(setup.workers)]
        self.units = [self.coordinator, *self.workers]

    def make_host(self, name, number, hidden=()):
        host = hosts.Host(name, number, hidden)
        host.boot()
        return host

    def make_worker(self, number, plan):
        name = f"worker{number + 1}"
        hidden = [self.source, self.output_disk, self.state_disk] if plan.hidden else []
        unit = Unit(self, name, self.make_host(name, 10 + number, hidden), lambda: self.worker_command(unit))
        unit.plan = plan
        unit.cgroup = harness.MemoryCgroup(CGROUP, f"{self.test.base.name}.{self.directory.name}.{name}")
        unit.control.set(read_delay_us=plan.read_delay_us)
        unit.proxy = None
        if plan.proxied:
            unit.proxy = Proxy(hosts.SWITCH, self.connect)
            self.proxies.append(unit.proxy)
        unit.calm_rate = "24mbit" if plan.hidden else None
        unit.host.shape(unit.calm_rate)
        return unit

    def connect(self):
        connection = socket.create_connection((self.coordinator.host.address, PORT), timeout=3)
        connection.setblocking(False)
        return connection

    def coordinator_command(self):
        return [self.programs.quernd, "--state-dir", self.state_disk / "store", "--listen", f"unix:{self.socket}", "--listen",
                f"{self.coordinator.host.address}:{PORT}", "--allow-root", self.directory, "--lease", f"{LEASE}s", *self.test.certificates.of_coordinator()]

    def worker_command(self, unit):
        server = f"{hosts.SWITCH}:{unit.proxy.port}" if unit.proxy else f"{self.coordinator.host.address}:{PORT}"
        return [self.programs.worker, "--server", server, "--memory", "64MiB", "--threads", "1", "--name", unit.name, "--reader", unit.plan.reader,
                *self.test.certificates.of_worker()]

    def start(self):
        for unit in self.units:
            unit.start()

    def step(self):
        now = time.monotonic()
        for unit in self.units:
            unit.step(now)

    def client(self, *arguments):
        return [self.programs.quern, *arguments, "--server", f"unix:{self.socket}", *self.test.certificates.of_client(), "--json"]

    def submit(self):
        """The job's name."""
        command = self.client("submit", self.source, "-o", self.out, *harness.JOB, "--max-shard-size", self.test.shard_size, "--detach")
        status, out, err = self.sandbox.run(command, timeout=30)
        check(status == 0, f"no job could be submitted: {err}{out}\n{self.coordinator.last_words()}")
        return json.loads(out)["name"]

    def check_ready(self):
        """Every worker is there, or there again."""
        end = time.monotonic() + 20
        while True:
            self.step()
            status, out, err = self.sandbox.run(self.client("workers"), timeout=30)
            states = {worker["name"]: worker["state"] for worker in json.loads(out)["workers"]} if status == 0 else {}
            if all(states.get(f"workers/{unit.name}") == "ready" for unit in self.workers):
                return
            said = "\n".join(unit.last_words(5) for unit in self.units)
            check(time.monotonic() < end, f"the workers are {states} {err}\n{said}")
            time.sleep(0.1)

    def check_processes(self):
        """Nobody is left that does not belong to a unit as it should be."""
        for _ in range(200):
            self.step()  # one that has just died is started again
            counts = {(unit.name, role): len(unit.processes(role)) for unit in self.units for role in ("coordinator", "supervisor", "executor")}
            wanted = all(counts[unit.name, "coordinator"] == (unit is self.coordinator) and
                         counts[unit.name, "supervisor"] == (unit is not self.coordinator) and
                         counts[unit.name, "executor"] <= (unit is not self.coordinator) for unit in self.units)
            if wanted:
                return
            time.sleep(0.05)
        raise harness.Failure(f"processes left over: {harness.describe(self.sandbox)}")

    def check_left_cleanly(self):
        for unit in self.workers:
            unit.leave()
        for unit in self.workers:
            unit.check_left()
        self.coordinator.leave()
        self.coordinator.check_left()
        self.sandbox.wait_until_empty()

    def close(self):
        for unit in self.units:
            if unit.host.is_up():
                unit.host.crash()
            if unit.process is not None:
                unit.process.wait()
        for proxy in self.proxies:
            proxy.close()
        for unit in self.workers:
            unit.cgroup.remove()
        harness.unmount(self.output_disk)
        harness.unmount(self.state_disk)
