"""SIGINT and SIGTERM: which one came, whatever became of the exception that it raised.

Python swallows what a handler raises inside a callback (while a data-loading worker is forked, say), and a signal to the whole
group also kills the workers, whose death then looks like the cause. While a run is patient, the first signal only asks: the step
is finished and saved. The second one ends the process at once.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from hwopt.errors import HwoptError, WorkerDiedError, exit_code_of

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
ECHO = 1.0
"""Seconds in which a launcher, or `timeout`, passes on what the process has got from the terminal as well."""
LAST_STEP = 20.0
"""Seconds that a data-loading process has left after SIGTERM."""

PR_SET_PDEATHSIG = 1
"""Of Linux's prctl(2)."""

_received: list[tuple[int, float]] = []
_heard: list[Callable[[int], None]] = []
"""Who is patient at present, and wants to be told."""
_leave: list[Callable[[int], None]] = []


def listen() -> None:
    """End the process by KeyboardInterrupt or SystemExit at either signal, and remember the first."""
    for number in EXIT_CODES:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    _received.clear()
    if hasattr(os, "register_at_fork"):
        # a child's signals must not be heard as this process's own
        os.register_at_fork(after_in_child=_deaf)


def _deaf() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


def listens() -> bool:
    """Whether `listen` was called, so that signals of this process are for us."""
    return any(signal.getsignal(number) is _end for number in EXIT_CODES)


@contextmanager
def listening() -> Iterator[None]:
    """Inside, a process that has no handlers of its own for the two listens, and then has none again: a script, a notebook."""
    before = {number: signal.getsignal(number) for number in EXIT_CODES}
    nobodys = (signal.default_int_handler, signal.SIG_DFL, signal.SIG_IGN)  # ignored: of a job in a shell's background
    main = threading.current_thread() is threading.main_thread()
    if not main or any(handler not in nobodys for handler in before.values()):
        yield
        return
    listen()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _received.clear()  # it has ended the run; whatever the process does next is not asked to end


@contextmanager
def leaving(leave: Callable[[int], None]) -> Iterator[None]:
    """Inside, `leave(exit code)` is the last thing that a process does that a second signal ends."""
    _leave.append(leave)
    try:
        yield
    finally:
        _leave.pop()


def received() -> int | None:
    """The exit code of the first signal since `listen`; None where none came."""
    return EXIT_CODES[signal.Signals(_received[0][0])] if _received else None


def heed(code: int) -> None:
    """As if the signal of this exit code had come here: another rank has got it, and a launcher's echo comes after it."""
    if listens() and not _received:
        _received.append((next(number for number, of_it in EXIT_CODES.items() if of_it == code), time.monotonic()))


@contextmanager
def patience(heard: Callable[[int], None] = lambda number: None) -> Iterator[None]:
    """Inside, the first signal does nothing but be `received`, and `heard`; whoever is patient ends by itself."""
    _heard.append(heard)
    try:
        yield
    finally:
        _heard.pop()


def acknowledge() -> None:
    """Say what becomes of a signal. In its handler, where nothing may wait for a lock, and nothing may be raised."""
    with suppress(OSError):
        os.write(2, b"stopping: the step is finished and saved; another signal ends the run at once\n")


def exit_code(error: BaseException) -> int:
    """Of a process that `error` ends, where a signal may have come: it counts more than what fails because of it.

    What is wrong by itself (a full disk, a loss that is not finite) is said all the same.
    """
    code = exit_code_of(error)
    itself = isinstance(error, HwoptError) and not isinstance(error, WorkerDiedError) and not error.secondhand
    return code if itself else received() or code


def ending(code: int) -> BaseException:
    """What ends a process with the exit code of a signal."""
    return KeyboardInterrupt() if code == EXIT_CODES[signal.SIGINT] else SystemExit(code)


def in_worker(worker: int) -> None:
    """What a data-loading process does about signals: those to the whole group are for the run, which wants to end its step.

    At SIGTERM, which may also come from the run alone, there are some seconds left for that step. SIGUSR1 shows where the process
    stands.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_worker)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=2)
    if sys.platform == "linux":  # or one that hangs would outlive a run that was killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_worker(number: int, frame: FrameType | None) -> None:
    if not hasattr(signal, "setitimer"):  # Windows, where SIGTERM cannot be heard either
        os._exit(EXIT_CODES[signal.SIGTERM])
    signal.setitimer(signal.ITIMER_REAL, LAST_STEP)  # SIGALRM ends it


def counts_as_second(number: int, before: list[tuple[int, float]]) -> bool:
    """Add a signal to those `before`; whether it is a second one, and no echo of the first."""
    now = time.monotonic()
    before.append((number, now))
    return now - before[0][1] > ECHO


def _end(number: int, frame: FrameType | None) -> None:
    second = counts_as_second(number, _received)
    code = EXIT_CODES[signal.Signals(number)]
    if not _heard:
        raise ending(code)
    if len(_received) == 1:
        for heard in _heard:
            heard(number)
    elif second:
        for leave in _leave:
            leave(code)
        os._exit(code)
