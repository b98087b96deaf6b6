"""What a run prints: one live line on a terminal, evidence that is not active, the summary, and run.log."""

import re
from datetime import timedelta
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from report.printed import printed

from hwopt import api
from hwopt.plugin import Evidence
from hwopt.report.run_files import with_run_files
from hwopt.report.screen import Screen, Speed
from hwopt.report.terminal import Terminal
from hwopt.testing import plan_for, tiny_job, tiny_profile

ROW = {
    "step": 12_000,
    "loss": 1.65464,
    "learning_rate": 1e-4,
    "steps_per_second": 2.0,
    "tokens_per_second": 81_801.4,
    "samples_per_second": 64.0,
    "peak_memory_gib": 141.25,
    "data_wait": 0.01,
}


def run_of(total_steps: int, step: int = 0) -> Any:
    prepared = SimpleNamespace(train=range(100), eval=None, warnings=[])
    return SimpleNamespace(step=step, total_steps=total_steps, notes=[], prepared=prepared, folder=Path("runs/x"))


def test_live_line_fits_the_terminal() -> None:
    output = StringIO()
    screen = Screen(Terminal(file=output, force_terminal=True, color_system=None, width=80))
    screen.on_start(run_of(108_000))
    screen.on_log(run_of(108_000, 12_000), ROW)
    screen.progress.refresh()
    screen.close()
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in re.split(r"[\r\n]", output.getvalue())]
    shown = next(line for line in lines if line.startswith("step 12,000"))
    assert len(shown) <= 80
    for part in ("step 12,000/108,000", "ETA 13:20:00", "loss 1.6546", "81,801 tok/s", "141.25 GiB"):
        assert part in shown


def test_remaining_time_leaves_out_the_first_log_point() -> None:
    speed = Speed()
    speed.add({"steps_per_second": 0.01})
    assert speed.seconds_left(10) == timedelta(seconds=1000)
    speed.add({"steps_per_second": 10.0})
    assert speed.seconds_left(10) == timedelta(seconds=1)
    for _ in range(30):
        speed.add({"steps_per_second": 5.0})
    assert speed.seconds_left(10) == timedelta(seconds=2)


@pytest.mark.parametrize(
    ("best", "weights"),
    [
        ({"best_step": 1_200, "best_eval_f1": 0.91}, "the weights of step 1,200, which has the best eval_f1: 0.91"),
        ({}, "the weights of step 2,000, the last one: nothing was evaluated"),
    ],
)
def test_last_lines_say_which_weights_are_kept(best: dict[str, float], weights: str) -> None:
    run = run_of(2_000, 2_000)
    run.skeleton = None
    shown = printed(lambda console: Screen(console).on_finish(run, {"step": 2_000, **best}))
    assert f"model: runs/x/final, {weights} (open it with from_pretrained)" in shown


@pytest.mark.parametrize("verbose", [False, True])
def test_evidence_lists_what_is_not_active(verbose: bool) -> None:
    found = [
        (SimpleNamespace(name="precision"), Evidence.active("498 of 692 matmuls in bf16")),
        (SimpleNamespace(name="tf32"), Evidence.inactive("0 of 692 matmuls in fp32")),
    ]
    shown = printed(lambda console: Screen(console, verbose).on_evidence(run_of(10), found))
    assert "1 of 2 plugins are active" in shown
    assert "0 of 692 matmuls in fp32" in shown
    assert ("498 of 692" in shown) == verbose


def test_run_log_holds_what_the_run_printed(tmp_path: Path) -> None:
    plan = plan_for(tiny_profile(), tiny_job(tmp_path / "data", max_steps=4, save_steps=2))
    api.execute(plan, tmp_path / "run", with_run_files(), cache=tmp_path / "cache")
    log = (tmp_path / "run" / "run.log").read_text()
    for part in ("profile: tiny", "batch  ", "evidence: after step 1, ", "step 4/4", "eval at step 4", "summary", "done"):
        assert part in log, part
    api.execute(plan, tmp_path / "run", with_run_files(), cache=tmp_path / "cache", resume=True)
    assert (tmp_path / "run" / "run.log").read_text().startswith(log)
