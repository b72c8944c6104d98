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
    """This machine's root, and above it a layer that takes every change."""

    def __init__(self, sandbox):
        self.sandbox = sandbox
        place = sandbox.directory / "layers"
        place.mkdir()
        harness.mount_tmpfs(place, "512m")
        self.upper, self.root = place / "upper", place / "root"
        for directory in [self.upper, place / "work", self.root]:
            directory.mkdir()
        self._mount("-t", "overlay", "overlay", "-o", f"lowerdir=/,upperdir={self.upper},workdir={place}/work", self.root)
        # An overlay shows no mounts of the layer below.
        for directory in ["proc", "dev"]:
            self._mount("--bind", f"/{directory}", self.root / directory)
        self._mount("-t", "tmpfs", "tmpfs", self.root / "run")
        (self.root / "tmp").chmod(0o1777)

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
        machine = Machine(sandbox)
        try:
            shutil.copy(package, machine.root / "tmp/quern.deb")
            install = "dpkg --force-unsafe-io --no-triggers -i /tmp/quern.deb"
            machine.run(install)
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
            machine.run(install)
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
        finally:
            subprocess.run(["umount", "--lazy", sandbox.directory / "layers"], check=False)
        print(f"package_test: {package.name}, {len(shipped)} files: ok")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=Path, required=True, help="build directory")
    parser.add_argument("--in-namespace", action="store_true", help=argparse.SUPPRESS)
    sys.exit(harness.main(lambda: test(parser.parse_args())))
