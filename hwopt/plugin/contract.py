"""The plugin contract: all that the author of a plugin needs. Imports nothing heavy.

A plugin is one optimization. It probes whether it can work here, writes its part of the recipe, and shows by the running objects
that it is really on. Every hook but `probe` has a default that does nothing. docs/plugins.md builds three plugins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from hwopt.config.job import Job
from hwopt.hardware.device import Hardware
from hwopt.model.facts import ModelFacts
from hwopt.plugin.conflicts import CAPABILITIES, Conflict
from hwopt.plugin.recipe import Recipe
from hwopt.plugin.run_view import BatchSizes, EngineView, Observation, RunView

API_VERSION = 2


class Stage(IntEnum):
    """When a plugin's part takes effect; plugins are applied stage by stage, then in the order of the profile."""

    PROCESS = 1
    MODEL = 2
    DATA = 3
    OPTIMIZER = 4
    DISTRIBUTION = 5
    COMPILE = 6
    LOOP = 7


class PluginOptions(BaseModel):
    """The TOML table `[plugins.<name>]`. Frozen; unknown keys are refused with the nearest known one."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


@dataclass(frozen=True)
class Context:
    """What `probe` may look at: read once, and read-only."""

    hardware: Hardware
    software: Mapping[str, str]
    """Name -> version of the installed packages that plugins ask for."""
    model: ModelFacts
    job: Job
    world_size: int = 1

    def has(self, package: str) -> bool:
        """Whether `package` is installed."""
        return package in self.software


@dataclass(frozen=True)
class Decision:
    """The answer of `probe`, always with a reason that holds both numbers ("needs 8.0, found 7.5")."""

    kind: Literal["apply", "fallback", "skip", "choose"]
    reason: str
    options: tuple[PluginOptions, ...] = ()
    """apply: the options with every "auto" decided; fallback: the options used instead; choose: the candidates."""

    @classmethod
    def apply(cls, reason: str, options: PluginOptions | None = None) -> Decision:
        """The plugin does what was asked. `options`: the same request with every "auto" decided."""
        return cls("apply", reason, () if options is None else (options,))

    @classmethod
    def fallback(cls, to: PluginOptions, reason: str) -> Decision:
        """The plugin does less than was asked: `to` instead of its options."""
        return cls("fallback", reason, (to,))

    @classmethod
    def skip(cls, reason: str) -> Decision:
        """The plugin does nothing on this machine or for this job."""
        return cls("skip", reason)

    @classmethod
    def choose(cls, options: Sequence[PluginOptions], reason: str) -> Decision:
        """The memory planner takes the first of `options` that fits; two at least, cheapest first."""
        return cls("choose", reason, tuple(options))


@dataclass(frozen=True)
class Evidence:
    """What was observed of a plugin after the first optimizer step."""

    status: Literal["active", "inactive", "unknown"]
    seen: str

    @classmethod
    def active(cls, seen: str) -> Evidence:
        return cls("active", seen)

    @classmethod
    def inactive(cls, seen: str) -> Evidence:
        return cls("inactive", seen)

    @classmethod
    def unknown(cls, why: str) -> Evidence:
        return cls("unknown", why)


@dataclass
class MemorySpec:
    """What the memory planner knows of a plan without running it; plugins correct it in `memory`."""

    parameters: int
    trained: int
    """Number of parameters that get gradients."""
    weight_bytes: float = 4.0
    """Bytes of a parameter as the model computes with it. The next three are bytes of a trained parameter."""
    gradient_bytes: float = 4.0
    state_bytes: float = 8.0
    master_bytes: float = 0.0
    held: dict[str, float] = field(default_factory=dict)
    """Kind of memory ("weights", "gradients", "optimizer_state", "update") -> the fraction of it on this device, if below 1.

    "update" is what only the optimizer's update uses.
    """
    buffers: float = 0.0
    """Bytes on the device that a trace of the stand-ins does not show."""
    host: float = 0.0
    """Bytes of this rank in the host's memory."""
    stand_ins: dict[str, Any] = field(default_factory=dict)
    """Recipe slot -> a callable that allocates the same bytes as the slot's own, for tensors without data.

    An engine's stand-in may have `earlier_gradients()`: the gradients held after the first of several micro-batches.
    """


