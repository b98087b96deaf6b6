"""Build the optimizer and the learning-rate schedule of a run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor

from hwopt.config.job_training import Training
from hwopt.errors import InputError, PluginError
from hwopt.text import first_line, listing
from hwopt.training.run import Run

Groups = list[dict[str, Any]]  # torch's parameter groups, each with "params" and, as torch calls it, "param_names"


def build_optimizer(run: Run) -> None:
    """Set the run's step counts, optimizer, scaler and scheduler, and the names of what the optimizer updates.

    A plugin's wrap may regroup parameters or put others in their place (fp32 masters). So names are taken from the final
    optimizer: a tensor that replaces another at the same position has its name.
    """
    recipe = run.recipe
    run.steps_per_epoch = ceil(len(run.prepared.train) / run.batch.step)
    run.total_steps = run.training.max_steps or ceil(run.training.num_train_epochs * run.steps_per_epoch)
    names = {id(parameter): name for name, parameter in run.inner_model.named_parameters()}
    optimizer = (recipe.optimizer or torch.optim.AdamW)(parameter_groups(run))
    state_defaults(optimizer, {"lr": run.training.learning_rate})
    run.scaler = recipe.scaler() if recipe.scaler else run.accelerator.scaler
    for wrap in recipe.optimizer_wraps:
        before = updated_by(optimizer)
        optimizer = wrap(optimizer, run)
        after = updated_by(optimizer)
        if len(before) == len(after):
            replaced = zip(before, after, strict=True)
            names |= {id(new): names[id(old)] for old, new in replaced if id(new) not in names and id(old) in names}
    run.optimizer = optimizer
    unknown = sum(id(parameter) not in names for parameter in updated_by(optimizer))
    if unknown:
        raise PluginError(
            f"recipe.optimizer_wraps: the optimizer updates {unknown} tensors that are not parameters of the model. "
            "Regroup the parameters before another plugin replaces them, or replace them one by one in the same order"
        )
    run.parameter_names = [names[id(parameter)] for parameter in updated_by(optimizer)]
    run.scheduler = make_scheduler(run)


def state_defaults(optimizer: Any, settings: Mapping[str, Any]) -> None:
    """Make `settings` the optimizer's defaults, of which schedules of transformers read "lr". The groups have them already."""
    optimizer.defaults.update({name: value for name, value in settings.items() if name in optimizer.defaults})


def updated_by(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def parameter_groups(run: Run) -> Groups:
    """The groups of the recipe's slot, or the default ones, with the job's hyperparameters where a group has none.

    Raises PluginError unless each trained parameter is in one group.
    """
    training = run.training
    named = [(name, parameter) for name, parameter in run.inner_model.named_parameters() if parameter.requires_grad]
    groups = (run.recipe.parameter_groups or decay_groups)(named, training)
    settings = {
        "lr": training.learning_rate,
        "betas": (training.adam_beta1, training.adam_beta2),
        "eps": training.adam_epsilon,
        "weight_decay": training.weight_decay,
    }
    complete = [
        settings
        | group
        | {"params": [parameter for _, parameter in group["params"]], "param_names": [name for name, _ in group["params"]]}
        for group in groups
        if group["params"]
    ]
    grouped = [name for group in complete for name in group["param_names"]]
    if sorted(grouped) != sorted(name for name, _ in named):
        author = run.recipe.named(run.recipe.author_of("parameter_groups"))
        wrong = sorted({name for name, _ in named} ^ set(grouped)) or sorted({n for n in grouped if grouped.count(n) > 1})
        raise PluginError(
            f"{author}: recipe.parameter_groups must put every trained parameter into exactly one group; see {listing(wrong, 4)}"
        )
    return complete


def decay_groups(named: Sequence[tuple[str, Any]], training: Training) -> Groups:
    """The default groups of (name, parameter): weight decay for all but biases and norms (one dimension), as in HF's Trainer."""
    if not training.weight_decay:
        return [{"params": list(named)}]
    matrices = [(name, parameter) for name, parameter in named if parameter.ndim > 1]
    vectors = [(name, parameter) for name, parameter in named if parameter.ndim <= 1]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def warmup_steps(training: Training, total_steps: int) -> int:
    return ceil((training.warmup_ratio or 0.0) * total_steps) if training.warmup_steps is None else training.warmup_steps


def warn_without_rate(run: Run) -> None:
    """Warn if the learning rate is 0 in all steps, as in a run of one step with a warm-up, which starts at 0."""
    factors = run.scheduler.lr_lambdas
    if not any(factor(step) for factor in factors for step in range(run.total_steps)):
        warmup, total = warmup_steps(run.training, run.total_steps), run.total_steps
        run.warn(
            f"The learning rate is 0 in all {total} step(s) of this run, with {warmup} of warm-up: the model learns nothing. "
            "Train more steps, or set training.warmup_steps = 0"
        )


def make_scheduler(run: Run) -> Any:
    """A LambdaLR that the loop steps once per step batch, whether or not the update was skipped."""
    training, total = run.training, run.total_steps
    if (schedule := run.recipe.schedule) is not None:
        return torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: schedule(step, total))
    # torch warns when an update was skipped; here the schedule advances with every step batch on purpose
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step\\(\\)` before")
    warmup = warmup_steps(training, total)
    if training.lr_scheduler_type == "linear":  # the default; importing transformers' schedules takes two seconds
        return torch.optim.lr_scheduler.LambdaLR(run.optimizer, partial(linear_factor, warmup, total))
    from transformers import get_scheduler

    options = dict(training.lr_scheduler_kwargs)
    if warmup + int(options.get("num_decay_steps", 0)) > total:
        steps = f"{warmup} steps of warm-up and {options['num_decay_steps']} of decay"
        raise InputError(f"training.lr_scheduler_kwargs: {steps} are more than the {total} of the run")
    try:
        return get_scheduler(training.lr_scheduler_type, run.optimizer, warmup, total, options)
    except (TypeError, ValueError) as error:
        raise InputError(f"training.lr_scheduler_kwargs = {options}: {first_line(error)}") from error


def linear_factor(warmup: int, total: int, step: int) -> float:
    """The factor of transformers' schedule "linear": up from 0 over `warmup` steps, then down to 0 at `total`."""
    return step / max(1, warmup) if step < warmup else max(0.0, (total - step) / max(1, total - warmup))
