"""Names and values that are not read: former names, misspelled names, text where a number belongs, keys that are given twice."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from importlib import import_module, metadata

from hwopt.configs import words
from hwopt.configs.check import TRAINERS, TRANSFORMERS, Facts, Finding, Level, rule
from hwopt.configs.dialects import DIALECTS
from hwopt.configs.launchers import ZERO
from hwopt.configs.python_file import MODEL_LOADED
from hwopt.configs.recognise import TRL_WORDS
from hwopt.configs.view import PREFERENCES, ConfigSetting, Tool, View
from hwopt.text import cut, truncate

ALIKE = 0.85
"""How similar a key must be to a name to count as misspelled; other keys may be the program's own."""


def about(entry: ConfigSetting, what: str, why: str, fix: str = "") -> Finding:
    return Finding("", what, why, fix, place=entry.place, key=entry.key)


def shown(entry: ConfigSetting) -> str:
    return f"{entry.key} = {truncate(entry.value)}"


# fmt: off
TRL_VALUES = {
    "SFTConfig": {"loss_type": "nll dft chunked_nll"}, "KTOConfig": {"loss_type": "kto apo_zero_unpaired"},
    "DPOConfig": {"f_divergence_type": "reverse_kl forward_kl js_divergence alpha_divergence", "loss_type": """sigmoid hinge ipo
        exo_pair nca_pair robust bco_pair sppo_hard aot aot_pair aot_unpaired apo_zero apo_down discopop sft sigmoid_norm"""},
    "GRPOConfig": {"loss_type": "grpo bnpo dr_grpo dapo cispo sapo luspo vespo", "importance_sampling_level": "token sequence",
        "scale_rewards": "group batch none True False"},
    "CPOConfig": {"loss_type": "sigmoid hinge ipo simpo alphapo"}, "OnlineDPOConfig": {"loss_type": "sigmoid ipo"},
}
"""Class -> key -> its values, by the trainers in TRL 1.16, with `aot_pair` of older ones."""
# fmt: on

TRL_CONFIGS = ("SFT", "DPO", "GRPO", "KTO", "RLOO", "Reward", "Model")
CLASSES = re.compile(r"(transformers|trl|sentence_transformers|peft|accelerate)\.([\w.]+\.)?\w*(Arguments|Config|Trainer)")
"""Classes of the installed libraries whose constructors are looked at."""


@cache
def accepted(name: str) -> frozenset[str] | None:
    """The keywords that the constructor of the class `name` takes; None if it takes any, or is not known here."""
    module, _, cls = name.rpartition(".")
    if not CLASSES.fullmatch(name):
        return None
    try:
        # without what wrappers hide: they take former names
        taken = inspect.signature(getattr(import_module(module), cls).__init__, follow_wrapped=False).parameters
    except (ImportError, AttributeError, RuntimeError, OSError):  # not installed, no such class, or its import fails
        return None
    return None if any(each.kind is each.VAR_KEYWORD for each in taken.values()) else frozenset(taken)


@cache
def lacks(module: str, name: str) -> bool:
    """Whether `module`, if it is installed, has no class or function `name`."""
    with suppress(ImportError, RuntimeError, OSError):  # not installed, or its import fails
        return not hasattr(import_module(module), name)
    return False


@rule("refused-keyword", "error", source="the signature of the installed class", tools=TRANSFORMERS)
def refused_keyword(view: View, facts: Facts) -> Iterator[Finding]:
    """A keyword or an import of a script that the installed version does not have. Unsloth replaces TRL's classes."""
    if view.is_unsloth:
        return
    for function, name, line in view.source.keywords:
        module, _, cls = function.rpartition(".")
        package, fix, taken = module.partition(".")[0], "", accepted(function)
        if not name and module in ("transformers", "trl", "peft") and lacks(module, cls):
            name, whose, why = cls, "", "The script stops when it imports it."
        elif name in words.GONE and package == "transformers" and MODEL_LOADED.search(function):
            fix, whose, why = f"use {words.GONE[name]}", f"{cls} of ", "The script stops at it with a TypeError."
        elif name and taken is not None and name not in taken:
            config, near = f"{cls.removesuffix('Trainer')}Config", get_close_matches(name[:80], taken, n=1, cutoff=ALIKE)
            former = words.FORMER_NAMES.get(name)
            new = former.instead if former else words.RENAMED.get(name) or next(iter(near), "")
            fix, whose, why = f"use {new}" if new else f"remove {name}", f"{cls} of ", "The script stops at it with a TypeError."
            if cls.endswith("Trainer") and (moved := {name, new} & (accepted(f"{module}.{config}") or set())):
                fix = f"give {moved.pop()} to {config}"
        else:
            continue
        what = f"{whose}{package} {metadata.version(package)} has no {name}."
        yield Finding("", what, why, fix, place=f"{view.source.name}:{line}", key=name)


