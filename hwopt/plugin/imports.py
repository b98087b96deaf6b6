"""Words of other tools as options of a plugin: for messages, and for `hwopt import`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Alias:
    """A word of another tool whose values are not those of the option."""

    option: str
    """The option to use instead, as a message shows it: "dtype", "level = 'pure'"."""
    translate: Callable[[Any], Mapping[str, Any] | None]
    """The value of the other tool -> options. {}: nothing to set, because the value is what a plan without the option does.

    None: the plugin has no equivalent. `enabled = True` adds a table without further options. Values are not validated yet.
    """

    def __str__(self) -> str:
        return self.option


DTYPES = {**dict.fromkeys(("float16", "half"), "fp16"), "bfloat16": "bf16", **dict.fromkeys(("float32", "float"), "fp32")}
"""Names of other tools -> dtype."""


def dtype_name(value: Any) -> str:
    """The dtype `value` of another tool, or of torch: "fp16", "bf16" or "fp32"; another name unchanged."""
    name = str(value).removeprefix("torch.")
    return DTYPES.get(name, name)


def options_from(alias: str | Alias, value: Any) -> Mapping[str, Any] | None:
    """The options for a word of another tool with `value`, by the option that `alias` names for the word.

    "train": the option has the value. "dtype = 'fp16'": a flag, which sets the option to that value if it is true.
    "enabled = true": a flag, which adds the plugin's table if it is true; also a text that is not empty, such as a path.
    An `Alias` translates the value itself.
    """
    if isinstance(alias, Alias):
        return alias.translate(value)
    option, equals, constant = (part.strip() for part in alias.partition("="))
    if not equals:
        return {} if value is None else {option: value}
    if not value:
        return {}
    known = {"true": True, "false": False}
    number = int(constant) if constant.isdigit() else constant.strip("'")
    return {option: known.get(constant, number)}
