"""The table of docs/formats.md: what the parity tests of a session have found. QUERN_WRITE_PARITY=1 writes it, else it is compared."""

import contextlib
import os
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "formats.md"
BEGIN, END = "<!-- parity table: begin -->", "<!-- parity table: end -->"

_found = {}


@contextlib.contextmanager
def row(scheme, dtype, family):
    _found[scheme, dtype, family] = "differs"
    yield
    _found[scheme, dtype, family] = "equal"


def text():
    """Families with the same result share a line."""
    lines = {}
    for (scheme, dtype, family), result in _found.items():
        lines.setdefault((scheme, dtype, result), []).append(family)
    rows = [f"| {scheme} | {dtype} | {', '.join(sorted(families))} | {result} |" for (scheme, dtype, result), families in sorted(lines.items())]
    return "\n".join(["| scheme | source dtype | families | bytes |", "|---|---|---|---|", *rows])


def check_or_write():
    """None, or what is wrong with the table that stands in the document."""
    document = DOCUMENT.read_text()
    head, begin, rest = document.partition(BEGIN)
    old, end, tail = rest.partition(END)
    if not begin or not end:
        return f"{DOCUMENT} has no place for the parity table"
    new = f"\n{text()}\n"
    if os.environ.get("QUERN_WRITE_PARITY"):
        DOCUMENT.write_text(head + BEGIN + new + END + tail)
        return None
    return None if new == old else f"the parity table in {DOCUMENT} is not what the tests found; QUERN_WRITE_PARITY=1 writes it"
