"""`hwopt import`: a training configuration of another tool as a profile and a job."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from hwopt.cli.options import format_option, quiet_libraries, say_result, set_option


@click.command(
    name="import",
    help="Write profile.toml and job.toml for a configuration of another tool, with its comments, and list what has no "
    "equivalent. Overwrites no file.",
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The folder for the two files.")
@click.option("--name", help="The profile's name; default: that of the file.")
@click.option("--card", metavar="NAME", help="Give the profile the figures of this card, such as 'RTX 3070'.")
@set_option("A key of the job, such as model.name")
@format_option
def import_(file: Path, output: Path, name: str | None, card: str | None, assignments: tuple[str, ...], format_: str) -> None:
    quiet_libraries()
    from hwopt.configs.imported_files import import_file, write_imported
    from hwopt.planning.inputs import Inputs
    from hwopt.report.check import show_left

    inputs = Inputs()
    profile = None if card is None else inputs.profile_of_card(card)
    files = import_file(file, inputs, name, None if profile is None else (profile.name, profile.card), assignments)
    write_imported(files, output)
    kinds, shown = {True: "ignored", False: "no equivalent"}, ("key", "value", "place", "reason", "comments")
    left = [{"kind": kinds[each.on_purpose]} | {name: getattr(each, name) for name in shown} for each in files.translation.left]
    taken = {".".join(each.key): each.value for each in files.translation.taken}
    document = {"taken": taken, "left": left, "placeholders": files.missing}
    say_result(format_, document, lambda console: show_left(console, files.summary(output)))
