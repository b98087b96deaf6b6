"""Signals: the first one, its exception, and the handlers after the block."""

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from hwopt.errors import StorageError, WorkerDiedError
from hwopt.system import signals

BOTH = [(signal.SIGINT, 130, KeyboardInterrupt), (signal.SIGTERM, 143, SystemExit)]


@pytest.fixture
def handlers() -> None:
    """Install the handlers; the fixture of the session removes them."""
    signals.install_handlers()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of the handlers in seconds, set by the test."""
    now = [100.0]
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.mark.parametrize(("number", "code", "error"), BOTH)
def test_first_signal_raises_and_is_remembered(
    number: signal.Signals, code: int, error: type[BaseException], handlers: None
) -> None:
    with pytest.raises(error) as caught:
        signal.raise_signal(number)
    assert signals.received() == code
    assert signals.exit_code(caught.value) == code


@pytest.mark.parametrize(("number", "code", "error"), BOTH)
def test_first_signal_is_deferred_inside_the_block(
    number: signal.Signals, code: int, error: type[BaseException], handlers: None
) -> None:
    received: list[int] = []
    with signals.deferred(received.append):
        signal.raise_signal(number)
        signal.raise_signal(number)  # the copy that a launcher forwards
    assert (received, signals.received()) == ([number], code)
    with pytest.raises(error):
        signal.raise_signal(number)


def test_second_signal_exits_after_the_callbacks(handlers: None, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    class Exited(BaseException):
        pass

    def leave(code: int) -> None:
        calls.append(("exit", code))
        raise Exited

    monkeypatch.setattr(os, "_exit", leave)
    with signals.deferred(), signals.before_forced_exit(lambda code: calls.append(("callback", code))):
        signal.raise_signal(signal.SIGTERM)
        clock[0] += signals.DUPLICATE_SECONDS
        signal.raise_signal(signal.SIGTERM)
        assert calls == []
        clock[0] += 0.01
        with pytest.raises(Exited):
            signal.raise_signal(signal.SIGTERM)
    assert calls == [("callback", 143), ("exit", 143)]


def test_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals.install_handlers()
    signal.raise_signal(signal.SIGINT)
    assert signals.received() is None
    assert signals.handlers_installed()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_temporary_handlers_leave_those_of_the_caller() -> None:
    def own(number: int, frame: object) -> None:
        raise AssertionError("not sent")

    signal.signal(signal.SIGTERM, own)
    with signals.temporary_handlers():
        assert signal.getsignal(signal.SIGTERM) is own
        assert not signals.handlers_installed()


def test_remote_signal_counts_as_received_once(handlers: None, clock: list[float]) -> None:
    signals.record_remote_signal(143)
    signals.record_remote_signal(130)
    assert signals.received() == 143
    with signals.deferred():
        signal.raise_signal(signal.SIGTERM)  # the launcher's copy
    assert signals.received() == 143


@pytest.fixture
def terminated(handlers: None) -> Iterator[None]:
    with signals.deferred():
        signal.raise_signal(signal.SIGTERM)
        yield


def test_exit_code_of_an_effect_is_the_signals_and_that_of_an_own_cause_is_kept(terminated: None) -> None:
    assert signals.exit_code(WorkerDiedError("a data-loading worker died")) == 143
    assert signals.exit_code(RuntimeError("Connection closed by peer")) == 143
    assert signals.exit_code(StorageError("No space left on device")) == StorageError.exit_code == 6
