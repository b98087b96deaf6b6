"""A process that imports libraries once and runs each request in a fork of its own: used to trace plans and to run trials.

`ForkServer("a.module")` starts an interpreter that calls `a.module.serve(descriptor, parent, *arguments)`, which calls `serve`
here. It does not import the caller's `__main__`, so it works from a notebook and from a script without a guard. Linux only.

No process stays behind: a fork is killed with everything in its session once it answered, crashed or reached its time limit, and
the server ends with the connection and with the process that started it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from socket import socketpair
from typing import IO

import psutil

from hwopt.system.forked_process import ForkedProcess, forked

POLL_SECONDS = 0.5
START_SECONDS = 300.0  # time for the imports of a new server
BLOCKED_FACTOR = 10  # A request that uses no CPU is killed after so many times its limit of CPU time
START_UP = """import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1])
importlib.import_module(sys.argv[2]).serve(*json.loads(sys.argv[3]))"""


@dataclass(frozen=True)
class Reply:
    """How a request ended: the exit code of its process (below 0: a signal), the answer if that is 0, and its CPU time."""

    exit_code: int
    answer: bytes = b""
    cpu_seconds: float = 0.0


class ServerEnded(Exception):
    """The server is not running any more. The message says why."""


class ForkServer(AbstractContextManager["ForkServer"]):
    """A running server of `program`, and the connection to it. `environment` is set on top of that of this process.

    With `fork` it is a fork of this process with what was imported here, not a new interpreter. This process must not have
    used CUDA before, or threads of its own.
    """

    def __init__(self, program: str, environment: dict[str, str] | None = None, *arguments: float, fork: bool = False) -> None:
        own, theirs = socketpair()
        # the kernel ends the server when the thread that started it ends, so only for the main thread
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        with theirs:
            given = theirs.fileno(), parent, *arguments
            self.process: subprocess.Popen[bytes] | ForkedProcess
            if fork:
                self.process = forked(program, environment or {}, given, own.fileno(), self.errors.fileno())
            else:
                self.process = subprocess.Popen(
                    [sys.executable, "-c", START_UP, json.dumps(sys.path), program, json.dumps(given)],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self.errors,
                    env={**os.environ, **(environment or {})},
                    start_new_session=True,  # Ctrl-C reaches the caller only
                )
        self.connection = Connection(own.detach())
        self.owner = os.getpid()

    @property
    def usable(self) -> bool:
        """Whether the server runs, and belongs to this process rather than to the one that it was forked from."""
        return self.owner == os.getpid() and not self.connection.closed and self.process.poll() is None

    def ask(self, request: bytes, limit_s: float, cpu_time: bool = False) -> Reply | None:
        """How `request` ended, or None if it was killed after `limit_s` seconds. Raises ServerEnded.

        With `cpu_time` these are seconds of CPU time: a loaded machine may take up to BLOCKED_FACTOR times as long.
        """
        try:
            self.connection.send_bytes(request)
            if not self.connection.poll(START_SECONDS + limit_s):
                self.close()
                return None
            pid = int(self.connection.recv_bytes())
            within = False
            try:
                within = self.answers_within(pid, limit_s) if cpu_time else self.connection.poll(limit_s)
            finally:
                if not within:
                    kill_session(pid)
            reply: Reply = pickle.loads(self.connection.recv_bytes())
            return reply if within else None
        except (EOFError, OSError) as error:
            raise ServerEnded(self.last_error()) from error
        except BaseException:  # the answer would be that of the next request
            self.close()
            raise

    def answers_within(self, pid: int, limit_s: float) -> bool:
        """Whether the fork `pid` answers before it and its children have used `limit_s` seconds of CPU time."""
        deadline = time.monotonic() + BLOCKED_FACTOR * limit_s
        while not self.connection.poll(min(1.0, limit_s)):
            if cpu_seconds(pid) > limit_s or time.monotonic() > deadline:
                return False
        return True

    def last_error(self) -> str:
        """Why the server ended: the last line of its standard error, else its exit code."""
        if self.errors.closed:
            return "closed"
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        self.errors.seek(0)
        *_, last = [f"exit code {self.process.poll()}", *self.errors.read().decode("utf-8", "replace").strip().splitlines()]
        return last[:200]

    def close(self) -> None:
        """End the server and everything that it started."""
        self.connection.close()
        if self.owner == os.getpid():
            self.process.kill()
            self.process.wait()
        self.errors.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(
    descriptor: int,
    parent: int,
    prepare: Callable[[Connection], None],
    work: Callable[[bytes], bytes],
    idle_s: float | None = None,
) -> None:
    """Answer the requests on the file `descriptor` with `work`, until it closes, none comes for `idle_s`, or `parent` ends.

    `parent`: 0 for none. `prepare` imports the libraries. What a fork imported is imported for the next ones.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if parent:
        end_with(parent)
    connection = Connection(descriptor)
    warnings.simplefilter("ignore")
    prepare(connection)
    gc.freeze()  # shares the memory of all that is imported with the forks
    with suppress(EOFError, OSError):
        while connection.poll(idle_s):
            fork = Fork(partial(work, connection.recv_bytes()), connection)
            connection.send_bytes(str(fork.pid).encode())
            connection.send_bytes(pickle.dumps(fork.result(connection)))
            import_modules(fork.imported)


