"""torch.compile with fixed widths: fuses the elementwise operations between matrix products.

Batches are padded to the next of `widths`, and the number of rows is a dynamic dimension. Arbitrary widths would reach the
recompile limit of torch, which then runs in eager mode without a message. If compilation fails, the run warns and continues in
eager mode. `Module.compile()` works in place: it adds no `_orig_mod.` wrapper, and DDP can wrap the model (transformers#22279).

Source: PyTorch 2, Ansel et al. 2024 (doi:10.1145/3620665.3640366); https://docs.pytorch.org/docs/stable/torch.compiler.html.
Hardware: a CUDA device of compute capability 7.0 with Triton, or a CPU with a C++ compiler.
Cost: 15 to 120 s in the first step, less with scope = "block" (equal layers share one graph); padding up to the next width.
Numerical effect: rounding.

The modes "reduce-overhead" and "max-autotune" record CUDA graphs, whose outputs are overwritten by the next call: the gradients
of a step with several micro-batches would be wrong, or the backward pass fails (pytorch#96693, pytorch#169545). Length batching
and the retry after an out-of-memory error make several of any step, so on a CUDA device these modes are used without graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import field_validator

from hwopt import plugin as hw

WIDTHS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
"""Mode that records CUDA graphs -> the same mode without them."""
COMPILED_GRAPH = "## Call CompiledFxGraph"
"""The start of the name under which torch's profiler records a call of code that inductor made."""


def fixed_widths(limit: int | None) -> tuple[int, ...]:
    """The standard widths below `limit` tokens, and `limit` itself. None: widths up to 4,096."""
    last = limit or 4096
    return (*(width for width in WIDTHS if width < last), last)


@contextmanager
def compiler_limits(widths: int) -> Iterator[None]:
    """Raise the recompile limits of torch inside the block.

    Each of the `widths` can need a graph for training and one for evaluation, and each of these one more for a single row.
    Drops the graphs of this process: torch counts those of earlier models against the limit, if their layers have the same code.
    """
    import torch._dynamo
    import torch._functorch.config

    torch._dynamo.reset()
    limit = max(8, 4 * widths)
    with (
        torch._dynamo.config.patch(recompile_limit=limit, accumulated_recompile_limit=max(256, 32 * limit)),
        # compile backward graphs in the forward pass: a failure in the backward pass could not fall back to eager mode
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
    ):
        yield


def repeated_blocks(model: Any) -> list[Any]:
    """The layers of the longest `ModuleList` whose layers are of one class."""
    import torch

    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len({type(layer) for layer in m}) == 1]
    return list(max(lists, key=len, default=[]))


def compile_in_place(modules: list[Any], mode: str, warn: Callable[[str], None]) -> None:
    """Compile each of `modules` in place. If the compiler fails, `warn` gets the reason and all modules run in eager mode."""
    for module in modules:
        module.compile(mode=mode)
        module._compiled_call_impl = partial(_compiled_or_eager, module, module._compiled_call_impl, modules, warn)


def _compiled_or_eager(module: Any, compiled: Any, modules: list[Any], warn: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    for tensor in (*args, *kwargs.values()):
        if isinstance(tensor, torch.Tensor) and tensor.ndim > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)  # rows
            torch._dynamo.mark_static(tensor, list(range(1, tensor.ndim)))  # width, heads, features
    try:
        return compiled(*args, **kwargs)
    except torch._dynamo.exc.TorchDynamoException as error:  # errors of the compiler only, not of the model
        first_line = next(iter(str(error).strip().splitlines()), "")
        reason = f"{type(error).__name__}: {first_line[:300]}"
    for each in modules:
        each._compiled_call_impl = None
    torch._dynamo.reset()
    warn(f"Compilation failed, continuing in eager mode: {reason}")
    return module(*args, **kwargs)


