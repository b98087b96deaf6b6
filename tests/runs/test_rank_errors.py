"""Which rank's error ends a launch."""

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hwopt.runs.folder import write_status
from hwopt.runs.launch import launch_outcome
from hwopt.runs.rank_errors import ERROR_FILE, LAUNCH_FOLDER, describe_death, report_error


class FailedRanks:
    """Ranks whose error files are read back as torch elastic does."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        monkeypatch.setenv(LAUNCH_FOLDER, str(folder))

    def error_file(self, rank: int) -> Path:
        return self.folder / f"error-{rank}.json"

    def report(self, rank: int, *error: Any, **flags: bool) -> None:
        self.monkeypatch.setenv(ERROR_FILE, str(self.error_file(rank)))
        assert report_error(*error, **flags)

    def outcome(self, *exit_codes: tuple[int, int] | tuple[int, int, float]) -> tuple[int, str]:
        """The launch's exit code and message for (rank, exit code, seconds after the first failure)."""
        failures = {}
        for rank, exit_code, *later in exit_codes:
            failure = ProcessFailure(local_rank=rank, pid=1, exitcode=exit_code, error_file=str(self.error_file(rank)))
            failure.timestamp += int(later[0]) if later else 0
            failures[rank] = failure
        outcome = launch_outcome(self.folder, failures)
        return outcome.exit_code, outcome.message


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FailedRanks:
    return FailedRanks(tmp_path, monkeypatch)


def test_ranks_without_an_error_report(ranks: FailedRanks) -> None:
    assert ranks.outcome((0, -15), (1, -15)) == (
        9,
        "error: all ranks exited without an error report (exit codes: rank 0: -15, rank 1: -15)",
    )
    assert ranks.outcome() == (9, "error: all ranks exited without an error report (exit codes: unknown)")


def test_secondhand_error_is_not_the_cause(ranks: FailedRanks) -> None:
    ranks.report(0, 7, "error: rank 1 ended", secondhand=True)
    write_status(ranks.folder, 7, "too large")
    assert ranks.outcome((0, 7), (1, 143)) == (7, "error: rank 1 ended")
    (ranks.folder / "run-folder").write_text(str(ranks.folder))
    assert ranks.outcome((0, 7), (1, 143)) == (7, "error: too large"), "rank 1 was ended before it could report"
    ranks.report(1, 7, "error: too large")
    assert ranks.outcome((0, 7), (1, 7)) == (7, "error: too large"), "rank 0 is the cause although it reported later"


def test_killed_rank_is_the_cause_unless_the_launcher_killed_it(ranks: FailedRanks) -> None:
    ranks.report(0, 1, "error: connection closed")
    assert ranks.outcome((0, 1), (2, -9)) == (9, f"error: rank 2 {describe_death(9)}")
    assert ranks.outcome((0, 1), (2, -9, 5)) == (9, f"error: rank 2 {describe_death(9)}"), "a busy launcher noticed it late"
    assert ranks.outcome((0, 1), (2, -11))[1].startswith("error: rank 2 was ended by SIGSEGV")
    assert ranks.outcome((0, 1), (2, -9, 30)) == (1, "error: connection closed"), "the launcher killed rank 2"


def test_signal_to_one_rank_is_the_cause(ranks: FailedRanks) -> None:
    ranks.report(0, 143, "terminated")
    ranks.report(1, 130, "interrupted")
    assert ranks.outcome((0, 143), (1, 130)) == (143, "terminated"), "the first signal"
    ranks.error_file(0).unlink()
    assert ranks.outcome((0, -15), (1, 130)) == (130, "interrupted"), "the launcher ended rank 0"
    assert ranks.outcome((0, 1), (1, 130))[0] == 9, "rank 0 failed without a report"
    ranks.report(1, 7, "error: too large")
    assert ranks.outcome((0, 143), (1, 7)) == (7, "error: too large"), "the launcher ended rank 0"


def test_rank_whose_watchdog_killed_the_others_is_the_cause(ranks: FailedRanks) -> None:
    ranks.report(1, 9, "error: no progress", killed_others=True)
    assert ranks.outcome((0, -9), (1, 9)) == (9, "error: no progress")
    assert ranks.outcome((0, -9, -9), (1, 9)) == (9, f"error: rank 0 {describe_death(9)}"), "rank 1 waited for rank 0"
