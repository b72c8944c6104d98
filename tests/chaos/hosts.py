"""Hosts made of namespaces: each has a network, mounts, process numbers and a name of its own, and a cable to one switch.

All of it lives in namespaces of the test's own process (enter), so that it is gone when that process is, however it ends.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness

NETWORK = "10.88.0"
SWITCH = f"{NETWORK}.1"  # where the test itself can be reached
PREFIX = "quern-chaos."


def enter(argv):
    """Runs the calling program again, with --base DIRECTORY, inside fresh namespaces; returns its exit status.

    The directory is removed afterwards. What a killed test left behind is removed by the next one."""
    _sweep()
    base = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))
    with open(base / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return subprocess.run(["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private",
                                   sys.executable, *argv, "--base", base], preexec_fn=_die_with_parent).returncode
        finally:
            _remove(base)


def _die_with_parent():
    import ctypes
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _sweep():
    for base in Path("/tmp").glob(PREFIX + "*"):
        try:
            with open(base / "lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(base)
        except OSError:  # in use, or just being made
            pass


def _remove(base):
    for root in ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"]:
        for cgroup in Path(root).glob(base.name + ".*"):
            try:
                cgroup.rmdir()
            except OSError as error:
                print(f"warning: cgroup {cgroup} cannot be removed: {error}")
    shutil.rmtree(base, ignore_errors=True)


def be_init(test):
    """For the first process of the namespaces: runs test() in a child, reaps what others leave, and returns the child's exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = test()
        except SystemExit as end:
            status = end.code
        except BaseException:  # the traceback would be that of the fork
            import traceback
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status or 0)
    while True:
        try:
            pid, status = os.wait()
        except InterruptedError:
            continue
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def ip(*words):
    subprocess.run(["ip", *words], check=True, stdin=subprocess.DEVNULL)


def make_switch():
    ip("link", "set", "lo", "up")
    # With an address of its own: else it is that of some host, and another one when that host is gone.
    ip("link", "add", "name", "switch", "address", "02:00:00:00:00:01", "type", "bridge")
    ip("addr", "add", f"{SWITCH}/24", "dev", "switch")
    ip("link", "set", "switch", "up")


class Host:
    """A machine at the switch. `hidden` directories are empty there, on a filesystem of its own."""

    def __init__(self, name, number, hidden=()):
        self.name = name
        self.address = f"{NETWORK}.{number}"
        self.cable = f"cable{number}"
        self.mac = f"02:00:00:00:00:{number:02x}"  # kept when it boots again, as a network card does
        self.hidden = list(hidden)
        self.init = None
        self.doors = []  # the nsenter processes, which are not on the host

    def boot(self):
        script = "set -e; hostname \"$1\"; ip link set lo up; "
        # Hosts are told apart by it. Where there is none, by their names.
        script += "if [ -e /etc/machine-id ]; then mount -t tmpfs -o size=64k tmpfs /mnt; echo \"$2\" > /mnt/id; mount --bind /mnt/id /etc/machine-id; umount -l /mnt; fi; "
        script += "shift 2; "
        script += "for directory; do mount -t tmpfs -o size=64m tmpfs \"$directory\"; done; "
        # Orphans of the host are reaped by the kernel.
        script += "trap '' CHLD; echo up; exec sleep infinity >/dev/null"
        self.process = subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script, "sh", self.name,
             self.mac.replace(":", "").zfill(32), *map(str, self.hidden)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_die_with_parent)
        if self.process.stdout.readline() != "up\n":
            raise harness.Failure(f"host {self.name} does not boot: {self.process.communicate()[1]}")
        self.init = int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0])
        ip("link", "add", self.cable, "type", "veth", "peer", "name", "eth0", "address", self.mac, "netns", str(self.init))
        ip("link", "set", self.cable, "master", "switch", "up")
        subprocess.run(["nsenter", "-t", str(self.init), "-n", "sh", "-c", f"ip addr add {self.address}/24 dev eth0 && ip link set eth0 up"], check=True,
                       stdin=subprocess.DEVNULL)

    def crash(self):
        """As when its power is cut: nobody at the other end of a connection hears of it."""
        self.cut()  # with its address still there: a program that is just starting must not find it gone
        os.kill(self.init, signal.SIGKILL)
        # A door that is stopped would keep its dead from being buried, and the host from ending.
        for door in self.doors:
            door.kill()
        self.doors.clear()
        # unshare complains when its child is killed.
        self.process.communicate()
        # The kernel takes it away with the host, but in its own time.
        subprocess.run(["ip", "link", "del", self.cable], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.init = None

    def is_up(self):
        return self.init is not None

    def inside(self, arguments):
        """The command that runs another one on this host."""
        return ["nsenter", "-t", str(self.init), "-n", "-m", "-u", "-p", "--", *map(str, arguments)]

    def cut(self):
        if self.is_up():
            ip("link", "set", self.cable, "down")

    def mend(self):
        if self.is_up():
            ip("link", "set", self.cable, "up")

    def shape(self, rate, burst="32kb"):
        """Limits what the host sends and receives; "20mbit", None: no limit. `burst` goes out at once."""
        if not self.is_up():
            return
        for command in (["tc"], ["nsenter", "-t", str(self.init), "-n", "tc"]):
            device = self.cable if command == ["tc"] else "eth0"
            subprocess.run([*command, "qdisc", "del", "dev", device, "root"], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if rate is not None:
                subprocess.run([*command, "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", burst, "latency", "200ms"],
                               check=True, stdin=subprocess.DEVNULL)
