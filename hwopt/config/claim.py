"""Claim: a figure that a profile promises, with its source; absolute, or a ratio to a baseline."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from hwopt.config.job_values import Table

What = Literal[
    "samples_per_second",
    "steps_per_second",
    "epoch_seconds",
    "total_seconds",
    "matmul_seconds",
    "attention_seconds",
    "update_seconds",
    "eval_samples_per_second",
    "peak_memory_gib",
    "eval_memory_gib",
    "free_memory_gib",
    "states_gib",
    "optimizer_state_gib",
    "activations_gib",
    "largest_train",
    "rows_per_step",
    "trained_parameters",
    "gpu_utilization",
    "cpu_utilization",
    "eval_f1",
]


class Claim(Table):
    """A figure of a profile. With `against` or `against_changes` it is a ratio to the baseline."""

    what: What
    """The quantity. Times in seconds, memory in GiB, utilization in percent, scores as fractions."""
    expect: tuple[float, ...] = Field(min_length=1, max_length=2)
    """The lowest and the highest value; a single one is the lowest."""
    source: str
    said: str = ""
    """The words of the source."""
    against: str = ""
    """The profile that is the baseline."""
    against_changes: tuple[str, ...] = ()
    """`--set` assignments for the baseline, which is this profile unless `against` names another one."""
    changes: tuple[str, ...] = ()
    """`--set` assignments for this profile."""
    samples: int | None = Field(default=None, gt=0)
    """Training samples of an epoch, if not those of `tuned_for`."""
    memory: Literal["nvidia-smi", "allocator"] = "nvidia-smi"
    """The counter of a memory figure: the whole card, or torch's allocator."""
    missing: str = ""
    """Why the claim cannot be checked: what the source leaves out, or what every hwopt run does."""
    note: str = ""
    """Explains a difference."""

    @model_validator(mode="after")
    def require_order(self) -> Claim:
        if len(self.expect) == 2 and self.expect[0] > self.expect[1]:
            raise ValueError(f"expect = {list(self.expect)}: the lowest value comes first")
        return self

    @property
    def low(self) -> float:
        return self.expect[0]

    @property
    def high(self) -> float:
        return self.expect[1] if len(self.expect) == 2 else float("inf")

    @property
    def is_ratio(self) -> bool:
        return bool(self.against or self.against_changes)
