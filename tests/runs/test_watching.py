"""Following a run of another process: until it ends, while it prepares, and after it was killed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from report.run_folders import PLAN, log_row, log_rows, write_run
from rich.console import Console
from runs.test_record import owned

from hwopt.errors import InputError
from hwopt.report.watch_screen import panel, plain_line
from hwopt.runs import watching
from hwopt.runs.folder import OWNER
from hwopt.runs.processes import objects
from hwopt.runs.record import read_record
from hwopt.runs.watching import MetricsTail, follow, last_warnings


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


def test_killed_run_is_given_up_after_a_while(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [log_row(5)], status=(None, "running"))
    assert len(list(follow(folder, 1.0, lambda seconds: None))) == 4
    assert len(list(follow(folder, 2.0, lambda seconds: None))) == 2


def test_run_that_prepares_its_data_is_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    owned(folder)

    def begin() -> None:
        (folder / "plan.json").write_text(json.dumps(PLAN))
        end(folder, 0)
        (folder / OWNER).unlink()

    assert [record.exit_code for record in follow(folder, 1.0, steps(lambda: None, begin))] == [0]


def test_folder_that_is_no_run_is_not_watched(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a run folder"):
        next(follow(tmp_path, 1.0, steps()))


def test_tail_reads_only_what_was_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, parsed = tmp_path / "metrics.jsonl", []
    monkeypatch.setattr(watching, "objects", lambda lines: parsed.append(lines.count("\n") + 1) or objects(lines))
    tail = MetricsTail(path)
    assert tail.read() == [], "no log point yet"
    path.write_text("".join(json.dumps(log_row(step)) + "\n" for step in (1, 2)) + '{"step": 3')
    assert [row["step"] for row in tail.read()] == [1, 2], "the third line is incomplete"
    with open(path, "a") as file:
        file.write(', "loss": 1.0}\n')
    assert [row["step"] for row in tail.read()] == [1, 2, 3]
    assert parsed == [2, 1]


def test_tail_starts_again_if_a_resumed_run_writes_the_file_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    path.write_text("".join(json.dumps(log_row(step)) + "\n" for step in range(1, 6)))
    assert len(tail.read()) == 5
    staging = tmp_path / "metrics.partial"
    staging.write_text("".join(json.dumps(log_row(step)) + "\n" for step in (1, 2, *range(103, 110))))
    staging.replace(path)
    assert [row["step"] for row in tail.read()] == [1, 2, *range(103, 110)]
    path.write_text(json.dumps(log_row(1)) + "\n")
    assert [row["step"] for row in tail.read()] == [1]


def test_last_warnings_of_the_log_are_shown(tmp_path: Path) -> None:
    assert last_warnings(tmp_path) == []
    lines = ["note: x", *(f"WARNING: {number}" for number in range(5)), "step 5"]
    (tmp_path / "run.log").write_text("\n".join(lines))
    assert last_warnings(tmp_path) == ["WARNING: 2", "WARNING: 3", "WARNING: 4"]
    with open(tmp_path / "run.log", "a") as file:
        file.write("\nstep" * 20_000 + "\nWARNING: new")
    assert last_warnings(tmp_path) == ["WARNING: new"], "a long log is read from its end"


@pytest.mark.parametrize("width", [80, 120])
def test_panel_has_progress_speed_memory_and_warnings(width: int, tmp_path: Path) -> None:
    use = {"power_watts": 181.2, "temperature_celsius": 71, "throttled_share": 0.25}
    rows = [row | {"gpu_utilization": 90.0 + index, "use": use} for index, row in enumerate(log_rows(10, noise=0.0))]
    record = read_record(owned(write_run(tmp_path / "run", rows, status=(None, "running"))))
    console = Console(width=width, record=True, file=StringIO())
    console.print(panel(record, ["WARNING: \x1b[31mred"], width))
    text = console.export_text()
    for part in (
        "run tiny, a CPU",
        "running, step 50 of 100",
        "time left 0:00:08",
        "loss 1.5000",
        "real tokens/s 2,000",
        "peak memory 3.50 GiB of 16.0 GiB",
        "GPU use 99 %, mean 94 %",
        "power 181 W",
        "temperature 71 °C",
        "samples with a lowered clock 25.0%",
        "waiting for data 1.0%",
        "evidence 1 of 1 plugins are active",
        "WARNING: \\x1b[31mred",
    ):
        assert part in re.sub(r" +", " ", text), part
    assert all(len(line) <= width for line in text.splitlines())


def test_panel_before_the_first_log_point_says_so(tmp_path: Path) -> None:
    record = read_record(owned(write_run(tmp_path / "run", status=(None, "running"))))
    console = Console(width=120, record=True, file=StringIO())
    console.print(panel(record, [], 80))
    assert "no log point yet" in console.export_text()


def test_line_of_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    record = read_record(write_run(tmp_path / "run", [log_row(5, loss=None)]))
    assert plain_line(record, record.rows[0]).startswith("step 5/100  loss nan  lr 0.001  6.25 steps/s  2,000 tokens/s")
