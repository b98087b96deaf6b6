"""Print the findings of hwopt check, and what hwopt import wrote and left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import starmap

from rich.console import Console
from rich.text import Text

from hwopt.configs.check import Finding
from hwopt.configs.check.checker import LEVELS, CheckReport
from hwopt.report.status_line import folded
from hwopt.text import counted, listing, printable

COLOURS = {"error": "bold red", "warning": "yellow", "information": "cyan"}
NAMES = {"error": "error", "warning": "warning", "information": "note"}
WIDTH = max(map(len, NAMES.values()))


def show_reports(console: Console, reports: Iterable[CheckReport]) -> None:
    """Print the format of each file and the card, then each finding with its reason and its fix, and the counts."""
    for report in reports:
        show_line(console, f"{report.file}: {report.format} (by {report.recognised_by})")
        if report.card:
            show_line(console, f"card: {report.card}")
        console.print()
        for finding in report.findings:
            show_finding(console, finding)
        if report.unread:
            show_line(console, f"keys that no rule could read: {listing(report.unread, 20)}")
        for rules in report.waiting:
            show_line(console, f"not checked: {rules}")
        counts = ((report.count(level), NAMES[level]) for level in LEVELS)
        show_line(console, ", ".join(starmap(counted, counts)))


def show_finding(console: Console, finding: Finding) -> None:
    assert finding.level is not None
    head = (f"{NAMES[finding.level]:<{WIDTH}}", COLOURS[finding.level])
    where = "  ".join(filter(None, (finding.place, f"[{finding.rule}]")))
    console.print(Text.assemble(head, f"  {printable(where)}"), soft_wrap=True)
    for line in (finding.what, finding.why, f"fix: {finding.fix}" if finding.fix else ""):
        if line:
            show_line(console, f"{'':<{WIDTH}}  {line}")
    console.print()


def show_left(console: Console, lines: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Print titles with the lines below them."""
    for title, below in lines:
        if below:
            show_line(console, title)
            for line in below:
                show_line(console, f"  {line}")


def show_line(console: Console, text: str) -> None:
    console.print(Text(folded(printable(text), console.file)), soft_wrap=True)
