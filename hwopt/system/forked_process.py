"""A fork of this process that serves a program, with what was imported here: no interpreter starts, nothing is imported twice."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
import warnings
from dataclasses import dataclass


@dataclass
class ForkedProcess:
    """A fork of this process, with the methods of `subprocess.Popen` that a server needs."""

    pid: int
    code: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self.code is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            self.wait()
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended."""
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def forked(program: str, environment: dict[str, str], given: tuple[float, ...], callers: int, errors: int) -> ForkedProcess:
    """Fork this process; the fork closes the caller's end of the connection, and serves. Its standard error goes to `errors`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # idle threads of numpy and torch
        pid = os.fork()
    if pid:
        return ForkedProcess(pid)
    try:
        os.setsid()  # Ctrl-C reaches the caller only
        os.close(callers)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream, target in enumerate((nothing, nothing, errors)):
            os.dup2(target, stream)
        os.environ.update(environment)
        importlib.import_module(program).serve(*given)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(1)
