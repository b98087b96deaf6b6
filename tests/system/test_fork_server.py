"""The time limit of a request to a fork server."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe

from hwopt.system.fork_server import ForkServer


@contextmanager
def started(*command: str) -> Iterator[int]:
    process = subprocess.Popen(command)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def test_limit_of_cpu_time_ends_a_busy_request_and_no_slow_one() -> None:
    server = ForkServer.__new__(ForkServer)
    server.connection, fork = Pipe()
    with started(sys.executable, "-c", "while True: pass") as busy:
        assert not server.answers_within(busy, 0.3)
    answer = threading.Timer(1.0, fork.send_bytes, [b"done"])
    with started("sleep", "60") as waiting:
        answer.start()
        assert server.answers_within(waiting, 0.3), "it got no CPU time"
    answer.join()
