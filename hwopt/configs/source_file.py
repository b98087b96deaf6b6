"""A configuration file of any tool as a list of entries, each with its line and its comments. Reads YAML, JSON and TOML.

YAML and JSON are read as nodes of PyYAML, which know their lines. No tag is executed and no `${…}` is resolved.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from hwopt.config.toml import MAX_BYTES, MAX_DEPTH, Document, parse_toml
from hwopt.errors import InputError
from hwopt.system.paths import read_regular_file
from hwopt.text import cut, first_line

Language = Literal["YAML", "JSON", "TOML"]
MAX_ENTRIES = 5_000
"""Far more than any configuration has; a YAML file can make more of a few anchors."""
NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")
"""Numbers of JSON and YAML 1.2, some of which PyYAML (YAML 1.1) reads as text, such as 2e-5."""


@dataclass(frozen=True)
class Entry:
    """A key with a value that is not a table."""

    path: tuple[str, ...]
    value: Any
    line: int
    comment: str = ""
    """The comment behind the value, without "#"."""
    above: tuple[str, ...] = ()
    """The comment lines directly above."""
    below: tuple[str, ...] = ()
    """The comment lines directly below, if no other key follows them."""

    @property
    def key(self) -> str:
        """The path with dots, such as "training.optim"."""
        return ".".join(self.path)

    @property
    def comments(self) -> tuple[str, ...]:
        """All comments that belong to the entry, from top to bottom."""
        return (*self.above, *([self.comment] if self.comment else []), *self.below)

    @property
    def interpolated(self) -> bool:
        """Whether the value refers to another value, as Hydra's `${model.name}` does."""
        return isinstance(self.value, str) and "${" in self.value


@dataclass(frozen=True)
class SourceFile:
    name: str
    language: Language
    entries: tuple[Entry, ...]
    """In the order of the file. Of a key that is given twice, only the last one, which is what YAML and JSON readers take."""
    replaced: tuple[Entry, ...] = ()
    """Entries that a later line with the same key replaces."""
    loose: tuple[str, ...] = ()
    """Comment lines that belong to no entry."""
    document: Document | None = None
    """Of a TOML file."""

    @property
    def top(self) -> frozenset[str]:
        """The keys of the outermost table."""
        return frozenset(entry.path[0] for entry in self.entries)

    @property
    def leaves(self) -> frozenset[str]:
        """The last part of each key."""
        return frozenset(entry.path[-1] for entry in self.entries)


def read_source(path: Path) -> SourceFile:
    """The entries of a YAML, JSON or TOML file. Raises InputError with file and line if it is none."""
    text = decoded(read_regular_file(path, MAX_BYTES), str(path))
    if path.suffix == ".py":
        raise InputError(f"{path}: is a Python script; save its arguments as JSON or YAML, as by args.to_json_string()")
    if not text.strip():
        raise InputError(f"{path}: is empty; expected a configuration in YAML, JSON or TOML")
    if path.suffix == ".toml":
        return from_toml(text, str(path))
    if path.suffix == ".json" or text.lstrip().startswith("{"):
        return from_json(text, str(path))
    return from_yaml(text, str(path), "YAML")


def decoded(raw: bytes, name: str) -> str:
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InputError(f"{name}:1: is UTF-16; save it as UTF-8")
    try:
        return raw.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise InputError(f"{name}:{line}: is not UTF-8 (byte {raw[error.start]:#04x}); save it as UTF-8") from error


def from_toml(text: str, name: str) -> SourceFile:
    document = parse_toml(text.encode(), name)
    entries = [Entry(path, value, line_of(document, path)) for path, value in toml_leaves(document.data, ())]
    return with_comments(SourceFile(name, "TOML", tuple(entries), document=document), text, dict(toml_comments(text)))


def line_of(document: Document, path: tuple[str, ...]) -> int:
    """The line of the key, or of the inline table that holds it; 1 if it is unknown."""
    return next((document.lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in document.lines), 1)


def toml_leaves(table: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from toml_leaves(value, (*above, key))
        else:
            yield (*above, key), value


def toml_comments(text: str) -> Iterator[tuple[int, str]]:
    strings = re.compile(r'"(?:\\.|[^"\\])*"|\'[^\']*\'')
    for number, line in enumerate(text.splitlines(), 1):
        without = strings.sub(lambda found: "x" * len(found[0]), line)
        if (start := without.find("#")) >= 0:
            yield number, line[start + 1 :].strip()


def from_json(text: str, name: str) -> SourceFile:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{name}:{error.lineno}: is not valid JSON: {error.msg} (column {error.colno})") from error
    except (RecursionError, ValueError) as error:
        raise InputError(f"{name}: cannot be read as JSON: {first_line(error)}") from error
    if not isinstance(found, dict):
        raise InputError(f"{name}: expected keys and values, found a JSON {type(found).__name__}")
    text = text.replace("\t", " ")  # in JSON a tab is white space between values only
    return from_yaml(SURROGATES.sub(joined, text), name, "JSON")


SURROGATES = re.compile(r"(?<!\\)((?:\\\\)*)\\u([dD][89abAB]\w\w)\\u([dD][c-fC-F]\w\w)")
"""A character outside of the basic plane, which JSON escapes as two and YAML reads as two."""


def joined(found: re.Match[str]) -> str:
    high, low = int(found[2], 16), int(found[3], 16)
    return found[1] + chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00))


