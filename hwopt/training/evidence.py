"""Profile the first and the last optimizer step, and collect each plugin's evidence that its optimization is active."""

from __future__ import annotations

import os
import sys
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from hwopt.errors import PluginError
from hwopt.plugin import Evidence, Observation, RunView, verify
from hwopt.plugin.guard import plugin_guard
from hwopt.text import truncate

if TYPE_CHECKING:
    from hwopt.planning.decisions import PluginDecision

Collected = list[tuple["PluginDecision", Evidence]]
"""(decision, evidence) of every applied plugin."""
LINEAR = "hwopt.linear:"
"""The profiler's ranges of linear layers begin so; the name of the layer follows."""
STATUS = ("active", "inactive", "unknown")
MATMULS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::_addmm_activation"})


@contextmanager
def observing(run: RunView) -> Iterator[None]:
    """Record the operators that the block calls in `run.observation`. The host's are enough: their names show the kernels."""
    from torch.profiler import ProfilerActivity, profile

    if profiler_is_open():
        yield
        run.observation = Observation(missing="your torch.profiler is open, and a second one would empty it")
        return
    profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    with silenced():
        profiler.__enter__()
    try:
        with counted_calls(run.inner_model) as calls:
            yield
    finally:
        with silenced():
            profiler.__exit__(None, None, None)
    results: Any = getattr(profiler.profiler, "kineto_results", None)
    events = results.events() if results else []
    operators = Counter(name for event in events if not (name := event.name()).startswith(LINEAR))
    found = products(events)
    run.observation = Observation(operators, Counter(each.dtype for each in found), calls, linear_dtypes(events, found))


def profiler_is_open() -> bool:
    """Whether a profiler of torch records, or waits in its block for the first step to record."""
    waiting = "ProfilerStep" in torch.autograd.profiler.KinetoStepTracker._step_dict
    return waiting or torch._C._autograd._profiler_enabled()


@contextmanager
def counted_calls(model: Any) -> Iterator[Counter[str]]:
    """Counts the forward calls of each module by name, and lets the profiler record a range for each linear layer.

    Counts nothing in a model with compiled modules: the hooks would make torch compile them again.
    """
    from torch.profiler import record_function

    calls: Counter[str] = Counter()
    ranges: list[Any] = []
    hooks = []

    def count(name: str) -> Any:
        return lambda module, inputs: calls.update((name,))

    def begin(name: str) -> Any:
        def hook(module: Any, inputs: Any) -> None:
            ranges.append(record_function(f"{LINEAR}{name}"))
            ranges[-1].__enter__()

        return hook

    def end(module: Any, inputs: Any, output: Any) -> None:
        ranges.pop().__exit__(None, None, None)

    if not any(module._compiled_call_impl is not None for module in model.modules()):
        for name, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(count(name)))
            if isinstance(module, torch.nn.Linear) and module.weight.is_floating_point():  # not packed in 4 or 8 bit
                hooks.append(module.register_forward_pre_hook(begin(name)))
                hooks.append(module.register_forward_hook(end, always_call=True))
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class Product:
    """A matrix product that ran."""

    thread: int
    start_ns: int
    dtype: str
    """Of its first matrix, as the profiler names it: "c10::BFloat16"."""


def products(events: Iterable[Any]) -> list[Product]:
    """The matrix products among the `events` of torch's profiler, by thread and start.

    Autocast records a product twice: with the dtype that it was called with, and inside that call with the one it is cast to.
    So a call that contains another one does not count.
    """
    calls: dict[int, list[Any]] = {}
    for event in events:
        if event.name() in MATMULS:
            calls.setdefault(event.start_thread_id(), []).append(event)
    found = []
    for number, thread in sorted(calls.items()):
        thread.sort(key=lambda event: (event.start_ns(), -event.duration_ns()))
        for event, following in zip_longest(thread, thread[1:]):
            if following is not None and following.start_ns() < event.start_ns() + event.duration_ns():
                continue
            dtypes = event.dtypes()
            first = 1 if event.name() in ("aten::addmm", "aten::baddbmm") else 0
            found.append(Product(number, event.start_ns(), dtypes[first] if dtypes else "?"))
    return found


