"""Guards around a plugin's code: an error in a hook, or in a callable of the recipe, becomes a PluginError that names the plugin.

`sys.exit()` in a plugin is an error too: it must not end a run as if the run were complete. Unchanged are interrupts and signals
of the user, hwopt's own errors, and out of memory, which the loop handles. A full disk is a StorageError that names the plugin
which was writing.
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
    asked = isinstance(error, KeyboardInterrupt) or signals.received() is not None
    short = type(error).__name__ == "OutOfMemoryError"  # torch's, which is heavy
    says_what = isinstance(error, HwoptError) and error.exit_code != HwoptError.exit_code
    if asked or short or says_what:
        raise error
    if is_disk_full(error):
        where = f"{error.filename}: " if isinstance(error, OSError) and error.filename is not None else ""
        why = getattr(error, "strerror", None) or error
        raise StorageError(f"{who}: {what}: {where}{why}. Free some space and run again.") from error
    said = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raised {type(error).__name__}: {error}"
    raise PluginError(f"{who}: {what} {said}") from error


class plugin_guard(redirect_stdout[TextIO]):
    """A context around a plugin's code: its errors become PluginErrors of `who` in `what`, its output goes to standard error."""

    def __init__(self, who: str, what: str) -> None:
        super().__init__(sys.stderr)
        self.who, self.what = who, what

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if error is not None:
            raise_plugin_error(error, self.who, self.what)


@dataclass(frozen=True)
class Guarded:
    """A plugin's callable whose errors name the plugin. It has the callable's attributes, and pickles if the callable does."""

    function: Callable[..., Any]
    who: str
    what: str

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        try:
            return self.function(*arguments, **options)
        except BaseException as error:
            raise_plugin_error(error, self.who, self.what)

    def __getattr__(self, name: str) -> Any:
        if "function" not in self.__dict__:  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.function, name)


class GuardedOnce(Guarded):
    """A plugin's callable that runs once in a run, outside the steps: its output goes to standard error too."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        with plugin_guard(self.who, self.what):
            return self.function(*arguments, **options)


@contextmanager
def guarded_context(make: Callable[[], Any]) -> Iterator[None]:
    """A plugin's process context: errors on entering and leaving name the plugin, errors of the block stay as they are.

    An error of the block is raised again if the plugin's context suppresses it.
    """
    inside: BaseException | None = None
    try:
        with make():
            try:
                yield
            except BaseException as error:
                inside = error
                raise
    except BaseException as error:
        if error is inside:
            raise
        raise_plugin_error(error, getattr(make, "who", "a plugin"), "recipe.process")
    if inside is not None:
        raise inside
