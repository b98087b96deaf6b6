"""Draw what a terminal shows of a run, as an SVG: `hwopt run` on a pseudo-terminal, in the middle of the run.

python benchmarks/screenshot.py docs/run.svg [--columns 96] [--at 60] [-- run --profile auto]

A terminal emulator (pyte) reads the output of the command; rich draws its screen. Needs the packages of `hwopt[test]`, and Linux
or macOS. `--at`: the progress in percent at which the picture is taken; SIGTERM then ends the run.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from itertools import groupby
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

LINES = 60
STEP = re.compile(r"^step ([\d,]+)/([\d,]+)")
COLOURS = {"brown": "yellow", "default": None}
"""pyte's name of a colour -> rich's, if they differ."""


def screen_during(command: list[str], columns: int, percent: float) -> pyte.Screen:
    """The terminal's screen when the live line of `command` first shows `percent` of the steps."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment | {"TERM": "xterm-256color"})
    os.close(slave)
    screen = pyte.Screen(columns, LINES)
    stream = pyte.ByteStream(screen)
    found = None
    while chunk := read(master):
        for part in re.split(rb"(?=\r)", chunk):  # each refresh of the live line starts with a carriage return
            stream.feed(part)
            if found is None and has_reached(screen, percent):
                found = copy.deepcopy(screen)
                process.terminate()
    if found is None:
        raise SystemExit(f"{' '.join(command)}: exit code {process.wait()}; no live line at {percent:g} %")
    process.wait()
    return found


def read(master: int) -> bytes:
    """The next output; empty at its end."""
    try:
        return os.read(master, 65536)
    except OSError:  # Linux's end of file of a terminal
        return b""


def has_reached(screen: pyte.Screen, percent: float) -> bool:
    """Whether the live line shows at least `percent` of the steps, with all its numbers."""
    for line in screen.display:
        if (match := STEP.match(line)) and line.rstrip().endswith("GiB"):
            done, total = (int(number.replace(",", "")) for number in match.groups())
            return 100 * done >= percent * total
    return False


def style_of(colour: str, bold: bool) -> Style:
    """rich's style of a letter with pyte's `colour`, a name or six hexadecimal digits."""
    name = COLOURS.get(colour, colour.replace("bright", "bright_"))
    return Style(color=f"#{name}" if name and re.fullmatch(r"[0-9a-f]{6}", name) else name, bold=bold)


def drawn(screen: pyte.Screen, title: str) -> str:
    """`screen` as an SVG, up to its last line that is not empty."""
    lines = [number for number, line in enumerate(screen.display) if line.strip()]
    console = Console(record=True, width=screen.columns, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for number in range(lines[-1] + 1):
        text = Text(no_wrap=True)
        letters = [screen.buffer[number][column] for column in range(screen.columns)]
        for (colour, bold), group in groupby(letters, key=lambda letter: (letter.fg, letter.bold)):
            text.append("".join(letter.data for letter in group), style_of(colour, bold))
        text.rstrip()
        console.print(text)
    return console.export_svg(title=title)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--columns", type=int, default=96)
    parser.add_argument("--at", type=float, default=60)
    parser.add_argument("arguments", nargs="*", default=["run", "--profile", "auto"], help="what follows `hwopt`")
    given = parser.parse_args()
    screen = screen_during([sys.executable, "-m", "hwopt", *given.arguments], given.columns, given.at)
    given.output.write_text(drawn(screen, f"hwopt {' '.join(given.arguments)}"), encoding="utf-8")


if __name__ == "__main__":
    main()
