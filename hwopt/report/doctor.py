"""Print the findings of hwopt.hardware.doctor."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import wrap

from rich.console import Console
from rich.text import Text

from hwopt.hardware.doctor import Finding
from hwopt.report.terminal import LEAST
from hwopt.text import printable

COLOURS = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def show_findings(console: Console, findings: Mapping[str, Finding]) -> None:
    """Print one line for each finding, a second one with its fix, and the numbers of problems and warnings."""
    width = max(map(len, findings))
    for check, finding in findings.items():
        first, *more = wrap(printable(finding.text), max(LEAST, console.width - width - 11), break_on_hyphens=False)
        text = "".join([f"  {check:<{width}}  {first}", *(f"\n{'':<{width + 11}}{line}" for line in more)])
        line = Text.assemble((f"{finding.status:<7}", COLOURS[finding.status]), text)
        console.print(line, soft_wrap=True)
        if finding.fix:  # a command that is broken into lines cannot be copied
            console.print(Text(f"{'':<7}  {'':<{width}}  fix: {printable(finding.fix)}"), soft_wrap=True)
    problems, warnings = (sum(finding.status == status for finding in findings.values()) for status in ("problem", "warning"))
    console.print(f"\nproblems: {problems}, warnings: {warnings}")
