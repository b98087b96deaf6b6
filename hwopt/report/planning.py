"""PlanScreen: prints a plan while it is made: the decisions, the memory, then each change that saves memory as it is found.

If standard error is a terminal, its last line says what the planner does.
"""

from __future__ import annotations

import sys

from rich.console import Console

from hwopt.memory.advice import PlanListener
from hwopt.planning.memory_plan import Change, Gain, MemoryPlan
from hwopt.planning.plan import Plan
from hwopt.report.memory import show_change, show_gain, show_largest, show_memory
from hwopt.report.terminal import show_plan
from hwopt.text import printable

CLEAR_LINE = "\r\x1b[2K"


class ProgressLine(PlanListener):
    """A line on standard error that says what the planner does. Prints nothing if standard error is not a terminal."""

    def __init__(self) -> None:
        self.shown = False

    def on_trial(self, what: str) -> None:
        if sys.stderr is not None and sys.stderr.isatty():
            text = printable(f"planning: {what} …")
            sys.stderr.write(CLEAR_LINE + text[: Console(file=sys.stderr).width - 1])
            sys.stderr.flush()
            self.shown = True

    def clear(self) -> None:
        """Remove the line, before something else is printed."""
        if self.shown:
            sys.stderr.write(CLEAR_LINE)
            sys.stderr.flush()
            self.shown = False


class PlanScreen(ProgressLine):
    """Prints the plan, its memory and the changes."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def on_memory(self, plan: Plan) -> None:
        self.clear()
        show_plan(self.console, plan)
        show_memory(self.console, plan)

    def on_largest_sizes(self, memory: MemoryPlan) -> None:
        self.clear()
        show_largest(self.console, memory)

    def on_gain(self, gain: Gain) -> None:
        self.clear()
        show_gain(self.console, gain)

    def on_change(self, change: Change) -> None:
        self.clear()
        show_change(self.console, change)
