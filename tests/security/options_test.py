"""Options that make no sense: each program refuses them with status 2 and names them, before it opens or connects anything."""

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "crash"))

from harness import Failure, Programs, Sandbox, check

# For options that take a time.
NO_TIMES = ["", "30", "-1s", "1h1h", "1s1h", "99999999999h", "inf", "1e3s", "s", "1d", "30s ", "0s"]
# For those that take a number.
NO_NUMBERS = ["", "x", "1.5", "1e3", "-1", "99999999999999999999", "0x", "1 2"]
NO_SIZES = ["", "-1", "lots", "99999999TiB", "1.2.3GiB", "GiB", "0"]
NO_TEXT = [""]


def quernd(sandbox):
    start = [sandbox.programs.quernd, "--in-memory", "--allow-root", sandbox.directory, "--listen", f"unix:{sandbox.runtime}/q"]
    options = {
        "--lease": [*NO_TIMES, "999ms", "25h"], "--keep-jobs-for": [*NO_TIMES, "999ms"], "--stream-timeout": [*NO_TIMES, "25h"],
        "--keep-jobs": NO_NUMBERS, "--max-connections": [*NO_NUMBERS, "0", "50001"], "--max-connections-per-address": [*NO_NUMBERS, "0", "50001"],
        "--max-calls-per-client": [*NO_NUMBERS, "0", "50001"], "--socket-mode": ["", "0777", "660", "0o660"], "--log-format": ["", "xml", "JSON"],
        "--metrics-listen": ["", "9450", "unix:/x", "127.0.0.1:65536", "127.0.0.1:-1", "::1:9450"], "--parent-fd": ["", "x", "-1", "9999", "99999999999"],
        "--token-file": NO_TEXT, "--tls-cert": NO_TEXT, "--tls-key": NO_TEXT, "--tls-client-ca": NO_TEXT, "--state-dir": ["", "/tmp/both"],
        "--allow-root": ["", "relative", ".", sandbox.programs.quernd],
        "--listen": ["", "7450", "unix:relative", "127.0.0.1:65536", "127.0.0.1:99999", "127.0.0.1:x", "local host:7450", "[::1 ]:7450"]}
    return start, options, ["--lease", "--keep-jobs-for", "--stream-timeout", "--keep-jobs", "--max-connections", "--socket-mode", "--metrics-listen"], []


def worker(sandbox):
    start = [sandbox.programs.worker, "--server", f"unix:{sandbox.runtime}/none"]
    options = {
        "--available-for": NO_TIMES, "--threads": [*NO_NUMBERS, "0", "1025"], "--memory": [*NO_SIZES, "15MiB", "900TiB"], "--device": ["", "cuda", "CPU"],
        "--reader": ["", "fast"], "--log-format": ["", "xml"],
        "--name": ["", "a b", "a/b", "a\nb", "a\x1b[2Jb", "a\u202egpj", "a\u2066", "\u200b", "a\u00a0b", "a\u2028b", ".", "..", "x" * 129],
        "--map": ["", "/a", "a=/b", "/a=b", "/a=/b=/c", "/a/../b=/c", "/a=/b/..", "/a//b=/c", "/a/.=/c", "=/c"],
        "--spool": ["", "/no/such/directory", sandbox.programs.worker], "--metrics-listen": ["", "9450", "unix:/x", "127.0.0.1:65536"],
        "--parent-fd": ["-1", "9999"],
        "--tls-ca": [sandbox.programs.worker],
        "--server": ["", "unix:/" + "x" * 107, "unix:relative", "1.2.3.4:99999", "127.0.0.1:0", ":7450", "host name:1", "host"]}
    return start, options, ["--name", "--memory", "--threads", "--available-for", "--spool"], ["--server"]


def quantize(sandbox):
    start = [sandbox.programs.quern, "quantize", sandbox.source, "-o", sandbox.directory / "out", "--scheme", "W4A16"]
    options = {
        "--memory": [*NO_SIZES, "15MiB"], "--threads": [*NO_NUMBERS, "0", "1025"], "--reader": ["", "fast"], "--max-shard-size": NO_SIZES,
        "--group-size": ["", "0", "-1", "x", "99999999999"], "--observer": NO_TEXT, "--targets": ["", ","], "--ignore": NO_TEXT, "--recipe": NO_TEXT,
        "--export": ["", "gguf"], "--activation-scales": NO_TEXT, "--importance": NO_TEXT}
    return start, options, ["--memory", "--threads", "--group-size", "--max-shard-size"], []


