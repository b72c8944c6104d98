"""What the crash tests share: programs, sandboxes, finding and killing processes, digests of trees, memory cgroups."""

import ctypes
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

SKIPPED = 77
JOB = ["--scheme", "W4A16_ASYM", "--group-size", "32", "--targets", "routed_experts"]
MIB = 1 << 20


class Failure(Exception):
    """A check that did not hold."""


def check(condition, message):
    if not condition:
        raise Failure(message)


def skip(reason):
    """Ends the program: as skipped, or in CI, where nothing is skipped, as failed."""
    if os.environ.get("CI") == "true":
        print(f"FAILED: {reason}; this must not be skipped in CI")
        sys.exit(1)
    print(f"skipped: {reason}")
    sys.exit(SKIPPED)


class Programs:
    """quern, quernd and quern-worker: beside each other in one directory, or where a build directory has them."""

    def __init__(self, directory):
        directory = Path(directory).resolve()
        self.quern = self._find(directory, "quern", ["client"])
        self.quernd = self._find(directory, "quernd", ["daemon", "daemon/rpc"])
        self.worker = self._find(directory, "quern-worker", ["worker", "worker/supervisor"])

    @staticmethod
    def _find(directory, name, places):
        for place in ["", "bin", *places]:
            path = directory / place / name
            if path.is_file() and os.access(path, os.X_OK):
                return path
        sys.exit(f"no program {name} in {directory} or its {', '.join(places)}")


class Process:
    """A process of the sandbox, as /proc shows it."""

    def __init__(self, pid, role, environment=()):
        self.pid = pid
        self.role = role  # "command", "coordinator", "supervisor", "executor"
        self.environment = environment  # b"NAME=value"

    def send(self, number):
        try:
            os.kill(self.pid, number)
            return True
        except ProcessLookupError:
            return False

    def kill(self):
        return self.send(signal.SIGKILL)


def _read(path):
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _role(argv):
    name = os.path.basename(argv[0])
    if name == "quern":
        return "command"
    if name == "quernd":
        return "coordinator"
    if name == "quern-worker":
        return "executor" if any(word.startswith("--executor") for word in argv) else "supervisor"
    return "other"


class Sandbox:
    """A directory with everything that a run may leave anything in, and a mark in the environment that finds its processes."""

    def __init__(self, programs, parent=None, inside=None):
        """`inside`: a directory with a short path that holds all of it and that the caller removes; nothing is kept for inspection then."""
        self.programs = programs
        self.keep = inside is None
        self.directory = Path(tempfile.mkdtemp(prefix="quern-crash.", dir=inside or parent))
        # Paths of sockets are short.
        self.runtime = Path(tempfile.mkdtemp(prefix="qr.", dir=inside or "/tmp"))
        self.mark = f"QUERN_CRASH_TEST={uuid.uuid4()}"
        for name in ["tmp", "home", "state"]:
            (self.directory / name).mkdir()
        key, value = self.mark.split("=")
        self.environment = {
            **os.environ, key: value, "TMPDIR": str(self.directory / "tmp"), "HOME": str(self.directory / "home"),
            "XDG_RUNTIME_DIR": str(self.runtime), "XDG_STATE_HOME": str(self.directory / "state")}
        self.log = self.directory / "log"

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        kill_all(self)
        shutil.rmtree(self.runtime, ignore_errors=True)
        if kind in (None, SystemExit) or not self.keep:  # the former: done or skipped
            shutil.rmtree(self.directory)
        else:
            print(f"kept for inspection: {self.directory}")

    def start(self, arguments, log=None, environment=None, **options):
        """A program in the background; what it says goes to the log."""
        with open(log or self.log, "ab") as said:
            said.write(f"$ {' '.join(map(str, arguments))}\n".encode())
            said.flush()
            return subprocess.Popen([str(a) for a in arguments], stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                                    env={**self.environment, **(environment or {})}, start_new_session=True, **options)

    def run(self, arguments, timeout=300, **options):
        """A program to its end: (exit status, stdout, stderr)."""
        process = subprocess.Popen([str(a) for a in arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True, env=self.environment, start_new_session=True, **options)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise Failure(f"{' '.join(map(str, arguments))} did not end within {timeout} s; processes: {describe(self)}") from None
        with open(self.log, "a") as log:
            log.write(f"$ {' '.join(map(str, arguments))}\n{err}{out}exit status {process.returncode}\n")
        return process.returncode, out, err

    def processes(self):
        """All that live and carry the mark, or speak of the sandbox in their command line; zombies are dead."""
        found = []
        place = str(self.directory).encode()
        for entry in os.listdir("/proc"):
            if not entry.isdigit() or int(entry) == os.getpid():
                continue
            command_line = _read(f"/proc/{entry}/cmdline")
            if not command_line:
                continue
            environment = _read(f"/proc/{entry}/environ").split(b"\0")
            if self.mark.encode() in environment or place in command_line:
                found.append(Process(int(entry), _role([w.decode(errors="replace") for w in command_line.split(b"\0")]), environment))
        return found

    def wait_until_empty(self, seconds=30):
        """Children follow their parent's end on their own; those that do not are a failure."""
        end = time.monotonic() + seconds
        while left := self.processes():
            check(time.monotonic() < end, f"processes left over after {seconds} s: {describe(self)}")
            time.sleep(0.01 if len(left) < 10 else 0.05)

    def check_nothing_left(self, out, allowed=("run.json",)):
        """After a finished run: no file beside the result, no socket directory, no state elsewhere."""
        left = sorted(str(p.relative_to(out / ".quern")) for p in (out / ".quern").rglob("*")) if (out / ".quern").exists() else []
        check(left == sorted(allowed), f"{out}/.quern holds {left}, wanted {sorted(allowed)}")
        for directory in [self.runtime, *(self.directory / name for name in ["tmp", "home", "state"])]:
            left = [str(p) for p in directory.rglob("*") if not p.is_dir() or p.name.startswith("quern-run-")]
            check(not left, f"files left over: {left}")
        stray = [str(p) for p in out.rglob("*") if p.name.endswith(".tmp")]
        check(not stray, f"temporary files left over: {stray}")


def describe(sandbox):
    lines = []
    for process in sandbox.processes():
        words = _read(f"/proc/{process.pid}/cmdline").replace(b"\0", b" ").decode(errors="replace")
        status = _read(f"/proc/{process.pid}/wchan").decode(errors="replace")
        lines.append(f"{process.pid} {process.role} [{status}] {words}")
    return "; ".join(lines) or "none"


def kill_all(sandbox):
    """Kills every process of the sandbox, parents first, again until none is left (one may just have been starting another)."""
    killed = 0
    for _ in range(200):
        processes = sandbox.processes()
        if not processes:
            return killed
        order = ["command", "coordinator", "supervisor", "executor", "other"]
        for process in sorted(processes, key=lambda p: order.index(p.role)):
            killed += process.kill()
        time.sleep(0.005)
    raise Failure(f"processes that SIGKILL does not end: {describe(sandbox)}")


def tree(directory, skip_names=(".quern",)):
    """Relative path -> SHA-256 of every file below `directory`."""
    digests = {}
    for path in sorted(Path(directory).rglob("*")):
        relative = path.relative_to(directory)
        if relative.parts[0] in skip_names or not path.is_file():
            continue
        with open(path, "rb") as file:
            digests[str(relative)] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def tree_difference(left, right):
    names = sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))
    return ", ".join(f"{n} ({'missing' if n not in left else 'extra' if n not in right else 'differs'})" for n in names)


