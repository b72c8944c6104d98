#!/usr/bin/env python3
"""The Debian package installs, works, upgrades, and goes away without a trace.

All of it happens in an overlay over this machine's root in a mount namespace of its own: dpkg sees the real system, and the system sees nothing.
"""

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

SOURCE = Path(__file__).resolve().parent.parent / "data" / "laguna-micro"
# What dpkg and the tools for users keep for themselves.
BOOKKEEPING = re.compile(r"/(var/(lib/dpkg|log|cache|backups|lib/systemd)|etc/(passwd|group|shadow|gshadow|subuid|subgid)-?$|etc/\.pwd\.lock$|tmp)")
INSTALL = "dpkg --force-unsafe-io --no-triggers -i /tmp/quern.deb"
# The user stays: files may belong to it.
STAYS = {"/etc/passwd", "/etc/group"}


def build_package(sandbox, build):
    status, out, err = sandbox.run(["cpack", "-G", "DEB", "--config", build / "CPackConfig.cmake", "-B", sandbox.directory / "package"])
    check(status == 0, f"cpack failed with {status}: {out}{err}")
    packages = list((sandbox.directory / "package").glob("*.deb"))
    check(len(packages) == 1, f"cpack made {packages}")
    return packages[0]


def check_lintian(sandbox, package):
    if shutil.which("lintian") is None:
        print("lintian is not installed: not asked")
        return
    status, out, err = sandbox.run(["lintian", "--allow-root", "--fail-on", "error", package])
    check(status == 0, f"lintian: {out}{err}")


def enter_namespace():
    """Starts this test again in a mount namespace of its own."""
    os.execvp("unshare", ["unshare", "--mount", "--propagation", "private", sys.executable, *sys.argv, "--in-namespace"])


class Machine:
    """This machine's root, and above it a layer that takes every change. Its mounts end with the test's namespace."""

    def __init__(self, sandbox, name):
        self.sandbox = sandbox
        self.place = sandbox.directory / name
        self.place.mkdir()
        harness.mount_tmpfs(self.place, "512m")
        self.upper, self.root = self.place / "upper", self.place / "root"
        for directory in [self.upper, self.place / "work", self.root]:
            directory.mkdir()
        self._mount("-t", "overlay", "overlay", "-o", f"lowerdir=/,upperdir={self.upper},workdir={self.place}/work", self.root)
        # An overlay shows no mounts of the layer below.
        for directory in ["proc", "dev"]:
            self._mount("--bind", f"/{directory}", self.root / directory)
        self._mount("-t", "tmpfs", "tmpfs", self.root / "run")
        (self.root / "tmp").chmod(0o1777)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        subprocess.run(["umount", "--lazy", self.place], check=False)

    def _mount(self, *arguments):
        run = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True)
        if run.returncode != 0:
            harness.skip(f"no overlay of the root can be mounted: {run.stderr.strip()}")

    def run(self, command, may_fail=False):
        status, out, err = self.sandbox.run(["chroot", self.root, "/usr/bin/env", "-i", self.sandbox.mark, "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8",
                                             "DEBIAN_FRONTEND=noninteractive", "sh", "-ec", command], timeout=60)
        check(may_fail or status == 0, f"in the machine, {command!r} failed with {status}: {out}{err}")
        return out

    def exists(self, path):
        return (self.root / path.lstrip("/")).exists()

    def changes(self):
        """Paths of files and new directories above the root, without what dpkg keeps for itself; removed ones as well."""
        found = set()
        for path in self.upper.rglob("*"):
            name = f"/{path.relative_to(self.upper)}"
            if BOOKKEEPING.match(name) or (path.is_dir() and Path(name).is_dir()):
                continue
            found.add(name)
        return found