def refused(view: View) -> set[str]:
    return {each.place for each in refused_keyword.function(view, Facts())}


def is_trl(view: View) -> bool:
    """Whether TRL's command line reads the file, by keys that only TRL has."""
    return bool((TRL_WORDS | PREFERENCES) & {entry.path[-1] for entry in view.source.entries})


@rule("former-name", "warning", source="release notes of transformers and TRL; axolotl, schemas/deprecated.py", tools=TRAINERS)
def former_name(view: View, facts: Facts) -> Iterator[Finding]:
    """A name that transformers, TRL or axolotl no longer has; a note for one that the next version will not have."""
    trl = view.tool == "transformers" and view.source.language != "Python" and is_trl(view)
    former = {**words.FORMER[view.tool], **{name: words.Former(new, "") for name, new in words.TRL_RENAMED.items() if trl}}
    # a table with keys of its own is that of a program, which reads it by itself
    own = {each.path[:-1] for each in view.unread_as("unknown")} - {()} if view.source.language != "Python" else set()
    for each in (*view.settings.values(), *view.unread):
        name = each.path[-1]
        if own & {each.path[:end] for end in range(len(each.path))}:
            continue
        unset = view.tool == "axolotl" and each.value is None
        if name in former and not unset and each.place not in refused(view):
            instead, gone = former[name]
            why = "TrainingArguments stops at an unknown name; programs that read the file themselves may ignore it."
            if view.tool == "axolotl":
                why = "axolotl stops at the key, or takes it with a warning."
            whose = f"transformers {gone}" if gone else "TRL" if trl else view.tool
            yield about(each, f"{whose} has no {name}.", why, f"use {instead}" if instead else f"remove {name}")
        for name in words.DEPRECATED_NAMES.keys() & set(each.path) if view.tool in TRANSFORMERS and each.word else ():
            instead, gone = words.DEPRECATED_NAMES[name]
            why = "Version 5 accepts it with a warning; version 4 knows no other name."
            note = about(each, f"transformers {gone} will have no {name}.", why, f"with version 5 use {instead}")
            yield replace(note, level="information")


UNKNOWN: Mapping[Tool, tuple[str, str, Level | None]] = {
    "transformers": ("TrainingArguments", "A value that no program reads has no effect.", None),
    "axolotl": ("axolotl", "axolotl ignores keys that it does not know.", None),
    "deepspeed": ("DeepSpeed", "DeepSpeed ignores keys that it does not know.", None),
    "accelerate": ("accelerate", "`accelerate launch` stops at keys that it does not know.", "error"),
    "llama-factory": ("LLaMA-Factory", 'LLaMA-Factory stops: "Some keys are not used by the HfArgumentParser".', "error"),
}
"""Tool -> whose keys they are, what becomes of others, and the level if it is not that of the rule."""


def known_names(view: View) -> frozenset[str]:
    """The keys that the tool of `view` has in its outermost table."""
    if view.tool == "accelerate":
        return accepted("accelerate.commands.config.config_args.ClusterConfig") or frozenset()
    if view.tool == "transformers":
        classes = TRL_CONFIGS if is_trl(view) else ()
        return (words.ARGUMENTS - words.OWN).union(*(accepted(f"trl.{name}Config") or () for name in classes))
    dialect = next(each for each in DIALECTS if each.tool == view.tool)
    shared = {word for word in words.ARGUMENTS if dialect.arguments and dialect.spelling(word) == word}
    own = (*dialect.keys, *dialect.reasons, *dialect.telling)
    return frozenset(shared).union(words.FURTHER[view.tool], (key.partition(".")[0] for key in own))


