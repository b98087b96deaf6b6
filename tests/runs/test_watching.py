"""Following a run of another process: until it ends, while it prepares, and after it was killed."""

import json
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path

from report.run_folders import PLAN, log_row, log_rows, write_run
from rich.console import Console
from runs.test_record import owned

from hwopt.report.screen import log_line, panel
from hwopt.runs.folder import OWNER
from hwopt.runs.record import follow, last_warnings, read_record


def steps(*actions: Callable[[], object]) -> Callable[[float], None]:
    """A `sleep` that does one of `actions` at each call."""
    left = list(actions)

    def sleep(seconds: float) -> None:
        left.pop(0)()

    return sleep


def append(folder: Path, step: int) -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(log_row(step)) + "\n")


def end(folder: Path, code: int) -> None:
    (folder / "status.json").write_text(json.dumps({"exit_code": code, "message": "done"}))


def test_run_is_followed_until_its_process_has_ended(tmp_path: Path) -> None:
    folder = owned(write_run(tmp_path / "run", [log_row(5)], status=(None, "running")))
    sleep = steps(lambda: append(folder, 10), lambda: end(folder, 0), (folder / OWNER).unlink)
    found = [(record.step, record.exit_code) for record in follow(folder, 1.0, sleep)]
    assert found == [(5, None), (10, None), (10, 0), (10, 0)], "an exit code of an earlier process does not end it"


def test_run_that_prepares_its_data_is_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    owned(folder)

    def begin() -> None:
        (folder / "plan.json").write_text(json.dumps(PLAN))
        end(folder, 0)
        (folder / OWNER).unlink()

    assert [record.exit_code for record in follow(folder, 1.0, steps(lambda: None, begin))] == [0]


def test_last_warnings_of_the_log_are_shown(tmp_path: Path) -> None:
    assert last_warnings(tmp_path) == []
    lines = ["note: x", *(f"WARNING: {number}" for number in range(5)), "step 5"]
    (tmp_path / "run.log").write_text("\n".join(lines))
    assert last_warnings(tmp_path) == ["WARNING: 2", "WARNING: 3", "WARNING: 4"]


def test_panel_has_progress_speed_memory_and_warnings(tmp_path: Path) -> None:
    rows = [row | {"gpu_utilization": 90.0} for row in log_rows(10, noise=0.0)]
    record = read_record(owned(write_run(tmp_path / "run", rows, status=(None, "running"))))
    console = Console(width=80, record=True, file=StringIO())
    console.print(panel(record, ["WARNING: \x1b[31mred"], 80))
    text = re.sub(r"\s+", " ", console.export_text())
    for part in (
        "run tiny, a CPU",
        "running, step 50 of 100",
        "step 50/100 ETA 0:00:08 loss 1.5000",
        "2,000 tokens/s",
        "peak 3.50 GiB GPU 90 % data wait 1%",
        "WARNING: \\x1b[31mred",
    ):
        assert part in text, part


def test_line_of_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    record = read_record(write_run(tmp_path / "run", [log_row(5, loss=None)]))
    assert log_line(record.rows[0], record.total_steps).startswith("step 5/100  loss nan  lr 0.001  6.25 steps/s  2,000 tokens/s")
