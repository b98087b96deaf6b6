"""TF32 for the matrix multiplications and convolutions that are left in fp32.

The tensor cores round the 23 bits of an fp32 mantissa to 10 on the way in and add up in fp32. Source: NVIDIA A100 white
paper, "TF32 Tensor Cores"; https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices.
Hardware: compute capability 8.0 (Ampere) or newer. Cost: none. Numerical effect: fp32 products keep about three decimal
digits; products in bf16 or fp16 are untouched, so beside mixed precision it speeds up only what autocast leaves in fp32.

torch >= 2.9 has two interfaces and raises where they disagree (`allow_tf32`, `get_float32_matmul_precision()` against
`fp32_precision`); inductor's autotuner still reads the older one. For matmul only `set_float32_matmul_precision` writes
both, so that is used; everything is read back, and put back, through `fp32_precision`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from hwopt.plugin import Context, Decision, Evidence, Plugin, Recipe, RunView, Stage


@contextmanager
def tf32_kernels() -> Iterator[None]:
    """Allow TF32 in cuBLAS and cuDNN inside the block; the settings found on entering come back on leaving."""
    import torch

    backends: Any = torch.backends
    matmul, convolution, cpu_matmul = backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul
    before = matmul.fp32_precision, convolution.fp32_precision, cpu_matmul.fp32_precision
    torch.set_float32_matmul_precision("high")
    cpu_matmul.fp32_precision = before[2]  # the call above reaches the CPU kernels too
    convolution.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("high" if before[0] == "tf32" else "highest")
        matmul.fp32_precision, convolution.fp32_precision, cpu_matmul.fp32_precision = before


def older_interface() -> str:
    """What `allow_tf32` says of matmul: 'on', 'off', or that torch refuses to say because the two were mixed."""
    import torch

    try:
        return "on" if torch.backends.cuda.matmul.allow_tf32 else "off"
    except RuntimeError:
        return "unreadable (somebody mixed both interfaces)"


class Tf32(Plugin):
    name = "tf32"
    stage = Stage.PROCESS
    preserves = "rounding"
    aliases: ClassVar[Mapping[str, str]] = {
        "tf32": "enabled = true",
    }

    def probe(self, context: Context) -> Decision:
        able = context.hardware.can("tf32")
        if not able:
            return Decision.skip(able.reason)
        return Decision.apply(f"{able.reason}; speeds up fp32 products, does nothing for those in bf16 or fp16")

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.process.append(tf32_kernels)

    def evidence(self, run: RunView) -> Evidence:
        import torch

        backends: Any = torch.backends
        matmul, convolution = backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision
        seen = f"matmul {matmul}, convolution {convolution}; allow_tf32 {older_interface()}"
        if matmul != "tf32" or convolution != "tf32":
            return Evidence.inactive(seen)
        dtypes = run.observation.matmul_dtypes
        return Evidence.active(f"{seen}; {dtypes.get('float', 0)} of {sum(dtypes.values())} matmuls of step 1 were in fp32")
