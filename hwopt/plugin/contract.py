"""The contract: all that the author of a plugin needs. Imports nothing heavy.

A plugin is one optimization: it probes whether it can work here, writes its part of the recipe, and afterwards shows from
the running thing that it is really on. Every hook has a no-op default except `probe`; override only what you change.
docs/plugins.md builds one step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from hwopt.config.job import Job
from hwopt.hardware.device import Hardware
from hwopt.model.facts import ModelFacts
from hwopt.plugin.recipe import Recipe
from hwopt.plugin.run_view import BatchSizes, EngineView, Observation, RunView

API_VERSION = 1


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
    """What probing may look at. All of it is frozen and was read once."""

    hardware: Hardware
    software: Mapping[str, str]
    """Installed packages that matter, name -> version."""
    model: ModelFacts
    job: Job
    world_size: int = 1

    def has(self, package: str) -> bool:
        return package in self.software


@dataclass(frozen=True)
class Decision:
    """The answer of `probe`, always with a reason that holds both numbers ("needs 8.0, found 7.5")."""

    kind: Literal["apply", "fallback", "skip", "choose"]
    reason: str
    options: tuple[PluginOptions, ...] = ()
    """apply: the options with every "auto" decided, if there are any; fallback: the options used instead; choose: the candidates."""

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
    """What the memory planner knows of a plan without running it; plugins correct it in their `memory`."""

    parameters: int
    trained: int
    """Parameters that get gradients."""
    weight_bytes: float = 4.0
    """Of a parameter, as the model computes with it; so are the others, of a trained one."""
    gradient_bytes: float = 4.0
    state_bytes: float = 8.0
    master_bytes: float = 0.0
    held: dict[str, float] = field(default_factory=dict)
    """Kind of memory ("weights" …) -> the part of it that lies on this device, where that is not all.

    "update": of what only the optimizer's update uses.
    """
    buffers: float = 0.0
    """Bytes that are held beside what a trace of the stand-ins shows."""
    host: float = 0.0
    """Bytes of this rank that lie in the host's memory instead."""
    stand_ins: dict[str, Any] = field(default_factory=dict)
    """Recipe slot -> what takes its place where tensors are fake: a callable that allocates the same bytes.

    An engine's may have `earlier_gradients()`: as after the first of several micro-batches.
    """


def always(mine: Any, theirs: Any) -> bool:
    return True


@dataclass(frozen=True)
class Conflict:
    """Another plugin that cannot be in effect together with this one; refused before anything is built."""

    other: str
    why: str
    """And what to do about it."""
    when: Callable[[Any, Any], bool] = always
    """(options in effect of the one that declares it, of the other) -> whether these two conflict."""


@dataclass(frozen=True)
class MemoryOption:
    """Options of a plugin that need less memory than the present ones, and what they cost."""

    options: PluginOptions
    slower: float
    """Time of a step against now, about: 1.0 is no slower."""
    cost: str


class Plugin:
    """One optimization. Subclass it, name it, and register the class under the entry-point group `hwopt.plugins`."""

    name: ClassVar[str]
    api_version: ClassVar[int] = API_VERSION
    stage: ClassVar[Stage]
    after: ClassVar[tuple[str, ...]] = ()
    """Plugins of the same stage that come first where they are present."""
    preserves: ClassVar[Literal["bits", "rounding", "method"]] = "rounding"
    """The most that it may change: nothing, rounding, or the training method itself."""
    resume_ignores: ClassVar[tuple[str, ...]] = ()
    """Options of one that changes the method which do not, and so may differ where a run goes on."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Plugins without which it makes no sense; refused where one is absent or skipped."""
    conflicts: ClassVar[tuple[Conflict, ...]] = ()
    """Said by one of the two; by name, so that the other need not be installed."""
    writes: ClassVar[tuple[str, ...]] = ()
    """The recipe fields that it writes, for `hwopt plugins show`; the contract test holds it to them."""

    class Options(PluginOptions):
        pass

    def __init__(self, options: Any) -> None:
        self.options = options

    def probe(self, context: Context) -> Decision:
        """Whether and how it works here. Pure: looks at nothing but `context` and `self.options`."""
        raise NotImplementedError(f"{type(self).__name__} has no probe()")

    def apply(self, recipe: Recipe, context: Context) -> None:
        """Write its part of the recipe. Heavy imports go inside the callables that it leaves there."""

    def memory(self, spec: MemorySpec, context: Context) -> None:
        """Correct the sums of `spec`, and give stand-ins for what fake tensors cannot run. The planner traces all else itself."""

    @classmethod
    def memory_options(cls, options: Any | None, context: Context) -> Sequence[MemoryOption]:
        """Options that would save memory, from `options`, or from None where the profile does without the plugin."""
        return ()

    def on_oom(self, run: RunView) -> str | None:
        """Make the running model need less memory, asked where even single rows do not fit and the profile has no such table.

        Returns what it costs, or None where it cannot help. It must not change what is trained.
        """
        return None

    def evidence(self, run: RunView) -> Evidence:
        """Look at the running thing after step 1, never at the plugin's own flags."""
        return Evidence.unknown("this plugin observes nothing")


__all__ = [
    "API_VERSION",
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
