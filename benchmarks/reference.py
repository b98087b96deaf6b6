"""The plan of a profile for the model that it is tuned for (`[tuned_for]`), with padded rows, on the profile's card.

Needs no data, weights or GPU. The figures in the profiles' comments and docs/claims.md come from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tomlkit

from hwopt import api
from hwopt.errors import InputError
from hwopt.memory.forecast.lengths import DEFAULT_LENGTH, lengths_of
from hwopt.memory.forecast.planner import plan_memory, with_largest_sizes
from hwopt.planning.inputs import Inputs
from hwopt.planning.memory_plan import MemoryPlan
from hwopt.planning.plan import Plan

BASELINES = Path(__file__).parent / "profiles"


def profile_named(name: str) -> str:
    """What `--profile` takes for a built-in profile or one of benchmarks/profiles."""
    path = BASELINES / f"{name}.toml"
    return str(path) if path.is_file() else name


def reference_plan(name: str, inputs: Inputs, cache: Path, assignments: Sequence[str] = ()) -> Plan:
    """The plan of the profile `name` for its `tuned_for` model. `assignments` as for `--set`.

    Raises InputError if the profile names no model or no card.
    """
    spec = profile_named(name)
    tuned = inputs.profile(spec).content.tuned_for
    if not tuned.config:
        raise InputError(f"{name}: tuned_for.config is missing; add the model, as in model.config of a job")
    config = tomlkit.inline_table()
    config.update(tuned.config)
    job = (
        f"model.config={config.as_string()}",
        "data.train=padded rows",
        f"data.max_length={tuned.max_length or DEFAULT_LENGTH}",
        f"task.kind={tuned.task}",
    )
    given = [*job, *assignments]
    return api.resolve(spec, assignments=given, hardware="profile", cache=cache, inputs=inputs)


def reference_memory(plan: Plan, cache: Path) -> MemoryPlan:
    """The memory and the time of a step of a plan that `reference_plan` made, with rows of the full length."""
    lengths = lengths_of(plan, cache)
    return with_largest_sizes(plan, plan_memory(plan, cache, lengths), cache, lengths)
