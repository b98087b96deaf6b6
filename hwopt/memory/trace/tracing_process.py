"""The process that traces plans: a request from the process that plans, and its answer.

Tracing needs a process that never had threads or CUDA: a child that is forked after a CUDA backward cannot run autograd, and an
import in a forked child may initialize CUDA a second time, which fails. So a fork server without GPUs traces. It imports torch
once and forks for each request, because emulating a card changes torch for the whole process. The fork builds the recipe once and
forks again for each shape, so they are traced in parallel. Plugins that only the caller knows travel as code (cloudpickle).
"""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal

from hwopt.model.light_imports import import_light
from hwopt.model.remote_code import trust_only, trusted_models
from hwopt.system import fork_server
from hwopt.system.fork_server import Fork, ForkServer, ServerEnded

if TYPE_CHECKING:
    from hwopt.memory.shapes import Head, Shape
    from hwopt.memory.trace.timeline import Timeline
    from hwopt.memory.trace.traced_step import StepFunctions
    from hwopt.planning.plan import Plan

    Shapes = tuple[tuple[str, Shape], ...]

CPU_SECONDS = 600.0
"""The most CPU time of a request, of all its processes together."""


@dataclass
class Spent:
    """CPU time of the requests of this process that were answered, and the most that the next one may take."""

    seconds: float = 0.0
    most: float = CPU_SECONDS


spent = Spent()
IDLE_SECONDS = 60.0
"""The server ends when no request comes for so long."""


class NotTraceable(Exception):
    """Fake tensors cannot run this recipe. The message says why."""


class UnknownCode(Exception):
    """The tracing process cannot import the code of the plan."""


@dataclass(frozen=True)
class TraceRequest:
    """A plan to trace at some shapes."""

    plan: Plan
    head: Head
    shapes: tuple[tuple[str, Shape], ...]
    """Names and shapes."""
    otherwise: tuple[str, Shape] | None = None
    """Traced too if `shapes` ran different operations."""
    layers: Literal["few", "all"] | None = None
    """few: fail if layers cannot be skipped; all: run every layer; None: skip layers if possible."""

    def packed(self, by_value: bool = False) -> bytes:
        """Return the request as bytes for `unpack`. With `by_value` the code of third-party plugins travels along.

        The recipe's callables cannot be pickled; the tracing process writes the recipe again.
        """
        import cloudpickle

        own = replace(self.plan, recipe=type(self.plan.recipe)(), memory=None, oom_plugins=())
        classes = {cls for entry in own.entries for cls in type(entry.plugin).__mro__} if by_value else set()
        names = {cls.__module__ for cls in classes if cls.__module__.partition(".")[0] not in ("hwopt", "builtins", "__main__")}
        modules = [sys.modules[name] for name in names if name in sys.modules]
        modules = [module for module in modules if module.__name__ not in cloudpickle.list_registry_pickle_by_value()]
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            content = cloudpickle.dumps(replace(self, plan=own))
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)
        return pickle.dumps((dict(os.environ), os.getcwd(), list(sys.path), trusted_models(), content))


def unpack(packed: bytes) -> TraceRequest:
    """Return a packed request, and apply the caller's environment to this process, except for its GPUs. Raises UnknownCode."""
    environment, folder, path, trusted, content = pickle.loads(packed)
    os.environ.clear()
    os.environ.update(environment | {"CUDA_VISIBLE_DEVICES": ""})
    sys.path[:] = path
    trust_only(trusted)
    with suppress(OSError):
        os.chdir(folder)
    try:
        found: TraceRequest = pickle.loads(content)
    except (ImportError, AttributeError) as error:
        raise UnknownCode(str(error)) from error
    return found


def traced(request: TraceRequest) -> dict[str, Timeline]:
    """Return the timelines that the tracing process makes. Raises NotTraceable with its error."""
    for by_value in (False, True):
        try:
            packed = request.packed(by_value)
        except Exception as error:  # a plugin may hold anything
            raise NotTraceable(f"the plan cannot be sent to the tracing process: {type(error).__name__}: {error}") from error
        found: Any = ask(packed)
        if isinstance(found, dict):
            return found
        kind, message = found
        if kind != UnknownCode.__name__:
            break
    raise NotTraceable(f"{kind}: {message}")


