"""`fits`: the memory that a script needs on a card that need not be there, before anything is downloaded or trained."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import datasets
import numpy as np
import torch
from pyarrow import compute
from transformers import Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hwopt.config.aliases import plugin_of
from hwopt.config.job import JobFile, make_job
from hwopt.config.toml import Document
from hwopt.errors import HwoptError, InputError
from hwopt.hardware.device import GIB, Hardware
from hwopt.hosts.additivity import class_name
from hwopt.hosts.arguments import has_choices, script_of
from hwopt.hosts.limits import TRAINER_LACKS, lacks_of, overridden, own_loss, own_passes
from hwopt.hosts.loop_memory import in_its_loop
from hwopt.hosts.peft_options import LORA, QUANTIZED, adapter_options, quantize_options
from hwopt.hosts.script_plan import HEADS, NAME, described_model, plan_for, task_of, transformers_model
from hwopt.memory.forecast.lengths import Lengths
from hwopt.memory.forecast.planner import plan_memory
from hwopt.memory.trace.tracing_process import spent
from hwopt.planning.inputs import Inputs
from hwopt.planning.memory_plan import MemoryPlan
from hwopt.planning.plan import Plan
from hwopt.planning.resolve import hardware_of_card
from hwopt.system.cache import cache_folder
from hwopt.text import first_line, listing, truncate

KNOWN = ("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig")
"""Classes of arguments whose trainers hold one model and compute one loss from its logits."""
TRACE_SECONDS = 60.0  # of CPU time that a Trainer waits for its forecast
KNOWN_HEADS = (*(end for end in HEADS if end != "ForMaskedLM"), "ForSequenceClassification")
"""Ends of the names of classes whose logits the forecast knows."""
SAME_STATES = ("adamw_torch", "adamw_torch_fused", "adamw_apex_fused")
LENGTH = 1024  # tokens of a row if neither the data, the arguments nor the model say a number
WHOLE = ("packing", "padding_free", "neftune_noise_alpha")
"""Arguments with which a micro-batch of the script is not split (hwopt.hosts.additivity)."""
CHUNKS = "num_output_chunks"
"""The word that names the plugin of a loss in chunks."""


@dataclass(frozen=True)
class Fit:
    """Whether a script fits into the memory of a card. True as a bool only if it does."""

    fits: bool | None
    """None if it is not known; `why` says why."""
    why: str
    memory: MemoryPlan | None = None
    plan: Plan | None = None
    needs: tuple[str, ...] = ()
    """Plugins that are on because it does not fit without them, and the script left them to the forecast."""
    rows: int | None = None
    """The `mini_batch_size` that a loss of sentence-transformers gets (hwopt.hosts.cached_loss); None: it stays."""

    def __bool__(self) -> bool:
        return self.fits is True

    def __str__(self) -> str:
        return {True: "fits", False: "does not fit", None: "UNKNOWN"}[self.fits] + f": {self.why}"


def fits(model: Any, args: Any = None, dataset: Any = None, card: str = "auto", peft_config: Any = None, **plugins: Any) -> Fit:
    """Whether `hwopt.optimized` with these arguments fits into the memory of `card`, without running it.

    `model`: a name, a config or a module. `args`: TrainingArguments or SFTConfig. `dataset`: rows with `input_ids`, for the
    longest one; without them `max_length` of `args` counts, else what the model takes. `card`: a profile, or a part of the name
    that CUDA reports ("Tesla T4"); "auto": this machine. `peft_config`: the LoraConfig that the trainer gets; a model of PEFT
    brings its own. `plugins`: plugin -> its options, or False to leave it out.
    The answer is None with a reason where the forecast does not know the trainer or the model.
    Raises InputError for other `args`, for a card that no profile describes, and as `hwopt.resolve` does.
    """
    args = args or TrainingArguments("trainer_output", use_cpu=True)
    if not isinstance(args, TrainingArguments):
        raise InputError(f"args: expected TrainingArguments, or the configuration of a trainer of TRL; got {truncate(args)}")
    profile = None if card == "auto" else Inputs().profile_of_card(card)
    hardware = None if profile is None else hardware_of_card(profile)
    return forecast(model, args, dataset, peft_config, plugins, "auto" if profile is None else profile.name, hardware)


def forecast(
    model: Any, args: Any, dataset: Any, peft_config: Any, plugins: Mapping[str, Any], profile: str, hardware: Hardware | None
) -> Fit:
    """The answer of `fits` with the name of a profile, on `hardware` (None: this machine)."""
    kind, second = type(args).__name__, "its trainer may hold a second model, or make its rows in the step"
    if kind not in KNOWN:
        return Fit(None, f"{kind}: {second}; the forecast knows {listing(KNOWN)}")
    described, adapted, unknown = without_adapter(described_model(model, {}), args, peft_config)
    config, head = getattr(described, "config", described), class_name(described)
    if not hasattr(config, "model_type"):
        return Fit(None, f"{type(described).__name__} is not a model of transformers, and its inputs are not known")
    other = f"{head}: the forecast knows the heads {listing(KNOWN_HEADS)}" if head and not head.endswith(KNOWN_HEADS) else ""
    if task_of(described) == "seq2seq-lm":
        other = f"{head}: the forecast does not read the targets of an encoder-decoder"
    if unknown := unknown or own_loss(Trainer, args, {}) or other:
        return Fit(None, unknown)
    loads = kind == "SFTConfig" and not hasattr(described, "parameters")  # TRL loads a model with the adapter of the plan
    plugins = dict(plugins) | ({} if loads else {plugin_of(LORA): False, plugin_of(QUANTIZED): False}) | adapted
    if kind == "SFTConfig":
        described = with_language_head(described)
    whole = next((word for word in WHOLE if getattr(args, word, None)), "")
    logs = "SFTTrainer logs values of each micro-batch" if kind == "SFTConfig" else ""
    passes = own_passes(Trainer, args, {}) or whole or logs
    if whole:
        batch = plugins.get("batch") or {}
        plugins |= {"batch": {**batch, "train": args.per_device_train_batch_size}, "length_batching": False}
    lacks = TRAINER_LACKS | ({"forward_backward": passes} if passes else {})
    if kind == "SFTConfig":
        plugins |= {plugin_of(CHUNKS): False}  # the trainer has a loss of its own

    def answer(plugins: Mapping[str, Any]) -> Fit:
        plan = plan_for(described, profile, script_of(args, lacks, dataset), plugins, hardware=hardware).plan
        lengths = replace(lengths_in(dataset, args, plan, config), eval_rows=None if args.do_eval or args.eval_on_start else 0)
        return fit_of(in_its_loop(plan, lengths, kind == "SFTConfig"), described, args, lengths)

    found = answer(plugins)
    left = [entry.name for entry in found.plan.entries if entry.choices > 1 and entry.decision == "skip"] if found.plan else []
    if found.fits is False and left:
        spared = answer({**plugins, **dict.fromkeys(left, True)})
        if spared.fits is not None:
            return replace(spared, why=f"{spared.why}, with {listing(left)}", needs=tuple(left))
    return found


def fit_of(plan: Plan, described: Any, args: Any, lengths: Lengths) -> Fit:
    """Whether the script with this `plan` fits. `described`: its model or config."""
    config = getattr(described, "config", described)
    applied = {entry.name for entry in plan.applied()}
    frozen = plugin_of(LORA) in applied
    if other := "" if plugin_of(QUANTIZED) in applied else other_weights(described, args, plan, frozen):
        return Fit(None, other)
    if plan.recipe.optimizer is None and (optim := str(getattr(args.optim, "value", args.optim))) not in SAME_STATES:
        return Fit(None, f"optim = {optim!r} of your arguments has other states than AdamW")
    plan = replace(plan, job=job_with(config, task_of(described)).job)
    memory = plan_memory(plan, cache_folder(), lengths)
    why = f"{memory.highest_gib:.2f} of {memory.free_gib - memory.reserve_gib:.2f} GiB on {plan.hardware.name}, "
    why += f"{memory.rows} x {memory.width} tokens, {memory.tier}"
    if memory.lower_bound:
        why = f"at least {why}; {memory.note}"
    return Fit(None if memory.lower_bound and memory.fits else memory.fits, why, memory, plan)


def within_seconds(forecast: Callable[..., Any]) -> Callable[..., Any]:
    """`forecast`, with at most TRACE_SECONDS of CPU time for its traces; a Fit with the reason if it cannot answer."""

    @functools.wraps(forecast)
    def limited(*given: Any) -> Any:
        before, spent.most = spent.most, TRACE_SECONDS
        try:
            return forecast(*given)
        except HwoptError as error:
            return Fit(None, first_line(error))
        finally:
            spent.most = before

    return limited


@within_seconds
def forecast_of_trainer(
    trainer: type, args: Any, given: Mapping[str, Any], profile: str, plugins: Mapping[str, Any], hardware: Hardware
) -> Fit:
    """The forecast for a Trainer of this class that is about to be made; `given`: the arguments of its constructor."""
    if own := overridden(trainer, ("compute_loss", "training_step")):
        return Fit(None, f"{own} may keep more than the model's own loss does")
    if own := own_loss(Trainer, args, given) or lacks_of(trainer, args, given).get("optimizer", ""):
        return Fit(None, own)
    model, data = given["model"], given.get("train_dataset")
    if not isinstance(data, list) and not (isinstance(data, datasets.Dataset) and data.format["type"] != "custom"):
        data = None  # reading it may never end, or take rows from the training
    known = bool(rows_lengths(data, args))
    if not known and type(args).__name__ in KNOWN and getattr(args, "max_length", None) is None:
        return Fit(None, "how many tokens a row has is not known: it is read of stored rows with input_ids of one text")
    found = forecast(model, args, data, given.get("peft_config"), plugins, profile, with_own_memory(hardware, model))
    if found.fits is False and not known:
        return Fit(None, f"{found.why}, if a row has max_length tokens; how many it has is not known")
    return found


def with_own_memory(hardware: Hardware, model: Any) -> Hardware:
    """`hardware`, where the memory of the weights of `model` counts as free: a forecast has them too."""
    weights = model.parameters() if isinstance(model, torch.nn.Module) else ()
    own = sum(each.nbytes for each in weights if each.device.type == hardware.device_type)
    return replace(hardware, free_memory_gib=hardware.free_memory_gib + own / GIB)


def without_adapter(described: Any, args: Any, peft_config: Any) -> tuple[Any, dict[str, Any], str]:
    """`described` without its adapter and quantization, the plugins that do the same, and why there are none, else ""."""
    adapter = peft_config or next(iter(getattr(described, "peft_config", {}).values()), None)
    described = transformers_model(described)
    config = getattr(described, "config", described)
    loading = getattr(args, "model_init_kwargs", None) or {}
    quantization = loading.get("quantization_config") or getattr(config, "quantization_config", None)
    registry, plugins, why = Inputs().registry, dict[str, Any](), ""
    if quantization is not None:
        plugins[plugin_of(QUANTIZED)], why = quantize_options(quantization, registry)
        if adapter is None:
            return described, plugins, "the weights are quantized and there is no adapter: give peft_config"
    if adapter is not None and not why:
        plugins[plugin_of(LORA)], why = adapter_options(adapter, registry)
    return described, plugins, why


def other_weights(described: Any, args: Any, plan: Plan, frozen: bool) -> str:
    """Why the weights need other memory than in the forecast; `frozen`: they are below an adapter.

    It has those in the dtype of the products: autocast keeps a copy of each one of another dtype for the backward pass.
    """
    if not frozen:
        planned = str(plan.recipe.model_kwargs.get("dtype", "float32")).removeprefix("torch.")
        dtype = str(dtype_of(described)).removeprefix("torch.")
        loaded = hasattr(described, "parameters") and dtype != planned
        return f"the weights are in {dtype}, and the forecast has them in {planned}" if loaded else ""
    asked = (getattr(args, "model_init_kwargs", None) or {}).get("dtype")
    dtype = str((asked != "auto" and asked) or dtype_of(described) or "float32").removeprefix("torch.")
    computes = {"bf16": "bfloat16", "fp16": "float16"}.get(plan.recipe.accelerator.get("mixed_precision", "no"), "float32")
    why = f"the weights below the adapter are in {dtype} and the products in {computes}, whose copies the forecast does not count"
    return "" if dtype == computes else f"{why}: load the model with dtype=torch.{computes}"


def dtype_of(described: Any) -> Any:
    """The dtype of the frozen weights, or what the config says of them."""
    if hasattr(described, "parameters"):
        return next((p.dtype for p in described.parameters() if not p.requires_grad), next(described.parameters()).dtype)
    return getattr(described, "dtype", None)


def with_language_head(described: Any) -> Any:
    """`described`; a config that names no architecture, as its class makes it, gets that of a causal language model."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(getattr(described, "model_type", ""))
    if hasattr(described, "parameters") or getattr(described, "architectures", None) or name is None:
        return described
    named = copy.deepcopy(described)
    named.architectures = [name]
    return named


