"""`hwopt report`, `compare` and `watch`: their output, and bad input."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import hwopt
from report.run_folders import PROCESS, changed, log_rows, write_run
from runs.test_record import owned

RUNNING = (None, "running")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with the runs a and b, a killed one, one of another job, and one without metrics."""
    write_run(tmp_path / "a", log_rows(20))
    write_run(tmp_path / "b", log_rows(20, 150, seed=1))
    write_run(tmp_path / "killed", log_rows(5), status=RUNNING)
    write_run(tmp_path / "other", log_rows(5), processes=[changed(PROCESS, data__train="xyz")])
    write_run(tmp_path / "empty", status=(7, "the job does not fit"))
    (tmp_path / "no-run").mkdir()
    return tmp_path


def test_report_of_one_run_is_in_its_folder(runs: Path) -> None:
    done = hwopt("report", "a", cwd=runs)
    assert done.returncode == 0
    assert done.stdout.startswith(f"{Path('a', 'report.html')}: ")
    assert "done, 100 steps" in (runs / "a" / "report.html").read_text()


def test_report_of_several_runs_is_in_this_folder_or_where_it_is_asked_for(runs: Path) -> None:
    assert hwopt("report", "a", "b", cwd=runs).returncode == 0
    assert "2 runs: a, b" in (runs / "report.html").read_text()
    assert hwopt("report", "a", "b", "-o", "both.html", cwd=runs).returncode == 0
    assert (runs / "both.html").read_bytes() == (runs / "report.html").read_bytes()
    again = hwopt("report", "a", "b", "-o", "both.html", cwd=runs)
    assert (again.returncode, "both.html: exists; give another name, or --force" in again.stderr) == (2, True)
    assert hwopt("report", "a", "b", "-o", "both.html", "--force", cwd=runs).returncode == 0
    assert hwopt("report", "a", "-o", "missing/one.html", cwd=runs).returncode == 6


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("report missing", "missing: no such run folder"),
        ("report no-run", "no-run is not a run folder"),
        ("report empty", "empty has no metrics yet: exit code 7 at step 0 of 100. the job does not fit"),
        ("compare a", "Give two or more"),
        ("compare a missing", "is neither a run folder nor a profile"),
        ("compare a rtx3070_8gb", "a is a run and rtx3070_8gb a profile"),
        ("compare rtx3070_8gb rtx3091_24gb", "Did you mean 'rtx3090_24gb'?"),
        ("compare a other", "the samples of data.train differ"),
        ("compare a b --job job.toml", "--job and --set are for profiles"),
        ("report --watch no-run", "no-run is not a run folder"),
        ("report --watch a empty", "--watch follows one run and writes no file"),
    ],
)
def test_bad_input_ends_with_one_message_and_exit_code_2(command: str, message: str, runs: Path) -> None:
    done = hwopt(*command.split(), cwd=runs)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
    assert not list(runs.glob("report.html"))


def test_compare_shows_figures_and_ratio(runs: Path) -> None:
    done = hwopt("compare", "a", "b", cwd=runs)
    assert done.returncode == 0
    assert "b against a: 1." in done.stdout
    found = json.loads(hwopt("compare", "a", "b", "--format", "json", cwd=runs).stdout)
    assert [run["folder"] for run in found["runs"]] == ["a", "b"]


def test_runs_of_different_jobs_are_compared_on_request(runs: Path) -> None:
    done = hwopt("compare", "a", "other", "--anyway", cwd=runs)
    assert done.returncode == 0
    assert "different jobs: the samples of data.train differ" in done.stdout


def test_watch_of_an_ended_run_has_its_exit_code(runs: Path) -> None:
    done = hwopt("report", "--watch", "a", cwd=runs)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[-1] == "a: done, 100 steps"
    assert len(lines) == 21
    done = hwopt("report", "--watch", "empty", cwd=runs)
    assert (done.returncode, done.stdout) == (7, "empty: exit code 7 at step 0 of 100: the job does not fit\n")


def test_watch_of_a_killed_run_says_how_to_resume_it(runs: Path) -> None:
    done = hwopt("report", "--watch", "killed", "--interval", "2", cwd=runs)
    assert done.returncode == 9
    assert "the process was killed after step 25. Resume it with --resume" in done.stderr


def test_watch_ends_cleanly_at_an_interrupt(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    owned(runs / "killed")
    monkeypatch.setattr(time, "sleep", interrupt)
    done = hwopt("report", "--watch", "killed", cwd=runs)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "Stopped watching. The run continues."


@pytest.mark.integration
def test_commands_for_runs_import_no_torch(runs: Path) -> None:
    script = (
        "import sys; from hwopt.cli import run_command; "
        "codes = [run_command(words.split()) for words in ('report a', 'compare a b', 'report --watch a')]; "
        "sys.exit(codes != [0, 0, 0] or 'torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=runs, capture_output=True, check=False).returncode == 0
