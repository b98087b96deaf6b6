"""Events that call functions, for tests."""

from collections.abc import Callable
from typing import Any

from hwopt.plugin import Events


def calling(**functions: Callable[..., Any]) -> Events:
    """Events that call the functions: `calling(on_gradients=look)`."""
    methods = {name: staticmethod(function) for name, function in functions.items()}
    found: Events = type("Calls", (Events,), methods)()
    return found
