"""Build the optimizer and the learning-rate schedule of a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hwopt.config.job import Training
from hwopt.training.run import Run


def build_optimizer(run: Run) -> None:
    recipe = run.recipe
    run.steps_per_epoch = ceil(len(run.prepared.train) / run.batch.step)
    run.total_steps = run.training.max_steps or ceil(run.training.num_train_epochs * run.steps_per_epoch)
    make_optimizer = recipe.optimizer or torch.optim.AdamW
    groups = parameter_groups(run.inner_model, run.training)
    names = {id(parameter): name for name, parameter in run.inner_model.named_parameters()}
    run.trained = [names[id(parameter)] for group in groups for parameter in group["params"]]
    optimizer = make_optimizer(groups)
    run.scaler = recipe.scaler() if recipe.scaler else run.accelerator.scaler
    for wrap in recipe.optimizer_wraps:
        optimizer = wrap(optimizer, run)
    run.optimizer = optimizer
    run.scheduler = make_scheduler(run)


def parameter_groups(model: Any, training: Training) -> list[dict[str, Any]]:
    """Trainable parameters, biases and norms apart where there is weight decay, which they do not get (as in HF's Trainer)."""
    trained = [p for p in model.parameters() if p.requires_grad]
    settings = {
        "lr": training.learning_rate,
        "betas": (training.adam_beta1, training.adam_beta2),
        "eps": training.adam_epsilon,
    }
    if not training.weight_decay:
        return [{"params": trained, "weight_decay": 0.0, **settings}]
    decayed = {"params": [p for p in trained if p.ndim > 1], "weight_decay": training.weight_decay, **settings}
    plain = {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0, **settings}
    return [group for group in (decayed, plain) if group["params"]]


def warmup_steps(training: Training, total_steps: int) -> int:
    if training.warmup_steps is not None:
        return training.warmup_steps
    return ceil((training.warmup_ratio or 0.0) * total_steps)


def make_scheduler(run: Run) -> Any:
    """A LambdaLR that the loop steps once per step batch, whether or not the update was skipped."""
    if run.recipe.schedule is not None:
        return torch.optim.lr_scheduler.LambdaLR(run.optimizer, partial(_factor, run.recipe.schedule, run.total_steps))
    from transformers import get_scheduler

    training = run.training
    # torch warns when an update was skipped; here the schedule advances with every step batch on purpose
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step\\(\\)` before")
    return get_scheduler(training.lr_scheduler_type, run.optimizer, warmup_steps(training, run.total_steps), run.total_steps)


def _factor(schedule: Callable[[int, int], float], total: int, step: int) -> float:
    return schedule(step, total)
