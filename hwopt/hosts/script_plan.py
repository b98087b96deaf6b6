"""A plan for a model and arguments of a script, instead of for a job file. What the script sets itself wins over the profile."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from pydantic import ValidationError
from transformers import AutoConfig, PreTrainedModel

from hwopt.config.aliases import plugin_aliases, plugin_of
from hwopt.config.job import JobFile, make_job
from hwopt.config.profile import DataDefaults, Profile
from hwopt.config.task_kinds import task_facts
from hwopt.config.toml import Document
from hwopt.errors import InputError
from hwopt.hardware.detect import detect, detect_host, detect_software, with_layer_speed
from hwopt.hardware.device import Hardware
from hwopt.hosts.additivity import class_name, inner
from hwopt.hosts.limits import with_reason
from hwopt.model.facts import ModelFacts, model_facts
from hwopt.planning import auto_profile
from hwopt.planning.inputs import Inputs
from hwopt.planning.plan import Plan
from hwopt.planning.resolve import resolve
from hwopt.plugin.imports import options_from
from hwopt.plugin.registry import Registry
from hwopt.system.cache import cache_folder
from hwopt.system.ranks import local_rank, local_ranks
from hwopt.text import truncate

HEADS = {"ForCausalLM": "causal-lm", "LMHeadModel": "causal-lm", "ForConditionalGeneration": "seq2seq-lm"}
HEADS |= {"ForTokenClassification": "token-classification", "ForMaskedLM": "token-classification"}
HEADS |= {"ForImageClassification": "image-classification"}
"""End of a class name -> the task that plugins are probed with; for other models text-classification."""
NAME = "your script"


@dataclass(frozen=True)
class Script:
    """What a script says of its training."""

    rows: int  # rows of an optimizer step over all ranks
    eval_rows: int  # rows of an evaluation batch
    training: Mapping[str, Any]  # hyperparameters, by their names in [training]
    own: Mapping[str, Any] = field(default_factory=dict)  # words of TrainingArguments that the script sets itself -> their values
    lacks: Mapping[str, str] = field(default_factory=dict)
    """Field of the recipe ("order") or key ("batch['eval']") that the host cannot take -> why."""
    world_size: int = 1
    devices: int = 1  # devices that each process uses: several under torch's DataParallel
    spares_memory: bool = False  # whether it takes the least memory where a plugin leaves the choice to a forecast
    on_cpu: bool = False  # whether the host trains on the CPU, whatever else the machine has
    adapter: bool = False  # whether the host adds an adapter to the model after the plan is made
    micro_rows: int | None = None
    """Rows that the script computes at once. The profile's number is no more; None: it is the profile's."""
    tokens_per_sample: float | None = None  # mean tokens of a row; None if it is not known


@dataclass(frozen=True)
class ScriptPlan:
    plan: Plan
    wins: tuple[str, ...]  # for each setting of the script that wins over the profile: what it replaces

    def lines(self) -> Iterator[str]:
        """The plan as text: a line for the profile, and one for each decision and setting."""
        plan = self.plan
        yield f"profile {plan.profile.name} on {plan.hardware.name} for {plan.model.architecture}"
        for entry in plan.entries:
            yield f"{entry.decision:8} {entry.name}: {entry.reason}"
        yield from self.wins
        yield from plan.notes


@contextmanager
def words_of_python() -> Iterator[None]:
    """A block whose errors name arguments of a function, not options of the command line."""
    try:
        yield
    except InputError as error:
        text = re.sub(r"^--set: ", "", str(error), flags=re.MULTILINE)
        raise InputError(text.replace("--profile ", "profile ")) from error


@words_of_python()
def plan_for(
    model: Any, profile: str, script: Script, tables: Mapping[str, Any], strict: bool = False, hardware: Hardware | None = None
) -> ScriptPlan:
    """The plan of `profile` for `model`, a module or a config of transformers, on `hardware` (default: this machine).

    `tables`: plugin -> its options, or False to leave it out; they win over the profile, and `script.own` wins over both.
    Raises InputError and PluginError as `hwopt.api.resolve` does; with `strict` also for every fallback and skip, and for a
    setting of the script that the profile contradicts.
    """
    inputs = Inputs()
    if hardware is None:
        ranks = max(local_ranks(os.environ, script.world_size), script.devices)
        hardware = detect_host() if script.on_cpu else detect(local_rank(os.environ), ranks)
    if hardware.problem and hardware.device_type == "cuda":
        raise InputError(hardware.problem)
    why, unused = "", "your script trains on the CPU" if script.on_cpu and torch.cuda.is_available() else ""
    if profile == "auto":
        found = auto_profile.choose(hardware, inputs)
        profile, why = found.nearest.name, f"profile auto: {unused or found.reason}"  # the script gives the rows
    for name in tables:
        inputs.registry.plugin(name)  # a misspelt one that is turned off would stay on
    asked = list(assignments_of(tables))
    before = inputs.profile(profile, asked).content.plugins
    own, wins = own_options(script.own, before, inputs.registry)
    if strict and wins:
        raise InputError(f"strict: {next(iter(wins.values()))}. Change one of the two")
    model = transformers_model(model)
    config = getattr(model, "config", model)
    job = job_of(config, task_of(model), script.training)
    facts = facts_of_model(model, script.adapter)
    sizes, more = sizes_of(script, before, tables)

    def resolved_without(names: Collection[str]) -> Callable[..., Plan]:
        final = inputs.profile(profile, [*asked, *own, *sizes, *assignments_of(dict.fromkeys(names, False))])
        return partial(
            resolve,
            # without defaults for data, such as max_length, and without a step's rows: these are the script's
            replace(final, content=final.content.model_copy(update={"data": DataDefaults(), "plugins": stepless(final, tables)})),
            with_layer_speed(hardware, facts.hidden_size, script.world_size, cache_folder()),
            job,
            inputs.registry,
            facts,
            detect_software(),
            world_size=script.world_size,
            strict=strict,
            lacking=script.lacks,
            tokens_per_sample=lambda: script.tokens_per_sample,
        )

    resolved = resolved_without(())
    plan = resolved()
    if replaced := dict(replaced_settings(script.own, plan, inputs.registry)):
        wins |= replaced
        resolved = resolved_without({plugin_of(word) for word in replaced})
        plan = resolved()
    if plan.chose:  # as the script does it: the lengths of its texts are not known yet
        least = {entry.name for entry in plan.entries if script.spares_memory or tables.get(entry.name)}
        plan = resolved(choices={entry.name: entry.choices - 1 for entry in plan.entries if entry.name in least})
        plan = replace(plan, entries=tuple(with_reason(entry, plan.context, entry.name in least) for entry in plan.entries))
    batch = plan.batch.evaluating(script.eval_rows)
    if tables.get(plugin_of("per_device_train_batch_size")) is False:  # a step is as the script makes it
        batch = replace(batch, train=script.micro_rows or script.rows, step=script.rows)
    plan = replace(plan, batch=batch, notes=() if unused else plan.notes)  # the note on a CPU is that no device was found
    return ScriptPlan(plan, tuple(filter(None, (hardware.different_cards_note, why, *wins.values(), more))))


def task_of(model: Any) -> str:
    """The kind of task whose head `model`, a module or a config, has."""
    kind = next((kind for end, kind in HEADS.items() if class_name(model).endswith(end)), "text-classification")
    decoder = not getattr(getattr(model, "config", model), "is_encoder_decoder", False)
    return "causal-lm" if kind == "seq2seq-lm" and decoder else kind


def described_model(model: Any, given: Mapping[str, Any]) -> Any:
    """What the plan reads of the model: itself, or the config of the name that the Trainer will load."""
    if isinstance(model, str):
        return AutoConfig.from_pretrained(model)
    if model is None:
        with torch.random.fork_rng(range(torch.cuda.device_count())):  # the Trainer calls it once more
            return given["model_init"]()
    return inner(model)


def transformers_model(model: Any) -> Any:
    """`model`, or the first model of transformers inside it, as in a SentenceTransformer; `model` if there is none."""
    inside = model.modules() if hasattr(model, "modules") else ()
    return next((module for module in inside if isinstance(module, PreTrainedModel)), model)


def facts_of_model(model: Any, adapter: bool = False) -> ModelFacts:
    """The facts of a model of transformers, or of its config; of another module only what it shows itself.

    `adapter`: whether its weights will be frozen under one.
    """
    model = transformers_model(model)
    weights = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    frozen = adapter or sum(p.numel() if p.requires_grad else -p.numel() for p in weights) < 0
    config = getattr(model, "config", model)
    if hasattr(config, "model_type"):
        name = getattr(config, "_name_or_path", "") or config.model_type
        own = type(model) if isinstance(model, torch.nn.Module) else None
        found = model_facts(config, task_facts(task_of(model)), name, cache_folder() / "models", own)
        return replace(found, router_loss=0.0, frozen=frozen)  # the loss is that of the script
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"expected a model, got {type(model).__name__} {truncate(str(model))}: load it first")
    return ModelFacts(
        name=type(model).__name__,
        model_type="a module of yours",
        architecture=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in weights),
        frozen=frozen,
        layers=max((len(each) for each in model.modules() if isinstance(each, torch.nn.ModuleList)), default=0),
        logit_transform="is not a model of transformers",
        hidden_size=max((min(each.weight.shape) for each in model.modules() if isinstance(each, torch.nn.Linear)), default=0),
    )


def job_of(config: Any, kind: str, training: Mapping[str, Any]) -> JobFile:
    """The script as a job, which plugins are probed with: its data are unknown."""
    model = {"name": getattr(config, "_name_or_path", "") or getattr(config, "model_type", NAME)}
    data = {"train": NAME} | ({"prompt": NAME, "completion": NAME} if task_facts(kind).encoder_decoder else {})
    return make_job(Document(NAME, {"model": model, "data": data, "task": {"kind": kind}, "training": dict(training)}))


def assignments_of(tables: Mapping[str, Any]) -> Iterator[str]:
    """`tables` (plugin -> options, True or False) as `--set` takes them; {} is True. Raises InputError for other values."""
    for name, table in tables.items():
        options = {"enabled": table} if isinstance(table, bool) else {"enabled": True} if table == {} else table
        if not isinstance(options, Mapping):
            raise InputError(f"{name} = {table!r}: expected the options of plugin {name!r} as a dict, or False to leave it out")
        for key, value in options.items():
            yield f"plugins.{name}.{key}={json.dumps(value, default=str)}"


def stepless(profile: Profile, tables: Mapping[str, Any]) -> dict[str, Any]:
    """The plugins of `profile` (name -> options) without its gradient accumulation, unless `tables` ask for one."""
    name, option = plugin_aliases()["gradient_accumulation_steps"].split(".")[1:]
    plugins = dict(profile.content.plugins)
    if name in plugins and not (isinstance(tables.get(name), Mapping) and option in tables[name]):
        plugins[name] = {key: value for key, value in plugins[name].items() if key != option}
    return plugins


def sizes_of(script: Script, profile: Mapping[str, Mapping[str, Any]], tables: Mapping[str, Any]) -> tuple[list[str], str]:
    """The batch sizes of `script` as `--set` takes them, and a line if micro-batches get fewer rows than in `profile`."""
    sizes = {"effective_batch_size": script.rows, "per_device_eval_batch_size": script.eval_rows}
    name, option = plugin_aliases()["per_device_train_batch_size"].split(".")[1:]
    theirs, most, asked, line = profile.get(name, {}).get(option), script.micro_rows, tables.get(name), ""
    said = asked is False or (isinstance(asked, Mapping) and isinstance(asked.get(option), int))
    if most is not None and theirs is not None and not said and (theirs == "auto" or (isinstance(theirs, int) and theirs > most)):
        sizes["per_device_train_batch_size"] = most
        line = (
            f"micro-batches have no more tokens than {most} of the longest rows, by per_device_train_batch_size; the profile has "
            f"{theirs} rows. If hwopt.fits says that they fit, {name}={{{option!r}: {theirs!r}}} takes them"
        )
    return [f"{plugin_aliases()[word]}={rows}" for word, rows in sizes.items()], line


def options_for(word: str, value: Any, registry: Registry) -> Mapping[str, Any]:
    """The options of `plugin_of(word)` for an argument of the script; {"enabled": False} if it has no equivalent among them."""
    plugin = registry.plugin(plugin_of(word))
    options = options_from(plugin.aliases[word], value)
    return {"enabled": False} if options is None or value is False or not accepted(plugin, options) else options


def own_options(
    own: Mapping[str, Any], profile: Mapping[str, Mapping[str, Any]], registry: Registry
) -> tuple[list[str], dict[str, str]]:
    """`own` (`Script.own`) as `--set` takes it, and word -> a line, if it replaces a setting of `profile` (plugin -> options).

    A word or value without equivalent among the options leaves its plugin out: the script does it itself.
    """
    found: dict[str, dict[str, Any]] = {}
    wins: dict[str, str] = {}
    for word, value in own.items():
        if word not in plugin_aliases() or (name := plugin_of(word)) not in profile:
            continue
        present = profile[name]
        options = options_for(word, value, registry)
        changed = {key: each for key, each in options.items() if present.get(key, key == "enabled") != each}
        if changed:
            found.setdefault(name, {}).update(changed)
            theirs = ", ".join(f"{key} = {present[key]!r}" for key in changed if key in present) or f"plugin {name!r}"
            wins[word] = f"{word} = {value!r} of your arguments wins over the profile's {theirs}"
    return list(assignments_of(found)), wins


def replaced_settings(own: Mapping[str, Any], plan: Plan, registry: Registry) -> Iterator[tuple[str, str]]:
    """Yield (word, why the script does it itself) for each setting of `own` that its plugin would replace by a fallback."""
    entries = {entry.name: entry for entry in plan.entries if entry.decision == "fallback"}
    for word, value in own.items():
        if word not in plugin_aliases() or (entry := entries.get(plugin_of(word))) is None:
            continue
        options = options_for(word, value, registry)
        if any(getattr(entry.options, key, each) != each for key, each in options.items()):
            yield word, f"{word} = {value!r} of your arguments stays, without plugin {entry.name!r}: {entry.reason}"


def accepted(plugin: Any, options: Mapping[str, Any]) -> bool:
    """Whether `plugin` takes these options."""
    with suppress(ValidationError):
        plugin.Options(**options)
        return True
    return False
