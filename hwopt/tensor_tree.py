"""Trees of tensors and plain values: copy them to host memory, split them for safetensors and JSON, and join them again.

A tree consists of dicts with string keys, lists, strings, numbers, booleans, None and tensors. There is no pickle: a file can
yield nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

MARK = "$tensor"
"""The only key of a JSON object that stands for a tensor; its value is the tensor's name."""


class HostCopies:
    """Copies tensors to host memory, where later steps do not change them. The same tensor is copied once.

    With `temporary=True` every call copies: the tensors exist only for the copy, and another one may get their address.
    """

    def __init__(self, temporary: bool = False) -> None:
        self.temporary = temporary
        self.copies: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
        self.bytes = 0
        """Bytes of all copies."""

    def __call__(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if self.temporary:
            return self._copy(tensor)
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() == 0 or key not in self.copies:
            # the entry holds the original too: its address must not be reused for another tensor
            self.copies[key] = (self._copy(tensor), tensor)
        return self.copies[key][0]

    def _copy(self, tensor: Tensor) -> Tensor:
        copy = tensor.to("cpu", copy=True).contiguous()
        self.bytes += copy.numel() * copy.element_size()
        return copy


def map_tensors(change: Callable[[Tensor], Any], tree: Any) -> Any:
    """`tree` with `change` applied to each tensor. A tensor subclass (quantized optimizer state) becomes a dict of its parts."""
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
    """Name -> plain tensor that a tensor subclass wraps; {} for a plain tensor."""
    if type(tensor) in (Tensor, torch.nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        return {}
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def copy_into(target: Any, saved: Any) -> Any:
    """The tree `saved`, with its tensors copied into those of `target`, which keep their class and device.

    Raises ValueError if the trees differ in keys, or the tensors in shape or dtype.
    """
    if isinstance(target, Tensor):
        if inner := parts(target):
            copy_into(inner, saved)
            return target
        if not isinstance(saved, Tensor) or saved.shape != target.shape or saved.dtype != target.dtype:
            raise ValueError(f"it has {describe(saved)}, expected {describe(target)}")
        target.copy_(saved)
        return target
    if isinstance(target, Mapping):
        if not isinstance(saved, Mapping) or target.keys() != saved.keys():
            keys = sorted(map(str, saved)) if isinstance(saved, Mapping) else describe(saved)
            raise ValueError(f"it has {keys}, expected {sorted(map(str, target))}")
        return {key: copy_into(value, saved[key]) for key, value in target.items()}
    return saved


@torch.no_grad()
def fingerprint(tensors: Iterable[Tensor], most: int = 64) -> list[float]:
    """The middle element of at most `most` evenly spaced matrices of `tensors`: it differs between two models' weights."""
    matrices = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.dim() > 1 and tensor.numel()]
    chosen = matrices[:: -(-len(matrices) // most) or 1]
    return [float(tensor.detach().flatten()[tensor.numel() // 2].nan_to_num()) for tensor in chosen if not tensor.is_meta]


def describe(value: Any) -> str:
    """For messages: "torch.float32 (2, 3)" for a tensor, else the class name."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def flatten(tree: Any, name: str = "") -> tuple[Any, dict[str, Tensor]]:
    """(`tree` as JSON values, with {MARK: name} in place of each tensor; name -> tensor)."""
    tensors: dict[str, Tensor] = {}

    def visit(value: Any, at: str) -> Any:
        if isinstance(value, Tensor):
            tensors[at] = value
            return {MARK: at}
        if isinstance(value, Mapping):
            assert all(isinstance(key, str) and key != MARK for key in value), f"{at}: keys must be strings"
            return {key: visit(below, f"{at}/{key}" if at else key) for key, below in value.items()}
        if isinstance(value, (list, tuple)):
            return [visit(below, f"{at}/{number}") for number, below in enumerate(value)]
        assert value is None or isinstance(value, (str, int, float, bool)), f"{at}: {type(value).__name__} cannot be stored"
        return value

    return visit(tree, name), tensors


def unflatten(tree: Any, tensor: Callable[[str], Tensor]) -> Any:
    """The inverse of `flatten`: the tree, with each tensor from `tensor(name)`."""
    if isinstance(tree, dict):
        if tree.keys() == {MARK}:
            return tensor(str(tree[MARK]))
        return {key: unflatten(value, tensor) for key, value in tree.items()}
    return [unflatten(value, tensor) for value in tree] if isinstance(tree, list) else tree
