"""Output layer and cross-entropy in one, a part of the tokens at a time: the logits of a micro-batch never exist at once.

With 50,000 to 260,000 words the logits and what is made of them are often most of a step's memory. Here each chunk of tokens
goes through product, softmax and loss, and at once into the gradients of hidden states and weights, which are all that is kept.
Source: Hsu et al. 2024, Liger Kernel (arXiv:2410.10989), whose Triton kernels are taken on a CUDA device where they are
installed; the same in plain torch everywhere else. Hardware: any; liger needs compute capability 7.0.
Cost: torch reads and adds up the weight's gradient once a chunk, liger waits for the device twice a micro-batch; gained: all but
a chunk's part of the logits. Numerical effect: rounding; the product has the precision that the layer would have had, softmax
and sums are fp32.
The labels never enter `forward`: while a run trains, the model's output layer hands on its input, and the loss does the rest.
"""

from __future__ import annotations

from functools import cache, partial
from math import ceil
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hwopt.errors import PluginError
from hwopt.hardware.device import Capability
from hwopt.plugin import Conflict, Context, Decision, Evidence, MemoryOption, Plugin, PluginOptions, Recipe, RunView, Stage

IGNORED = -100
"""The label of a token that no loss counts."""
MOST_CHUNKS = 16
"""A sixteenth of the logits is little already, and smaller products are slow."""
TRITON_NEEDS = (7, 0)
FUSED = ("FusedLinearCrossEntropy", "LigerFusedLinearCrossEntropyFunction")
PLAIN = ("aten::cross_entropy_loss", "aten::nll_loss")
"""Names in torch's profiler."""


def parts(vocabulary: int, hidden_size: int) -> int:
    """Chunks whose logits take about as much as the hidden states of all tokens."""
    return max(1, ceil(vocabulary / max(1, hidden_size)))


def in_chunks(
    hidden: Any,  # (tokens, hidden)
    weight: Any,  # (vocabulary, hidden)
    bias: Any | None,  # (vocabulary,)
    targets: Any,  # (tokens,)
    *,
    chunks: int,
    dtype: Any,
    wanted: tuple[bool, ...],
    on_card: bool,
) -> tuple[Any, Any, Any, Any]:
    """(summed cross-entropy, and its gradients by hidden, weight and bias where `wanted`), in fp32, or fp64 for fp64.

    Products are in `dtype`. `on_card`: a half product is what is added up of a weight's gradient, as tensor cores have it; a CPU
    has it in fp32, for adding half to fp32 would make a copy of the whole there.
    """
    import torch

    full = torch.promote_types(hidden.dtype, torch.float32)
    loss = torch.zeros((), dtype=full, device=hidden.device)
    of_hidden = torch.empty_like(hidden, dtype=full) if wanted[0] else None
    of_weight = torch.zeros_like(weight, dtype=full) if wanted[1] else None
    of_bias = torch.zeros_like(bias, dtype=full) if bias is not None and wanted[2] else None
    low, low_bias = weight.to(dtype), None if bias is None else bias.to(dtype)

    def add(some: Any, labels: Any, its_gradient: Any | None) -> None:
        some, ignored, index = some.to(dtype), (labels == IGNORED)[:, None], labels.clamp(min=0)[:, None]
        scores = torch.nn.functional.linear(some, low, low_bias)  # (chunk, vocabulary)
        wide = scores.to(full)
        wide.sub_(wide.amax(1, keepdim=True))
        picked = wide.gather(1, index)
        total = wide.exp_().sum(1, keepdim=True)
        loss.add_((total.log() - picked).masked_fill_(ignored, 0).sum())
        if not any(wanted):
            return
        # softmax less one at the label, nothing where it is ignored
        wide.div_(total.masked_fill_(ignored, torch.inf)).scatter_add_(1, index, ignored.to(full) - 1)
        if of_bias is not None:
            of_bias.add_(wide.sum(0))
        gradient = wide if dtype == full else scores.copy_(wide)
        if its_gradient is not None:
            its_gradient.copy_(gradient @ low)
        if of_weight is not None and on_card and dtype != full:
            share = 1 << max(0, len(some).bit_length() - 6)  # sums of more than some 64 tokens could leave fp16's range
            of_weight.add_(gradient.t() @ (some / share), alpha=share)
        elif of_weight is not None:
            of_weight.addmm_(wide.t(), some.to(full))

    # always as many chunks, whatever the number of tokens: the memory planner follows a step from one size to all others
    of_some = [None] * chunks if of_hidden is None else of_hidden.tensor_split(chunks)
    for some, labels, its_gradient in zip(hidden.tensor_split(chunks), targets.tensor_split(chunks), of_some, strict=True):
        add(some, labels, its_gradient)
    return loss, of_hidden, of_weight, of_bias


