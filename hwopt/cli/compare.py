"""`hwopt compare`: runs, or profiles by their plans, side by side."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import click

from hwopt.cli.options import format_option, trust_option
from hwopt.errors import InputError
from hwopt.text import listing, nearest, truncate


@click.command(
    help="Compare runs, or profiles by their plans: time per epoch, speed with its noise, memory, quality, and what differs. "
    "A is a run folder, or a profile's name or file."
)
@click.argument("subjects", metavar="A B...", nargs=-1, required=True)
@click.option(
    "--job", type=click.Path(path_type=Path), help="For profiles: the job; default: ./job.toml, else the embedded demo."
)
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="For profiles: override a key; repeatable.")
@click.option("--anyway", is_flag=True, help="Compare runs of different jobs.")
@trust_option
@format_option
def compare(subjects: tuple[str, ...], job: Path | None, assignments: tuple[str, ...], anyway: bool, format_: str) -> None:
    if len(subjects) < 2:
        raise click.UsageError("Give two or more runs, or two or more profiles.")
    runs = [subject for subject in subjects if is_run(subject)]
    if len(runs) == len(subjects):
        if job is not None or assignments:
            raise click.UsageError("--job and --set are for profiles; a run has its own job.")
        compare_runs([Path(subject) for subject in subjects], anyway, format_)
    else:
        refuse_unknown(subjects, runs)
        compare_profiles(subjects, job, assignments, format_)


def is_run(subject: str) -> bool:
    """Whether `subject` names a run folder, or a folder or file that is not a profile."""
    from hwopt.runs.record import is_run_folder

    path = Path(subject)
    if path.suffix == ".toml":
        return False
    return is_run_folder(path) or is_run_folder(path.parent) or "/" in subject or os.sep in subject


def refuse_unknown(subjects: Sequence[str], runs: Sequence[str]) -> None:
    """Raise InputError for a subject that is not a profile, or if runs and profiles are mixed."""
    from hwopt.planning.inputs import Inputs

    known = list(Inputs().files)
    for subject in subjects:
        if subject not in runs and not subject.endswith(".toml") and subject not in known and subject != "auto":
            raise InputError(
                f"{truncate(subject)} is neither a run folder nor a profile.{nearest(subject, known)} Profiles: {listing(known)}"
            )
    if runs:
        raise InputError(
            f"{runs[0]} is a run and {next(s for s in subjects if s not in runs)} a profile: compare runs, or profiles"
        )


def compare_runs(folders: Sequence[Path], anyway: bool, format_: str) -> None:
    from hwopt.report.comparison import job_differences
    from hwopt.runs.record import read_record

    records = [read_record(folder) for folder in folders]
    for record in records:
        if not record.log_rows:
            raise InputError(
                f"{record.folder} has no metrics yet: {record.state}. {record.message or 'Wait for its first log point'}"
            )
    others = job_differences(records)
    if others and not anyway:
        raise InputError(
            f"Runs of different jobs: {listing(others)} differ. Their speeds and metrics are not comparable. "
            "Compare them all the same with --anyway"
        )
    if format_ == "json":
        from hwopt.report.comparison import runs_to_dict

        click.echo(json.dumps(runs_to_dict(records), indent=2))
        return
    from hwopt.report.compare_screen import show_runs
    from hwopt.report.terminal import Terminal

    show_runs(Terminal(), records)


def compare_profiles(profiles: Sequence[str], job: Path | None, assignments: Sequence[str], format_: str) -> None:
    plans = planned(profiles, job, assignments)
    if format_ == "json":
        from hwopt.report.comparison import plans_to_dict

        click.echo(json.dumps(plans_to_dict(plans), indent=2, default=str))
        return
    from hwopt.report.compare_screen import show_plans
    from hwopt.report.terminal import Terminal

    show_plans(Terminal(), plans)


def planned(profiles: Sequence[str], job: Path | None, assignments: Sequence[str]) -> list[dict[str, Any]]:
    """The plan of each profile for its card, with its memory, as `hwopt plan --format json` shows it."""
    from hwopt.cli.options import begin, quiet_transformers
    from hwopt.memory.trace.tracing_process import start_early

    inputs = begin(profiles, job, assignments, None)
    start_early()
    from hwopt import api
    from hwopt.planning.plan import Plan
    from hwopt.report.planning import ProgressLine

    quiet_transformers()
    listener = ProgressLine()

    def plan_of(profile: str) -> Plan:
        def resolved(changes: Sequence[str] = ()) -> Plan:
            hardware: Literal["detected", "profile"] = "detected" if profile == "auto" else "profile"
            return api.resolve(profile, job, assignments=[*assignments, *changes], hardware=hardware, inputs=inputs)

        listener.on_trial(profile)
        return api.with_memory(resolved(), resolved, listener=listener)

    try:
        return [plan_of(profile).to_dict() for profile in profiles]
    finally:
        listener.clear()
