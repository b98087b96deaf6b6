"""StatusLine: one line on standard error that says what a command does before its first result, which may take seconds.

It is removed before anything else is printed. This module imports nothing heavy: it prints the first output of a command.
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from textwrap import wrap
from typing import IO

from hwopt.text import printable

CLEAR_LINE = "\r\x1b[2K"
LEAST = 20
"""The least columns for text on a terminal."""


class StatusLine:
    """The last line of a terminal; elsewhere only `announce` prints."""

    def __init__(self) -> None:
        self.shown = ""

    def show(self, text: str) -> None:
        """Show `text` on a terminal, cut at its width."""
        if on_terminal():
            before, width = self.blanks(), shutil.get_terminal_size().columns
            self.shown = printable(f"{text} …")[: width - 1]
            write_past_buffer(before + CLEAR_LINE + self.shown)

    def announce(self, text: str) -> None:
        """Show `text` on a terminal, or print it as a line."""
        if on_terminal():
            self.show(text)
        else:
            write_past_buffer(printable(f"{text} …\n"))

    def clear(self) -> None:
        """Remove the line. Call this before other output."""
        if self.shown:
            blanks, self.shown = self.blanks(), ""  # first: rich prints what is written while its live display runs, and clears
            write_past_buffer(blanks + CLEAR_LINE)

    def blanks(self) -> str:
        """What overwrites the line in a notebook, which knows carriage returns but not the sequence that clears a line."""
        return f"\r{' ' * len(self.shown)}" if self.shown else ""


status_line = StatusLine()


def on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def folded(text: str, stream: IO[str], indent: str | None = None) -> str:
    """`text`, each line broken between words where it is wider than `stream`, if that is a terminal.

    Further lines begin with `indent`; by default as the line that they continue.
    """
    if not stream.isatty():
        return text
    lines, width = [], shutil.get_terminal_size().columns
    for line in text.split("\n"):
        begin = line[: len(line) - len(line.lstrip())] if indent is None else indent
        found = wrap(
            line,
            max(width, len(begin) + LEAST),
            subsequent_indent=begin,
            break_on_hyphens=False,
            break_long_words=False,
            replace_whitespace=False,
        )
        lines += found if len(line) > width else [line]
    return "\n".join(lines)


def write_past_buffer(text: str) -> None:
    """Write to standard error. A closed pipe or a full disk does not end the command."""
    own, current = sys.__stderr__, getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # rich's would spell the sequences out
    with suppress(OSError):
        if own is not None and current is own:  # past the buffer, in which text that cannot be written would stay and fail again
            own.flush()
            os.write(own.fileno(), text.encode(own.encoding, "replace"))
        elif current is not None:
            current.write(text)
            current.flush()
