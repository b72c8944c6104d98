#!/usr/bin/env python3
"""Manual pages and completions say what the programs' --help says, and shells and groff can read them."""

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

PACKAGE = Path(__file__).resolve().parent.parent.parent / "deploy" / "package"


class Help:
    """Flags of a program, read apart from the generator: every word that begins with -- at the start of an entry."""

    def __init__(self, program):
        self.program = program
        self.commands = [line.split()[0] for line in self._section(self._ask(), "Subcommands:") if re.match(r"  \S", line)]

    def _ask(self, *command):
        return subprocess.run([self.program, *command, "--help"], capture_output=True, text=True, check=True, env={}).stdout

    @staticmethod
    def _section(text, name):
        lines = text.splitlines()
        if name not in lines:
            return []
        rest = lines[lines.index(name) + 1:]
        return rest[:next((i for i, line in enumerate(rest) if not line.startswith(" ")), len(rest))]

    def flags(self, *command):
        entries = [line for line in self._section(self._ask(*command), "Options:") if re.match(r"  -", line)]
        return {flag for line in entries for flag in re.match(r"  (\S+)", line)[1].split(",")}


def bash_replies(script, words):
    """What bash offers for the last word."""
    quoted = " ".join(f"'{word}'" for word in words)
    function = f"_{words[0].replace('-', '_')}"
    run = subprocess.run(["bash", "-c", f'source "$1"; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; {function}; printf "%s\\n" "${{COMPREPLY[@]}}"',
                          "bash", script], capture_output=True, text=True)
    check(run.returncode == 0 and not run.stderr, f"completing {words} in bash: {run.stderr}")
    return set(run.stdout.split())


def check_manual(page, helps):
    text = page.read_text().replace("\\-", "-")
    for help_text in helps:
        sections = re.split(r"^\.SS (\S+)$", text, flags=re.M)
        check(sections[1::2] == help_text.commands, f"{page.name} describes {sections[1::2]}, the program has {help_text.commands}")
        for command, section in zip([None, *help_text.commands], sections[0::2]):
            found = set(re.findall(r"\\fB(--?[\w-]+)\\fR", section))
            wanted = help_text.flags(*([command] if command else [])) - ({"-h", "--help"} if command else set())
            check(found == wanted, f"{page.name}, {command}: {sorted(found ^ wanted)} stand in one of page and --help only")
    if shutil.which("groff") is None:
        harness.skip("groff is missing (Debian: groff-base)")
    run = subprocess.run(["groff", "-man", "-ww", "-Tutf8", page], capture_output=True, text=True)
    check(run.returncode == 0 and not run.stderr, f"groff on {page.name}: {run.stderr}")
    check(not re.search(r"@[A-Z]+@", text), f"{page.name} has a placeholder left")


def test(arguments):
    programs = harness.Programs(arguments.bin)
    with harness.Sandbox(programs) as sandbox:
        pages = sandbox.directory / "pages"
        status, out, err = sandbox.run([sys.executable, PACKAGE / "help_pages.py", "--quern", programs.quern, "--quernd", programs.quernd, "--worker",
                                        programs.worker, "--version", "1.2.3", "--templates", PACKAGE, "--output", pages])
        check(status == 0, f"help_pages.py: {out}{err}")
        helps = {"quern": Help(programs.quern), "quernd": Help(programs.quernd), "quern-worker": Help(programs.worker)}
        check(len(helps["quern"].commands) > 10, f"quern shows the commands {helps['quern'].commands}")
        for page, name in [("quern.1", "quern"), ("quernd.8", "quernd"), ("quern-worker.8", "quern-worker")]:
            check_manual(pages / page, [helps[name]])

        script = pages / "quern.bash"
        checked = 0
        for name, help_text in helps.items():
            check(bash_replies(script, [name, "-"]) == help_text.flags(), f"bash offers other flags of {name} than it has")
            if help_text.commands:
                check(bash_replies(script, [name, ""]) == set(help_text.commands), f"bash offers other commands of {name} than it has")
            for command in help_text.commands:
                offered, wanted = bash_replies(script, [name, command, "-"]), help_text.flags(command)
                check(offered == wanted, f"bash, {name} {command}: {sorted(offered ^ wanted)}")
                checked += len(wanted)
            for other in ["_quern", f"{name}.fish"]:
                text = (pages / other).read_text()
                for command in [(), *((c,) for c in help_text.commands)]:
                    for flag in help_text.flags(*command):
                        pattern = rf"'\*?{flag}\[" if other == "_quern" else rf" -[ls] {flag.lstrip('-')}\b"
                        check(re.search(pattern, text), f"{other} has no {flag} of {name} {' '.join(command)}")
        check(bash_replies(script, ["quern", "quantize", "--export", "comp"]) == {"compressed-tensors"}, "bash does not offer values of --export")
        directory = sandbox.directory / "models"
        directory.mkdir()
        (sandbox.directory / "models.txt").touch()
        check(bash_replies(script, ["quern", "inspect", f"{sandbox.directory}/mod"]) == {str(directory)}, "bash offers no directory for inspect")
        check(bash_replies(script, ["quernd", "--state-dir", f"{sandbox.directory}/mod"]) == {str(directory)}, "bash offers no directory for --state-dir")
        for shell, files in [("bash", ["quern.bash"]), ("zsh", ["_quern"]), ("fish", ["quern.fish", "quernd.fish", "quern-worker.fish"])]:
            if shutil.which(shell) is None:
                print(f"{shell} is not installed: its completions are not read by it")
                continue
            for file in files:
                run = subprocess.run([shell, "-n", pages / file], capture_output=True, text=True, env=os.environ | {"HOME": str(sandbox.directory)})
                check(run.returncode == 0 and not run.stderr, f"{shell} on {file}: {run.stderr}")
        print(f"pages_test: {checked} flags of {len(helps['quern'].commands)} commands: ok")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=Path, required=True, help="build directory, or one with the three programs")
    sys.exit(harness.main(lambda: test(parser.parse_args())))
