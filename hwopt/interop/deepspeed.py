"""DeepSpeed's JSON: what its engine is given in the run of a plan, every value filled.

Read by accelerate (`deepspeed_config_file`), by `transformers.TrainingArguments(deepspeed=FILE)` and by DeepSpeed itself.
`gradient_accumulation_steps` is 1 whatever the plan accumulates: the loop tells the engine which micro-batch is a step's last.
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
"""How the environment variables begin from which Accelerate's plugins take what they are not told."""


@contextmanager
def without_launcher() -> Iterator[None]:
    """No launcher speaks inside the block, and nothing that is put into the environment there stays."""
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
    """What the run of `plan` hands to the Accelerator as `key`, a copy of its own; None where it has no such thing."""
    field = f"accelerator[{key!r}]"
    with plugin_guard(plan.recipe.named(plan.recipe.author_of(field)), f"recipe.{field}"), without_launcher():
        return copy.deepcopy(option_value(plan.recipe.accelerator.get(key)))


def engine_config(plan: Plan) -> dict[str, Any] | None:
    """DeepSpeed's configuration in the run of `plan`; None where the plan does without DeepSpeed."""
    plugin = engine_plugin(plan, "deepspeed_plugin")
    if plugin is None:
        return None
    plugin.set_mixed_precision(plan.recipe.accelerator.get("mixed_precision", "no"))
    config: dict[str, Any] = plugin.deepspeed_config
    config.pop("steps_per_print", None)  # infinity, which Accelerate puts there and JSON does not know
    return config | {
        "train_batch_size": plan.batch.train * plan.world_size,
        "train_micro_batch_size_per_gpu": plan.batch.train,
        "gradient_clipping": float(plan.training.max_grad_norm or 0.0),
    }


def no_deepspeed(plan: Plan, registry: Registry) -> InputError:
    """The error that says which plugin would bring it."""
    ways = [way_to_it(name, options, plan) for name, options in bringers(plan.context, registry)]
    what_to_do = "; or ".join(ways) or "no installed plugin brings it: `hwopt plugins` lists all"
    return InputError(f"the plan of profile {plan.profile.name} has no DeepSpeed to export: {what_to_do}")


def bringers(context: Context, registry: Registry) -> Iterator[tuple[str, PluginOptions]]:
    """Plugins that would write `accelerator["deepspeed_plugin"]`, with the first of their options by which they do."""
    installed = replace(context, software={**context.software, "deepspeed": "any"})
    for name in registry.names:
        with suppress(Exception):  # broken, or not without options: nobody asked for it
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
            return f"{entry.author} does without it ({entry.reason}); give it {keys}"
    return f"add the plugin {name!r}, as by {keys}"
