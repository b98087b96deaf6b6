"""`fits`: the memory that a script needs on a card that need not be there, before anything is downloaded or trained."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hwopt.config.job import JobFile, make_job
from hwopt.config.toml import Document
from hwopt.hosts.arguments import script_of
from hwopt.hosts.limits import TRAINER_LACKS, own_passes
from hwopt.hosts.script_plan import NAME, plan_for, task_of
from hwopt.hosts.trainer import described_model
from hwopt.memory.forecast.lengths import Lengths
from hwopt.memory.forecast.planner import plan_memory
from hwopt.planning.inputs import Inputs
from hwopt.planning.memory_plan import MemoryPlan
from hwopt.planning.plan import Plan
from hwopt.planning.resolve import hardware_of_card
from hwopt.system.cache import cache_folder
from hwopt.text import listing

KNOWN = ("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig")
"""Classes of arguments whose trainers hold one model and compute one loss from its logits."""
LENGTH = 1024
"""Tokens of a row if neither the data, the arguments nor the model say a number."""


WHOLE = ("packing", "padding_free", "neftune_noise_alpha", "label_smoothing_factor")
"""Arguments with which a micro-batch of the script is not split (hwopt.hosts.additivity)."""


@dataclass(frozen=True)
class Fit:
    """Whether a script fits into the memory of a card. True as a bool only if it does."""

    fits: bool | None
    """None if it is not known; `why` says why."""
    why: str
    memory: MemoryPlan | None = None
    plan: Plan | None = None

    def __bool__(self) -> bool:
        return self.fits is True

    def __str__(self) -> str:
        return {True: "fits", False: "does not fit", None: "UNKNOWN"}[self.fits] + f": {self.why}"


def fits(model: Any, args: Any = None, dataset: Any = None, card: str = "auto", **plugins: Any) -> Fit:
    """Whether `hwopt.optimized` with these arguments fits into the memory of `card`, without running it.

    `model`: a name, a config or a module. `args`: TrainingArguments or SFTConfig. `dataset`: rows with `input_ids`, for the
    longest one; without them `max_length` of `args` counts, else what the model takes. `card`: a profile, or a part of the name
    that CUDA reports ("Tesla T4"); "auto": this machine. `plugins`: plugin -> its options, or False to leave it out.
    The answer is None with a reason where the forecast does not know the trainer or the model.
    Raises InputError for a card that no profile describes, and as `hwopt.resolve` does.
    """
    args = args or TrainingArguments("trainer_output", use_cpu=True)
    kind = type(args).__name__
    if kind not in KNOWN:
        why = f"its trainer may hold a second model, or make its rows in the step; the forecast knows {listing(KNOWN)}"
        return Fit(None, f"{kind}: {why}")
    described = described_model(model, {})
    if kind == "SFTConfig":
        described = with_language_head(described)
    whole = next((word for word in WHOLE if getattr(args, word, None)), "")
    passes = (
        own_passes(Trainer, args, {}) or whole or ("SFTTrainer logs values of each micro-batch" if kind == "SFTConfig" else "")
    )
    if whole:
        batch = plugins.get("batch") or {}
        plugins |= {"batch": {**batch, "train": args.per_device_train_batch_size}, "length_batching": False}
    config = getattr(described, "config", described)
    if not hasattr(config, "model_type"):
        return Fit(None, f"{type(described).__name__} is not a model of transformers, and its inputs are not known")
    profile = None if card == "auto" else Inputs().profile_of_card(card)
    hardware = None if profile is None else hardware_of_card(profile)
    lacks = TRAINER_LACKS | ({"forward_backward": passes} if passes else {})
    found = plan_for(
        described, "auto" if profile is None else profile.name, script_of(args, lacks, dataset), plugins, hardware=hardware
    )
    plan = replace(found.plan, job=job_with(config, task_of(described)).job)
    memory = plan_memory(plan, cache_folder(), lengths_in(dataset, args, plan, config))
    why = f"{memory.highest_gib:.2f} of {memory.free_gib - memory.reserve_gib:.2f} GiB on {plan.hardware.name}, "
    why += f"{memory.rows} x {memory.width} tokens, {memory.tier}"
    if memory.lower_bound:
        why = f"at least {why}; {memory.note}"
    return Fit(None if memory.lower_bound and memory.fits else memory.fits, why, memory, plan)


def with_language_head(described: Any) -> Any:
    """`described`; a config that names no architecture, as its class makes it, gets that of a causal language model."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(getattr(described, "model_type", ""))
    if hasattr(described, "parameters") or getattr(described, "architectures", None) or name is None:
        return described
    described = copy.deepcopy(described)
    described.architectures = [name]
    return described


def job_with(config: Any, kind: str) -> JobFile:
    """A job with the model of `config` itself, so that a step can be traced without a download."""
    values = {key: value for key, value in config.to_diff_dict().items() if value is not None and not key.startswith("_")}
    table = values | {"model_type": config.model_type}
    return make_job(Document(NAME, {"model": {"config": table}, "data": {"train": NAME}, "task": {"kind": kind}}))


def lengths_in(dataset: Any, args: Any, plan: Plan, config: Any) -> Lengths:
    """The tokens of each row of `dataset`, or only the longest that a row may have."""
    labels = getattr(config, "num_labels", None) or 2
    limit = getattr(args, "max_length", None)
    if "input_ids" in (getattr(dataset, "column_names", None) or next(iter(dataset or ()), {})):
        tokens = np.array([len(row["input_ids"]) for row in dataset], np.int32)
        tokens = np.minimum(tokens, limit) if limit else tokens
        return Lengths(tokens, int(tokens.max()), labels, "the longest row")
    if limit:
        return Lengths(None, limit, labels, "max_length of the arguments")
    most = plan.model.max_positions
    return Lengths(None, min(most or LENGTH, LENGTH), labels, "a guess: give a dataset with input_ids, or max_length")
