"""A waterfall of speeds as inline SVG: from the baseline, over what each plugin contributes, to the profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hwopt.report.bench import Bench, BenchRow
from hwopt.report.charts import linear_axis, number
from hwopt.text import cut, printable

AXIS, BAR = 28, 18
"""Heights of the axis, and of a bar."""
WHOLE, GAIN, LOSS = 0, 2, 1
"""Colours of the page: of the baseline and the profile, of a bar to the right, and of one to the left."""


@dataclass(frozen=True)
class Layout:
    """Sizes of a picture in pixels. `name` is its class in the page."""

    name: str
    width: int
    left: int
    """Space at the left of the bars: for their names, or for none."""
    right: int
    """Space for the figures."""
    row: int
    names_above: bool = False
    """Whether the name of a bar is above it, and not at its left."""

    @property
    def anchor(self) -> str:
        return "start" if self.names_above else "end"

    def bar_top(self, place: int) -> float:
        """The top of the bar in the row `place`."""
        return place * self.row + (self.row - BAR - 4 if self.names_above else (self.row - BAR) / 2)


WIDE = Layout("wide", 760, 190, 150, 30)
NARROW = Layout("narrow", 376, 8, 72, 44, names_above=True)
"""For a telephone."""


@dataclass(frozen=True)
class Step:
    """A bar before it is drawn: from one speed to another, relative to the baseline."""

    name: str
    start: float
    end: float
    text: str
    spread: tuple[float, float] | None = None
    """The lowest and the highest end over the rounds."""

    @property
    def whole(self) -> bool:
        return self.start == 0.0


@dataclass(frozen=True)
class Bar:
    """A bar as the template draws it. `whisker` and `link` are paths, or ""."""

    name: str
    name_x: float
    name_y: float
    x: float
    y: float
    width: float
    height: float
    middle: float
    colour: int
    text: str
    text_x: float
    whisker: str
    link: str


@dataclass(frozen=True)
class Waterfall:
    """The picture as the template draws it."""

    layout: Layout
    height: int
    bottom: int
    description: str
    ticks: Sequence[tuple[float, str]]
    bars: Sequence[Bar]


def waterfall(bench: Bench, layout: Layout = WIDE) -> Waterfall | None:
    """The waterfall of a bench; None if the profile has no speed relative to the baseline."""
    found = list(steps(bench))
    if not found:
        return None
    axis = linear_axis(0.0, max(max(step.start, step.end, *(step.spread or ())) for step in found))

    def across(value: float) -> float:
        return round(layout.left + axis.position(value) * (layout.width - layout.left - layout.right), 1)

    bars = []
    for place, step in enumerate(found):
        y, ends = layout.bar_top(place), sorted((across(step.start), across(step.end)))
        whisker = ""
        rightmost = ends[1]
        if step.spread is not None:
            low, high = map(across, step.spread)
            centre = y + BAR / 2
            whisker = f"M{low} {centre}H{high}M{low} {centre - 4}v8M{high} {centre - 4}v8"
            rightmost = max(rightmost, high)
        link = "" if place + 1 == len(found) else f"M{across(step.end)} {y + BAR}V{y + layout.row}"
        colour = WHOLE if step.whole else GAIN if step.end >= step.start else LOSS
        width = round(max(ends[1] - ends[0], 1.0), 1)
        name = (layout.left, y - 5) if layout.names_above else (layout.left - 10, y + BAR / 2 + 4)
        text_x = round(rightmost + 8, 1)
        bars.append(Bar(step.name, *name, ends[0], y, width, BAR, y + BAR / 2, colour, step.text, text_x, whisker, link))
    bottom = len(found) * layout.row
    ticks = [(across(tick), number(tick)) for tick in axis.ticks]
    description = "; ".join(f"{step.name} {step.text}" for step in found)
    return Waterfall(layout, bottom + AXIS, bottom, description, ticks, bars)


def steps(bench: Bench) -> Iterator[Step]:
    """The bars from the baseline to the profile; none if the profile has no speed. An effect that is not clear counts as none."""
    profile = bench.row("profile")
    if profile is None or profile.speedup is None:
        return
    yield Step("baseline", 0.0, 1.0, "x1")
    reached = 1.0
    for row in bench.rows:
        if row.role == "added" and row.speedup is not None:
            found = row.speedup
            spread = (reached * found.low, reached * found.high)
            effect = found.value if found.clear else 1.0
            yield Step(label(row), reached, reached * effect, effect_text(row), spread)
            reached *= effect
    whole = profile.speedup
    yield Step("together", reached, whole.value, f"x{whole.value / reached:.2f}")
    yield Step(label(profile), 0.0, whole.value, effect_text(profile), (whole.low, whole.high))


def label(row: BenchRow) -> str:
    return cut(printable(row.name), 24)


def effect_text(row: BenchRow) -> str:
    """The ratio of a plugin; "=" before one that is not clear."""
    assert row.speedup is not None
    return f"{'' if row.speedup.clear else '= '}x{row.speedup.value:.2f}"
