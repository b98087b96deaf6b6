"""A command on a pseudo-terminal, and the screen that a terminal emulator (pyte) makes of what it prints."""

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import pyte

LINES = 500
"""Lines of the screen, so that nothing scrolls out of it."""


@dataclass(frozen=True)
class Screenshot:
    """What is on a terminal."""

    lines: list[str]
    """The lines at the end, without trailing spaces."""
    colours: set[str]
    """The colours of the letters at the end."""
    cursor: bool
    """Whether the cursor is shown at the end."""
    exit_code: int

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)


def on_terminal(work: Callable[[], int], columns: int, within: float = 120.0) -> Screenshot:
    """The screen after a fork of this process called `work` on a terminal of `columns` columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
    pid = os.fork()
    if not pid:
        run_on(slave, work)
    os.close(slave)
    screen = pyte.Screen(columns, LINES)
    stream = pyte.ByteStream(screen)
    deadline = time.monotonic() + within
    while chunk := read(master, deadline, pid):
        stream.feed(chunk)
    os.close(master)
    lines = [line.rstrip() for line in screen.display]
    while lines and not lines[-1]:
        lines.pop()
    colours = {letter.fg for row in screen.buffer.values() for letter in row.values()}
    return Screenshot(lines, colours, not screen.cursor.hidden, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def read(master: int, deadline: float, pid: int) -> bytes:
    """The next output; empty at its end. Kills the process `pid` after the deadline."""
    if not select.select([master], [], [], max(0.0, deadline - time.monotonic()))[0]:
        os.kill(pid, signal.SIGKILL)
        raise AssertionError("the command did not end")
    try:
        return os.read(master, 65536)
    except OSError:  # Linux's end of file of a terminal
        return b""


def run_on(terminal: int, work: Callable[[], int]) -> None:
    """Call `work` with `terminal` as the controlling terminal, and exit with the code that it returns."""
    code = 70
    try:
        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        for number in range(3):
            os.dup2(terminal, number)
        sys.stdin = os.fdopen(0, encoding="utf-8")
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, encoding="utf-8") for number in (1, 2))
        code = work()
        sys.stdout.flush()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)
