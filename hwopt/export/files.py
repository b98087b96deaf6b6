"""The text of an exported file, and what it does not say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from hwopt.errors import InputError
from hwopt.export.accelerate import engine_config, launcher_config, launcher_yaml, no_deepspeed
from hwopt.export.arguments import arguments_file
from hwopt.export.script import script_file
from hwopt.planning.plan import Plan
from hwopt.system.cache import cache_folder

Format = Literal["accelerate", "deepspeed", "trainer", "trl", "script"]


def exported(plan: Plan, to: Format, nodes: int = 1, deepspeed_file: str | None = None, cache: Path | None = None) -> str:
    """`plan` in the format of `to`. Raises InputError if the format cannot express it. `cache`: of the tokenised data."""
    if to != "accelerate" and deepspeed_file is not None:
        raise InputError("--deepspeed-config-file needs --to accelerate; use --output for the JSON to write")
    if to == "script":
        return script_file(plan, cache or cache_folder())
    if to == "trainer" or to == "trl":
        return arguments_file(plan, to)
    config = engine_config(plan)
    if config is None and (to == "deepspeed" or deepspeed_file is not None):
        raise no_deepspeed(plan)
    if to == "deepspeed":
        return json.dumps(config, indent=2) + "\n"
    return launcher_yaml(launcher_config(plan, nodes, deepspeed_file), plan.profile.name)


def remarks(plan: Plan) -> Iterator[str]:
    """The notes, fallbacks and skips of the plan, which the exported file does not show."""
    for note in plan.notes:
        yield f"note: {note}"
    if plan.hardware.device_type == "cpu" and plan.profile.card.compute_capability is not None:
        yield (
            "WARNING: the file starts ranks on CPUs, since this machine has no GPU. "
            f"For the card of profile {plan.profile.name} add --hardware profile"
        )
    for entry in plan.entries:
        if entry.decision != "apply":
            yield f"{entry.name}: {entry.decision}: {entry.reason}"
