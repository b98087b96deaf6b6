"""Loads programs of the folder benchmarks as modules."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@cache
def program(name: str) -> ModuleType:
    """The module of benchmarks/`name`.py."""
    if str(BENCHMARKS) not in sys.path:  # as for a program that Python runs
        sys.path.append(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
