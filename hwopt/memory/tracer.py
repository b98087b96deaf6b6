"""Traced tier: a step of the plan's recipe on fake tensors. No GPU, no weights, no data; activations included.

In a child process, since emulating a card changes torch for the whole process, and kept on disk under all that it depends on.
The whole depth of the model is traced: BERT-base takes half a second, a decoder of a billion parameters one and a half, so that
nothing has to be extended from fewer layers (docs/decisions/0006-whole-depth-traced.md).
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from zipfile import BadZipFile

import numpy as np
import torch

from hwopt.data.token_store import fingerprint
from hwopt.data.tokenizer_training import planned_config
from hwopt.memory import cuda_emulation as card
from hwopt.memory.dry_run import (
    Shape,
    evaluation,
    label_weights,
    micro_batch_of,
    recipe_on_fakes,
    rehearsing,
    state_first,
    train_step,
)
from hwopt.memory.timeline import Scaled, Timeline
from hwopt.memory.tracker import Tracker
from hwopt.model.config import load_config
from hwopt.planning.plan import Plan

FORMAT = 2
"""Of the files in the cache; counts up with every change of what a trace says."""
ROWS = 8
"""That are traced; any other number follows."""
SECONDS = 300.0
"""A trace that takes longer is given up."""


class NotTraceable(Exception):
    """Fake tensors cannot run this recipe; says why."""


@dataclass(frozen=True)
class Trace:
    """A training step and an evaluation, as functions of rows and, unless `one_width`, of the width."""

    train: Scaled
    eval: Scaled
    one_width: bool


def traced(plan: Plan, width: int, labels: int, cache: Path | None = None) -> Trace:
    """The trace of `plan` around rows of `width` tokens, from `cache` where an equal one was made. Raises NotTraceable."""
    path = None if cache is None else cache / f"{identity(plan, width, labels)}.npz"
    return arranged(kept(path, lambda: in_children(plan, width, labels)), width)


def traced_at(plan: Plan, shape: Shape, labels: int, cache: Path | None = None) -> Timeline:
    """A training step of that very shape: a plugin's collate may lay out few rows otherwise than many. Raises NotTraceable."""
    path = None if cache is None else cache / f"{identity(plan, shape.width, labels, shape.rows)}-exact.npz"
    return kept(path, lambda: Child(plan, labels, "exact", shape).answer())["train.exact"]


def kept(path: Path | None, make: Callable[[], dict[str, Timeline]]) -> dict[str, Timeline]:
    """What is in `path`, or what `make` makes, put there."""
    if path is not None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile):  # none yet, or cut short
            return load(path)
    found = make()
    if path is not None:
        with contextlib.suppress(OSError):  # quickly made again
            path.parent.mkdir(parents=True, exist_ok=True)
            staged = path.with_suffix(f".{os.getpid()}.npz")
            save(staged, found)
            staged.replace(path)
    return found


def identity(plan: Plan, width: int, labels: int, rows: int = ROWS) -> str:
    """Of all that a trace depends on."""
    model, training = plan.job.model, plan.training
    config = planned_config(plan.job, load_config(model.name, model.config, model.revision))
    decided = [
        [entry.name, entry.distribution, entry.decision, entry.options.model_dump(mode="json")]
        for entry in plan.entries
        if not only_sizes(plan, entry.author)
    ]
    job = [plan.job.task.kind, len(plan.job.data.text), labels, width, bool(training.weight_decay), bool(training.max_grad_norm)]
    device = [plan.hardware.device_type, plan.hardware.compute_capability]
    ranks = 1 if plan.recipe.engine is None else plan.world_size  # an engine's stand-in may hold its rank's part
    batch = [plan.batch.widths, plan.batch.pad_to_multiple_of, has_several(plan), ranks]
    return fingerprint(
        [FORMAT, rows, vars(second(width)), dict(plan.software), decided, job, device, batch], config.to_json_string()
    )


def only_sizes(plan: Plan, author: str) -> bool:
    """Whether a plugin sets numbers of rows and nothing else, which a trace does not depend on."""
    written = plan.recipe.written_by_author(author)
    return bool(written) and all(what.startswith("batch[") and "widths" not in what and "pad" not in what for what in written)


def has_several(plan: Plan) -> bool:
    """Whether a step has more than one micro-batch, so that gradients are there while the next one runs."""
    return plan.batch.accumulation(plan.world_size) > 1


