"""Ranks as forks of this process, which has imported everything: they start in milliseconds, interpreters in ten seconds."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hwopt.cli import run_command
from hwopt.system import signals


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def forked(work: Callable[[], None], output: Path | None = None) -> int:
    """The pid of a child that does `work` and ends with the exit code of what that raises; `output` gets what it prints."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()
        target = str(output) if output else os.environ.get("HWOPT_TEST_OUTPUT", os.devnull)
        silence = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)  # pytest's write elsewhere
        work()
        code = 0
    except BaseException as error:
        code = signals.exit_code(error)
        if code == 1:
            os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def ended(pid: int, within: float = 120.0) -> int:
    """The exit code of a child; -9 and the like for one that a signal killed."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"process {pid} did not end within {within} s")


def as_rank(rank: int, ranks: int, port: int) -> None:
    """Give this process the variables by which a launcher tells a rank its place; one rank has none."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if ranks > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def forked_ranks(work: Callable[[int], None], ranks: int, folder: Path, output: Path | None = None) -> list[int]:
    """The pids of `ranks` children that each do `work(rank)` in `folder`."""
    port = free_port()

    def child(rank: int) -> None:
        os.chdir(folder)
        as_rank(rank, ranks, port)
        work(rank)

    return [forked(partial(child, rank), output) for rank in range(ranks)]


def run_ranks(
    arguments: list[str], ranks: int, folder: Path, output: Path, first: Callable[[], None] = lambda: None
) -> list[int]:
    """The exit codes of the command line `arguments`, called by so many ranks in `folder`; each calls `first` before it."""

    def work(rank: int) -> None:
        first()
        code = run_command(arguments)
        sys.stdout.flush()
        os._exit(code)

    return [ended(pid) for pid in forked_ranks(work, ranks, folder, output)]
