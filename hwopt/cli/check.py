"""`hwopt check`: mistakes in a profile, a job, or a training configuration of another tool."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import rich_click as click

from hwopt.cli.options import format_option, quiet_libraries, say_json, say_result
from hwopt.errors import InputError, Problems


def print_schema(context: click.Context, option: click.Parameter, kind: Literal["job", "profile"] | None) -> None:
    """Print the JSON Schema and end the command."""
    if kind is not None:
        from hwopt.planning.schema import schema

        say_json(schema(kind))
        context.exit()


@click.command(
    help="Report what is wrong in a profile, a job, a training script, or a configuration of another tool (Hugging Face "
    "TrainingArguments, axolotl, LLaMA-Factory, accelerate, DeepSpeed), why, and the setting "
    "that fixes it. Exits with 2 if there is an error."
)
@click.option(
    "--schema",
    type=click.Choice(["job", "profile"]),
    is_eager=True,
    expose_value=False,
    callback=print_schema,
    help="Print the JSON Schema of a job or a profile, for editors, and exit.",
)
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--card", metavar="NAME", help="The card to check for, such as 'RTX 3070'; default: that of this machine.")
@click.option("--profile", help="Check for the card of this profile; a job together with the profile's plugins.")
@click.option("--cores", type=click.IntRange(min=1), help="CPU cores of the machine that trains.")
@click.option("--rows", type=click.IntRange(min=1), help="Rows of the training data.")
@click.option("--parameters", type=click.FloatRange(min=1), help="Parameters of the model, such as 110e6.")
@click.option("--max-length", type=click.IntRange(min=1), help="Tokens of the longest sample.")
@click.option("--strict", is_flag=True, help="Exit with 2 for warnings too.")
@format_option
def check(files: tuple[Path, ...], strict: bool, format_: str, **facts: Any) -> int:
    quiet_libraries()
    from hwopt.configs.check.checker import Given, check_file
    from hwopt.report.check import show_reports

    reports, unread = [], Problems()
    for path in files:
        try:
            reports.append(check_file(path, Given(**facts)))
        except InputError as error:
            unread.add(str(error))
    found = [report.to_dict() for report in reports]
    if found:
        say_result(format_, found[0] if len(files) == 1 else found, lambda console: show_reports(console, reports))
    unread.raise_if_any()
    return max(report.exit_code(strict) for report in reports)