@rule("misspelled-name", "warning", source="unsloth#10452, LLaMA-Factory#7677; DeepSpeed, config_utils.py", tools=tuple(UNKNOWN))
def misspelled_name(view: View, facts: Facts) -> Iterator[Finding]:
    """A key that is almost a key of the tool, or the name that another tool has for it."""
    whose, why, level = UNKNOWN[view.tool]
    end, tables = -1 if view.tool == "transformers" else 0, {each.path[:-1] for each in view.settings.values()}
    given = [each for each in view.unread_as("unknown") if view.source.language != "Python" or len(each.path) == 1]
    given = [each for each in given if end == 0 or (len(each.path) < 3 and each.path[:-1] in tables)]
    if view.tool in ("axolotl", "llama-factory"):
        given += [*view.settings.values(), *(each for each in view.unread_as("other") if each.word)]
    names = known_names(view) if given else frozenset()
    for name, each in {each.path[-1 if each.path[0] == ZERO else end]: each for each in reversed(given)}.items():
        zero, known = each.path[0] == ZERO, words.ZERO_KEYS if each.path[0] == ZERO else names
        if name in known or name in words.FORMER.get(view.tool, ()) or each.place in refused(view):
            continue
        # a key that is longer by a word, such as ref_model_init_kwargs, is not misspelled
        as_long = [] if each.word else [other for other in known if abs(len(other) - len(name)) <= 2]
        near = [view.spelling(each.word)] if each.word else get_close_matches(name[:80], as_long, n=1, cutoff=ALIKE)
        if near and near[0] != name:
            stops = "DeepSpeed stops: zero_optimization takes no other keys."
            found = about(each, f"{whose} has no {name}.", stops if zero else why, f"use {near[0]}")
            yield replace(found, level="error" if zero else level)


@rule("not-a-value", "error", source='notes.md#rtx-3070-16-or-32-rows: "16  ← Actually 16, not 96!"')
def not_a_value(view: View, facts: Facts) -> Iterator[Finding]:
    """A value of the wrong type, such as text behind a number."""
    for each in (each for each in view.unread_as("unreadable") if view.tool != "transformers" or each.word not in words.OWN):
        why = "The trainer stops, or reads a text."
        yield about(each, f"{shown(each)}: {each.reason}", why, "correct the value")


@rule("value-name", "error", source="transformers, OptimizerNames; TRL; accelerate; DeepSpeed", tools=tuple(UNKNOWN))
def value_name(view: View, facts: Facts) -> Iterator[Finding]:
    """A value that the tool does not have, such as the name of an optimizer. Of open lists only almost the same names."""
    accelerate, axolotl = view.tool == "accelerate", view.tool == "axolotl"
    own = {key: words.names(text) for key, text in TRL_VALUES.get(view.trainer, {}).items()}
    tables = {**words.VALUES_OF.get(view.tool, words.VALUES), **own}
    for word, known, name in [(key, tables[key], str(each)) for key in tables for each in view.each(key)]:
        if known & ({name, name.upper(), name.lower()} if accelerate else {name}) or name in ("adamw_hf", "adamw_apex_fused"):
            continue  # transformers 4 has these optimizers too
        usual = word in words.USUAL
        least = 0.82 if usual else ALIKE if axolotl or word in own else 0.7
        near = get_close_matches(name[:80], sorted(known), n=1, cutoff=least)
        if name == "False" and "no" in known and not axolotl:  # YAML reads no without quotes as false
            near = ['"no"' if view.source.language == "YAML" else "no"]
        fix = view.line(word, near[0]) if near else f"one of: {', '.join(sorted(known))}"
        whose = "transformers" if word in words.ARGUMENTS else "The library"
        whose = view.trainer if word in own else whose if view.tool in TRANSFORMERS else view.tool
        what = f"{whose} has no {view.spelled(word)} {truncate(name)}."
        if not (usual or axolotl) or (near and (usual or abs(len(near[0]) - len(name)) <= 2)):
            yield Finding(word, what, "The trainer stops at a name that it does not know.", fix)