def ask(request: bytes) -> Any:
    """Return the answer of the tracing server to `request`. Raises NotTraceable if there is none."""
    with _lock:
        for attempt in (1, 2):
            try:
                reply = running_server().ask(request, spent.most, cpu_time=True)
            except ServerEnded as error:  # perhaps because no request came for a while
                close()
                if attempt == 2:
                    raise NotTraceable(f"the tracing process ended: {error}") from None
                continue
            if reply is None:
                raise NotTraceable(f"tracing took more than {spent.most:g} seconds of CPU time")
            spent.seconds += reply.cpu_seconds
            if reply.exit_code:
                raise NotTraceable(f"the tracing process died with exit code {reply.exit_code}")
            return pickle.loads(reply.answer)
    raise AssertionError("unreachable")


_running: ForkServer | None = None
_forks = False
"""Whether the next server is a fork of this process."""
_lock = threading.Lock()


def start_early(uses_device: bool = True) -> None:
    """Start the server if it does not run, so that it imports torch while this process does something else.

    If this process plans for cards that it does not use (not `uses_device`) and has not imported torch yet, the cards are hidden
    from it. Then the server can be forked from it when the first trace is needed, and nothing is imported twice.
    """
    global _forks
    if not uses_device and "torch" not in sys.modules:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        _forks = True
        import_light()
        return
    with suppress(OSError), _lock:
        running_server()


def running_server() -> ForkServer:
    """Return the running server of this process; start one if there is none."""
    global _running, _forks
    if _running is None or not _running.usable:
        close()
        atexit.register(close)
        _running = ForkServer(__name__, {"CUDA_VISIBLE_DEVICES": ""}, IDLE_SECONDS, fork=_forks)
        _forks = False  # if that one ends, a new interpreter is the safe way
    return _running


def close() -> None:
    """End the tracing server of this process, if there is one."""
    global _running
    if _running is not None:
        _running.close()
        atexit.unregister(close)
        _running = None


OFTEN_USED = ("peft", "bitsandbytes")
"""Packages that many plugins import. The server imports them while it waits for its first request."""


def serve(descriptor: int, parent: int, idle_s: float) -> None:
    """Serve the connection on the file `descriptor`. End with the process `parent`, if it is not 0, or after `idle_s` seconds."""
    fork_server.serve(descriptor, parent, prepare, answer, idle_s)


def prepare(connection: Connection) -> None:
    """Import what every trace needs, and what many need until the first request comes."""
    import_light()

    import accelerate.utils  # noqa: F401
    import torch
    import transformers.initialization
    import transformers.modeling_utils  # noqa: F401

    import hwopt.memory.trace.traced_step  # noqa: F401

    torch.set_num_threads(1)
    torch.compile = uncompiled  # the import of torch's compiler takes a second, and packages compile functions when imported
    transformers.utils.logging.set_verbosity_error()
    if not _forks:  # a fork has a request at once
        fork_server.import_modules(name for name in OFTEN_USED if not connection.poll())


def uncompiled(model: Any = None, **options: Any) -> Any:
    """`torch.compile` that compiles nothing: fake tensors never run what it would return."""
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


def trace(request: TraceRequest) -> dict[str, Timeline]:
    """Return the timelines of all shapes. Skips equal layers; if that fails, every layer is run."""
    from hwopt.memory.trace.traced_step import fake_step_functions

    with fake_step_functions(request.plan, request.head, whole=request.layers == "all") as steps:
        if request.layers == "few" and not steps.layers:
            raise StepFailed("NotRepeated", "no layers are equal")
        try:
            return trace_shapes(steps, request)
        except StepFailed as error:
            if not steps.layers or request.layers == "few" or error.args[0] == "SequentialScan":
                raise
    return trace(replace(request, layers="all"))


def trace_shapes(steps: StepFunctions, request: TraceRequest) -> dict[str, Timeline]:
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
