"""What the launcher of `--processes` decides, without processes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hwopt.errors import InputError
from hwopt.runs import launch as processes
from hwopt.runs.launch import (
    NOTES,
    Ending,
    broadcast_folder,
    cause_of_death,
    leave_note,
    noted_ending,
    outcome_of,
    ranks_to_start,
    record_outcome,
)
from hwopt.runs.resume import Complete
from hwopt.runs.status import write_status


def test_a_run_with_nothing_left_to_do_is_found_by_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with 0 on each rank, and so does the launch."""
    monkeypatch.setenv(NOTES, str(tmp_path))
    write_status(tmp_path, 0, "done")
    assert broadcast_folder(tmp_path, None, Complete.exit_code)[2] == Complete.exit_code
    assert outcome_of(tmp_path, {}).exit_code == 0


def test_how_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert [ranks_to_start(asked, {}) for asked in ("1", "01", "3", "auto")] == [1, 1, 3, 1]
    monkeypatch.setattr(processes, "cpu_cores", lambda: 2)
    with pytest.raises(InputError, match=r"--processes 64: .* 2 core\(s\) .* give 8 or fewer"):
        ranks_to_start("64", {})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [ranks_to_start(asked, {}) for asked in ("1", "2", "auto")] == [1, 2, 2]
    with pytest.raises(InputError, match="--processes 3: .* there are 2"):
        ranks_to_start("3", {})
    for asked in ("0", "-1", "two", "", "1.5", "9" * 5000):
        with pytest.raises(InputError, match="whole number above 0, or auto") as caught:
            ranks_to_start(asked, {})
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize("asked", ["1", "2", "auto"])
def test_inside_a_launcher(asked: str) -> None:
    with pytest.raises(InputError, match="RANK, WORLD_SIZE set.*Leave --processes out"):
        ranks_to_start(asked, {"RANK": "0", "WORLD_SIZE": "2"})
    assert ranks_to_start(asked, {"RANK": "0", "WORLD_SIZE": "2", NOTES: "/tmp/notes"}) == 1, "one of our own"


def failed(rank: int, exit_code: int, when: int = 100) -> ProcessFailure:
    failure = ProcessFailure(local_rank=rank, pid=1, exitcode=exit_code, error_file="")
    failure.timestamp = when
    return failure


def test_what_went_wrong_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NOTES, str(tmp_path))

    def ended(*failures: ProcessFailure) -> tuple[int, str]:
        ending = outcome_of(tmp_path, {failure.local_rank: failure for failure in failures})
        return ending.exit_code, ending.message

    assert ended(failed(0, -15), failed(1, -15)) == (9, "error: the ranks ended without a word (rank 0: -15, rank 1: -15)")
    assert ended() == (9, "error: the ranks ended without a word (no exit codes)")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    assert leave_note(7, "error: rank 1 ended", secondhand=True)
    write_status(tmp_path, 7, "too large")
    assert ended(failed(0, 7), failed(1, 143)) == (7, "error: rank 1 ended")
    (tmp_path / "run-folder").write_text(str(tmp_path))
    assert ended(failed(0, 7), failed(1, 143)) == (7, "error: too large"), "rank 1 was ended before it could note it"
    monkeypatch.setenv("RANK", "1")
    assert leave_note(7, "error: too large", secondhand=False)
    assert ended(failed(0, 7), failed(1, 7)) == (7, "error: too large"), "although it was noted later"
    monkeypatch.setenv("RANK", "0")
    assert leave_note(1, "error: connection closed", secondhand=False)
    assert ended(failed(0, 1), failed(2, -9)) == (9, f"error: rank 2 {cause_of_death(9)}")
    assert ended(failed(0, 1), failed(2, -11))[1].startswith("error: rank 2 was ended by SIGSEGV")
    assert ended(failed(0, 1), failed(2, -9, when=130)) == (1, "error: connection closed"), "the launcher killed it"
    assert leave_note(143, "terminated", secondhand=False)
    assert ended(failed(1, 7), failed(0, 143)) == (7, "error: too large"), "the launcher ended rank 0"
    monkeypatch.setenv("RANK", "1")
    assert leave_note(130, "interrupted", secondhand=False)
    assert ended(failed(0, 143), failed(1, 130)) == (143, "terminated"), "a signal to rank 0, which came first"
    (tmp_path / "rank-0.json").unlink()
    assert ended(failed(0, -15), failed(1, 130)) == (130, "interrupted"), "the launcher ended rank 0"
    assert ended(failed(0, 1), failed(1, 130))[0] == 9, "rank 0 has left no note"
    assert leave_note(9, "error: nothing has happened", secondhand=False, kills=True)
    now = int(time.time())
    assert ended(failed(0, -9, now), failed(1, 9, now))[1] == "error: nothing has happened", "rank 1 has killed rank 0"
    assert ended(failed(0, -9, now - 9), failed(1, 9, now))[1] == f"error: rank 0 {cause_of_death(9)}", "which rank 1 waited for"
    (tmp_path / "rank-1.json").write_text('{"exit_code": 7, "mess')
    assert noted_ending(tmp_path, 1) is None


def test_the_status_says_what_the_command_says(tmp_path: Path) -> None:
    record_outcome(tmp_path, Ending(9, "error: gone"))  # no run folder was noted
    (tmp_path / "run-folder").write_text(str(tmp_path / "runs" / "job"))
    record_outcome(tmp_path, Ending(9, "error: gone"))  # nor made
    (tmp_path / "runs" / "job").mkdir(parents=True)
    record_outcome(tmp_path, Ending(9, "error: gone"))
    assert json.loads((tmp_path / "runs" / "job" / "status.json").read_text()) == {"exit_code": 9, "message": "gone"}
