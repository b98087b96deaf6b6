"""Run the commands of docs/questions.md and write their output into the page.

    python benchmarks/questions.py [--folder FOLDER] [--only WORD]

Needs no GPU, no network and no weights. Plans hold for the versions in constraints.txt. A comment before a block says which lines
of the output the block shows:

    <!-- show: REGEX -->           the lines that match, with … for the others; without a comment all lines
    <!-- show measured: REGEX -->  the same for figures that this machine measured; the tests do not compare the figures

Files that the commands need stand on the page, in blocks that begin with `# NAME`. This program writes the texts.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "questions.md"
PROFILES = Path(__file__).parent / "profiles"
BLOCK = re.compile(
    r"(?:<!-- show(?P<measured> measured)?: (?P<pattern>.*) -->\n)?```console\n\$ (?P<command>.*)\n(?P<shown>(?s:.*?))```"
)
FILE = re.compile(r"```\w+\n(?P<text># (?P<name>\w+\.(?:toml|yaml))\n(?s:.*?))```")
ROWS = {"train.csv": 20_000, "dev.csv": 2_000}
"""File -> rows: about 20k samples, as in docs/notes.md."""
LABELS = ("neutral", "claim")

Run = Callable[[list[str], Path], str]
"""Runs the command line with these arguments in a folder, and returns its output."""


@dataclass(frozen=True)
class Block:
    """A command of the page with the lines that it shows."""

    command: str
    pattern: str | None
    """Selects the lines that the page shows; None: all lines."""
    measured: bool
    shown: str

    @property
    def arguments(self) -> list[str]:
        return shlex.split(self.command)[1:]

    def excerpt(self, output: str) -> str:
        """The lines of `output` that the page shows, with … for each gap."""
        if self.pattern is None:
            return output
        found: list[str] = []
        for line in output.splitlines():
            if re.search(self.pattern, line):
                found.append(line)
            elif found and found[-1] != "…":
                found.append("…")
        while found and found[-1] == "…":
            del found[-1]
        return "".join(f"{line}\n" for line in found)


def blocks(text: str) -> Iterator[Block]:
    """The commands of the page `text`, from top to bottom."""
    for found in BLOCK.finditer(text):
        yield Block(found["command"], found["pattern"], found["measured"] is not None, found["shown"])


def write_files(text: str, folder: Path) -> None:
    """Write the files that the page `text` shows, the texts that its job reads, and benchmarks/profiles into `folder`."""
    shutil.copytree(PROFILES, folder / "benchmarks" / "profiles", dirs_exist_ok=True)
    for found in FILE.finditer(text):
        (folder / found["name"]).write_text(found["text"], encoding="utf-8")
    for seed, (name, rows) in enumerate(ROWS.items()):
        write_texts(folder / name, rows, seed)


def write_texts(path: Path, rows: int, seed: int) -> None:
    """Texts of made-up words with two labels; half of them have at most 60 words, the longest 250."""
    made_up = random.Random(seed)
    syllables = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiou"]
    words = [first + second for first in syllables for second in syllables]
    with open(path, "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["text", "label"])
        for _ in range(rows):
            length = min(250, max(4, round(made_up.lognormvariate(4.1, 0.6))))
            chosen = made_up.choices(words, k=length)
            table.writerow([" ".join(chosen), LABELS[chosen[0] < "m"]])


def run(arguments: list[str], folder: Path) -> str:
    """The output of `hwopt` with `arguments` in `folder`. Exits if the command fails."""
    done = subprocess.run(
        [sys.executable, "-m", "hwopt", *arguments],
        cwd=folder,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "120"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    if done.returncode:
        sys.exit(f"hwopt {shlex.join(arguments)}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def with_outputs(text: str, folder: Path, run: Run, only: str = "") -> str:
    """The page `text` with today's output of its commands, or of those that contain `only`."""

    def rewritten(found: re.Match[str]) -> str:
        block = Block(found["command"], found["pattern"], found["measured"] is not None, found["shown"])
        if only not in block.command:
            return found[0]
        shown = block.excerpt(run(block.arguments, folder))
        print(f"$ {block.command}\n{shown}", flush=True)
        start = found.start("shown") - found.start()
        return found[0][:start] + shown + "```"

    return BLOCK.sub(rewritten, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="folder for the files and the runs; default: a new one")
    parser.add_argument("--only", default="", metavar="WORD", help="only commands with this word")
    options = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as empty:
        folder = options.folder or Path(empty)
        folder.mkdir(parents=True, exist_ok=True)
        write_files(text, folder)
        PAGE.write_text(with_outputs(text, folder, run, options.only), encoding="utf-8")


if __name__ == "__main__":
    main()
