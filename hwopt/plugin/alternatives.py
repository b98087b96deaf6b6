"""Other settings of a plugin: what each needs and gains, for advice on memory, for free memory, and for `hwopt tune`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to set a plugin."""

    changes: Mapping[str, Any]
    """Changes of the plugin's table: {"layers": "selective"}; {"enabled": False} turns the plugin off."""
    note: str = ""
    """What it does, with its cost or gain: "recomputes the forward pass of every layer"."""
    time: float = 1.0
    """Approximate step time relative to the other choices of the scale: 1.33 is a third slower than 1.0."""
    alters: bool = False
    """Whether it changes what is trained, such as another effective batch."""


OFF = Choice(changes={"enabled": False})
"""The plugin is off."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Choices of which one is in effect. At least two."""

    choices: tuple[Choice, ...]
    present: int
    """The index of the choice that is in effect."""
    ordered: bool = True
    """Whether the choices go from the least memory to the most. The speed rises up to one of them, and falls after it.

    `hwopt plan` offers the choices before the present one to save memory, and those after it to use free memory.
    """
    input: bool = False
    """Whether it only changes when step batches are ready. It gains at most the time in which the loop waits for data."""
    parallel: bool = False
    """Whether step batches are ready faster in proportion to the number, as with data workers. Needs `input`."""
    tune: bool = False
    """Whether `hwopt tune` may measure the choices, because all but those with `alters` train the same."""

    @property
    def with_less_memory(self) -> tuple[Choice, ...]:
        """The choices that need less memory, the nearest to the present one first."""
        return self.choices[: self.present][::-1] if self.of_memory else ()

    @property
    def with_more_memory(self) -> tuple[Choice, ...]:
        """The choices that need more memory, the last one first, which is usually the fastest."""
        return self.choices[: self.present : -1] if self.of_memory else ()

    @property
    def of_memory(self) -> bool:
        """Whether the choices differ in the memory of the device, in a known order."""
        return self.ordered and not self.input

    def slower(self, choice: Choice) -> float:
        """The step time with `choice` relative to the present one."""
        return choice.time / self.choices[self.present].time
