#!/usr/bin/env python3
"""What coordinator and worker tell of themselves: a real job, with an executor that is killed in the middle of a task, read from their
metrics, their logs (one as text, one as JSON) and the history of the task. The table of docs/operations.md names what is exported, all of it
and nothing else."""

import argparse
import json
import re
import signal
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import harness
from harness import check

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "operations.md"


def wait_for(what, condition, seconds=60):
    end = time.monotonic() + seconds
    while not (result := condition()):
        check(time.monotonic() < end, f"{what}: not within {seconds} s")
        time.sleep(0.02)
    return result


class Scrape:
    """The answer of one program: samples by name and labels, types by family."""

    def __init__(self, address):
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            self.text = answer.read().decode()
        self.types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", self.text, re.M))
        self.values = {}
        for name, labels, value in re.findall(r"^([a-z_]+)(?:\{(.*)\})? (\S+)$", self.text, re.M):
            key = frozenset(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels))
            check((name, key) not in self.values, f"{name}{{{labels}}} is there twice")
            self.values[name, key] = float(value)

    def __call__(self, name, **labels):
        """The sum of the samples that have these labels; None where there is none."""
        found = [value for (n, key), value in self.values.items() if n == name and key >= set(labels.items())]
        return sum(found) if found else None


def documented(program):
    """Name -> type, from the table of one program."""
    text = DOCUMENT.read_text()
    section = text[text.index("### Read the metrics"):]
    section = section[section.index(f"`{program}` exports"):]
    table = re.search(r"\n\n(\|.*?)\n\n", section, re.S).group(1)
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()[2:]]
    found = {}
    for cells in rows:
        for name in re.findall(r"`([a-z_]+)(?:\{[^`]*\})?`", cells[0]):
            check(name not in found, f"{DOCUMENT.name} lists {name} of {program} twice")
            found[name] = cells[1]
    return found


def check_documented(program, scrape):
    wanted = documented(program)
    missing = sorted(set(wanted) - set(scrape.types))
    unknown = sorted(set(scrape.types) - set(wanted))
    check(not missing and not unknown, f"{program}: {DOCUMENT.name} lists {missing}, which are not exported, and does not list {unknown}")
    differ = {name: (wanted[name], scrape.types[name]) for name in wanted if wanted[name] != scrape.types[name]}
    check(not differ, f"{program}: types differ (document, program): {differ}")
    for name, kind in scrape.types.items():
        check((kind == "counter") == name.endswith("_total"), f"{name} is a {kind}")


