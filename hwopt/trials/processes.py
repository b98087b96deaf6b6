"""Processes of trials: a new interpreter for each, or on a CPU a fork of one that has imported the libraries.

A trial of a small job is shorter than the import of torch and transformers. On a CUDA device each trial gets a new interpreter:
an import may initialize CUDA, which a fork cannot use. Every process ends with the one that started it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hwopt.system.fork_server import ForkServer, ServerEnded, kill_session

Launch = Callable[[Path, float], int | None]
"""(folder of a trial, seconds) -> the exit code of its process (below 0: a signal), or None if it was killed at the limit."""

PROGRAM = "hwopt.trials.child"
START_UP = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {PROGRAM} import main; main(*sys.argv[2:])"


@contextmanager
def launching(device_type: str) -> Iterator[Launch]:
    """What starts trials on such a device: forks of one process on a CPU, which becomes new interpreters if that process ends."""
    if device_type != "cpu":
        yield in_new_process
        return
    with ForkServer(PROGRAM) as server:

        def launch(folder: Path, limit_s: float) -> int | None:
            try:
                reply = server.ask(str(folder.absolute()).encode(), limit_s)
            except ServerEnded:
                return in_new_process(folder, limit_s)
            return None if reply is None else reply.exit_code or int(reply.answer)

        yield launch


def in_new_process(folder: Path, limit_s: float) -> int | None:
    """Run the trial of `folder` in a new interpreter."""
    with open(folder / "output.txt", "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", START_UP, json.dumps(sys.path), str(folder), str(os.getpid())],
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
        process.wait()
