"""Watches the first optimizer step with torch's profiler, and asks every plugin to show that it is really on."""

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
    """Record what runs inside the block into `run.observation`. Only the host's operators: their names tell the kernels."""
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    with silent():
        profiler.__enter__()
    try:
        yield
    finally:
        with silent():
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
def silent() -> Iterator[None]:
    """Without warnings and without the lines that the profiler's C++ code writes to stderr at start and stop, unasked."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def collect(run: Run) -> list[tuple[PluginDecision, Evidence]]:
    """The evidence of every applied plugin, in the plan's order."""
    skipped = bool(run.engine.found_inf.item())  # the one host read of evidence: a loss scaler starts high
    found = []
    for entry in run.plan.applied():
        evidence = _evidence(entry, run)
        if skipped and evidence.status == "inactive":
            evidence = Evidence.unknown(f"the first update was skipped, its gradients were not finite; {evidence.seen}")
        found.append((entry, evidence))
    return found


def _evidence(entry: PluginDecision, run: Run) -> Evidence:
    with plugin_guard(entry.who, "evidence()"):
        evidence = entry.plugin.evidence(run)
    fit = isinstance(evidence, Evidence) and evidence.status in STATUS and isinstance(evidence.seen, str)
    if not fit:
        raise PluginError(f"{entry.who}: evidence() returned {truncate(evidence)} instead of an Evidence")
    return evidence


def to_dict(found: list[tuple[PluginDecision, Evidence]], observation: Observation) -> dict[str, Any]:
    """What `evidence.json` holds."""
    return {
        "plugins": [{"name": entry.name, "status": evidence.status, "seen": evidence.seen} for entry, evidence in found],
        "matmul_dtypes": dict(observation.matmul_dtypes),
        "operators": dict(sorted(observation.operators.items())),
    }
