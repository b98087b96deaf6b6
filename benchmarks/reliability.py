"""Write the figures of the soak tests into the table of docs/reliability.md.

    HWOPT_FIGURES=figures.jsonl pytest -m soak && python benchmarks/reliability.py figures.jsonl docs/reliability.md

Rows that this run did not measure stay as they are.
"""

from __future__ import annotations

import json
import platform
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path

BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"


def rows_of(table: str) -> dict[str, str]:
    """First cell -> whole line, of the existing table."""
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    return {line.split("|")[1].strip(): line for line in lines}


def measured(path: Path) -> dict[str, list[str]]:
    """What was measured -> its figures, without duplicates."""
    found: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        figures = found.setdefault(row["what"], [])
        if row["figure"] not in figures:
            figures.append(row["figure"])
    return found


def main(figures: str, document: str) -> None:
    path = Path(document)
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    table, _, after = rest.partition(END)
    on = f"{date.today().isoformat()}, torch {version('torch')}, Python {platform.python_version()}, {platform.system()}"
    rows = rows_of(table)
    for what, found in measured(Path(figures)).items():
        rows[what] = f"| {what} | {'; '.join(found)} | {on} |"
    lines = ["| what | measured | on |", "|---|---|---|", *rows.values()]
    path.write_text("\n".join([before + BEGIN, *lines, END + after]), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
