#!/usr/bin/env python3
"""Makes manual pages and shell completions out of what the programs say under --help, so that they cannot differ from it.

help_pages.py --quern PATH --quernd PATH --worker PATH --version V --templates DIR --output DIR
"""

import argparse
import gzip
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

# CLI11 puts descriptions into this column, or into it on the next line when the names are too long.
COLUMN = 30


@dataclass
class Argument:
    names: list  # "-o", "--output"; for a positional its name alone
    value: str = ""  # OUT, N|channel; empty for a flag without a value
    kind: str = ""  # what CLI11 says about the value: "{a,b}", "INT in [1 - 1024]"
    default: str = ""
    environment: str = ""
    repeated: bool = False
    required: bool = False
    text: str = ""

    @property
    def choices(self):
        return self.kind[1:-1].split(",") if self.kind.startswith("{") else []

    @property
    def completes(self):
        """What its value is: "directory", "file", "", or None where there is no value."""
        if not self.value:
            return None
        word = f"{self.names[-1]} {self.value}"
        if re.search(r"\b(DIR|OUT|SRC)\b|-dir\b|-root\b", word):
            return "directory"
        return "file" if re.search(r"\bFILE\b|-(file|cert|key|ca)\b", word) else ""


@dataclass
class Help:
    description: str = ""
    usage: str = ""
    positionals: list = field(default_factory=list)
    options: list = field(default_factory=list)
    commands: list = field(default_factory=list)  # (name, text)
    footer: str = ""


def parse_argument(name, text):
    words = name.split(" ", 1)
    argument = Argument(names=words[0].split(","), text=text)
    rest = words[1].strip() if len(words) > 1 else ""
    if found := re.search(r"\(Env:(\w+)\)", rest):
        argument.environment = found[1]
        rest = rest.replace(found[0], "").strip()
    for mark, attribute in [("REQUIRED", "required"), ("...", "repeated")]:
        if rest.endswith(mark):
            setattr(argument, attribute, True)
            rest = rest.removesuffix(mark).strip()
    found = re.fullmatch(r"(?P<value>[^:=]*)(?::(?P<kind>\{[^}]*\}|[^={]+))?(?:=(?P<default>.*))?", rest)
    if found is None:
        raise SystemExit(f"help_pages: {name!r} is not understood")
    argument.value, argument.kind, argument.default = (found[group] or "" for group in ["value", "kind", "default"])
    return argument


def parse_help(text, program):
    lines = text.splitlines()
    usage = next((i for i, line in enumerate(lines) if line.startswith("Usage:")), None)
    if usage is None:
        raise SystemExit(f"help_pages: {program} --help shows no usage")
    result = Help(description=" ".join(line.strip() for line in lines[:usage]).strip(),
                  usage=" ".join([program.split()[0], *lines[usage].removeprefix("Usage:").split()[1:]]))
    sections = {"Positionals:": [], "Options:": [], "Subcommands:": []}
    section, i = None, usage + 1
    while i < len(lines):
        line = lines[i]
        if line in sections:
            section = sections[line]
        elif line.startswith("  ") and section is not None:
            if line[:COLUMN].strip():
                long_name = len(line) <= COLUMN or line[COLUMN - 1] != " "
                section.append([line.strip() if long_name else line[:COLUMN].strip(), "" if long_name else line[COLUMN:].strip()])
            else:
                section[-1][1] = f"{section[-1][1]} {line.strip()}".strip()
        elif line.strip():
            result.footer = "\n".join(lines[i:]).strip()
            break
        i += 1
    result.positionals = [parse_argument(*entry) for entry in sections["Positionals:"]]
    result.options = [parse_argument(*entry) for entry in sections["Options:"]]
    result.commands = [tuple(entry) for entry in sections["Subcommands:"]]
    if not result.options:
        raise SystemExit(f"help_pages: {program} --help shows no options")
    return result


def read_help(path, name):
    """Help of the program, and of each of its commands."""
    def ask(*words):
        # Defaults that come from the caller's environment would get into the pages.
        run = subprocess.run([path, *words, "--help"], capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"})
        return parse_help(run.stdout, " ".join([name, *words]))
    top = ask()
    return top, {command: ask(command) for command, _ in top.commands}


# Manual pages.

def roff(text):
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.M)


