"""The process that traces plans, as seen from the process that plans: sends a request, waits for the answer.

Tracing needs a process that never had threads or CUDA: a child that is forked after a CUDA backward cannot run autograd, and an
import in a forked child may initialize CUDA a second time, which fails. So tracing_server is a fork server without
GPUs. It imports torch once. Plugins that only this process knows travel as code (cloudpickle).
"""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from hwopt.model.remote_code import trust_only, trusted_models
from hwopt.system.fork_server import ForkServer, ServerEnded

if TYPE_CHECKING:
    from hwopt.memory.trace.dry_run import Head, Shape
    from hwopt.memory.trace.timeline import Timeline
    from hwopt.planning.plan import Plan

CPU_SECONDS = 600.0
"""The most CPU time of a request, of all its processes together."""
IDLE_SECONDS = 60.0
"""The server ends when no request comes for so long."""


class NotTraceable(Exception):
    """Fake tensors cannot run this recipe. The message says why."""


class UnknownCode(Exception):
    """The tracing process cannot import the code of the plan."""


@dataclass(frozen=True)
class Request:
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


def unpack(packed: bytes) -> Request:
    """Return a packed request, and apply the caller's environment to this process, except for its GPUs. Raises UnknownCode."""
    environment, folder, path, trusted, content = pickle.loads(packed)
    os.environ.clear()
    os.environ.update(environment | {"CUDA_VISIBLE_DEVICES": ""})
    sys.path[:] = path
    trust_only(trusted)
    with suppress(OSError):
        os.chdir(folder)
    try:
        found: Request = pickle.loads(content)
    except (ImportError, AttributeError) as error:
        raise UnknownCode(str(error)) from error
    return found


def traced(request: Request) -> dict[str, Timeline]:
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
                reply = running_server().ask(request, CPU_SECONDS, cpu_time=True)
            except ServerEnded as error:  # perhaps because no request came for a while
                close()
                if attempt == 2:
                    raise NotTraceable(f"the tracing process ended: {error}") from None
                continue
            if reply is None:
                raise NotTraceable(f"tracing took more than {CPU_SECONDS:g} seconds of CPU time")
            if reply.exit_code:
                raise NotTraceable(f"the tracing process died with exit code {reply.exit_code}")
            return pickle.loads(reply.answer)
    raise AssertionError("unreachable")


_running: ForkServer | None = None
_lock = threading.Lock()


def start_early() -> None:
    """Start the server if it does not run, so that it imports torch while this process does something else."""
    with suppress(OSError), _lock:
        running_server()


def running_server() -> ForkServer:
    """Return the running server of this process; start one if there is none."""
    global _running
    if _running is None or not _running.usable:
        close()
        atexit.register(close)
        _running = ForkServer("hwopt.memory.trace.tracing_server", {"CUDA_VISIBLE_DEVICES": ""}, IDLE_SECONDS)
    return _running


def close() -> None:
    """End the tracing server of this process, if there is one."""
    global _running
    if _running is not None:
        _running.close()
        atexit.unregister(close)
        _running = None