class MetricsTest:
    def __init__(self, programs, sandbox, source):
        self.programs = programs
        self.sandbox = sandbox
        self.source = source
        self.server = f"unix:{sandbox.runtime}/s"
        self.logs = {name: sandbox.directory / f"{name}.log" for name in ["quernd", "quern-worker"]}
        self.addresses = {}

    def start(self, name, *arguments):
        program = self.programs.quernd if name == "quernd" else self.programs.worker
        process = self.sandbox.start([program, *arguments, "--metrics-listen", "127.0.0.1:0"], log=self.logs[name])
        address = wait_for(f"{name} says where its metrics are", lambda: re.search(r"metrics on http://([^/\s]+)/metrics", self.log(name)))[1]
        self.addresses[name] = address
        return process

    def log(self, name):
        return self.logs[name].read_text() if self.logs[name].exists() else ""

    def scrape(self, name):
        return Scrape(self.addresses[name])

    def quern(self, *arguments):
        status, out, err = self.sandbox.run([self.programs.quern, *arguments, "--server", self.server])
        check(status == 0, f"{' '.join(map(str, arguments))} failed with {status}:\n{err}")
        return out

    def submit(self, out):
        return self.quern("submit", self.source, "-o", out, *harness.JOB, "--max-shard-size", "1MiB", "--detach").strip()

    def run(self):
        coordinator = self.start("quernd", "--state-dir", self.sandbox.directory / "coordinator", "--listen", self.server, "--allow-root",
                                 self.source, "--allow-root", self.sandbox.directory)
        idle = self.scrape("quernd")
        check(idle("quern_commits_total") == 0 and idle("quern_jobs") == 0 and idle("quern_workers") == 0, f"an idle coordinator:\n{idle.text}")
        worker = self.start("quern-worker", "--server", self.server, "--name", "w", "--memory", "64MiB", "--threads", "1", "--log-format", "json")

        first = self.sandbox.directory / "first"
        job = self.submit(first)
        self.quern("watch", job)
        tasks = self.check_first_job(first)
        self.check_killed_executor(tasks)
        self.check_logs()
        self.check_refusals(coordinator)
        for process in [worker, coordinator]:
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            check(process.wait(timeout=30) == 0, "it does not end cleanly")
            check(time.monotonic() - began < 5, "serving metrics keeps a program from ending")
        print(f"metrics_test: {tasks} tasks, {len(documented('quernd'))} and {len(documented('quern-worker'))} metrics: ok")

    def check_first_job(self, out):
        tasks = len(list(out.glob("*.safetensors")))
        check(tasks > 1, f"the job has {tasks} tasks")
        seen, worker = self.scrape("quernd"), self.scrape("quern-worker")
        check_documented("quernd", seen)
        check_documented("quern-worker", worker)
        for name, labels, wanted in [
                ("quern_commits_total", {}, tasks), ("quern_grants_total", {"purpose": "work"}, tasks), ("quern_jobs", {"state": "succeeded"}, 1),
                ("quern_jobs_ended_total", {"state": "succeeded"}, 1), ("quern_attempts_ended_total", {"state": "committed"}, tasks),
                ("quern_workers", {"state": "ready"}, 1), ("quern_workers", {}, 1), ("quern_tasks", {}, 0), ("quern_attempts_running", {}, 0),
                ("quern_job_duration_seconds_count", {}, 1), ("quern_task_duration_seconds_count", {}, tasks),
                ("quern_publishes_total", {"result": "succeeded"}, 1), ("quern_publish_seconds_count", {}, 1), ("quern_lease_expiries_total", {}, 0),
                ("quern_mismatches_total", {}, 0), ("quern_job_tasks", {}, None), ("quern_calls_refused_total", {}, 0)]:
            check(seen(name, **labels) == wanted, f"quernd: {name} {labels} is {seen(name, **labels)}, wanted {wanted}")
        for name, labels, wanted in [
                ("quern_worker_attempts_started_total", {}, tasks), ("quern_worker_attempts_ended_total", {"state": "completed"}, tasks),
                ("quern_worker_attempts_ended_total", {}, tasks), ("quern_worker_coordinator_reachable", {}, 1),
                ("quern_worker_executor_starts_total", {}, 1), ("quern_worker_executor_deaths_total", {}, 0), ("quern_worker_pool_bytes", {}, 0),
                ("quern_worker_pool_limit_bytes", {}, 64 * harness.MIB), ("quern_worker_attempt_duration_seconds_count", {}, tasks),
                ("quern_worker_draining", {}, 0)]:
            check(worker(name, **labels) == wanted, f"worker: {name} {labels} is {worker(name, **labels)}, wanted {wanted}")
        written = harness.shards_size(out)
        for scrape, name in [(seen, "quern_output_bytes_total"), (worker, "quern_worker_written_bytes_total")]:
            check(scrape(name) >= written, f"{name} is {scrape(name)}, but {written} bytes were written")
        for scrape, names in [(seen, ["quern_store_commit_seconds_count", "quern_store_batch_size_sum", "quern_source_bytes_total",
                                      "quern_connections", "process_resident_memory_bytes"]),
                              (worker, ["quern_worker_read_bytes_total", "quern_worker_executor_resident_bytes",
                                        "quern_worker_executor_peak_resident_bytes"])]:
            for name in names:
                check(scrape(name) > 0, f"{name} is {scrape(name)}")
        for stage in ["read", "compute", "write", "hash"]:
            for scrape, name in [(seen, "quern_stage_seconds_total"), (worker, "quern_worker_stage_seconds_total")]:
                check(scrape(name, stage=stage) > 0, f"{name} of {stage} is {scrape(name, stage=stage)}")
        prompt = seen("quern_synchronize_seconds_count", may_wait="false")
        check(prompt > 0 and seen("quern_synchronize_seconds_bucket", le="+Inf", may_wait="false") == prompt, "calls of the worker are not counted")
        for scrape in [seen, worker]:
            check(str(self.source) not in scrape.text and str(self.sandbox.directory) not in scrape.text, "metrics hold paths")
        return tasks

    def check_killed_executor(self, tasks):
        """An executor that stands still keeps its task running for as long as we look; then it dies."""
        executor = next(p for p in self.sandbox.processes() if p.role == "executor")
        executor.send(signal.SIGSTOP)
        job = self.submit(self.sandbox.directory / "second")
        running = wait_for("a task runs", lambda: (s := self.scrape("quernd"))("quern_job_tasks", job=job, state="running") == 1 and s)
        check(running("quern_tasks", state="pending") == tasks - 1, f"{running('quern_tasks', state='pending')} tasks are pending")
        check(running("quern_jobs", state="running") == 1 and running("quern_attempts_running") == 1, "the running job is not counted")
        wait_for("the worker says so", lambda: (s := self.scrape("quern-worker"))("quern_worker_attempts_running") == 1
                 and s("quern_worker_pool_bytes") == 64 * harness.MIB)
        executor.kill()
        self.quern("watch", job)
        seen, worker = self.scrape("quernd"), self.scrape("quern-worker")
        check(seen("quern_attempts_ended_total", state="failed", reason="executor_died") == 1, "the failure is not counted")
        check(seen("quern_job_tasks") is None, "an ended job still has a label")
        check(worker("quern_worker_executor_deaths_total", cause="signal") == 1, "the executor's death is not counted")
        check(worker("quern_worker_attempts_ended_total", state="failed", reason="executor_died") == 1, "the worker does not count its failure")
        check(worker("quern_worker_executor_starts_total") == 2, "the new executor is not counted")

        listed = json.loads(self.quern("tasks", job, "--json"))["tasks"]
        failed = next(i for i, task in enumerate(listed) if len(task["attempts"]) > 1)
        task = json.loads(self.quern("show", job, "--task", failed, "--json"))
        check(task == listed[failed], "show --task and tasks differ")
        attempts = [(a["attempt"], a["state"], a["reason"], a["worker"]) for a in task["attempts"]]
        check(attempts == [(1, "FAILED", "EXECUTOR_DIED", "w"), (2, "COMMITTED", "", "w")], f"the history of the task is {attempts}")
        check(all(a["grant_time"] and a["end_time"] for a in task["attempts"]), "an attempt has no times")
        said = self.quern("show", job, "--task", failed)
        for words in ["attempt 1  failed", "EXECUTOR_DIED", "Killed", "attempt 2  committed", "w on ", "granted ", "ended ", "stages "]:
            check(words in said, f"show --task does not say {words!r}:\n{said}")
        status, _, err = self.sandbox.run([self.programs.quern, "show", job, "--task", len(listed), "--server", self.server])
        check(status == 1 and "counted from 0" in err, f"a task that is not there: {status} {err}")
        self.failed = (job, failed)

    def check_logs(self):
        job, task = self.failed
        fields = f"job={job} task={task} attempt="
        text = self.log("quernd")
        check(re.search(rf"attempt event=ended {fields}1 worker=w state=FAILED reason=EXECUTOR_DIED message=\".*Killed", text), f"quernd's log:\n{text}")
        check(re.search(rf"attempt event=committed {fields}2 worker=w label=\S+", text), f"quernd's log:\n{text}")
        check(f"job event=state job={job} state=SUCCEEDED" in text, f"quernd's log:\n{text}")
        lines = [json.loads(line) for line in self.log("quern-worker").splitlines() if not line.startswith("$ ")]
        check(all({"time", "level", "program", "text"} <= set(line) for line in lines), f"lines of the worker: {lines}")
        died = [line for line in lines if line.get("event") == "executor_died"]
        check([(d["job"], d["task"], d["attempt"], d["reason"], d["level"]) for d in died] == [(job, str(task), "1", "EXECUTOR_DIED", "error")],
              f"of the executor's death: {died}")
        check(any((line.get("event"), line.get("job"), line.get("task"), line.get("attempt")) == ("completed", job, str(task), "2") for line in lines),
              "the worker's log has no end of the second attempt")

    def check_refusals(self, coordinator):
        address = self.addresses["quernd"]
        try:
            urllib.request.urlopen(f"http://{address}/", timeout=10)
            check(False, "there is something beside /metrics")
        except urllib.error.HTTPError as error:
            check(error.code == 404, f"beside /metrics: {error}")
        listen = ["--in-memory", "--listen", f"unix:{self.sandbox.runtime}/other"]
        for flag, status, words in [("unix:/x.sock", 2, "host:port"), ("9450", 2, "host:port"), (address, 1, "Address already in use")]:
            for command in [[self.programs.quernd, *listen], [self.programs.worker, "--server", self.server, "--memory", "64MiB"]]:
                got, out, err = self.sandbox.run([*command, "--metrics-listen", flag])
                check(got == status and words in out + err, f"{command[0].name} --metrics-listen {flag}: {got} {out}{err}")
        check(coordinator.poll() is None, "the coordinator is gone")


def test(arguments):
    with harness.Sandbox(harness.Programs(arguments.bin)) as sandbox:
        MetricsTest(sandbox.programs, sandbox, arguments.source.resolve()).run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=Path, required=True, help="build directory, or one with the three programs")
    parser.add_argument("--source", type=Path, required=True, help="a checkpoint")
    options = parser.parse_args()
    sys.exit(harness.main(lambda: test(options)))
