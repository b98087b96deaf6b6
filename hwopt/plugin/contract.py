"""The plugin contract: the classes that a plugin uses or subclasses. Imports no torch and no transformers.

A plugin is one optimization. `probe` decides whether it works on this machine, `apply` writes its part of the recipe, and
`evidence` checks the running objects. Only `probe` is required; every other hook has a default. docs/plugins.md has examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from hwopt.config.card import Card
from hwopt.config.job import Job
from hwopt.config.task_kinds import TaskFacts, task_facts
from hwopt.hardware.device import Hardware
from hwopt.model.facts import ModelFacts
from hwopt.plugin.alternatives import OFF, Choice, Scale
from hwopt.plugin.batch_sizes import BatchSizes
from hwopt.plugin.evidence import Evidence, first_names
from hwopt.plugin.imports import Alias, dtype_name
from hwopt.plugin.memory_spec import MemorySpec
from hwopt.plugin.recipe import Lazy, Recipe
from hwopt.plugin.relations import CAPABILITIES, Conflict, Relations, Traits
from hwopt.plugin.run_view import EngineView, Events, Observation, RunView
from hwopt.text import counted

API_VERSION = 3

Effect = Literal["bits", "rounding", "method"]


class Stage(IntEnum):
    """When a plugin takes effect. Plugins are applied by stage, then in the order of the profile's tables."""

    PROCESS = 1
    MODEL = 2
    DATA = 3
    OPTIMIZER = 4
    DISTRIBUTION = 5
    COMPILE = 6
    LOOP = 7


@dataclass(frozen=True)
class MayChangeOnResume:
    """Marks an option that may change on resume although the plugin alters training: `Annotated[bool, MayChangeOnResume()]`."""


@dataclass(frozen=True)
class FitsMemory:
    """Marks an option whose value "auto" leaves it to the memory planner, through `Decision.choose`.

    `--profile auto` sets it on a card without a profile: `Annotated[int | Literal["auto"], FitsMemory()]`.
    """


class PluginOptions(BaseModel):
    """The options of a plugin, the TOML table `[plugins.<name>]`. Frozen; unknown keys are errors.

    The string below an option describes it in `hwopt plugins NAME` and in the schema for editors.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    def changed(self, **changes: Any) -> Self:
        """These options with `changes`, which are not validated."""
        return self.model_copy(update=changes)

    @classmethod
    def merged(cls, base: Mapping[str, Any], override: Mapping[str, Any]) -> Mapping[str, Any]:
        """The TOML table `base` (a parent profile) updated by `override` (its child, or `--set`). Not validated yet."""
        return {**base, **override}

    @classmethod
    def sizes(cls) -> list[str]:
        """The options that the memory planner can choose."""
        return [name for name, field in cls.model_fields.items() if FitsMemory() in field.metadata]

    def fixed_on_resume(self) -> dict[str, Any]:
        """The options that must not change on resume if the plugin alters training, as JSON values."""
        free = {name for name, field in type(self).model_fields.items() if MayChangeOnResume() in field.metadata}
        return self.model_dump(mode="json", exclude=free)


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
    lacking: Mapping[str, str] = field(default_factory=dict)
    """Field or key of the recipe that the training loop cannot take -> why. hwopt's own loop takes all."""
    chosen: frozenset[str] = frozenset()
    """The plugins that the user named: in a profile of their own, in the job or with `--set`."""
    applied: frozenset[str] = frozenset()
    """The plugins that apply; in `probe`, those of earlier stages."""
    tokens_per_sample: Callable[[], float | None] = field(default=lambda: None, compare=False)
    """Reads the training data and returns the mean tokens of a sample; None if the data are not here."""

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
    optional: bool = False
    """choose: whether the plugin is skipped if the run fits without it."""

    def __post_init__(self) -> None:
        number = len(self.options)
        least, most = {"apply": (0, 1), "fallback": (1, 1), "skip": (0, 0), "choose": (2 - self.optional, number)}[self.kind]
        if not least <= number <= most:
            raise TypeError(f"Decision.{self.kind} got {number} options; Decision.apply(reason, options) takes a single one")

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
    def choose(cls, options: Sequence[PluginOptions], reason: str, optional: bool = False) -> Decision:
        """The memory planner uses the first of `options` that fits into memory. At least two, cheapest first.

        With `optional` it skips the plugin if the run fits without, and uses the last option where nothing can be forecast;
        without, the latter is an error. Each option of an `optional` plugin needs less memory than the one before.
        """
        return cls("choose", reason, tuple(options), optional)


