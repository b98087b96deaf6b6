"""A plan as Python that makes TrainingArguments or TRL's SFTConfig, with what they cannot say as comments."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pprint import pformat
from typing import Any, Literal

from hwopt.config.job import Job
from hwopt.config.task_kinds import task_facts
from hwopt.data.sources.layout import layout_of
from hwopt.data.sources.reading import read_all, read_options
from hwopt.errors import HwoptError
from hwopt.planning.decisions import PluginDecision
from hwopt.planning.plan import Plan
from hwopt.plugin.imports import options_from

SIZES = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "auto_find_batch_size")
"""Arguments for the rows of a step. Plugins know them too, but a host reads them itself."""
LOADER = {key: f"dataloader_{key}" for key in ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers")}
"""Key of `recipe.loader` -> the argument."""
CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
"""Two names for one argument since transformers 5.23, the newer one first."""
STEPS = {"eval_steps": "eval_strategy", "save_steps": "save_strategy"}
"""Number of steps -> the strategy that it needs."""


def arguments_file(plan: Plan, to: Literal["trainer", "trl"]) -> str:
    """The text of a Python module with `arguments` and the keywords of `from_pretrained`."""
    package, name = ("trl", "SFTConfig") if to == "trl" else ("transformers", "TrainingArguments")
    into = getattr(import_module(package), name)
    fields = {field.name for field in dataclasses.fields(into) if field.init}
    checkpointing = next(word for word in CHECKPOINTING if word in fields)
    values, lines = plugin_words(plan, fields)
    kwargs = plan.recipe.model_kwargs
    plain = {key: value for key, value in kwargs.items() if isinstance(value, str | int | float)}
    model, chat = f"model_kwargs = {pformat(plain, width=80)}  # for from_pretrained\n", False
    if to == "trl":
        model, values = "", values | ({"model_init_kwargs": plain} if plain else {})
        try:
            chat = has_conversations(plan.job)
        except HwoptError as error:
            lines.append(f"left out assistant_only_loss, which conversations need: the columns cannot be read here: {error}")
        if not plan.context.task.decoder:
            lines.append(
                f"left out task.kind = {plan.job.task.kind!r}: SFTConfig is for causal language models; see --to trainer"
            )
    off = {"bf16": False, checkpointing: False} if to == "trl" else {}  # SFTConfig turns both on by itself
    given = off | {"output_dir": "out"} | dict(training_words(plan, fields, chat)) | values
    lines += [f"left out {key} of from_pretrained: {value!r}" for key, value in kwargs.items() if key not in plain]
    lines += left_out(plan, given)
    arguments = "".join(f"    {key}={pformat(value, width=80)},\n" for key, value in given.items())
    top = heading(plan, f"{name} for", to, lines)
    return f"{top}\nfrom {package} import {name}\n\narguments = {name}(\n{arguments})\n{model}"


SAMPLES = (
    "prompt completion messages chat_template assistant_turns blocks augmentation max_rows eval_fraction more_eval max_length"
)
"""Keys of [data] that change what is trained. The user's own code loads the data."""


def left_out(plan: Plan, given: Mapping[str, Any]) -> Iterator[str]:
    """A line for each key of the job that changes what is trained, and that none of the arguments `given` says."""
    data, loss = plan.job.data, plan.job.task.loss_changes
    said = {"label_smoothing": "label_smoothing_factor", "blocks": "packing"}
    if (parts := given.get("gradient_accumulation_steps", 1)) > 1 and not plan.context.task.decoder:
        yield (
            f"left out trainer.model_accepts_loss_kwargs = False, which your trainer needs: the loss of most such models, as of "
            f"BERT, is the mean of a micro-batch, and transformers would add {parts} of them in a step"
        )
    for key in loss:
        if said.get(key) not in given:
            yield f"left out task.{key}: no argument says it. The loss differs, unless your compute_loss_func does the same"
    if plan.job.model.chooses_weights:
        yield "left out model.freeze and model.train_only: set requires_grad of your model's parameters"
    for key in SAMPLES.split():
        if key in data.model_fields_set and said.get(key, key) not in given:
            yield f"left out data.{key} = {getattr(data, key)!r}: for your code that loads the data"
    if (patience := plan.training.early_stopping_patience) is not None:
        yield f"left out training.early_stopping_patience = {patience}: for transformers.EarlyStoppingCallback"
    if data.eval is not None or data.eval_fraction is not None:
        yield "left out the best weights, which hwopt keeps: set load_best_model_at_end, and save_strategy as eval_strategy"


def heading(plan: Plan, what: str, to: str, lines: Iterable[str]) -> str:
    """The docstring of the written file, with a line for each plugin."""
    listed = "\n".join(f"  {line}" for line in lines).replace("\\", "/").replace('"""', "'''")
    return (
        f'"""{what} {plan.job.model.label} with profile {plan.profile.name}, written by `hwopt export --to {to}`.\n\n'
        f'Plugins of the profile:\n{listed}\n"""\n'
    )


