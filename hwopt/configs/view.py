"""View: what a training configuration says, in one vocabulary for all tools, with the file and line of each value.

The vocabulary is that of transformers' TrainingArguments (`hwopt.configs.words`). Readers fill a view, rules of `hwopt check`
read it, and `hwopt import` translates it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from hwopt.configs.python_file import PARTS
from hwopt.configs.source_file import Entry, SourceFile
from hwopt.configs.words import ARGUMENTS, SCHEDULE_OPTIONS, NotReadable, names, number, typed

Tool = Literal["transformers", "axolotl", "llama-factory", "accelerate", "deepspeed", "hwopt-profile", "hwopt-job"]
TOOL_NAMES: Mapping[Tool, str] = {
    "transformers": "Hugging Face TrainingArguments",
    "axolotl": "axolotl",
    "llama-factory": "LLaMA-Factory",
    "accelerate": "accelerate config",
    "deepspeed": "DeepSpeed",
    "hwopt-profile": "hwopt profile",
    "hwopt-job": "hwopt job",
}
Kind = Literal["taken", "unknown", "interpolation", "unreadable", "replaced", "other"]


@dataclass(frozen=True)
class ConfigSetting(Entry):
    """An entry with the word that all tools share, or with the reason why it is not read."""

    word: str = ""
    reason: str = ""
    """Why the entry is not read. In a value that is taken: why it is a guess, for rules only; `hwopt import` leaves it out."""
    kind: Kind = "taken"

    def left(self, reason: str, kind: Kind = "unknown") -> ConfigSetting:
        return replace(self, reason=reason, kind=kind)

    @property
    def on_purpose(self) -> bool:
        """Whether a setting that is left out is not needed in hwopt; else it has no equivalent."""
        return self.kind in ("other", "replaced")


class Omitted(NamedTuple):
    reason: str
    kind: Kind


def ignored(reason: str) -> Omitted:
    """hwopt does it anyway, or another setting says it."""
    return Omitted(reason, "other")


def without(reason: str) -> Omitted:
    """The value cannot be expressed."""
    return Omitted(reason, "unknown")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


TRL_KEYS = {"dataset_train_split", "dataset_test_split", "dataset_num_proc", "eos_token", "chat_template_path"}
TRL_KEYS |= {"dataset_mixer", "use_bnb_nested_quant", "use_peft", "padding_free"}
"""Keys of the files that TRL's command line reads, which trains all weights unless `use_peft` is true."""

PREFERENCES = names("beta pref_beta pref_loss dpo_alpha loss_type num_generations max_prompt_length desirable_weight")
"""Keys of trainings with preferences or rewards."""
WITH_TRAINER = {"output_dir", "per_device_train_batch_size", "model_name_or_path"}
"""Keys of which a file for transformers' Trainer has one."""
REWARDS, SFT_LOSSES = ("rl", "reward_model", "process_reward_model"), ("nll", "dft", "chunked_nll")


# fmt: off
TELLING = {
    "SFTConfig": "assistant_only_loss, completion_only_loss, eval_packing, packing_strategy",
    "KTOConfig": "desirable_weight, undesirable_weight", "CPOConfig": "cpo_alpha, simpo_gamma",
    "DPOConfig": "discopop_tau, f_divergence_type, ld_alpha, rpo_alpha, reference_free",
    "Seq2SeqTrainingArguments": "predict_with_generate, generation_num_beams, generation_max_length",
    "GRPOConfig": "num_generations loss_type, num_generations scale_rewards, top_entropy_quantile",
}
"""Class of TRL or transformers -> keys, or keys together, that only its YAML files have."""
# fmt: on


