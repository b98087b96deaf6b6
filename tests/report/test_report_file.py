"""`report.html` of a run: written however the run ends; a report that cannot be written never fails the run."""

import shlex
from pathlib import Path

import pytest
from runs.test_execute import Failing, make_plan

import hwopt
from hwopt import api
from hwopt.errors import NonFiniteError
from hwopt.records.run_files import PROCESSES, REPORT, read_status
from hwopt.report import run_files
from hwopt.report.run_files import with_run_files
from hwopt.runs.record import read_record
from hwopt.testing import Recorder


def test_resumed_run_has_one_line_for_each_process(tmp_path: Path) -> None:
    folder, cache = tmp_path / "run", tmp_path / "cache"
    plan = make_plan(tmp_path, save_steps=1)
    with pytest.raises(NonFiniteError):
        api.execute(plan, folder, with_run_files(Failing(NonFiniteError("the loss diverged."))), cache=cache)
    assert ": the loss diverged." in (folder / REPORT).read_text(encoding="utf-8"), "a failed run has a report too"
    api.execute(plan, folder, with_run_files(), cache=cache, resume=True)
    record = read_record(folder)
    assert [(entry["step"], entry["total_steps"], entry["samples"]) for entry in record.processes] == [(0, 3, 40), (2, 3, 40)]
    assert shlex.split(record.last["command"])
    assert set(record.last["data"]) == {"train", "eval"}
    assert record.last["metric_directions"]["f1"] is True
    assert record.held_gib["weights"] == pytest.approx(4 * plan.model.parameters / 2**30, rel=0.05)
    assert record.held_gib["optimizer_state"] == pytest.approx(2 * record.held_gib["weights"], rel=0.1)
    assert (folder / PROCESSES).read_text().count("\n") == 2


def test_report_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Recorder()
    monkeypatch.setattr(run_files, "page_of", lambda records: 1 / 0)
    summary = api.execute(make_plan(tmp_path), tmp_path / "run", with_run_files(heard), cache=tmp_path / "cache")
    assert summary["step"] == 3
    assert read_status(tmp_path / "run") == (0, "done")
    assert [text for text in heard.warnings if "report.html could not be written: division by zero" in text]


def test_train_of_the_package_writes_report_and_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(tmp_path)
    monkeypatch.setattr(api, "train", lambda *_, listener, **__: api.execute(plan, tmp_path / "run", listener))
    recorder = Recorder()
    assert hwopt.train(listener=recorder) == recorder.summary
    page = (tmp_path / "run" / REPORT).read_text(encoding="utf-8")
    for part in ("done, 3 steps", "1 of 1 plugins are active", "colour", "confusion matrix", "Loss over the steps"):
        assert part in page, part
    log = (tmp_path / "run" / "run.log").read_text().splitlines()
    assert log[-2:] == [f"note: The report of the run is {tmp_path / 'run' / REPORT}", "done"]
