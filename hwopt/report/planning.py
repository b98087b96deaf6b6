"""PlanScreen: prints a plan while it is made: the decisions, the memory, then each change that saves memory as it is found.

If standard error is a terminal, its last line says what the planner does.
"""

from __future__ import annotations

from rich.console import Console

from hwopt.memory.advice.changes import PlanListener
from hwopt.planning.memory_plan import Change, Gain, MemoryPlan
from hwopt.planning.plan import Plan
from hwopt.report.memory import show_change, show_forecast, show_gain, show_largest, show_memory
from hwopt.report.status_line import status_line
from hwopt.report.terminal import show_plan


class ProgressLine(PlanListener):
    """A line on standard error that says what the planner does. Prints nothing if standard error is not a terminal."""

    def on_trial(self, what: str) -> None:
        status_line.show(f"planning: {what}")

    def clear(self) -> None:
        """Remove the line, before something else is printed."""
        status_line.clear()


class PlanScreen(ProgressLine):
    """Prints the plan, its memory and the changes."""

    def __init__(self, console: Console) -> None:
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


class RunScreen(ProgressLine):
    """Prints the plan of a run before it starts, and after it what its free memory could have bought."""

    def __init__(self, console: Console, verbose: bool = False) -> None:
        self.console, self.verbose = console, verbose

    def on_plan(self, plan: Plan) -> None:
        self.clear()
        show_plan(self.console, plan, self.verbose)
        show_forecast(self.console, plan)

    def on_gain(self, gain: Gain) -> None:
        self.clear()
        show_gain(self.console, gain)
