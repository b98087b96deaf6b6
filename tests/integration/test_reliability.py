"""Reliability on one rank: killed, interrupted and suspended runs lose no step and resume to the same bits.

Each run is a fork of the test process, so that a hundred runs take minutes. Every tensor of the final state is compared with that
of an undisturbed run. The short forms run by default, the full ones as `soak`; `figures` keeps the measurements for
docs/reliability.md.
"""

import errno
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from integration.forks import until, wait_for_exit
from integration.reliability import Work, newest_valid_step, status, step_of

pytestmark = [pytest.mark.daily, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")]

Figures = Callable[..., None]


@pytest.fixture(scope="module")
def work(warm: None, tmp_path_factory: pytest.TempPathFactory) -> Work:
    work = Work(tmp_path_factory.mktemp("reliability"), last=30)
    work.write(learning_rate=1e-2, eval_steps=7, save_steps=5, logging_steps=3)
    return work


@pytest.fixture(scope="module")
def undisturbed(work: Work) -> Path:
    return work.finish("undisturbed")


@pytest.fixture(scope="module")
def run_seconds(work: Work, undisturbed: Path) -> float:
    """Seconds of a complete run in a child process."""
    began = time.monotonic()
    assert work.bits(work.finish("timed")) == work.bits(undisturbed)
    return time.monotonic() - began


@pytest.mark.parametrize("kills", [pytest.param(5, id="short"), pytest.param(500, id="full", marks=pytest.mark.soak)])
def test_killed_run_resumes_exactly(work: Work, undisturbed: Path, run_seconds: float, kills: int, figures: Figures) -> None:
    """A fifth of the kills is at a chosen operation of a save. A tenth of the runs is killed again after the resume."""
    chance = random.Random(kills)
    killed = inside = twice = 0
    while killed < kills:
        name = f"killed-{killed}"
        killed_twice = killed % 10 == 9
        for _ in range(2 if killed_twice else 1):
            in_save = killed % 5 == 4
            dies = partial(at_disk_change, chance.randint(1, 150), kill_myself)
            pids = work.started(name, disturb=dies if in_save else lambda: None)
            if not in_save:
                time.sleep(chance.uniform(0.05, run_seconds))
                os.kill(pids[0], signal.SIGKILL)
            if wait_for_exit(pids[0]) == -9:  # else the run had ended
                killed, inside, twice = killed + 1, inside + in_save, twice + killed_twice
        work.resumes_exactly(name, undisturbed)
    figures(
        "SIGKILL anywhere, resume",
        f"{killed} kills ({inside} inside a save, {twice} of runs that were killed twice): 0 different hashes of weights or "
        "optimizer state, 0 steps lost or repeated",
    )


@pytest.mark.parametrize("times", [pytest.param(4, id="short"), pytest.param(200, id="full", marks=pytest.mark.soak)])
def test_signal_saves_the_run(work: Work, undisturbed: Path, run_seconds: float, times: int, figures: Figures) -> None:
    """The signal comes at a random moment of training. The run saves its current step and resumes to the same bits."""
    chance = random.Random(times)
    sent = 0
    while sent < times:
        name = f"signalled-{sent}"
        number = (signal.SIGTERM, signal.SIGINT)[sent % 2]
        run = work.run(name)
        (pid,) = work.started(name)
        until((run / "metrics.jsonl").exists)  # the first row is written after step 3
        time.sleep(chance.uniform(0, run_seconds / 3))
        os.kill(pid, number)
        code = wait_for_exit(pid)
        if code == 0:  # the run had ended before the signal
            shutil.rmtree(run)
            continue
        assert code == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
        assert status(run)["exit_code"] == code
        if not (run / "final").exists():
            assert f"after step {newest_valid_step(run)}, saved" in status(run)["message"]
        else:
            assert "after the last step: final/ is complete" in status(run)["message"]
        work.resumes_exactly(name, undisturbed)
        sent += 1
    figures("SIGTERM/SIGINT at random moments", f"{sent} of {sent} on one rank saved the current step, exit 143/130")


def at_disk_change(call: int, action: Callable[[], None], counted: Any = None) -> None:
    """Call `action` at the `call`-th disk operation of the writer thread. The file `counted` gets the number of operations."""
    made = 0

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def watching(*arguments: Any, **named: Any) -> Any:
            nonlocal made
            if threading.current_thread().name.startswith("hwopt-writer"):
                made += 1
                if counted is not None:
                    os.pwrite(counted, made.to_bytes(4, "little"), 0)
                if made == call:
                    action()
            return function(*arguments, **named)

        return watching

    for name in ("fsync", "rename", "unlink", "mkdir", "rmdir"):
        setattr(os, name, watched(getattr(os, name)))
    import safetensors.torch

    setattr(safetensors.torch, "serialize_file", watched(safetensors.torch.serialize_file))  # noqa: B010


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def disk_operations_of_saves(work: Work, tmp_path: Path) -> int:
    """The number of disk operations in the saves of a run."""
    with open(tmp_path / "changes", "w+b") as file:
        work.finish("counted", disturb=partial(at_disk_change, 0, lambda: None, file.fileno()))
        found = int.from_bytes(os.pread(file.fileno(), 4, 0), "little")
    shutil.rmtree(work.run("counted"))
    return found


@pytest.mark.parametrize("every", [pytest.param(47, id="short"), pytest.param(1, id="full", marks=pytest.mark.soak)])
@pytest.mark.parametrize("dies", [True, False], ids=["dies", "fails"])
def test_failed_save_keeps_a_valid_checkpoint(
    work: Work, undisturbed: Path, tmp_path: Path, every: int, dies: bool, figures: Figures
) -> None:
    """Each disk operation of the saves fails once. At most the checkpoint that is being written may be lost."""
    changes = disk_operations_of_saves(work, tmp_path)
    assert changes > 50
    action = kill_myself if dies else disk_full
    tried = survived = most_lost = 0
    for call in range(1, changes + 1, every):
        name = f"{'dying' if dies else 'failing'}-{call}"
        (pid,) = work.started(name, disturb=partial(at_disk_change, call, action))
        code = wait_for_exit(pid)
        run = work.run(name)
        assert code in ((-9,) if dies else (6, 0)), call  # 0: a failed removal of an old checkpoint does not end the run
        if code == 6:
            assert status(run)["exit_code"] == 6
            message = status(run)["message"]
            assert re.search(r"needs \d+\.\d{3} GiB, (\d+\.\d{3} GiB were written, |and )\d+\.\d{3} GiB are free", message), (
                message
            )
        done = step_of(run)
        # the checkpoint that was being written is lost; training continues during the write, until the next one is due
        newest = newest_valid_step(run)
        assert newest >= done // 5 * 5 - 5, call
        most_lost = max(most_lost, done - newest)
        if call % (5 * every) == 1:
            work.resumes_exactly(name, undisturbed)
        else:
            shutil.rmtree(run)
        tried, survived = tried + 1, survived + 1
    if dies:
        lost = f"at most the checkpoint being written is lost, and the steps trained meanwhile ({most_lost}; saved every 5)"
        figures("every write, fsync, rename, remove of a save dies there", f"0 of {tried} leave no valid checkpoint; {lost}")
    else:
        figures(
            "disk full at each of them", f"{survived} of {tried}: the old checkpoint survives; exit 6 with bytes needed and free"
        )
