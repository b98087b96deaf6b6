"""Mutations of what plugins change in the process: TF32, the allocator, compiled code. Two of them need a CUDA device."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from mutations import Mutation


def no_tf32(patch: pytest.MonkeyPatch) -> None:
    """torch ignores a request for TF32 products."""
    patch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)


def release_memory() -> None:
    """Return the memory of this process to the CUDA device, with cuBLAS's workspaces."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def no_expandable_segments(patch: pytest.MonkeyPatch) -> None:
    """torch's allocator ignores its settings, and gives back what it has cached."""
    release_memory()
    patch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda settings: None)


def never_compiled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "compile", lambda function, **_: function)


def graphs_run_eagerly(patch: pytest.MonkeyPatch) -> None:
    """inductor returns the graph as it is, without code of its own."""
    import torch._inductor.compile_fx

    def as_it_is(graph: Any, inputs: Any, **_: Any) -> Any:
        return graph.forward

    torch._dynamo.reset()  # forgets the code that is compiled already
    patch.setattr(torch._inductor.compile_fx, "compile_fx", as_it_is)


BLOCKS = {"scope": "block", "widths": (32,)}
ON_CUDA = (
    Mutation("tf32", "torch ignores the request", no_tf32, "allow_tf32 off"),
    Mutation("allocator", "the allocator ignores its settings", no_expandable_segments, "allocator segments are expandable"),
)
COMPILED = (
    Mutation(
        "compile", "torch.compile returns the function", never_compiled, "0 call(s) of compiled graphs", BLOCKS, compiles=True
    ),
    Mutation("compile", "inductor compiles nothing", graphs_run_eagerly, "0 call(s) of compiled graphs", BLOCKS, compiles=True),
)
PROCESS = ON_CUDA + COMPILED
