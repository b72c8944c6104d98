"""Tables of docs/formats.md that say what a session of tests has found. QUERN_WRITE_PARITY=1 writes them, else they are compared."""

import contextlib
import os
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "formats.md"


class Table:
    """Rows by (scheme, dtype, family), filled by the tests of one file."""

    def __init__(self, name, test_file):
        self.name, self.test_file = name, test_file
        self._found = {}

    def add(self, scheme, dtype, family, result):
        self._found[scheme, dtype, family] = result

    @contextlib.contextmanager
    def row(self, scheme, dtype, family):
        self.add(scheme, dtype, family, "differs")
        yield
        self.add(scheme, dtype, family, "equal")

    def text(self):
        """Families with the same result share a line."""
        lines = {}
        for (scheme, dtype, family), result in self._found.items():
            lines.setdefault((scheme, dtype, result), []).append(family)
        rows = [f"| {scheme} | {dtype} | {', '.join(sorted(families))} | {result} |"
                for (scheme, dtype, result), families in sorted(lines.items())]
        return "\n".join(["| scheme | source dtype | families | bytes |", "|---|---|---|---|", *rows])


DEFINITIONS = Table("parity table", "test_formats.py")
MODEL_FREE = Table("model_free_ptq table", "test_model_free.py")
TABLES = (DEFINITIONS, MODEL_FREE)


def check_or_write(table):
    """None, or what is wrong with the table that stands in the document."""
    document = DOCUMENT.read_text()
    begin_mark, end_mark = f"<!-- {table.name}: begin -->", f"<!-- {table.name}: end -->"
    head, begin, rest = document.partition(begin_mark)
    old, end, tail = rest.partition(end_mark)
    if not begin or not end:
        return f"{DOCUMENT} has no place for the {table.name}"
    new = f"\n{table.text()}\n"
    if os.environ.get("QUERN_WRITE_PARITY"):
        DOCUMENT.write_text(head + begin_mark + new + end_mark + tail)
        return None
    return None if new == old else f"the {table.name} in {DOCUMENT} is not what the tests found; QUERN_WRITE_PARITY=1 writes it"
