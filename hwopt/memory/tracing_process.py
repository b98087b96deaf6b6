"""The process that traces plans, as seen from the process that plans: starts it, sends a request, waits for the answer.

Tracing needs a process that never had threads or CUDA: a child that is forked after a CUDA backward cannot run autograd, and an
import in a forked child may initialize CUDA a second time, which fails. So hwopt.memory.tracing_server runs in a new interpreter
without GPUs, and forks for each request. It imports torch once. It does not import the caller's `__main__`, so it works from a
notebook and from a script without a guard. Plugins that only this process knows travel as code (cloudpickle).

The server ends with the connection, with this process (Linux: at once, whatever ended it), or after a minute without a request.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from socket import socketpair
from typing import IO

TIMEOUT_SECONDS = 300.0
START_UP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from hwopt.memory.tracing_server import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


IDLE = "the tracing process was idle"
"""What the server writes to its standard error when it ends because no request came."""


class NotTraceable(Exception):
    """Fake tensors cannot run this recipe. The message says why."""


class TracingProcess:
    """A running tracing server, and the connection to it."""

    def __init__(self) -> None:
        if sys.platform == "win32":
            raise NotTraceable("the tracer needs Linux or macOS; use WSL")
        own, theirs = socketpair()
        # the kernel ends the server when the thread that started it ends, so only for the main thread
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", START_UP, json.dumps(sys.path), str(theirs.fileno()), str(parent)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self.errors,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            )
        self.connection = Connection(own.detach())
        self.owner = os.getpid()

    @property
    def usable(self) -> bool:
        """Whether the server runs, and belongs to this process rather than to the one that it was forked from."""
        return self.owner == os.getpid() and self.process.poll() is None

    def ask(self, request: bytes) -> bytes:
        """Return the server's answer. Raises NotTraceable if it takes too long, EOFError or OSError if the server ended."""
        self.connection.send_bytes(request)
        if not self.connection.poll(TIMEOUT_SECONDS):
            raise NotTraceable(f"tracing took more than {TIMEOUT_SECONDS:g} seconds")
        return self.connection.recv_bytes()

    def last_error(self) -> str:
        """Return why the server ended: IDLE, else the last line of its standard error, else its exit code."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        self.errors.seek(0)
        lines = self.errors.read().decode("utf-8", "replace").strip().splitlines()
        if IDLE in lines:  # libraries may write more at the exit
            return IDLE
        return lines[-1][:200] if lines else f"exit code {self.process.poll()}"

    def close(self) -> None:
        """End the server and everything that it started."""
        self.connection.close()
        if self.owner == os.getpid():
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5.0)
            self.process.kill()
            self.process.wait()
        self.errors.close()


_running: TracingProcess | None = None
_lock = threading.Lock()


def start_early() -> None:
    """Start the server if it does not run, so that it imports torch while this process does something else."""
    with suppress(NotTraceable, OSError), _lock:
        running_process()


def running_process() -> TracingProcess:
    """Return the running server of this process; start one if there is none."""
    global _running
    if _running is None or not _running.usable:
        if _running is not None:
            _running.close()
        else:
            atexit.register(close)
        _running = TracingProcess()
    return _running


def ask(request: bytes) -> bytes:
    """Return the answer of the tracing server to `request`. Raises NotTraceable if there is none."""
    with _lock:
        for attempt in (1, 2):
            process = running_process()
            try:
                return process.ask(request)
            except (EOFError, OSError):
                reason = process.last_error()
                close()
                if attempt == 2 or reason != IDLE:  # it may have ended while it was asked
                    raise NotTraceable(f"the tracing process ended: {reason}") from None
            except BaseException:  # the answer would be that of the next request
                close()
                raise
    raise AssertionError("unreachable")


def close() -> None:
    """End the tracing server of this process, if there is one."""
    global _running
    if _running is not None:
        _running.close()
        atexit.unregister(close)
        _running = None
