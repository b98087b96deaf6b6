"""Whether a checkpoint belongs to this run, and which settings changed since it was written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hwopt.errors import InputError
from hwopt.saving.reader import Checkpoint
from hwopt.text import truncate


def changed_since(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> list[str]:
    """What the run was begun with otherwise, which is allowed: "training.max_steps was 100 and is 200"."""
    before = checkpoint.content.get("settings")
    before = before if isinstance(before, dict) else {}
    changed = [
        f"{key} was {truncate(before[key])} and is {truncate(value)}"
        for key, value in settings.items()
        if key in before and before[key] != value
    ]
    now, then = (plugins_of(each) for each in (settings, before))
    changed += [f"{name} was not there" for name in sorted(now - then) if before]
    return changed + [f"{name} is not there any more" for name in sorted(then - now)]


def plugins_of(settings: Mapping[str, Any]) -> set[str]:
    return {".".join(key.split(".")[:2]) for key in settings if key.startswith("plugins.")}


def refuse_another_run(checkpoint: Checkpoint, facts: Mapping[str, Any]) -> None:
    """Raise InputError where going on from `checkpoint` would not be the same run: other samples, or other steps."""
    before = checkpoint.content.get("facts")
    before = before if isinstance(before, dict) else {}
    advice = {
        "rows a step": "keep the effective batch: --set plugins.batch.effective={0}",
        "samples": "the data are others than it was trained on, or data.max_length is; give the same, or begin anew with --fresh",
        "seed": "keep it: --set training.seed={0}",
        "order": "keep the plugin that orders the samples",
        "task": "keep task.kind",
    }
    for key, hint in advice.items():
        if before.get(key) != facts.get(key):
            raise InputError(
                f"{checkpoint.folder}: {key} was {before.get(key)}, and is {facts.get(key)} now: "
                f"the steps would not go on from there; {hint.format(before.get(key))}"
            )
    now, then = facts["method"], before.get("method")
    then = then if isinstance(then, dict) else {}
    for key in sorted(now.keys() | then.keys()):
        if now.get(key) != then.get(key):
            raise InputError(
                f"{checkpoint.folder}: {key} was {truncate(then.get(key))}, and is {truncate(now.get(key))} now: with these "
                "weights that is another model, or the steps are others; keep it, or begin anew with --fresh"
            )
    frozen = before.get("frozen")
    if isinstance(frozen, list) and len(frozen) == len(facts["frozen"]) and not all(map(alike, frozen, facts["frozen"])):
        raise InputError(
            f"{checkpoint.folder}: it was trained on other frozen weights than those that model.name leads to now: give the same "
            "folder, or the revision of then as model.revision"
        )


def alike(before: object, now: float) -> bool:
    """Up to the rounding of half precision."""
    return isinstance(before, float) and math.isclose(before, now, rel_tol=0.01, abs_tol=1e-6)
