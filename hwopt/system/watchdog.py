"""A thread that sees what the run itself cannot: that it hangs, that a second signal came, that its launcher is gone.

A process that waits for another rank, for a data-loading worker or for the device hears nothing: Python runs no signal handler
there. So this thread ends it, after it has written down where each thread stood.
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

EVERY = 0.25
"""Seconds between two looks."""
FIRST = 10
"""The first step may take so many times as long as the others: it compiles, it fills caches."""


class Watchdog:
    """Ends the process where nothing has happened for `limit` seconds (0: for ever). `heartbeat` says that something has."""

    def __init__(
        self,
        limit: float,
        folder: Path,
        rank: int,
        leave: Callable[[int, str], None],
        launcher: int | None,
        first: Callable[[], bool],
    ) -> None:
        """`leave(exit code, message)` is the last thing that a process does; `launcher`: the pid whose end is a SIGTERM.

        `first` says whether the first step of this process is not over yet.
        """
        self.limit, self.folder, self.rank, self.leave, self.launcher = limit, folder, rank, leave, launcher
        self.first = first
        self.last = time.monotonic()
        self.ear: socket.socket | None = None
        self.heard: list[tuple[int, float]] = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.look, name="hwopt-watch", daemon=True)

    def __enter__(self) -> Watchdog:
        self.last = time.monotonic()
        if signals.listens() and threading.current_thread() is threading.main_thread():
            self.ear, mouth = socket.socketpair()  # Python writes into it at once, whatever the main thread waits for
            self.ear.setblocking(False)
            mouth.setblocking(False)
            signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
            self.mouth = mouth
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()
        if self.ear is not None:
            signal.set_wakeup_fd(-1)
            self.ear.close()
            self.mouth.close()

    def heartbeat(self) -> None:
        self.last = time.monotonic()

    def look(self) -> None:
        looked = time.monotonic()
        while not self.over.wait(EVERY):
            pause, looked = time.monotonic() - looked - EVERY, time.monotonic()
            if pause > EVERY:
                self.last += pause  # the process itself stood still (Ctrl-Z, a frozen container): nobody hung
            if self.launcher is not None and os.getppid() != self.launcher:
                self.launcher = None
                os.kill(os.getpid(), signal.SIGTERM)  # as if it had said so before it went
            self.hear()
            still = time.monotonic() - self.last
            if self.limit and still > self.limit * (FIRST if self.first() else 1):
                self.end(still)

    def hear(self) -> None:
        """A second signal ends the process, also where the first one's handler could not run yet."""
        if self.ear is None:
            return
        with contextlib.suppress(BlockingIOError):
            for number in self.ear.recv(64):
                if number in signals.EXIT_CODES and signals.counts_as_second(number, self.heard):
                    code = signals.EXIT_CODES[signal.Signals(self.heard[0][0])]
                    self.leave(code, "ended at once, by a second signal")
                    os._exit(code)

    def end(self, still: float) -> None:
        code = signals.received() or WorkerDiedError.exit_code
        stacks = self.write_stacks()
        self.leave(
            code,
            f"rank {self.rank}: nothing has happened for {still:.0f} s (training.hang_timeout = {self.limit:g}): a data-loading "
            f"worker, another rank or the device hangs. Where each thread stood: {stacks}. Go on with --resume",
        )
        os._exit(code)

    def write_stacks(self) -> Path | str:
        """Of this process into a file; its workers say theirs on stderr."""
        for worker in multiprocessing.active_children():
            with contextlib.suppress(OSError, AttributeError):  # Windows has no such signal
                os.kill(worker.pid or 0, signal.SIGUSR1)
        path = self.folder / f"stacks-rank-{self.rank}.txt"
        try:
            with open(path, "w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file=file, all_threads=True)
        except OSError:
            faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
            return "above"
        time.sleep(EVERY)  # the workers write
        return path


def end_the_others() -> None:
    """Kill the data-loading workers of this process, and the ranks of its launcher on this machine with theirs."""
    own = psutil.Process()
    launch = os.environ.get("TORCHELASTIC_RUN_ID")
    beside: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        launcher = own.parent() if launch else None
        beside = [process for process in launcher.children() if process.pid != own.pid] if launcher else []
    for process in (own, *beside):
        with contextlib.suppress(psutil.Error, OSError):
            if process is not own and process.environ().get("TORCHELASTIC_RUN_ID") != launch:
                continue
            below = process.children(recursive=True)
            for each in below if process is own else (process, *below):
                each.kill()
