"""`hwopt doctor`: check driver, torch, libraries, memory and disks; with --report, what a bug report needs."""

from __future__ import annotations

from dataclasses import asdict

import rich_click as click

from hwopt.cli.options import announce_loading, format_option, quiet_libraries, say_json
from hwopt.errors import InputError
from hwopt.report.status_line import status_line
from hwopt.system.cache import cache_folder


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
    if report:
        return report_machine(format_)
    status_line.announce("checking the machine")
    from hwopt.hardware.doctor import checks, examine
    from hwopt.report.doctor import show_findings
    from hwopt.report.terminal import Terminal

    findings = examine(checks(cache_folder()))
    if format_ == "json":
        say_json([{"check": check, **asdict(finding)} for check, finding in findings.items()])
    else:
        show_findings(Terminal(), findings)
    return InputError.exit_code if any(finding.status == "problem" for finding in findings.values()) else 0


def report_machine(format_: str) -> int:
    """Show versions, the machine, and the decision of each plugin on it."""
    announce_loading()
    from hwopt.planning.capabilities import survey
    from hwopt.report.terminal import Terminal, show_survey

    found = survey()
    if format_ == "json":
        say_json(asdict(found))
    else:
        show_survey(Terminal(), found)
    return 0
