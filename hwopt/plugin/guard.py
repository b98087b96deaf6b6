"""Whatever a plugin's code raises is the plugin's error and names it: in its hooks, and in what it leaves in a recipe.

`sys.exit()` in a plugin is an error like any other: it must not end a run as if that were done. What the user asked for (an
interrupt, a signal) and hwopt's own errors go through as they are, and so does out of memory, which the loop knows how to take.
A full disk is nobody's fault, and the message says who wanted to write.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any, NoReturn

from hwopt.errors import HwoptError, PluginError, StorageError, is_disk_full
from hwopt.system import signals
from hwopt.text import safe_str


def raise_plugin_error(error: BaseException, who: str, what: str) -> NoReturn:
    """Raise `error` as the plugin's, or as it is where the plugin is not at fault."""
    asked = isinstance(error, KeyboardInterrupt) or signals.received() is not None
    short = type(error).__name__ == "OutOfMemoryError"  # torch's, which is heavy
    says_what = isinstance(error, HwoptError) and error.exit_code != HwoptError.exit_code
    if asked or short or says_what:
        raise error
    if is_disk_full(error):
        where = f"{error.filename}: " if isinstance(error, OSError) and error.filename is not None else ""
        why = getattr(error, "strerror", None) or safe_str(error)
        raise StorageError(f"{who}: {what}: {where}{why}. Free some space and run again.") from error
    said = (
        f"called sys.exit({error.code!r})"
        if isinstance(error, SystemExit)
        else f"raised {type(error).__name__}: {safe_str(error)}"
    )
    raise PluginError(f"{who}: {what} {said}") from error


@contextmanager
def plugin_guard(who: str, what: str) -> Iterator[None]:
    """Around a plugin's code that is called once: what it raises is its error, what it prints goes to the standard error."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except BaseException as error:
        trace = error.__traceback__
        if isinstance(error, GeneratorExit) and trace is not None and trace.tb_next is None:
            raise  # nobody's: Python closes this very generator
        raise_plugin_error(error, who, what)


@dataclass(frozen=True)
class Guarded:
    """A callable of a plugin; pickles if that does, and has its attributes (evidence looks for `__self__`)."""

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
    """A callable that is called once a run, outside of the steps: what it prints goes to the standard error too."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        with plugin_guard(self.who, self.what):
            return self.function(*arguments, **options)


@contextmanager
def guarded_context(make: Callable[[], Any]) -> Iterator[None]:
    """Inside of a plugin's process context: what that raises on the way in and out is the plugin's, what the block raises is not.

    A context that swallows the block's error does not make it undone.
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
