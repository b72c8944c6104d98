"""The faults. Each is drawn whole before the run, so that the same seed draws the same ones; it is applied once and undone after `lasts`.

    failures      how many failures of one task, as the queue counts them, it may cause
    may_fail      reasons for which it may end the job at once; `retry` goes on then
    grants        how many attempts it may cost
"""

import os
import signal
import subprocess
import sys

from farm import EIO, ESTALE, LEASE, MAX_FAILURES

# Takes memory of its cgroup until somebody has been killed for it. That is not itself: the memory belongs to a file.
HOG = """
import os, sys
counter, before = sys.argv[1], int(sys.argv[2])
def kills(): return next((int(line.split()[1]) for line in open(counter) if line.split()[0] == "oom_kill"), 0)
file, block = os.memfd_create("hog"), bytes(1 << 20)
while kills() <= before: os.write(file, block)
"""


class Fault:
    failures = 0
    may_fail = ()
    grants = 0
    lasts = 0.0

    def __init__(self, at):
        self.at = at

    def apply(self, farm):
        raise NotImplementedError

    def undo(self, farm):
        pass

    def __str__(self):
        return f"{self.at:.3f} s: {self.words()}" + (f" for {self.lasts:.3f} s" if self.lasts else "")


def _a_unit(random, setup, with_coordinator=True):
    """Its index among the farm's units; 0 is the coordinator."""
    return random.randrange(0 if with_coordinator else 1, len(setup.workers) + 1)


def _name(unit):
    return "coordinator" if unit == 0 else f"worker{unit}"


class Kill(Fault):
    """SIGKILL."""

    def __init__(self, at, random, setup):
        super().__init__(at)
        self.unit = _a_unit(random, setup)
        self.role = "coordinator" if self.unit == 0 else random.choice(["supervisor", "executor"])
        self.failures = self.grants = int(self.unit != 0)

    def apply(self, farm):
        for process in farm.units[self.unit].processes(self.role):
            process.kill()

    def words(self):
        return f"SIGKILL for the {self.role} of {_name(self.unit)}" if self.unit else "SIGKILL for the coordinator"


class Freeze(Fault):
    """SIGSTOP for all of a unit, for less or more than a lease, then SIGCONT."""

    def __init__(self, at, random, setup):
        super().__init__(at)
        self.unit = _a_unit(random, setup)
        self.lasts = random.choice([random.uniform(0.2, 0.8 * LEASE), random.uniform(LEASE + 0.3, LEASE + 1.5)])
        # A coordinator that wakes up may find that leases are over.
        self.failures = 1
        self.grants = 1 if self.unit else len(setup.workers)

    def apply(self, farm):
        self.stopped = farm.units[self.unit].processes("coordinator", "supervisor", "executor")
        for process in self.stopped:
            process.send(signal.SIGSTOP)

    def undo(self, farm):
        # nsenter stops with its child.
        for process in farm.units[self.unit].processes():
            process.send(signal.SIGCONT)

    def words(self):
        return f"SIGSTOP for {_name(self.unit)}"


class OutOfMemory(Fault):
    """The OOM killer in the cgroup of a worker."""

    may_fail = ("OUT_OF_MEMORY",)
    failures = 1
    # A task that fails for good, and the other worker's attempt, which is stopped with the job.
    grants = MAX_FAILURES + 1
    lasts = 1.0

    def __init__(self, at, random, setup):
        super().__init__(at)
        self.unit = _a_unit(random, setup, with_coordinator=False)

    def apply(self, farm):
        cgroup = farm.units[self.unit].cgroup
        counter = "memory.oom_control" if cgroup.version == 1 else "memory.events"
        self.hog = subprocess.Popen([sys.executable, "-S", "-c", HOG, cgroup.path / counter, str(cgroup.oom_kills())],
                                    preexec_fn=cgroup.enter, stdin=subprocess.DEVNULL)

    def undo(self, farm):
        self.hog.kill()
        self.hog.wait()

    def words(self):
        return f"no memory on {_name(self.unit)}"


class Reboot(Fault):
    """A host loses its power."""

    failures = 1

    def __init__(self, at, random, setup):
        super().__init__(at)
        self.unit = _a_unit(random, setup)
        self.lasts = random.uniform(0.1, LEASE + 0.5)
        self.grants = int(self.unit != 0)

    def apply(self, farm):
        unit = farm.units[self.unit]
        if unit.host.is_up():
            unit.host.crash()

    def undo(self, farm):
        unit = farm.units[self.unit]
        if not unit.host.is_up():
            unit.host.boot()
            if self.unit:
                unit.host.shape(unit.calm_rate)

    def words(self):
        return f"{_name(self.unit)} reboots"


class LinkFault(Fault):
    failures = 1

    def __init__(self, at, random, setup):
        super().__init__(at)
        self.unit = _a_unit(random, setup)
        self.lasts = random.uniform(0.1, LEASE + 1.0)
        self.grants = 2 if self.unit else 2 * len(setup.workers)


class CutLink(LinkFault):
    def apply(self, farm):
        farm.units[self.unit].host.cut()

    def undo(self, farm):
        farm.units[self.unit].host.mend()

    def words(self):
        return f"the cable of {_name(self.unit)} is out"


