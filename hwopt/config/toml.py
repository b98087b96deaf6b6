"""TOML files read with the line of every key: tomllib keeps no positions, so a small scan of the text finds them."""

from __future__ import annotations

import codecs
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hwopt.errors import InputError
from hwopt.system.paths import read_regular_file
from hwopt.text import truncate

MAX_BYTES = 1_000_000  # of a profile or a job

Key = tuple[str, ...]


@dataclass(frozen=True)
class Document:
    """The content of one TOML file, or of the command line, with the line of each key."""

    name: str
    data: dict[str, Any]
    lines: Mapping[Key, int] = field(default_factory=dict)
    places: Mapping[Key, str] = field(default_factory=dict)
    """Keys that came from elsewhere (a parent profile, `--set`), with that place."""

    def place(self, key: Key) -> str:
        """`file:line` of `key`, or of the table around it."""
        for end in range(len(key), 0, -1):
            if key[:end] in self.places:
                return self.places[key[:end]]
            if key[:end] in self.lines:
                return f"{self.name}:{self.lines[key[:end]]}"
        return self.name


def read_toml(path: Path) -> Document:
    """The document of a TOML file. Raises InputError with file and line if the file is not valid TOML."""
    return parse_toml(read_regular_file(path, MAX_BYTES), str(path))


def decoded(raw: bytes, name: str) -> str:
    """The text of a file. Raises InputError with file and line if it is not UTF-8."""
    raw = raw.removeprefix(codecs.BOM_UTF8)  # as Notepad saves it
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InputError(f"{name}:1: is UTF-16; save it as UTF-8")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise InputError(f"{name}:{line}: is not UTF-8 (byte {raw[error.start]:#04x}); save it as UTF-8") from error


def parse_toml(raw: bytes, name: str) -> Document:
    text = decoded(raw, name)
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(_no_toml(text, name, str(error))) from error
    return Document(name, data, dict(key_lines(text)))


_YAML = re.compile(r"\s*(- |---$|[\w.-]+:(\s|$))")
_ESCAPE = re.compile(r'"[^"]*\\')
_WORDS = {
    "write true and false in lower case": re.compile(r"(?i:true|false|yes|no|on|off)\b"),
    "TOML has no null; omit the key": re.compile(r"(?i:none|null|nil)\b"),
}


def _no_toml(text: str, name: str, error: str) -> str:
    """tomllib's `error` with the line in front and a hint about the likely mistake."""
    found = re.search(r" \(at line (\d+), column (\d+)\)", error)
    if found is None:
        return f"{name}: is not valid TOML: {error}"
    number, column = int(found[1]), int(found[2])
    line = text.replace("\r\n", "\n").split("\n")[number - 1]
    hint = next((hint for hint, word in _WORDS.items() if word.match(line[column - 1 :])), "")
    if _ESCAPE.match(line[:column], line[:column].find('"')):
        hint = "in double quotes a backslash begins an escape; put a path into single quotes, or write it with '/'"
    elif text.lstrip().startswith("{"):
        hint = "it looks like JSON, and hwopt reads TOML: [table], and key = value below it"
    elif _YAML.match(line):
        hint = "it looks like YAML, and hwopt reads TOML: [table], and key = value below it"
    return f"{name}:{number}: is not valid TOML: {error[: found.start()]} (column {column}){'; ' if hint else ''}{hint}"


_TABLE = re.compile(r"^\s*\[(\[)?\s*([^\[\]]+?)\s*\]{1,2}\s*(#.*)?$")
_KEY = re.compile(r"""^\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*=""")


def key_lines(text: str) -> Iterator[tuple[Key, int]]:
    """Every table and key of `text` with its line, counted from 1; elements of an array of tables count as "0", "1" …"""
    table: Key = ()
    arrays: dict[Key, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if header := _TABLE.match(line):
            table = _parts(header[2])
            if header[1]:
                arrays[table] = arrays.get(table, -1) + 1
                table = (*table, str(arrays[table]))
            yield table, number
        elif key := _KEY.match(line):
            yield (*table, *_parts(key[1])), number


def _parts(dotted: str) -> Key:
    return tuple(part.strip().strip("\"'") for part in re.findall(r"\"[^\"]*\"|'[^']*'|[^.]+", dotted))


def leaves(table: Mapping[str, Any], above: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Key and value of everything in `table`; an empty table counts as a value."""
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*above, name))
        else:
            yield (*above, name), value


def parse_assignment(text: str) -> tuple[Key, Any]:
    """`training.seed=3` as (("training", "seed"), 3). The value is read as TOML, or kept as text if it is not valid TOML."""
    key, equals, value = text.partition("=")
    parts = tuple(part.strip() for part in key.split("."))
    if not equals or len(parts) < 2 or not all(parts):
        raise InputError(f"--set {truncate(text)}: expected KEY=VALUE with a dotted key, such as training.seed=3")
    try:
        parsed = tomllib.loads(f"value = {value.strip()}")
        return parts, parsed["value"] if set(parsed) == {"value"} else value
    except (RecursionError, ValueError):  # ValueError: not TOML, or too many digits
        return parts, value.strip()


def with_assignments(document: Document, assignments: Sequence[str], tables: Sequence[str]) -> Document:
    """`document` with the `--set` texts whose first key is in `tables`; a later one wins over an earlier one."""
    data, places = deepcopy(document.data), dict(document.places)
    for key, value in map(parse_assignment, assignments):
        if key[0] not in tables:
            continue
        inner = data
        for depth, part in enumerate(key[:-1], 1):
            if part not in inner:
                places[key[:depth]] = "--set"
            step = inner.setdefault(part, {})
            if not isinstance(step, dict):
                raise InputError(f"--set {truncate('.'.join(key))}: {part!r} is a value, not a table")
            inner = step
        inner[key[-1]] = value
        places[key] = "--set"
    return replace(document, data=data, places=places)
