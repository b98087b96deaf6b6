"""docs/questions.md: its commands print what the page shows. `python benchmarks/questions.py` rewrites the page."""

import re
from pathlib import Path
from typing import Any

import pytest
from command_line import hwopt
from pinned_torch import IS_PINNED, REASON
from programs import program

from hwopt.training.telemetry import use

QUESTIONS: Any = program("questions")
TEXT = QUESTIONS.PAGE.read_text(encoding="utf-8")
BLOCKS = list(QUESTIONS.blocks(TEXT))
SHORTER = {
    "run": ["--max-steps", "12"],
    "bench": ["--steps", "12", "--rounds", "3"],
    "tune": ["--steps", "8", "--trials", "2"],
}
"""Options of commands whose figures are not compared."""
PLANS = ("compare", "plan")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("questions")
    QUESTIONS.write_files(TEXT, made)
    return made


def excerpt(block: Any, folder: Path) -> str:
    """What the page would show of the command's output today."""
    shorter = SHORTER.get(block.arguments[0], []) if block.measured else []
    done = hwopt(*block.arguments, *shorter, cwd=folder, COLUMNS="120")
    assert done.returncode == 0, done.stderr
    found: str = block.excerpt(done.stdout)
    return found


def labels(text: str) -> set[str]:
    """What the lines of `text` say before their first figure. Gaps and the widths of columns depend on the run."""
    return {" ".join(re.split(r"[\d:]", line)[0].split()) for line in text.splitlines() if line != "…"}


def test_the_page_has_twelve_questions_with_commands_and_outputs() -> None:
    questions = re.split(r"^## \d+\. ", TEXT, flags=re.MULTILINE)[1:]
    assert len(questions) == 12
    for text in questions:
        found = list(QUESTIONS.blocks(text))
        assert found, text[:80]
        assert all(block.shown.strip() for block in found), text[:80]
        assert re.search(r"^\*\[.*\]\(notes\.md#", text, re.MULTILINE), "a question names its source"
    assert sum(text.count("$ hwopt") for text in questions) == len(BLOCKS), "the program finds every command"


@pytest.mark.daily
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", [block for block in BLOCKS if not block.measured], ids=lambda block: block.command)
def test_command_prints_what_the_page_shows(block: Any, folder: Path) -> None:
    if block.arguments[0] in PLANS and not IS_PINNED:
        pytest.skip(REASON)
    assert excerpt(block, folder) == block.shown


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
def test_runs_of_the_page_print_the_same_lines_with_other_figures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(use, "ENOUGH_SECONDS", 0.0)  # few steps have a verdict too
    for block in (block for block in BLOCKS if block.measured):
        assert labels(block.shown) <= labels(excerpt(block, folder)), block.command
