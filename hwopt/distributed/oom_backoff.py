"""Out-of-memory back-off: the same step again in smaller micro-batches, and larger ones again after enough quiet steps.

No sample is lost or repeated; effective batch, schedule and step count stay. It costs only speed: each rung halves the rows of
every micro-batch. Training, evaluation and inference have a back-off each: one must not shrink the other
(transformers#32215).

Evaluation and inference sort by length, so one outlier comes first in every pass. Their rung holds for
batches of its size only: `rung_for` does not split a batch that is no larger than what fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hwopt.config.aliases import option_for
from hwopt.errors import DoesNotFitError

QUIET_STEPS = 200  # steps without running out of memory before one rung larger is tried; doubled each time that this fails

QUIET_BATCHES = 20  # the same for evaluation and inference, where a failed try costs one forward pass

MAX_RUNG = 20  # more than any number of rows needs

STATE = ("rung", "steps_since_oom", "quiet_steps_needed", "probation", "fitting_tokens", "oom_count", "resorts_used")
"""What a checkpoint holds."""


@dataclass
class OomBackoff:
    what: str  # "Training" or "Evaluation", for messages
    option: str  # the profile option to lower, for messages
    warn: Callable[[str], None]
    splits: bool = True  # whether micro-batches may get smaller; False if the loss is not a sum over them
    rung: int = 0  # how often the rows of a micro-batch are halved
    steps_since_oom: int = 0
    quiet_steps_needed: int = QUIET_STEPS
    probation: int = 0  # steps left in which running out of memory means that growing back was too early
    fitting_tokens: int = 0  # tokens of the largest micro-batch of an evaluation that fitted since memory last ran out
    oom_count: int = 0  # how often the device ran out of memory
    resorts_used: int = 0  # how many of `last_resorts` were called
    advice: str = ""  # what to change if not even a single row fits; default: the keys of the job and the profile
    last_resorts: list[Callable[[], str | None]] = field(default_factory=list)
    """Called in order once every micro-batch is a single row: each returns what it costs, or None if it cannot help."""

    def state_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in STATE}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the rung, and what saved memory before the checkpoint."""
        for name in STATE:
            setattr(self, name, int(state[name]))
        if not 0 <= self.rung <= MAX_RUNG:
            raise ValueError(f"a rung of {self.rung}")
        for _ in range(min(self.resorts_used, len(self.last_resorts))):
            if (cost := self.last_resorts.pop(0)()) is not None:
                self.warn(f"{self.what} ran out of memory before the checkpoint: {cost}")
        if self.rung:
            self.warn(f"{self.what} ran out of memory before the checkpoint: micro-batches have 1/{2**self.rung} of the rows")

    def rung_for(self, largest: Callable[[int], int]) -> int:
        """The rung for a batch; coarser than `rung` if micro-batches of `largest(rung)` tokens have fitted."""
        coarser = (rung for rung in range(self.rung) if largest(rung) <= self.fitting_tokens)
        return next(coarser, self.rung)

    def reduce(self, finest_rung: int, where: str, reason: str, tried: int | None = None) -> None:
        """Go to the next rung after `tried` (default: `rung`) did not fit. Raises DoesNotFitError if single rows do not."""
        tried = self.rung if tried is None else tried
        self.oom_count += 1
        self.fitting_tokens = 0
        if tried >= finest_rung or not self.splits:
            self._use_last_resort(where, reason)
            return
        if tried == self.rung:
            if self.probation:
                self.quiet_steps_needed *= 2
            self.rung, self.probation = self.rung + 1, 0
        self.steps_since_oom = 0
        self.warn(f"{self.retry_message(where, self.rung)} {reason}")

    def retry_message(self, where: str, rung: int) -> str:
        """What happens after memory ran out `where`, and how to avoid it."""
        return (
            f"{self.what} ran out of memory {where}: retrying the same rows in micro-batches of 1/{2**rung} of the rows. "
            f"The result stays the same, steps are slower. To start with this size, lower {self.option}."
        )

    def _use_last_resort(self, where: str, reason: str) -> None:
        while self.last_resorts:
            self.resorts_used += 1
            if (cost := self.last_resorts.pop(0)()) is not None:
                self.warn(f"{self.what} ran out of memory {where} with single rows: {cost} from now on. {reason}")
                return
        advice = f"Lower data.max_length, set {option_for('gradient_checkpointing')}, or use a smaller model."
        raise DoesNotFitError(
            f"{self.what} does not fit into the device's memory, not even row by row ({where}; {reason}). {self.advice or advice}"
        )

    def on_pressure(self, finest_rung: int, where: str, reason: str) -> None:
        """Go to the next rung before an allocation fails, if there is one."""
        if self.splits and self.rung < finest_rung:
            self.reduce(finest_rung, where, reason)

    def batch_succeeded(self, rung: int, tokens: int) -> None:
        """Count a batch of evaluation that fitted at `rung`; `tokens`: of its largest micro-batch.

        A batch at a coarser rung than `self.rung` says nothing about larger ones: it does not count as a quiet step.
        """
        if self.rung:
            self.fitting_tokens = max(self.fitting_tokens, tokens)
        if rung == self.rung:
            self.step_succeeded()

    def step_succeeded(self) -> None:
        """Count a step without an error; after enough of them, try one rung larger."""
        if not self.rung and not self.probation:
            return
        self.steps_since_oom += 1
        self.probation = max(0, self.probation - 1)
        if self.rung and self.steps_since_oom >= self.quiet_steps_needed:
            self.rung, self.steps_since_oom, self.probation = self.rung - 1, 0, QUIET_STEPS
            self.warn(f"{self.what}: {self.quiet_steps_needed} steps without running out of memory, trying larger micro-batches")
