"""Print the findings of hwopt.hardware.doctor, and what each plugin can do on a machine."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import wrap
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from hwopt.hardware.doctor import CheckResult
from hwopt.report.sheet import Sheet
from hwopt.report.status_line import LEAST
from hwopt.report.terminal import say, show_problem, show_sheet
from hwopt.text import printable

if TYPE_CHECKING:
    from hwopt.planning.capabilities import Survey

COLOURS = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def show_findings(console: Console, findings: Mapping[str, CheckResult]) -> None:
    """Print one line for each finding, a second one with its fix, and the numbers of problems and warnings."""
    width = max(map(len, findings))
    for check, finding in findings.items():
        first, *more = wrap(printable(finding.text), max(LEAST, console.width - width - 11), break_on_hyphens=False)
        text = "".join([f"  {check:<{width}}  {first}", *(f"\n{'':<{width + 11}}{line}" for line in more)])
        console.print(Text.assemble((f"{finding.status:<7}", COLOURS[finding.status]), text), soft_wrap=True)
        if finding.fix:  # a command that is broken into lines cannot be copied
            console.print(Text(f"{'':<{width + 9}}  fix: {printable(finding.fix)}"), soft_wrap=True)
    problems, warnings = (sum(finding.status == status for finding in findings.values()) for status in ("problem", "warning"))
    console.print(f"\nproblems: {problems}, warnings: {warnings}")


def show_survey(console: Console, found: Survey) -> None:
    """Print versions, the machine, and what each plugin could do on it."""
    hardware, system = found.hardware, found.system
    show_problem(console, hardware)
    driver = system.driver or ("of unknown version" if system.cards else "no NVIDIA driver")
    features = ", ".join(hardware.cpu_features) or "no wide units"
    lines = {
        "hwopt": f"{system.hwopt}, {system.python}, {system.operating_system}",
        "torch": f"{system.torch}, built for {f'CUDA {system.torch_cuda}' if system.torch_cuda else 'CPUs'}",
        "driver": driver + (f", for CUDA up to {system.driver_cuda}" if system.driver_cuda else ""),
    }
    for index, card in enumerate(system.cards):
        memory = f"{card.free_memory_gib:g} of {card.memory_gib:g} GiB free"
        lines[f"card {index}"] = f"{card.name}, {memory}, compute capability {'.'.join(map(str, card.compute_capability))}"
    lines |= {
        "hardware": f"{hardware.count} x {hardware.name}, {hardware.free_memory_gib:g} of {hardware.memory_gib:g} GiB free",
        "compute capability": f"{hardware.capability_text} ({hardware.architecture})",
        "host": f"{hardware.cpu_cores} cores, {hardware.cpu_memory_gib:g} GiB, {features}",
        "software": ", ".join(f"{name} {version}" for name, version in found.software.items()),
    }
    for label, text in lines.items():
        say(console, label, text)
    show_sheet(console, Sheet(("plugin", "here", "why"), [(a.name, a.decision, a.reason) for a in found.plugins], folded=2))
