"""For forecasts: the memory that a script's own loop needs, where it differs from that of hwopt's loop.

TRL's `SFTTrainer` computes its loss from one tile of logits at a time (`trl.kernels.ChunkedLogProbFunction`), in loops over
tokens and vocabulary. `LogProbs` allocates the same memory and computes nothing. It has no loop over tokens, because the
planner extrapolates from one size to others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hwopt.memory.forecast.lengths import Lengths, largest_micro_batch
from hwopt.planning.decisions import PluginDecision
from hwopt.planning.parts import write
from hwopt.planning.plan import Plan
from hwopt.plugin import Context, Decision, MemorySpec, Plugin, PluginOptions, Recipe, Stage

TILE = (4096, 32_768)
"""Most tokens of a tile, and its width in the vocabulary."""
STATISTICS = 7
"""Numbers of a token that TRL keeps in fp32 during the forward pass, such as the largest logit."""


def in_its_loop(plan: Plan, lengths: Lengths, sft: bool) -> Plan:
    """`plan` with the memory of a script's loop. `sft`: the script has a `SFTTrainer`, and no plugin of `plan` a loss."""
    shape = largest_micro_batch(plan, lengths.longest)
    tokens = max(1, min(TILE[0], shape.rows * (shape.width - 1)))
    loop = SftLoop(SftLoop.Options(tokens=tokens)) if sft else ScriptLoop(ScriptLoop.Options())
    written = write((*plan.entries, PluginDecision(loop, "hwopt", "apply", "", {}, "your script")), plan.context)
    return replace(plan, entries=written.entries, recipe=written.recipe)


class ScriptLoop(Plugin):
    name, stage, effect = "script_loop", Stage.LOOP, "rounding"

    def probe(self, context: Context) -> Decision:
        return Decision.apply("of a forecast")

    def memory(self, spec: MemorySpec, context: Context) -> None:
        spec.late_state = True


class SftLoop(ScriptLoop):
    name = "sft_loop"

    class Options(PluginOptions):
        tokens: int
        """Tokens of a tile."""

    options: Options

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.model_steps.append(self.attach)
        recipe.loss = summed_loss

    def attach(self, model: Any, run: Any) -> Any:
        layer = model.get_output_embeddings()

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            states = hidden[:, :-1]
            place = [torch.zeros(states.shape[:2].numel(), dtype=torch.long) for _ in range(2)]  # of the tokens that count
            kind = hidden.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
            log_probs: torch.Tensor = LogProbs.apply(states[place[0], place[1]], layer.weight, dtype, self.options.tokens)
            return log_probs

        vars(layer)["forward"] = forward
        return model


def summed_loss(outputs: Any, targets: Any) -> tuple[Any, Any]:
    return -outputs.logits.sum(), (targets != -100).sum()


class LogProbs(torch.autograd.Function):
    """(tokens, hidden), (vocabulary, hidden) -> (tokens,)."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, dtype: torch.dtype, tokens: int) -> Any:
        ctx.dtype, ctx.tokens = dtype, tokens
        statistics = [hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(STATISTICS)]
        statistics += tile(hidden, dtype, tokens)
        for part in weight.split(TILE[1]):
            product(part.to(dtype))
        log_z, entropy = statistics[0] + statistics[1].log(), statistics[0] - statistics[2] / statistics[1]
        ctx.save_for_backward(hidden, weight, log_z, entropy)
        return statistics[3] - log_z

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        hidden, weight, *_ = ctx.saved_tensors
        kept = [
            torch.zeros_like(each, dtype=torch.float32) if needed else None
            for each, needed in zip((hidden, weight), ctx.needs_input_grad[:2], strict=True)
        ]
        kept += tile(hidden, ctx.dtype, ctx.tokens)
        for part in weight.split(TILE[1]):
            low = part.to(ctx.dtype)  # the one before is freed afterwards, as in TRL
            for _ in range(3):
                product(low)
        found = [None if each is None else each.to(own.dtype) for each, own in zip(kept, (hidden, weight), strict=False)]
        return *found, None, None


def tile(hidden: Any, dtype: torch.dtype, tokens: int) -> list[Any]:
    """The logits of a tile, and its hidden states in `dtype`."""
    logits = hidden.new_empty((tokens, TILE[1]), dtype=dtype)
    return [logits] if hidden.dtype == dtype else [logits, hidden.new_empty((tokens, hidden.shape[1]), dtype=dtype)]


def product(part: Any) -> None:
    """A matrix product of `part`: of it the workspace of cuBLAS counts."""
    part[:1, :1] @ part[:1, :1]
