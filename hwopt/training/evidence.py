"""Profile the first optimizer step, and collect each plugin's evidence that its optimization is active."""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hwopt.errors import PluginError
from hwopt.plugin import Evidence, Observation
from hwopt.plugin.guard import plugin_guard
from hwopt.text import truncate

if TYPE_CHECKING:
    from hwopt.planning.decisions import PluginDecision
    from hwopt.training.run import Run


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
    operators: Counter[str] = Counter()
    matmul_dtypes: Counter[str] = Counter()
    results: Any = getattr(profiler.profiler, "kineto_results", None)
    for event in results.events() if results else ():
        name = event.name()
        operators[name] += 1
        if name in MATMULS:
            dtypes = event.dtypes()
            matmul_dtypes[dtypes[1 if name in ("aten::addmm", "aten::baddbmm") else 0] if dtypes else "?"] += 1
    run.observation = Observation(operators, matmul_dtypes)


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


def collect(run: Run) -> list[tuple[PluginDecision, Evidence]]:
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
        evidence = decision.plugin.evidence(run)
    valid = isinstance(evidence, Evidence) and evidence.status in STATUS and isinstance(evidence.seen, str)
    if not valid:
        raise PluginError(f"{decision.who}: evidence() returned {truncate(evidence)} instead of an Evidence")
    return evidence


def to_dict(collected: list[tuple[PluginDecision, Evidence]], observation: Observation) -> dict[str, Any]:
    """The content of `evidence.json`."""
    return {
        "plugins": [
            {"name": decision.name, "status": evidence.status, "seen": evidence.seen} for decision, evidence in collected
        ],
        "matmul_dtypes": dict(observation.matmul_dtypes),
        "operators": dict(sorted(observation.operators.items())),
    }
