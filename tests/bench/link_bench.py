#!/usr/bin/env python3
"""The data plane over a shaped link, beside what iperf3 gets there, and a job whose link is cut again and again.

Two hosts made of namespaces (tests/chaos/hosts.py) have a cable of --rates between them. The worker's host sees none of the coordinator's files:
source and shards cross the cable, by mutual TLS, and `quern download` fetches the result. Rates are those of the wire, both of iperf3 and of
Quern, of the middle nine tenths of the bytes of the busier direction. With --cuts the cable is then taken out so many times during a job; its
result is the same. Needs root."""

import argparse
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS / "crash"), str(TESTS / "chaos")]
import harness  # noqa: E402
import hosts  # noqa: E402
from certificates import Certificates  # noqa: E402
from harness import check  # noqa: E402

PORT = 7450
IN_MEMORY = 6 << 30  # what the source may take
CUT_RATE = "200mbit"  # for the cuts, so that the job lasts


class Meter:
    """Samples how many bytes a host's network card has received."""

    def __init__(self, host):
        self.counters = f"/proc/{host.init}/net/dev"
        self.samples = []
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run)

    def _run(self):
        while not self.ended.wait(0.05):
            line = next(line for line in Path(self.counters).read_text().splitlines() if line.lstrip().startswith("eth0:"))
            self.samples.append((time.monotonic(), int(line.split()[1])))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()

    def total(self):
        return self.samples[-1][1] - self.samples[0][1]

    def rate(self):
        """Bits a second."""
        first, last = self.samples[0][1], self.samples[-1][1]
        low = next(sample for sample in self.samples if sample[1] >= first + 0.05 * (last - first))
        high = next(sample for sample in self.samples if sample[1] >= first + 0.95 * (last - first))
        return 8 * (high[1] - low[1]) / (high[0] - low[0])


class Cost:
    """Seconds of processors, of a sandbox's coordinator and workers and of the children that this process has waited for."""

    def __init__(self, sandbox):
        self.sandbox = sandbox
        self.first = self._read()

    def _read(self):
        seconds = {"coordinator": 0.0, "worker": 0.0, "command": sum(os.times()[2:4])}
        for process in self.sandbox.processes():
            name = {"coordinator": "coordinator", "supervisor": "worker", "executor": "worker"}.get(process.role)
            if name is not None:
                # Also of the children it has waited for.
                fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:15]
                seconds[name] += sum(map(int, fields)) / os.sysconf("SC_CLK_TCK")
        return seconds

    def per_gigabyte(self, size, *names):
        now = self._read()
        return " + ".join(f"{(now[name] - self.first[name]) * 1e9 / size:.2f}" for name in names)


