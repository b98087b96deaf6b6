"""A plan from what the user typed, and its memory: what does not fit, what saves memory, what free memory can buy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache as cache_result
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hwopt.config.profile import Profile
from hwopt.config.task_kinds import task_facts
from hwopt.data.tokenizer_training import job_vocab_size
from hwopt.errors import HwoptError
from hwopt.memory.advice import Advisor, PlanListener
from hwopt.memory.forecast import planner
from hwopt.memory.forecast.choices import NoForecastError, resolve_choices
from hwopt.memory.forecast.lengths import lengths_of, mean_length, prepared_data
from hwopt.memory.forecast.measured import with_measurement
from hwopt.planning.inputs import Inputs
from hwopt.planning.plan import Plan, Replan
from hwopt.planning.request import Request, model_of, read_request
from hwopt.planning.resolve import resolve as resolve_plan
from hwopt.planning.resolve import under_job
from hwopt.plugin.registry import Registry
from hwopt.system.cache import cache_folder
from hwopt.training.failure import report_oom


def resolve(
    profile: str = "auto",
    job: Path | str | None = None,
    *,
    assignments: Sequence[str] = (),
    hardware: Literal["detected", "profile"] = "detected",
    strict: bool = False,
    memory_limit: str | None = None,
    world_size: int = 1,
    registry: Registry | None = None,
    cache: Path | None = None,
    before: Mapping[str, Any] | None = None,
    inputs: Inputs | None = None,
) -> Plan:
    """A plan for `profile` (name, path or "auto") and `job` (a TOML file; None: ./job.toml, else the embedded demo).

    `assignments` are `key=value` texts as given to `--set`. `hardware="profile"` plans for the profile's card, which this
    machine need not have; `memory_limit` ("8GiB") plans and runs as if the device had no more. `before` is the metadata of
    the checkpoint to resume (`Target.saved`): sizes chosen then on such a machine are not chosen again. `inputs` shares
    the files that are already read.
    Raises InputError, PluginError or DataError with a message that says what to change.
    """
    inputs, cache = inputs or Inputs(registry), cache or cache_folder()
    request = read_request(profile, job, assignments, hardware, memory_limit, world_size, inputs, cache)
    request = with_vocabulary(request, cache)
    facts, job_file = request.model, request.job_file

    def settled(chosen: Profile) -> Plan:
        """The plan of `chosen`, with every choice of a plugin made by the memory planner."""

        @cache_result
        def tokens_per_sample() -> float | None:
            try:
                return mean_length(under_job(chosen, job_file), facts, cache)
            except HwoptError:
                if hardware == "profile":  # a plan for another machine, which may have the data
                    return None
                raise

        def resolved(choices: Mapping[str, int]) -> Plan:
            given = partial(resolve_plan, chosen, request.hardware, job_file, inputs.registry, facts, request.software)
            return given(world_size=world_size, strict=strict, choices=choices, tokens_per_sample=tokens_per_sample)

        plan = resolved({})
        return resolve_choices(plan, resolved, cache, chosen_before(plan, before or {})) if plan.chose else plan

    try:
        plan, notes = settled(request.profile), request.notes
    except NoForecastError:
        if request.nearest is None:
            raise
        by_ratio = "this model's memory cannot be forecast: the sizes follow the ratio of the memories"
        plan, notes = settled(request.nearest), (*request.notes, by_ratio)
    return replace(plan, notes=(*notes, *plan.notes))


def with_vocabulary(request: Request, cache: Path) -> Request:
    """`request` with the facts of a model whose vocabulary is that of a tokenizer which the data or the job decide."""
    job = under_job(request.profile, request.job_file)
    if job.model.config is None or job_vocab_size(job) is not None or task_facts(job.task.kind).inputs != "tokens":
        return request
    try:
        tokenizer = prepared_data(job, job.training.seed, request.model, cache).tokenizer
        return replace(request, model=model_of(request.job_file, cache, len(tokenizer))[1])
    except HwoptError:  # a plan may be made where the data are not
        return request


def chosen_before(plan: Plan, before: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Plugin -> the options that the planner chose for the checkpoint `before`, if it was written on such a machine."""
    return dict(before.get("decided", {})) if before.get("machine") == plan.machine else {}


def with_memory(
    plan: Plan,
    replan: Replan,
    *,
    measure: bool = False,
    sizes: bool = True,
    registry: Registry | None = None,
    cache: Path | None = None,
    listener: PlanListener | None = None,
) -> Plan:
    """`plan` with its memory (`plan.memory`) and, if that does not fit, with changes that save memory.

    `replan` gives the plan with further assignments, as `resolve` does. Takes seconds; needs no GPU, weights or run.
    `measure` runs a step on this device instead of predicting it. Without `sizes` a plan that fits does not tell the largest ones
    that would, which takes as long as the rest. `listener` hears of the memory and of each change as they are found.
    """
    cache = cache or cache_folder()
    listener = listener or PlanListener()
    listener.on_trial("reading the data")
    lengths = lengths_of(plan, cache)
    listener.on_trial("tracing a step")
    plan, memory = planner.fitted(plan, cache, lengths)
    if measure:
        with report_oom("a step with the planned micro-batch", plan.batch_option("train")):
            memory = with_measurement(plan, memory, lengths)
    plan = replace(plan, memory=memory, refused=lengths.refused, data_warnings=lengths.warnings)
    listener.on_memory(plan)
    if memory.fits and not sizes:
        return plan
    listener.on_trial("finding the largest sizes that fit")
    memory = planner.with_largest_sizes(plan, memory, cache, lengths)
    listener.on_largest_sizes(memory)
    if memory.fits is False:
        memory = Advisor(plan, memory, registry or Registry(), replan, cache, listener).with_changes()
    return replace(plan, memory=memory)


def on_other_rank(plan: Plan, cache: Path | None = None) -> Plan:
    """`plan` with the decisions that `with_memory` makes on the first rank."""
    if not planner.pool_that_yields(plan):
        return plan
    cache = cache or cache_folder()
    return planner.fitted(plan, cache, lengths_of(plan, cache))[0]


def with_gains(
    plan: Plan,
    replan: Replan,
    *,
    registry: Registry | None = None,
    cache: Path | None = None,
    listener: PlanListener | None = None,
) -> Plan:
    """`plan`, made by `with_memory`, with what its free memory can buy (`plan.memory.gains`). Takes seconds.

    `listener` hears of each gain as it is found. Nothing is searched if the plan does not fit, or for a card without peaks.
    """
    assert plan.memory is not None, "planned with memory"
    advisor = Advisor(plan, plan.memory, registry or Registry(), replan, cache or cache_folder(), listener or PlanListener())
    return replace(plan, memory=advisor.with_gains())
