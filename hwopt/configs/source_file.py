"""A configuration file of any tool as entries, each with its line and its comments.

YAML and JSON are read as nodes of PyYAML, which know their lines. No tag is executed, no `${…}` resolved.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

import yaml

from hwopt.config.toml import leaves, parse_toml
from hwopt.errors import InputError
from hwopt.text import cut, first_line

Language = Literal["YAML", "JSON", "TOML", "Python"]
MAX_NODES = 50_000
"""Keys and values of a file, those of aliases at each use. Aliases of aliases make billions of a few lines."""
MERGE = "tag:yaml.org,2002:merge"
TEXT = "tag:yaml.org,2002:str"
COMMENT = re.compile(r"(?:^|\s)#(.*)")
TOML_STRING = re.compile(r'"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'')
NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")
"""Numbers of JSON and YAML 1.2, some of which PyYAML (YAML 1.1) reads as text, such as 2e-5."""


@dataclass(frozen=True)
class Entry:
    path: tuple[str, ...]
    value: Any
    line: int
    place: str = ""
    comment: str = ""
    above: tuple[str, ...] = ()
    below: tuple[str, ...] = ()
    """The comment lines directly below, if no other key follows them."""
    interpolated: bool = False
    """The value refers to another value, as Hydra's `${model.name}` and a script's `args.lr` do."""

    @property
    def key(self) -> str:
        """The path with dots, such as "training.optim"."""
        return ".".join(self.path)

    @property
    def comments(self) -> tuple[str, ...]:
        return (*self.above, *([self.comment] if self.comment else []), *self.below)


@dataclass(frozen=True)
class SourceFile:
    name: str
    language: Language
    entries: tuple[Entry, ...]
    """In the order of the file. Of a key that is given twice only the last one, as YAML and JSON readers take it."""
    replaced: tuple[Entry, ...] = ()
    """Entries that a later line with the same key replaces."""
    loose: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    """Of a script: the calls that were read, such as "TrainingArguments"."""
    keywords: tuple[tuple[str, str, int], ...] = ()
    """Of a script: (function, such as "trl.SFTConfig", keyword, line) of all calls of what it imports."""

    @property
    def top(self) -> frozenset[str]:
        return frozenset(entry.path[0] for entry in self.entries)

    @property
    def values(self) -> dict[str, Any]:
        """Key with dots -> value."""
        return {entry.key: entry.value for entry in self.entries}


def from_toml(text: str, name: str) -> SourceFile:
    document = parse_toml(text.encode(), name)
    lines: Mapping[tuple[str, ...], int] = document.lines
    entries = [
        Entry(path, value, next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), 1))
        for path, value in leaves(document.data)
    ]
    without_strings = TOML_STRING.sub(lambda found: "x" * len(found[0]), text)
    return with_comments(SourceFile(name, "TOML", tuple(entries)), text, comments_of(without_strings))


def comments_of(text: str) -> dict[int, str]:
    """Line -> comment, of a text whose values have no "#"."""
    found = ((number, COMMENT.search(line)) for number, line in enumerate(text.splitlines(), 1))
    return {number: comment[1].strip() for number, comment in found if comment}


def from_json(text: str, name: str) -> SourceFile:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{name}:{error.lineno}: is not valid JSON: {error.msg} (column {error.colno})") from error
    except (RecursionError, ValueError) as error:
        raise InputError(f"{name}: cannot be read as JSON: {first_line(error)}") from error
    if not isinstance(found, dict):
        raise InputError(f"{name}: expected keys and values, found a JSON {type(found).__name__}")
    # in JSON a tab is white space between values only
    return from_yaml(text.replace("\t", " "), name, "JSON")


def from_yaml(text: str, name: str, language: Language = "YAML") -> SourceFile:
    walk = Walk(name)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        comments = comments_of(without_values(text)) if language == "YAML" else {}
        if not isinstance(node, yaml.MappingNode):
            raise InputError(f"{name}: expected keys and values, such as `learning_rate: 2.0e-5`; found none")
        walk.mapping(node, ())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        where = f"{name}:{mark.line + 1}" if mark is not None else name
        problem = cut(str(getattr(error, "problem", None) or first_line(error)), 200)
        raise InputError(f"{where}: is not valid {language}: {problem}") from error
    except RecursionError as error:
        raise InputError(f"{name}: cannot be read as {language}: it is nested too deeply") from error
    return with_comments(SourceFile(name, language, tuple(walk.entries.values()), tuple(walk.replaced)), text, comments)


def without_values(text: str) -> str:
    """The YAML `text` with an "x" for each character of its values."""
    characters = list(text)
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        if isinstance(token, yaml.ScalarToken):
            start, end = token.start_mark.index, token.end_mark.index
            characters[start:end] = re.sub(r"\S", "x", text[start:end])
    return "".join(characters)


def with_comments(source: SourceFile, text: str, comments: Mapping[int, str]) -> SourceFile:
    """`source` with each comment at the entry behind, below or directly above which it stands."""
    lines = text.splitlines()
    alone = [number for number in comments if lines[number - 1].lstrip().startswith("#")]
    at = {entry.line for entry in (*source.entries, *source.replaced)}
    above: dict[int, list[str]] = {}
    below: dict[int, list[str]] = {}
    loose: list[str] = []
    for _, group in groupby(enumerate(sorted(alone)), lambda each: each[1] - each[0]):
        block = [number for _, number in group]  # consecutive lines
        words = [comments[n].strip("=*# ") for n in block if comments[n].strip("=-*#~ ")]
        if block[-1] + 1 in at:
            above[block[-1] + 1] = words
        elif block[0] - 1 in at:
            below[block[0] - 1] = words
        else:
            loose += words

    def full(entry: Entry) -> Entry:
        """`entry` with its comments; of several entries of a line the first one has the block."""
        before, after = tuple(above.pop(entry.line, ())), tuple(below.pop(entry.line, ()))
        place = f"{source.name}:{entry.line}"
        return replace(entry, place=place, comment=comments.get(entry.line, ""), above=before, below=after)

    entries, replaced = tuple(map(full, source.entries)), tuple(map(full, source.replaced))
    return replace(source, entries=entries, replaced=replaced, loose=tuple(loose))


class Walk:
    """Collects the entries of a YAML document. Refuses one that is too large with its aliases."""

    def __init__(self, name: str) -> None:
        self.name, self.nodes = name, 0
        self.entries: dict[tuple[str, ...], Entry] = {}
        self.replaced: list[Entry] = []

    def count(self, node: yaml.Node) -> None:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            line = node.start_mark.line + 1
            raise InputError(f"{self.name}:{line}: more than {MAX_NODES:,} keys and values with its aliases")

    def mapping(self, node: yaml.MappingNode, above: tuple[str, ...]) -> None:
        self.count(node)
        merged = [value for key, value in node.value if key.tag == MERGE]
        for each in merged:
            for part in each.value if isinstance(each, yaml.SequenceNode) else [each]:
                if isinstance(part, yaml.MappingNode):
                    self.mapping(part, above)
        inherited = set(self.entries) if merged else set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise InputError(f"{self.name}:{line}: a key is a {key.id}; expected a name")
            path = (*above, whole(key.value))
            if isinstance(value, yaml.MappingNode) and value.value and key.tag != MERGE:
                self.mapping(value, path)
            elif key.tag != MERGE:
                before = self.entries.pop(path, None)
                if before is not None and path not in inherited:
                    self.replaced.append(before)
                found = self.plain(value)
                self.entries[path] = Entry(path, found, line, interpolated=isinstance(found, str) and "${" in found)

    def plain(self, node: yaml.Node) -> Any:
        self.count(node)
        if isinstance(node, yaml.SequenceNode):
            return [self.plain(each) for each in node.value]
        if isinstance(node, yaml.MappingNode):
            names = [whole(key.value if isinstance(key, yaml.ScalarNode) else key.id) for key, _ in node.value]
            return {name: self.plain(value) for name, (_, value) in zip(names, node.value, strict=True)}
        return scalar(node)


def scalar(node: yaml.ScalarNode) -> Any:
    """The value of `node`; for a tag that YAML does not define, its text."""
    if node.style is None and NUMBER.fullmatch(node.value) and node.tag == TEXT:
        return float(node.value)
    try:
        found = yaml.SafeLoader("").construct_object(node)
    except (yaml.YAMLError, ValueError):
        found = node.value
    return found if isinstance(found, int | float | bool | None) else whole(node.value)


def whole(text: str) -> str:
    """`text` with the two halves of a character as one: JSON escapes some characters as two."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
