"""Out of memory: the same step again in finer micro-batches, loudly, and back again after quiet steps.

No sample is lost or repeated; effective batch, schedule and step count stay. It costs speed alone: a rung halves the rows of
every micro-batch. Training and evaluation have a backoff each, for one must not shrink the other (transformers#32215).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hwopt.errors import DoesNotFitError

QUIET_STEPS = 200
"""Steps without running out before one coarser cut is tried again; doubled each time that this fails."""


FINEST = 20
"""A rung that no rows need."""

KEPT = ("rung", "steps_since_oom", "quiet_steps_needed", "probation", "oom_count", "resorts_used")
"""What a checkpoint has of a backoff."""


@dataclass
class OomBackoff:
    what: str
    """Training or evaluation."""
    key: str
    """What to lower in the profile."""
    warn: Callable[[str], None]
    rung: int = 0
    steps_since_oom: int = 0
    quiet_steps_needed: int = QUIET_STEPS
    probation: int = 0
    """Steps left in which running out means that growing back was too early."""
    oom_count: int = 0
    """How often the device ran out of memory."""
    resorts_used: int = 0
    """How many of the last_resorts were called for."""
    last_resorts: list[Callable[[], str | None]] = field(default_factory=list)
    """What else saves memory, tried in order once every micro-batch is a single row: each says what it costs, or cannot help."""

    def state_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in KEPT}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Where a run goes on nothing is found out again: what saved memory then is on from the start."""
        for name in KEPT:
            setattr(self, name, int(state[name]))
        if not 0 <= self.rung <= FINEST:
            raise ValueError(f"a rung of {self.rung}")
        for _ in range(min(self.resorts_used, len(self.last_resorts))):
            if (cost := self.last_resorts.pop(0)()) is not None:
                self.warn(f"{self.what.lower()} ran out of memory before: {cost}")
        if self.rung:
            self.warn(f"{self.what.lower()} ran out of memory before: micro-batches of 1/{2**self.rung} of the rows")

    def reduce(self, floor: int, where: str, reason: str) -> None:
        """Go one rung down. Raises DoesNotFitError where every micro-batch is a single row already and nothing else helps."""
        self.oom_count += 1
        if self.rung >= floor:
            while self.last_resorts:
                self.resorts_used += 1
                if (cost := self.last_resorts.pop(0)()) is not None:
                    self.warn(f"out of memory in {self.what.lower()} {where} with single rows: from here on {cost}. {reason}")
                    return
            raise DoesNotFitError(
                f"{self.what} does not fit into the device's memory, not even row by row ({where}; {reason}). "
                "Lower data.max_length, add [plugins.checkpointing], or take a smaller model."
            )
        if self.probation:
            self.quiet_steps_needed *= 2
        self.rung, self.steps_since_oom, self.probation = self.rung + 1, 0, 0
        self.warn(
            f"out of memory in {self.what.lower()} {where}: the same rows again in micro-batches of 1/{2**self.rung} of the rows "
            f"(slower, the same result; to start so, lower {self.key}). {reason}"
        )

    def on_pressure(self, floor: int, where: str, reason: str) -> None:
        """Go one rung down before it fails, where there is one."""
        if self.rung < floor:
            self.reduce(floor, where, reason)

    def step_succeeded(self) -> None:
        """A step went through; after enough of them one coarser cut is tried."""
        if not self.rung and not self.probation:
            return
        self.steps_since_oom += 1
        self.probation = max(0, self.probation - 1)
        if self.rung and self.steps_since_oom >= self.quiet_steps_needed:
            self.rung, self.steps_since_oom, self.probation = self.rung - 1, 0, QUIET_STEPS
            self.warn(
                f"{self.what.lower()}: {self.quiet_steps_needed} steps without running out of memory, coarser micro-batches again"
            )
