"""The result of `hwopt tune`: a row for each trial, and who hears of them while the search runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hwopt.records.throughput import Ratio, Unit
from hwopt.text import cut


@dataclass(frozen=True)
class TrialRow:
    """A trial, as reports show it."""

    number: int
    setting: str
    """What it changes."""
    assignments: tuple[str, ...]
    """The same as arguments of `--set`."""
    rate: float | None
    """Units per second; None for a failure."""
    unit: Unit
    peak_gib: float | None
    ratio: Ratio | None
    """Of its speed to that of the start."""
    failure: str = ""
    message: str = ""

    @property
    def outcome(self) -> str:
        """How it failed, in one line."""
        lines = self.message.strip().splitlines()
        return f"{self.failure}: {cut(lines[0], 160)}" if lines else self.failure


@dataclass(frozen=True)
class TuneResult:
    """What a search found."""

    rows: Sequence[TrialRow]
    best: TrialRow
    ending: str
    file: Path | None = None
    """The profile that was written; None if the start is the best setting."""
    job_sets: Sequence[str] = ()
    """Options of the best setting that the job sets otherwise, so that the profile does not count."""

    @property
    def improved(self) -> bool:
        return self.best.number != 1

    def to_dict(self) -> dict[str, Any]:
        """What `hwopt tune --format json` prints."""
        found = asdict(self) | {"file": None if self.file is None else str(self.file)}
        return {"trials": found.pop("rows"), "best": found.pop("best"), "ended": found.pop("ending"), **found}


class TuneListener:
    """Hears what the search does. Every method does nothing by default."""

    def on_planning(self, what: str) -> None:
        """A part of the preparation begins."""

    def on_begin(self, number: int, most: int, setting: str) -> None:
        """A trial starts."""

    def on_trial(self, row: TrialRow) -> None:
        """A trial ended."""


def rate_text(rate: float) -> str:
    """`rate` with three digits at least."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def ratio_text(ratio: Ratio | None) -> str:
    """The ratio with its 95 % interval."""
    if ratio is None:
        return "-"
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.2f}"
    return f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
