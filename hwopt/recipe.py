"""Recipe: the closed list of what plugins may set, and the only thing that they write to.

A run is built from a recipe alone (`hwopt.build`). A slot or a key that is set twice is an error that names both plugins,
so that two optimizations never override each other in silence. The fields and their signatures stand in docs/recipe.md.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hwopt.errors import PluginError, listing, nearest

SLOTS = ("loss", "order", "collate", "cut", "optimizer", "scaler", "schedule", "engine")
LISTS = ("process", "model_steps", "optimizer_wraps", "prepared_steps", "export_steps", "final_steps", "state")
SETTINGS = ("model_kwargs", "batch", "loader", "training", "accelerator")

EVENTS = {
    "gradients": "all gradients of a step are there; before they are measured, clipped and used",
    "updated": "the optimizer has stepped",
    "evaluating": "an evaluation begins",
    "evaluated": "it has ended",
}


class Settings(UserDict[str, Any]):
    """A dict whose keys are set once; the second author of a key is told who was first."""

    def __init__(self, recipe: Recipe, field: str) -> None:
        self._recipe, self._field = recipe, field
        super().__init__()

    def __setitem__(self, key: str, value: Any) -> None:
        self._recipe.claim(f"{self._field}[{key!r}]")
        super().__setitem__(key, value)


class Recipe:
    """What the plugins of a plan decided, field by field.

    Slots hold one callable or None (the core's default), lists keep the order of the plan, settings are dicts of keyword
    arguments. `accelerator["kwargs_handlers"]` is a list from the start: append to it.
    """

    process: list[Callable[[], Any]]
    model_kwargs: Settings
    model_steps: list[Callable[..., Any]]
    loss: Callable[..., Any] | None
    order: Callable[..., Any] | None
    collate: Callable[..., Any] | None
    cut: Callable[..., Any] | None
    batch: Settings
    loader: Settings
    training: Settings
    optimizer: Callable[..., Any] | None
    optimizer_wraps: list[Callable[..., Any]]
    scaler: Callable[[], Any] | None
    schedule: Callable[[int, int], float] | None
    accelerator: Settings
    engine: Callable[..., Any] | None
    prepared_steps: list[Callable[..., Any]]
    events: dict[str, list[Callable[..., Any]]]
    export_steps: list[Callable[..., Any]]
    final_steps: list[Callable[..., Any]]
    state: list[Any]

    def __init__(self) -> None:
        self._author: str | None = None
        self._claims: dict[str, str] = {}
        for name in SLOTS:
            object.__setattr__(self, name, None)
        for name in LISTS:
            object.__setattr__(self, name, [])
        for name in SETTINGS:
            object.__setattr__(self, name, Settings(self, name))
        self.accelerator.data["kwargs_handlers"] = []
        object.__setattr__(self, "events", {name: [] for name in EVENTS})

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SLOTS:
            self.claim(name)
        elif not name.startswith("_"):
            known = (*SLOTS, *LISTS, *SETTINGS, "events")
            how = "add to it instead of replacing it" if name in known else f"it has: {listing(known, 30)}"
            raise PluginError(f"{self._author or 'somebody'}: recipe.{name} cannot be set; {how}.{nearest(name, SLOTS)}")
        object.__setattr__(self, name, value)

    @contextmanager
    def written_by(self, author: str) -> Iterator[None]:
        """Whatever is set inside the block belongs to `author` ("plugin 'x' (profile.toml:12)")."""
        self._author, before = author, self._author
        try:
            yield
        finally:
            self._author = before

    def claim(self, what: str) -> None:
        author = self._author or "the core"
        first = self._claims.setdefault(what, author)
        if first is not author and first != author:
            raise PluginError(
                f"recipe.{what} is set by {first} and again by {author}: only one of them can have it. "
                "Remove one of the two tables, or give it `enabled = false`."
            )

    def written_by_author(self, author: str) -> list[str]:
        """The slots and keys that `author` set, as `author_of` takes them; lists and events are nobody's."""
        return [what for what, who in self._claims.items() if who == author]

    def author_of(self, what: str) -> str:
        """Who set a slot, or a key written as `field['key']`; "the core" where nobody did."""
        return self._claims.get(what, "the core")
