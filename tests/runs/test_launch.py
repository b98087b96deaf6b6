"""Decisions of the launcher behind `--processes`, without processes."""

from pathlib import Path

import pytest
import torch

from hwopt.errors import InputError
from hwopt.runs import launch as launching
from hwopt.runs.folder import write_status
from hwopt.runs.launch import broadcast_folder, launch_outcome, ranks_to_start
from hwopt.runs.rank_errors import LAUNCH_FOLDER, LaunchOutcome
from hwopt.runs.resume import AlreadyComplete


def test_launch_of_a_complete_run_exits_with_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank of a complete run exits with 0, and so does the launch."""
    monkeypatch.setenv(LAUNCH_FOLDER, str(tmp_path))
    write_status(tmp_path, 0, "done")
    assert broadcast_folder(tmp_path, None, AlreadyComplete.exit_code)[2] == AlreadyComplete.exit_code
    assert launch_outcome(tmp_path, {}) == LaunchOutcome(0, "")


def test_ranks_to_start_is_limited_by_devices_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert [ranks_to_start(asked, {}) for asked in ("1", "01", "3", "auto")] == [1, 1, 3, 1]
    monkeypatch.setattr(launching, "cpu_cores", lambda: 2)
    with pytest.raises(InputError, match=r"--processes 64: .* 2 CPU core\(s\) .* Give 8 or fewer"):
        ranks_to_start("64", {})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [ranks_to_start(asked, {}) for asked in ("1", "2", "auto")] == [1, 2, 2]
    with pytest.raises(InputError, match="--processes 3: .* found 2. Give 2 or fewer"):
        ranks_to_start("3", {})
    for asked in ("0", "two"):
        with pytest.raises(InputError, match="whole number above 0, or auto"):
            ranks_to_start(asked, {})


@pytest.mark.parametrize("asked", ["1", "2", "auto"])
def test_processes_option_is_refused_inside_a_launcher(asked: str) -> None:
    with pytest.raises(InputError, match="RANK, WORLD_SIZE set.*Leave --processes out"):
        ranks_to_start(asked, {"RANK": "0", "WORLD_SIZE": "2"})
    assert ranks_to_start(asked, {"RANK": "0", "WORLD_SIZE": "2", LAUNCH_FOLDER: "/tmp/launch"}) == 1, "a rank of run_ranks"
