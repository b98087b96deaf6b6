"""Traced tier: run a step of the plan's recipe on fake tensors. Needs no GPU, weights or data, and counts activations.

The trace runs in a child process, because emulating a card changes torch for the whole process. It is cached on disk under a
hash of everything that it depends on. All layers are traced, not extrapolated from a few. BERT-base takes half a second, a
decoder of a billion parameters one and a half (docs/decisions/0006-whole-depth-traced.md).
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
    dry_run_of,
    dummy_micro_batch,
    evaluation_step,
    fake_recipe,
    label_storages,
    make_optimizer_state,
    train_step,
)
from hwopt.memory.timeline import Scaled, Timeline
from hwopt.memory.tracker import Tracker
from hwopt.model.config import load_config
from hwopt.planning.plan import Plan

FORMAT = 6
"""Version of the cache files; increase it with every change of a trace's content."""
ROWS = 8
"""Rows of the traced micro-batch; the trace is then scaled to any other number."""
TIMEOUT_SECONDS = 300.0


class NotTraceable(Exception):
    """Fake tensors cannot run this recipe. The message says why."""


@dataclass(frozen=True)
class Trace:
    """A training step and an evaluation as functions of the rows and, unless `fixed_width`, of the width."""

    train: Scaled
    eval: Scaled
    fixed_width: bool


def trace_plan(plan: Plan, width: int, labels: int, cache: Path | None = None) -> Trace:
    """Return the trace of `plan` for rows of about `width` tokens, from `cache` if it is there. Raises NotTraceable."""
    path = None if cache is None else cache / f"{trace_key(plan, width, labels)}.npz"
    return fit_trace(cached_timelines(path, lambda: trace_in_children(plan, width, labels)), width)


def trace_exact_shape(plan: Plan, shape: Shape, labels: int, cache: Path | None = None) -> Timeline:
    """Return a training step of exactly `shape`, for a collate that lays out few rows differently. Raises NotTraceable."""
    path = None if cache is None else cache / f"{trace_key(plan, shape.width, labels, shape.rows)}-exact.npz"
    return cached_timelines(path, lambda: Child(plan, labels, "exact", shape).answer())["train.exact"]


def cached_timelines(path: Path | None, make: Callable[[], dict[str, Timeline]]) -> dict[str, Timeline]:
    """Load the timelines in `path`, or make them and save them there."""
    if path is not None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile):  # no file, or an incomplete one
            return load(path)
    found = make()
    if path is not None:
        with contextlib.suppress(OSError):  # the cache is optional
            path.parent.mkdir(parents=True, exist_ok=True)
            staged = path.with_suffix(f".{os.getpid()}.npz")
            save(staged, found)
            staged.replace(path)
    return found


def trace_key(plan: Plan, width: int, labels: int, rows: int = ROWS) -> str:
    """Return the cache key: a hash of everything that a trace depends on."""
    model, training = plan.job.model, plan.training
    config = planned_config(plan.job, load_config(model.name, model.config, model.revision))
    decided = [
        [entry.name, entry.distribution, entry.decision, entry.options.model_dump(mode="json")]
        for entry in plan.entries
        if not only_sizes(plan, entry.author)
    ]
    job = [plan.job.task.kind, len(plan.job.data.text), labels, width, bool(training.weight_decay), bool(training.max_grad_norm)]
    device = [plan.hardware.device_type, plan.hardware.compute_capability, plan.hardware.multiprocessors]
    ranks = 1 if plan.recipe.engine is None else plan.world_size  # an engine's stand-in may hold one rank's shard
    batch = [plan.batch.widths, plan.batch.pad_to_multiple_of, accumulates_gradients(plan), ranks]
    return fingerprint(
        [FORMAT, rows, vars(second_shape(width)), dict(plan.software), decided, job, device, batch], config.to_json_string()
    )


def only_sizes(plan: Plan, author: str) -> bool:
    """Whether a plugin sets only numbers of rows, on which a trace does not depend."""
    written = plan.recipe.written_by_author(author)
    return bool(written) and all(what.startswith("batch[") and "widths" not in what and "pad" not in what for what in written)


def accumulates_gradients(plan: Plan) -> bool:
    """Whether a step has several micro-batches, so that gradients of the first are in memory while the next one runs."""
    return plan.batch.accumulation(plan.world_size) > 1