def shards_size(directory):
    return sum(p.stat().st_size for p in Path(directory).glob("*.safetensors"))


def check_history(out):
    """run.json: each task has one commit and no grant after it. Returns (tasks, grants)."""
    run = json.loads((out / ".quern" / "run.json").read_text())
    events = sorted([{"event": "grant", **grant} for grant in run["grants"]] + [{"event": "commit", **commit} for commit in run["commits"]],
                    key=lambda event: event["seq"])
    committed, grants = set(), 0
    for event in events:
        task = event["task"]
        if event["event"] == "grant":
            grants += 1
            check(task not in committed, f"task {task} was granted (attempt {event['attempt']}) after it was finished")
        elif event["event"] == "commit":
            check(task not in committed, f"task {task} was committed twice")
            committed.add(task)
    shards = len(list(out.glob("*.safetensors")))
    check(committed == set(range(shards)), f"run.json has commits of {sorted(committed)}, but there are {shards} shards")
    return shards, grants


class MemoryCgroup:
    """A memory cgroup of our own, version 1 or 2. Skips the test where none can be made."""

    def __init__(self, limit, name=None):
        self.limit = limit
        name = name or f"quern-test-{os.getpid()}"
        v1 = Path("/sys/fs/cgroup/memory")
        self.version = 1 if (v1 / "memory.limit_in_bytes").exists() else 2
        root = v1 if self.version == 1 else Path("/sys/fs/cgroup")
        self.path = root / name
        try:
            if self.version == 2:
                control = root / "cgroup.subtree_control"
                if "memory" not in control.read_text().split():
                    control.write_text("+memory")
            self.path.mkdir()
        except OSError as error:
            skip(f"no memory cgroup can be made here: {error}")
        if self.version == 1:
            self._write("memory.limit_in_bytes", limit)
            # Swap would hide what is tested; not every kernel counts it.
            if (self.path / "memory.memsw.limit_in_bytes").exists():
                self._write("memory.memsw.limit_in_bytes", limit)
        else:
            self._write("memory.max", limit)
            if (self.path / "memory.swap.max").exists():
                self._write("memory.swap.max", 0)

    def _write(self, name, value):
        (self.path / name).write_text(str(value))

    def enter(self):
        """For preexec_fn: the child and all that it starts live in the cgroup."""
        self._write("cgroup.procs", os.getpid())

    def oom_kills(self):
        text = (self.path / ("memory.oom_control" if self.version == 1 else "memory.events")).read_text()
        return next((int(line.split()[1]) for line in text.splitlines() if line.split()[0] == "oom_kill"), 0)

    def peak(self):
        path = self.path / ("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak")
        return int(path.read_text()) if path.exists() else 0

    def remove(self):
        for _ in range(100):
            try:
                self.path.rmdir()
                return
            except OSError:
                time.sleep(0.05)
        print(f"warning: cgroup {self.path} cannot be removed")


def need_root(what):
    if os.geteuid() != 0:
        skip(f"{what} needs root")


def mount_tmpfs(directory, size):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(directory), b"tmpfs", 0, f"size={size}".encode()) != 0:
        skip(f"no tmpfs can be mounted: {os.strerror(ctypes.get_errno())}")


def unmount(directory):
    libc = ctypes.CDLL(None, use_errno=True)
    detach = 2
    libc.umount2(os.fsencode(directory), detach)


def main(test):
    """Runs test() and turns what it raises into an exit status."""
    try:
        test()
    except Failure as failure:
        print(f"FAILED: {failure}")
        return 1
    return 0
