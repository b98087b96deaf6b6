"""Text for messages: names, lists and values shortened to fit on one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` with the known name that is most similar to `name`, or an empty string."""
    from difflib import get_close_matches  # imported here: `hwopt profiles` must start fast

    matches = get_close_matches(name[:80], [each for each in known if len(each) <= 200], n=1, cutoff=0.5)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def listing(names: Sequence[str], limit: int = 12) -> str:
    """`names` separated by commas; past `limit` names only the first ones and the total."""
    shown = ", ".join(cut(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown}, … ({len(names)} in all)"


def truncate(value: object, limit: int = 60) -> str:
    """`repr(value)`, at most `limit` characters long."""
    return cut(repr(value), limit)


def cut(text: str, limit: int = 80) -> str:
    """`text`, at most `limit` characters long."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def counted(number: int, noun: str) -> str:
    """`number` with `noun`, in the plural unless it is 1: "1 row", "1,200 rows"."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


def millions(number: int) -> str:
    """`number` in millions, as "109.5 M"; a smaller one in full."""
    return f"{number / 1e6:,.1f} M" if number >= 1e6 else f"{number:,}"


def printable(text: str) -> str:
    """`text` with control characters, escape sequences and bidirectional marks spelled out; line breaks and tabs stay.

    Text from files is printed to the terminal, which would execute these characters.
    """
    return "".join(letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1] for letter in text)


def first_line(error: BaseException) -> str:
    """The first line of `str(error)`, or the name of its class if the text is empty; at most 200 characters."""
    return cut(next(iter(str(error).strip().splitlines()), type(error).__name__), 200)


def short_place(place: str) -> str:
    """`place` without folders, as in "rtx3070_8gb.toml:37" and "decided here, instead of 'auto' (rtx3070_8gb.toml:37)"."""
    what, bracket, inner = place.rpartition(" (") if place.endswith(")") else ("", "", place)
    return what + bracket + inner.replace("\\", "/").rsplit("/", 1)[-1]