def check_units_run(machine, package):
    """systemd, started in the machine, runs the units as they are shipped: a job goes through, a killed executor comes back, all stop."""
    shutil.copy(package, machine.root / "tmp/quern.deb")
    machine.run(INSTALL)
    machine.run("install -d -o quern -g quern /srv/quern")
    shutil.copytree(SOURCE, machine.root / "srv/quern/source")
    (machine.root / "etc/fstab").write_text("")  # its devices are not there
    units = machine.root / "etc/systemd/system"
    worker = (machine.root / "usr/lib/systemd/system/quern-worker@.service").read_text()
    # The same sandbox around a program that does nothing but ask for a ring.
    ask = machine.root / "usr/local/bin/quern-ask-for-ring"
    ask.write_text("""#!/usr/bin/python3
import ctypes
setup, parameters = 425, ctypes.create_string_buffer(120)
raise SystemExit(0 if ctypes.CDLL(None).syscall(setup, 8, parameters) >= 0 else 1)
""")
    ask.chmod(0o755)
    asks = re.sub(r"^ExecStart=.*$", "ExecStart=/usr/local/bin/quern-ask-for-ring", worker, flags=re.M)
    (units / "quern-ring@.service").write_text(re.sub(r"^(Restart|Type)=.*$", lambda f: {"Restart": "Restart=no", "Type": "Type=oneshot"}[f[1]], asks,
                                                      flags=re.M))
    (units / "quern-check.service").write_text("""[Unit]
After=quernd.service quern-worker@1.service
[Service]
Type=oneshot
TimeoutStartSec=60
ExecStart=/bin/bash /root/quern-check
ExecStopPost=systemctl --no-block poweroff
""")
    (units / "quern-check.target").write_text("[Unit]\nWants=quernd.service quern-worker@1.service quern-check.service\n")
    (machine.root / "root/quern-check").write_text("""exec >/root/quern-said 2>&1
set -ex
until quern workers | grep -q ready; do systemctl is-active quernd quern-worker@1; sleep 0.1; done
quern submit /srv/quern/source -o /srv/quern/out --scheme W4A16 --group-size 32 --targets routed_experts --reader direct
quern verify /srv/quern/out
worker=$(systemctl show -P MainPID quern-worker@1)
grep -x "NoNewPrivs:.1" /proc/$worker/status
grep -x "CapEff:.0000000000000000" /proc/$worker/status
kill -9 $(pgrep -P $worker)
quern submit /srv/quern/source -o /srv/quern/out --scheme W4A16 --group-size 64 --targets routed_experts --overwrite
[[ $(systemctl show -P MainPID quern-worker@1) == $worker ]]
systemctl start quern-ring@1
systemctl stop quern-worker@1 quernd
for unit in quern-worker@1 quernd; do [[ $(systemctl show -P Result $unit) == success ]]; done
echo all is well
""")
    for directory in ["proc", "dev", "run"]:  # nspawn mounts its own
        subprocess.run(["umount", "--lazy", machine.root / directory], check=True)
    # nspawn has a filter of its own, which knows no io_uring.
    status, out, err = machine.sandbox.run(["systemd-nspawn", "--quiet", "--keep-unit", "--register=no", "--system-call-filter=@aio", "--console=pipe",
                                            "-D", machine.root, "-b", "--", "--unit=quern-check.target"], timeout=120)
    said = machine.root / "root/quern-said"
    check(said.exists() and said.read_text().endswith("all is well\n"),
          f"the units do not run under systemd ({status}):\n{said.read_text() if said.exists() else out + err}")


def check_works(machine):
    """The coordinator and a worker run as the user quern with the flags of their units, and take a job."""
    for program in ["quern", "quernd", "quern-worker"]:
        said = machine.run(f"{program} --version")
        check(said.startswith(f"{program} "), f"{program} --version says {said!r}")
    machine.run("install -d -o quern -g quern /srv/quern")
    shutil.copytree(SOURCE, machine.root / "srv/quern/source")
    unit = (machine.root / "usr/lib/systemd/system/quernd.service").read_text()
    check("/usr/bin/quernd --state-dir /var/lib/quern $QUERND_FLAGS" in unit, "quernd.service starts something else than this test")
    machine.run("install -d -o quern -g quern -m 0750 /run/quern")
    out = machine.run("""
        as_quern() { exec setpriv --reuid quern --regid quern --init-groups --no-new-privs sh -c "$1"; }
        as_quern '. /etc/quern/quernd.env; exec /usr/bin/quernd --state-dir /var/lib/quern $QUERND_FLAGS' & coordinator=$!
        as_quern '. /etc/quern/worker.env
          exec /usr/bin/quern-worker --server $QUERN_SERVER --name box-1 --memory $QUERN_WORKER_MEMORY $QUERN_WORKER_FLAGS' & worker=$!
        trap 'kill $worker $coordinator; wait' EXIT
        while ! (as_quern 'quern jobs') >/dev/null 2>&1; do kill -0 $coordinator; done
        (as_quern 'quern submit /srv/quern/source -o /srv/quern/out --scheme W4A16 --group-size 32 --targets routed_experts')
        (as_quern 'quern verify /srv/quern/out')
    """)
    check(machine.exists("/srv/quern/out/quern_manifest.json"), f"the job left no result: {out}")
    check(list((machine.root / "var/lib/quern").iterdir()), "the coordinator kept no state")


