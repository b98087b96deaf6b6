"""What the planning process sends to the tracing process: a plan, the shapes to trace, and the surroundings of the caller."""

from __future__ import annotations

import os
import pickle
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from hwopt.model.remote_code import trust_only, trusted_models

if TYPE_CHECKING:
    from hwopt.memory.trace.dry_run import Shape
    from hwopt.planning.plan import Plan


@dataclass(frozen=True)
class Request:
    """A plan to trace at some shapes."""

    plan: Plan
    labels: int
    shapes: tuple[tuple[str, Shape], ...]
    """Names and shapes."""
    otherwise: tuple[str, Shape] | None = None
    """Traced too if `shapes` ran different operations."""
    layers: Literal["few", "all"] | None = None
    """few: fail if layers cannot be skipped; all: run every layer; None: skip layers if possible."""

    def packed(self, by_value: bool = False) -> bytes:
        """Return the request as bytes for `unpack`. With `by_value` the code of third-party plugins travels along.

        The recipe's callables cannot be pickled; the tracing process writes the recipe again.
        """
        import cloudpickle

        own = replace(self.plan, recipe=type(self.plan.recipe)(), memory=None, oom_plugins=())
        classes = {cls for entry in own.entries for cls in type(entry.plugin).__mro__} if by_value else set()
        names = {cls.__module__ for cls in classes if cls.__module__.partition(".")[0] not in ("hwopt", "builtins", "__main__")}
        modules = [sys.modules[name] for name in names if name in sys.modules]
        modules = [module for module in modules if module.__name__ not in cloudpickle.list_registry_pickle_by_value()]
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            content = cloudpickle.dumps(replace(self, plan=own))
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)
        return pickle.dumps((Surroundings.here(), content))


class UnknownCode(Exception):
    """The tracing process cannot import the code of the plan."""


def unpack(request: bytes) -> Request:
    """Return a packed request, and apply the caller's surroundings to this process. Raises UnknownCode."""
    surroundings, content = pickle.loads(request)
    surroundings.enter()
    try:
        found: Request = pickle.loads(content)
    except (ImportError, AttributeError) as error:
        raise UnknownCode(str(error)) from error
    return found


@dataclass(frozen=True)
class Surroundings:
    """What a trace takes from the process that asks for it."""

    environment: dict[str, str]
    folder: str
    path: list[str]
    trusted: list[str]

    @classmethod
    def here(cls) -> Surroundings:
        """Return those of this process."""
        return cls(dict(os.environ), os.getcwd(), list(sys.path), trusted_models())

    def enter(self) -> None:
        """Apply them to this process, except for its GPUs: it has none."""
        os.environ.clear()
        os.environ.update(self.environment | {"CUDA_VISIBLE_DEVICES": ""})
        sys.path[:] = self.path
        trust_only(self.trusted)
        with suppress(OSError):
            os.chdir(self.folder)
