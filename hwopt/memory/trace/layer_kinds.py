"""Which layers of a model are equal, and which of them a trace must run so that it shows every neighbourhood of layers.

Two layers are of one kind if they have the same modules, settings, parameters and hooks. Only a layer's own number may differ.
"""

from __future__ import annotations

import re
import types
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

FEWEST_LAYERS = 6
"""A shallower stack is traced whole: skipping layers would save no time."""
MAX_DEPTH = 6
"""Levels of nested values that are compared; a deeper value counts as different in each layer."""
LAYER_NUMBER = re.compile(r"(^|_)(idx|index|number|id)$")
"""Attributes that may hold the number of the layer."""
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
REGISTERED = {"_parameters", "_buffers", "_modules"}


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Return the longest stack of layers of a transformers model, in order; empty if it has none or if a hook watches a layer."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    stacks = [list(part) for part in model.modules() if isinstance(part, nn.ModuleList)]
    stacks = [stack for stack in stacks if stack and all(isinstance(layer, GradientCheckpointingLayer) for layer in stack)]
    layers = max(stacks, key=len, default=[])
    watched = any("forward" in vars(layer) or any(getattr(layer, hooks) for hooks in HOOKS) for layer in layers)
    return [] if watched or len({id(layer) for layer in layers}) < len(layers) else layers


def layer_kinds(layers: Sequence[nn.Module]) -> list[int]:
    """Return a number for each layer; equal layers have the same number."""
    description = Description()
    return [description.number(description.of_layer(layer, place)) for place, layer in enumerate(layers)]


class Description:
    """Describes layers and settings by values that are equal for equal layers. Describes an object that layers share once."""

    def __init__(self) -> None:
        self.path = ""  # how the name of a module shows the place of the described layer
        self.numbers: dict[Any, int] = {}
        self.known: dict[int, tuple[Any, int]] = {}  # id of an object -> the object, which keeps its id, and its number

    def number(self, description: Any) -> int:
        """Return a number that stands for `description`."""
        return self.numbers.setdefault(description, len(self.numbers))

    def of_layer(self, layer: nn.Module, place: int) -> tuple[Any, ...]:
        """Return everything that may change what the layer at `place` runs."""
        self.path = f".{place}."
        return tuple((name, self.of_module(module, place)) for name, module in layer.named_modules())

    def of_module(self, module: nn.Module, place: int) -> tuple[Any, ...]:
        """Return the class, the settings and the tensors of a module."""
        settings = tuple(
            (key, "its number" if is_layer_number(key, value, place) else self.of_setting(key, value))
            for key, value in sorted(vars(module).items())
            if key not in REGISTERED
        )
        tensors = [*module._parameters.items(), *module._buffers.items()]
        return type(module), settings, tuple((name, self.of(tensor)) for name, tensor in tensors)

    def of_setting(self, key: str, value: Any) -> Any:
        if isinstance(value, Mapping) and "hooks" in key:  # the keys count all hooks of the process
            return self.of(list(value.values()))
        return self.of(value)

    def of(self, value: Any, depth: int = 0) -> Any:
        """Return a value that is equal for equal settings. An object below MAX_DEPTH is equal only to itself."""
        if isinstance(value, str) and self.path:
            return value.replace(self.path, ".its place.")
        if value is None or isinstance(value, (bool, int, float, str, bytes, Enum, torch.dtype, torch.device, type)):
            return type(value), value
        if depth > MAX_DEPTH:
            return id(value)
        inner = partial(self.of, depth=depth + 1)
        if isinstance(value, Tensor):
            hooks = getattr(value, "_post_accumulate_grad_hooks", None) or {}
            return type(value), value.shape, value.stride(), value.dtype, value.requires_grad, tuple(map(inner, hooks.values()))
        if isinstance(value, types.FunctionType):
            cells = tuple(id(cell.cell_contents) for cell in value.__closure__ or () if has_contents(cell))
            return value.__module__, value.__qualname__, cells
        if isinstance(value, types.MethodType):
            return inner(value.__func__), inner(value.__self__)
        if isinstance(value, types.BuiltinFunctionType):
            return value.__module__, value.__qualname__
        if isinstance(value, partial):
            return "partial", inner(value.func), inner(value.args), inner(value.keywords)
        if isinstance(value, Mapping):
            return type(value), tuple((str(key), inner(each)) for key, each in value.items())
        if isinstance(value, (list, tuple)):
            return type(value), tuple(map(inner, value))
        if isinstance(value, (set, frozenset)):
            return type(value), frozenset(map(inner, value))
        if isinstance(value, nn.Module):
            return "module", type(value)
        if hasattr(type(value), "__slots__") or not hasattr(value, "__dict__"):
            return id(value)
        if id(value) not in self.known:
            self.known[id(value)] = value, self.number(("object", id(value)))  # for an object that holds itself
            self.known[id(value)] = value, self.number((type(value), inner(vars(value))))
        return "object", self.known[id(value)][1]


def is_layer_number(key: str, value: object, place: int) -> bool:
    return type(value) is int and value == place and LAYER_NUMBER.search(key) is not None


def has_contents(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


Context = tuple[int | None, int, int | None]
"""The kinds of the layer before, of the layer itself, and of the layer behind it; None at an end of the stack."""


def contexts(kinds: Sequence[int]) -> list[Context]:
    """Return the context of each layer."""
    around = [None, *kinds, None]
    return [(around[place], kind, around[place + 2]) for place, kind in enumerate(kinds)]


def layers_to_run(kinds: Sequence[int]) -> list[int]:
    """Return the numbers of as few layers as show every context of the stack, the most frequent context twice.

    The layers that are left have the same neighbours as in the whole stack: runs of layers are removed only between two pairs
    of equal kinds.
    """
    kept = list(range(len(kinds)))
    frequency = Counter(contexts(kinds))
    needed = dict.fromkeys(frequency, 1)
    if frequency:
        most, count = frequency.most_common(1)[0]
        needed[most] = min(2, count)
    while (shorter := without_longest_run(kinds, kept, needed)) is not None:
        kept = shorter
    return kept


def without_longest_run(kinds: Sequence[int], kept: list[int], needed: Mapping[Context, int]) -> list[int] | None:
    """Return `kept` without the longest run of layers that can be removed; None if none can."""
    kept_kinds = [kinds[number] for number in kept]
    for length in range(len(kept) - 2, 0, -1):
        for first in range(1, len(kept) - length):
            behind = first + length
            if kept_kinds[first - 1 : first + 1] != kept_kinds[behind - 1 : behind + 1]:
                continue
            left = Counter(contexts(kept_kinds[:first] + kept_kinds[behind:]))
            if all(left[context] >= count for context, count in needed.items()):
                return kept[:first] + kept[behind:]
    return None
