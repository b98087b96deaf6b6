"""The variants of a bench: the baseline twice, the profile, and each plugin added to the one and left out of the other.

A plugin is added by giving the baseline the profile's table for it, and left out by giving the profile the baseline's. Against a
baseline without plugins, a plugin that is left out is off. A variant whose plan equals that of its reference is not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hwopt.config.job import JobFile
from hwopt.config.toml_text import inline
from hwopt.errors import HwoptError, InputError
from hwopt.planning.inputs import Inputs
from hwopt.planning.plan import Plan
from hwopt.plugin.contract import Effect
from hwopt.trials.trial import Variant, what_runs

BASELINE, COPY = "baseline", "baseline again"
Role = Literal["baseline", "copy", "added", "profile", "left out"]
Tables = Mapping[str, Mapping[str, Any]]  # plugin -> its options in a profile, of the plugins that are on
Resolve = Callable[[Variant], Plan]


@dataclass(frozen=True)
class PlannedVariant:
    """A variant with its plan, and why it need not be run."""

    variant: Variant
    role: Role
    reference: str = ""  # the variant that it is compared with; "" for the baseline
    plugin: str = ""
    plan: Plan | None = None
    ending: str = ""  # why it is not run: refused, not applied here, does not fit; "" if it is run
    note: str = ""

    @property
    def name(self) -> str:
        return self.variant.name

    @property
    def runs(self) -> bool:
        return not self.ending


def variants_of(profile: Variant, against: str | None, inputs: Inputs, job: JobFile | None) -> list[PlannedVariant]:
    """The variants in the order of the table, not planned yet: `profile` against the profile `against`; by default, and for
    "none", against no plugins.

    Raises InputError for a profile that does not exist, and if both are the same one.
    """
    if against == profile.profile:
        raise InputError(f"--against {against}: this is the profile itself. Give another one, or omit --against")
    tables: Tables = dict(inputs.profile(profile.profile, profile.assignments, job).plugin_tables())
    others: Tables = {}
    if against in (None, "none"):  # all plugins off: the profile's hyperparameters in fp32, 8 rows per step, torch's defaults
        off = (table_assignment(plugin, None) for plugin in tables)
        baseline = replace(profile, name=BASELINE, assignments=(*profile.assignments, *off))
    else:
        baseline = replace(profile, name=BASELINE, profile=against)
        try:
            others = dict(inputs.profile(against, profile.assignments, job).plugin_tables())
        except InputError as error:
            raise InputError(str(error).replace("--profile", "--against", 1)) from error
    changed = [name for name in dict.fromkeys([*tables, *others]) if tables.get(name) != others.get(name)]
    return [
        PlannedVariant(baseline, "baseline"),
        PlannedVariant(replace(baseline, name=COPY), "copy", BASELINE),
        *(PlannedVariant(with_table(baseline, "+", name, tables), "added", BASELINE, name) for name in changed),
        PlannedVariant(profile, "profile", BASELINE),
        *(PlannedVariant(with_table(profile, "-", name, others), "left out", profile.name, name) for name in changed),
    ]


def with_table(variant: Variant, sign: str, plugin: str, tables: Tables) -> Variant:
    """`variant` with the table of `plugin` in `tables`."""
    assignments = (*variant.assignments, table_assignment(plugin, tables.get(plugin)))
    return replace(variant, name=f"{sign} {plugin}", assignments=assignments)


def table_assignment(plugin: str, table: Mapping[str, Any] | None) -> str:
    """The assignment that gives `plugin` this table; None turns it off."""
    if table is None:
        return f"plugins.{plugin}.enabled=false"
    return f"plugins.{plugin}={inline({'enabled': True, **table}).as_string()}"


def planned_variants(
    variants: Sequence[PlannedVariant], resolve: Resolve, fit_problem: Callable[[Plan], str]
) -> list[PlannedVariant]:
    """`variants` with their plans, and which of them are not run. `fit_problem`: why a plan does not fit, or "".

    Raises what `resolve` raises for the baseline or the profile, and InputError if their plans are equal.
    """
    plans: dict[str, Plan] = {}
    found = []
    for candidate in variants:
        made = with_plan(candidate, resolve, plans, fit_problem)
        if made.plan is not None:
            plans[made.name] = made.plan
        found.append(made)
    # the profile comes after what is added to the baseline, and before what is left out of it
    if all(each.plan is not None and what_runs(each.plan) == what_runs(plans[BASELINE]) for each in found):
        profile = next(each.variant.profile for each in found if each.role == "profile")
        raise InputError(
            f"{profile} and its baseline have equal plans on this machine: there is nothing to compare. "
            f"`hwopt plan --hardware detected --profile {profile}` says why its plugins are skipped"
        )
    return found


def with_plan(
    candidate: PlannedVariant, resolve: Resolve, plans: Mapping[str, Plan], fit_problem: Callable[[Plan], str]
) -> PlannedVariant:
    """`candidate` with its plan, or why it is not run. `plans`: those of the variants before it, by name."""
    if candidate.role == "copy":
        return replace(candidate, plan=plans[BASELINE])
    try:
        plan = resolve(candidate.variant)
    except HwoptError as error:
        if candidate.role in ("baseline", "profile"):
            raise
        return replace(candidate, ending="refused", note=str(error))
    candidate = replace(candidate, plan=plan)
    if candidate.plugin and what_runs(plan) == what_runs(plans[candidate.reference]):
        entries = [*plan.entries, *plans[candidate.reference].entries]
        reasons = (each.reason for each in entries if each.name == candidate.plugin and each.decision == "skip")
        return replace(candidate, ending="not applied here", note=next(reasons, "the plan stays the same"))
    if problem := fit_problem(plan):
        return replace(candidate, ending="does not fit", note=problem)
    return candidate


def effect_between(ours: Plan, theirs: Plan) -> Effect:
    """The strongest effect of the plugins in which two plans differ; "bits" for none."""
    tables = [{entry.name: entry for entry in plan.applied()} for plan in (ours, theirs)]
    found: list[Effect] = []
    for name in dict.fromkeys([*tables[0], *tables[1]]):
        entries = [table[name] for table in tables if name in table]
        if len(entries) < 2 or entries[0].options != entries[1].options:
            found += [entry.plugin.effect for entry in entries]
    return max(found, key=("bits", "rounding", "method").index, default="bits")


def loss_obstacle(ours: Plan, theirs: Plan) -> str:
    """Why the losses of two plans cannot be compared step by step: other rows per step, or other hyperparameters; or ""."""
    if ours.batch.step != theirs.batch.step:
        return f"{ours.batch.step} instead of {theirs.batch.step} rows per step"
    tables = [plan.training.model_dump() | {"max_length": plan.job.data.max_length} for plan in (ours, theirs)]
    changed = [key for key in tables[0] if tables[0][key] != tables[1][key]]
    return f"other {', '.join(changed)}" if changed else ""
