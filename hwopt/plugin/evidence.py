"""Evidence: what a plugin observed in the running objects, and the comparison with what its options ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Evidence:
    """Whether a plugin is really on, observed in the running objects, and what was seen."""

    status: Literal["active", "inactive", "unknown"]
    seen: str
    found: Mapping[str, Any] = field(default_factory=dict)
    """What was observed: name -> value, or the `range` in which the value lies. `Plugin.expects` says which values are right.

    A frozenset holds everything that was seen: each of its values must be an expected one."""

    @classmethod
    def of(cls, active: object, seen: str, **found: Any) -> Evidence:
        """Active evidence if `active` is true, else inactive evidence."""
        return cls("active" if active else "inactive", seen, found)

    @classmethod
    def active(cls, seen: str, **found: Any) -> Evidence:
        return cls("active", seen, found)

    @classmethod
    def inactive(cls, seen: str, **found: Any) -> Evidence:
        return cls("inactive", seen, found)

    @classmethod
    def unknown(cls, why: str, **found: Any) -> Evidence:
        return cls("unknown", why, found)

    def compared(self, expected: Mapping[str, Any]) -> Evidence:
        """This evidence, or an inactive one if a found value differs from `expected` (a frozenset: one of several values).

        Active evidence needs every expected value; evidence that is unknown may lack some.
        """
        wrong = []
        for name, value in expected.items():
            if name in self.found and not agrees(self.found[name], value):
                wrong.append(f"expected {name} {listed(value)}, found {listed(self.found[name], 'and')}")
            elif name not in self.found and self.status == "active":
                wrong.append(f"{name} was not observed, expected {listed(value)}")
        return Evidence("inactive", "; ".join((self.seen, *wrong)), self.found) if wrong else self


def agrees(found: Any, expected: Any) -> bool:
    """Whether an observed value is an expected one. A frozenset that was found: whether all of its values are."""
    if isinstance(found, frozenset):
        return found <= (expected if isinstance(expected, frozenset) else {expected})
    if isinstance(found, range):
        return expected in found
    return found in expected if isinstance(expected, frozenset) else bool(found == expected)


def listed(value: Any, word: str = "or") -> str:
    """A value, or several ones, for a message."""
    return f" {word} ".join(sorted(map(str, value))) if isinstance(value, frozenset) else str(value)


def first_names(names: Sequence[str], most: int = 3) -> str:
    """The first of `names`, and how many more there are: "a, b, c and 5 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
