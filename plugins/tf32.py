"""TF32 for fp32 matrix multiplications and convolutions.

Tensor cores round the 23-bit mantissa of fp32 inputs to 10 bits and accumulate in fp32. Products in bf16 or fp16 do not change.
Beside half precision it is skipped: what that leaves in fp32, such as routers of experts, is small and needs the accuracy.

Source: NVIDIA A100 white paper, "TF32 Tensor Cores";
https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices.
Hardware: compute capability 8.0 (Ampere) or newer.
Cost: none.
Numerical effect: fp32 products keep about three decimal digits.

torch >= 2.9 has two interfaces and raises an error if they disagree: `allow_tf32` and `get_float32_matmul_precision()`, which
inductor's autotuner still reads, and `fp32_precision`. For matmul this plugin calls `set_float32_matmul_precision`, the only
function that sets both, and reads and restores the settings through `fp32_precision`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from hwopt import plugin as hw


@contextmanager
def tf32_kernels() -> Iterator[None]:
    """Allow TF32 in cuBLAS and cuDNN inside the block, and restore the previous settings afterwards."""
    import torch

    backends: Any = torch.backends
    matmul, convolution, cpu_matmul = backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul
    before = matmul.fp32_precision, convolution.fp32_precision, cpu_matmul.fp32_precision
    torch.set_float32_matmul_precision("high")
    cpu_matmul.fp32_precision = before[2]  # the call above also changes the CPU setting
    convolution.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("high" if before[0] == "tf32" else "highest")
        matmul.fp32_precision, convolution.fp32_precision, cpu_matmul.fp32_precision = before


def older_interface() -> str:
    """The value of `allow_tf32` for matmul: "on", "off", or a text if other code mixed both interfaces and torch raises."""
    import torch

    try:
        return "on" if torch.backends.cuda.matmul.allow_tf32 else "off"
    except RuntimeError:
        return "unreadable (other code mixed both interfaces)"


class Tf32(hw.Plugin):
    name = "tf32"
    stage = hw.Stage.PROCESS
    effect = "rounding"
    relations = hw.Relations(
        needless=(
            hw.Conflict(
                plugin="precision",
                why="half precision leaves no product in fp32 but small ones that need its accuracy, such as routers of experts",
                when=lambda tf32, precision: precision.dtype != "fp32",
            ),
        )
    )
    aliases: ClassVar[Mapping[str, str]] = {"tf32": "enabled = true"}

    def probe(self, context: hw.Context) -> hw.Decision:
        capability = context.hardware.can("tf32")
        if not capability:
            return hw.Decision.skip(capability.reason)
        return hw.Decision.apply(f"{capability.reason}; speeds up products in fp32")

    def apply(self, recipe: hw.Recipe, context: hw.Context) -> None:
        recipe.process.append(tf32_kernels)

    def evidence(self, run: hw.RunView) -> hw.Evidence:
        import torch

        backends: Any = torch.backends
        matmul, convolution = backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision
        dtypes = run.observation.matmul_dtypes
        in_fp32, total = dtypes.get("float", 0), sum(dtypes.values())
        seen = f"matmul {matmul}, convolution {convolution}; allow_tf32 {older_interface()}; {in_fp32} of {total} matmuls in fp32"
        if not total:
            return hw.Evidence.unknown(f"no matmuls were recorded; {seen}")
        if matmul == "tf32" and convolution == "tf32" and not in_fp32:  # which products are in fp32 is up to other plugins
            return hw.Evidence.unknown(f"{seen}, so TF32 had nothing to speed up")
        return hw.Evidence.of(matmul == "tf32" and convolution == "tf32", seen)
