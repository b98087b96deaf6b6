"""The tables of plugins and profiles in README.md and docs/conflicts.md are made from what is installed.

`HWOPT_UPDATE_GOLDEN=1 pytest tests/plugins/test_documented_tables.py` rewrites them; read the difference before you commit.
"""

import inspect
import os
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import ValidationError

from hwopt.config.profile_files import profile_files
from hwopt.planning.inputs import Inputs
from hwopt.plugin import CAPABILITIES, Conflict, Plugin
from hwopt.plugin.contract import effect_by_default
from hwopt.plugin.registry import Registry
from hwopt.plugin.relations import always

REGISTRY = Registry()
PLUGINS = [REGISTRY.plugin(name) for name in REGISTRY.names]
ROOT = Path(__file__).parents[2]
CHANGES = {"bits": "nothing", "rounding": "rounding", "method": "method"}
Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""(page, header, rows)."""


def plugins() -> Table:
    rows = []
    for plugin in sorted(PLUGINS, key=lambda plugin: (plugin.stage, plugin.name)):
        summary = (inspect.getdoc(sys.modules[plugin.__module__]) or "").splitlines()[0]
        depends = ", depends on options" if isinstance(plugin.__dict__.get("effect"), property) else ""
        rows.append((f"`{plugin.name}`", summary, CHANGES[effect_by_default(plugin)] + depends))
    return "README.md", ("plugin", "what it does", "changes"), rows


def profiles() -> Table:
    rows = [(f"`{profile.name}`", profile.content.summary) for profile in map(Inputs().profile, profile_files())]
    return (
        "README.md",
        ("profile", "what it sets"),
        [*rows, ("`auto`", "the profile of your card, or one derived from the nearest")],
    )


def conflicts() -> Table:
    rows = []
    for plugin in PLUGINS:
        for each in plugin.relations.conflicts:
            condition = "always" if each.when is always else "some options"
            rows.append((f"`{plugin.name}`", target(each), condition, each.why))
    return "docs/conflicts.md", ("plugin", "not with", "if", "why, and what to do"), rows


def target(conflict: Conflict) -> str:
    if conflict.lacks is not None:
        return f"an engine without `{conflict.lacks}`"
    return f"`recipe.{conflict.field}`" if conflict.field is not None else f"`{conflict.plugin}`"


def capabilities() -> Table:
    lacks = {plugin.name: list(lacking_by_options(plugin)) for plugin in PLUGINS}
    rows = []
    for capability, meaning in CAPABILITIES.items():
        engines = [
            f"`{name}`" + condition(capability, found)
            for name, found in lacks.items()
            if any(capability in lacking for _, lacking in found)
        ]
        rows.append((f"`{capability}`", meaning, ", ".join(engines)))
    return "docs/conflicts.md", ("capability", "meaning", "engines that lack it"), rows


def condition(capability: str, found: list[tuple[dict[str, Any], Sequence[str]]]) -> str:
    """With which value of one option the engine lacks the capability; "" for all."""
    lacking = [options for options, lacks in found if capability in lacks]
    if len(lacking) == len(found):
        return ""
    for name in lacking[0]:
        values = {options[name]: None for options in lacking}
        if all((capability in lacks) == (options[name] in values) for options, lacks in found):
            return f" with `{name}` {' or '.join(map(str, values))}"
    return " with some options"


def lacking_by_options(plugin: type[Plugin]) -> Iterator[tuple[dict[str, Any], Sequence[str]]]:
    """(options, what the engine of `plugin` lacks) for each combination of options that are a choice of words or numbers."""
    values = {name: [*literals(field.annotation)] for name, field in plugin.Options.model_fields.items()}
    values = {name: [each for each in found if each != "auto"] for name, found in values.items() if found}
    for chosen in product(*values.values()):
        table = dict(zip(values, chosen, strict=True))
        try:
            options = plugin.Options(**table)
        except ValidationError:  # the options contradict each other, or another one is missing
            continue
        yield table, plugin(options).traits.lacks


def literals(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for part in get_args(annotation):
            yield from literals(part)


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


@pytest.mark.parametrize("table", [plugins, profiles, conflicts, capabilities])
def test_table_is_made_from_the_registry(table: Any) -> None:
    page, header, rows = table()
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    first = row(header) + "|---" * len(header) + "|\n"
    found = re.search(re.escape(first) + r"(\|.*\n)*", text)
    assert found is not None, f"{page} has no table {row(header)}"
    made = first + "".join(map(row, rows))
    if os.environ.get("HWOPT_UPDATE_GOLDEN"):
        path.write_text(text[: found.start()] + made + text[found.end() :], encoding="utf-8")
    else:
        assert found.group() == made, "run the same command with HWOPT_UPDATE_GOLDEN=1, which writes the table"
