"""Which weights a job trains, by the patterns of model.freeze or model.train_only."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from hwopt.errors import InputError
from hwopt.text import listing, nearest


def freeze(model: nn.Module, frozen: Sequence[str], trained: Sequence[str]) -> str:
    """Freeze what `frozen` matches, or all that `trained` does not match. Returns how many weights are trained.

    A pattern is the name of a module or a parameter, in which * stands for any text. It matches all that is in the module.
    Raises InputError if a pattern matches nothing, or if nothing is left to train.
    """
    key, patterns = ("model.freeze", frozen) if frozen else ("model.train_only", trained)
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            parts = list(dict.fromkeys(part for name in names for part in above(name)))
            hint = nearest(pattern, parts)
            raise InputError(f"{key}: {pattern!r} matches no weight of the model.{hint} It has {listing(parts)}")
    for name, parameter in model.named_parameters():
        matched = any(matches(name, pattern) for pattern in patterns)
        parameter.requires_grad_(matched != bool(frozen) and parameter.requires_grad)
    trains = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if not trains:
        raise InputError(f"{key} = {list(patterns)}: no weight is left to train")
    return f"trains {trains:,} of {sum(p.numel() for p in model.parameters()):,} weights, by {key}"


def matches(name: str, pattern: str) -> bool:
    return any(fnmatchcase(part, pattern) for part in above(name))


def above(name: str) -> list[str]:
    """The modules that the parameter `name` is in, from the outermost, and the name itself."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
