"""Models whose own code may be run: those named behind `--trust-remote-code` on the command line of this process, and no others.

Kept for the process alone and stored nowhere, so that neither a job file nor a run folder can switch it on.
"""

from __future__ import annotations

from collections.abc import Iterable

_named: set[str] = set()


def trust_only(names: Iterable[str]) -> None:
    """From here on, the models `names`."""
    _named.clear()
    _named.update(names)


def is_trusted(name: str | None) -> bool:
    return name in _named


def trusted_models() -> list[str]:
    return sorted(_named)
