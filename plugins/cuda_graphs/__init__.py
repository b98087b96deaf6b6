"""CUDA graphs: the forward and backward pass of a micro-batch as one launch instead of a thousand.

With short texts or few rows a card waits for the host, which issues each kernel. A graph holds the kernels of a shape (rows,
width) and is launched at once. It is captured when the shape first comes, after one eager micro-batch. Batches are
padded to one of a few widths, so that few shapes occur. What graphs do not cover: clipping, the update, evaluation. Out of memory
frees the graphs before a step is split finer.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs; Gray 2019, "Getting started with CUDA graphs" (NVIDIA).
Hardware: a CUDA device.
Cost: half a second for each captured shape; padding up to the next width; the memory of a micro-batch, and in steps of several
the gradients, stay allocated.
Numerical effect: rounding, by the padding; a graph computes the same bits as its kernels one by one. A model that waits for the
device cannot be captured and runs eagerly, with a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from hwopt import plugin as hw
from hwopt.errors import HwoptError
from hwopt.plugin.price import price_of

STEPS = ((128, 16), (256, 32), (512, 64), (1024, 128))
"""(width, distance of the widths up to it); above the last one they are 256 apart."""


def few_widths(limit: int) -> tuple[int, ...]:
    """Widths below `limit` that waste little padding, and `limit`."""
    widths = [0]
    while widths[-1] < limit:
        widths.append(widths[-1] + next((distance for up_to, distance in STEPS if widths[-1] < up_to), 256))
    return (*widths[1:-1], limit)


def few_rows(rows: int) -> int:
    """A power of two near an eighth of `rows`, the most of a micro-batch; its multiples are few, so few shapes occur."""
    return max(1, 1 << (rows // 8).bit_length() - 1) if rows >= 8 else 1


def untried(context: hw.Context) -> str:
    """Why graphs are not for this card or task unless the user asks for them; "" if they are."""
    if context.hardware.amd:
        return f"{context.hardware.name}: graphs of ROCm were never tried"
    if context.task.encoder_decoder:
        return f"{context.task.kind}: targets of many lengths make many shapes"
    return "" if context.task.inputs == "tokens" else f"{context.task.kind}: the price of a sample is not forecast"


class CudaGraphs(hw.Plugin):
    name = "cuda_graphs"
    stage = hw.Stage.DATA
    effect = "rounding"
    aliases: ClassVar[Mapping[str, str]] = {"enable_cuda_graph": "enabled = true"}  # a word of DeepSpeed
    relations = hw.Relations(
        after=("batch",),
        conflicts=(
            hw.Conflict(
                field="engine", why="the engine runs code of its own in the backward pass, which a graph would leave out"
            ),
            hw.Conflict(
                plugin="checkpointing",
                why="offload copies activations to the host and waits for them, which a graph cannot; set offload = false",
                when=lambda graphs, checkpointing: checkpointing.offload,
            ),
            hw.Conflict(
                plugin="fused_loss",
                why='Liger\'s kernel reads the number of labels on the host, which a graph cannot; set backend = "torch"',
                when=lambda graphs, fused: fused.backend == "liger",
            ),
            hw.Conflict(
                plugin="compile",
                why="compiled kernels in a graph were never tried, and compile needs few widths for all micro-batches; keep one",
            ),
            hw.Conflict(
                plugin="batch",
                why="micro-batches of so many rows take the device longer than the host; set tokens = 0 for graphs all the same, "
                "or a smaller train in [plugins.batch]",
                when=lambda graphs, batch: bool(graphs.tokens and graphs.widths and not graphs.captured(batch.train)),
            ),
        ),
        yields=True,
    )

    class Options(hw.PluginOptions):
        shapes: int = Field(default=32, ge=1)
        """Shapes (rows, width) of micro-batches that have a graph at most."""
        widths: tuple[int, ...] = ()
        """Widths in tokens that batches are padded to, ascending; () chooses them."""
        tokens: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
        """Micro-batches with more tokens run eagerly. auto: those for which the device needs longer than the host for its
        launches, by the forecast. 0: no limit."""

        def captured(self, rows: int) -> tuple[int, ...]:
            """The widths with which micro-batches of `rows` rows have a graph."""
            assert self.tokens != "auto", "probe() replaces it"
            return tuple(width for width in self.widths if not self.tokens or rows * width <= self.tokens)

    options: Options

    def probe(self, context: hw.Context) -> hw.Decision:
        if context.hardware.device_type != "cuda":
            return hw.Decision.skip(f"CUDA graphs need a CUDA device, found {context.hardware.name}")
        if self.name not in context.chosen and (why := untried(context)):
            return hw.Decision.skip(f"{why}; name the plugin yourself to try it")
        tokens, text = self.options.tokens, ""
        if tokens == "auto" and context.task.inputs != "tokens":
            tokens = 0  # the forecast knows the price of tokens only
        if tokens == "auto":
            price = price_of(context)
            tokens = price.host_bound_tokens
            text = f": {price.host_seconds * 1e3:.1f} ms of launches, {price.device_seconds * 1e3:.1f} ms of the device"
            text += f" and {price.token_seconds * 1e6:.2f} us a token on {price.basis}"
            if not tokens:
                return hw.Decision.skip(f"any micro-batch takes the device longer than the host{text}; tokens = 0 has no limit")
        widths = self.options.widths
        if context.task.inputs == "tokens" and not widths:
            limits = [limit for limit in (context.job.data.max_length, context.model.max_positions) if limit]
            widths = few_widths(min(limits, default=4096))
        reason = f"one launch for both passes of a micro-batch{f' of up to {tokens:,} tokens' if tokens else ''}{text}; "
        reason += f"up to {self.options.shapes} shapes" + (f" of {len(widths)} widths" if widths else "")
        return hw.Decision.apply(reason, self.options.changed(tokens=tokens, widths=widths))

    def apply(self, recipe: hw.Recipe, context: hw.Context) -> None:
        rows = recipe.batch.get("train", 1)
        if self.options.widths and self.host_bound(rows, context):
            rows = recipe.batch["row_multiple"] = few_rows(rows)
        recipe.batch["widths"] = self.options.captured(rows)  # none for images; others are not padded
        graphed = hw.Lazy("hwopt_plugins.cuda_graphs.graphed:GraphedForwardBackward")
        recipe.forward_backward = partial(graphed, most=self.options.shapes, tokens=self.options.tokens)

    def host_bound(self, rows: int, context: hw.Context) -> bool:
        """Whether a micro-batch of so many mean rows of the data has a graph: then those by length get few shapes."""
        assert self.options.tokens != "auto", "probe() replaces it"
        mean = None
        with suppress(HwoptError):  # data that cannot be read are an error of those who need them
            mean = context.tokens_per_sample()
        return not self.options.tokens or (mean is not None and rows * mean <= self.options.tokens)

    def memory(self, spec: hw.MemorySpec, context: hw.Context) -> None:
        assert self.options.tokens != "auto", "probe() replaces it"
        spec.pooled_tokens = self.options.tokens

    def evidence(self, run: hw.RunView) -> hw.Evidence:
        from hwopt_plugins.cuda_graphs.graphed import GraphedForwardBackward

        passes: Any = run.forward_backward
        if not isinstance(passes, GraphedForwardBackward):
            return hw.Evidence.inactive(f"the passes are computed by {type(passes).__name__}")
        calls = ", ".join(f"{passes.calls[how]} {how}" for how in ("captured", "replayed", "eager", "too large"))
        seen = f"last step: {calls} micro-batch(es); {len(passes.graphs)} graph(s), "
        seen += f"{len(passes.failed)} shape(s) could not be captured"
        if passes.calls["eager"] and (passes.refused or passes.out_of_memory > 1):
            return hw.Evidence.inactive(f"{seen}; the eager ones cannot be captured, or memory ran out")
        if passes.calls["replayed"]:
            return hw.Evidence.active(seen)
        if 0 < passes.calls["too large"] == passes.calls.total():
            return hw.Evidence.unknown(f"{seen}; on micro-batches of more than {passes.tokens:,} tokens the host does not wait")
        if not passes.graphs and not passes.failed and run.step <= 1:
            return hw.Evidence.unknown(f"{seen}; the first micro-batch of a run is eager")
        return hw.Evidence.inactive(seen)
