"""Fused linear cross-entropy: computes the output layer and the loss chunk by chunk, without storing all logits.

For each chunk of tokens it computes logits, softmax, loss and gradients, and keeps only the gradients of the hidden states and
of the weight. In training the output layer returns its input, and the loss applies the layer.
On a CUDA device with liger-kernel installed the Triton kernels of Liger are used, otherwise the same method in plain torch.

Source: Liger Kernel, Hsu et al. 2024 (arXiv:2410.10989).
Hardware: any; liger needs compute capability 7.0.
Cost: torch accumulates the weight gradient once per chunk; liger synchronizes with the device twice per micro-batch.
Numerical effect: rounding. Products have the precision of the output layer; softmax and sums are fp32.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from math import ceil
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from hwopt import plugin as hw
from hwopt.errors import PluginError
from hwopt.hardware.device import Support

MAX_CHUNKS = 16
"""More chunks save little memory and make the matrix products slow."""
OUTPUT_LAYERS = {"lm_head", "embed_out", "output_projection"}
"""Names of the output layers of causal language models in transformers."""
FUSED_OPERATOR, LIGER_OPERATOR = "FusedLinearCrossEntropy", "LigerFusedLinearCrossEntropyFunction"
PLAIN_OPERATORS = ("aten::cross_entropy_loss", "aten::nll_loss")
"""Operator names in torch's profiler: the fused losses, and cross-entropy on whole logits."""


def default_chunks(vocabulary: int, hidden_size: int) -> int:
    """The number of chunks at which the logits of one chunk are about as large as the hidden states of all tokens."""
    return max(1, ceil(vocabulary / max(1, hidden_size)))


def logits_share(model: hw.ModelFacts) -> float:
    """The part of the logits in what a token keeps for the backward pass, where all layers keep their activations.

    A layer keeps 34 bytes per hidden value (Korthikanti et al. 2022, arXiv:2205.05198, equation 1, without the attention scores);
    the loss keeps 10 per logit: the half-precision logits, their copy in fp32, and its gradient.
    """
    logits, layers = 10 * model.vocab_size, 34 * model.hidden_size * model.layers
    return logits / max(1, logits + layers)


def trains_output_layer(adapter: Any) -> bool:
    """Whether an adapter with these options trains the output layer, which "all-linear" leaves out."""
    adapted = () if adapter.target_modules == "all-linear" else adapter.target_modules
    return any(name.rpartition(".")[2] in OUTPUT_LAYERS for name in (*adapted, *adapter.modules_to_save))


def return_input(hidden: Any) -> Any:
    """`hidden` unchanged: replaces the forward method of the output layer."""
    return hidden


def linear_in(layer: Any) -> Any:
    """The linear layer in an output layer, which PEFT wraps to train the rows of some tokens; else `layer`."""
    return layer.original_module if type(layer).__name__ == "TrainableTokensWrapper" else layer


