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
SLOW_FACTOR = 10  # the first step, and one in which torch compiles, may take this many times `hang_timeout`
COMPILER = "torch._dynamo.convert_frame"  # the module with the lock that torch holds while it compiles
SCHEDULED = Path("/proc/self/schedstat")  # nanoseconds that the main thread ran, and that it waited for a CPU
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
        """`before_exit(exit code, message)` is called last. SIGTERM is sent when `launcher_pid` is no longer the parent."""
        self.hang_timeout, self.folder, self.rank = hang_timeout, folder, rank
        self.before_exit, self.launcher_pid, self.in_first_step = before_exit, launcher_pid, in_first_step
        self.last_heartbeat = 0.0
        self.wakeup_sockets: tuple[socket.socket, socket.socket] | None = None
        self.signals_seen: list[tuple[int, float]] = []
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.poll, name="hwopt-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self.heartbeat()
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
        self.last_heartbeat = self.clock()

    def clock(self) -> float:
        """The seconds in which this process could have made progress: not those in which the system gave the CPU to others."""
        waited = 0.0
        with contextlib.suppress(OSError, ValueError, IndexError):
            waited = int(SCHEDULED.read_text(encoding="ascii").split()[1]) / 1e9  # proc(5), schedstat
        return time.monotonic() - waited

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
            idle_seconds = self.clock() - self.last_heartbeat
            if not self.hang_timeout or idle_seconds <= self.hang_timeout:
                continue
            if idle_seconds > SLOW_FACTOR * self.hang_timeout or not (self.in_first_step() or compiles()):
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
        """Write the stack of every thread to a file; workers print theirs. Returns its path, or "above" if that fails."""
        for worker in multiprocessing.active_children():
            with contextlib.suppress(OSError):
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


def compiles() -> bool:
    """Whether torch compiles. Reads a lock: reading the stack of a running thread from another one sometimes crashes."""
    lock = getattr(sys.modules.get(COMPILER), "compile_lock", None)
    if lock is None:
        return False
    if free := lock.acquire(blocking=False):
        lock.release()
    return not free


def kill_workers_and_local_ranks() -> None:
    """Kill this process's data-loading workers, and the other ranks of its launcher on this host with their workers."""
    own, launch_id = psutil.Process(), os.environ.get("TORCHELASTIC_RUN_ID")
    doomed = own.children(recursive=True)
    with contextlib.suppress(psutil.Error, OSError):
        parent = own.parent() if launch_id else None
        for rank in parent.children() if parent else ():
            with contextlib.suppress(psutil.Error, OSError):
                if rank.pid != own.pid and rank.environ().get("TORCHELASTIC_RUN_ID") == launch_id:
                    doomed += [rank, *rank.children(recursive=True)]
    for process in doomed:
        with contextlib.suppress(psutil.Error, OSError):
            process.kill()
