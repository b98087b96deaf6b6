"""A plan from what the user typed, and its memory: what does not fit, what saves memory, what free memory can buy."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache as cache_result
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hwopt.config.job import JobFile
from hwopt.config.profile import Profile
from hwopt.config.task_kinds import task_facts
from hwopt.data.tokenizer_training import planned_config
from hwopt.errors import HwoptError, InputError
from hwopt.hardware.detect import detect, detect_software, has_apple_gpu, with_layer_speed
from hwopt.hardware.device import Hardware, with_memory_limit
from hwopt.memory.advice import Advisor, PlanListener
from hwopt.memory.forecast import planner
from hwopt.memory.forecast.lengths import lengths_of, mean_length
from hwopt.memory.forecast.measured import with_measurement
from hwopt.model.config import load_config, unread_keys
from hwopt.model.facts import ModelFacts, model_facts
from hwopt.model.remote_code import trusted_models
from hwopt.planning import auto_profile
from hwopt.planning.inputs import Inputs
from hwopt.planning.plan import Plan, Replan
from hwopt.planning.resolve import hardware_of_card, under_job
from hwopt.planning.resolve import resolve as resolve_plan
from hwopt.plugin.registry import Registry
from hwopt.system.cache import cache_folder
from hwopt.system.ranks import local_rank, local_ranks
from hwopt.text import listing, truncate
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
    machine = detect(local_rank(os.environ), local_ranks(os.environ, world_size))
    if hardware == "detected" and machine.problem and machine.device_type == "cuda":
        raise InputError(machine.problem)
    job_file = inputs.job_or_demo(Path(job) if job is not None else None, assignments, cache)
    automatic = auto_profile.choose(machine, inputs) if profile == "auto" else None
    if automatic is None:
        chosen = inputs.profile(profile, assignments, job_file)
    else:
        chosen = inputs.overridden(automatic.profile, assignments, job_file)
    if hardware == "profile":
        machine = replace(hardware_of_card(chosen), problem=machine.problem)
    if memory_limit is not None:
        machine = with_memory_limit(machine, memory_limit)
    config, facts = model_of(job_file, cache)
    software = detect_software()
    machine = with_layer_speed(machine, facts.hidden_size, world_size, cache)

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
            given = partial(resolve_plan, chosen, machine, job_file, inputs.registry, facts, software)
            return given(world_size=world_size, strict=strict, choices=choices, tokens_per_sample=tokens_per_sample)

        plan = resolved({})
        return planner.resolve_choices(plan, resolved, cache, chosen_before(plan, before or {})) if plan.chose else plan

    notes = [f"profile auto: {automatic.reason}"] if automatic else []
    try:
        plan = settled(chosen)
    except planner.NoForecastError:
        if automatic is None or automatic.profile is automatic.nearest:
            raise
        plan = settled(inputs.overridden(automatic.nearest, assignments, job_file))
        notes.append("this model's memory cannot be forecast: the sizes follow the ratio of the memories")
    return replace(plan, notes=(*notes, *notes_on(job, job_file, config, machine), *plan.notes))


def model_of(job_file: JobFile, cache: Path) -> tuple[Any, ModelFacts]:
    """(config, facts) of the job's model. Raises InputError for a model whose code is trusted and which the job does not name."""
    job = job_file.job
    model = job.model
    if others := [name for name in trusted_models() if name not in (model.name, model.tokenizer)]:
        raise InputError(
            f"--trust-remote-code {truncate(others[0])}: the job's model is {model.label!r}; name it, or leave it out"
        )
    with job_file.placing():
        config = planned_config(job, load_config(model.name, model.config, model.revision))
        return config, model_facts(config, task_facts(job.task.kind), model.label, cache / "models")


def notes_on(job: Path | str | None, job_file: JobFile, config: Any, machine: Hardware) -> Iterator[str]:
    """What the user should know about the machine, the model and the job that was found."""
    if note := machine.different_cards_note:
        yield note
    if machine.amd:
        yield f"{machine.name}: hwopt was not run on AMD GPUs. Its forecasts are those of NVIDIA's kernels; check the first run"
    if machine.device_type == "cpu" and machine.source == "detected" and has_apple_gpu():
        yield "this Mac's GPU (MPS) is not used: hwopt trains on its CPU"
    for name in trusted_models():
        yield f"--trust-remote-code: the code that {name!r} brings is run, with all that you may do"
    given = job_file.job.model.config
    if given is not None and (unread := [*unread_keys(config, given)]):
        yield f"model.config: {config.model_type} does not read {listing(unread)}; ignored"
    if job is None and job_file.document.name == "job.toml":
        yield "job: job.toml of this folder"


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
