"""The plugin contract: the classes that a plugin uses or subclasses. Imports no torch and no transformers.

A plugin is one optimization. `probe` decides whether it works on this machine, `apply` writes its part of the recipe, and
`evidence` checks the running objects. Only `probe` is required; every other hook has a default. docs/plugins.md has examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from hwopt.config.card import Card
from hwopt.config.job import Job
from hwopt.config.task_kinds import TaskFacts, task_facts
from hwopt.hardware.device import Hardware
from hwopt.model.facts import ModelFacts
from hwopt.plugin.conflicts import CAPABILITIES, Conflict
from hwopt.plugin.evidence import Evidence, first_names
from hwopt.plugin.imports import options_by_alias
from hwopt.plugin.memory_spec import MemorySpec
from hwopt.plugin.recipe import Recipe
from hwopt.plugin.run_view import BatchSizes, EngineView, Observation, RunView

API_VERSION = 2


class Stage(IntEnum):
    """When a plugin takes effect. Plugins are applied by stage, then in the order of the profile's tables."""

    PROCESS = 1
    MODEL = 2
    DATA = 3
    OPTIMIZER = 4
    DISTRIBUTION = 5
    COMPILE = 6
    LOOP = 7


class PluginOptions(BaseModel):
    """The options of a plugin, the TOML table `[plugins.<name>]`. Frozen; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


@dataclass(frozen=True)
class Context:
    """What `probe` may read: hardware, software, model and job. Read-only."""

    hardware: Hardware
    software: Mapping[str, str]
    """Name of an installed package -> version."""
    model: ModelFacts
    job: Job
    world_size: int = 1
    card: Card | None = None
    """The vendor's figures for the device, from the profile; None if the device is not the profile's card."""

    @property
    def task(self) -> TaskFacts:
        """The facts of the job's task: what has a label, and which head the model has."""
        return task_facts(self.job.task.kind)

    def has(self, package: str) -> bool:
        """Whether `package` is installed."""
        return package in self.software


@dataclass(frozen=True)
class Decision:
    """The result of `probe`. The reason gives the required and the actual value ("needs 8.0, found 7.5")."""

    kind: Literal["apply", "fallback", "skip", "choose"]
    reason: str
    options: tuple[PluginOptions, ...] = ()
    """apply: the options with every "auto" replaced; fallback: the options used instead; choose: the candidates."""

    @classmethod
    def apply(cls, reason: str, options: PluginOptions | None = None) -> Decision:
        """The plugin works as requested. `options`: the same options with every "auto" replaced by a value."""
        return cls("apply", reason, () if options is None else (options,))

    @classmethod
    def fallback(cls, to: PluginOptions, reason: str) -> Decision:
        """The plugin does less than requested and uses the options `to` instead."""
        return cls("fallback", reason, (to,))

    @classmethod
    def skip(cls, reason: str) -> Decision:
        """The plugin does nothing on this machine or for this job."""
        return cls("skip", reason)

    @classmethod
    def choose(cls, options: Sequence[PluginOptions], reason: str) -> Decision:
        """The memory planner uses the first of `options` that fits into memory. At least two, cheapest first."""
        return cls("choose", reason, tuple(options))


@dataclass(frozen=True)
class MemoryOption:
    """Options of a plugin that need less memory than the current ones, and their cost."""

    options: PluginOptions
    slower: float
    """Approximate step time relative to the current one: 1.33 is a third slower."""
    cost: str


@dataclass(frozen=True)
class SpeedOption:
    """Options of a plugin that need more memory than the current ones and may be faster."""

    options: PluginOptions | None
    """None turns the plugin off."""
    gain: str
    alters: bool = False
    """Whether they also change the training, such as another effective batch."""


@dataclass(frozen=True)
class Tunable:
    """A setting of a plugin that changes the speed and not the training, with the values that `hwopt tune` may measure."""

    choices: tuple[Mapping[str, Any], ...]
    """Changes of the plugin's table, such as {"layers": 2}, {"enabled": False}. Two at least."""
    present: int
    """The index of the choice that is in effect."""
    ordered: bool = False
    """Whether the choices are sizes, the smallest first: the speed rises up to one of them, and falls after it."""
    input: bool = False
    """Whether it only changes when step batches are ready. It gains at most the time in which the loop waits for data."""
    parallel: bool = False
    """Whether step batches are ready faster in proportion to the number, as with data workers. Needs `input`."""