class FusedHead:
    """The output layer of a model. Between `attach` and `detach` the layer returns its input, and `loss` applies the layer.

    The layer stays in the model with its weights, so tied weights, optimizer and state dicts are not affected.
    """

    def __init__(self, backend: str, chunks: int, on_card: bool) -> None:
        self.backend, self.chunks, self.on_card = backend, chunks, on_card
        self.layer: Callable[[], Any] = lambda: None
        """Returns the layer. Weak: the plan, which outlives the run, has this object."""
        self.dtype: Any = None

    def attach(self, model: Any, run: hw.RunView) -> Any:
        import torch

        layer = model.get_output_embeddings()
        if type(linear_in(layer)) is not torch.nn.Linear:
            found = f"a {type(layer).__name__} of {type(layer).__module__.split('.')[0]}"
            raise PluginError(
                f"plugin 'fused_loss': the output layer of {type(model).__name__} is {found}, expected torch.nn.Linear. "
                "If an adapter trains it (plugins.adapter.target_modules), remove [plugins.fused_loss]"
            )
        vars(layer)["forward"] = return_input
        self.layer = weakref.ref(layer)
        # Accelerate's autocast covers the model only, not the loss
        self.dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(run.recipe.accelerator.get("mixed_precision", "no"))
        return model

    def detach(self, model: Any, run: hw.RunView) -> Any:
        del self.layer().forward
        return model

    def loss(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """(summed loss, number of labels), like the loss of the task. `outputs.logits`: hidden states (batch, length, hidden)."""
        import torch

        from hwopt_plugins.fused_loss.cross_entropy import IGNORED, liger_cross_entropy, linear_cross_entropy

        hidden, labels, layer = outputs.logits.flatten(0, 1), targets.flatten(), self.layer()
        linear, weight = linear_in(layer), layer.weight  # of PEFT's wrapper: with the trained rows
        if hidden.shape[1] != linear.in_features:
            raise PluginError(
                f"plugin 'fused_loss': the model returns {hidden.shape[1]} values per token, but its output layer expects "
                f"{linear.in_features}. The model changes the logits. Remove [plugins.fused_loss]"
            )
        device = hidden.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        dtype = autocast or self.dtype or weight.dtype
        count = (targets != IGNORED).sum()
        # liger computes no weight gradient if the hidden states need none
        if self.backend == "liger" and hidden.is_cuda and (hidden.requires_grad or not torch.is_grad_enabled()):
            return liger_cross_entropy(hidden, weight, linear.bias, labels, dtype=dtype), count
        fused = partial(linear_cross_entropy, chunks=self.chunks, dtype=dtype, on_card=self.on_card)
        return fused(hidden, weight, linear.bias, labels), count


def liger_capability(context: hw.Context) -> Support:
    """Whether Liger's kernels run on this machine, with the reason."""
    if not (triton := context.hardware.can("triton")):
        return triton
    if not context.has("liger-kernel"):
        return Support(False, "liger-kernel is not installed (pip install 'hwopt[kernels]')")
    return Support(True, f"liger-kernel {context.software['liger-kernel']}")


class FusedLoss(hw.Plugin):
    name = "fused_loss"
    stage = hw.Stage.MODEL
    effect = "rounding"
    relations = hw.Relations(
        after=("adapter",),  # it may wrap the output layer
        yields=True,
        conflicts=(
            hw.Conflict(
                plugin="adapter",
                why="the fused loss needs a plain output layer, and the adapter trains this one; keep one of the two",
                when=lambda mine, theirs: trains_output_layer(theirs),
            ),
            hw.Conflict(
                lacks="whole_weights",
                why="the fused loss needs the weight of the output layer after the layer's forward pass; "
                "keep one of the two tables",
            ),
        ),
    )
    aliases: ClassVar[Mapping[str, str]] = {
        "chunked_loss": "enabled = true",
        "num_output_chunks": "chunks",
        "use_liger_kernel": "enabled = true",
    }

    class Options(hw.PluginOptions):
        backend: Literal["auto", "liger", "torch"] = "auto"
        """Kernels of the loss; "auto": those of Liger if they run here, else plain torch."""
        chunks: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
        """Chunks of a micro-batch, torch only; "auto": vocabulary / hidden size, at most 16."""

        least_share: float = Field(default=0.1, ge=0, le=1)
        """Estimated part of the logits in a token's activations below which the plugin of an installed profile is
        skipped; your own table is skipped only if it sets this option."""

        @model_validator(mode="after")
        def require_torch_for_chunks(self) -> FusedLoss.Options:
            if self.backend == "liger" and self.chunks != "auto":
                raise ValueError(
                    f'chunks = {self.chunks} needs backend = "torch": liger chooses its own. Remove chunks, or the backend'
                )
            return self

    options: Options

    def probe(self, context: hw.Context) -> hw.Decision:
        model, options = context.model, self.options
        if not context.task.decoder:
            return hw.Decision.skip(f"needs a decoder without an encoder (task.kind = 'causal-lm'), found {context.task.kind}")
        if model.logit_transform:
            return hw.Decision.skip(f"{model.architecture} is not supported: {model.logit_transform}")
        if reason := self.unneeded(context):
            return hw.Decision.skip(reason)
        liger = liger_capability(context)
        if liger and options.backend != "torch" and options.chunks == "auto":
            return hw.Decision.apply(liger.reason, options.changed(backend="liger"))
        chunks = options.chunks
        if chunks == "auto":
            chunks = min(default_chunks(model.vocab_size, model.hidden_size), MAX_CHUNKS)
        to = options.changed(backend="torch", chunks=chunks)
        what = f"logits over {model.vocab_size:,} tokens in {chunks} chunks per micro-batch"
        if options.backend == "liger":
            return hw.Decision.fallback(to, f"liger: {liger.reason}; takes torch, {what}")
        return hw.Decision.apply(f"torch, {what}", to)

    def unneeded(self, context: hw.Context) -> str:
        """Why this plugin is left out although it could run; "" if it is not."""
        model, task, chosen = context.model, context.job.task, self.name in context.chosen
        if not chosen and task.loss_changes:
            return f"task.{next(iter(task.loss_changes))} changes the loss"
        if not chosen and model.router_loss and not task.ignore_router_loss:
            return "the load-balancing loss of a mixture of experts needs the loss of the task"
        share, least = logits_share(model), self.options.least_share
        if share >= least or (chosen and "least_share" not in self.options.model_fields_set):
            return ""
        return f"the logits are about {share:.1%} of a token's activations, less than least_share = {least:g}"

    def apply(self, recipe: hw.Recipe, context: hw.Context) -> None:
        chunks = self.options.chunks
        if chunks == "auto":  # liger's number of chunks, for the memory planner
            chunks = default_chunks(context.model.vocab_size, context.model.hidden_size)
        head = FusedHead(self.options.backend, chunks, on_card=context.hardware.device_type == "cuda")
        recipe.model_steps.append(head.attach)
        recipe.loss = head.loss
        recipe.final_steps.append(head.detach)

    @classmethod
    def alternatives(cls, options: Any | None, context: hw.Context) -> list[hw.Scale]:
        if options is not None or not context.task.decoder or context.model.logit_transform:
            return []
        note = "computes the logits of one chunk of tokens at a time"
        return [hw.Scale(choices=(hw.Choice(changes={}, note=note, time=1.05), hw.OFF), present=1)]

    def evidence(self, run: hw.RunView) -> hw.Evidence:
        linear = linear_in(run.inner_model.get_output_embeddings())
        operators, micro_batches = run.observation.operators, len(run.last_step_batch.sizes)
        liger, torch_loss = operators.get(LIGER_OPERATOR, 0), operators.get(FUSED_OPERATOR, 0)
        fused, plain = liger + torch_loss, sum(operators.get(name, 0) for name in PLAIN_OPERATORS)
        tokens = max(rows * width for rows, width in run.last_step_batch.sizes)
        chunks = operators.get("aten::scatter_add_", 0) // max(1, fused)  # one per chunk; liger uses its own kernel
        seen = (
            f"in this step {fused} fused loss(es), {plain} on whole logits of {linear.out_features:,} values per token; "
            f"{tokens:,} tokens in {chunks or 'as many chunks as liger chose'}"
        )
        if chunks:
            seen += f" chunks, so logits of {ceil(tokens / chunks):,} tokens at once"
        if not operators:
            return hw.Evidence.unknown("no operators were recorded")
        if fused < micro_batches or plain:
            return hw.Evidence.inactive(seen)
        return hw.Evidence.active(seen, backend="liger" if liger else "torch")

    def expects(self) -> Mapping[str, Any]:
        return {"backend": self.options.backend}
