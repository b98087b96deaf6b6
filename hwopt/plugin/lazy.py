"""Lazy: a callable of a module that is imported at the first call, so that a plan needs no heavy package."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Lazy:
    """The callable `target` ("package.module:name"). Picklable, as what data workers get must be."""

    target: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, _, name = self.target.partition(":")
        return getattr(import_module(module), name)(*args, **kwargs)
