"""hwopt from Python: `plan` answers as `hwopt plan` does, `train` trains as `hwopt run` does."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from hwopt.config.task_kinds import task_kinds
from hwopt.data.tokenizer_training import planned_config
from hwopt.hardware.detect import detect
from hwopt.inference.answer import Answerer
from hwopt.inference.evaluate import EvaluationReport
from hwopt.inference.evaluate import evaluate as evaluate_run
from hwopt.inference.predict import PredictionReport
from hwopt.inference.predict import predict as predict_rows
from hwopt.inference.settings import InferenceOptions
from hwopt.memory.advice import PlanListener
from hwopt.memory.forecast.communication import Ranks
from hwopt.memory.forecast.sharding import Comparison, compare_schemes
from hwopt.memory.planned import on_other_rank, resolve, with_gains, with_memory
from hwopt.model.config import load_config
from hwopt.model.facts import model_facts
from hwopt.planning import auto_profile
from hwopt.planning.inputs import Inputs
from hwopt.planning.plan import Plan
from hwopt.planning.resolve import refuse_long_samples, under_job
from hwopt.runs.execute import execute
from hwopt.runs.folder import Target
from hwopt.system.cache import cache_folder
from hwopt.system.ranks import local_rank, rank_and_world
from hwopt.tasks import proposal
from hwopt.tasks.generators import Generation
from hwopt.tasks.preview import Preview, preview_sample
from hwopt.tasks.proposal import Proposal
from hwopt.tasks.recognition import DataColumns, recognise
from hwopt.tasks.registry import make_task
from hwopt.training.listener import Listener, Summary


def plan(
    profile: str = "auto",
    job: Path | str | None = None,
    *,
    hardware: Literal["detected", "profile"] = "profile",
    measure: bool = False,
    gains: bool = True,
    listener: PlanListener | None = None,
    **given: Any,
) -> Plan:
    """A plan with its memory, what would save memory if it does not fit, and what its free memory can buy.

    `hardware="profile"` plans for the profile's card, which need not be installed; "auto" always plans for this machine.
    `measure` runs a step on this device instead of predicting its memory. Without `gains` the last part is left out. `given`:
    further arguments of `resolve`. Raises as `resolve` does.
    """
    assignments = tuple(given.pop("assignments", ()))
    device: Literal["detected", "profile"] = "detected" if profile == "auto" else hardware

    def resolved(changes: Sequence[str] = ()) -> Plan:
        return resolve(profile, job, assignments=(*assignments, *changes), hardware=device, **given)

    found = with_memory(resolved(), resolved, measure=measure, cache=given.get("cache"), listener=listener)
    return with_gains(found, resolved, cache=given.get("cache"), listener=listener) if gains else found


def train(
    job: Path | str | None = None,
    profile: str = "auto",
    *,
    target: Target | None = None,
    listener: Listener | None = None,
    plan_listener: PlanListener | None = None,
    **given: Any,
) -> Summary:
    """Train `job` (a TOML file; None: ./job.toml, else the embedded demo) with a profile, in a run folder.

    `target`: where the run writes and what it resumes. `listener` receives the events of the run, `plan_listener` the plan
    before it starts and, after it, what its free memory could have bought. `given`: further arguments of `resolve`.
    On several ranks every rank calls this. Returns the summary (Hugging Face's names). Raises as `resolve` and `execute` do.
    """
    target, plan_listener = target or Target(), plan_listener or PlanListener()
    target.require_usable()
    assignments, cache = tuple(given.pop("assignments", ())), given.get("cache")
    rank, world_size = rank_and_world(os.environ)
    before = target.saved()

    def resolved(changes: Sequence[str] = ()) -> Plan:
        return resolve(profile, job, assignments=(*assignments, *changes), world_size=world_size, before=before, **given)

    plan = resolved()
    default = f"{'demo' if plan.is_demo else Path(job or 'job').stem}-{plan.profile.name}"
    if target.resume and not before and plan.chose:  # the name of the run's folder needs the plan
        before = target.saved(default)
        plan = resolved()
    folder = target.folder(default)
    if rank == 0:
        if plan.hardware.device_type == "cuda":
            plan = with_memory(plan, resolved, sizes=False, cache=cache, listener=plan_listener)
        plan_listener.on_plan(plan)
    elif plan.hardware.device_type == "cuda":
        plan = on_other_rank(plan, cache)
    summary = execute(
        plan,
        folder,
        listener,
        cache=cache,
        replan=resolved,
        resume=target.checkpoint or bool(target.resume),
        fresh=target.fresh,
        next_folder=target.next_folder(default),
    )
    if rank == 0 and plan.memory is not None:  # after the training, because the search takes seconds
        with_gains(plan, resolved, cache=cache, listener=plan_listener)
    return summary


def preview(
    profile: str = "auto",
    job: Path | str | None = None,
    *,
    assignments: Sequence[str] = (),
    sample: int = 1,
    cache: Path | None = None,
    inputs: Inputs | None = None,
) -> Preview:
    """Training sample `sample` (from 1) of `job`, tokenised as a run with `profile` does. Arguments as for `resolve`.

    Raises DataError for problems of the data, and InputError as `resolve` does.
    """
    inputs, cache = inputs or Inputs(), cache or cache_folder()
    job_file = inputs.job_or_demo(Path(job) if job is not None else None, assignments, cache)
    machine = detect(local_rank(os.environ)) if profile == "auto" else None
    chosen = auto_profile.choose(machine, inputs).profile if machine else inputs.profile(profile)
    merged = under_job(chosen, job_file)
    model = merged.model
    with job_file.placing():
        config = load_config(model.name, model.config, model.revision)
        task = make_task(merged)
        facts = model_facts(planned_config(merged, config), task.facts, model.label, cache / "models")
        refuse_long_samples(merged, facts, chosen, job_file)
        prepared = task.prepare(merged, config, cache, merged.training.seed, max_positions=facts.max_positions)
    return preview_sample(task.show, prepared, sample)


def propose(data: DataColumns, inputs: Inputs | None = None) -> Proposal:
    """A job for `data` (see `recognise`) and this machine."""
    inputs = inputs or Inputs()
    machine = detect(local_rank(os.environ))
    chosen = auto_profile.choose(machine, inputs)
    return proposal.propose(data, machine, (chosen.profile.name, chosen.reason), list(inputs.files))


def spread_over_ranks(plan: Plan, ranks: Ranks, cache: Path | None = None) -> Comparison:
    """Memory a rank and communication a step of data parallel, ZeRO and FSDP, for a plan that `with_memory` has made."""
    return compare_schemes(plan, ranks, cache or cache_folder())


def evaluate(
    run: Path | str,
    source: str,
    *,
    assignments: Sequence[str] = (),
    batch_size: int | None = None,
    warn: Callable[[str], None] = lambda _: None,
    cache: Path | None = None,
) -> EvaluationReport:
    """The metrics of the model of a run folder (or of its `final/`) on the rows of `source`, a file or `datasets` folder.

    `assignments`: as given to `--set`, keys of [data] only. `batch_size`: default that of the run's evaluation. `warn` gets
    messages for the user. Raises InputError, DataError or DoesNotFitError.
    """
    options = InferenceOptions(assignments, batch_size, warn=warn)
    return evaluate_run(Path(run), source, cache or cache_folder(), options)


def predict(
    run: Path | str,
    source: str,
    output: Path | str,
    *,
    assignments: Sequence[str] = (),
    overwrite: bool = False,
    batch_size: int | None = None,
    generation: Mapping[str, Any] | None = None,
    warn: Callable[[str], None] = lambda _: None,
    progress: Callable[[int, int], None] = lambda done, rows: None,
    cache: Path | None = None,
) -> PredictionReport:
    """Write the rows of `source` with the predictions of the model of a run folder to `output` (csv, jsonl or parquet).

    `assignments`: as given to `--set`, keys of [data] only. `generation`: fields of `hwopt.tasks.predictors.Generation`, for
    tasks that generate text. `progress` gets the rows that are done, and all rows. Raises InputError, DataError, StorageError or
    DoesNotFitError.
    """
    chosen = None if generation is None else Generation(**generation)
    options = InferenceOptions(assignments, batch_size, chosen, overwrite, warn, progress)
    return predict_rows(Path(run), source, Path(output), cache or cache_folder(), options)


def answerer(
    run: Path | str, *, assignments: Sequence[str] = (), generation: Mapping[str, Any] | None = None, cache: Path | None = None
) -> Answerer:
    """The causal language model of a run folder, to answer texts turn by turn. Arguments as for `predict`. Raises InputError."""
    return Answerer(Path(run), cache or cache_folder(), assignments, Generation(**generation or {}))


__all__ = [
    "Inputs",
    "PlanListener",
    "Target",
    "answerer",
    "cache_folder",
    "evaluate",
    "execute",
    "plan",
    "predict",
    "preview",
    "propose",
    "recognise",
    "resolve",
    "spread_over_ranks",
    "task_kinds",
    "train",
    "with_gains",
    "with_memory",
]
