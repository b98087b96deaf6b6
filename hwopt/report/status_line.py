"""StatusLine: one line on standard error that says what a command does before its first result, which may take seconds.

On a terminal, the next line replaces it, and it is removed before anything else is printed. Elsewhere only `announce` prints.
This module imports nothing heavy: it prints the first output of a command.
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress

from hwopt.text import printable

CLEAR_LINE = "\r\x1b[2K"


class StatusLine:
    """The last line of a terminal. There is one of a process: `status_line`."""

    def __init__(self) -> None:
        self.shown = False

    def show(self, text: str) -> None:
        """Show `text` on a terminal, cut at its width."""
        if on_terminal():
            width = shutil.get_terminal_size().columns
            write(CLEAR_LINE + printable(f"{text} …")[: width - 1])
            self.shown = True

    def announce(self, text: str) -> None:
        """Show `text` on a terminal, or print it as a line."""
        if on_terminal():
            self.show(text)
        else:
            write(printable(f"{text} …\n"))

    def clear(self) -> None:
        """Remove the line. Call this before other output."""
        if self.shown:
            self.shown = False
            write(CLEAR_LINE)


status_line = StatusLine()


def on_terminal() -> bool:
    """Whether standard error is a terminal whose last line can be replaced."""
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def write(text: str) -> None:
    """Write to standard error. A closed pipe or a full disk does not end the command."""
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()
