"""Trees of tensors and plain values: copied to the host, taken apart for safetensors and JSON, and put together again.

A tree is made of dicts with string keys, lists, strings, numbers, booleans, None and tensors. No pickle: what is read back can
only be one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

MARK = "$tensor"
"""The only key of a JSON object that stands for a tensor; its value is the tensor's name."""


class HostCopies:
    """Copies of tensors in the host's memory, one of each, however often it is asked for: later steps do not reach them.

    With `passing` the tensors were made to be copied, and may go afterwards: each is copied whenever it is asked for.
    """

    def __init__(self, passing: bool = False) -> None:
        self.passing = passing
        self.made: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
        self.bytes = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if self.passing:
            return self.copied(tensor)
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() == 0 or key not in self.made:
            # the original is kept too, or its address could be another tensor's by the time of the next question
            self.made[key] = (self.copied(tensor), tensor)
        return self.made[key][0]

    def copied(self, tensor: Tensor) -> Tensor:
        copy = tensor.to("cpu", copy=True).contiguous()
        self.bytes += copy.numel() * copy.element_size()
        return copy


def map_tensors(change: Callable[[Tensor], Any], tree: Any) -> Any:
    """`tree` with each tensor changed; a tensor made of others (quantized optimizer state) becomes a dict of those."""
    if isinstance(tree, Tensor):
        if inner := parts(tree):
            return {name: map_tensors(change, part) for name, part in inner.items()}
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(change, value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [map_tensors(change, value) for value in tree]
    return tree


def parts(tensor: Tensor) -> dict[str, Tensor]:
    """The plain tensors that a tensor subclass wraps; empty for a plain one."""
    if type(tensor) in (Tensor, torch.nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        return {}
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def copy_into(made: Any, saved: Any) -> Any:
    """`saved` in the shape of `made`, whose tensors are written into and so keep their kind and device.

    Raises ValueError where the two are not alike.
    """
    if isinstance(made, Tensor):
        if inner := parts(made):
            copy_into(inner, saved)
            return made
        if not isinstance(saved, Tensor) or saved.shape != made.shape or saved.dtype != made.dtype:
            raise ValueError(f"there is {describe(saved)} for {describe(made)}")
        made.copy_(saved)
        return made
    if isinstance(made, Mapping):
        if not isinstance(saved, Mapping) or made.keys() != saved.keys():
            there = sorted(map(str, saved)) if isinstance(saved, Mapping) else describe(saved)
            raise ValueError(f"there is {there} for {sorted(map(str, made))}")
        return {key: copy_into(value, saved[key]) for key, value in made.items()}
    return saved


@torch.no_grad()
def fingerprint(tensors: Iterable[Tensor], most: int = 64) -> list[float]:
    """An element of at most `most` matrices of numbers, evenly spaced: enough to tell one model's weights from another's."""
    matrices = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.dim() > 1 and tensor.numel()]
    chosen = matrices[:: -(-len(matrices) // most) or 1]
    return [float(tensor.detach().flatten()[tensor.numel() // 2].nan_to_num()) for tensor in chosen if not tensor.is_meta]


def describe(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def flatten(tree: Any, name: str = "") -> tuple[Any, dict[str, Tensor]]:
    """(`tree` as JSON takes it, its tensors by the names that stand in their places)."""
    tensors: dict[str, Tensor] = {}

    def visit(value: Any, at: str) -> Any:
        if isinstance(value, Tensor):
            tensors[at] = value
            return {MARK: at}
        if isinstance(value, Mapping):
            assert all(isinstance(key, str) and key != MARK for key in value), f"{at}: keys are strings"
            return {key: visit(below, f"{at}/{key}" if at else key) for key, below in value.items()}
        if isinstance(value, (list, tuple)):
            return [visit(below, f"{at}/{number}") for number, below in enumerate(value)]
        assert value is None or isinstance(value, (str, int, float, bool)), f"{at}: {type(value).__name__} cannot be stored"
        return value

    return visit(tree, name), tensors


def unflatten(tree: Any, tensor: Callable[[str], Tensor]) -> Any:
    """What `flatten` took apart, with the tensors that `tensor` finds by their names."""
    if isinstance(tree, dict):
        if tree.keys() == {MARK}:
            return tensor(str(tree[MARK]))
        return {key: unflatten(value, tensor) for key, value in tree.items()}
    return [unflatten(value, tensor) for value in tree] if isinstance(tree, list) else tree
