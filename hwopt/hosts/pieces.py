"""Single parts of a plan for a script: arguments, keywords of from_pretrained, an optimizer, a forecast."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from transformers import LlamaConfig, TrainingArguments

from hwopt.config.aliases import plugin_of
from hwopt.errors import InputError
from hwopt.export.arguments import CHECKPOINTING, LOADER, SIZES, plugin_words, sizes_of
from hwopt.hardware.detect import detect
from hwopt.hosts.arguments import script_of
from hwopt.hosts.limits import TRAINER_LACKS
from hwopt.hosts.script_plan import Script, described_model, plan_for
from hwopt.planning.plan import Plan
from hwopt.text import listing, nearest, truncate
from hwopt.training.optimizer import state_defaults

ARGUMENTS_LACK = TRAINER_LACKS | {
    "loss": "no argument says it; hwopt.optimized does it",
    "trainer": "it is not an argument of them; pass peft_config to the trainer, or a prepared model",
    "cut": "arguments cannot split a step by length; hwopt.optimized does",
    "forward_backward": "arguments cannot record the passes of a step; hwopt.optimized does",
    "events": "arguments cannot call it in each step; hwopt.optimized does",
    "optimizer_wraps": "arguments cannot wrap the optimizer; hwopt.optimized does",
}
"""Field of the recipe -> why TrainingArguments alone cannot express it."""
DEFAULTS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}  # those of torch's AdamW


def training_arguments(
    profile: str, model: Any, into: type | None = None, *, plugins: Mapping[str, Any] | None = None, **own: Any
) -> Any:
    """`into(**own)` (default: TrainingArguments) with what `profile` sets where `own` leaves it open, for `model`.

    `model`: a name, a config or a module. `plugins`: plugin -> its options, or False to leave it out. The result is a plain
    object of `into`. Its attribute `decisions` has a line for each plugin: the arguments that express it, or why none do.
    Rows of an optimizer step stay those of `own`. Raises InputError and PluginError as `hwopt.resolve` does.
    """
    into = into or TrainingArguments
    if not (isinstance(into, type) and issubclass(into, TrainingArguments)):
        raise InputError(f"into: expected TrainingArguments or a class derived from it, such as SFTConfig; got {truncate(into)}")
    if detect().device_type == "cpu":
        own = {"use_cpu": True} | own  # TrainingArguments refuses bf16 without it
    script = script_of(into(**own), ARGUMENTS_LACK)
    # also those that are the default: torch refuses some others beside 0 workers
    said = {word: own[word] for word in (*LOADER.values(), *CHECKPOINTING) if word in own}
    changes: dict[str, Any] = {"micro_rows": None, "own": {**script.own, **said}, "on_cpu": bool(own.get("use_cpu"))}
    script = dataclasses.replace(script, **changes, spares_memory=True)
    found = plan_for(described_model(model, {}), profile, script, plugins or {})
    fields = {field.name for field in dataclasses.fields(into) if field.init} - own.keys() - set(SIZES)
    fields -= set(CHECKPOINTING) if own.keys() & set(CHECKPOINTING) else set()
    if not own.keys() & sizes_of(found.plan).keys():
        fields |= sizes_of(found.plan).keys()
    words, lines = plugin_words(found.plan, fields)
    arguments: Any = into(**(own | words))
    if arguments.bf16 and "bf16" in fields and found.plan.recipe.accelerator.get("mixed_precision") == "no":
        arguments = into(**(own | words | {"bf16": False}))
        lines.append(f"bf16 = False instead of True, the default of {into.__name__}: plugin {plugin_of('bf16')!r}")
    arguments.decisions = (*lines, *found.wins, *found.plan.notes)
    return arguments


def part_plan(profile: str, model: Any, plugins: Mapping[str, Any]) -> Plan:
    """The plan of `profile` for a script of which only `model` is known, or nothing (None)."""
    described = LlamaConfig() if model is None else described_model(model, {})  # large enough for an adapter
    return plan_for(described, profile, Script(8, 8, {}), plugins).plan


def model_kwargs(profile: str, model: Any, **plugins: Any) -> dict[str, Any]:
    """What the plan of `profile` passes to `from_pretrained`: dtype, attention kernel, quantization.

    `model`: a name or a config. `plugins`: plugin -> its options, or False to leave it out.
    """
    plan = part_plan(profile, model, plugins)
    quantized = {name: make() for name, make in plan.recipe.trainer.items() if name == "quantization_config"}
    return dict(plan.recipe.model_kwargs) | quantized


def optimizer(profile: str, model: Any = None, **plugins: Any) -> Callable[..., Any]:
    """The profile's optimizer, as a function of (parameters or groups, **defaults) like a class of torch.optim.

    `defaults` are lr, betas, eps and weight_decay of torch's AdamW unless given. `model` (a name, a config or a module) is read
    by plugins that decide by its size.
    """
    make = part_plan(profile, model, plugins).recipe.optimizer or torch.optim.AdamW
    return lambda parameters, lr=DEFAULTS["lr"], **defaults: made_with(make, parameters, {"lr": lr, **defaults})


def made_with(make: Callable[..., Any], parameters: Iterable[Any], defaults: Mapping[str, Any]) -> Any:
    """The optimizer of `make`, a function of groups, for parameters or groups."""
    made = make(with_defaults(parameters, defaults))
    state_defaults(made, DEFAULTS | dict(defaults))
    return made


def with_defaults(parameters: Iterable[Any], defaults: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Groups of an optimizer from parameters or groups; lr, betas, eps and weight_decay are torch's unless given."""
    groups = list(parameters)
    if not groups:
        raise InputError("the optimizer got no parameters; an iterator such as model.parameters() can be read once only")
    if unknown := defaults.keys() - DEFAULTS.keys():
        name, known = min(unknown), list(DEFAULTS)
        raise InputError(f"the optimizer takes no argument {name!r}.{nearest(name, known)} It takes: {listing(known)}")
    if not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    return [{**DEFAULTS, **defaults, **group} for group in groups]