def from_yaml(text: str, name: str, language: Language) -> SourceFile:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        comments = dict(yaml_comments(text)) if language == "YAML" else {}
    except yaml.YAMLError as error:
        raise InputError(not_yaml(name, language, error)) from error
    except RecursionError as error:
        raise InputError(f"{name}: cannot be read as {language}: it is nested too deeply") from error
    if not isinstance(node, yaml.MappingNode):
        raise InputError(f"{name}: expected keys and values, such as `learning_rate: 2.0e-5`; found none")
    walk = Walk(name)
    walk.mapping(node, ())
    return with_comments(SourceFile(name, language, tuple(walk.entries.values()), tuple(walk.replaced)), text, comments)


def not_yaml(name: str, language: Language, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    where = f"{name}:{mark.line + 1}" if mark is not None else name
    problem = getattr(error, "problem", None) or first_line(error)
    return f"{where}: is not valid {language}: {cut(str(problem), 200)}"


def yaml_comments(text: str) -> Iterator[tuple[int, str]]:
    """Line -> comment. A "#" inside a value is none."""
    inside = [
        (token.start_mark.index, token.end_mark.index)
        for token in yaml.scan(text, Loader=yaml.SafeLoader)
        if isinstance(token, yaml.ScalarToken)
    ]
    spans, position = iter([*inside, (len(text) + 1, len(text) + 1)]), 0
    start, end = next(spans)
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        for found in re.finditer(r"(?:^|(?<=\s))#", line):
            at = position + found.start()
            while end <= at:
                start, end = next(spans)
            if at < start:
                yield number, line[found.end() :].strip()
                break
        position += len(line)


def with_comments(source: SourceFile, text: str, comments: Mapping[int, str]) -> SourceFile:
    """`source` with each comment at its entry: behind the value, in the lines directly above, or in those directly below."""
    lines = text.splitlines()
    alone = [number for number in comments if lines[number - 1].lstrip().startswith("#")]
    at = {entry.line for entry in (*source.entries, *source.replaced)}
    above: dict[int, list[str]] = {}
    below: dict[int, list[str]] = {}
    loose: list[str] = []
    for run in runs(alone):
        words = [comments[number].strip("=*# ") for number in run if comments[number].strip("=-*#~ ")]  # without rules
        if run[-1] + 1 in at:
            above[run[-1] + 1] = words
        elif run[0] - 1 in at:
            below[run[0] - 1] = words
        else:
            loose += words

    def full(entry: Entry) -> Entry:
        line = entry.line
        found = (above.pop(line, ()), below.pop(line, ()))  # the first entry of a line has them
        return replace(entry, comment=comments.get(line, ""), above=tuple(found[0]), below=tuple(found[1]))

    return replace(
        source, entries=tuple(map(full, source.entries)), replaced=tuple(map(full, source.replaced)), loose=tuple(loose)
    )


def runs(numbers: Iterable[int]) -> list[list[int]]:
    """Consecutive numbers in one list each."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][-1] == number - 1:
            found[-1].append(number)
        else:
            found.append([number])
    return found


class Walk:
    """Collects the entries of a YAML document."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.entries: dict[tuple[str, ...], Entry] = {}
        self.replaced: list[Entry] = []
        self.constructor = yaml.SafeLoader("")

    def mapping(self, node: yaml.MappingNode, above: tuple[str, ...]) -> None:
        if len(above) > MAX_DEPTH:
            raise InputError(f"{self.name}:{node.start_mark.line + 1}: is nested deeper than {MAX_DEPTH} levels")
        merged = [value for key, value in node.value if key.tag == "tag:yaml.org,2002:merge"]
        for value in (part for each in merged for part in (each.value if isinstance(each, yaml.SequenceNode) else [each])):
            if isinstance(value, yaml.MappingNode):
                self.mapping(value, above)
        inherited = set(self.entries) if merged else set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise InputError(f"{self.name}:{key.start_mark.line + 1}: a key is a {key.id}; expected a name")
            if key.tag != "tag:yaml.org,2002:merge":
                self.pair((*above, str(key.value)), key, value, inherited)

    def pair(self, path: tuple[str, ...], key: yaml.Node, value: yaml.Node, inherited: set[tuple[str, ...]]) -> None:
        if isinstance(value, yaml.MappingNode) and value.value:
            self.mapping(value, path)
            return
        line = key.start_mark.line + 1
        entry = Entry(path, self.plain(value, 0), line)
        if (before := self.entries.pop(path, None)) is not None and path not in inherited:
            self.replaced.append(before)
        self.entries[path] = entry
        if len(self.entries) + len(self.replaced) > MAX_ENTRIES:
            raise InputError(f"{self.name}:{line}: more than {MAX_ENTRIES:,} keys; no configuration has as many")

    def plain(self, node: yaml.Node, depth: int) -> Any:
        """The value of `node` in Python's types. The text of a tag that YAML does not define is kept as it is."""
        if depth > MAX_DEPTH:
            raise InputError(f"{self.name}:{node.start_mark.line + 1}: is nested deeper than {MAX_DEPTH} levels")
        if isinstance(node, yaml.SequenceNode):
            return [self.plain(each, depth + 1) for each in node.value[:MAX_ENTRIES]]
        if isinstance(node, yaml.MappingNode):
            return {str(key.value): self.plain(value, depth + 1) for key, value in node.value}
        if node.style is None and NUMBER.fullmatch(node.value) and node.tag == "tag:yaml.org,2002:str":
            return float(node.value)
        try:
            found = self.constructor.construct_object(node)
        except (yaml.YAMLError, ValueError):
            return str(node.value)
        return found if isinstance(found, str | int | float | bool | None) else str(node.value)
