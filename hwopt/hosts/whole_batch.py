"""A batch that is not split, and losses of sentence-transformers that embed it in mini-batches of any size, with one result."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import send_to_device

from hwopt.errors import DoesNotFitError
from hwopt.hardware.cuda_memory import release_unused_memory
from hwopt.text import first_line


def cached_rows(loss: Any) -> str:
    """`mini_batch_size` of `loss`, as text; "" for other losses."""
    rows, name = getattr(loss, "mini_batch_size", None), type(loss).__name__
    return f"mini_batch_size = {rows} of {name}" if rows and name.startswith("Cached") else ""


def is_default(loss: Any) -> bool:
    """Whether the script leaves the size of the mini-batches of `loss` open."""
    usual = inspect.signature(type(loss)).parameters["mini_batch_size"].default
    return bool(loss.mini_batch_size == usual) and getattr(loss, "mini_batch_num_tokens", None) is None


def set_rows(trainer: Any, rows: int | None) -> None:
    """Let the loss of `trainer` compute `rows` at once until the training ends, and say it; None: as many as the script has."""
    loss: Any = getattr(trainer, "loss", None)
    run = trainer._run
    if not (now := cached_rows(loss)):
        return
    run.stack.callback(setattr, loss, "mini_batch_size", loss.mini_batch_size)
    if rows is None:
        run.say(f"{now} stays: {'no forecast has a larger one' if is_default(loss) else 'your script sets it'}")
    else:
        loss.mini_batch_size = rows
        run.say(f"{cached_rows(loss)}: by the forecast, instead of {now.split()[2]}, the default")


def loss_of_whole(trainer: Any, compute: Callable[..., Any], inputs: Any, count: Any, alone: bool, why: str) -> Any:
    """The loss of the batch `inputs`, which is not split: `why`. `alone`: it is the only one of its step.

    If memory runs out, a loss that computes mini-batches does so again with half of them at once, on one rank.
    Raises DoesNotFitError with what to change.
    """
    args: Any = trainer.args
    loss: Any = getattr(trainer, "loss", None)
    random_states = (torch.get_rng_state(), torch.cuda.get_rng_state_all()) if cached_rows(loss) else None
    while True:
        try:
            return compute(send_to_device(inputs, args.device, non_blocking=True), count)
        except torch.OutOfMemoryError as error:
            if args.auto_find_batch_size:  # Accelerate starts again with fewer rows
                raise
            now, reason = cached_rows(loss), first_line(error)
            if not (random_states and alone and args.world_size == 1 and loss.mini_batch_size > 1):
                rows = now or "per_device_train_batch_size and raise gradient_accumulation_steps"
                raise DoesNotFitError(
                    f"a batch of {args.per_device_train_batch_size} rows does not fit, and it is not split: {why}. "
                    f"Lower {rows}, or set gradient_checkpointing = True ({reason})"
                ) from error
        # after the except block: the exception's frames keep tensors alive
        loss.mini_batch_size //= 2
        trainer._run.warn(f"{now} ran out of memory. The step is repeated with {loss.mini_batch_size} ({reason})")
        torch.set_rng_state(random_states[0])
        torch.cuda.set_rng_state_all(random_states[1])
        for parameter in trainer._run.engine.parameters:
            parameter.grad = None
        release_unused_memory()
