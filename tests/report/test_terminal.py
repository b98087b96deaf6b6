"""The output of `hwopt plan`: the plan, and with --values every value and its place."""

from dataclasses import replace
from pathlib import Path

import pytest
from report.printed import printed

from hwopt.planning.plan import Plan
from hwopt.report.terminal import show_plan, show_values
from hwopt.testing import plan_for, tiny_job, tiny_profile


def tiny_plan(folder: Path) -> Plan:
    plan = plan_for(tiny_profile(dataloader={}), tiny_job(folder, max_steps=7))
    (batch, loader) = plan.entries
    provenance = {"num_workers": f"decided here, instead of 'auto' ({folder / 'mine.toml'}:12)", "pin_memory": "--set"}
    loader = replace(loader, provenance={**loader.provenance, **provenance})
    return replace(plan, entries=(batch, loader), provenance={**plan.provenance, "training.seed": f"{folder / 'job.toml'}:3"})


def test_torch_that_cannot_use_the_card_is_reported_first(tmp_path: Path) -> None:
    plan = tiny_plan(tmp_path)
    broken = replace(plan, hardware=replace(plan.hardware, problem="torch is built for CPUs"))
    assert printed(lambda console: show_plan(console, broken)).startswith("PROBLEM: torch is built for CPUs\n")


def test_values_come_with_the_file_and_line_that_set_them(tmp_path: Path) -> None:
    shown = printed(lambda console: show_values(console, tiny_plan(tmp_path)), 200)
    found = {line.split()[0]: line for line in shown.splitlines()}
    assert found["plugins.dataloader.num_workers"].endswith("decided here, instead of 'auto' (mine.toml:12)")
    assert found["plugins.dataloader.pin_memory"].endswith("--set")
    assert found["training.seed"].endswith("job.toml:3")


def test_run_shows_the_verdict_first_and_one_line_for_what_is_applied(tmp_path: Path) -> None:
    plan = tiny_plan(tmp_path)
    lines = printed(lambda console: show_plan(console, plan, verbose=False), 80).splitlines()
    assert lines[0] == "plan: 8 rows a step; 2 of 2 plugins on"
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[-len(plan.entries) :]] == [entry.name for entry in plan.entries]


def test_output_that_is_no_terminal_is_not_folded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    plan = tiny_plan(tmp_path)
    piped, shown = (printed(lambda console: show_plan(console, plan), width).splitlines() for width in (None, 40))
    assert max(map(len, piped)) > 80 >= 2 * max(map(len, shown))
    assert not any(line.endswith(" ") for line in piped)
