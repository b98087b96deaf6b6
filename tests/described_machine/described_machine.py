"""The machine that hwopt detects in the tests: a described CPU with bf16, whatever the real one is.

hwopt asks its machine in hwopt.hardware.detect alone, whose functions are replaced when a process imports it, so before
another module can import one of them. The libraries keep the real machine: a run of a tiny model is real.

`SEED_OFFSET=1000 pytest ...` adds 1000 to every seed of weights, dropout, order and generation: a test that fails then
asserts what a model learned, not what the code guarantees.
"""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import sys
from collections import namedtuple
from collections.abc import Callable, Sequence
from importlib import util
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

GIB = 1024**3
DETECT = "hwopt.hardware.detect"
ANSWERS: dict[str, Callable[..., Any]] = {
    "host_memory": lambda: (24 * GIB, 20 * GIB),
    "cpu_cores": lambda: 2,
    "cpu_name": lambda: "Described CPU",
    "cpu_features": lambda: ("avx512_bf16", "avx2"),
    "with_layer_speed": lambda hardware, *_: hardware,
}
"""Function of hwopt.hardware.detect -> what it returns."""
DISK = namedtuple("DISK", "total used free")(1024 * GIB, 512 * GIB, 512 * GIB)
QUESTIONS = {
    "os": ("cpu_count", "sched_getaffinity"),
    "psutil": ("virtual_memory", "cpu_count"),
    "torch.cpu": ("_is_amx_tile_supported", "_is_avx512_bf16_supported", "_is_avx2_supported", "_is_vnni_supported"),
}
"""Module -> its functions that tell what the machine has."""
TESTS = str(Path(__file__).parents[1]) + os.sep
real: dict[str, Callable[..., Any]] = {}
"""The functions of hwopt.hardware.detect that ANSWERS replaces."""


class AfterImport(MetaPathFinder):
    """Calls a function with each of the modules named, once it is imported."""

    def __init__(self, functions: dict[str, Callable[[ModuleType], None]]) -> None:
        self.functions = functions

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.functions:
            return None
        change = self.functions.pop(name)
        spec = util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


def answer(module: ModuleType) -> None:
    """Replace the functions of hwopt.hardware.detect."""
    for name, function in ANSWERS.items():
        real[name] = getattr(module, name)
        setattr(module, name, function)


def guard(module: ModuleType) -> None:
    """Let the questions of `module` fail where hwopt, a plugin or a test asks. Libraries get the real answer."""

    def guarded(question: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(question)
        def ask(*arguments: Any, **options: Any) -> Any:
            frame = sys._getframe(1)
            name, file = str(frame.f_globals.get("__name__")), frame.f_code.co_filename
            if name.split(".")[0] in ("hwopt", "hwopt_plugins") or file.startswith(TESTS):
                raise AssertionError(f"{name} asks this machine ({question.__name__}): see {__file__}")
            return question(*arguments, **options)

        return ask

    for name in QUESTIONS[module.__name__]:
        if hasattr(module, name):
            setattr(module, name, guarded(getattr(module, name)))


def shift_seeds(module: ModuleType) -> None:
    """Add SEED_OFFSET to the seeds of torch or of hwopt.training.randomness."""
    name = "manual_seed" if module.__name__ == "torch" else "mix"
    original = getattr(module, name)
    setattr(module, name, lambda seed, *rest: original(int(seed) + int(os.environ["SEED_OFFSET"]), *rest))


def on_card() -> bool:
    """Whether this session of pytest uses the CUDA devices of this machine, or pretend ones. Other sessions hide them."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return not installed()  # the controller decided, by PYTHONPATH
    return "PRETEND_GPU" in os.environ or any("tests/gpu" in argument for argument in sys.argv)


def installed() -> bool:
    return bool(real) or any(isinstance(finder, AfterImport) for finder in sys.meta_path)


def install(guarded: bool = False) -> None:
    """Describe the machine in this process, before it imports hwopt.hardware.detect. `guarded` makes questions fail."""
    functions: dict[str, Callable[[ModuleType], None]] = {}
    if not installed():
        assert DETECT not in sys.modules
        functions[DETECT] = answer
        shutil.disk_usage = lambda path: DISK
        if "SEED_OFFSET" in os.environ:
            functions.update({"torch": shift_seeds, "hwopt.training.randomness": shift_seeds})
    for name in QUESTIONS if guarded else ():
        if name in sys.modules:
            guard(sys.modules[name])
        else:
            functions[name] = guard
    sys.meta_path.insert(0, AfterImport(functions))


def allow(patch: pytest.MonkeyPatch) -> None:
    """Undo `answer` and `guard` for the time of `patch`."""
    for name, function in real.items():
        patch.setattr(sys.modules[DETECT], name, function)
    for name, questions in QUESTIONS.items():
        module = importlib.import_module(name)
        for question in questions:
            if asked := getattr(getattr(module, question, None), "__wrapped__", None):
                patch.setattr(module, question, asked)
