"""Listeners of the planner: a line on standard error that says what it does, and screens that print what it finds, at once."""

from __future__ import annotations

from rich.console import Console

from hwopt.memory.advice import PlanListener
from hwopt.planning.memory_plan import Change, Gain, MemoryPlan
from hwopt.planning.plan import Plan
from hwopt.report.memory import show_change, show_forecast, show_gain, show_largest, show_memory
from hwopt.report.status_line import status_line
from hwopt.report.terminal import show_plan


class PlanProgress(PlanListener):
    """A line on standard error that says what the planner does, if that is a terminal."""

    def on_trial(self, what: str) -> None:
        status_line.show(f"planning: {what}")


class PlanScreen(PlanProgress):
    """Prints the plan, its memory and each change."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def on_memory(self, plan: Plan) -> None:
        show_plan(self.console, plan)
        show_memory(self.console, plan)

    def on_largest_sizes(self, memory: MemoryPlan) -> None:
        show_largest(self.console, memory)

    def on_gain(self, gain: Gain) -> None:
        show_gain(self.console, gain)

    def on_change(self, change: Change) -> None:
        show_change(self.console, change)


class RunScreen(PlanProgress):
    """Prints the plan of a run before it starts, and after it what its free memory could have bought."""

    def __init__(self, console: Console, verbose: bool = False) -> None:
        self.console, self.verbose = console, verbose

    def on_plan(self, plan: Plan) -> None:
        show_plan(self.console, plan, self.verbose)
        show_forecast(self.console, plan)

    def on_gain(self, gain: Gain) -> None:
        show_gain(self.console, gain)
