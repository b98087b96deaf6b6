"""Profile the first and the last optimizer step, and collect each plugin's evidence that its optimization is active."""

from __future__ import annotations

import os
import sys
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from hwopt.errors import PluginError
from hwopt.planning.decisions import PluginDecision
from hwopt.plugin import Evidence, Observation, RunView, verify
from hwopt.plugin.guard import plugin_guard
from hwopt.text import truncate

Collected = list[tuple["PluginDecision", Evidence]]  # (decision, evidence) of every applied plugin
RANGE = "hwopt.module:"  # the profiler's ranges of linear layers and of attention begin so; the name of the module follows
ATTENTION = ("aten::_scaled_dot_product_", "aten::_flash_attention_forward", "flash_attn", "aten::_softmax")
"""Beginnings of the names of the operators that compute attention, or that it calls if it has no kernel of its own."""
STATUS = ("active", "inactive", "unknown")
IN_GRAPH = ("## Call CompiledFxGraph", "(dynamo_timed)")
"""Parts of the names of ranges in which compiled code runs or is made. What is traced while it is made is recorded too."""
MATMULS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::_addmm_activation"})


@contextmanager
def observing(run: RunView) -> Iterator[None]:
    """Record the operators that the block calls in `run.observation`. The host's are enough: their names show the kernels."""
    from torch.profiler import ProfilerActivity, profile

    # another profiler records, or waits in its block for the first step to record
    waiting = "ProfilerStep" in torch.autograd.profiler.KinetoStepTracker._step_dict
    if waiting or torch._C._autograd._profiler_enabled():
        yield
        run.observation = Observation(missing="your torch.profiler is open, and a second one would empty it")
        return
    profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    with silenced():
        profiler.__enter__()
    try:
        with counted_calls(run.inner_model) as calls, compiled_ranges(run.inner_model) as compiled:
            yield
    finally:
        with silenced():
            profiler.__exit__(None, None, None)
    results: Any = getattr(profiler.profiler, "kineto_results", None)
    events = results.events() if results else []
    operators = Counter(name for event in events if not (name := event.name()).startswith(RANGE))
    found, attends = products(events), {*attention_modules(run.inner_model)}
    in_graphs = within(found, ((event, "") for event in events if any(part in event.name() for part in IN_GRAPH)))
    eager = [*{*found} - {*in_graphs.get("", ())}, *attention_calls(events)]
    own = within(eager, ((event, event.name().removeprefix(RANGE)) for event in events if event.name().startswith(RANGE)))
    run.observation = Observation(
        operators,
        Counter(each.dtype for each in found),
        calls,
        {name: frozenset(each.dtype for each in own[name] if each.dtype) for name in own.keys() - attends - compiled},
        {name: frozenset(each.name for each in own[name] if not each.dtype) for name in own.keys() & attends - compiled},
        {name: sum(bool(each.dtype) for each in own[name]) for name in own.keys() & compiled},
    )


@contextmanager
def counted_calls(model: Any) -> Iterator[Counter[str]]:
    """Counts the forward calls of each module by name, and records a range for each linear layer and module with attention.

    Counts nothing in a model with compiled modules: the hooks would make torch compile them again.
    """
    from torch.profiler import record_function

    calls: Counter[str] = Counter()
    ranges: list[Any] = []
    hooks = []

    def end() -> None:
        if ranges:  # none has begun in a module that is being called while its hooks are registered
            ranges.pop().__exit__(None, None, None)

    if not any(module._compiled_call_impl is not None for module in model.modules()):
        attends = {*attention_modules(model)}
        for name, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: calls.update((name,))))
            plain = isinstance(module, torch.nn.Linear) and module.weight.is_floating_point()  # not packed in 4 or 8 bit
            if plain or name in attends:
                begin = partial(record_function, f"{RANGE}{name}")
                hooks.append(module.register_forward_pre_hook(lambda *_, begin=begin: ranges.append(begin().__enter__())))
                hooks.append(module.register_forward_hook(lambda *_: end(), always_call=True))
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def compiled_ranges(model: Any) -> Iterator[set[str]]:
    """The names of the compiled modules; lets the profiler record a range for each call, without a hook."""
    from torch.profiler import record_function

    def ranged(name: str, call: Any) -> Any:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            with record_function(f"{RANGE}{name}"):
                return call(*args, **kwargs)

        return recorded

    compiled = {name: module for name, module in model.named_modules() if module._compiled_call_impl is not None}
    before = {name: module._compiled_call_impl for name, module in compiled.items()}
    during = {name: ranged(name, call) for name, call in before.items()}
    for name, module in compiled.items():
        module._compiled_call_impl = during[name]
    try:
        yield set(compiled)
    finally:
        for name, module in compiled.items():
            if module._compiled_call_impl is during[name]:  # not if it fell back to eager mode
                module._compiled_call_impl = before[name]


def attention_modules(model: Any) -> list[str]:
    """The names of the modules that compute softmax attention, by their class: those without another one inside."""
    named = {name: module for name, module in model.named_modules() if is_attention(module)}
    return [name for name, module in named.items() if sum(map(is_attention, module.modules())) == 1]


def is_attention(module: Any) -> bool:
    name = type(module).__name__
    return "Attention" in name and not any(word in name for word in ("Linear", "Lightning"))


@dataclass(frozen=True)
class Call:
    name: str
    thread: int
    start_ns: int
    dtype: str = ""  # of the first matrix of a product, as the profiler names it: "c10::BFloat16"


def attention_calls(events: Iterable[Any]) -> list[Call]:
    """The forward calls of attention kernels and of softmax among the `events` of torch's profiler."""
    found = (event for event in events if event.name().startswith(ATTENTION) and "backward" not in event.name())
    return [Call(event.name(), event.start_thread_id(), event.start_ns()) for event in found]


def products(events: Iterable[Any]) -> list[Call]:
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
            found.append(Call(event.name(), number, event.start_ns(), dtypes[first] if dtypes else "?"))
    return found


def within(found: Iterable[Call], ranges: Iterable[tuple[Any, str]]) -> dict[str, list[Call]]:
    """Name -> the calls of `found` inside the ranges of this name: (an event of torch's profiler, its name)."""
    by_thread: dict[int, list[Call]] = {}
    for call in sorted(found, key=lambda call: call.start_ns):
        by_thread.setdefault(call.thread, []).append(call)
    inside: dict[str, list[Call]] = {}
    for event, name in ranges:
        own = by_thread.get(event.start_thread_id(), [])
        first = bisect_left(own, event.start_ns(), key=lambda call: call.start_ns)
        last = bisect_left(own, event.start_ns() + event.duration_ns(), key=lambda call: call.start_ns)
        inside.setdefault(name, []).extend(own[first:last])
    return inside


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
    if not (isinstance(evidence, Evidence) and evidence.status in STATUS and isinstance(evidence.seen, str)):
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
