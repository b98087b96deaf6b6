"""Whether a checkpoint belongs to this run, and which settings changed since it was written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hwopt.config.aliases import option_for
from hwopt.errors import InputError
from hwopt.saving.reader import Checkpoint
from hwopt.text import truncate


def changed_since(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> list[str]:
    """The settings that changed since the checkpoint, which is allowed: "training.max_steps was 100 and is 200"."""
    before = checkpoint.content["settings"]
    changed = [
        f"{key} was {truncate(before[key])} and is {truncate(value)}"
        for key, value in settings.items()
        if key in before and before[key] != value
    ]
    now, then = (plugins_of(each) for each in (settings, before))
    changed += [f"{name} is new" for name in sorted(now - then)]
    return changed + [f"{name} was removed" for name in sorted(then - now)]


def plugins_of(settings: Mapping[str, Any]) -> set[str]:
    """The plugin tables of flat `settings`: {"plugins.NAME", …}."""
    return {".".join(key.split(".")[:2]) for key in settings if key.startswith("plugins.")}


def refuse_another_run(checkpoint: Checkpoint, facts: Mapping[str, Any]) -> None:
    """Raise InputError if `checkpoint` belongs to another run, one with other data, steps or weights."""
    before = checkpoint.content["facts"]
    advice = {
        "rows a step": f"Keep the effective batch: --set {option_for('effective_batch_size')}={{0}}",
        "samples": "The data or data.max_length changed. Give the same, or start over with --fresh",
        "mixture": "Keep the sources and weights of data.train, or start over with --fresh",
        "seed": "Keep the seed: --set training.seed={0}",
        "order": "Keep the plugin that orders the samples",
        "task": "Keep task.kind",
    }
    for key, hint in advice.items():
        if before.get(key) != facts.get(key):
            raise InputError(
                f"{checkpoint.folder}: {key} was {before.get(key)} and is now {facts.get(key)}. "
                f"The run would not continue the same steps. {hint.format(before.get(key))}"
            )
    now, then = facts["method"], before["method"]
    for key in sorted(now.keys() | then.keys()):
        if now.get(key) != then.get(key):
            raise InputError(
                f"{checkpoint.folder}: {key} was {truncate(then.get(key))} and is now {truncate(now.get(key))}. "
                f"Changing {key} changes the model or the training. Keep it, or start over with --fresh"
            )
    frozen = before["frozen"], facts["frozen"]
    equal = (math.isclose(*pair, rel_tol=0.01, abs_tol=1e-6) for pair in zip(*frozen, strict=False))  # up to half precision
    if len(frozen[0]) == len(frozen[1]) and not all(equal):
        raise InputError(
            f"{checkpoint.folder}: the frozen weights of model.name changed since the checkpoint. "
            "Give the same model folder, or set model.revision to the revision used before"
        )
