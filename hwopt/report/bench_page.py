"""The HTML page of a bench: one file that loads nothing, in a light and a dark theme."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from hwopt.errors import StorageError
from hwopt.report.bench import COLUMNS, cells, legend, verdict
from hwopt.report.page import table
from hwopt.report.verdicts import Line
from hwopt.text import cut, printable
from hwopt.trials.bench_rows import Bench


def bench_page(bench: Bench, command: str) -> str:
    """The page of `bench`, which `command` measured."""
    environment = Environment(
        loader=PackageLoader("hwopt", "report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("bench.html").render(
        title=cut(printable(f"What {bench.facts.get('profile', 'the profile')} gains"), 200),
        version=version("hwopt"),
        facts=[(label, printable(text)) for label, text in bench.facts.items()],
        notes=[printable(note) for note in bench.notes],
        verdict=[Line(line.label, printable(line.text), line.grade) for line in verdict(bench)],
        variants=table(speed_first(COLUMNS), [speed_first(cells(row)) for row in bench.rows], "Medians of the rounds"),
        legend=list(legend(bench).items()),
        command=printable(command),
    )


def speed_first(row: Sequence[str]) -> Sequence[str]:
    """The cells of a row with the speed beside the name: a narrow window shows both."""
    place = COLUMNS.index("speed")
    return (row[0], row[place], *row[1:place], *row[place + 1 :])


def write_bench_page(bench: Bench, path: Path, command: str) -> None:
    """Write the page of `bench`. Raises StorageError if the file cannot be written."""
    try:
        path.write_text(bench_page(bench, command), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error.strerror or error}") from error