def synth(sandbox):
    start = [sandbox.programs.quern, "synth", sandbox.directory / "out", "--family", "llama", "--layers", "1"]
    sizes = {option: [*NO_NUMBERS, "0", "4294967296"] for option in ["--experts", "--hidden", "--intermediate", "--vocab", "--layers"]}
    options = {**sizes, "--seed": [*NO_NUMBERS], "--dtype": ["", "FP8", "bf16"], "--max-shard-size": NO_SIZES, "--family": NO_TEXT}
    return start, options, ["--layers", "--seed", "--hidden"], ["--layers", "--family"]


def of_the_farm(sandbox):
    """(command line, an option that is wrong in it) of commands for a coordinator, which is not there."""
    quern, server = sandbox.programs.quern, ["--server", f"unix:{sandbox.runtime}/none"]
    lines = [([quern, "cordon", "node7", "--reason", reason, *server], "reason")
             for reason in ["", "a\nb", "a\x1b[2Jb", "a\u202eb", "a\u0085b", "a\u2067b", "x" * 1001]]
    lines += [([quern, command, name, *server], "worker") for command in ["cordon", "uncordon", "drain"]
              for name in ["", "a b", "a\u202eb", "workers/", "workers/a/b", "x" * 129]]
    lines += [([quern, command, name, *server], "job") for command in ["show", "cancel", "pause", "resume", "retry", "delete", "watch", "tasks"]
              for name in ["", "x", "-1", "jobs/", "jobs/-1", "jobs/1.5", "jobs/99999999999999999999", "jobs/1/tasks/2"]]
    lines += [([quern, "show", "jobs/1", "--task", task, *server], "task") for task in NO_NUMBERS]
    lines += [([quern, "download", "jobs/1", "-o", "", *server], "output")]
    submit = [quern, "submit", "/none", "-o", "/out", "--scheme", "W4A16", *server]
    lines += [([*submit, "--audit", audit], "audit") for audit in ["", "x", "-1", "101%", "1.5", "nan", "inf", "%", "-0.1%"]]
    lines += [([*submit, "--priority", priority], "priority") for priority in ["", "x", "1.5", "2147483648", "-2147483649"]]
    lines += [([*submit, "--reader", reader], "reader") for reader in ["", "fast"]]
    lines += [([quern, "jobs", "--server", server], "server")
              for server in ["", "unix:relative", "1.2.3.4:99999", "127.0.0.1:0", "host name:1", "host"]]
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", required=True, help="directory of the programs, or a build directory")
    parser.add_argument("--source", required=True, help="a small checkpoint")
    arguments = parser.parse_args()
    wrong = []
    tried = 0
    with Sandbox(Programs(arguments.bin)) as sandbox:
        sandbox.source = Path(arguments.source).resolve()
        lines = of_the_farm(sandbox)
        for program in [quernd, worker, quantize, synth]:
            start, options, single, required = program(sandbox)
            for option, values in options.items():
                # A required one cannot stand twice, so it stands with the wrong value alone.
                at = start.index(option) if option in required else None
                begin = start if at is None else start[:at] + start[at + 2:]
                lines += [([*begin, f"{option}={value}" if str(value).startswith("-") else option, *([] if str(value).startswith("-") else [value])],
                           option.lstrip("-")) for value in values if "\0" not in str(value)]
            good = {"--lease": "30s", "--keep-jobs-for": "1h", "--stream-timeout": "1m", "--keep-jobs": "5", "--max-connections": "50", "--socket-mode": "0600",
                    "--metrics-listen": "127.0.0.1:0", "--name": "w", "--memory": "64MiB", "--threads": "1", "--available-for": "1h",
                    "--spool": "/tmp", "--group-size": "32", "--max-shard-size": "1GiB", "--layers": "1", "--seed": "1", "--hidden": "64"}
            lines += [([*start, option, good[option], option, good[option]], option.lstrip("-")) for option in single]
        for line, option in lines:
            tried += 1
            try:
                code, out, err = sandbox.run(line, timeout=5)
            except Failure:
                wrong.append(f"{line[1:]}: was taken")
                continue
            if code != 2 or not re.search(option, err, re.IGNORECASE):
                wrong.append(f"{[str(word) for word in line[1:]]}: status {code}, {err[:300]!r}")
    print(f"{tried} command lines")
    check(not wrong, "\n".join([f"{len(wrong)} are not refused as they should be:", *wrong]))


if __name__ == "__main__":
    try:
        main()
    except Failure as failure:
        print(f"FAILED: {failure}")
        sys.exit(1)
