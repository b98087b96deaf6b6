"""The program of the tracing process: a fork server for the requests of hwopt.memory.trace.tracing_process.

Each request runs in a fork, because emulating a card changes torch for the whole process. The
fork builds the recipe once and forks again for each shape, so that shapes are traced in parallel
and each from the same state.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any
from unittest import mock

from hwopt.memory.trace.tracing_process import Request, unpack
from hwopt.system import fork_server
from hwopt.system.fork_server import Fork

if TYPE_CHECKING:
    from hwopt.memory.trace.dry_run import Shape
    from hwopt.memory.trace.timeline import Timeline
    from hwopt.memory.trace.traced_step import StepFunctions

    Shapes = tuple[tuple[str, Shape], ...]

OFTEN_USED = ("peft", "bitsandbytes")
"""Packages that many plugins import. The server imports them while it waits for its first request."""


def serve(descriptor: int, parent: int, idle_s: float) -> None:
    """Serve the connection on the file `descriptor`. End with the process `parent`, if it is not 0, or after `idle_s` seconds."""
    fork_server.serve(descriptor, parent, prepare, answer, import_modules, idle_s)


def prepare(connection: Connection) -> None:
    """Import what every trace needs, and what many need until the first request comes."""
    import accelerate.utils  # noqa: F401
    import torch
    import torch._dynamo  # noqa: F401
    import transformers.initialization
    import transformers.modeling_utils  # noqa: F401

    import hwopt.memory.trace.traced_step  # noqa: F401

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    import_modules(name for name in OFTEN_USED if not connection.poll())


def import_modules(names: Iterable[str]) -> None:
    """Import what a fork imported, so that the next one need not.

    Functions that a package compiles when it is imported stay as they are: fake tensors never run them, and the import of torch's
    compiler takes a second.
    """
    import torch

    with mock.patch.object(torch, "compile", uncompiled):
        fork_server.import_modules(names)


def uncompiled(model: Any = None, **options: Any) -> Any:
    """`torch.compile` that compiles nothing."""
    return uncompiled if model is None else model


class StepFailed(Exception):
    """A child could not trace its shape. Holds the name of the class of its error, and the message."""


def answer(request: bytes) -> bytes:
    """Return the pickled timelines by name, or the pickled error: (name of its class, message)."""
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
    from hwopt.memory.trace.traced_step import fake_step_functions

    with fake_step_functions(request.plan, request.head, whole=request.layers == "all") as steps:
        if request.layers == "few" and not steps.layers.installed:
            raise StepFailed("NotRepeated", "no layers are equal")
        try:
            return trace_shapes(steps, request)
        except StepFailed as error:
            if not steps.layers.installed or request.layers == "few" or error.args[0] == "SequentialScan":
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
    forks = [Fork(partial(pickled, partial(steps.timelines, name, shape))) for name, shape in shapes]
    for reply in [fork.result() for fork in forks]:
        if reply.exit_code:
            raise StepFailed("RuntimeError", f"the tracing process died with exit code {reply.exit_code}")
        answered = pickle.loads(reply.answer)
        if isinstance(answered, tuple):
            raise StepFailed(*answered)
        found |= answered
    return found


def same_programs(found: dict[str, Timeline], shapes: Shapes) -> bool:
    """Whether all shapes ran the same operations."""
    (first, _), *others = shapes
    return all(found[f"{what}.{first}"].same_program(found[f"{what}.{name}"]) for what in ("train", "eval") for name, _ in others)