def second_shape(width: int) -> Shape:
    """Return the second shape to trace. No two pairs of powers (rows, width) give the same ratio to the first shape.

    Its width is close to the first: some models run other operations above a certain length (a sliding window).
    """
    other = width - max(1, width // 256) * 32 if width >= 64 else max(width // 2, 1)
    return Shape(7 * ROWS, other if other < width else 2 * width)


def fit_trace(found: dict[str, Timeline], width: int) -> Trace:
    """Return the traces as functions of the shape. Raises NotTraceable if they are not."""
    for fixed_width, name, shape in ((False, "other", second_shape(width)), (True, "taller", Shape(7 * ROWS, width))):
        with contextlib.suppress(ValueError, KeyError):
            train, evaluate = (
                Scaled.fit(found[f"{what}.base"], ROWS, width, found[f"{what}.{name}"], shape.rows, shape.width)
                for what in ("train", "eval")
            )
            return Trace(train, evaluate, fixed_width)
    raise NotTraceable("the operations of a step change with the number of rows")


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


def trace_in_children(plan: Plan, width: int, labels: int) -> dict[str, Timeline]:
    """Trace training and evaluation at two shapes in parallel, and at a third if the two ran other operations.

    Returns the timelines by "train.base", "eval.other" and so on.
    """
    children = [Child(plan, labels, "base", Shape(ROWS, width)), Child(plan, labels, "other", second_shape(width))]
    found = children[0].answer() | children[1].answer()
    if not all(found[f"{what}.base"].same_program(found[f"{what}.other"]) for what in ("train", "eval")):
        found |= Child(plan, labels, "taller", Shape(7 * ROWS, width)).answer()
    return found


class Child:
    """Runs `timelines` in a child process, forked if the system supports it: a forked child has all modules loaded."""

    def __init__(self, plan: Plan, labels: int, name: str, shape: Shape) -> None:
        forks = "fork" in multiprocessing.get_all_start_methods() and sys.platform != "darwin"
        context: Any = multiprocessing.get_context("fork" if forks else "spawn")
        self.receiver, sender = context.Pipe(duplex=False)
        # the recipe's callables cannot be pickled; the child writes the recipe again
        picklable = plan if forks else replace(plan, recipe=type(plan.recipe)())
        self.process = context.Process(target=_report, args=(sender, picklable, labels, name, shape), daemon=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
            self.process.start()
        sender.close()

    def answer(self) -> dict[str, Timeline]:
        """Return the timelines. Raises NotTraceable with the child's error, or if the child died or timed out."""
        try:
            if not self.receiver.poll(TIMEOUT_SECONDS):
                raise NotTraceable(f"tracing took more than {TIMEOUT_SECONDS:g} seconds")
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
    gc.freeze()  # collecting the parent's process group would wait for threads that a forked process does not have
    torch.set_num_threads(1)  # a forked process has no thread pool either
    warnings.simplefilter("ignore")
    try:
        answer: Any = timelines(plan, labels, name, shape)
    except Exception as error:
        answer = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
    sender.send(answer)
    sender.close()


def timelines(plan: Plan, labels: int, name: str, shape: Shape) -> dict[str, Timeline]:
    """Trace a training step and an evaluation at `shape`. Changes torch for the whole process meanwhile."""
    with fake_step_functions(plan, labels) as (train, evaluate):
        return {f"train.{name}": train(shape), f"eval.{name}": evaluate(shape)}


StepFunction = Callable[[Shape], Timeline]


@contextlib.contextmanager
def fake_step_functions(plan: Plan, labels: int) -> Iterator[tuple[StepFunction, StepFunction]]:
    """Yield (training step, evaluation): functions that run the recipe on fake tensors of a shape and return the timeline."""
    tracker = Tracker(card.workspaces(plan.hardware), card.allocation_granularity(plan.hardware))
    with (
        card.emulated(plan.hardware),
        mock.patch.object(torch.nn.Module, "_apply", apply_in_place),
        tracker,
        dry_run_of(plan, fake_recipe(plan), labels, torch.device("cpu")) as run,
    ):
        workspaces = [torch.empty(size, dtype=torch.uint8) for size in card.cublas_workspaces(plan.hardware)]
        tracker.label(workspaces, "temporary")
        tracker.expandable = card.expandable_segments()
        label_storages(run, tracker)
        make_optimizer_state(run, tracker)
        label_phases(run, tracker)

        def trace(step: Callable[[Any, Any], None], shape: Shape) -> Timeline:
            gc.collect()  # earlier garbage is not part of the step
            tracker.reset()
            with tracker.new_storages_are("activations"), garbage_collection_off():
                batch = dummy_micro_batch(run, shape, training=step is not evaluation_step)
                batch = replace(batch, buffers={key: tracker.from_tensor(value) for key, value in batch.buffers.items()})
                tracker.add(batch.buffers.values())
                step(run, batch)
                return tracker.timeline()

        gc.collect()
        gc.freeze()  # otherwise every collection scans all modules
        train = partial(train_step, tracker=tracker, accumulates=accumulates_gradients(plan))
        try:
            yield partial(trace, train), partial(trace, evaluation_step)
        finally:
            gc.unfreeze()


def apply_in_place(module: Any, function: Callable[[Any], Any], recurse: bool = True) -> Any:
    """`Module._apply` (called by `to` and `half`) without swapping parameters, which the references to fake tensors forbid."""
    for part in module.modules() if recurse else [module]:
        for parameter in part._parameters.values():
            if parameter is not None:
                parameter.data = function(parameter.data)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = function(buffer)
    return module


@contextlib.contextmanager
def garbage_collection_off() -> Iterator[None]:
    """Disable garbage collection: its timing depends on earlier work, and the order of events must not."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def label_phases(run: Any, tracker: Tracker) -> None:
    """Label what backward and update allocate as temporary; gradients and state get their own label."""
    backward, finish = run.engine.backward, run.engine.finish

    def labelled_backward(*args: Any) -> None:
        tracker.begin_backward()
        with tracker.new_storages_are("temporary"):
            backward(*args)

    def labelled_finish() -> None:
        tracker.begin_update()
        with tracker.new_storages_are("temporary"):
            finish()

    run.engine.backward, run.engine.finish = labelled_backward, labelled_finish
