#!/usr/bin/env python3
"""The systemd units: systemd-analyze accepts them, their sandbox is as tight as it says, and it allows what the programs call."""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "crash"))
import harness  # noqa: E402
from harness import check  # noqa: E402

UNITS = Path(__file__).resolve().parent.parent.parent / "deploy" / "systemd"
# On systemd's scale from 0, locked up, to 100. Both units use the network and files of others; the rest is closed.
MOST_EXPOSED = 20
# What strace counts in a job, less what every program calls.
NEEDED_CALLS = {"accept4", "chmod", "clone3", "epoll_ctl", "epoll_wait", "eventfd2", "fadvise64", "fallocate", "fdatasync", "flock", "fstatfs", "fsync",
                "ftruncate", "getrandom", "io_uring_enter", "io_uring_register", "io_uring_setup", "kill", "madvise", "memfd_create", "openat2", "pipe2",
                "prctl", "pread64", "pwrite64", "rename", "renameat2", "rt_sigtimedwait", "setpgid", "socketpair", "sync_file_range", "unlinkat", "wait4"}


def analyze(arguments, directory):
    return subprocess.run(["systemd-analyze", "--man=no", *arguments], cwd=directory, capture_output=True, text=True,
                          env=os.environ | {"SYSTEMD_UNIT_PATH": f"{directory}:", "SYSTEMD_LOG_LEVEL": "warning"})


def syscalls(name, seen=()):
    """The calls of a set such as @system-service, and of the sets inside it."""
    lines = subprocess.run(["systemd-analyze", "--no-pager", "syscall-filter", name], capture_output=True, text=True, check=True).stdout.splitlines()
    found = set()
    for line in lines[1:]:
        word = line.strip()
        if word.startswith("@"):
            found |= syscalls(word) if word not in seen else set()
        elif word and not word.startswith("#"):
            found.add(word)
    return found


def test(arguments):
    if shutil.which("systemd-analyze") is None:
        harness.skip("systemd-analyze is missing (Debian: systemd)")
    programs = harness.Programs(arguments.bin)
    with harness.Sandbox(programs) as sandbox:
        units = sandbox.directory / "units"
        units.mkdir()
        for name in ["quernd.service", "quern-worker@.service"]:
            text = (UNITS / name).read_text()
            # The programs need not be installed.
            for path in [programs.quernd, programs.worker]:
                text = re.sub(rf"^ExecStart=/usr/bin/{path.name} ", f"ExecStart={path} ", text, flags=re.M)
            check(f"ExecStart={arguments.bin.resolve()}" in text, f"{name} starts none of the programs from /usr/bin")
            (units / name).write_text(text)
        (units / "quern-worker@1.service").symlink_to("quern-worker@.service")

        for name in ["quernd.service", "quern-worker@1.service"]:
            verified = analyze(["verify", f"{units}/{name}"], units)
            said = [line for line in verified.stderr.splitlines() if "quern" in line]
            check(verified.returncode == 0 and not said, f"systemd-analyze verify {name}: {verified.stderr}")
            exposed = analyze(["security", "--offline=true", f"--threshold={MOST_EXPOSED}", f"{units}/{name}"], units)
            check(exposed.returncode == 0, f"{name} is more exposed than {MOST_EXPOSED}: {exposed.stdout}{exposed.stderr}")
            print(f"{name}: {exposed.stdout.strip().splitlines()[-1].strip(' →')}")

        # The check sees what is wrong.
        broken = units / "broken.service"
        broken.write_text((units / "quernd.service").read_text().replace("KillMode=mixed", "KillMod=mixed"))
        verified = analyze(["verify", str(broken)], units)
        check("KillMod" in verified.stderr, f"systemd-analyze did not notice a misspelt setting: {verified.stderr}")

        worker = (UNITS / "quern-worker@.service").read_text()
        filters = re.findall(r"^SystemCallFilter=(.*)$", worker, flags=re.M)
        check(filters == ["@system-service", "~@privileged"], f"SystemCallFilter is {filters}; say here what that allows")
        refused = NEEDED_CALLS - (syscalls("@system-service") - syscalls("@privileged"))
        check(not refused, f"the unit's filter refuses {sorted(refused)}")

        for kind, tool in [("sysusers", "systemd-sysusers"), ("tmpfiles", "systemd-tmpfiles")]:
            if os.geteuid() != 0 and kind == "tmpfiles":
                continue
            root = sandbox.directory / "root"
            for directory in ["etc", "run", "var/lib"]:
                (root / directory).mkdir(parents=True, exist_ok=True)
            status, out, err = sandbox.run([tool, f"--root={root}", *(["--create"] if kind == "tmpfiles" else []), UNITS / f"quern.{kind}.conf"])
            check(status == 0, f"{tool} failed: {out}{err}")
        check("quern:" in (sandbox.directory / "root/etc/passwd").read_text(), "sysusers made no user quern")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=Path, required=True, help="build directory, or one with the three programs")
    sys.exit(harness.main(lambda: test(parser.parse_args())))
