"""Plan: everything that was decided before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hwopt.config.aliases import option_for
from hwopt.config.card import Card
from hwopt.config.job import Job
from hwopt.config.job_training import Training
from hwopt.config.profile import Profile
from hwopt.errors import HwoptError
from hwopt.hardware.device import Hardware
from hwopt.model.facts import ModelFacts
from hwopt.planning.decisions import PluginDecision, with_applied
from hwopt.plugin import Context, MemorySpec, Plugin
from hwopt.plugin.batch_sizes import BatchSizes
from hwopt.plugin.guard import plugin_guard
from hwopt.plugin.recipe import Recipe

if TYPE_CHECKING:
    from hwopt.planning.memory_plan import MemoryPlan

DEMO = "the embedded demo"
"""The name of the job document that no file holds."""


@dataclass(frozen=True)
class Plan:
    """Everything that was decided before anything was built."""

    profile: Profile
    hardware: Hardware
    software: Mapping[str, str]
    job: Job
    model: ModelFacts
    entries: tuple[PluginDecision, ...]
    recipe: Recipe
    training: Training
    batch: BatchSizes
    provenance: Mapping[str, str]
    """Dotted key of the job -> the place that its value came from."""
    world_size: int = 1
    notes: tuple[str, ...] = field(default=())
    job_name: str = ""
    """The file that the job came from."""
    memory: MemoryPlan | None = None
    """The memory plan, or None if it was not made."""
    refused: HwoptError | None = None
    """The error with which a run would refuse the data, if its memory was planned."""
    data_warnings: tuple[str, ...] = ()
    """Which data a run would not use, if they were read."""
    oom_plugins: tuple[Plugin, ...] = ()
    """Plugins without a table in the profile that can free memory in a run that does not fit."""

    @property
    def is_demo(self) -> bool:
        return self.job_name == DEMO

    @property
    def chose(self) -> bool:
        """Whether a plugin left a choice of sizes to the planner; a run tries them before step 1."""
        return any(entry.choices > 1 for entry in self.entries)

    @property
    def router_loss(self) -> float:
        """Coefficient of the load-balancing loss that is trained; 0 if there is none, or if the job leaves it out."""
        return 0.0 if self.job.task.ignore_router_loss else self.model.router_loss

    @cached_property
    def context(self) -> Context:
        """The context that the plugins were probed with."""
        context = Context(self.hardware, self.software, self.model, self.job, self.world_size, self.card)
        return with_applied(replace(context, chosen=self.profile.chosen), self.entries)

    @property
    def card(self) -> Card | None:
        """The vendor's figures for the device, if the profile has them."""
        return self.profile.card_of(self.hardware)

    @property
    def machine(self) -> list[Any]:
        """The facts that a choice of sizes depends on."""
        return [self.hardware.name, self.hardware.memory_gib, self.hardware.memory_limit_gib, self.world_size]

    @cached_property
    def memory_spec(self) -> MemorySpec:
        """The memory facts and stand-ins that the plugins declare (`Plugin.memory`). Read-only; each hook runs once."""
        spec = MemorySpec(self.model.parameters, self.model.parameters)
        for entry in self.applied():
            with plugin_guard(entry.who, "memory()"):
                entry.plugin.memory(spec, self.context)
        return spec

    @property
    def settings(self) -> dict[str, Any]:
        """Dotted key -> value of everything that may change on resume. Options that the planner chose are in `decided`."""
        tables = self.job.model_dump(mode="json", exclude={"training"}) | {"training": self.training.model_dump(mode="json")}
        plugins = {f"plugins.{e.name}": e.options.model_dump(mode="json") for e in self.applied() if e.choices == 1}
        return {f"{table}.{key}": value for table, values in (tables | plugins).items() for key, value in values.items()}

    @property
    def method(self) -> dict[str, Any]:
        """Dotted key -> value of everything that must not change on resume: it alters the model or its training."""
        found: dict[str, Any] = {"model.config": self.job.model.config}
        for entry in self.applied():
            if entry.plugin.effect == "method":
                options = entry.options.fixed_on_resume()
                found |= {f"plugins.{entry.name}": "in use"} | {f"plugins.{entry.name}.{key}": options[key] for key in options}
        return found

    def decided(self) -> dict[str, Any]:
        """Plugin -> the options that the planner chose; a resumed run keeps them."""
        return {entry.name: entry.options.model_dump(mode="json") for entry in self.entries if entry.choices > 1}

    def applied(self) -> Iterator[PluginDecision]:
        return (entry for entry in self.entries if entry.decision != "skip")

    def place(self, *key: str) -> str:
        """The place of a key of the job, or of its table; "" if neither was given."""
        above = (".".join(key[:end]) for end in range(len(key), 0, -1))
        found = next((self.provenance[each] for each in above if each in self.provenance), "")
        return "" if found == "default" else found

    def batch_option(self, key: str) -> str:
        """The option that sets `recipe.batch[key]`, as `--set` takes it; for messages."""
        author = self.recipe.author_of(f"batch[{key!r}]")
        for entry in self.entries:
            if entry.author == author:
                return f"plugins.{entry.name}.{key}" if key in type(entry.options).model_fields else f"[plugins.{entry.name}]"
        return option_for(f"per_device_{key}_batch_size")

    def to_dict(self) -> dict[str, Any]:
        """What `plan.json` and `hwopt plan --format json` hold."""
        return {
            "profile": self.profile.name,
            "hardware": asdict(self.hardware),
            "software": dict(self.software),
            "model": asdict(self.model),
            "job": self.job.model_dump(mode="json", exclude={"training"}),
            "training": self.training.model_dump(mode="json"),
            "batch": asdict(self.batch) | {"accumulation": self.batch.accumulation(self.world_size)},
            "world_size": self.world_size,
            "plugins": [entry.to_dict() for entry in self.entries],
            **({} if self.memory is None else {"memory": self.memory.to_dict()}),
            **({"refused": str(self.refused)} if self.refused else {}),
            **({"data_warnings": list(self.data_warnings)} if self.data_warnings else {}),
            "provenance": dict(self.provenance),
            "notes": list(self.notes),
        }


Replan = Callable[[Sequence[str]], Plan]
"""Resolves the plan with further `--set` assignments."""
