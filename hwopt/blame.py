"""Whatever a plugin's code raises is the plugin's error and names it: in its hooks, and in what it leaves in a recipe.

`sys.exit()` in a plugin is an error like any other: it must not end a run as if that were done. What the user asked for (an
interrupt, a signal) and hwopt's own errors go through as they are, and so does out of memory, which the loop knows how to take,
and a full disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from hwopt import signals
from hwopt.errors import HwoptError, PluginError, is_disk_full


def blame(error: BaseException, who: str, what: str) -> NoReturn:
    """Raise `error` as the plugin's, or as it is where the plugin is not at fault."""
    asked = isinstance(error, KeyboardInterrupt | GeneratorExit) or signals.received() is not None
    short = is_disk_full(error) or type(error).__name__ == "OutOfMemoryError"  # torch's, which is heavy
    if asked or short or isinstance(error, HwoptError):
        raise error
    said = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raised {type(error).__name__}: {error}"
    raise PluginError(f"{who}: {what} {said}") from error


@contextmanager
def blaming(who: str, what: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        blame(error, who, what)


@dataclass(frozen=True)
class Blamed:
    """A callable of a plugin; pickles if that does, and has its attributes (evidence looks for `__self__`)."""

    function: Callable[..., Any]
    who: str
    what: str

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        try:
            return self.function(*arguments, **options)
        except BaseException as error:
            blame(error, self.who, self.what)

    def __getattr__(self, name: str) -> Any:
        if "function" not in self.__dict__:  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.function, name)


@contextmanager
def entered(make: Callable[[], Any]) -> Iterator[None]:
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
        blame(error, getattr(make, "who", "a plugin"), "recipe.process")
    if inside is not None:
        raise inside
