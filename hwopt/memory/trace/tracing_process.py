"""The process that traces plans, as seen from the process that plans: sends a request, waits for the answer.

Tracing needs a process that never had threads or CUDA: a child that is forked after a CUDA backward cannot run autograd, and an
import in a forked child may initialize CUDA a second time, which fails. So tracing_server is a fork server without
GPUs. It imports torch once. Plugins that only this process knows travel as code (cloudpickle).
"""

from __future__ import annotations

import atexit
import pickle
import sys
import threading
from contextlib import suppress

from hwopt.system.fork_server import IDLE, ForkServer, ServerEnded

TIMEOUT_SECONDS = 300.0


class NotTraceable(Exception):
    """Fake tensors cannot run this recipe. The message says why."""


_running: ForkServer | None = None
_lock = threading.Lock()


def start_early() -> None:
    """Start the server if it does not run, so that it imports torch while this process does something else."""
    with suppress(NotTraceable, OSError), _lock:
        running_process()


def running_process() -> ForkServer:
    """Return the running server of this process; start one if there is none."""
    global _running
    if _running is None or not _running.usable:
        if sys.platform == "win32":
            raise NotTraceable("the tracer needs Linux or macOS; use WSL")
        if _running is not None:
            _running.close()
        else:
            atexit.register(close)
        _running = ForkServer("hwopt.memory.trace.tracing_server", {"CUDA_VISIBLE_DEVICES": ""})
    return _running


def ask(request: bytes) -> bytes:
    """Return the answer of the tracing server to `request`. Raises NotTraceable if there is none."""
    with _lock:
        for attempt in (1, 2):
            try:
                reply = running_process().ask(request, TIMEOUT_SECONDS)
            except ServerEnded as error:
                close()
                if attempt == 2 or str(error) != IDLE:  # it may have ended while it was asked
                    raise NotTraceable(f"the tracing process ended: {error}") from None
                continue
            if reply is None:
                raise NotTraceable(f"tracing took more than {TIMEOUT_SECONDS:g} seconds")
            if reply.exit_code:
                return pickle.dumps(("RuntimeError", f"the tracing process died with exit code {reply.exit_code}"))
            return reply.answer
    raise AssertionError("unreachable")


def close() -> None:
    """End the tracing server of this process, if there is one."""
    global _running
    if _running is not None:
        _running.close()
        atexit.unregister(close)
        _running = None