@dataclass
class View:
    """The settings of one file. The first entry for a word counts."""

    source: SourceFile
    tool: Tool
    recognised_by: str
    spelling: Callable[[str], str] = str
    settings: dict[str, ConfigSetting] = field(default_factory=dict)
    unread: list[ConfigSetting] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    """Words and keys that a rule asked for."""

    HALF = ("fp16", "bf16", "pure_bf16", "mixed_precision")

    def __post_init__(self) -> None:
        for entry in self.source.replaced:
            self.leave(entry, "a later line gives the same key", "replaced")

    def add(self, word: str, entry: Entry, value: Any = ...) -> None:
        """Set `word` to the value of `entry`, or to `value`, which a reader made of it."""
        if entry.interpolated:
            return self.leave(entry, "", word=word)
        if word.startswith(f"{SCHEDULE_OPTIONS}."):
            return self.add_schedule_option(word.removeprefix(f"{SCHEDULE_OPTIONS}."), entry)
        doubt = ""
        try:
            found = typed(word, entry.value if value is ... else value)
        except NotReadable as error:
            self.leave(entry, str(error), "unreadable", word)
            found, doubt = error.guess, str(error)
            if found is None or word in self.settings:
                return
        if found is None:
            self.leave(entry, "has no value", "other")
        elif (first := self.settings.get(word)) is not None:
            self.leave(entry, f"{first.key} ({first.place}) says the same thing and comes first", "other", word)
        else:
            self.settings[word] = ConfigSetting(**vars(entry) | {"value": found}, word=word, reason=doubt)
            name = re.split(r"[/\\]", found)[-1] if word == "deepspeed" and isinstance(found, str) else ""
            stage = re.search(r"(?i)z(?:ero)?[_-]?([1-3])|stage[_-]?([1-3])", name)
            if stage and self.tool != "accelerate":  # which has a key for it
                self.imply("zero_stage", int(stage[1] or stage[2]), self.settings[word], "by the name of the file")

    def add_schedule_option(self, option: str, entry: Entry) -> None:
        """Add `option` to those of the schedule, which are one setting."""
        value = entry.value
        with suppress(NotReadable):
            value = number(option, value)
        options = {**self.value(SCHEDULE_OPTIONS, {}), option: value}
        self.settings[SCHEDULE_OPTIONS] = ConfigSetting(**vars(entry) | {"value": options}, word=SCHEDULE_OPTIONS)

    def imply(self, word: str, value: Any, by: ConfigSetting, reason: str = "") -> None:
        """Set `word` to a value that the tool implies, or for a `reason` a guess; `by` is the setting whose place it gets."""
        self.settings.setdefault(word, ConfigSetting(by.path, value, by.line, by.place, word=word, reason=reason))

    def leave(self, entry: Entry, reason: str, kind: Kind = "unknown", word: str = "") -> None:
        if entry.interpolated:
            kind, reason = "interpolation", "refers to another value, which only the program that reads the file knows"
        self.unread.append(ConfigSetting(**vars(entry), word=word, reason=reason, kind=kind))

    @property
    def is_unsloth(self) -> bool:
        """Whether it is a script with Unsloth, which replaces classes of TRL and has other defaults."""
        return any(function.startswith("unsloth.") for function, _, _ in self.source.keywords)

    @property
    def is_hwopt(self) -> bool:
        return self.tool in ("hwopt-profile", "hwopt-job")

    def __contains__(self, word: str) -> bool:
        return word in self.settings

    def value(self, word: str, default: Any = None) -> Any:
        found = self.settings.get(word)
        return default if found is None or found.value is None else found.value

    def found(self, word: str) -> ConfigSetting | None:
        """The setting for `word`. A word that the tools do not share is the key of one tool."""
        if word in self:
            return self.settings[word]
        unread = (each for each in self.unread if each.kind in ("unknown", "other") and word not in ARGUMENTS)
        found = next((each for each in (*self.settings.values(), *unread) if each.key == word), None)
        self.asked |= {word} if found else set()
        return found

    def number(self, word: str) -> float | None:
        """The value of `word` if the file gives it as a number."""
        found = self.value(word)
        return found if is_number(found) else None

    def lacks(self, *words: str) -> bool:
        """Whether the file gives none of `words`, not even with a value that cannot be read."""
        given = self.settings.keys() | {each.word or each.key for each in self.unread}
        return not given & set(words) and ("**",) not in {each.path for each in self.unread}

    def is_on(self, word: str) -> bool:
        """Whether the file sets the flag `word`; "auto" counts as not set."""
        return self.value(word) is True

    def written(self, word: str) -> Any:
        """The value of a word, or what the file has for a key: not the value that the reader made of it for a word."""
        found = self.found(word)
        return found and (found.value if found.word in ("", word) else self.source.values.get(word, found.value))

    def each(self, word: str) -> list[Any]:
        """The texts and numbers that are written for a word: those of a list, or the only one."""
        value = self.written(word)
        return [part for part in (value if isinstance(value, list) else [value]) if isinstance(part, str | int | float)]

    def meets(self, word: str, expected: Any) -> bool:
        """Whether the value is `expected`, or passes the test `expected`. No value passes that cannot be read."""
        found = self.found(word)
        if found is None and not self.lacks(word):
            return False
        value = self.written(word)
        return bool(expected(value)) if callable(expected) else value == expected

    def unread_as(self, kind: Kind) -> Iterator[ConfigSetting]:
        return (each for each in self.unread if each.kind == kind)

    def spelled(self, word: str) -> str:
        """The key for `word` in this file: the file's own one, else the tool's."""
        found = self.found(word)
        return found.key if found else self.spelling(word)

    def line(self, word: str, value: Any) -> str:
        key = self.spelled(word)
        if self.source.language == "Python":
            return f"{key}={value!r}"
        shown = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else value
        shown = f'"{shown}"' if isinstance(value, str) and self.source.language != "YAML" else shown
        return {"YAML": f"{key}: {shown}", "JSON": f'"{key}": {shown}', "TOML": f"{key} = {shown}"}[self.source.language]

    def lines(self, values: Mapping[str, Any]) -> str:
        return " and ".join(self.line(word, value) for word, value in values.items())

    def half_precision(self, dtype: str, word: str) -> str:
        """The line that trains with `dtype` where the file sets another one by `word`."""
        if word == "mixed_precision" or self.is_hwopt:
            return self.line("mixed_precision", dtype)
        return self.lines({word: False, dtype: True})

    @property
    def adapter(self) -> bool | None:
        """Whether the file asks for an adapter; None if only the program that reads it knows."""
        if not self.lacks("use_peft"):
            return self.is_on("use_peft") or (False if self.value("use_peft") is False else None)
        if self.tool == "axolotl":
            return None if {"peft", "hatchery"} & self.source.top else False
        if self.tool == "llama-factory":
            return {"lora": True, "full": False}.get(str(self.source.values.get("finetuning_type", "lora")))
        return False if self.is_hwopt or TRL_KEYS & self.source.top else None

    @property
    def trainer(self) -> str:
        """The class of arguments that a script makes, or the only one that has the keys of a YAML file; else ""."""
        given, found = self.source.values.keys(), [call.split()[0] for call in self.source.calls[:1]]
        if self.tool == "transformers" and not found and WITH_TRAINER & given and "rlhf_type" not in given:  # ms-swift has others
            found = [name for name, text in TELLING.items() if any(given >= names(each) for each in text.split(","))]
        return found[0] if len(found) == 1 else ""

    @property
    def preferences(self) -> str:
        """The class or the key by which the file trains preferences or rewards; "" if it trains texts."""
        keys = {entry.path[-1]: entry.value for entry in self.source.entries}
        if keys.get("loss_type") in SFT_LOSSES:
            del keys["loss_type"]
        classes = [call.split()[0] for call in self.source.calls]
        found = [name for name in classes if name.endswith("Config") and name not in ("SFTConfig", *PARTS)]
        found += ["stage"] if self.source.values.get("stage") not in (None, "sft", "pt") else []
        found += [key for key in keys if key in PREFERENCES or (key in REWARDS and keys[key])]
        found += ["trainer_type"] if re.search("DPO|GRPO|KTO", str(keys.get("trainer_type"))) else []
        return next(iter(found), "")

    @property
    def rewards(self) -> bool:
        """Whether the file trains a reward model: with the loss of a classification, at the rates of other data."""
        return self.preferences in ("RewardConfig", "PRMConfig", *REWARDS[1:]) or self.source.values.get("stage") == "rm"

    @property
    def ranks(self) -> int:
        """The number of processes, if the file says it; else 1."""
        return int(self.number("num_processes") or 1)

    @property
    def train_rows(self) -> int | None:
        """Rows of a micro-batch."""
        found = self.number("per_device_train_batch_size")
        return int(found) if found else None

    @property
    def effective_rows(self) -> int | None:
        """Rows of an optimizer step over all ranks; None if the file does not say it."""
        if (given := self.number("effective_batch_size")) is not None:
            return int(given)
        steps = "gradient_accumulation_steps"
        if self.train_rows is None or "effective_tokens" in self or (self.number(steps) is None and not self.lacks(steps)):
            return None
        ranks = 1 if self.is_hwopt else self.ranks  # hwopt counts the rows of a step over all ranks
        return self.train_rows * int(self.number(steps) or 1) * ranks
