"""A thread that ends a run that hangs, that got a second signal, or that lost its launcher.

Python runs signal handlers in the main thread only. While that thread waits in C code for another rank, a data-loading worker or
the device, no handler runs; this thread does. It writes the stack of every thread before it ends a hung process.
docs/decisions/0012-termination.md says why `faulthandler.dump_traceback_later` does not replace it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from hwopt.errors import WorkerDiedError
from hwopt.system import signals

POLL_SECONDS = 0.25
FIRST_STEP_FACTOR = 10
"""The first step may take this many times `hang_timeout`: it compiles and fills caches."""
SECOND_SIGNAL = "exited at once after a second signal"


class Watchdog:
    """Ends the process if `heartbeat` is not called for `hang_timeout` seconds (0: no limit)."""

    def __init__(
        self,
        hang_timeout: float,
        folder: Path,
        rank: int,
        before_exit: Callable[[int, str], None],
        launcher_pid: int | None,
        in_first_step: Callable[[], bool],
    ) -> None:
        """Set up the thread; entering the context starts it.

        `before_exit(exit code, message)` is called last before the process ends. When the process `launcher_pid` is no longer the
        parent, the watchdog sends itself SIGTERM.
        """
        self.hang_timeout, self.folder, self.rank = hang_timeout, folder, rank
        self.before_exit, self.launcher_pid, self.in_first_step = before_exit, launcher_pid, in_first_step
        self.last_heartbeat = time.monotonic()
        self.wakeup_sockets: tuple[socket.socket, socket.socket] | None = None
        self.signals_seen: list[tuple[int, float]] = []
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.poll, name="hwopt-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self.last_heartbeat = time.monotonic()
        if signals.handlers_installed() and threading.current_thread() is threading.main_thread():
            self.wakeup_sockets = reader, writer = socket.socketpair()
            reader.setblocking(False)
            writer.setblocking(False)
            # the C handler writes the signal number at once, while the main thread may be blocked
            signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.thread.join()
        if self.wakeup_sockets is not None:
            signal.set_wakeup_fd(-1)
            for end in self.wakeup_sockets:
                end.close()

    def heartbeat(self) -> None:
        """Record that the run made progress."""
        self.last_heartbeat = time.monotonic()

    def poll(self) -> None:
        """Check launcher, signals and heartbeat every `POLL_SECONDS`, until the context ends."""
        last_poll = time.monotonic()
        while not self.stopped.wait(POLL_SECONDS):
            pause, last_poll = time.monotonic() - last_poll - POLL_SECONDS, time.monotonic()
            if pause > POLL_SECONDS:
                self.last_heartbeat += pause  # the whole process was suspended (Ctrl-Z, a frozen container), which is not a hang
            if self.launcher_pid is not None and os.getppid() != self.launcher_pid:
                self.launcher_pid = None
                os.kill(os.getpid(), signal.SIGTERM)
            self.check_second_signal()
            idle_seconds = time.monotonic() - self.last_heartbeat
            if self.hang_timeout and idle_seconds > self.hang_timeout * (FIRST_STEP_FACTOR if self.in_first_step() else 1):
                self.exit_hung(idle_seconds)

    def check_second_signal(self) -> None:
        """End the process at a second signal, although the handler of the first one may not have run yet."""
        if self.wakeup_sockets is None:
            return
        with contextlib.suppress(BlockingIOError):
            for number in self.wakeup_sockets[0].recv(64):
                if number in signals.EXIT_CODES and signals.is_second_signal(number, self.signals_seen):
                    code = signals.EXIT_CODES[signal.Signals(self.signals_seen[0][0])]
                    self.before_exit(code, SECOND_SIGNAL)
                    os._exit(code)

    def exit_hung(self, idle_seconds: float) -> None:
        """Write the stacks, report the hang and end the process."""
        code = signals.received() or WorkerDiedError.exit_code
        stacks = self.write_stacks()
        self.before_exit(
            code,
            f"rank {self.rank}: no progress for {idle_seconds:.0f} s (training.hang_timeout = {self.hang_timeout:g}). "
            f"A data-loading worker, another rank or the device hangs. Stack traces: {stacks}. Restart with --resume.",
        )
        os._exit(code)

    def write_stacks(self) -> Path | str:
        """Write the stack of every thread to a file. Returns its path, or "above" if the file cannot be written.

        The data-loading workers print their stacks to stderr.
        """
        for worker in multiprocessing.active_children():
            with contextlib.suppress(OSError, AttributeError):  # Windows has no SIGUSR1
                os.kill(worker.pid or 0, signal.SIGUSR1)
        path = self.folder / f"stacks-rank-{self.rank}.txt"
        try:
            with open(path, "w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file=file, all_threads=True)
        except OSError:
            faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
            return "above"
        time.sleep(POLL_SECONDS)  # the workers write their stacks meanwhile
        return path


def kill_workers_and_local_ranks() -> None:
    """Kill this process's data-loading workers, and the other ranks of its launcher on this host with their workers."""
    own = psutil.Process()
    launch_id = os.environ.get("TORCHELASTIC_RUN_ID")
    for worker in children(own):
        kill(worker)
    if launch_id:
        for rank in siblings(own):
            with contextlib.suppress(psutil.Error, OSError):
                if rank.environ().get("TORCHELASTIC_RUN_ID") == launch_id:
                    for process in (rank, *children(rank)):
                        kill(process)


def children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error, OSError):
        return process.children(recursive=True)
    return []


def siblings(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error, OSError):
        if parent := process.parent():
            return [child for child in parent.children() if child.pid != process.pid]
    return []


def kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error, OSError):
        process.kill()
