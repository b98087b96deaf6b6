"""The program of the tracing process: answers requests of hwopt.memory.tracing_process until the connection closes.

Each request runs in a forked child, because emulating a card changes torch for the whole process. The child builds the recipe
once and forks again for each shape, so that shapes are traced in parallel and each from the same state. A process that dies takes
its children along (Linux: prctl; elsewhere the server itself traces, one shape after the other).
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any
from unittest import mock

from hwopt.memory.tracing_process import IDLE
from hwopt.memory.tracing_request import Request, unpack

if TYPE_CHECKING:
    from hwopt.memory.dry_run import Shape
    from hwopt.memory.timeline import Timeline
    from hwopt.memory.traced_step import StepFunctions

    Shapes = tuple[tuple[str, Shape], ...]

IDLE_SECONDS = 60.0
FORKS = sys.platform == "linux"
PR_SET_PDEATHSIG = 1
OFTEN_USED = ("peft", "bitsandbytes")
"""Packages that many plugins import. The server imports them while it waits for its first request."""


def main(descriptor: int, parent: int) -> None:
    """Serve the connection on the file `descriptor`. End with the process `parent`, if it is not 0."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the caller decides
    if parent:
        end_with(parent)
    connection = Connection(descriptor)
    warnings.simplefilter("ignore")
    import_libraries()
    import_modules(name for name in OFTEN_USED if not connection.poll())
    gc.freeze()  # shares the memory of all that is imported with the children
    serve(connection)


def import_libraries() -> None:
    """Import what every trace needs."""
    import accelerate.utils  # noqa: F401
    import torch
    import torch._dynamo  # noqa: F401
    import transformers.initialization
    import transformers.modeling_utils  # noqa: F401

    import hwopt.memory.traced_step  # noqa: F401

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()


def end_with(parent: int) -> None:
    """Let the kernel kill this process when `parent`, which started it, ends."""
    if FORKS:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def serve(connection: Connection) -> None:
    """Answer requests until the connection closes or no request comes for IDLE_SECONDS."""
    with suppress(EOFError, OSError):
        while connection.poll(IDLE_SECONDS):
            request = connection.recv_bytes()
            if FORKS:
                child = Child(partial(answer, request, connection))
                if connection in wait([connection, child.receiver]):
                    child.process.kill()  # the caller is gone
                    return
                connection.send_bytes(child.result())
                import_modules(child.imported)
            else:
                connection.send_bytes(answer(request))
        print(IDLE, file=sys.stderr)


class Child:
    """A forked process that runs a function without arguments and returns its bytes."""

    def __init__(self, work: Callable[[], bytes]) -> None:
        context = multiprocessing.get_context("fork")
        self.receiver, sender = context.Pipe(duplex=False)
        self.process = context.Process(target=run_child, args=(work, sender, os.getpid()))
        self.process.start()
        self.imported: list[str] = []
        """The packages and the models that the function imported."""
        sender.close()

    def result(self) -> bytes:
        """Return what the function returned, or a failed answer if the process died."""
        try:
            found = self.receiver.recv_bytes()
            self.imported = json.loads(self.receiver.recv_bytes())
            return found
        except EOFError:
            self.process.join()
            return pickle.dumps(("RuntimeError", f"the tracing process died with exit code {self.process.exitcode}"))
        finally:
            self.receiver.close()
            self.process.join()


def run_child(work: Callable[[], bytes], sender: Connection, parent: int) -> None:
    import torch

    end_with(parent)
    torch.set_num_threads(1)  # makes torch's thread pool again, which a fork loses; its own threads would race for that and abort
    before = set(sys.modules)
    sender.send_bytes(work())
    imported = [name for name in sys.modules if name not in before and ("." not in name or ".modeling_" in name)]
    sender.send_bytes(json.dumps(imported).encode())
    sender.close()


def import_modules(names: Iterable[str]) -> None:
    """Import what a child imported, so that the next one need not. Ignores what only that child could import.

    Functions that a package compiles when it is imported stay as they are: fake tensors never run them, and the import of torch's
    compiler takes a second.
    """
    import torch

    with mock.patch.object(torch, "compile", uncompiled):
        for name in names:
            with suppress(Exception):
                importlib.import_module(name)
    gc.freeze()


def uncompiled(model: Any = None, **options: Any) -> Any:
    """`torch.compile` that compiles nothing."""
    return uncompiled if model is None else model


class StepFailed(Exception):
    """A child could not trace its shape. The message says why."""


def answer(request: bytes, connection: Connection | None = None) -> bytes:
    """Return the pickled timelines by name, or the pickled error: (name of its class, message)."""
    if connection is not None:
        connection.close()  # only the server may keep it open
    return pickled(lambda: trace(unpack(request)))


def pickled(work: Callable[[], Any]) -> bytes:
    """Return what `work` returns, or its error, pickled."""
    try:
        return pickle.dumps(work())
    except StepFailed as error:
        return pickle.dumps(error.args)
    except Exception as error:
        return pickle.dumps((type(error).__name__, next(iter(str(error).splitlines()), "")[:200]))


def trace(request: Request) -> dict[str, Timeline]:
    """Return the timelines of all shapes. Skips equal layers; if that fails, every layer is run."""
    from hwopt.memory.traced_step import fake_step_functions

    if not FORKS:
        return trace_here(request)
    with fake_step_functions(request.plan, request.labels, whole=request.layers == "all") as steps:
        if request.layers == "few" and not steps.layers.installed:
            raise StepFailed("NotRepeated", "no layers are equal")
        try:
            return trace_shapes(steps, request)
        except StepFailed:
            if not steps.layers.installed or request.layers == "few":
                raise
            steps.layers.remove()
            return trace_shapes(steps, request)


def trace_shapes(steps: StepFunctions, request: Request) -> dict[str, Timeline]:
    """Return the timelines of all shapes, each traced in a child."""
    found = trace_in_children(steps, request.shapes)
    if request.otherwise is not None and not same_programs(found, request.shapes):
        found |= trace_in_children(steps, (request.otherwise,))
    return found


def trace_in_children(steps: StepFunctions, shapes: Shapes) -> dict[str, Timeline]:
    found: dict[str, Timeline] = {}
    children = [Child(partial(pickled, partial(steps.timelines, name, shape))) for name, shape in shapes]
    for answered in [pickle.loads(child.result()) for child in children]:
        if isinstance(answered, tuple):
            raise StepFailed(*answered)
        found |= answered
    return found


def same_programs(found: dict[str, Timeline], shapes: Shapes) -> bool:
    """Whether all shapes ran the same operations."""
    (first, _), *others = shapes
    return all(found[f"{what}.{first}"].same_program(found[f"{what}.{name}"]) for what in ("train", "eval") for name, _ in others)


def trace_here(request: Request) -> dict[str, Timeline]:
    """Return the timelines of all shapes, traced one after the other in this process."""
    from hwopt.memory.traced_step import NotRepeated, fake_step_functions

    def traced(shapes: Shapes) -> dict[str, Timeline]:
        found: dict[str, Timeline] = {}
        for name, shape in shapes:
            try:
                with fake_step_functions(request.plan, request.labels, whole=request.layers == "all") as steps:
                    found |= steps.timelines(name, shape)
            except NotRepeated:
                if request.layers == "few":
                    raise
                with fake_step_functions(request.plan, request.labels, whole=True) as steps:
                    found |= steps.timelines(name, shape)
        return found

    found = traced(request.shapes)
    if request.otherwise is not None and not same_programs(found, request.shapes):
        found |= traced((request.otherwise,))
    return found
