"""Create models without initializing their large weights: fast, and without host memory. Pretend cards compute none of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

SMALL = 65_536
"""Elements. The pretend card computes operators on no more than these."""


@contextmanager
def large_weights_uninitialized() -> Iterator[None]:
    """Inside, the functions of torch.nn.init leave tensors with more than SMALL elements as torch.empty made them."""
    from transformers.initialization import TORCH_INIT_FUNCTIONS

    def small_only(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def initialize(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return function(tensor, *args, **kwargs) if tensor.numel() <= SMALL else tensor

        return initialize

    replaced = {name: small_only(function) for name, function in TORCH_INIT_FUNCTIONS.items()}
    with patch.dict(TORCH_INIT_FUNCTIONS, replaced), patch.multiple(torch.nn.init, **replaced):
        yield
