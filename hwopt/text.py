"""Text for messages: names, lists and values that fit on a line, whatever they hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the known name that is most like `name`, or an empty string."""
    from difflib import get_close_matches  # costs what listing profiles cannot spare

    matches = get_close_matches(name[:80], [one for one in known if len(one) <= 200], n=1, cutoff=0.5)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def listing(names: Sequence[str], limit: int = 12) -> str:
    """The accepted names in one line, cut where there are too many to read."""
    shown = ", ".join(cut(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown}, … ({len(names)} in all)"


def truncate(value: object, limit: int = 60) -> str:
    """`repr(value)` that fits on a line, whatever was typed."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def cut(text: str, limit: int = 80) -> str:
    """`text` as it is, but for what is too long to read."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def printable(text: str) -> str:
    """`text` without what a terminal would obey: control characters, escape sequences and marks that turn the direction of
    writing around are spelled out. Names, labels and messages of files end on the screen; lines and tabs stay.
    """
    return "".join(letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1] for letter in text)


def first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]
