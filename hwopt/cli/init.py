"""`hwopt init`: a commented job.toml for a data file and this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from hwopt.cli.options import announce_loading
from hwopt.errors import HwoptError, InputError
from hwopt.report.status_line import folded
from hwopt.system.paths import refuse_output, write_text
from hwopt.text import counted, first_line, printable

if TYPE_CHECKING:
    from hwopt.tasks.recognition import DataColumns

COLUMN_KEYS = ("text", "label", "prompt", "completion", "messages")  # keys of `data` that name columns

EXAMINED_CHATS = 1_000  # conversations that are read for what `init` says of their template


@click.command(help="Look at a data file and at this machine, propose task, columns, model and profile, and write a job.toml.")
@click.argument("data", required=False)
@click.option("-o", "--output", type=Path, default=Path("job.toml"), show_default=True, help="The file to write; it must be new.")
@click.option("--yes", is_flag=True, help="Take every proposal and ask nothing.")
def init(data: str | None, output: Path, yes: bool) -> None:
    if output.suffix != ".toml":
        raise InputError(f"-o {output}: a job ends with .toml: {output.name}.toml")
    refuse_output(output, "-o", "hwopt init overwrites no file. Give another name")
    if not yes and not sys.stdin.isatty():
        raise InputError("hwopt init asks questions, but its input is not a terminal; add --yes to take every proposal")
    if data is None and yes:
        raise InputError("hwopt init --yes needs the data: hwopt init train.csv --yes")
    data = data or click.prompt("Data: a csv, tsv, jsonl, json, parquet or txt file, a folder of images, or a hub name")
    announce_loading()
    from hwopt import api
    from hwopt.report.terminal import Terminal, say

    console = Terminal()
    questions = Questions(ask=not yes)
    columns = api.recognise(data)
    say(console, data, f"{counted(columns.rows, 'row')}; {columns.why}")
    kind = questions.choice("Task", columns.kind, api.task_kinds())
    columns = questions.columns(columns if kind == columns.kind else api.recognise(data, kind))
    proposal = api.propose(columns)
    say(console, "machine", proposal.profile_why)
    say(console, "model", f"{proposal.model.name or 'a small one'}: {proposal.model.why}")
    length, model = proposal.max_length, proposal.model.name
    proposal = proposal.with_answers(
        max_length=length and questions.number("Maximum length in tokens", length),
        model=questions.text("Model" if model else "Model, a hub name or a folder (empty: the small one)", model),
        profile=questions.choice("Profile", proposal.profile, ("auto", *proposal.profiles), show=False),
    )
    write_text(output, proposal.text(output), new=True)
    say(console, "written", str(output))
    usable, notes = examined_chats(output, proposal.profile) if columns.chat else (True, ())
    for note in notes:
        say(console, "data", note)
    if not usable:
        click.echo(f"\nA run would stop here. Correct the data or {printable(str(output))}, then look at a sample:")
    click.echo("\n" + printable("\n".join(proposal.commands(output)[: None if usable else 1])))


def examined_chats(job: Path, profile: str) -> tuple[bool, Sequence[str]]:
    """(whether a run of `job` can use its first conversations, what it says about them, such as how answers are found)."""
    from hwopt import api

    try:
        return True, api.preview(profile, job, assignments=[f"data.max_rows={EXAMINED_CHATS}"]).notes
    except HwoptError as error:  # the job is written, and `hwopt plan` says the same
        return False, [first_line(error)]


class Questions:
    """Asks on the terminal, or takes each proposal."""

    def __init__(self, ask: bool) -> None:
        self.ask = ask

    def choice(self, what: str, proposed: str, accepted: Sequence[str], show: bool = True) -> str:
        if not self.ask:
            return proposed
        choices = f" ({', '.join(accepted)})" if show else ""
        asked = folded(f"{what}{choices} [{proposed}]", sys.stdout)
        return str(click.prompt(asked, default=proposed, type=click.Choice(accepted), show_choices=False, show_default=False))

    def number(self, what: str, proposed: int) -> int:
        return int(click.prompt(what, default=proposed, type=click.IntRange(min=2))) if self.ask else proposed

    def text(self, what: str, proposed: str | None) -> str | None:
        """The answer; None if there is no proposal and the user gives none."""
        return click.prompt(what, default=proposed or "", show_default=proposed is not None) or None if self.ask else proposed

    def columns(self, found: DataColumns) -> DataColumns:
        """`found` with the columns that the user names."""
        keys: dict[str, Any] = dict(found.keys)
        for key, value in found.keys.items():
            if key in COLUMN_KEYS:
                names = [value] if isinstance(value, str) else value
                asked = [self.choice(f"Column for data.{key}", name, found.names) for name in names]
                keys[key] = asked[0] if isinstance(value, str) else asked
        return replace(found, keys=keys)
