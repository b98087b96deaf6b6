"""The command line in separate processes: imports, signals, closed pipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli.test_cli import write_job


def hwopt(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hwopt", *arguments],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_run_writes_a_folder_that_reproduces_it(tmp_path: Path) -> None:
    write_job(tmp_path)  # job.toml is the default job file
    done = hwopt("run", "--profile", "rtx3070_8gb_batch16", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in (
        "job: job.toml of this folder",
        "no CUDA device",
        "precision",
        "fallback",
        "skip",
        "evidence",
        "summary",
        "train_runtime",
    ):
        assert word in done.stdout
    folder = tmp_path / "runs" / "job-rtx3070_8gb_batch16"
    names = {path.name for path in folder.iterdir()}
    assert {"job.toml", "profile.toml", "plan.json", "evidence.json", "metrics.jsonl", "status.json", "final"} <= names
    assert json.loads((folder / "status.json").read_text())["exit_code"] == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {"step", "epoch", "time", "loss", "learning_rate", "grad_norm", "tokens_per_second", "data_wait"} <= set(rows[0])
    assert any({"eval_loss", "eval_accuracy", "eval_f1"} <= set(row) for row in rows)
    evidence = json.loads((folder / "evidence.json").read_text())["plugins"]
    assert all(item["status"] != "inactive" for item in evidence), evidence

    again = hwopt("run", str(folder / "job.toml"), "--profile", str(folder / "profile.toml"), "--name", "again", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    losses = [
        [json.loads(line).get("loss") for line in (f / "metrics.jsonl").read_text().splitlines()]
        for f in (folder, tmp_path / "runs" / "again")
    ]
    assert losses[0] == losses[1], "the files of a run folder repeat the run"


HEAVY = {"torch", "numpy", "transformers", "pydantic", "accelerate", "datasets"}
START = (
    "import json, sys, time, contextlib, io\n"
    "from hwopt.cli import run_command\n"
    "sys.argv = ['hwopt', *{arguments!r}]\n"
    "with contextlib.redirect_stdout(io.StringIO()):\n"
    "    code = run_command({arguments!r})\n"
    "print(json.dumps([code, sorted(set(sys.modules) & {heavy!r}), time.process_time()]))\n"
)


@pytest.mark.parametrize(
    ("arguments", "allowed"), [(["--help"], set()), (["profiles"], set()), (["plugins", "list"], {"pydantic"})]
)
def test_listings_import_no_heavy_package(arguments: list[str], allowed: set[str], tmp_path: Path) -> None:
    """Imports take most of the start-up time; benchmarks/startup.py measures it."""
    code = START.format(arguments=arguments, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    exit_code, imported, _seconds = json.loads(done.stdout)
    assert exit_code == 0
    assert set(imported) <= allowed


@pytest.mark.parametrize(
    ("number", "code", "workers"),
    [
        (signal.SIGINT, 130, 2),
        pytest.param(signal.SIGINT, 130, 0, marks=pytest.mark.soak),
        *(pytest.param(signal.SIGTERM, 143, workers, marks=pytest.mark.soak) for workers in (0, 2)),
    ],
)
def test_signal_is_recorded_in_the_status(number: signal.Signals, code: int, workers: int, tmp_path: Path) -> None:
    write_job(tmp_path, max_steps=100_000)
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "hwopt",
            "run",
            "--profile",
            "cpu",
            "--name",
            "long",
            "--set",
            f"plugins.dataloader.num_workers={workers}",
        ],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # a background job of a shell ignores SIGINT, and its child processes inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 3/"):
            break
    os.killpg(process.pid, number)  # as a terminal does: the workers get it too
    try:
        rest, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == code, rest
    assert "bug in hwopt" not in rest
    assert json.loads((tmp_path / "runs" / "long" / "status.json").read_text())["exit_code"] == code


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_signal_stops_the_run_when_stderr_is_full(tmp_path: Path) -> None:
    write_job(tmp_path, max_steps=100_000)
    with open("/dev/full", "w", encoding="utf-8") as full:
        process = subprocess.Popen(
            [sys.executable, "-m", "hwopt", "run", "--profile", "cpu", "--name", "long"],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
        )
    assert process.stdout is not None
    try:
        assert any(line.startswith("step 3/") for line in process.stdout)
        process.terminate()
        process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 143
    assert list((tmp_path / "runs" / "long").glob("checkpoint-*"))


@pytest.mark.parametrize(
    "command", ["run", *(pytest.param(each, marks=pytest.mark.soak) for each in ("plan", "plan --format json"))]
)
def test_closed_pipe_does_not_end_the_command(command: str, tmp_path: Path) -> None:
    """For example `hwopt plan | head -1`. A run with a closed pipe trains to its end."""
    write_job(tmp_path, max_steps=2)
    with subprocess.Popen(
        [sys.executable, "-m", "hwopt", *command.split(), "--profile", "cpu"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read().decode()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    if command == "run":
        status = next((tmp_path / "runs").glob("*/status.json"))
        assert json.loads(status.read_text())["exit_code"] == 0
        assert (status.parent / "final" / "model.safetensors").is_file()
