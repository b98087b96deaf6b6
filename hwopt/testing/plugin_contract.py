"""The contract test: what every plugin must fulfil, checked with a tiny training run."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hwopt import api
from hwopt.hardware.device import Hardware
from hwopt.planning.decisions import PluginDecision, helps_oom
from hwopt.planning.parts import write_recipe
from hwopt.planning.plan import Plan
from hwopt.plugin import Evidence, Plugin
from hwopt.plugin.recipe import SLOTS
from hwopt.plugin.registry import Registry
from hwopt.testing.tiny_run import Recorder, plan_for, rewound, saved_bits, tiny_job, tiny_profile, train_tiny


@dataclass(frozen=True)
class ContractReport:
    """The plan that `check_contract_of` used, and the rules that it checked."""

    plan: Plan
    checked: tuple[str, ...]
    not_checked: tuple[str, ...] = ()
    """Rules that need a machine with the described hardware."""


def check_contract_of(
    name: str,
    folder: Path,
    options: Mapping[str, Any] | None = None,
    registry: Registry | None = None,
    kind: str = "text-classification",
    beside: Mapping[str, Mapping[str, Any]] | None = None,
    hardware: Hardware | None = None,
) -> ContractReport:
    """Train a tiny model with the plugin `name`, and assert the rules that every plugin must fulfil.

    `probe`, `apply` and `memory` are pure, and the decision has a reason. The run trains and saves. Its losses agree with a run
    without the plugin according to `effect` ("bits": equal, "rounding": close). The evidence is active after the first and the
    last step, and reads no options, plan or recipe. A run resumed from a checkpoint ends with the same bits.

    `kind`: the kind of the task; "causal-lm" for a plugin that skips classification. `beside`: tables of plugins that it needs.
    A plugin that is skipped on this machine fails. Pass `hardware=described(...)` on which it applies; the number of ranks is its
    `count`. Then only decision, recipe and memory are checked, nothing is trained, and the report lists the rest as not checked.
    """
    registry = registry or Registry()
    job = tiny_job(folder / "data", kind, save_steps=2)
    profile = tiny_profile(**(beside or {}), **{name: dict(options or {})})
    ranks = 1 if hardware is None else hardware.count
    plan = plan_for(profile, job, registry, hardware=hardware, world_size=ranks)
    check_decision_of(name, plan, plan_for(profile, job, registry, hardware=hardware, world_size=ranks))
    check_recipe_of(name, plan)
    check_memory_of(name, plan)
    checked = ("decision", "recipe", "memory")
    if hardware is not None:
        return ContractReport(plan, checked, ("evidence", "effect", "resume"))
    with_it = Witness(name)
    train_tiny(plan, folder / "with", with_it)
    check_evidence_of(name, with_it)
    assert (folder / "with" / "run" / "final" / "config.json").is_file()
    # a plugin that only sets hyperparameters (batch sizes, warm-up) changes the training on request
    effect = entry_of(name, plan).plugin.effect
    if effect != "method" and not set(plan.recipe.fields_of(entry_of(name, plan).author)) <= {"batch", "training"}:
        tolerance = 0.0 if effect == "bits" else ROUNDING if with_it.in_fp32 else HALF_ROUNDING
        without = baseline_losses(plan_for(tiny_profile(**(beside or {})), job, registry), folder / "without")
        for ours, theirs in zip(with_it.losses, without, strict=True):
            assert math.isclose(ours, theirs, rel_tol=tolerance), (
                f"{name} declares effect = {effect!r}, but the losses differ: {ours} with the plugin, {theirs} without"
            )
    check_resume_of(name, plan_for(profile, job, registry), folder)
    return ContractReport(plan, (*checked, "evidence", "effect", "resume"))


ROUNDING, HALF_ROUNDING = 1e-4, 2e-2
"""Largest relative difference of a loss that rounding explains, in fp32 and with lower precision. A sample that is left out, or a
document that sees another one, changes a loss of the tiny model by more than the first."""

NOT_OBSERVED = ("plan", "recipe", "training", "batch", "loss")
"""Attributes of a run that say what was asked for, not what runs. `loss` is the recipe's."""


class ObservedRun:
    """A run whose attributes are read through this object; those of NOT_OBSERVED raise AssertionError."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Any:
        assert name not in NOT_OBSERVED, f"evidence() reads run.{name}, which is what was asked for. Read the running objects"
        return getattr(self._run, name)


class NoOptions:
    """The options of a plugin while its evidence is collected: reading one raises AssertionError."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"evidence() reads options.{name}. Return what is found, and compare it in expects()")


def observed_evidence(plugin: Plugin, run: Any) -> Evidence:
    """The evidence of `plugin` without access to options, plan and recipe, compared with what its options ask for.

    Raises AssertionError if evidence() reads one of them.
    """
    blind = copy(plugin)
    blind.options = NoOptions()
    return blind.evidence(ObservedRun(run)).compared(plugin.expects())


