"""The memory of losses of sentence-transformers that embed a batch in mini-batches, and the largest of these that fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from hwopt.hosts.forecast import Fit, fit_of, with_own_memory, within_seconds
from hwopt.hosts.script_plan import transformers_model
from hwopt.hosts.whole_batch import is_default
from hwopt.memory.forecast.lengths import Lengths
from hwopt.memory.forecast.planner import with_largest_sizes
from hwopt.planning.plan import Plan
from hwopt.system.cache import cache_folder

FORECAST = ("CachedMultipleNegativesRankingLoss", "CachedMultipleNegativesSymmetricRankingLoss")
"""Those that hold no second model: a mini-batch needs the memory of a classification with the same model."""


@within_seconds
def forecast_of_cached(given: Mapping[str, Any], args: Any, plan: Plan) -> Fit | None:
    """The forecast of a mini-batch of the loss in `given`, the arguments of a trainer; None for other losses.

    If the script leaves `mini_batch_size` open, `Fit.rows` is the largest power of two that fits, up to the whole batch. Rows are
    taken to be as long as the model allows: what the texts are is not known.
    """
    loss: Any = given.get("loss")
    model, batch = given["model"], args.per_device_train_batch_size
    width, inside = getattr(model, "max_seq_length", None), transformers_model(model)
    if type(loss).__name__ not in FORECAST or width is None or getattr(inside.config, "is_encoder_decoder", False):
        return None
    if any(not p.requires_grad or p.dtype != torch.float32 for p in model.parameters()):
        return None
    lengths, plan = Lengths(None, width, 2, "max_seq_length"), replace(plan, hardware=with_own_memory(plan.hardware, model))

    def at(rows: int) -> Fit:
        return fit_of(replace(plan, batch=replace(plan.batch, train=rows, step=batch)), inside, args, lengths)

    found = at(min(loss.mini_batch_size, batch))
    if found.fits is False:
        return replace(found, fits=None, why=f"{found.why}, if a row has max_seq_length tokens; how many it has is not known")
    if found.plan is None or found.memory is None or not is_default(loss):
        return found
    most = with_largest_sizes(found.plan, found.memory, cache_folder(), lengths).largest_train or 0
    rows = batch if most >= batch else 1 << (most.bit_length() - 1)
    return replace(at(rows), rows=rows) if rows > loss.mini_batch_size else found
