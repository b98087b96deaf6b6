"""Which plans were answered before: whether `hwopt plan` should start the tracing process before it knows its cache key.

The key of a trace needs the libraries, which take seconds to import. The tracing process imports them too, and should start at
once, but only if the cache has no answer. A small file per answered plan tells. If it is wrong, only time is lost.
"""

from __future__ import annotations

from contextlib import suppress
from hashlib import sha256
from pathlib import Path


def answered(cache: Path, question: str) -> bool:
    """Whether the plan that `question` spells out was answered with this cache."""
    with suppress(OSError):
        return place(cache, question).exists()
    return False


def remember(cache: Path, question: str) -> None:
    """Record that the cache has the answer to `question`."""
    with suppress(OSError):
        place(cache, question).parent.mkdir(parents=True, exist_ok=True)
        place(cache, question).touch()


def place(cache: Path, question: str) -> Path:
    return cache / "memory" / "answered" / sha256(question.encode("utf-8", "surrogateescape")).hexdigest()[:24]