def second(width: int) -> Shape:
    """Another shape to trace, whose ratios to the first one no two pairs of powers share.

    The width is near the first: models change what they do at some lengths (a sliding window).
    """
    other = width - max(1, width // 256) * 32 if width >= 64 else max(width // 2, 1)
    return Shape(7 * ROWS, other if other < width else 2 * width)


def arranged(found: dict[str, Timeline], width: int) -> Trace:
    """Raises NotTraceable where the traces are no functions of their shapes."""
    for one_width, name, shape in ((False, "other", second(width)), (True, "taller", Shape(7 * ROWS, width))):
        with contextlib.suppress(ValueError, KeyError):
            train, evaluate = (
                Scaled.fit(found[f"{what}.base"], ROWS, width, found[f"{what}.{name}"], shape.rows, shape.width)
                for what in ("train", "eval")
            )
            return Trace(train, evaluate, one_width)
    raise NotTraceable("a step's operations depend on the number of rows in ways that nobody can foresee")


def save(path: Path, found: dict[str, Timeline]) -> None:
    arrays: dict[str, Any] = {
        f"{name}/{key}": np.asarray(value) for name, timeline in found.items() for key, value in vars(timeline).items()
    }
    with open(path, "wb") as file:
        np.savez_compressed(file, **arrays)


def load(path: Path) -> dict[str, Timeline]:
    with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
        fields: dict[str, dict[str, Any]] = {}
        for key in arrays.files:
            name, _, attribute = key.partition("/")
            fields.setdefault(name, {})[attribute] = arrays[key]
    return {
        name: Timeline(**{key: value if value.ndim else value.item() for key, value in values.items()})
        for name, values in fields.items()
    }


def in_children(plan: Plan, width: int, labels: int) -> dict[str, Timeline]:
    """Training and evaluation at two shapes side by side, by "train.base" and the like; at a third where those two differ."""
    children = [Child(plan, labels, "base", Shape(ROWS, width)), Child(plan, labels, "other", second(width))]
    found = children[0].answer() | children[1].answer()
    if not all(found[f"{what}.base"].same_program(found[f"{what}.other"]) for what in ("train", "eval")):
        found |= Child(plan, labels, "taller", Shape(7 * ROWS, width)).answer()
    return found


class Child:
    """`timelines` in a process of its own: forked where the system can, since it has all modules then."""

    def __init__(self, plan: Plan, labels: int, name: str, shape: Shape) -> None:
        forks = "fork" in multiprocessing.get_all_start_methods() and sys.platform != "darwin"
        context: Any = multiprocessing.get_context("fork" if forks else "spawn")
        self.receiver, sender = context.Pipe(duplex=False)
        bare = plan if forks else replace(plan, recipe=type(plan.recipe)())  # its callables do not pickle; they are written anew
        self.process = context.Process(target=_report, args=(sender, bare, labels, name, shape), daemon=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
            self.process.start()
        sender.close()

    def answer(self) -> dict[str, Timeline]:
        """Raises NotTraceable with the child's error, or where it is dead or takes too long."""
        try:
            if not self.receiver.poll(SECONDS):
                raise NotTraceable(f"it took more than {SECONDS:g} seconds")
            answer = self.receiver.recv()
        except EOFError:
            raise NotTraceable("the tracing process died") from None
        finally:
            self.process.kill()
            self.process.join()
            self.receiver.close()
        if isinstance(answer, str):
            raise NotTraceable(answer)
        return answer  # type: ignore[no-any-return]


def _report(sender: Any, plan: Plan, labels: int, name: str, shape: Shape) -> None:
    gc.freeze()  # the parent's garbage may be a process group, which would wait for threads that a forked process does not have
    torch.set_num_threads(1)  # nor any of these
    warnings.simplefilter("ignore")
    try:
        answer: Any = timelines(plan, labels, name, shape)
    except Exception as error:
        answer = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
    sender.send(answer)
    sender.close()


def timelines(plan: Plan, labels: int, name: str, shape: Shape) -> dict[str, Timeline]:
    """A training step and an evaluation at `shape`; changes torch while it runs."""
    with stepping_on_fakes(plan, labels) as (train, evaluate):
        return {f"train.{name}": train(shape), f"eval.{name}": evaluate(shape)}


Stepping = Callable[[Shape], Timeline]


@contextlib.contextmanager
def stepping_on_fakes(plan: Plan, labels: int) -> Iterator[tuple[Stepping, Stepping]]:
    """(a training step, an evaluation) of the plan's recipe on fake tensors of its hardware, of any shape."""
    tracker = Tracker(card.workspaces(plan.hardware), card.allocates_like(plan.hardware))
    with (
        card.as_on(plan.hardware),
        mock.patch.object(torch.nn.Module, "_apply", apply_in_place),
        tracker,
        rehearsing(plan, recipe_on_fakes(plan), labels, torch.device("cpu")) as run,
    ):
        held = torch.empty(card.cublas_workspace(plan.hardware), dtype=torch.uint8)
        tracker.label([held], "temporary")
        label_weights(run, tracker)
        state_first(run, tracker)
        phases(run, tracker)

        def follow(step: Callable[[Any, Any], None], shape: Shape) -> Timeline:
            gc.collect()  # what is garbage already is no part of the step
            tracker.restart()
            with tracker.making("activations"), no_garbage_collection():
                batch = micro_batch_of(run, shape, training=step is not evaluation)
                batch = replace(batch, buffers={key: tracker.from_tensor(value) for key, value in batch.buffers.items()})
                tracker.add(batch.buffers.values())
                step(run, batch)
                return tracker.timeline()

        gc.collect()
        gc.freeze()  # or every collection would walk through all modules again
        train = partial(train_step, tracker=tracker, several=has_several(plan))
        try:
            yield partial(follow, train), partial(follow, evaluation)
        finally:
            gc.unfreeze()


def apply_in_place(module: Any, function: Callable[[Any], Any], recurse: bool = True) -> Any:
    """`Module._apply`, behind `to` and its like, without swapping parameters: fake ones have references that forbid it."""
    for part in module.modules() if recurse else [module]:
        for parameter in part._parameters.values():
            if parameter is not None:
                parameter.data = function(parameter.data)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = function(buffer)
    return module


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Its times depend on what else the process has done; the order of events must not."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def phases(run: Any, tracker: Tracker) -> None:
    """What backward and update make is temporary, unless it is told apart."""
    backward, finish = run.engine.backward, run.engine.finish

    def watched_backward(*args: Any) -> None:
        with tracker.making("temporary"):
            backward(*args)

    def watched_finish() -> None:
        tracker.updates()
        with tracker.making("temporary"):
            finish()

    run.engine.backward, run.engine.finish = watched_backward, watched_finish
