"""Recipe: the settings, factories and steps that plugins may set. Plugins write to nothing else.

`hwopt.training.build` builds a run from the recipe alone. If two plugins set the same slot or key, that is an error that names
both, unless one of them declares that it `replaces` the other's. The recipe records what each plugin writes.
docs/recipe.md lists the fields and their signatures.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from hwopt.errors import PluginError
from hwopt.plugin.guard import Guarded, GuardedOnce
from hwopt.plugin.run_view import EVENTS, Events
from hwopt.text import listing, nearest, truncate


def can_be_replaced(what: str) -> bool:
    """Whether `what` is a slot, or a key such as "batch['train']". Lists are shared by all plugins and cannot be replaced."""
    field, bracket, _ = what.partition("[")
    return field in (SETTINGS if bracket else SLOTS)


@dataclass(frozen=True)
class Collision:
    """A slot or key that two authors set."""

    what: str
    first: str
    second: str


class Settings(UserDict[str, Any]):
    """A dict whose keys can be set once. If a second author sets a key, the recipe records a collision."""

    def __init__(self, recipe: Recipe, field: str) -> None:
        self._recipe, self._field = recipe, field
        super().__init__()

    def __setitem__(self, key: str, value: Any) -> None:
        what = f"{self._field}[{key!r}]"
        if self._recipe.claim(what):
            super().__setitem__(key, self._recipe.guarded(value, what) if self._field == "accelerator" else value)

    def __delitem__(self, key: str) -> None:
        raise PluginError(f"{self._recipe.author}: recipe.{self._field} is shared by all plugins; entries cannot be removed")


class Steps(MutableSequence[Any]):
    """A list that plugins append to. Errors of an entry name the plugin that added it."""

    def __init__(self, recipe: Recipe, field: str) -> None:
        self._recipe, self._field = recipe, field
        self._steps: list[Any] = []

    def insert(self, index: int, value: Any) -> None:
        self._recipe.record(self._field)
        self._steps.insert(index, self._recipe.guarded(value, self._field))

    def __setitem__(self, index: Any, value: Any) -> None:
        raise PluginError(f"{self._recipe.author}: recipe.{self._field} is shared by all plugins; append to it instead")

    def __delitem__(self, index: Any) -> None:
        raise PluginError(f"{self._recipe.author}: recipe.{self._field} is shared by all plugins; entries cannot be removed")

    def __getitem__(self, index: Any) -> Any:
        return self._steps[index]

    def __len__(self) -> int:
        return len(self._steps)


class AllEvents:
    """The events of all plugins: each method of `Events` calls that of every appended object, in order."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._calls: dict[str, list[Callable[..., Any]]] = {name: [] for name in EVENTS}
        self._objects: list[Events] = []

    def append(self, events: Events) -> None:
        """Add the methods that the class of `events` overrides. Raises PluginError if one is not an event."""
        for name in overridden_by(events, self._recipe.author):
            self._recipe.record(f"events[{name!r}]")
            self._calls[name].append(self._recipe.guarded(getattr(events, name), f"events.{name}"))
        self._objects.append(events)

    def __iter__(self) -> Iterator[Events]:
        return iter(self._objects)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in EVENTS:
            raise AttributeError(name)
        return partial(self._call, name)

    def _call(self, name: str, *arguments: Any) -> None:
        for call in self._calls[name]:
            call(*arguments)


def overridden_by(events: object, author: str) -> list[str]:
    """The events that the class of `events` overrides. Raises PluginError if a method `on_…` is not an event."""
    kind = type(events)
    if not isinstance(events, Events):
        raise PluginError(f"{author}: recipe.events takes instances of a subclass of hwopt.plugin.Events, got {truncate(events)}")
    unknown = [name for name in dir(kind) if name.startswith("on_") and name not in EVENTS]
    found = [name for name in EVENTS if getattr(kind, name) is not getattr(Events, name)]
    if unknown or not found:
        what = f"{unknown[0]}() is not an event.{nearest(unknown[0], EVENTS)}" if unknown else "overrides no event."
        raise PluginError(f"{author}: {kind.__name__}: {what} The events are {listing(EVENTS, 30)}")
    return found


@dataclass(frozen=True)
class Lazy:
    """The callable `target` ("package.module:name"), imported at the first call: a plan needs no heavy package.

    Picklable, as what data workers get must be.
    """

    target: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, _, name = self.target.partition(":")
        return getattr(import_module(module), name)(*args, **kwargs)