@dataclass(frozen=True)
class MemoryOption:
    """Options of a plugin that need less memory than the present ones, and their cost."""

    options: PluginOptions
    slower: float
    """Approximate time of a step, as a multiple of the present time."""
    cost: str


class Plugin:
    """One optimization. Subclass it, name it, and register the class under the entry-point group `hwopt.plugins`."""

    name: ClassVar[str]
    api_version: ClassVar[int] = API_VERSION
    stage: ClassVar[Stage]
    after: ClassVar[tuple[str, ...]] = ()
    """Plugins of the same stage that are applied before this one if the profile has them."""
    preserves: ClassVar[Literal["bits", "rounding", "method"]] = "rounding"
    """The most that the plugin may change: nothing, rounding, or the training method."""
    resume_ignores: ClassVar[tuple[str, ...]] = ()
    """Options that may change on resume although the plugin alters training."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Plugins that this one needs; a plan in which one of them is absent or skipped is refused."""
    conflicts: ClassVar[tuple[Conflict, ...]] = ()
    """What this plugin cannot be used with; one of the two plugins declares it."""
    replaces: ClassVar[tuple[str, ...]] = ()
    """Slots ("optimizer") and keys ("model_kwargs['dtype']") of the recipe that this plugin takes over from another plugin."""
    helps_oom: ClassVar[bool] = False
    """Whether `on_oom` may be called although the profile has no table for the plugin. Its options then have defaults."""

    former_names: ClassVar[tuple[str, ...]] = ()
    """Names that it had in earlier versions; they still work in profiles and with `--set`, with a note."""
    renamed_options: ClassVar[Mapping[str, str]] = {}
    """Old option -> present option; the old one still works, with a note."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Word of transformers or of common scripts -> the option to give instead: {"num_epochs": "epochs", "amp": "dtype = 'fp16'"}.

    Messages name options by these words too. They use: num_workers, mixed_precision, torch_compile, gradient_checkpointing,
    gradient_accumulation_steps, per_device_train_batch_size, per_device_eval_batch_size, effective_batch_size, use_peft,
    deepspeed, fsdp.
    """

    class Options(PluginOptions):
        pass

    @property
    def lacks(self) -> tuple[str, ...]:
        """Capabilities (CAPABILITIES) that the engine which the plugin writes does not have."""
        return ()

    @property
    def elementwise(self) -> bool:
        """Whether the optimizer that the plugin writes updates each element on its own, as AdamW does.

        Only such an optimizer can step on the flat partitions and shards of an engine that lacks `whole_parameters`.
        """
        return False

    def __init__(self, options: Any) -> None:
        self.options = options

    def probe(self, context: Context) -> Decision:
        """Decide whether and how the plugin works here. Pure: looks at `context` and `self.options` only."""
        raise NotImplementedError(f"{type(self).__name__} has no probe()")

    def apply(self, recipe: Recipe, context: Context) -> None:
        """Write the plugin's part of the recipe. Heavy imports go inside the callables that it leaves there."""

    def memory(self, spec: MemorySpec, context: Context) -> None:
        """Correct the numbers of `spec`, and give stand-ins for what fake tensors cannot run. The planner traces the rest."""

    @classmethod
    def memory_options(cls, options: Any | None, context: Context) -> Sequence[MemoryOption]:
        """Options that need less memory than `options`; None if the plugin is not in effect."""
        return ()

    @classmethod
    def merge_options(cls, below: Mapping[str, Any], above: Mapping[str, Any]) -> Mapping[str, Any]:
        """The table of a parent profile with that of its child, or of `--set`, on top. Values are not checked yet."""
        return {**below, **above}

    @classmethod
    def scale_options(cls, options: Any, ratio: float) -> tuple[Mapping[str, Any], str]:
        """Options for a card with `ratio` times the memory, and what changed: ({}, "") changes nothing."""
        return {}, ""

    def on_oom(self, run: RunView) -> str | None:
        """Reduce the memory of the running model, once not even micro-batches of one row fit.

        Returns what that costs, or None if the plugin cannot help. It must not change what is trained. Called only if the
        class sets `helps_oom`, the profile has no table for the plugin, and `probe` with the default options applies.
        """
        return None

    def evidence(self, run: RunView) -> Evidence:
        """What the running objects show after step 1; never what the plugin's own flags say."""
        return Evidence.unknown("this plugin observes nothing")


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
    "Stage",
]
