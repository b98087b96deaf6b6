"""The result of a bench: a row for each variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from hwopt.trials.rounds import Speedup

Role = Literal["baseline", "copy", "added", "profile", "left out"]


@dataclass(frozen=True)
class BenchRow:
    """A variant. Figures are medians of the rounds; None: not measured."""

    name: str
    role: Role
    reference: str = ""
    """The variant that its speed is compared with."""
    rounds: int = 0
    rows_per_step: int | None = None
    seconds_per_step: float | None = None
    seconds_per_epoch: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    """Real tokens, without padding."""
    peak_gib: float | None = None
    speedup: Speedup | None = None
    loss: str = ""
    """The losses, compared with those of the reference."""
    loss_agrees: bool | None = None
    """Whether they agree as far as the plugin promises; None: not compared, or it promises nothing."""
    ending: str = "completed"
    """completed, not applied here, does not fit, or how its trial failed."""
    note: str = ""
    """Why it was not measured, and what else there is to say."""

    def to_dict(self) -> dict[str, Any]:
        found = self.speedup
        figures = ("value", "low", "high", "rounds", "clear")
        return asdict(self) | {"speedup": found and {name: getattr(found, name) for name in figures}}


@dataclass(frozen=True)
class Bench:
    """A bench as reports show it."""

    rows: Sequence[BenchRow]
    facts: Mapping[str, str]
    """Job, profile, baseline, machine, versions, date."""
    memory_kind: str = ""
    notes: Sequence[str] = field(default=())

    def row(self, role: Role) -> BenchRow | None:
        """The first row with this role."""
        return next((row for row in self.rows if row.role == role), None)

    def to_dict(self) -> dict[str, Any]:
        """What `hwopt bench --format json` prints."""
        return {
            "facts": dict(self.facts),
            "memory_kind": self.memory_kind,
            "notes": list(self.notes),
            "variants": [row.to_dict() for row in self.rows],
        }
