"""StatusLine: on a terminal one line that is replaced and removed, elsewhere lines of `announce` only."""

import io
import re
import sys

import pytest
from rich.progress import Progress

from hwopt.report.status_line import CLEAR_LINE, StatusLine, status_line
from hwopt.report.terminal import Terminal
from hwopt.report.tune import show_trial
from hwopt.trials.tuning import TrialRow


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def fake_terminal(monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
    """The standard error of a test; pytest replaces what a fixture sets."""
    stream = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_line_is_replaced_and_removed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = fake_terminal(monkeypatch)
    line = StatusLine()
    line.show("one")
    line.announce("two")
    line.clear()
    line.clear()
    blank = f"\r     {CLEAR_LINE}"
    assert terminal.getvalue() == f"{CLEAR_LINE}one …{blank}two …{blank}"


def test_line_is_removed_before_other_output(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = fake_terminal(monkeypatch)
    status_line.show("loading")
    Terminal(file=io.StringIO()).print("result")
    assert terminal.getvalue().endswith(CLEAR_LINE)
    assert not status_line.shown


def test_line_is_removed_while_a_progress_bar_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = fake_terminal(monkeypatch)
    status_line.show("loading")
    with Progress(console=Terminal(file=terminal, color_system="standard"), transient=True) as bar:
        bar.add_task("")
    assert "2K" not in re.sub(r"\x1b\[[0-9?;]*[a-zA-Z]", "", terminal.getvalue())


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_without_a_terminal_only_announced_lines_are_printed(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = FakeTerminal() if term == "dumb" else io.StringIO()
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys, "stderr", stream)
    line = StatusLine()
    line.show("reading")
    line.announce("loading torch")
    line.clear()
    assert stream.getvalue() == "loading torch …\n"


def test_settings_of_a_trial_break_below_their_heading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    terminal = FakeTerminal()
    settings = "length_batching off, dataloader.num_workers = 1"
    show_trial(Terminal(file=terminal, color_system=None), TrialRow(4, settings, (), 33_864.0, "tokens", 0.59, None))
    first, second = terminal.getvalue().splitlines()
    assert first.index("length_batching") == second.index("dataloader") == 48