def plugin_words(plan: Plan, fields: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """The arguments that express applied plugins, and a line for each plugin: its arguments, or why it has none."""
    values: dict[str, Any] = {}
    lines, fields = [], set(fields)
    if CHECKPOINTING[0] in fields:
        fields.discard(CHECKPOINTING[1])
    for entry in plan.entries:
        mine = {} if entry.decision == "skip" else dict(words_of(entry, plan, fields))
        values |= mine
        rest = ", ".join(f"{key} = {value!r}" for key, value in unsaid(entry, mine).items()) if mine else ""
        changes = entry.decision != "skip" and not mine and entry.plugin.effect == "method"
        note = f"; no argument says {rest}" if rest else " (it changes what is trained)" if changes else ""
        lines.append(decision_line(entry, plan, mine) + note)
    return values, lines


def words_of(entry: PluginDecision, plan: Plan, fields: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """(argument, value) of each of `fields` that sets options of an applied plugin to what they are; each option once."""
    options = entry.options.model_dump(mode="json")
    for key, word in LOADER.items():
        if word in fields and key in plan.recipe.loader and plan.recipe.author_of(f"loader[{key!r}]") == entry.author:
            yield word, plan.recipe.loader[key]
    if plan.recipe.author_of("batch['train']") == entry.author:
        yield from ((word, rows) for word, rows in sizes_of(plan).items() if word in fields)
    covered: set[str] = set()
    for word in (word for word in entry.plugin.aliases if word in fields and word not in (*SIZES, *LOADER.values())):
        for value in (True, *options.values()):
            meant = accepted_options(entry.plugin.aliases[word], value)
            same = [key for key, each in meant.items() if options.get(key, key == "enabled") is each or options.get(key) == each]
            if meant and len(same) == len(meant) and not covered & meant.keys():
                covered |= meant.keys()
                yield word, value
                break


def accepted_options(alias: Any, value: Any) -> Mapping[str, Any]:
    """The options that `alias` means with `value`; {} for a value that it does not know."""
    try:
        return options_from(alias, value) or {}
    except (AttributeError, KeyError, TypeError, ValueError):  # a value of another argument
        return {}


def decision_line(entry: PluginDecision, plan: Plan, words: Mapping[str, Any]) -> str:
    """What became of a plugin: its reason to be skipped, or the arguments that express it."""
    if entry.decision == "skip":
        return f"skip     {entry.name}: {entry.reason}"
    said = [f"{word} = {value!r}" for word, value in words.items()]
    kwargs = plan.recipe.model_kwargs
    own = [f"{key} = {kwargs[key]!r}" for key in kwargs if plan.recipe.author_of(f"model_kwargs[{key!r}]") == entry.author]
    if own:
        said.append(f"for from_pretrained (hwopt.model_kwargs): {', '.join(own)}")
    wrote = [key for key in plan.recipe.training if plan.recipe.author_of(f"training[{key!r}]") == entry.author]
    if wrote:
        used = [key for key in wrote if getattr(plan.training, key, None) is not None]
        said.append(f"{', '.join(used)} is among the arguments" if used else f"the job has its own instead of {', '.join(wrote)}")
    status = entry.decision if said else "left out"
    return f"{status:8} {entry.name}: {'; '.join(said) or 'no argument says it; for hwopt.optimized see docs/your-script.md'}"


def sizes_of(plan: Plan) -> dict[str, int]:
    """Rows of a micro-batch that divide the rows of a step, and the number of micro-batches."""
    rows = max(1, plan.batch.step // plan.world_size)
    micro = next(each for each in range(min(plan.batch.train, rows), 0, -1) if rows % each == 0)
    return {"per_device_train_batch_size": micro, "gradient_accumulation_steps": rows // micro}


def unsaid(entry: PluginDecision, words: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a plugin that differ from their defaults, and that none of `words` sets."""
    said = {"enabled", "effective"}  # rows x accumulation
    for word, value in words.items():
        if word in entry.plugin.aliases:
            said |= accepted_options(entry.plugin.aliases[word], value).keys()
        else:
            said |= {word.removeprefix("dataloader_"), "train"}
    options = entry.options.model_dump(mode="json", exclude_defaults=True)
    return {key: value for key, value in options.items() if key not in said}


def has_conversations(job: Job) -> bool:
    """Whether the job trains the answers of conversations. Raises HwoptError if its columns must tell and cannot be read."""
    data = job.data
    if data.messages is not None or data.prompt is not None or not task_facts(job.task.kind).decoder:
        return data.messages is not None
    few = replace(read_options(data), max_rows=100, max_bad_rows=1.0, streaming=True)  # of the hub the first rows only
    return layout_of(read_all(data.train, data.split, few).table, data).kind == "messages"


def training_words(plan: Plan, fields: Iterable[str], chat: bool = False) -> Iterator[tuple[str, Any]]:
    """The job's hyperparameters, in the arguments `fields`. `chat`: only the answers of conversations are trained."""
    training, data = plan.training, plan.job.data
    values = training.model_dump(exclude_none=True)
    if training.max_steps is not None:
        del values["num_train_epochs"]
    if not training.lr_scheduler_kwargs:
        del values["lr_scheduler_kwargs"]
    if not training.push_to_hub:
        del values["push_to_hub"], values["hub_private_repo"]
    if plan.hardware.device_type == "cpu":
        values["use_cpu"] = True
    if "warmup_ratio" in values and "warmup_ratio" not in fields:
        values["warmup_steps"] = values.pop("warmup_ratio")  # a share of the steps since transformers 5
    values |= {STEPS[word]: "steps" for word in STEPS if word in values}
    if data.eval is not None:
        values["per_device_eval_batch_size"] = plan.batch.eval_rows(data.max_length or 1)
        values.setdefault("eval_strategy", "epoch")
    if smoothing := plan.job.task.label_smoothing:
        values["label_smoothing_factor"] = smoothing
    values["max_length"] = data.max_length  # None too: SFTConfig would truncate at 1,024
    if data.blocks:
        values |= {"packing": True, "packing_strategy": "wrapped"}
    if chat:
        values["assistant_only_loss"] = True  # SFTConfig would train the questions too
    elif data.prompt is None:
        values["dataset_text_field"] = data.text[0]
    if data.eos_token is not None:
        values["eos_token"] = data.eos_token
    yield from ((word, value) for word, value in values.items() if word in fields)
