"""The job's table `training`: hyperparameters, evaluations, checkpoints and the upload."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from hwopt.config.job_values import Table
from hwopt.text import listing

Scheduler = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "warmup_stable_decay",
]
NEEDED_OPTIONS: Mapping[Scheduler, tuple[str, ...]] = {
    "cosine_with_min_lr": ("min_lr_rate", "min_lr"),
    "warmup_stable_decay": ("num_decay_steps",),
}
"""Schedule -> the options of which it needs exactly one."""


def schedule_options(schedule: Scheduler) -> list[str]:
    """The options that transformers has for `schedule`. Imports transformers' schedules, which takes two seconds."""
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, SchedulerType

    given = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")  # by the loop
    return [name for name in signature(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(schedule)]).parameters if name not in given]


def _repository(name: str) -> str:
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    validate_repo_id(name)  # raises a ValueError
    return name


class Training(Table):
    """Hyperparameters, in Hugging Face's words. Steps are optimizer steps."""

    num_train_epochs: float = Field(default=3.0, gt=0)
    max_steps: int | None = Field(default=None, ge=1)
    learning_rate: float = Field(default=5e-5, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    adam_epsilon: float = Field(default=1e-8, gt=0)
    max_grad_norm: float = Field(default=1.0, ge=0)
    """0: no clipping."""
    lr_scheduler_type: Scheduler = "linear"
    lr_scheduler_kwargs: dict[str, int | float | str] = Field(default_factory=dict)
    """Options of the schedule, in transformers' words, such as { min_lr_rate = 0.1 }."""
    warmup_ratio: float | None = Field(default=None, ge=0, le=1)
    warmup_steps: int | None = Field(default=None, ge=0)
    logging_steps: int = Field(default=10, ge=1)
    eval_steps: int | None = Field(default=None, ge=1)
    """Default: at the end of each epoch."""
    save_steps: int | None = Field(default=None, ge=1)
    """Write a checkpoint every N steps, in addition to those of save_minutes."""
    save_minutes: float = Field(default=15.0, ge=0)
    """Write a checkpoint every N minutes; 0: never. SIGTERM and SIGINT always write one."""
    save_total_limit: int = Field(default=2, ge=0)
    """Checkpoints to keep, the newest first; 0 keeps all. The best weights are kept in addition."""
    hang_timeout: float = Field(default=600.0, ge=0)
    """Seconds without a micro-batch after which the run ends with exit code 9 (the first step: ten times as many); 0: never."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do after an update is skipped because a gradient or a loss is not finite."""
    nonfinite_limit: int = Field(default=50, ge=1)
    """Consecutive updates that "skip" or a loss scaler may skip."""
    nonfinite_fraction: float = Field(default=0.1, gt=0, le=1)
    """Fraction of all updates that "skip" may skip; one skipped update is always allowed."""
    loss_spike: Literal["warn", "stop", "off"] = "warn"
    """What to do if a logged loss is far above the recent ones."""
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    early_stopping_patience: int | None = Field(default=None, ge=1)
    """End the run after so many evaluations in a row without a better metric for the best model; default: never."""
    early_stopping_threshold: float = Field(default=0.0, ge=0)
    """An improvement counts for early stopping if it is greater than this."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    push_to_hub: bool = False
    """Upload `final/` to the hub at the end of the run."""
    hub_model_id: Annotated[str, AfterValidator(_repository)] | None = None
    """The repository to upload to, such as "me/my-model"."""
    hub_private_repo: bool = False
    """Create the repository as a private one."""

    @model_validator(mode="after")
    def _consistent(self) -> Training:
        if self.push_to_hub and self.hub_model_id is None:
            raise ValueError('push_to_hub needs hub_model_id = "OWNER/NAME"')
        if self.early_stopping_threshold and self.early_stopping_patience is None:
            raise ValueError("early_stopping_threshold needs early_stopping_patience")
        if self.warmup_ratio is not None and self.warmup_steps is not None:
            raise ValueError("warmup_ratio and warmup_steps exclude each other")
        self._check_schedule()
        return self

    def _check_schedule(self) -> None:
        given, schedule = self.lr_scheduler_kwargs, self.lr_scheduler_type
        known = schedule_options(schedule) if given else []
        if unknown := [key for key in given if key not in known]:
            has = f"its options are {listing(known)}" if known else "it has no options"
            raise ValueError(f"lr_scheduler_kwargs: {schedule} does not know {listing(unknown)}; {has}")
        needed = NEEDED_OPTIONS.get(schedule, ())
        if needed and len([key for key in needed if key in given]) != 1:
            others = "".join(f", or {key}" for key in needed[1:])
            raise ValueError(f"{schedule} needs lr_scheduler_kwargs = {{ {needed[0]} = … }}{others}")
