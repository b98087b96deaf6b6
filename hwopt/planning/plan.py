"""Plan: everything that was decided before anything is built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hwopt.config.aliases import option_for
from hwopt.config.job import Job, Training
from hwopt.config.profile import Profile
from hwopt.config.renames import job_key
from hwopt.config.toml import Key
from hwopt.hardware.device import Hardware
from hwopt.model.facts import ModelFacts
from hwopt.planning.decisions import PluginDecision
from hwopt.plugin import Context, Plugin
from hwopt.plugin.recipe import Recipe
from hwopt.plugin.run_view import BatchSizes

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
    """Dotted key of the job or the training -> where its value came from."""
    world_size: int = 1
    notes: tuple[str, ...] = field(default=())
    job_name: str = ""
    """The file that the job came from."""
    memory: MemoryPlan | None = None
    """Where it was asked for."""
    oom_plugins: tuple[Plugin, ...] = ()
    """Plugins without a table in the profile that can still help a run that does not fit."""

    @property
    def is_demo(self) -> bool:
        return self.job_name == DEMO

    @property
    def chose(self) -> bool:
        """Whether a plugin left sizes to the planner, which a run then tries."""
        return any(entry.choices > 1 for entry in self.entries)

    @property
    def context(self) -> Context:
        """What its plugins were asked with."""
        return Context(self.hardware, self.software, self.model, self.job, self.world_size)

    @property
    def machine(self) -> list[Any]:
        """What a choice of sizes depends on."""
        return [self.hardware.name, self.hardware.memory_gib, self.hardware.memory_limit_gib, self.world_size]

    @property
    def settings(self) -> dict[str, Any]:
        """Dotted key -> value, of what the user may change between two sessions of a run; sizes that were chosen stand apart."""
        tables = self.job.model_dump(mode="json", exclude={"training"}) | {"training": self.training.model_dump(mode="json")}
        plugins = {f"plugins.{e.name}": e.options.model_dump(mode="json") for e in self.applied() if e.choices == 1}
        return {f"{table}.{key}": value for table, values in (tables | plugins).items() for key, value in values.items()}

    @property
    def method(self) -> dict[str, Any]:
        """Of that, what makes another model or other steps of a run."""
        found: dict[str, Any] = {"model.config": self.job.model.config}
        for entry in self.applied():
            if entry.plugin.preserves == "method":
                options = entry.options.model_dump(mode="json", exclude=set(entry.plugin.resume_ignores))
                found |= {f"plugins.{entry.name}": "in use"} | {f"plugins.{entry.name}.{key}": options[key] for key in options}
        return found

    def decided(self) -> dict[str, Any]:
        """What plugins left to the planner and the planner has chosen: a run that goes on does not choose again."""
        return {entry.name: entry.options.model_dump(mode="json") for entry in self.entries if entry.choices > 1}

    def rename(self, key: Key) -> Key:
        """The present name of a key that an earlier version saved: of the job, or of a plugin of this plan."""
        for entry in self.entries if key[0] == "plugins" else ():
            if key[1] == entry.name or key[1] in entry.plugin.former_names:
                return ("plugins", entry.name, *(entry.plugin.renamed_options.get(part, part) for part in key[2:]))
        return job_key(key)

    def applied(self) -> Iterator[PluginDecision]:
        return (entry for entry in self.entries if entry.decision != "skip")

    def place(self, *key: str) -> str:
        """Where a key of the job was given, or the table around it; "" for what nobody gave."""
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
            "provenance": dict(self.provenance),
            "notes": list(self.notes),
        }
