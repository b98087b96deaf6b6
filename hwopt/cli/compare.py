"""`hwopt compare`: runs, or profiles by their plans, side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hwopt.cli.options import begin, format_option, say_result, set_option, trust_option
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
@set_option("For profiles: override a key")
@click.option("--anyway", is_flag=True, help="Compare runs of different jobs.")
@trust_option
@format_option
def compare(subjects: tuple[str, ...], anyway: bool, format_: str, **asked: Any) -> None:
    if len(subjects) < 2:
        raise click.UsageError("Give two or more runs, or two or more profiles.")
    runs = [subject for subject in subjects if is_run(subject)]
    if len(runs) == len(subjects):
        if any(asked.values()):
            raise click.UsageError("--job and --set are for profiles; a run has its own job.")
        compare_runs([Path(subject) for subject in subjects], anyway, format_)
    else:
        refuse_unknown(subjects, runs)
        compare_profiles(subjects, format_, **asked)


def is_run(subject: str) -> bool:
    """Whether `subject` names a run folder, or a folder or file that is not a profile."""
    from hwopt.runs.record import is_run_folder

    path = Path(subject)
    if path.suffix == ".toml":
        return False
    return is_run_folder(path) or is_run_folder(path.parent) or "/" in subject or os.sep in subject


def refuse_unknown(subjects: Sequence[str], runs: Sequence[str]) -> None:
    """Raise InputError for a subject that is not a profile, or if runs and profiles are mixed."""
    from hwopt.config.profile_files import profile_files

    known = list(profile_files())
    profiles = [subject for subject in subjects if subject not in runs]
    for subject in profiles:
        if not subject.endswith(".toml") and subject not in (*known, "auto"):
            raise InputError(
                f"{truncate(subject)} is neither a run folder nor a profile.{nearest(subject, known)} Profiles: {listing(known)}"
            )
    if runs:
        raise InputError(f"{runs[0]} is a run and {profiles[0]} a profile: compare runs, or profiles")


def compare_runs(folders: Sequence[Path], anyway: bool, format_: str) -> None:
    from hwopt.report.comparison import job_differences, runs_to_dict, show_runs
    from hwopt.runs.record import read_records

    records = read_records(folders)
    others = job_differences(records)
    if others and not anyway:
        raise InputError(
            f"Runs of different jobs: {listing(others)} differ. Their speeds and metrics are not comparable. "
            "Compare them all the same with --anyway"
        )
    say_result(format_, runs_to_dict(records), lambda console: show_runs(console, records))


def compare_profiles(profiles: Sequence[str], format_: str, **asked: Any) -> None:
    """Compare the plan of each profile for its card, with its memory, as `hwopt plan --format json` shows it."""
    from hwopt.memory.trace.tracing_process import start_early

    inputs = begin(profiles, **asked)
    start_early(uses_device="auto" in profiles)
    from hwopt import api
    from hwopt.report.comparison import plans_to_dict, show_plans
    from hwopt.report.memory import PlanProgress

    listener, plans = PlanProgress(), []
    for profile in profiles:
        listener.on_trial(profile)
        plans.append(api.plan(profile, gains=False, listener=listener, inputs=inputs, **asked).to_dict())
    say_result(format_, plans_to_dict(plans), lambda console: show_plans(console, plans))