class Fork:
    """A forked process that runs `work` and returns its bytes. That of a server, with its `connection`, leads a session."""

    def __init__(self, work: Callable[[], bytes], connection: Connection | None = None) -> None:
        self.receiver, sender = Pipe(duplex=False)
        parent = os.getpid()
        self.imported: list[str] = []  # the packages and the models that the process imported
        self.leads = connection is not None
        self.pid = os.fork()
        if not self.pid:
            run_fork(work, sender, parent, connection)
        sender.close()

    def result(self, caller: Connection | None = None) -> Reply:
        """How the process ended. Ends this process too if `caller` closes its connection meanwhile."""
        answer = b""
        while True:
            ready = wait([self.receiver, *([caller] if caller else [])], POLL_SECONDS)
            if caller in ready:
                kill_session(self.pid)
                os._exit(0)
            if self.receiver in ready:
                with suppress(EOFError):
                    answer = self.receiver.recv_bytes()
                    self.imported = json.loads(self.receiver.recv_bytes())
                break
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):  # its children may keep the pipe open
                break
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        if self.leads:
            kill_session(self.pid)
        _, status, used = os.wait4(self.pid, 0)
        self.receiver.close()
        code = os.waitstatus_to_exitcode(status)
        return Reply(code, answer if code == 0 else b"", used.ru_utime + used.ru_stime)


def run_fork(work: Callable[[], bytes], sender: Connection, parent: int, connection: Connection | None) -> None:
    """The fork: send what `work` returns, and what it imported. Does not return."""
    code = 1
    try:
        end_with(parent)
        if connection is not None:
            connection.close()  # only the server may keep it open
            os.setsid()
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(torch.get_num_threads())  # makes the pool of threads again, which a fork loses
        before = set(sys.modules)
        sender.send_bytes(work())
        imported = [name for name in sys.modules if name not in before and ("." not in name or ".modeling_" in name)]
        sender.send_bytes(json.dumps(imported).encode())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def import_modules(names: Iterable[str]) -> None:
    """Import modules for the forks to come, and share their memory. Ignores what cannot be imported here."""
    for name in names:
        with suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def cpu_seconds(leader: int) -> float:
    """The CPU time of the process `leader` and of all that it started."""
    found = 0.0
    with suppress(psutil.Error):
        process = psutil.Process(leader)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                found += sum(each.cpu_times()[:4])  # its own and that of children that ended, in user and system mode
    return found


def kill_session(leader: int) -> None:
    """Kill the process `leader` and all others of the session that it began, such as data-loading workers."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(leader, signal.SIGKILL)  # its session may not exist yet


def end_with(parent: int) -> None:
    """Kill this process when its parent process `parent` ends."""
    kill_on_parent_death()
    if os.getppid() != parent:
        os._exit(1)


def kill_on_parent_death() -> None:
    """Let the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of Linux
