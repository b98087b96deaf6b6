"""`hwopt doctor`: check driver, torch, libraries, memory and disks; with --report, what a bug report needs."""

from __future__ import annotations

from dataclasses import asdict

import rich_click as click

from hwopt.cli.options import announce_loading, format_option, quiet_libraries, say_result
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
    if report:
        return report_machine(format_)
    quiet_libraries()
    status_line.announce("checking the machine")
    from hwopt.hardware.doctor import checks, examine
    from hwopt.report.doctor import show_findings

    findings = examine(checks(cache_folder()))
    document = [{"check": check, **asdict(finding)} for check, finding in findings.items()]
    say_result(format_, document, lambda console: show_findings(console, findings))
    return InputError.exit_code if any(finding.status == "problem" for finding in findings.values()) else 0


def report_machine(format_: str) -> int:
    """Show versions, the machine, and the decision of each plugin on it."""
    announce_loading()
    from hwopt.planning.capabilities import survey
    from hwopt.report.doctor import show_survey

    found = survey()
    say_result(format_, asdict(found), lambda console: show_survey(console, found))
    return 0
