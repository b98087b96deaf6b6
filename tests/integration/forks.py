"""Ranks as forks of the test process: a fork has all modules imported and starts in milliseconds."""

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from hwopt.cli import run_command
from hwopt.system import signals


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def forked(work: Callable[[], None], output: Path | None = None) -> int:
    """The pid of a child process that calls `work` and exits with the code of its error. `output` receives what it prints."""
    assert not has_autograd_threads(), "an earlier test compiled a model in this process; it must call `in_fork`"
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()
        target = str(output) if output else os.environ.get("HWOPT_TEST_OUTPUT", os.devnull)
        silence = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        if compiler := sys.modules.get("torch._inductor.async_compile"):
            compiler.AsyncCompile.pool.cache_clear()  # its threads are not in the fork, where a compile would wait for them
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)  # pytest's streams are captured
        work()
        code = 0
    except BaseException as error:
        code = signals.exit_code(error)
        if code == 1:
            os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def has_autograd_threads() -> bool:
    """Whether this process has autograd's threads for devices, as after a torch.compile. Its forks cannot run a backward pass."""
    for comm in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # the thread has ended since
            if comm.read_text().startswith("pt_autograd"):
                return True
    return False


def in_fork(work: Callable[[], None], output: Path) -> None:
    """Call `work`, which compiles a model, in a fork: this process can then still fork ranks. Raises AssertionError."""
    code = wait_for_exit(forked(work, output), within=600)
    assert code == 0, output.read_text()


def until(condition: Callable[[], bool], within: float = 240.0) -> None:
    """Wait for `condition`. Raises AssertionError after `within` seconds."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "the condition stayed false"
        time.sleep(0.002)


def wait_for_exit(pid: int, within: float = 120.0) -> int:
    """Wait for a child process and return its exit code: minus the signal number if a signal killed it."""
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
    """Set the environment variables that a launcher sets for a rank; a single rank has none."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if ranks > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def forked_ranks(work: Callable[[int], None], ranks: int, folder: Path, output: Path | None = None) -> list[int]:
    """The pids of `ranks` child processes that each call `work(rank)` in `folder`."""
    port = free_port()

    def child(rank: int) -> None:
        os.chdir(folder)
        as_rank(rank, ranks, port)
        work(rank)

    return [forked(partial(child, rank), output) for rank in range(ranks)]


def run_ranks(
    arguments: list[str], ranks: int, folder: Path, output: Path, first: Callable[[], None] = lambda: None
) -> list[int]:
    """The exit codes of `hwopt ARGUMENTS` on `ranks` ranks in `folder`. Each rank calls `first` before."""

    def work(rank: int) -> None:
        first()
        code = run_command(arguments)
        sys.stdout.flush()
        os._exit(code)

    return [wait_for_exit(pid) for pid in forked_ranks(work, ranks, folder, output)]


def on_ranks(work: Callable[[int], None], folder: Path, ranks: int = 2) -> str:
    """Call `work(rank)` in a child process for each rank, and return what they printed. Raises AssertionError if one fails."""
    output = folder / "output.txt"
    codes = [wait_for_exit(pid) for pid in forked_ranks(work, ranks, folder, output)]
    assert codes == [0] * ranks, output.read_text()[-3000:]
    return output.read_text()