@cache
def fused_function() -> Any:
    """The autograd function around `in_chunks`."""
    import torch

    class FusedLinearCrossEntropy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, targets: Any, settings: dict[str, Any]) -> Any:
            ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
            loss, *ctx.found = in_chunks(hidden, weight, bias, targets, wanted=ctx.needs_input_grad[:3], **settings)
            return loss

        @staticmethod
        def backward(ctx: Any, factor: Any) -> Any:
            found, ctx.found = ctx.found, None  # scaled in place, so once
            assert found is not None, "backward() was called twice"
            scaled = [None if x is None else x.mul_(factor).to(dtype) for x, dtype in zip(found, ctx.dtypes, strict=True)]
            return *scaled, None, None

    return FusedLinearCrossEntropy


def linear_cross_entropy(
    hidden: Any, weight: Any, bias: Any | None, targets: Any, *, chunks: int, dtype: Any = None, on_card: bool = False
) -> Any:
    """Cross-entropy of `hidden @ weight.T + bias` and `targets`, summed over those that are not -100; differentiable once.

    hidden (tokens, hidden), weight (vocabulary, hidden), bias (vocabulary,) or None, targets (tokens,). The tokens go through
    in `chunks` equal parts; `dtype` is that of the products, default the weight's.
    """
    import torch

    settings = {"chunks": chunks, "dtype": dtype or weight.dtype, "on_card": on_card}
    with torch.autocast(hidden.device.type, enabled=False):
        if torch.is_grad_enabled():
            return fused_function().apply(hidden, weight, bias, targets, settings)
        return in_chunks(hidden, weight, bias, targets, wanted=(False, False, False), **settings)[0]


def liger_cross_entropy(hidden: Any, weight: Any, bias: Any | None, targets: Any, *, dtype: Any) -> Any:
    """The same by liger's kernels, on a CUDA device; the weight's gradient is added up in fp32."""
    import torch
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED, reduction="sum", accum_dtype=torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):
        return loss(weight.to(dtype), hidden.to(dtype), targets, None if bias is None else bias.to(dtype))


def hand_on(hidden: Any) -> Any:
    """In place of an output layer's forward."""
    return hidden