class Compile(hw.Plugin):
    name = "compile"
    stage = hw.Stage.COMPILE
    effect = "rounding"
    relations = hw.Relations(
        conflicts=(
            hw.Conflict(
                lacks="whole_graph",
                why="the engine gathers and frees weights in module hooks, which a graph of the whole model bypasses; "
                'set scope = "block"',
                when=lambda compiled, engine: compiled.scope == "model",
            ),
        )
    )
    aliases: ClassVar[Mapping[str, str]] = {"torch_compile": "enabled = true", "torch_compile_mode": "mode"}

    class Options(hw.PluginOptions):
        mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
        """Mode of torch.compile; on a CUDA device those with CUDA graphs run without graphs."""
        scope: Literal["model", "block"] = "model"
        """What is compiled: the whole model, or each of its repeated layers."""
        widths: Literal["auto"] | tuple[int, ...] = "auto"
        """Widths in tokens that batches are padded to, ascending."""

        @field_validator("widths")
        @classmethod
        def require_ascending(cls, value: Literal["auto"] | tuple[int, ...]) -> Literal["auto"] | tuple[int, ...]:
            if value != "auto" and (not value or value[0] < 1 or list(value) != sorted(set(value))):
                raise ValueError(f"widths = {list(value)} must be positive and ascending, such as [64, 128, 256]")
            return value

    options: Options

    def probe(self, context: hw.Context) -> hw.Decision:
        hardware = context.hardware
        if hardware.compiler is None:
            return hw.Decision.skip("torch.compile needs a C++ compiler, found none of g++, clang++ and cl on PATH")
        if hardware.device_type == "cuda" and not hardware.can("triton"):
            return hw.Decision.skip(hardware.can("triton").reason)
        if hardware.device_type == "cuda" and hardware.source == "detected" and not context.has("triton"):
            return hw.Decision.skip("torch.compile on CUDA needs Triton, but triton is not installed")
        if hardware.device_type == "cuda" and (mode := WITHOUT_GRAPHS.get(self.options.mode)):
            without = self.options.changed(mode=mode)
            found = type(self)(without).probe(context)
            why = f"{self.options.mode} records CUDA graphs, which several micro-batches of a step would overwrite"
            return hw.Decision.fallback((*found.options, without)[0], f"{why}; {found.reason}")
        if context.task.inputs == "images":
            return hw.Decision.apply(f"{self.options.scope}, mode {self.options.mode}, images of one size")
        limits = [limit for limit in (context.job.data.max_length, context.model.max_positions) if limit]
        limit, what = min(limits, default=None), f"{self.options.scope}, mode {self.options.mode}"
        if self.options.widths == "auto":
            widths = fixed_widths(limit)
            to = self.options.changed(widths=widths)
            return hw.Decision.apply(f"{what}, {len(widths)} widths up to {widths[-1]}", to)
        widest = self.options.widths[-1]
        if limit and widest < limit:
            to = self.options.changed(widths=(*self.options.widths, limit))
            return hw.Decision.fallback(to, f"samples can have {limit} tokens, the largest of widths is {widest}; {limit} added")
        return hw.Decision.apply(f"{what}, widths {list(self.options.widths)}")

    def apply(self, recipe: hw.Recipe, context: hw.Context) -> None:
        widths, mode, scope = self.options.widths, self.options.mode, self.options.scope
        if context.task.inputs == "tokens":
            assert widths != "auto", "probe() replaces it"
            recipe.batch["widths"] = widths
        recipe.process.append(partial(compiler_limits, 1 if widths == "auto" else len(widths)))

        def compile_model(run: hw.RunView) -> None:
            blocks = repeated_blocks(run.inner_model) if scope == "block" else []
            # look up run.warn at the time of the warning: the loop sets it after this step
            compile_in_place(blocks or [run.inner_model], mode, lambda message: run.warn(message))

        recipe.prepared_steps.append(compile_model)

    @classmethod
    def alternatives(cls, options: Any | None, context: hw.Context) -> list[hw.Scale]:
        """Off, or on for the repeated layers or the whole model."""
        choices = (hw.OFF, hw.Choice(changes={"scope": "block"}), hw.Choice(changes={"scope": "model"}))
        present = 0 if options is None else ("off", "block", "model").index(options.scope)
        return [hw.Scale(choices=choices, present=present, ordered=False, tune=True)]

    def evidence(self, run: hw.RunView) -> hw.Evidence:
        import torch._dynamo.utils

        compiled = [type(m).__name__ for m in run.inner_model.modules() if m._compiled_call_impl is not None]
        names = ", ".join(sorted(set(compiled))) or "none"
        graphs = run.observation.calls(COMPILED_GRAPH)
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        seen = f"{len(compiled)} module(s) compiled ({names}), {graphs} call(s) of compiled graphs in this step, "
        seen += f"{breaks} graph break(s) in this process"
        if not run.observation.operators:
            return hw.Evidence.unknown(f"{seen}; no operators were recorded")
        if left := eager_blocks(run.inner_model):
            return hw.Evidence.inactive(f"{seen}; {len(left)} repeated layer(s) stayed eager: {hw.first_names(left)}")
        eager = {name or "the model": count for name, count in run.observation.eager_products.items() if count}
        if eager:
            of = f"{len(eager)} of {len(compiled)} compiled module(s)"
            seen += f"; {sum(eager.values())} matrix products of {of} ran outside of the graphs: {hw.first_names([*eager])}"
            return hw.Evidence.inactive(seen)
        return hw.Evidence.of(compiled and graphs, seen)


def eager_blocks(model: Any) -> list[str]:
    """The names of the repeated layers that run eagerly although others of them are compiled."""
    blocks = set(repeated_blocks(model))
    eager = [name for name, module in model.named_modules() if module in blocks and module._compiled_call_impl is None]
    return eager if len(eager) < len(blocks) else []