class Recipe:
    """What the plugins of a plan set, field by field.

    A slot holds one callable, or None for the default. Lists keep the order of the plan. Settings are dicts of keyword
    arguments. `accelerator["kwargs_handlers"]` is a list that plugins append to.
    """

    process: Steps
    model_kwargs: Settings
    model_steps: Steps
    trainer: Settings
    loss: Callable[..., Any] | None
    order: Callable[..., Any] | None
    collate: Callable[..., Any] | None
    cut: Callable[..., Any] | None
    batch: Settings
    loader: Settings
    training: Settings
    parameter_groups: Callable[..., Any] | None
    optimizer: Callable[..., Any] | None
    masters: Any | None
    optimizer_wraps: Steps
    scaler: Callable[[], Any] | None
    schedule: Callable[[int, int], float] | None
    accelerator: Settings
    engine: Callable[..., Any] | None
    forward_backward: Callable[..., Any] | None
    prepared_steps: Steps
    events: AllEvents
    export_steps: Steps
    final_steps: Steps
    state: Steps

    def __init__(self, replaced_by: Mapping[str, str] | None = None) -> None:
        """`replaced_by`: slot or key -> the author that replaces it. Values that other authors set there are ignored."""
        self._author: str | None = None
        self._distributions: dict[str, str] = {}
        self._claims: dict[str, str] = {}
        self._written: dict[str, dict[str, None]] = {}  # author -> what it wrote, in order
        self._replaced_by = dict(replaced_by or {})
        self._collisions: list[Collision] = []
        for name in SLOTS:
            object.__setattr__(self, name, None)
        for name in LISTS:
            object.__setattr__(self, name, Steps(self, name))
        for name in SETTINGS:
            object.__setattr__(self, name, Settings(self, name))
        self.accelerator.data["kwargs_handlers"] = Steps(self, "accelerator['kwargs_handlers']")
        object.__setattr__(self, "events", AllEvents(self))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SLOTS:
            if not self.claim(name):
                return
            value = self.guarded(value, name)
        elif not name.startswith("_"):
            known = (*SLOTS, *LISTS, *SETTINGS, "events")
            how = "append to it instead" if name in known else f"the fields are: {listing(known, 30)}"
            raise PluginError(f"{self.author}: recipe.{name} cannot be set; {how}.{nearest(name, SLOTS)}")
        object.__setattr__(self, name, value)

    @property
    def author(self) -> str:
        return self._author or "the core"

    @contextmanager
    def written_by(self, author: str, distribution: str = "") -> Iterator[None]:
        """Record `author` ("plugin 'x' (profile.toml:12)") of `distribution` for everything set inside the block."""
        self._author, before = author, self._author
        self._distributions.setdefault(author, distribution)
        try:
            yield
        finally:
            self._author = before

    def guarded(self, value: Any, field: str) -> Any:
        """`value`; if it is a callable of a plugin, with a guard so that its errors name the plugin."""
        if self._author is None or not callable(value) or isinstance(value, Guarded):
            return value
        kind = GuardedOnce if field in LISTS and field != "state" else Guarded
        return kind(value, self.named(self._author), f"recipe.{field}")

    def named(self, author: str) -> str:
        """`author`, followed by its distribution."""
        return " of ".join(filter(None, (author, self._distributions.get(author))))

    def record(self, what: str) -> None:
        self._written.setdefault(self.author, {})[what] = None

    def claim(self, what: str) -> bool:
        """Whether the current author may set the slot or key: no other plugin has set it or replaces it. Records collisions."""
        author = self.author
        self.record(what)
        if self._replaced_by.get(what, author) != author:
            return False
        first = self._claims.setdefault(what, author)
        if first != author:
            self._collisions.append(Collision(what, first, author))
        return first == author

    @property
    def collisions(self) -> tuple[Collision, ...]:
        """The slots and keys that two plugins set. The first value is kept. A plan with a collision is an error."""
        return tuple(self._collisions)

    def written_by_author(self, author: str) -> list[str]:
        """What `author` wrote, in order: slots, keys ("batch['train']"), lists and events ("events['on_gradients']")."""
        return list(self._written.get(author, ()))

    def fields_of(self, author: str) -> tuple[str, ...]:
        """The recipe fields that `author` wrote."""
        return tuple(dict.fromkeys(what.partition("[")[0] for what in self.written_by_author(author)))

    def author_of(self, what: str) -> str:
        """The author of a slot, or of a key such as "batch['train']"; "the core" if no plugin set it."""
        return self._claims.get(what, "the core")


SLOTS, LISTS, SETTINGS = (
    tuple(name for name, kind in Recipe.__annotations__.items() if kind.endswith(end)) for end in ("None", "Steps", "Settings")
)