class SlowLink(LinkFault):
    def __init__(self, at, random, setup):
        super().__init__(at, random, setup)
        self.rate = random.choice([128, 512, 2000])

    def apply(self, farm):
        farm.units[self.unit].host.shape(f"{self.rate}kbit")

    def undo(self, farm):
        farm.units[self.unit].host.shape(farm.units[self.unit].calm_rate if self.unit else None)

    def words(self):
        return f"the cable of {_name(self.unit)} carries {self.rate} kbit/s"


class ProxyFault(Fault):
    """Between a worker and the coordinator; nothing where the worker has no proxy."""

    failures = 1
    grants = 2

    def __init__(self, at, random, setup):
        super().__init__(at)
        self.unit = _a_unit(random, setup, with_coordinator=False)
        self.how = random.choice(["delays", "stalls", "resets"])
        self.delay = random.uniform(0.02, 0.4)
        self.lasts = 0.0 if self.how == "resets" else random.uniform(0.2, LEASE + 0.5)

    def apply(self, farm):
        proxy = farm.units[self.unit].proxy
        if proxy is None:
            return
        if self.how == "delays":
            proxy.delay = self.delay
        elif self.how == "stalls":
            proxy.stall(True)
        else:
            proxy.reset()

    def undo(self, farm):
        proxy = farm.units[self.unit].proxy
        if proxy is not None:
            proxy.delay = 0.0
            proxy.stall(False)

    def words(self):
        return f"the proxy of {_name(self.unit)} {self.how}" + (f" by {1000 * self.delay:.0f} ms" if self.how == "delays" else "")


class DiskFull(Fault):
    def __init__(self, at, random, setup):
        super().__init__(at)
        self.disk = random.choice(["output", "state"])
        self.lasts = random.uniform(0.2, 1.5)
        # When the coordinator looks there may be room again: then it is a failure of the task.
        self.failures = 1
        self.grants = 2 * len(setup.workers)
        self.may_fail = ("DISK_FULL",) if self.disk == "output" else ()

    def ballast(self, farm):
        return (farm.output_disk if self.disk == "output" else farm.state_disk) / "ballast"

    def apply(self, farm):
        if self.disk == "state":
            farm.coordinator.excused = True
        with open(self.ballast(farm), "ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12):
                try:
                    while True:
                        file.write(b"\0" * size)
                except OSError:
                    pass

    def undo(self, farm):
        self.ballast(farm).unlink(missing_ok=True)

    def words(self):
        return f"the disk of the {self.disk} is full"


class BadDisk(Fault):
    """Reads of the source or writes of the output fail on one host."""

    def __init__(self, at, random, setup):
        super().__init__(at)
        self.unit = _a_unit(random, setup)
        self.what = random.choice(["read", "write"])
        self.error = random.choice([EIO, ESTALE])
        self.count = random.choice([1, 1, 2])
        self.failures = self.count
        self.grants = self.count
        self.lasts = 1.0

    def apply(self, farm):
        farm.units[self.unit].control.set(**{f"{self.what}_error": self.error, f"{self.what}_errors_left": self.count})

    def undo(self, farm):
        farm.units[self.unit].control.set(**{f"{self.what}_errors_left": 0})

    def words(self):
        return f"{self.count} {self.what}s of {_name(self.unit)} fail with {os.strerror(self.error)}"


class Shrink(Fault):
    """A file of the source is cut short, and later has its bytes again. With its old time it is the source that the job began with; with a
    new one the job must say that the source changed, until the time is put back."""

    # The latter when it is about to be published.
    may_fail = ("SOURCE_CHANGED", "IO_ERROR")
    failures = 1
    lasts = 0.5

    def __init__(self, at, random, setup):
        super().__init__(at)
        self.file = random.random()
        self.cut = random.uniform(0.05, 0.95)
        self.is_touched = random.random() < 0.3
        self.grants = 2 * len(setup.workers)

    def apply(self, farm):
        files = sorted(farm.source.glob("*.safetensors"))
        self.path = files[int(self.file * len(files))]
        self.time = self.path.stat().st_mtime_ns
        self.content = self.path.read_bytes()
        self.keep = int(self.cut * len(self.content)) & ~511
        os.truncate(self.path, self.keep)

    def undo(self, farm):
        # Appended in order: who reads meanwhile sees an end, never other bytes.
        with open(self.path, "ab", buffering=0) as file:
            for begin in range(self.keep, len(self.content), 1 << 16):
                file.write(self.content[begin:begin + (1 << 16)])
        if not self.is_touched:
            self.put_time_back()

    def put_time_back(self):
        os.utime(self.path, ns=(self.time, self.time))

    def words(self):
        return f"a source file shrinks to {100 * self.cut:.0f} %" + (" and has another time then" if self.is_touched else "")


class ClockJump(Fault):
    """The wall clock of a host is another one from now on."""

    def __init__(self, at, random, setup):
        super().__init__(at)
        self.unit = _a_unit(random, setup)
        self.seconds = random.choice([-1, 1]) * random.choice([3, 600, 3600, 40 * 86400])

    def apply(self, farm):
        farm.units[self.unit].control.set(clock_offset_ns=self.seconds * 1_000_000_000)

    def words(self):
        return f"the clock of {_name(self.unit)} is {self.seconds} s off"


ALL = [Kill, Freeze, OutOfMemory, Reboot, CutLink, SlowLink, ProxyFault, DiskFull, BadDisk, Shrink, ClockJump]
