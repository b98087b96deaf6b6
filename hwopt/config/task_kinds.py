"""The installed kinds of tasks: name -> a subclass of `hwopt.tasks.base.Task`, from the entry-point group `hwopt.tasks`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.metadata import EntryPoint
from typing import Any, Literal

from hwopt.config.entry_points import by_name, distribution_of, install_command
from hwopt.errors import InputError, PluginError
from hwopt.text import listing, nearest, truncate

GROUP = "hwopt.tasks"


@dataclass(frozen=True)
class TaskFacts:
    """What plugins and the packages below `hwopt.tasks` know about a kind of task."""

    kind: str
    """The value of task.kind, and the name of the entry point."""
    auto_class: str
    """The class of transformers that builds the model with the task's head."""
    inputs: Literal["tokens", "images"] = "tokens"
    """What a sample is made of."""
    target: Literal["sample", "token", "next_token"] = "sample"
    """What has a label: each sample, each token, or each token the one that follows it."""
    decoder: bool = False
    """Needs a model whose tokens attend only to the tokens before them."""
    encoder_decoder: bool = False
    """Needs an encoder-decoder: a sample has an input and a target."""
    adapter: str = "SEQ_CLS"
    """The TaskType of peft."""
    keys: frozenset[str] = frozenset()
    """Keys of [data] and [task] that only some tasks read, and this one does: "data.prompt"."""


@cache
def installed_tasks() -> Mapping[str, EntryPoint]:
    """Kind -> entry point, sorted by kind. Raises PluginError if two packages register the same kind."""
    found = by_name(metadata.entry_points(group=GROUP), "task")
    if not found:
        raise PluginError(f"no task is installed: the metadata of hwopt is older than its code. Run {install_command()}")
    return found


def task_kinds() -> list[str]:
    """The names of the installed kinds."""
    return list(installed_tasks())


@cache
def task_class(kind: str) -> Any:
    """The class of the task `kind`. Raises InputError if it is not installed, PluginError if it cannot be used."""
    entries = installed_tasks()
    if kind not in entries:
        raise InputError(
            f"task.kind: no task {truncate(kind)} is installed.{nearest(kind, entries)} It is one of: {listing(list(entries))}"
        )
    entry = entries[kind]
    who = f"task {kind!r} of {distribution_of(entry)}"
    try:
        found = entry.load()
    except Exception as error:  # the import of a package can raise anything
        raise PluginError(
            f"{who} cannot be imported ({entry.value}): {type(error).__name__}: {error}. Fix or uninstall it"
        ) from error
    facts = getattr(found, "facts", None)
    if not isinstance(found, type) or not isinstance(facts, TaskFacts):
        raise PluginError(f"{who}: expected a subclass of hwopt.tasks.base.Task with `facts`, got {truncate(found)}")
    if facts.kind != kind:
        raise PluginError(f"{who}: the kind in its facts is {facts.kind!r}; it must be the entry point's name")
    return found


def task_facts(kind: str) -> TaskFacts:
    """The facts of the task `kind`. Raises as `task_class` does."""
    facts: TaskFacts = task_class(kind).facts
    return facts


def kinds_that_read(key: str) -> list[str]:
    """The tasks whose facts name `key`, such as "data.prompt". Leaves out installed tasks that cannot be used."""
    found = []
    for kind in task_kinds():
        with suppress(PluginError):
            if key in task_facts(kind).keys:
                found.append(kind)
    return found