def job_with(config: Any, kind: str) -> JobFile:
    """A job with the model of `config` itself, so that a step can be traced without a download."""
    values = {key: value for key, value in config.to_diff_dict().items() if value is not None and not key.startswith("_")}
    values.pop("quantization_config", None)  # a plugin quantizes the weights
    table = values | {"model_type": config.model_type}
    return make_job(Document(NAME, {"model": {"config": table}, "data": {"train": NAME}, "task": {"kind": kind}}))


def rows_lengths(dataset: Any, args: Any) -> list[int]:
    """The tokens of each row of `dataset`, at most `max_length` of `args`; [] if it has no `input_ids`, or several in a row."""
    row: Mapping[str, Any] = next(iter(dataset or ()), {})
    if "input_ids" not in row or has_choices(row["input_ids"]):
        return []
    limit = getattr(args, "max_length", None) or sys.maxsize
    if isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":  # a list for each row would take long
        tables = dataset.select_columns("input_ids").with_format("arrow").iter(10_000)
        counts = [count for table in tables for count in compute.list_value_length(table["input_ids"]).to_pylist()]
    else:
        counts = [len(row["input_ids"]) for row in dataset]
    packed = getattr(args, "packing", False) and limit < sys.maxsize
    return [limit if packed else min(count, limit) for count in counts]


def lengths_in(dataset: Any, args: Any, plan: Plan, config: Any) -> Lengths:
    """The tokens of each row of `dataset`, or only the longest that a row may have."""
    labels = getattr(config, "num_labels", None) or 2
    if tokens := rows_lengths(dataset, args):
        return Lengths(np.array(tokens, np.int32), max(tokens), labels, "the longest row")
    if limit := getattr(args, "max_length", None):
        return Lengths(None, limit, labels, "max_length of the arguments")
    most = min(plan.model.max_positions or LENGTH, LENGTH)
    return Lengths(None, most, labels, "a guess: give a dataset with input_ids, or max_length")