class Witness(Recorder):
    """A recorder that also collects the evidence of one plugin without its options, the plan and the recipe."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.in_fp32 = False

    def on_evidence(self, run: Any, found: list[Any]) -> None:
        super().on_evidence(run, found)
        self.in_fp32 = set(run.observation.matmul_dtypes) <= {"float"} and torch.backends.cuda.matmul.fp32_precision != "tf32"
        observed_evidence(entry_of(self.name, run.plan).plugin, run)


def check_evidence_of(name: str, recorder: Recorder) -> None:
    """Assert that the evidence of the plugin `name` has a text, and is active after the first and the last step."""
    for when, collected in (("first", recorder.found), ("last", recorder.found_at_end)):
        evidence = next(evidence for found, evidence in collected if found.name == name)
        assert evidence.seen, f"{name}: the evidence has no text"
        assert evidence.status == "active", (
            f"{name} was applied, but its evidence is {evidence.status} after the {when} step: {evidence.seen}; "
            f"warnings: {recorder.warnings}"
        )


def entry_of(name: str, plan: Plan) -> PluginDecision:
    """The decision for the plugin `name` in `plan`."""
    return next(entry for entry in plan.entries if entry.name == name)


def check_decision_of(name: str, plan: Plan, again: Plan) -> None:
    """Assert that the decisions of `plan` and `again`, resolved from the same input, are equal, have reasons and do not skip."""
    assert [e.to_dict() for e in plan.entries] == [e.to_dict() for e in again.entries], f"{name}: probe() must be pure"
    entry = entry_of(name, plan)
    assert len(entry.reason.split()) >= 2, f"{name}: a decision needs a reason of at least two words, got {entry.reason!r}"
    assert entry.decision != "skip", (
        f"{name} is skipped on {plan.hardware.name}, so nothing can be tested: {entry.reason}. "
        "Pass hardware=described(...) on which the plugin applies"
    )
    if helps_oom(type(entry.plugin)):
        type(entry.plugin).Options()  # must work without a table


def check_recipe_of(name: str, plan: Plan) -> None:
    """Assert that `apply` writes to the recipe, is pure, and leaves only picklable callables for the data workers."""
    entry = entry_of(name, plan)
    written = plan.recipe.written_by_author(entry.author)
    assert written, f"{name}: apply() writes nothing to the recipe"
    again = write_recipe(plan.entries, plan.context).written_by_author(entry.author)
    assert written == again, f"{name}: apply() must be pure, it wrote {written} and then {again}"
    for slot in ("order", "collate", "cut"):
        if slot in written:
            pickle.dumps(getattr(plan.recipe, slot))


def check_memory_of(name: str, plan: Plan) -> None:
    """Assert that `memory` is pure with valid sizes and slots, and that `alternatives` offers valid options."""
    spec, again = asdict(plan.memory_spec), asdict(replace(plan).memory_spec)
    stand_ins = spec.pop("stand_ins")
    assert stand_ins.keys() == again.pop("stand_ins").keys(), f"{name}: memory() must be pure"
    assert spec == again, f"{name}: memory() must be pure"
    assert stand_ins.keys() <= set(SLOTS), f"{name}: memory() has stand-ins for {sorted(stand_ins)}, the slots are {SLOTS}"
    for key, value in spec.items():
        for size in value.values() if isinstance(value, dict) else [value]:
            assert size is None or 0 <= size < math.inf, f"{name}: memory() sets {key} to {size}"
    check_alternatives_of(name, plan)


def check_alternatives_of(name: str, plan: Plan) -> None:
    """Assert that `alternatives` returns scales with valid choices, also for a plugin that is not active."""
    plugin = entry_of(name, plan).plugin
    kind = type(plugin)
    for present in (None, plugin.options):
        table = {} if present is None else present.model_dump(exclude_none=True)
        for scale in kind.alternatives(present, plan.context):
            who = f"{name}: alternatives() offers {scale}"
            assert len(scale.choices) >= 2, f"{who}, with a single choice"
            assert 0 <= scale.present < len(scale.choices), f"{who}, without a present choice"
            for choice in scale.choices:
                assert choice.time > 0, f"{who}, with the time {choice.time}"
                changed = dict(kind.Options.merged(table, choice.changes))
                changed.pop("enabled", None)
                kind.Options.model_validate(changed, strict=False)
            for choice in (*scale.with_less_memory, *scale.with_more_memory):
                assert choice.note, f"{who}, with a choice that has no note"


_baselines: dict[tuple[str, str], list[float]] = {}
"""(profile, task) -> losses of a run without the plugin. One run serves all plugins in this process."""


def baseline_losses(plan: Plan, folder: Path) -> list[float]:
    """The losses of a run of `plan`, trained once per profile and task: tiny jobs differ only in their folder."""
    key = (plan.profile.content.model_dump_json(), plan.job.task.kind)
    if key not in _baselines:
        _baselines[key] = train_tiny(plan, folder).losses
    return _baselines[key]


def check_resume_of(name: str, plan: Plan, folder: Path) -> None:
    """Assert that a run resumed after step 2 ends with the same bits as the complete run in `folder / "with" / "run"`."""
    complete = folder / "with" / "run"
    resumed = rewound(complete, folder / "again", 2)
    api.execute(plan, resumed, cache=folder / "with" / "cache", resume=True)
    assert saved_bits(resumed / "final") == saved_bits(complete / "final"), f"{name}: a resumed run ends with different weights"
