"""View: what a training configuration says, in one vocabulary for all tools, with the file and line of each value.

The vocabulary is that of transformers' TrainingArguments (`hwopt.configs.words`). Rules of `hwopt check` read it, and
`hwopt import` translates it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hwopt.configs.source_file import Language

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


@dataclass(frozen=True)
class ConfigSetting:
    """One value, under the word that all tools share."""

    word: str
    value: Any
    key: str
    """As the file spells it, with dots."""
    place: str
    """File and line."""
    comment: str = ""
    above: tuple[str, ...] = ()
    below: tuple[str, ...] = ()
    former: tuple[Any, ...] = ()
    """Values that earlier lines of the file give to the same key."""
    doubt: str = ""
    """Why the value is a guess; "" for a plain one. Rules read it, `hwopt import` does not take it over."""

    @property
    def comments(self) -> tuple[str, ...]:
        """The comments that belong to the value."""
        return (*self.above, *([self.comment] if self.comment else []), *self.below)


UnreadKind = Literal["unknown", "interpolation", "unreadable", "replaced", "other"]


@dataclass(frozen=True)
class Unread:
    """A key of the file that has no word, with the reason."""

    key: str
    value: Any
    place: str
    reason: str
    kind: UnreadKind = "unknown"
    comments: tuple[str, ...] = ()
    word: str = ""
    """Its word, if only the value could not be read."""


@dataclass(frozen=True)
class View:
    name: str
    """The file."""
    tool: Tool
    recognised_by: str
    language: Language
    settings: Mapping[str, ConfigSetting]
    unread: tuple[Unread, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    """Place -> a text that describes the whole file, such as a profile's summary."""
    loose: tuple[str, ...] = ()
    """Comments that belong to no key."""
    spelling: Callable[[str], str] = str
    """word -> the key of this tool."""
    parameters: float | None = None
    """The number of the model's parameters, if the file says it."""

    @property
    def is_hwopt(self) -> bool:
        return self.tool in ("hwopt-profile", "hwopt-job")

    def __contains__(self, word: str) -> bool:
        return word in self.settings

    def value(self, word: str, default: Any = None) -> Any:
        found = self.settings.get(word)
        return default if found is None or found.value is None else found.value

    def number(self, word: str) -> float | None:
        """The value of `word` if the file gives it as a number."""
        found = self.value(word)
        return found if isinstance(found, int | float) and not isinstance(found, bool) else None

    def lacks(self, *words: str) -> bool:
        """Whether the file gives none of `words`, not even with a value that cannot be read."""
        given = self.settings.keys() | {each.word for each in self.unread}
        return not given & set(words)

    def is_on(self, word: str) -> bool:
        """Whether the file sets the flag `word`; "auto" counts as not set."""
        return self.value(word) is True

    def spelled(self, word: str) -> str:
        """The key for `word` in this file: the file's own one, else the tool's."""
        found = self.settings.get(word)
        return found.key if found else self.spelling(word)

    def line(self, word: str, value: Any) -> str:
        """The setting `word` = `value` as a line of this file."""
        key = self.spelled(word)
        if self.language == "Python":
            return f"{key}={value!r}"
        shown = str(value).lower() if isinstance(value, bool) else value
        shown = f'"{shown}"' if isinstance(value, str) and self.language != "YAML" else shown
        if isinstance(value, float):
            shown = f"{value:g}"
        return {"YAML": f"{key}: {shown}", "JSON": f'"{key}": {shown}', "TOML": f"{key} = {shown}"}[self.language]

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
        if self.train_rows is None:
            return None
        ranks = 1 if self.is_hwopt else self.ranks  # hwopt counts the rows of a step over all ranks
        return self.train_rows * int(self.number("gradient_accumulation_steps") or 1) * ranks