class FusedHead:
    """The output layer of one model: between `attach` and `detach` it hands on its input, and `loss` does its work.

    It stays where it is with its weights, so that tied ones, the optimizer and state dicts know of nothing.
    """

    def __init__(self, backend: str, chunks: int, on_card: bool) -> None:
        self.backend, self.chunks, self.on_card = backend, chunks, on_card
        self.layer: Any = None
        self.dtype: Any = None

    def attach(self, model: Any, run: RunView) -> Any:
        import torch

        layer = model.get_output_embeddings()
        if type(layer) is not torch.nn.Linear:
            found = f"a {type(layer).__name__} of {type(layer).__module__.split('.')[0]}"
            raise PluginError(
                f"plugin 'fused_loss': the output layer of {type(model).__name__} is {found}, and only torch's own Linear can be "
                "fused with the loss; leave it out of what other plugins change (plugins.adapter.target_modules), or remove "
                "[plugins.fused_loss]"
            )
        vars(layer)["forward"] = hand_on
        self.layer = layer
        # the accelerator's autocast is around the model alone
        self.dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(run.recipe.accelerator.get("mixed_precision", "no"))
        return model

    def detach(self, model: Any, run: RunView) -> Any:
        del self.layer.forward
        return model

    def loss(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """As the task's: (summed loss, number of labels in it); `outputs.logits` are hidden states (batch, length, hidden)."""
        import torch

        hidden, labels, layer = outputs.logits.flatten(0, 1), targets.flatten(), self.layer
        if hidden.shape[1] != layer.in_features:
            raise PluginError(
                f"plugin 'fused_loss': the model gives {hidden.shape[1]} values a token where its output layer takes "
                f"{layer.in_features}: it does not use that layer as it is; remove [plugins.fused_loss]"
            )
        device = hidden.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        dtype = autocast or self.dtype or layer.weight.dtype
        count = (targets != IGNORED).sum()
        # liger gives the weight no gradient where nothing below it is trained
        if self.backend == "liger" and hidden.is_cuda and (hidden.requires_grad or not torch.is_grad_enabled()):
            return liger_cross_entropy(hidden, layer.weight, layer.bias, labels, dtype=dtype), count
        fused = partial(linear_cross_entropy, chunks=self.chunks, dtype=dtype, on_card=self.on_card)
        return fused(hidden, layer.weight, layer.bias, labels), count


def liger_here(context: Context) -> Capability:
    """Whether liger's kernels run here, with the reason."""
    hardware = context.hardware
    if hardware.compute_capability is None:
        return Capability(False, "needs a CUDA device, found a CPU")
    if hardware.compute_capability < TRITON_NEEDS:
        return Capability(False, f"Triton needs compute capability 7.0, found {hardware.capability_text} ({hardware.name})")
    if not context.has("liger-kernel"):
        return Capability(False, "liger-kernel is not installed (pip install 'hwopt[kernels]')")
    return Capability(True, f"liger-kernel {context.software['liger-kernel']}")


class FusedLoss(Plugin):
    name = "fused_loss"
    stage = Stage.MODEL
    after = ("adapter",)  # which may wrap the output layer
    preserves = "rounding"
    conflicts = (
        Conflict(
            lacks="whole_weights",
            why="the fused loss needs the output layer's weight after that layer has run; keep one of the two tables",
        ),
    )

    class Options(PluginOptions):
        backend: Literal["auto", "liger", "torch"] = Field(
            default="auto", description='"auto": liger\'s kernels where they run, else plain torch.'
        )
        chunks: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
            default="auto",
            description=f'Parts of a micro-batch\'s tokens; "auto": vocabulary / hidden size, at most {MOST_CHUNKS}. For torch.',
        )

        @model_validator(mode="after")
        def chunks_of_its_own(self) -> FusedLoss.Options:
            if self.backend == "liger" and self.chunks != "auto":
                raise ValueError(
                    f'chunks = {self.chunks} is for backend = "torch"; liger chooses its own: leave out chunks, or the backend'
                )
            return self

    options: Options

    def probe(self, context: Context) -> Decision:
        model, asked = context.model, self.options
        if context.job.task.kind != "causal-lm":
            return Decision.skip(f"{context.job.task.kind} has no logits over a vocabulary, task.kind = 'causal-lm' has")
        if model.logit_transform:
            return Decision.skip(f"{model.architecture} does more than a product: {model.logit_transform}")
        liger = liger_here(context)
        if liger and asked.backend != "torch" and asked.chunks == "auto":
            return Decision.apply(liger.reason, self.Options(backend="liger"))
        chunks = min(parts(model.vocab_size, model.hidden_size), MOST_CHUNKS) if asked.chunks == "auto" else asked.chunks
        to = self.Options(backend="torch", chunks=chunks)
        what = f"1/{chunks} of a micro-batch's logits over {model.vocab_size:,} words at once"
        if asked.backend == "liger":
            return Decision.fallback(to, f"liger: {liger.reason}; takes torch, {what}")
        return Decision.apply(f"torch, {what}", to)

    def apply(self, recipe: Recipe, context: Context) -> None:
        chunks = self.options.chunks
        if chunks == "auto":  # liger's, as the memory planner sees them
            chunks = parts(context.model.vocab_size, context.model.hidden_size)
        head = FusedHead(self.options.backend, chunks, on_card=context.hardware.device_type == "cuda")
        recipe.model_steps.append(head.attach)
        recipe.loss = head.loss
        recipe.final_steps.append(head.detach)

    @classmethod
    def memory_options(cls, options: Any | None, context: Context) -> list[MemoryOption]:
        if options is not None or context.job.task.kind != "causal-lm" or context.model.logit_transform:
            return []
        return [MemoryOption(cls.Options(), 1.05, "makes the logits of a part of the tokens at a time")]

    def evidence(self, run: RunView) -> Evidence:
        head = getattr(run.loss, "__self__", None)
        layer = run.inner_model.get_output_embeddings()
        if not isinstance(head, FusedHead) or head.layer is not layer or layer.forward is not hand_on:
            return Evidence.inactive("the output layer makes logits of its own")
        ran = run.observation.operators
        fused, plain = (sum(ran.get(name, 0) for name in names) for names in (FUSED, PLAIN))
        tokens = max(rows * width for rows, width in run.last_step_batch.sizes)
        chunks = ran.get("aten::scatter_add_", 0) // max(1, fused)  # one a chunk; liger has its own
        seen = (
            f"the output layer handed on {layer.in_features:,} values a token instead of {layer.out_features:,}; in step 1 "
            f"{fused} fused loss(es), {plain} on whole logits; {tokens:,} tokens in {chunks or 'as many chunks as liger chose'}"
        )
        if chunks:
            seen += f" chunks, so logits of {ceil(tokens / chunks):,} at once"
        if not ran:
            return Evidence.unknown("no operators were recorded")
        return Evidence.active(seen) if fused >= len(run.last_step_batch.sizes) and not plain else Evidence.inactive(seen)
