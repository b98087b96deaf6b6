"""The plan of a profile for the model that it is tuned for (`[tuned_for]`), with padded rows, on the profile's card.

Needs no data, weights or GPU. The figures in the profiles' comments and the predictions of their claims come from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from hwopt.config.job import JobFile, make_job
from hwopt.config.profile import Profile
from hwopt.config.toml import Document
from hwopt.data.tokenizer_training import planned_config
from hwopt.errors import InputError
from hwopt.hardware.detect import detect_software
from hwopt.memory.lengths import DEFAULT_LABELS, DEFAULT_LENGTH, Lengths
from hwopt.memory.planner import plan_memory, resolve_choices, with_largest_sizes
from hwopt.model.config import load_config
from hwopt.model.facts import model_facts
from hwopt.planning.inputs import Inputs
from hwopt.planning.memory_plan import MemoryPlan
from hwopt.planning.plan import Plan
from hwopt.planning.resolve import hardware_of_card, resolve


def reference_plan(spec: str, inputs: Inputs, cache: Path, assignments: Sequence[str] = ()) -> Plan:
    """The plan of the profile `spec` for its `tuned_for` model. `assignments` as for `--set`, keys of jobs and of plugins.

    Raises InputError if the profile names no model or no card.
    """
    profile = inputs.profile(spec, [text for text in assignments if text.startswith("plugins.")])
    job_file = reference_job(profile, [text for text in assignments if not text.startswith("plugins.")])
    model = job_file.job.model
    with job_file.placing():
        config = planned_config(job_file.job, load_config(model.name, model.config, model.revision))
        facts = model_facts(config, job_file.job.task.kind, model.label, cache / "models")
    hardware, software = hardware_of_card(profile), detect_software()

    def resolved(choices: Mapping[str, int]) -> Plan:
        return resolve(profile, hardware, job_file, inputs.registry, facts, software, choices=choices)

    plan = resolved({})
    return resolve_choices(plan, resolved, cache) if plan.chose else plan


def reference_job(profile: Profile, assignments: Sequence[str] = ()) -> JobFile:
    """A job with the model, the task and the length that `profile` is tuned for. Its data do not exist."""
    tuned = profile.content.tuned_for
    if not tuned.config:
        raise InputError(f"{profile.document.name}: tuned_for.config is missing; add the model, as in model.config of a job")
    document = {
        "model": {"config": tuned.config},
        "data": {"train": "padded rows", "max_length": tuned.max_length or DEFAULT_LENGTH},
        "task": {"kind": tuned.task},
    }
    return make_job(Document("tuned_for", document), assignments)


def reference_memory(plan: Plan, cache: Path, *, samples: int | None = None, with_largest: bool = False) -> MemoryPlan:
    """The memory and the times of a plan that `reference_plan` made, with rows of the full length.

    Times of an epoch need the number of samples, by default that of `tuned_for`; without it they are None.
    """
    width = plan.job.data.max_length or DEFAULT_LENGTH
    samples = samples or plan.profile.content.tuned_for.samples
    train = None if samples is None else np.full(samples, width, np.int32)
    lengths = Lengths(train, width, DEFAULT_LABELS, "padded rows")
    memory = plan_memory(plan, cache, lengths)
    return with_largest_sizes(plan, memory, cache, lengths) if with_largest else memory