def roff_argument(argument):
    lines = [".TP"]
    value = f" \\fI{roff(argument.value)}\\fR" if argument.value and argument.names[0].startswith("-") else ""
    names = ", ".join(f"\\fB{roff(name)}\\fR" for name in argument.names)
    lines.append(f"{names}{value}{' ...' if argument.repeated else ''}")
    lines.append(roff(argument.text))
    said = []
    if argument.required:
        said.append("Required.")
    if argument.choices:
        said.append(f"One of {', '.join(argument.choices)}.")
    elif found := re.fullmatch(r"INT in \[(\d+) - (\d+)\]", argument.kind):
        said.append(f"From {found[1]} to {found[2]}.")
    if argument.default:
        said.append(f"Default: {argument.default}.")
    if argument.environment:
        said.append(f"Also read from the environment variable {argument.environment}.")
    if said:
        lines.append(".br\n" + roff(" ".join(said)))
    return "\n".join(lines)


def roff_footer(text):
    return f".PP\n.nf\n{roff(text)}\n.fi" if text else ""


def roff_command(name, text, page):
    parts = [f".SS {roff(name)}", roff(text), ".PP", f".B {roff(page.usage)}"]
    parts += [roff_argument(a) for a in page.positionals + page.options if a.names != ["-h", "--help"]]
    return "\n".join([*parts, roff_footer(page.footer)])


def manual(template, version, top, commands):
    values = {
        "VERSION": version,
        "USAGE": f".B {roff(top.usage)}",
        "DESCRIPTION": roff(top.description),
        "OPTIONS": "\n".join(roff_argument(a) for a in top.options),
        "COMMANDS": "\n".join(roff_command(name, text, commands[name]) for name, text in top.commands),
        "FOOTER": roff_footer(top.footer),
    }
    return re.sub(r"@(\w+)@", lambda found: values[found[1]], template)


# Completions.

def flags_of(page):
    return [name for option in page.options for name in option.names]


def bash_values(page):
    """case branches: what follows an option."""
    branches = []
    for option in page.options:
        if option.completes is None:
            continue
        action = {"directory": 'COMPREPLY=($(compgen -d -- "$cur"))', "file": 'COMPREPLY=($(compgen -f -- "$cur"))', "": ":"}[option.completes]
        if option.choices:
            action = f"COMPREPLY=($(compgen -W '{' '.join(option.choices)}' -- \"$cur\"))"
        branches.append(f"      {'|'.join(option.names)}) {action}; return ;;")
    return "\n".join(branches)


def bash_function(name, page):
    files = 'COMPREPLY=($(compgen -d -- "$cur"))' if any(p.completes == "directory" for p in page.positionals) else ":"
    return f"""{name}() {{
  case $prev in
{bash_values(page) or '      *) ;;'}
  esac
  if [[ $cur == -* ]]; then
    COMPREPLY=($(compgen -W '{' '.join(flags_of(page))}' -- "$cur"))
  else
    {files}
  fi
}}
"""


def bash_completion(programs):
    parts = ["# bash completion of quern, quernd and quern-worker; made from their --help.\n"]
    for name, (top, commands) in programs.items():
        function = f"_{name.replace('-', '_')}"
        for command, page in commands.items():
            parts.append(bash_function(f"{function}__{command}", page))
        parts.append(bash_function(f"{function}__top", top))
        names = " ".join(commands)
        inner = f"""  local word
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case $word in
      {'|'.join(commands)}) "{function}__$word"; return ;;
    esac
  done
  if [[ $cur == -* ]]; then {function}__top; else COMPREPLY=($(compgen -W '{names}' -- "$cur")); fi
""" if commands else f"  {function}__top\n"
        parts.append(f"""{function}() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD - 1]}}
  COMPREPLY=()
{inner}}}
complete -o filenames -o bashdefault -F {function} {name}
""")
    return "\n".join(parts)


