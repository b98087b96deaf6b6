"""The models whose custom code may run: those given to `--trust-remote-code` on the command line of this process.

The list lives in memory only and is never saved, so that no job file or run folder can allow code.
"""

from __future__ import annotations

from collections.abc import Iterable

_trusted: set[str] = set()


def trust_only(names: Iterable[str]) -> None:
    """Trust the models `names`, and no others."""
    _trusted.clear()
    _trusted.update(names)


def is_trusted(name: str | None) -> bool:
    """Whether the custom code of the model `name` may run."""
    return name in _trusted


def trusted_models() -> list[str]:
    """The names of all trusted models, sorted."""
    return sorted(_trusted)
