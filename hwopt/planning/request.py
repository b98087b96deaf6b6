"""What a plan is asked for: the profile, the machine, the job and the facts of its model, found and read once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hwopt.config.job import JobFile
from hwopt.config.profile import Profile
from hwopt.config.task_kinds import task_facts
from hwopt.data.tokenizer_training import planned_config
from hwopt.errors import InputError
from hwopt.hardware.detect import detect, detect_software, has_apple_gpu, with_layer_speed
from hwopt.hardware.device import Hardware, with_memory_limit
from hwopt.model.config import load_config, unread_keys
from hwopt.model.facts import ModelFacts, model_facts
from hwopt.model.remote_code import trusted_models
from hwopt.planning import auto_profile
from hwopt.planning.inputs import Inputs
from hwopt.planning.resolve import hardware_of_card
from hwopt.system.ranks import local_rank, local_ranks
from hwopt.text import listing, truncate


@dataclass(frozen=True)
class Request:
    """All that `planning.resolve` is given, apart from the choices of the memory planner."""

    profile: Profile
    hardware: Hardware
    job_file: JobFile
    model: ModelFacts
    software: Mapping[str, str]
    notes: tuple[str, ...] = ()
    """What the user should know about the machine, the model and the job that was found."""
    nearest: Profile | None = None
    """With `auto` on a card without a profile: the one that `profile` is derived from, with the sizes that it gives."""


def read_request(
    profile: str,
    job: Path | str | None,
    assignments: Sequence[str],
    hardware: Literal["detected", "profile"],
    memory_limit: str | None,
    world_size: int,
    inputs: Inputs,
    cache: Path,
) -> Request:
    """Find and read what `hwopt.resolve` was asked for; its arguments are described there. Raises InputError."""
    machine = detect(local_rank(os.environ), local_ranks(os.environ, world_size))
    if hardware == "detected" and machine.problem and machine.device_type == "cuda":
        raise InputError(machine.problem)
    job_file = inputs.job_or_demo(Path(job) if job is not None else None, assignments, cache)
    notes, nearest = [], None
    if profile == "auto":
        automatic = auto_profile.choose(machine, inputs)
        notes.append(f"profile auto: {automatic.reason}")
        chosen = inputs.overridden(automatic.profile, assignments, job_file)
        if automatic.profile is not automatic.nearest:
            nearest = inputs.overridden(automatic.nearest, assignments, job_file)
    else:
        chosen = inputs.profile(profile, assignments, job_file)
    if hardware == "profile":
        machine = replace(hardware_of_card(chosen), problem=machine.problem)
    if memory_limit is not None:
        machine = with_memory_limit(machine, memory_limit)
    config, facts = model_of(job_file, cache)
    machine = with_layer_speed(machine, facts.hidden_size, world_size, cache)
    notes += notes_on(job, job_file, config, machine)
    return Request(chosen, machine, job_file, facts, detect_software(), tuple(notes), nearest)


def model_of(job_file: JobFile, cache: Path, vocab_size: int | None = None) -> tuple[Any, ModelFacts]:
    """(config, facts) of the job's model; `vocab_size` as in `planned_config`.

    Raises InputError for a model whose code is trusted and which the job does not name.
    """
    job = job_file.job
    model = job.model
    if others := [name for name in trusted_models() if name not in (model.name, model.tokenizer)]:
        raise InputError(
            f"--trust-remote-code {truncate(others[0])}: the job's model is {model.label!r}; name it, or leave it out"
        )
    with job_file.placing():
        config = planned_config(job, load_config(model.name, model.config, model.revision), vocab_size)
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