def zsh_quote(text):
    return text.replace("'", "'\\''").replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")


def zsh_action(argument):
    if argument.choices:
        return f"({' '.join(argument.choices)})"
    return {"directory": "_files -/", "file": "_files", "": " "}[argument.completes]


def zsh_arguments(page):
    lines = []
    for option in page.options:
        value = "" if option.completes is None else f":{zsh_quote(option.value)}:{zsh_action(option)}"
        for name in option.names:
            repeated = "*" if option.repeated else ""
            lines.append(f"    '{repeated}{name}[{zsh_quote(option.text)}]{value}'")
    for positional in page.positionals:
        action = "_files -/" if positional.completes == "directory" else " "
        lines.append(f"    ':{zsh_quote(positional.names[0])}:{action}'")
    return " \\\n".join(lines)


def zsh_completion(programs):
    parts = [f"#compdef {' '.join(programs)}\n# Made from --help.\n"]
    for name, (top, commands) in programs.items():
        function = f"_{name.replace('-', '_')}"
        for command, page in commands.items():
            parts.append(f"{function}__{command}() {{\n  _arguments -s \\\n{zsh_arguments(page)}\n}}\n")
        if not commands:
            parts.append(f"{function}_program() {{\n  _arguments -s \\\n{zsh_arguments(top)}\n}}\n")
            continue
        described = "\n".join(f"    '{command}:{zsh_quote(text)}'" for command, text in top.commands)
        parts.append(f"""{function}_program() {{
  local -a commands=(
{described}
  )
  _arguments -C -s \\
{zsh_arguments(top)} \\
    '1:command:->command' '*::argument:->argument'
  case $state in
    command) _describe command commands ;;
    argument) (( $+functions[{function}__$words[1]] )) && {function}__$words[1] ;;
  esac
}}
""")
    parts.append("\n".join(["case $service in", *(f"  {name}) _{name.replace('-', '_')}_program ;;" for name in programs), "esac", ""]))
    return "\n".join(parts)


def fish_quote(text):
    return text.replace("\\", "\\\\").replace("'", "\\'")


def fish_options(program, page, condition):
    lines = []
    for option in page.options:
        names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
        value = ""
        if option.choices:
            value = f" -x -a '{' '.join(option.choices)}'"
        elif option.completes is not None:
            value = {"directory": " -x -a '(__fish_complete_directories)'", "file": " -r -F", "": " -x"}[option.completes]
        lines.append(f"complete -c {program}{condition} {names}{value} -d '{fish_quote(option.text)}'")
    if any(p.completes == "directory" for p in page.positionals):
        lines.append(f"complete -c {program}{condition} -a '(__fish_complete_directories)'")
    return lines


def fish_completion(name, top, commands):
    lines = [f"# fish completion of {name}; made from its --help.", f"complete -c {name} -f"]
    lines += fish_options(name, top, " -n __fish_use_subcommand" if commands else "")
    for command, text in top.commands:
        lines.append(f"complete -c {name} -n __fish_use_subcommand -a {command} -d '{fish_quote(text)}'")
        lines += fish_options(name, commands[command], f" -n '__fish_seen_subcommand_from {command}'")
    return "\n".join([*lines, ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ["quern", "quernd", "worker", "templates", "output"]:
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--version", required=True)
    arguments = parser.parse_args()
    programs = {
        "quern": read_help(arguments.quern.resolve(), "quern"),
        "quernd": read_help(arguments.quernd.resolve(), "quernd"),
        "quern-worker": read_help(arguments.worker.resolve(), "quern-worker"),
    }
    files = {
        page: manual((arguments.templates / f"{page}.in").read_text(), arguments.version, *programs[page.rsplit(".", 1)[0]])
        for page in ["quern.1", "quernd.8", "quern-worker.8"]
    }
    files["quern.bash"] = bash_completion(programs)
    files["_quern"] = zsh_completion(programs)
    files |= {f"{name}.fish": fish_completion(name, *pages) for name, pages in programs.items()}
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (arguments.output / name).write_text(text)
        if name[-1].isdigit():
            (arguments.output / f"{name}.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
