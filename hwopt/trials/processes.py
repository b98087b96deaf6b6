"""Processes of trials: a new interpreter for each, or a fork of one that has imported the libraries.

A trial of a small job is shorter than the import of torch and transformers. On a CPU under Linux, ForkServer imports them once
and forks for each trial. On a CUDA device each trial gets a new interpreter: an import may initialize CUDA, which a fork cannot
use. Every process ends with the one that started it (Linux: prctl; elsewhere a thread watches it).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from types import TracebackType

Launch = Callable[[Path, float], int | None]
"""(folder of a trial, seconds) -> the exit code of its process (below 0: a signal), or None if it was killed at the limit."""

FORKS = sys.platform == "linux"
POLL_SECONDS = 0.5
PR_SET_PDEATHSIG = 1
START_UP = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from hwopt.trials import child; child.{}(*sys.argv[2:])"


def in_new_process(folder: Path, limit_s: float) -> int | None:
    """Run the trial of `folder` in a new interpreter."""
    with open(folder / "output.txt", "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", START_UP.format("main"), json.dumps(sys.path), str(folder), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the command only, and the workers of the trial can be killed with it
        )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        kill_session(process.pid)
        process.kill()
        process.wait()


class ForkServer(AbstractContextManager["ForkServer"]):
    """A process that has imported the libraries. `launch` runs a trial in a fork of it."""

    def __init__(self) -> None:
        own, theirs = socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", START_UP.format("serve"), json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.connection = Connection(own.detach())

    def launch(self, folder: Path, limit_s: float) -> int | None:
        """Run the trial of `folder` in a fork. A server that ended is replaced by a new interpreter."""
        try:
            self.connection.send_bytes(str(folder.absolute()).encode())
            pid = int(self.connection.recv_bytes())
        except (EOFError, OSError):
            return in_new_process(folder, limit_s)
        within = False
        try:
            within = self.connection.poll(limit_s)
        finally:
            kill_session(pid)
            if not within:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # its session may not exist yet
        code = int(self.connection.recv_bytes())
        return code if within else None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


def kill_session(leader: int) -> None:
    """Kill the processes of the session that `leader` began: the trial, and its data-loading workers."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def end_with(parent: int) -> None:
    """Kill this process when its parent process `parent` ends."""
    if FORKS:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=watch_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def watch_parent(parent: int) -> None:
    """End this process once its parent is another one than `parent`."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)
