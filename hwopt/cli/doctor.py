"""`hwopt doctor`: check driver, torch, libraries, memory and disks; with --report, what a bug report needs."""

from __future__ import annotations

import json
from dataclasses import asdict

import rich_click as click

from hwopt.cli.options import announce_loading, format_option, quiet_libraries
from hwopt.errors import InputError
from hwopt.report.status_line import status_line


@click.command(
    help="Check driver, torch, libraries, shared memory, other processes and disks; show the command that fixes each "
    "problem. Exits with 2 if there is a problem."
)
@click.option(
    "--report",
    is_flag=True,
    help="For a bug report: versions, hardware, and what each plugin could do here for a model like BERT-base.",
)
@format_option
def doctor(report: bool, format_: str) -> int:
    quiet_libraries()
    return show_survey(format_) if report else show_findings(format_)


def show_findings(format_: str) -> int:
    """Show each problem with its fix, and return the exit code."""
    status_line.announce("checking the machine")
    from hwopt.hardware.doctor import examine

    findings = examine()
    if format_ == "json":
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        from hwopt.report import doctor as screen
        from hwopt.report.terminal import Terminal

        screen.show_findings(Terminal(), findings)
    return InputError.exit_code if any(finding.status == "problem" for finding in findings) else 0


def show_survey(format_: str) -> int:
    """Show versions, the machine, and the decision of each plugin on it."""
    announce_loading()
    from hwopt.planning.capabilities import survey

    found = survey()
    if format_ == "json":
        click.echo(json.dumps(asdict(found), indent=2, default=str))
        return 0
    from hwopt.report import terminal

    terminal.show_survey(terminal.Terminal(), found)
    return 0
