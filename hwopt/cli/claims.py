"""`hwopt claims`: what profiles promise, compared with what their plans predict."""

from __future__ import annotations

import json

import rich_click as click

from hwopt.cli.options import format_option, quiet_libraries, quiet_transformers


@click.command(
    help="Compare the claims of profiles with the forecast of their plans: confirmed, refuted or unknown. Needs no GPU."
)
@click.option("--profile", "profiles", multiple=True, help="A profile's name or TOML file; repeat it; default: all with claims.")
@format_option
def claims(profiles: tuple[str, ...], format_: str) -> None:
    quiet_libraries()
    from hwopt.errors import InputError
    from hwopt.memory.claims import Forecast, profiles_with_claims
    from hwopt.planning.inputs import Inputs
    from hwopt.report.claims import as_dict, show_findings
    from hwopt.report.planning import ProgressLine
    from hwopt.report.terminal import Terminal
    from hwopt.system.cache import cache_folder

    quiet_transformers()
    inputs, progress = Inputs(), ProgressLine()
    names = profiles_with_claims(inputs, profiles)
    if not names:
        raise InputError(f"--profile {' '.join(profiles)}: no claims. `hwopt profiles show NAME` prints a profile")
    forecast = Forecast(inputs, cache_folder(), progress.on_trial)
    try:
        findings = [finding for name in names for finding in forecast.findings(name)]
    finally:
        progress.clear()
    if format_ == "json":
        click.echo(json.dumps([as_dict(finding) for finding in findings], indent=2))
    else:
        show_findings(Terminal(), findings)
