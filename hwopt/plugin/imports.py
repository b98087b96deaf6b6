"""Values of other tools as options of a plugin, by the words that it declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def options_by_alias(aliases: Mapping[str, str], word: str, value: Any) -> dict[str, Any]:
    """The options for `word = value`, by the option that `aliases` names for `word`.

    "train": the option has the value. "dtype = 'fp16'": a flag, which sets the option to that value if it is true.
    "enabled = true": a flag, which adds the plugin's table if it is true; also a text that is not empty, such as a path.
    """
    option, equals, constant = (part.strip() for part in aliases[word].partition("="))
    if not equals:
        return {} if value is None else {option: value}
    if not value:
        return {}
    return {option: {"true": True, "false": False}.get(constant, int(constant) if constant.isdigit() else constant.strip("'"))}
