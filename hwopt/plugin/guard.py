"""Guards around plugin code: an error in a hook or a recipe callable becomes a PluginError that names the plugin.

`sys.exit()` in a plugin is an error too, because it would end the run as if it were complete. User interrupts, signals, hwopt's
own errors and out-of-memory errors (handled by the loop) are raised unchanged. A full disk is a StorageError.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO

from hwopt.errors import HwoptError, PluginError, StorageError, is_disk_full
from hwopt.system import signals


def raise_plugin_error(error: BaseException, who: str, what: str) -> NoReturn:
    """Raise `error` as a PluginError, or unchanged if the plugin did not cause it."""
    by_user = isinstance(error, KeyboardInterrupt) or signals.received() is not None
    out_of_memory = type(error).__name__ == "OutOfMemoryError"  # by name: importing torch is slow
    from_hwopt = isinstance(error, HwoptError) and error.exit_code != HwoptError.exit_code
    if by_user or out_of_memory or from_hwopt:
        raise error
    if is_disk_full(error):
        where = f"{error.filename}: " if isinstance(error, OSError) and error.filename is not None else ""
        why = getattr(error, "strerror", None) or error
        raise StorageError(f"{who}: {what}: {where}{why}. Free some space and run again.") from error
    event = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raised {type(error).__name__}: {error}"
    raise PluginError(f"{who}: {what} {event}") from error


class plugin_guard(redirect_stdout[TextIO]):
    """A context for plugin code: errors become PluginErrors that name `who` and `what`; its output goes to standard error."""

    def __init__(self, who: str, what: str) -> None:
        super().__init__(sys.stderr)
        self.who, self.what = who, what

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if error is not None:
            raise_plugin_error(error, self.who, self.what)


class plugin_hook(plugin_guard):
    """The same for a hook of a plugin: a PluginError of the hook that does not name the plugin gets `who` in front."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        super(plugin_guard, self).__exit__(kind, error, trace)
        if isinstance(error, PluginError) and not str(error).startswith(self.who):
            raise PluginError(f"{self.who}: {error}") from error
        if error is not None:
            raise_plugin_error(error, self.who, self.what)


@dataclass(frozen=True)
class Guarded:
    """A plugin's callable whose errors name the plugin. Has the attributes of the callable; picklable if the callable is."""

    function: Callable[..., Any]
    who: str
    what: str

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        try:
            return self.function(*arguments, **options)
        except BaseException as error:
            raise_plugin_error(error, self.who, self.what)

    def __getattr__(self, name: str) -> Any:
        if "function" not in self.__dict__:  # during unpickling
            raise AttributeError(name)
        return getattr(self.function, name)


def unguarded(value: Any) -> Any:
    """The plugin's own object, without the guard around it."""
    return value.function if isinstance(value, Guarded) else value


class GuardedOnce(Guarded):
    """A Guarded callable that runs once per run, outside the steps: its standard output goes to standard error."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        with plugin_guard(self.who, self.what):
            return self.function(*arguments, **options)


@contextmanager
def guarded_context(make: Callable[[], Any]) -> Iterator[None]:
    """A plugin's process context. Errors on entering and leaving name the plugin; it cannot suppress errors of the block."""
    guard = plugin_guard(getattr(make, "who", "a plugin"), "recipe.process")
    with guard:
        context = make()
        context.__enter__()
    try:
        yield
    finally:
        with guard:
            context.__exit__(*sys.exc_info())
