"""Handlers for SIGINT and SIGTERM that let a run finish its step and save.

The handlers remember the first signal: Python discards an exception that a handler raises inside a callback (for example while
torch forks a data-loading worker). A signal to the whole process group also kills the workers, so their death is an effect, not
the cause. Inside `deferred()` the first signal only sets a flag, and a second signal ends the process. Outside, a signal raises.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from hwopt.errors import HwoptError, WorkerDiedError, exit_code_of

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
DUPLICATE_SECONDS = 1.0
"""A signal within so many seconds of the first is a copy of it: launchers and `timeout` forward what the terminal sent."""
WORKER_GRACE_SECONDS = 20.0  # how long a data-loading worker lives after SIGTERM, so that the run can finish its step
_received: list[tuple[int, float]] = []  # (signal number, monotonic time) of each signal since `install_handlers`
_on_first_signal: list[Callable[[int], None]] = []
_before_forced_exit: list[Callable[[int], None]] = []


def install_handlers() -> None:
    """Install the handlers for SIGINT and SIGTERM, except for a signal that is ignored, and forget earlier signals."""
    for number in EXIT_CODES:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _handle)
    _received.clear()
    os.register_at_fork(after_in_child=_detach_wakeup_fd)


def _detach_wakeup_fd() -> None:
    """In a forked child: a signal to the child must not wake the watchdog of its parent."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


def handlers_installed() -> bool:
    """Whether SIGINT or SIGTERM of this process is handled here."""
    return any(signal.getsignal(number) is _handle for number in EXIT_CODES)


@contextmanager
def temporary_handlers() -> Iterator[None]:
    """Install the handlers inside the block if the process has none of its own, as in a script or a notebook."""
    previous = {number: signal.getsignal(number) for number in EXIT_CODES}
    defaults = {signal.default_int_handler, signal.SIG_DFL, signal.SIG_IGN}  # a shell's background job ignores SIGINT
    if threading.current_thread() is not threading.main_thread() or not defaults.issuperset(previous.values()):
        yield
        return
    install_handlers()
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        _received.clear()  # the signal ended this run; the next run of the process starts without it


@contextmanager
def before_forced_exit(callback: Callable[[int], None]) -> Iterator[None]:
    """Inside the block, a second signal calls `callback(exit code)` before it ends the process."""
    _before_forced_exit.append(callback)
    try:
        yield
    finally:
        _before_forced_exit.pop()


def received() -> int | None:
    """Return the exit code of the first signal since `install_handlers`, or None."""
    return EXIT_CODES[signal.Signals(_received[0][0])] if _received else None


def record_remote_signal(code: int) -> None:
    """Record that another rank received the signal of this exit code: the launcher's copy is then not a second signal."""
    if handlers_installed() and not _received:
        number = next(number for number, exit_code in EXIT_CODES.items() if exit_code == code)
        _received.append((number, time.monotonic()))


@contextmanager
def deferred(on_first_signal: Callable[[int], None] = lambda number: None) -> Iterator[None]:
    """Inside the block, the first signal does not raise: it calls `on_first_signal(number)` and sets `received()`."""
    _on_first_signal.append(on_first_signal)
    try:
        yield
    finally:
        _on_first_signal.pop()


def announce_stop() -> None:
    """Print that the run stops after this step. Runs in a signal handler, so it takes no lock and raises nothing."""
    with suppress(OSError):
        os.write(2, b"Stopping after this step, then saving. Signal again to exit now.\n")


def exit_code(error: BaseException) -> int:
    """Return the exit code of a process that `error` ends: the signal's code if a signal caused the error.

    An error with a cause of its own (a full disk, a loss that is not finite) keeps its exit code after a signal.
    """
    code = exit_code_of(error)
    own_cause = isinstance(error, HwoptError) and not isinstance(error, WorkerDiedError) and not error.secondhand
    return code if own_cause else received() or code


def exception_for(code: int) -> BaseException:
    """Return the exception that ends a process with the exit code of a signal."""
    return KeyboardInterrupt() if code == EXIT_CODES[signal.SIGINT] else SystemExit(code)


def init_worker(worker: int) -> None:
    """Set up a data-loading worker (torch's `worker_init_fn`): it ignores SIGINT, and ends some time after SIGTERM.

    A signal to the process group also reaches the workers, and the run still needs their batches. SIGUSR1 prints the stack.
    """
    from hwopt.system.fork_server import kill_on_parent_death

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    later = (signal.ITIMER_REAL, WORKER_GRACE_SECONDS)  # SIGALRM then ends the worker
    signal.signal(signal.SIGTERM, lambda number, frame: signal.setitimer(*later))
    faulthandler.register(signal.SIGUSR1, file=2)
    kill_on_parent_death()  # a worker that hangs would otherwise outlive a run that is killed


def is_second_signal(number: int, earlier: list[tuple[int, float]]) -> bool:
    """Append the signal to `earlier`. Returns whether it is a second signal and not a forwarded copy of the first."""
    now = time.monotonic()
    earlier.append((number, now))
    return now - earlier[0][1] > DUPLICATE_SECONDS


def _handle(number: int, frame: FrameType | None) -> None:
    second = is_second_signal(number, _received)
    code = EXIT_CODES[signal.Signals(number)]
    if not _on_first_signal:
        raise exception_for(code)
    if len(_received) == 1:
        for on_first_signal in _on_first_signal:
            on_first_signal(number)
    elif second:
        for callback in _before_forced_exit:
            callback(code)
        os._exit(code)