def test(arguments):
    harness.need_root("installing a package")
    for program in ["cpack", "dpkg", "dpkg-shlibdeps", "unshare"]:
        if shutil.which(program) is None:
            harness.skip(f"{program} is missing (Debian: cmake, dpkg-dev, util-linux)")
    if subprocess.run(["dpkg-query", "-W", "quern"], capture_output=True).returncode == 0:
        harness.skip("a package quern is installed on this machine")
    if not arguments.in_namespace:
        enter_namespace()
    with harness.Sandbox(harness.Programs(arguments.bin)) as sandbox:
        package = build_package(sandbox, arguments.bin.resolve())
        check_lintian(sandbox, package)
        if shutil.which("systemd-nspawn") is not None:
            with Machine(sandbox, "booted") as machine:
                check_units_run(machine, package)
        elif os.environ.get("CI") == "true":
            harness.skip("systemd-nspawn is missing (Debian: systemd-container)")
        else:
            print("systemd-nspawn is not installed: the units are not run by systemd")
        with Machine(sandbox, "layers") as machine:
            shutil.copy(package, machine.root / "tmp/quern.deb")
            machine.run(INSTALL)
            shipped = [line for line in machine.run("dpkg -L quern").splitlines() if not (machine.root / line.lstrip("/")).is_dir()]
            for wanted in ["/usr/bin/quern", "/usr/bin/quernd", "/usr/bin/quern-worker", "/etc/quern/quernd.env", "/usr/lib/systemd/system/quernd.service",
                           "/usr/lib/systemd/system/quern-worker@.service", "/usr/share/man/man1/quern.1.gz", "/usr/share/man/man8/quernd.8.gz",
                           "/usr/share/bash-completion/completions/quern-worker", "/usr/share/doc/quern/operations.md",
                           "/usr/share/doc/quern/examples/slurm/workers.sbatch"]:
                check(wanted in shipped and machine.exists(wanted), f"the package has no {wanted}")
            user = machine.run("getent passwd quern").split(":")
            check(user[5:] == ["/var/lib/quern", "/usr/sbin/nologin\n"], f"the user quern is {user}")
            machine.run("systemd-analyze --man=no verify /usr/lib/systemd/system/quernd.service && "
                        "systemd-analyze --man=no verify /usr/lib/systemd/system/quern-worker@.service")
            check_works(machine)

            # An upgrade keeps what the administrator wrote, and the jobs.
            machine.run("echo '# mine' >> /etc/quern/quernd.env")
            state = sorted(path.name for path in (machine.root / "var/lib/quern").iterdir())
            machine.run(INSTALL)
            check((machine.root / "etc/quern/quernd.env").read_text().endswith("# mine\n"), "the upgrade lost changes of quernd.env")

            machine.run("dpkg --force-unsafe-io --no-triggers -r quern")
            left = [path for path in shipped if machine.exists(path)]
            check(left == ["/etc/quern/quernd.env", "/etc/quern/worker.env"], f"removal left {left}")
            kept = sorted(path.name for path in (machine.root / "var/lib/quern").iterdir())
            check(kept == state, f"removal changed the state: {state} before, {kept} after")

            machine.run("dpkg --force-unsafe-io --no-triggers -P quern")
            check(machine.exists("/srv/quern/out/quern_manifest.json"), "purging removed a result")
            shutil.rmtree(machine.root / "srv/quern")
            left = machine.changes() - STAYS
            check(not left, f"purging left {sorted(left)}")
        print(f"package_test: {package.name}, {len(shipped)} files: ok")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=Path, required=True, help="build directory")
    parser.add_argument("--in-namespace", action="store_true", help=argparse.SUPPRESS)
    sys.exit(harness.main(lambda: test(parser.parse_args())))
