"""DeepSpeed's JSON: the configuration of its engine in a run of a plan, with every value filled in.

Read by accelerate (`deepspeed_config_file`), by `transformers.TrainingArguments(deepspeed=FILE)` and by DeepSpeed itself.
`gradient_accumulation_steps` is always 1: the loop tells the engine which micro-batch is the last of a step.
"""

from __future__ import annotations

import copy
import os
from typing import Any
from unittest import mock

from hwopt.config.aliases import option_for
from hwopt.errors import InputError
from hwopt.planning.plan import Plan
from hwopt.plugin.guard import plugin_guard
from hwopt.training.build import option_value

LAUNCHERS_WORDS = ("ACCELERATE_", "FSDP_")
"""Prefixes of the environment variables from which Accelerate's plugins take their defaults."""


def engine_plugin(plan: Plan, key: str) -> Any:
    """A copy of the argument `key` that the run of `plan` gives to the Accelerator; None if it gives none.

    It is made without the variables of a launcher, which would change its defaults.
    """
    field = f"accelerator[{key!r}]"
    with mock.patch.dict(os.environ), plugin_guard(plan.recipe.named(plan.recipe.author_of(field)), f"recipe.{field}"):
        for name in [name for name in os.environ if name.startswith(LAUNCHERS_WORDS)]:
            del os.environ[name]
        return copy.deepcopy(option_value(plan.recipe.accelerator.get(key)))


def engine_config(plan: Plan) -> dict[str, Any] | None:
    """DeepSpeed's configuration in the run of `plan`; None if the plan does not use DeepSpeed."""
    plugin = engine_plugin(plan, "deepspeed_plugin")
    if plugin is None:
        return None
    plugin.set_mixed_precision(plan.recipe.accelerator.get("mixed_precision", "no"))
    config: dict[str, Any] = plugin.deepspeed_config
    config.pop("steps_per_print", None)  # Accelerate sets infinity, which JSON does not have
    return config | {
        "train_batch_size": plan.batch.train * plan.world_size,
        "train_micro_batch_size_per_gpu": plan.batch.train,
        "gradient_clipping": float(plan.training.max_grad_norm or 0.0),
    }


def no_deepspeed(plan: Plan) -> InputError:
    """The error for a plan without DeepSpeed; it names the plugin that would add it."""
    name = option_for("deepspeed").split(".")[1]
    entry = next((entry for entry in plan.entries if entry.name == name), None)
    what_to_do = f"add the plugin {name!r}, as by --set plugins.{name}.enabled=true"
    if entry is not None:
        what_to_do = f"{entry.author} {'is skipped' if entry.decision == 'skip' else 'does not use it'}: {entry.reason}"
    return InputError(f"the plan of profile {plan.profile.name} has no DeepSpeed to export: {what_to_do}")
