"""Profile the first and the last optimizer step, and collect each plugin's evidence that its optimization is active."""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from hwopt.errors import PluginError
from hwopt.plugin import Evidence, Observation, verify
from hwopt.plugin.guard import plugin_guard
from hwopt.text import truncate

if TYPE_CHECKING:
    from hwopt.planning.decisions import PluginDecision
    from hwopt.training.run import Run


Collected = list[tuple["PluginDecision", Evidence]]
"""(decision, evidence) of every applied plugin."""
STATUS = ("active", "inactive", "unknown")
MATMULS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::_addmm_activation"})


@contextmanager
def observing(run: Run) -> Iterator[None]:
    """Record the operators that the block calls in `run.observation`. The host's are enough: their names show the kernels."""
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    with silenced():
        profiler.__enter__()
    try:
        yield
    finally:
        with silenced():
            profiler.__exit__(None, None, None)
    results: Any = getattr(profiler.profiler, "kineto_results", None)
    events = results.events() if results else []
    run.observation = Observation(Counter(event.name() for event in events), matmul_dtypes(events))


def matmul_dtypes(events: Iterable[Any]) -> Counter[str]:
    """The dtype of the first matrix of each product that ran -> number of products, from the `events` of torch's profiler.

    Autocast records a product twice: with the dtype that it was called with, and inside that call with the one it is cast to.
    So a call that contains another one does not count.
    """
    calls: dict[int, list[Any]] = {}
    for event in events:
        if event.name() in MATMULS:
            calls.setdefault(event.start_thread_id(), []).append(event)
    found: Counter[str] = Counter()
    for thread in calls.values():
        thread.sort(key=lambda event: (event.start_ns(), -event.duration_ns()))
        for event, following in zip_longest(thread, thread[1:]):
            if following is not None and following.start_ns() < event.start_ns() + event.duration_ns():
                continue
            dtypes = event.dtypes()
            found[dtypes[1 if event.name() in ("aten::addmm", "aten::baddbmm") else 0] if dtypes else "?"] += 1
    return found


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


def collect(run: Run) -> Collected:
    """(decision, evidence) of every applied plugin, in the plan's order."""
    skipped = bool(run.engine.found_inf.item())  # often so with a loss scaler, whose scale starts too high
    collected = []
    for decision in run.plan.applied():
        evidence = evidence_of(decision, run)
        if skipped and evidence.status == "inactive":
            evidence = Evidence.unknown(f"the first update was skipped, its gradients were not finite; {evidence.seen}")
        collected.append((decision, evidence))
    return collected


def evidence_of(decision: PluginDecision, run: Run) -> Evidence:
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
