"""The time limit of a request to a fork server."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path

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


PROGRAM = """
import os, sys
from hwopt.system import fork_server

def serve(descriptor, parent):
    fork_server.serve(descriptor, parent, lambda _: None, answer)

def answer(request):
    print("not for the caller's output")
    return f"{request.decode()}: imported {'colorsys' in sys.modules}, SHOWN {os.environ['SHOWN']}".encode()
"""
CALLER = """
import colorsys, sys
from hwopt.system.fork_server import ForkServer, ServerEnded

sys.path.append(sys.argv[1])
for fork in (True, False):
    with ForkServer("program", {"SHOWN": "no"}, fork=fork) as server:
        print(server.ask(b"one", 60.0).answer.decode(), server.usable)
        print(server.ask(b"two", 60.0).answer.decode())
    print(server.process.poll() is None, server.usable)
with ForkServer("no_such_program", fork=True) as server:
    try:
        server.ask(b"", 60.0)
    except ServerEnded as error:
        print(error)
"""


def test_a_forked_server_has_what_its_caller_imported_and_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    found = subprocess.run([sys.executable, "-c", CALLER, tmp_path], capture_output=True, text=True, check=True, timeout=60)
    forked = ["one: imported True, SHOWN no True", "two: imported True, SHOWN no", "False False"]
    started = [line.replace("imported True", "imported False") for line in forked]
    assert found.stdout.splitlines() == [*forked, *started, "ModuleNotFoundError: No module named 'no_such_program'"]