class LinkBench:
    def __init__(self, arguments, sandbox):
        self.arguments = arguments
        self.sandbox = sandbox
        self.programs = sandbox.programs
        self.base = sandbox.directory
        self.files = self.base / "files"
        self.files.mkdir()
        self.fetched = self.base / "fetched"
        self.fetched.mkdir()
        # The link is to be the limit, and not the disk that sources are read from.
        inputs = self.files / "in"
        inputs.mkdir()
        self.in_memory = int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) << 10 > IN_MEMORY
        if self.in_memory:
            harness.mount_tmpfs(inputs, IN_MEMORY)
        self.source = arguments.source or inputs / "source"
        hosts.make_switch()
        self.certificates = Certificates(self.base / "tls", [f"{hosts.NETWORK}.2"])
        self.here = hosts.Host("coordinator", 2)
        self.there = hosts.Host("worker", 3, hidden=[self.files] if arguments.source is None else [self.files, arguments.source])
        for host in (self.here, self.there):
            host.boot()
        self.server = f"{self.here.address}:{PORT}"
        self.socket = f"unix:{sandbox.runtime}/q.sock"

    def quern(self, *words, host=None, timeout=900):
        command = [self.programs.quern, *words]
        status, out, err = self.sandbox.run(host.inside(command) if host else command, timeout=timeout)
        check(status == 0, f"{' '.join(map(str, words))} failed with {status}:\n{err}")
        return out

    def start(self):
        if self.arguments.source is None:
            # Nearly all of it experts, so that a quarter as much goes back.
            self.quern("synth", self.source, "--family", "qwen3_moe", "--layers", "3", "--vocab", "8192", "--seed", "1")
        self.coordinator = self.sandbox.start(self.here.inside([
            self.programs.quernd, "--state-dir", self.base / "store", "--listen", self.socket, "--listen", self.server, "--allow-root", self.files,
            "--allow-root", self.source, *self.certificates.of_coordinator()]))
        self.worker = self.sandbox.start(self.there.inside([
            self.programs.worker, "--server", self.server, "--memory", "512MiB", "--threads", "2", "--name", "there", *self.certificates.of_worker()]))

    def submit(self, out):
        client = ["--server", self.socket, *self.certificates.of_client()]
        job = json.loads(self.quern("submit", self.source, "-o", out, "--scheme", "W4A16_ASYM", "--group-size", "32", "--targets", "routed_experts",
                                    "--detach", "--json", *client))["name"]
        return job, lambda: json.loads(self.quern("show", job, "--json", *client))

    def wait(self, show, seconds):
        end = time.monotonic() + seconds
        while (job := show())["state"] != "SUCCEEDED":
            check(job["state"] not in ("FAILED", "CANCELLED"), f"the job ended {job['state']}: {job.get('error')}")
            check(time.monotonic() < end, f"the job has not ended after {seconds} s")
            time.sleep(1)

    def iperf3(self):
        server = self.sandbox.start(self.here.inside(["iperf3", "-s", "-1", "-p", "5201"]))
        try:
            for _ in range(50):
                status, out, _ = self.sandbox.run(self.there.inside(["iperf3", "-c", self.here.address, "-p", "5201", "-R", "-t", "5", "-O", "1", "--json"]))
                end = json.loads(out)["end"] if status == 0 else {}
                if "sum_received" in end:
                    received, busy = end["sum_received"], end["cpu_utilization_percent"]
                    return received["bits_per_second"], (busy["host_total"] + busy["remote_total"]) / 100 * received["seconds"] * 1e9 / received["bytes"]
                time.sleep(0.1)
        finally:
            server.terminate()
            server.wait()
        raise harness.Failure(f"iperf3 failed: {out}")

    def shape(self, rate):
        # Bursts as large as the queue of a real card, for timers are coarse.
        for host in (self.here, self.there):
            host.shape(rate, burst="1mb")

    def measure(self, rate):
        self.shape(rate)
        limit, iperf3_cost = self.iperf3()
        out = self.files / f"out-{rate}"
        began = time.monotonic()
        cost = Cost(self.sandbox)
        with Meter(self.there) as meter:
            job, show = self.submit(out)
            self.wait(show, 900)
        took = time.monotonic() - began
        job_cost = cost.per_gigabyte(meter.total(), "coordinator", "worker")
        # iperf3 counts what it is given, the card what is on the wire.
        payload = 1448 / 1514
        streamed = meter.rate() * payload
        harness.tree(out)  # reads all of it, so that it is in memory as the source is
        cost = Cost(self.sandbox)
        with Meter(self.there) as download:
            self.quern("download", job, "-o", self.fetched / "result", "--server", self.server, *self.certificates.of_worker()[:6],
                       *self.certificates.of_client(), host=self.there)
        download_cost = cost.per_gigabyte(download.total(), "coordinator", "command")
        fetched = download.rate() * payload
        print(f"link of {rate}, source {'in memory' if self.in_memory else 'on the disk'}: iperf3 {limit / 1e6:.0f} Mbit/s; a worker's source {streamed / 1e6:.0f} Mbit/s ({100 * streamed / limit:.0f} %; "
              f"{meter.total() / 1e9:.2f} GB, job {took:.1f} s); download {fetched / 1e6:.0f} Mbit/s ({100 * fetched / limit:.0f} %)\n"
              f"  processor seconds per GB: iperf3 {iperf3_cost:.2f}, job {job_cost} (coordinator + worker), download {download_cost} (coordinator + client)", flush=True)
        return out

    def cut(self, reference):
        self.shape(CUT_RATE)
        out = self.files / "out-cut"
        _, show = self.submit(out)
        cuts = 0
        while cuts < self.arguments.cuts:
            time.sleep(0.4)
            job = show()
            check(job["state"] not in ("SUCCEEDED", "FAILED", "CANCELLED"), f"the job is {job['state']} after {cuts} cuts: give it more to do")
            if job.get("progress", {}).get("tasks_running", 0) == 0:
                continue
            self.there.cut()
            time.sleep(0.2)
            self.there.mend()
            cuts += 1
        self.shape(None)
        self.wait(show, 900)
        difference = harness.tree_difference(harness.tree(out), harness.tree(reference))
        check(not difference, f"the result differs: {difference}")
        tasks, grants = harness.check_history(out)
        print(f"link cut {cuts} times: the job completed, {grants} attempts at {tasks} tasks, the same bytes", flush=True)

    def run(self):
        self.start()
        reference = None
        for rate in self.arguments.rates:
            out = self.measure(rate)
            if reference is not None:
                difference = harness.tree_difference(harness.tree(out), harness.tree(reference))
                check(not difference, f"the result differs: {difference}")
                shutil.rmtree(out)
            reference = reference or out
            shutil.rmtree(self.fetched / "result")
        if self.arguments.cuts > 0:
            self.cut(reference)

    def close(self):
        for process in (self.worker, self.coordinator):
            process.terminate()
        for host in (self.there, self.here):
            host.crash()
        if self.in_memory:
            harness.unmount(self.files / "in")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, required=True, help="build directory, or the directory of the programs")
    parser.add_argument("--source", type=Path, help="a checkpoint; without it one of 3.7 GB is made")
    parser.add_argument("--rates", nargs="*", default=["1gbit", "5gbit"], help="as tc names them")
    parser.add_argument("--cuts", type=int, default=50)
    parser.add_argument("--base", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    harness.need_root("a network namespace")
    if shutil.which("iperf3") is None:
        harness.skip("there is no iperf3")
    if arguments.base is None:
        return hosts.enter(sys.argv)

    def test():
        with harness.Sandbox(harness.Programs(arguments.bin), inside=arguments.base) as sandbox:
            bench = LinkBench(arguments, sandbox)
            try:
                bench.run()
            finally:
                bench.close()

    return hosts.be_init(lambda: harness.main(test))


if __name__ == "__main__":
    sys.exit(main())
