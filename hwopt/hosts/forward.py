"""What hosts put on a model that trains: a copy of the model, and a file of it, do without."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Forward:
    """A `forward` in place of a model's own, `plain`. A copied or pickled model has its own."""

    def __init__(self, plain: Callable[..., Any], forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, plain)
        self.plain, self.forward = plain, forward

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.forward(*inputs, **named)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)


class ForwardPreHook:
    """Calls `begin` before each forward pass. The hook of a copied or pickled model returns its inputs, and needs no hwopt."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self.begin = begin

    def __call__(self, module: Any, inputs: Any) -> None:
        self.begin()

    def __reduce__(self) -> Any:
        return getattr, ({}, "get")
