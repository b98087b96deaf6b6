"""Check a TOML document against a pydantic model; one message per problem, with file, line and key."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from types import UnionType
from typing import Any, TypeVar, Union, get_origin

from pydantic import BaseModel, ValidationError

from hwopt.config.aliases import instead_of
from hwopt.config.toml import Document, Key
from hwopt.errors import Problems
from hwopt.text import cut, listing, nearest, truncate

AnyModel = TypeVar("AnyModel", bound=BaseModel)
FEW_KEYS = 8  # of a table that a message lists beside the key of another table


def validate(model: type[AnyModel], document: Document, at: Key = (), problems: Problems | None = None) -> AnyModel | None:
    """The table `at` of `document` as a `model`. With `problems`, all of them are added there and None is returned."""
    table: Any = document.data
    for part in at:
        table = table[part]
    try:
        # strict JSON mode: "4" is not a number and 1 is not a truth value, but an array may become a tuple
        return model.model_validate_json(json.dumps(table, default=str), strict=True)
    except ValidationError as error:
        found = problems or Problems()
        for problem in _of_values(model, error):
            found.add(partial(_describe, model, document, at, problem))
        if problems is None:
            found.raise_if_any()
        return None


def _of_values(model: type[BaseModel], error: ValidationError) -> Iterator[dict[str, Any]]:
    """The problems of `error`, one for each value; pydantic reports one for each member of a union."""
    alternatives: dict[str, list[dict[str, Any]]] = {}
    for details in error.errors(include_url=False):
        # without the tags of a union's members, which are no parts of the key
        problem: dict[str, Any] = {**details, "loc": tuple(part for part in details["loc"] if not str(part).startswith("("))}
        field = str(problem["loc"][0]) if len(problem["loc"]) > 1 else ""
        if field in model.model_fields and _is_plain_union(model.model_fields[field].annotation):
            alternatives.setdefault(field, []).append(problem)
        else:
            yield problem
    for field, problems in alternatives.items():
        # if the type is right and a rule is broken, report the rule only
        rules = [problem for problem in problems if not problem["type"].endswith(("_type", "_error"))]
        wanted = ", or ".join(str(problem["msg"]).removeprefix("Input should be ") for problem in rules or problems)
        yield problems[0] | {"loc": (field,), "type": "literal_error", "ctx": {"expected": wanted}}


def _is_plain_union(annotation: Any) -> bool:
    """Whether it is a union of plain values, not of tables or lists."""
    parts = [part for part in getattr(annotation, "__args__", ()) if part is not type(None)]
    return get_origin(annotation) in (Union, UnionType) and len(parts) > 1


def _describe(model: type[BaseModel], document: Document, at: Key, problem: dict[str, Any]) -> str:
    loc = tuple(str(part) for part in problem["loc"])
    where, dotted = document.place((*at, *loc)), ".".join(map(cut, (*at, *loc)))
    kind, given = problem["type"], problem.get("input")
    if kind == "extra_forbidden":
        known = _fields_at(model, loc[:-1])
        if (home := home_of(model, loc[-1]) or instead_of(loc[-1])) and home != dotted:
            own = f". {loc[0]} has: {listing(known, 30)}" if len(loc) > 1 and 0 < len(known) <= FEW_KEYS else ""
            return f"{where}: {dotted}: unknown key; give {home} instead{own}"
        return f"{where}: {dotted}: unknown key.{nearest(loc[-1], known)} It has: {listing(known, 30) or 'no options'}"
    if kind == "missing":
        return f"{where}: {dotted}: is missing"
    if kind == "literal_error":
        expected = problem["ctx"]["expected"]
        names = re.findall(r"'([^']*)'", expected)
        return f"{where}: {dotted}: expected {expected}, got {truncate(given)}.{nearest(str(given), names)}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if kind in ("value_error", "assertion_error"):
        return f"{where}: {dotted}: {message}" if dotted else f"{where}: {message}"
    return f"{where}: {dotted}: {message[0].lower() + message[1:]}, got {truncate(given)}"


def home_of(model: type[BaseModel], word: str) -> str:
    """The key `word` of a table of `model`, such as "training.seed", if exactly one table has it."""
    homes = [f"{table}.{word}" for table in model.model_fields if word in _fields_at(model, (table,))]
    return homes[0] if len(homes) == 1 else ""


def _fields_at(model: type[BaseModel], loc: Key) -> list[str]:
    current: Any = model
    for part in loc:
        if part.isdigit():  # of a list
            continue
        field_info = getattr(current, "model_fields", {}).get(part)
        current = None if field_info is None else _table_in(field_info.annotation)
    return list(getattr(current, "model_fields", {}))


def _table_in(annotation: Any) -> Any:
    """The last table in `annotation`, also of a list; None if there is none."""
    if hasattr(annotation, "model_fields"):
        return annotation
    found = [_table_in(part) for part in getattr(annotation, "__args__", ())]
    return next((table for table in reversed(found) if table is not None), None)