class Plugin:
    """Base class of an optimization. Register the subclass in the entry-point group `hwopt.plugins`."""

    name: ClassVar[str]
    api_version: ClassVar[int] = API_VERSION
    stage: ClassVar[Stage]
    after: ClassVar[tuple[str, ...]] = ()
    """Plugins of the same stage that must be applied before this one, if the profile has them."""
    preserves: ClassVar[Literal["bits", "rounding", "method"]] = "rounding"
    """What the plugin changes with default options: "bits" nothing, "rounding" rounding only, "method" the training method."""
    resume_ignores: ClassVar[tuple[str, ...]] = ()
    """Options that may change on resume although the plugin alters training."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Plugins that this one needs. A plan in which one of them is missing or skipped is an error."""
    conflicts: ClassVar[tuple[Conflict, ...]] = ()
    """What this plugin cannot be used with. Only one of the two plugins declares the conflict."""
    replaces: ClassVar[tuple[str, ...]] = ()
    """Slots ("optimizer") and keys ("model_kwargs['dtype']") of the recipe that this plugin takes over from another plugin."""
    helps_oom: ClassVar[bool] = False
    """Whether `on_oom` may be called if the profile has no table for the plugin. All options need defaults."""

    aliases: ClassVar[Mapping[str, str]] = {}
    """Option name of transformers or common scripts -> option to use instead: {"torch_dtype": "dtype", "fp16": "dtype = 'fp16'"}.

    Messages suggest options by these names. They use: num_workers, mixed_precision, torch_compile, gradient_checkpointing,
    gradient_accumulation_steps, per_device_train_batch_size, per_device_eval_batch_size, effective_batch_size, use_peft,
    deepspeed, fsdp.
    """

    class Options(PluginOptions):
        pass

    @property
    def effect(self) -> Literal["bits", "rounding", "method"]:
        """What the plugin changes with its present options. Override it if an option changes more than `preserves` says."""
        return type(self).preserves

    @property
    def lacks(self) -> tuple[str, ...]:
        """The capabilities (see CAPABILITIES) that the engine of this plugin lacks."""
        return ()

    @property
    def elementwise(self) -> bool:
        """Whether the optimizer of this plugin updates each element independently, as AdamW does.

        Only such an optimizer can update the flat partitions or shards of an engine that lacks `whole_parameters`.
        """
        return False

    @property
    def per_parameter(self) -> bool:
        """Whether the optimizer of this plugin updates each parameter independently, also with one call for each.

        Only such an optimizer can be used with an engine that lacks `single_update`.
        """
        return self.elementwise

    def __init__(self, options: Any) -> None:
        self.options = options

    def probe(self, context: Context) -> Decision:
        """Decide whether and how the plugin works on this machine. Pure: reads only `context` and `self.options`."""
        raise NotImplementedError(f"{type(self).__name__} has no probe()")

    def apply(self, recipe: Recipe, context: Context) -> None:
        """Write the plugin's part of the recipe. Import heavy packages inside the callables that go into the recipe."""

    def memory(self, spec: MemorySpec, context: Context) -> None:
        """Change the estimates in `spec`, and add stand-ins for what fake tensors cannot run. The planner traces all else."""

    @classmethod
    def memory_options(cls, options: Any | None, context: Context) -> Sequence[MemoryOption]:
        """Options that need less memory than `options`. `options` is None if the plugin is not active."""
        return ()

    @classmethod
    def speed_options(cls, options: Any, context: Context) -> Sequence[SpeedOption]:
        """Options that may be faster than `options` if more memory is available, the fastest first."""
        return ()

    @classmethod
    def tunables(cls, options: Any | None, context: Context) -> Sequence[Tunable]:
        """The settings that may be faster, whatever memory they need, at the same training. `options`: None if not active."""
        return ()

    @classmethod
    def merge_options(cls, below: Mapping[str, Any], above: Mapping[str, Any]) -> Mapping[str, Any]:
        """The TOML table `below` (a parent profile) updated by `above` (its child, or `--set`). Values are not validated yet."""
        return {**below, **above}

    @classmethod
    def options_from(cls, word: str, value: Any) -> Mapping[str, Any] | None:
        """The options for `word = value` of another tool, for `hwopt import`. `word` is one of `aliases`.

        {}: nothing to set, because the value is what a plan without the option does. None: the plugin has no equivalent.
        `enabled = True` adds a table without further options. Values are not validated yet.
        """
        return options_by_alias(cls.aliases, word, value)

    @classmethod
    def scale_options(cls, options: Any, ratio: float) -> tuple[Mapping[str, Any], str]:
        """(changed options, description of the change) for a card with `ratio` times the memory; ({}, "") if nothing changes."""
        return {}, ""

    def on_oom(self, run: RunView) -> str | None:
        """Reduce the memory of the running model if even micro-batches of one row do not fit.

        Returns a description of the change and its cost, or None if the plugin cannot help. Must not change the training result.
        Called only if the class sets `helps_oom`, the profile has no table for the plugin, and `probe` with default options
        applies.
        """
        return None

    def evidence(self, run: RunView) -> Evidence:
        """What the running objects show of the plugin, after step 1 and again after the last step.

        Reads no options, plan or recipe, which say what should be, not what is. `run` refuses them in the contract test.
        """
        return Evidence.unknown("this plugin reports no evidence")

    def expects(self) -> Mapping[str, Any]:
        """The values of `Evidence.found` that the options ask for: name -> value, or a frozenset of values. Reads no run."""
        return {}

    def verify(self, run: RunView) -> Evidence:
        """The evidence, compared with what the options ask for. Do not override."""
        evidence = self.evidence(run)
        return evidence.compared(self.expects()) if isinstance(evidence, Evidence) else evidence


__all__ = [
    "API_VERSION",
    "CAPABILITIES",
    "BatchSizes",
    "Conflict",
    "Context",
    "Decision",
    "EngineView",
    "Evidence",
    "Hardware",
    "MemoryOption",
    "MemorySpec",
    "ModelFacts",
    "Observation",
    "Plugin",
    "PluginOptions",
    "Recipe",
    "RunView",
    "SpeedOption",
    "Stage",
    "TaskFacts",
    "Tunable",
    "first_names",
]
