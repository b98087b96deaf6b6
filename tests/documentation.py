"""The fenced blocks and inline commands of README.md, CONTRIBUTING.md and docs/*.md, each with its kind.

| block | kind | what the tests do |
|---|---|---|
| no language or `sh`: one command per line | commands | run or check each one |
| `console`, or starts with `$ `: commands and their output | session | run or check the commands after `$ ` |
| `toml`, `python`, `json` | the language | validate; run Python |
| `bash`: a script; `ini`: a systemd unit | script, unit | check the syntax, and the options of `hwopt` |
| `text`: output, a listing | text | nothing |
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {
    "": "commands",
    "sh": "commands",
    "console": "session",
    "toml": "toml",
    "python": "python",
    "json": "json",
    "bash": "script",
    "ini": "unit",
    "text": "text",
}
FOREIGN = {"docker", "git", "hf", "llama-server", "text-embeddings-router", "vllm"}
"""Programs that need a network, or that the tests do not install."""
PROGRAMS = FOREIGN | {".", ".ci/run", "accelerate", "hwopt", "ls", "pip", "pre-commit", "pytest", "python", "python3", "tox"}
"""The programs that a line of a block of commands may start. A line with another one makes its block one of an unknown kind."""
INLINE = ("accelerate launch ", "hwopt ", "pip install ", "pytest ", "python benchmarks/", "tox -e ")
"""How inline code begins that is a command."""


@dataclass(frozen=True)
class Command:
    page: str
    line: int
    words: tuple[str, ...]
    """After the variables that are set for it."""

    @property
    def text(self) -> str:
        return shlex.join(self.words)

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    @property
    def kind(self) -> str:
        """A value of LANGUAGES, or "unknown"."""
        if self.language == "" and self.text.startswith("$ "):
            return "session"
        kind = LANGUAGES.get(self.language, "unknown")
        if kind == "commands" and {command.words[0] for command in self.commands_of(self.text)} - PROGRAMS:
            return "unknown"
        if kind == "session" and not self.text.startswith("$ "):
            return "unknown"
        return kind

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[Command]:
        """The commands of a block of the kind "commands" or "session"."""
        if self.kind == "session":
            typed = (line.removeprefix("$ ") if line.startswith("$ ") else "" for line in self.text.splitlines())
            return self.commands_of("\n".join(typed))
        return self.commands_of(self.text) if self.kind == "commands" else []

    def commands_of(self, text: str) -> list[Command]:
        lines = text.replace("\\\n", "").splitlines()
        return [command for number, line in enumerate(lines, self.line) for command in parsed(self.page, number, line)]


def parsed(page: str, line: int, text: str) -> Iterator[Command]:
    """The commands of one line, which `&&` separates."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:  # an unclosed quote
        words = ["?"]
    while words:
        end = words.index("&&") if "&&" in words else len(words)
        command = words[:end]
        while len(command) > 1 and "=" in command[0]:
            del command[0]
        yield Command(page, line, tuple(command))
        words = words[end + 1 :]


@dataclass(frozen=True)
class Page:
    name: str
    parts: tuple[Block | Command, ...]
    """Blocks and inline commands, from top to bottom."""

    @property
    def blocks(self) -> list[Block]:
        return [part for part in self.parts if isinstance(part, Block)]

    @property
    def commands(self) -> list[Command]:
        """All commands, from top to bottom; each once."""
        found = [command for part in self.parts for command in (part.commands() if isinstance(part, Block) else [part])]
        first: dict[tuple[str, ...], Command] = {}
        for command in found:
            first.setdefault(command.words, command)
        return list(first.values())


@cache
def read_page(path: Path) -> Page:
    name = path.relative_to(ROOT).as_posix()
    parts: list[Block | Command] = []
    for token in MarkdownIt().enable("table").parse(path.read_text(encoding="utf-8")):
        line = 0 if token.map is None else token.map[0] + 1
        if token.type == "fence":
            parts.append(Block(name, line + 1, token.info.strip(), token.content))
        for child in token.children or ():
            if child.type == "code_inline" and child.content.startswith(INLINE):
                parts += parsed(name, line, child.content)
    return Page(name, tuple(parts))


def read_pages() -> list[Page]:
    return [read_page(path) for path in PAGES]
