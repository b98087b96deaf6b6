"""DeepSpeed's JSON: the configuration of its engine in a run of a plan, with every value filled in.

Read by accelerate (`deepspeed_config_file`), by `transformers.TrainingArguments(deepspeed=FILE)` and by DeepSpeed itself.
`gradient_accumulation_steps` is always 1: the loop tells the engine which micro-batch is the last of a step.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from hwopt.errors import InputError
from hwopt.planning.plan import Plan
from hwopt.plugin import Context, PluginOptions
from hwopt.plugin.guard import plugin_guard
from hwopt.plugin.recipe import Recipe
from hwopt.plugin.registry import Registry
from hwopt.training.build import option_value

LAUNCHERS_WORDS = ("ACCELERATE_", "FSDP_")
"""Prefixes of the environment variables from which Accelerate's plugins take their defaults."""


@contextmanager
def without_launcher() -> Iterator[None]:
    """Hides a launcher's environment variables inside the block, and restores the environment after it."""
    before = dict(os.environ)
    try:
        for name in before:
            if name.startswith(LAUNCHERS_WORDS):
                del os.environ[name]
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def engine_plugin(plan: Plan, key: str) -> Any | None:
    """A copy of the argument `key` that the run of `plan` gives to the Accelerator; None if it gives none."""
    field = f"accelerator[{key!r}]"
    with plugin_guard(plan.recipe.named(plan.recipe.author_of(field)), f"recipe.{field}"), without_launcher():
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


def no_deepspeed(plan: Plan, registry: Registry) -> InputError:
    """The error for a plan without DeepSpeed; it names the plugins that would add it."""
    ways = [way_to_it(name, options, plan) for name, options in bringers(plan.context, registry)]
    what_to_do = "; or ".join(ways) or "no installed plugin adds it: `hwopt plugins` lists all"
    return InputError(f"the plan of profile {plan.profile.name} has no DeepSpeed to export: {what_to_do}")


def bringers(context: Context, registry: Registry) -> Iterator[tuple[str, PluginOptions]]:
    """Plugins that would write `accelerator["deepspeed_plugin"]`, with the first of their options by which they do."""
    installed = replace(context, software={**context.software, "deepspeed": "any"})
    for name in registry.names:
        with suppress(Exception):  # broken, or it needs options: the user did not ask for this plugin
            found = registry.plugin(name)
            default = found.Options()
            for options in found(default).probe(installed).options or (default,):
                recipe = Recipe()
                found(options).apply(recipe, installed)
                if "deepspeed_plugin" in recipe.accelerator:
                    yield name, options
                    break


def way_to_it(name: str, options: PluginOptions, plan: Plan) -> str:
    lines = [f"plugins.{name}.{key}={value}" for key, value in options.model_dump(exclude_defaults=True).items()]
    keys = " ".join(f"--set {line}" for line in lines)
    for entry in plan.entries:
        if entry.name == name and entry.decision == "skip":
            return f"{entry.author} is skipped: {entry.reason}"
        if entry.name == name:
            return f"{entry.author} does not use it ({entry.reason}); add {keys}"
    return f"add the plugin {name!r}, as by {keys}"