# fmt: off
OWN_MODULES = {
    r"(meta-|tiny|code)?llama-?(\d|v\d|hf|chat)|vicuna|qwen-?(1\.5|2|3)|(mi[sx]|minis)tral-\d*x?\d|gemma-(\d|3n)":
        """q_proj v_proj k_proj o_proj out_proj qkv_proj gate_proj up_proj down_proj gate_up_proj in_proj dense fc1 fc2 all-linear
        embed_tokens lm_head""",
    r"(distil)?gpt2(-medium|-large|-xl)?$": "c_attn c_proj c_fc all-linear lm_head",
    r"bloomz?-\d|pythia-\d|gpt-neox-|falcon-(\d+b|rw)": "query_key_value dense dense_h_to_4h dense_4h_to_h all-linear lm_head",
    r"(bert|roberta|xlm-roberta)-(base|large)": "query value key dense all-linear fc1 fc2 out_proj lm_head",
}
"""How the name of a model begins -> names of linear layers that models of the family may have, by their code in transformers."""
# fmt: on


@rule("module-name", "warning", source="PEFT, inject_adapter", words=("lora_target_modules",), tools=TRAINERS)
def module_name(view: View, facts: Facts) -> Iterator[Finding]:
    """A layer for an adapter whose name is almost a usual one; an error if all layers are those of other models."""
    given, model = view.value("lora_target_modules"), str(view.value("model_name_or_path")).lower().rpartition("/")[2]
    asked = [str(name).strip() for name in (given if isinstance(given, list) else str(given).split(","))]
    own = next((modules.split() for look, modules in OWN_MODULES.items() if re.match(look, model)), [])
    others, linear = words.MODULES - set(own) if own else set(), view.source.values.get("lora_target_linear")
    if asked and {name.rpartition(".")[2] for name in asked} <= others and not linear:
        what = f"{view.spelled('lora_target_modules')} has {cut(', '.join(asked), 60)}; {model} has no such layers."
        why = "PEFT stops where no layer has one of the names."
        yield Finding("lora_target_modules", what, why, f"give its own, such as {own[0]} and {own[1]}", "error")
    for name in asked:
        near = get_close_matches(name[:80], words.MODULES - {name}, n=1, cutoff=0.83)
        if near and name not in words.MODULES and not re.fullmatch(r"(\w\w?_)+proj|.*\d", name):
            what = f"{view.spelled('lora_target_modules')} has {truncate(name)}; models have {near[0]}."
            why = "PEFT leaves out a name that no layer has, without a message, if it finds another one."
            yield Finding("lora_target_modules", what, why, f"write {near[0]}")


@rule("chat-template", "warning", words=("template",), source="LLaMA-Factory, data/template.py", tools=("llama-factory",))
def chat_template(view: View, facts: Facts) -> Iterator[Finding]:
    """The chat template of another family of models, for a model that was trained on conversations."""
    name, template = str(view.value("model_name_or_path")).lower().rpartition("/")[2], str(view.source.values["template"])
    own = [family for family, look in words.FAMILIES.items() if re.search(look, name) and re.search(r"instruct|chat|-it\b", name)]
    if own and (asked := {family for family in words.FAMILIES if template.startswith(family)}) and asked.isdisjoint(own):
        why = "The model learns other marks of turns than it was trained with: answers get worse, and may not end."
        yield Finding("template", f"template is {template} for {name}.", why, view.line("template", own[0]))


@rule("key-twice", "warning", source="notes.md#rtx-3070-48-rows: the file before and after in one block")
def key_twice(view: View, facts: Facts) -> Iterator[Finding]:
    """A key that the file gives twice; the last one counts."""
    for each in view.unread_as("replaced"):
        why = "The last one counts, without a message."
        yield about(each, f"{shown(each)} is replaced by a later line.", why, "remove one of the two")
