"""A process that plans imports neither torch's compiler nor packages that no trace uses, and gets them where it asks."""

import subprocess
import sys

from pinned_torch import IS_PINNED

UNUSED = ("scipy.optimize", "torchao")
COMPILER = ("torch._dynamo.symbolic_convert", "torch._inductor", "triton") if IS_PINNED else ()  # torchvision 0.25 imports it


def output_of(code: str) -> str:
    """Return what an interpreter of its own prints for `code`."""
    process = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return process.stdout


def test_tracing_process_starts_without_heavy_packages() -> None:
    code = f"""
import sys
from hwopt.memory.trace.tracing_process import prepare
import hwopt.memory.trace.tracing_process as tracing
tracing._forks = True
prepare(None)
print([name for name in {UNUSED + COMPILER} if name in sys.modules])
"""
    assert output_of(code) == "[]\n"


def test_names_that_stand_in_lacks_come_from_the_compiler() -> None:
    code = """
import sys
from hwopt.model.light_imports import CompilerStandIn, import_light
import_light()
import torch
stand_in = sys.modules["torch._dynamo"]
assert isinstance(stand_in, CompilerStandIn)
def ten(): return 10
assert torch.compiler.disable(ten) is ten and torch._dynamo.config.recompile_limit > 0
assert "torch._dynamo.eval_frame" not in sys.modules
from torch._dynamo.source import ConstantSource, RandomValueSource
assert not isinstance(ConstantSource("x"), RandomValueSource)
compiled = torch.compile(lambda x: x + 1, backend="eager")
assert compiled(torch.tensor(1)) == 2
from torch._dynamo.source import ConstantSource
assert ConstantSource("x").source_name == "x"
assert sys.modules["torch._dynamo"] is not stand_in
print("as real")
"""
    assert output_of(code) == "as real\n"


def test_import_that_came_first_is_kept() -> None:
    code = """
import sys
import torch._dynamo
from importlib.util import find_spec
from hwopt.model.light_imports import import_light
import_light()
import importlib.util
print(sys.modules["torch._dynamo"] is torch._dynamo, importlib.util.find_spec is find_spec)
"""
    assert output_of(code) == "True True\n"