class Plugin:
    """Base class of an optimization. Register the subclass in the entry-point group `hwopt.plugins`."""

    name: ClassVar[str]
    api_version: ClassVar[int] = API_VERSION
    stage: ClassVar[Stage]
    relations: ClassVar[Relations] = Relations()
    """The plugins that this one follows, needs, excludes and replaces."""

    aliases: ClassVar[Mapping[str, str | Alias]] = {}
    """Option name of transformers or common scripts -> option to use instead: {"torch_dtype": "dtype", "fp16": "dtype = 'fp16'"}.

    Messages suggest options by these names, and `hwopt import` translates them; an `Alias` translates their values too.
    Messages use: num_workers, mixed_precision, torch_compile, gradient_checkpointing,
    gradient_accumulation_steps, per_device_train_batch_size, per_device_eval_batch_size, effective_batch_size, use_peft,
    deepspeed, fsdp.
    """

    class Options(PluginOptions):
        pass

    @property
    def effect(self) -> Effect:
        """The most that the present options change: "bits" nothing, "rounding", or "method": what is trained.

        A class attribute (`effect = "bits"`), or a property if it depends on an option.
        """
        return "rounding"

    @property
    def traits(self) -> Traits:
        """What the plugin's engine lacks, or what its optimizer can do. An attribute, or a property."""
        return Traits()

    options: Any

    def __init__(self, options: Any) -> None:
        self.options = options

    def probe(self, context: Context) -> Decision:
        """Decide whether and how the plugin works on this machine. Pure: reads only `context` and `self.options`."""
        raise NotImplementedError(f"{type(self).__name__} has no probe()")

    def apply(self, recipe: Recipe, context: Context) -> None:
        """Write the plugin's part of the recipe. Import heavy packages inside the callables that go into the recipe; see Lazy."""

    def memory(self, spec: MemorySpec, context: Context) -> None:
        """Change the estimates in `spec`, and add stand-ins for what fake tensors cannot run. The planner traces all else."""

    @classmethod
    def alternatives(cls, options: Any | None, context: Context) -> Sequence[Scale]:
        """Other settings than `options`, in order of memory. `options` is None if the plugin is not active."""
        return ()

    def on_oom(self, run: RunView) -> str | None:
        """Reduce the memory of the running model if even micro-batches of one row do not fit.

        Returns a description of the change and its cost, or None if the plugin cannot help. Must not change the training result.
        Called only if the profile has no table for the plugin, all options have defaults, and `probe` applies with them.
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


def verify(plugin: Plugin, run: RunView) -> Evidence:
    """The evidence of `plugin`, compared with what its options ask for."""
    evidence = plugin.evidence(run)
    return evidence.compared(plugin.expects()) if isinstance(evidence, Evidence) else evidence


def effect_by_default(plugin: type[Plugin]) -> Effect:
    """The most that the default options of `plugin` change; "method" if it depends on an option without default."""
    declared: object = plugin.effect
    if not isinstance(declared, property):
        return cast("Effect", declared)
    try:
        return plugin(plugin.Options()).effect
    except ValidationError:
        return "method"


__all__ = [
    "API_VERSION",
    "CAPABILITIES",
    "OFF",
    "Alias",
    "BatchSizes",
    "Choice",
    "Conflict",
    "Context",
    "Decision",
    "Effect",
    "EngineView",
    "Events",
    "Evidence",
    "FitsMemory",
    "Hardware",
    "Lazy",
    "MayChangeOnResume",
    "MemorySpec",
    "ModelFacts",
    "Observation",
    "Plugin",
    "PluginOptions",
    "Recipe",
    "Relations",
    "RunView",
    "Scale",
    "Stage",
    "TaskFacts",
    "Traits",
    "counted",
    "dtype_name",
    "first_names",
    "verify",
]
