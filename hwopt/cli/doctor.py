"""`hwopt doctor`: check driver, torch, libraries, memory, disks, each with the command that fixes it."""

from __future__ import annotations

import json
from dataclasses import asdict

import rich_click as click

from hwopt.cli.options import format_option, quiet_libraries
from hwopt.errors import InputError
from hwopt.report.status_line import status_line


@click.command(
    help="Check driver, torch, libraries, shared memory, other processes and disks; show the command that fixes each problem. "
    "Exits with 2 if there is a problem."
)
@format_option
def doctor(format_: str) -> int:
    quiet_libraries()
    status_line.announce("checking the machine")
    from hwopt.hardware.doctor import examine

    findings = examine()
    if format_ == "json":
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        from hwopt.report.doctor import show_findings
        from hwopt.report.terminal import Terminal

        show_findings(Terminal(), findings)
    return InputError.exit_code if any(finding.status == "problem" for finding in findings) else 0
