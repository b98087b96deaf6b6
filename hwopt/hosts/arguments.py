"""TrainingArguments and a plan: what the script sets itself, and what the plan writes where the script leaves it open."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import datasets
import numpy as np
from accelerate.state import AcceleratorState, PartialState

from hwopt.config.aliases import plugin_aliases
from hwopt.config.job_training import Training
from hwopt.errors import InputError
from hwopt.export.arguments import CHECKPOINTING, LOADER, SIZES
from hwopt.hosts.script_plan import Script
from hwopt.planning.plan import Plan

TRAINING = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "seed")
"""The hyperparameters that [training] of a job may have too."""
SAMPLED = 500  # rows of a dataset whose tokens are counted
SWITCHES = ("activation_checkpointing", "gradient_checkpointing", "torch_compile")
"""Arguments by which the Trainer would do a second time what a plugin does."""


def own_words(args: Any) -> dict[str, Any]:
    """The arguments whose values differ from the defaults of their class. A default that is set on purpose cannot be told."""
    default = with_defaults(args)
    names = [field.name for field in dataclasses.fields(default) if field.init]
    values, defaults = (
        [getattr(value := getattr(each, name, None), "value", value) for name in names] for each in (args, default)
    )
    found = {name: value for name, value, usual in zip(names, values, defaults, strict=True) if value != usual}
    if not args.fp16 and not args.bf16 and found.keys() & {"fp16", "bf16"}:
        found["mixed_precision"] = "no"
    if "activation_checkpointing" in found:  # the new name of transformers for the same
        found.pop("gradient_checkpointing", None)
    if found.get("fp16") or found.get("bf16"):
        found.pop("bf16" if args.fp16 else "fp16", None)
    return {word: value for word, value in found.items() if word not in SIZES}


def with_defaults(args: Any) -> Any:
    """An object of the class of `args`, or of the nearest class below it that needs no more arguments, with its defaults."""
    for cls in type(args).__mro__:
        with contextlib.suppress(Exception), kept_states():
            return cls(output_dir=args.output_dir, **({"use_cpu": True} if args.use_cpu else {}))
    raise InputError(f"{type(args).__name__} cannot be made with its defaults, so what you set cannot be told from them")


@contextlib.contextmanager
def kept_states() -> Iterator[None]:
    """A block that leaves the process's Accelerator as it is: transformers forgets its state when it makes arguments."""
    states = [each._shared_state for each in (AcceleratorState, PartialState)]
    before = [dict(state) for state in states]
    try:
        yield
    finally:
        for state, old in zip(states, before, strict=True):
            state.clear()
            state.update(old)


@contextlib.contextmanager
def kept_overrides() -> Iterator[None]:
    """Restore bitsandbytes' settings of single weights at the end: it knows them by position; the next model would get them."""

    def manager() -> Any:
        library: Any = sys.modules.get("bitsandbytes")
        return library and library.optim.GlobalOptimManager.get_instance()

    before = {name: copy.copy(value) for name, value in vars(manager()).items()} if manager() else {}
    try:
        yield
    finally:
        if manager():
            manager().initialize()
            vars(manager()).update(before)


def script_of(args: Any, lacks: Mapping[str, str], dataset: Any = None) -> Script:
    """What TrainingArguments say of the training with the rows of `dataset`. `lacks`: as in `Script`."""
    return Script(
        rows=args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size,
        eval_rows=args.per_device_eval_batch_size,
        micro_rows=args.per_device_train_batch_size,
        training={name: getattr(args, name) for name in TRAINING if name in Training.model_fields and getattr(args, name, None)},
        own=own_words(args),
        lacks=lacks,
        world_size=args.world_size,
        tokens_per_sample=mean_tokens(dataset),
        spares_memory=any(getattr(args, name, False) for name in CHECKPOINTING),  # as SFTConfig does by default
        devices=max(args.n_gpu, 1),
    )


def mean_tokens(dataset: Any) -> float | None:
    """The mean tokens of some rows of `dataset`, without padding; None if it is not stored tokens, or transforms its rows."""
    if not isinstance(dataset, datasets.Dataset) or dataset.format["type"] == "custom" or not len(dataset):
        return None
    few = dataset.select(range(0, len(dataset), max(1, len(dataset) // SAMPLED))).with_format(None)
    for name, tokens in (("attention_mask", sum), ("input_ids", len)):
        if name in few.column_names and not has_choices(few[0][name]):
            return float(sum(map(tokens, few[name])) / len(few))
    return None


def has_choices(tokens: Any) -> bool:
    """Whether the `tokens` of a row are several texts, as for a multiple choice."""
    return np.ndim(tokens[:1]) > 1


def apply_plan(plan: Plan, args: Any, named: bool) -> list[str]:
    """Write the plan into `args`, a copy of the user's. Returns a line for each change. `named`: the model is a name."""
    recipe, changed, kind = plan.recipe, list[str](), type(args).__name__

    def put(name: str, value: Any, author: str) -> None:
        if getattr(args, name) != value:
            changed.append(f"{name} = {value!r} instead of {getattr(args, name)!r}, the default of {kind}: {author}")
            setattr(args, name, value)

    if precision := recipe.accelerator.get("mixed_precision"):
        author = recipe.author_of("accelerator['mixed_precision']")
        for name in ("bf16", "fp16"):
            put(name, precision == name, author)
        if hasattr(args, "mixed_precision"):  # derived when the arguments were made
            args.mixed_precision = precision
    for key, name in LOADER.items():
        # persistent workers would not see what a callback changes in the dataset between two epochs
        if key in recipe.loader and key != "persistent_workers":
            random = " (random masks and augmentations differ in workers)" if key == "num_workers" and recipe.loader[key] else ""
            put(name, recipe.loader[key], recipe.author_of(f"loader[{key!r}]") + random)
    applied, done = {entry.name: entry.author for entry in plan.applied()}, dict[str, str]()
    for name in SWITCHES:
        plugin = plugin_aliases().get(name, "..").split(".")[1]
        if plugin in applied and getattr(args, name, False):
            setattr(args, name, False)
            done.setdefault(plugin, f"{name} of {kind} is off in the Trainer: {applied[plugin]} does it in the model")
    changed += done.values()
    if named and "model_init_kwargs" in inspect.signature(type(args)).parameters:
        planned, own = dict(recipe.model_kwargs), dict(args.model_init_kwargs or {})
        for key, make in recipe.trainer.items():
            name = next(each.name for each in plan.applied() if each.author == recipe.author_of(f"trainer[{key!r}]"))
            changed.append(f"{key} is that of plugin {name!r}, so other weights are trained; {name}=False leaves it out")
            planned |= {key: make()} if key == "quantization_config" else {}
        if (
            (plan.model.frozen or "peft_config" in recipe.trainer)
            and recipe.accelerator.get("mixed_precision")
            and "dtype" not in own
        ):
            planned["dtype"] = "auto"
            changed.append("the weights below the adapter keep the dtype of their file; dtype in model_init_kwargs sets another")
        args.model_init_kwargs = planned | own
    return changed
