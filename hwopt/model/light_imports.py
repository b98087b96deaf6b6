"""Imports for a process that plans and never trains: without what no plan and no trace uses, which is a third of their time.

torch's compiler takes a second to import, but is asked for decorators and names only. transformers and peft import torchao and
SciPy for what fake tensors do not run, and torch's table of operations imports Triton for kernels that it counts.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"
SOURCE = f"{COMPILER}.source"
PARTS = ("config", "_trace_wrapped_higher_order_op")
"""Its modules that fake tensors and transformers' attention masks use. They import nothing of the compiler."""
UNUSED = ("torchao", "scipy")

find_any = importlib.util.find_spec


class Sources(ModuleType):
    """`torch._dynamo.source`: classes that say where a fake tensor comes from, which only a compiler reads."""

    def __getattr__(self, name: str) -> Any:
        if not name.endswith("Source"):
            raise AttributeError(name)
        found = type(name, (), {"__init__": lambda self, *parts: None})
        setattr(self, name, found)
        return found


class CompilerStandIn(ModuleType):
    """`torch._dynamo` for a process that compiles nothing. What it does not have is answered by the real module."""

    def disable(self, function: Any = None, *_: Any, **__: Any) -> Any:
        """Return `function`, or a decorator that returns what it decorates."""
        return (lambda decorated: decorated) if function is None else function

    allow_in_graph = assume_constant_result = disable

    def graph_break(self, message: str = "") -> None:
        """Do nothing: there is no graph."""

    def is_compiling(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # asked with __path__: an import of a submodule, or of a name
            raise AttributeError(name)
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER], sys.modules[SOURCE]
        return getattr(importlib.import_module(COMPILER), name)


def import_light() -> None:
    """Import torch, and let later imports of this process leave out what no plan uses, unless it is imported already.

    Who imports torchao or SciPy itself gets it: only a question whether they are there is answered with no.
    """
    import torch

    if COMPILER in sys.modules:
        return
    importlib.util.find_spec = find_used
    count_without_triton()
    stand_in: Any = CompilerStandIn(COMPILER)
    sys.modules[COMPILER] = stand_in
    stand_in.__path__ = [str(Path(torch.__file__).parent / "_dynamo")]
    for part in PARTS:
        importlib.import_module(f"{COMPILER}.{part}")
    del stand_in.__path__  # from here on an import of another submodule begins with the real package
    stand_in.source = sys.modules[SOURCE] = Sources(SOURCE)


def find_used(name: str, package: str | None = None) -> ModuleSpec | None:
    """Return the spec of a module as `importlib.util.find_spec` does, and None for unused packages."""
    return None if name in UNUSED else find_any(name, package)


def count_without_triton() -> None:
    """Import torch's formulas of operations as if Triton were not installed."""
    modules: dict[str, Any] = sys.modules
    if "triton" in modules:
        return
    counter = "torch.utils.flop_counter"
    log = logging.getLogger(counter)
    modules["triton"] = None  # an import of it fails
    log.disabled = True  # it warns that Triton is missing
    try:
        importlib.import_module(counter)
    finally:
        del modules["triton"]
        log.disabled = False
