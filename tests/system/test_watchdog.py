"""The watchdog ends a process that makes no progress."""

import os
import threading
import time
from pathlib import Path

import pytest

from hwopt.system import watchdog
from hwopt.system.watchdog import Watchdog


class Exits:
    """Records the exits of a watchdog instead of ending the test process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.codes: list[int] = []
        self.reports: list[tuple[int, str]] = []
        self.exited = threading.Event()
        monkeypatch.setattr(os, "_exit", self.exit)

    def exit(self, code: int) -> None:
        self.codes.append(code)
        self.watchdog.stopped.set()
        self.exited.set()

    def watch(self, folder: Path, *, in_first_step: bool = False) -> Watchdog:
        self.watchdog = Watchdog(
            0.3, folder, 1, lambda code, message: self.reports.append((code, message)), None, lambda: in_first_step
        )
        return self.watchdog


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Exits:
    return Exits(monkeypatch)


def test_hung_run_exits_with_9_and_stack_traces(tmp_path: Path, exits: Exits) -> None:
    with exits.watch(tmp_path):
        assert exits.exited.wait(20)
    assert exits.codes == [9]
    ((code, message),) = exits.reports
    stacks = tmp_path / "stacks-rank-1.txt"
    assert code == 9
    assert message.startswith("rank 1: no progress for ")
    assert f"Stack traces: {stacks}." in message
    assert "test_hung_run_exits_with_9" in stacks.read_text()


def test_heartbeats_and_a_slow_first_step_prevent_the_exit(tmp_path: Path, exits: Exits) -> None:
    with exits.watch(tmp_path, in_first_step=True):
        time.sleep(1.0)
    with exits.watch(tmp_path) as watchdog:
        for _ in range(10):
            time.sleep(0.1)
            watchdog.heartbeat()
    assert exits.codes == []


def test_time_without_a_cpu_and_a_compile_are_no_hang(tmp_path: Path, exits: Exits, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded machine the compile of an optimizer's step took 775 s."""
    from torch._dynamo.convert_frame import compile_lock

    assert not watchdog.compiles()
    with exits.watch(tmp_path), compile_lock:
        time.sleep(1.0)
    assert exits.codes == []

    class Scheduled:
        def read_text(self, encoding: str) -> str:
            return f"0 {time.monotonic_ns()} 1"

    monkeypatch.setattr(watchdog, "SCHEDULED", Scheduled())
    with exits.watch(tmp_path):
        time.sleep(1.0)
    assert exits.codes == []
