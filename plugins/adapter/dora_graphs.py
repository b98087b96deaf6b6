"""DoRA layers of PEFT that torch.compile can trace.

Two lines of peft 0.21 break the graph of every layer. Dynamo cannot trace `str.startswith` on the module name of a class. Under
gradient checkpointing it refuses writes to a dictionary, even if that is empty. The layers then run in eager mode, in torch 2.13
and 2.15. Both lines are in `peft.tuners.lora.dora` or called from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock


@contextmanager
def traceable_dora() -> Iterator[None]:
    """Inside the block, PEFT's DoRA layers with plain weights compute the same without the two lines. For the whole process."""
    import torch
    from peft.tuners.lora import dora

    dequantized = dora.dequantize_module_weight

    def weight_of(module: Any) -> Any:
        return module.weight if type(module.weight) is torch.nn.Parameter else dequantized(module)

    def clear_cache(layer: Any) -> None:
        if layer._dora_cache:  # filled only in evaluation, and only inside `peft.helpers.DoraCaching`
            layer._dora_cache.clear()

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(dora, "dequantize_module_weight", weight_of))
        if hasattr(dora.DoraLinearLayer, "_cache_clear"):  # not before peft 0.19
            patches.enter_context(mock.patch.object(dora.DoraLinearLayer, "_cache_clear", clear_cache))
        yield