def linear_dtypes(events: Iterable[Any], found: Sequence[Product]) -> dict[str, frozenset[str]]:
    """Name of a linear layer -> the dtypes of the products inside its ranges."""
    by_thread: dict[int, list[Product]] = {}
    for product in found:
        by_thread.setdefault(product.thread, []).append(product)
    dtypes: dict[str, frozenset[str]] = {}
    for event in events:
        if event.name().startswith(LINEAR):
            own = by_thread.get(event.start_thread_id(), [])
            first = bisect_left(own, event.start_ns(), key=lambda product: product.start_ns)
            last = bisect_left(own, event.start_ns() + event.duration_ns(), key=lambda product: product.start_ns)
            name = event.name().removeprefix(LINEAR)
            dtypes[name] = dtypes.get(name, frozenset()) | {product.dtype for product in own[first:last]}
    return dtypes


@contextmanager
def silenced() -> Iterator[None]:
    """Hide warnings and stderr in the block: the profiler's C++ code writes to stderr when it starts and stops."""
    sys.stderr.flush()
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


def collect(run: RunView) -> Collected:
    """(decision, evidence) of every applied plugin, in the plan's order."""
    skipped = bool(run.engine.found_inf.item())  # often so with a loss scaler, whose scale starts too high
    collected = []
    for decision in run.plan.applied():
        evidence = evidence_of(decision, run)
        if skipped and evidence.status == "inactive":
            evidence = Evidence.unknown(f"the first update was skipped, its gradients were not finite; {evidence.seen}")
        if (missing := run.observation.missing) and evidence.status != "active":
            evidence = Evidence.unknown(f"{missing}; {evidence.seen}")
        collected.append((decision, evidence))
    return collected if run.world_size == 1 else worst_of_ranks(collected, run.rank)


def worst_of_ranks(collected: Collected, own_rank: int) -> Collected:
    """`collected`, with the evidence of another rank where only that one is inactive. All ranks call it."""
    from accelerate.utils import gather_object

    ranks: list[list[Evidence]] = gather_object([[evidence for _, evidence in collected]])
    found = []
    for index, (decision, own) in enumerate(collected):
        elsewhere = [
            Evidence.inactive(f"on rank {rank}: {evidences[index].seen}")
            for rank, evidences in enumerate(ranks)
            if rank != own_rank and evidences[index].status == "inactive"
        ]
        found.append((decision, elsewhere[0] if elsewhere and own.status != "inactive" else own))
    return found


def evidence_of(decision: PluginDecision, run: RunView) -> Evidence:
    """The evidence of one plugin. Raises PluginError if evidence() raises or returns something else."""
    with plugin_guard(decision.who, "evidence()"):
        evidence = verify(decision.plugin, run)
    valid = isinstance(evidence, Evidence) and evidence.status in STATUS and isinstance(evidence.seen, str)
    if not valid:
        raise PluginError(f"{decision.who}: evidence() returned {truncate(evidence)} instead of an Evidence")
    return evidence


def ceased(first: Collected, last: Collected) -> list[str]:
    """A warning for each plugin that was active in the evidence `first` and is inactive in `last`."""
    before = {decision.name: evidence.status for decision, evidence in first}
    return [
        f"plugin {decision.name!r} was active after the first step and is not any more: {evidence.seen}"
        for decision, evidence in last
        if evidence.status == "inactive" and before.get(decision.name) == "active"
    ]


def to_dict(collected: Collected, observation: Observation, step: int) -> dict[str, Any]:
    """The content of `evidence.json`, from the evidence after `step`."""
    return {
        "step": step,
        "plugins": [
            {"name": decision.name, "status": evidence.status, "seen": evidence.seen} for decision, evidence in collected
        ],
        "matmul_dtypes": dict(observation.matmul_dtypes),
        "operators": dict(sorted(observation.operators.items())),
    }
