"""A waterfall of speeds as inline SVG: from the baseline, over what each plugin contributes, to the profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hwopt.report.bench import Bench, BenchRow
from hwopt.report.charts import linear_axis, number
from hwopt.text import cut, printable

WIDTH, LEFT, RIGHT, AXIS = 760, 190, 150, 28
ROW, BAR = 30, 18
"""Heights of a row, and of the bar in it."""
WHOLE, GAIN, LOSS = 0, 2, 1
"""Colours of the page: of the baseline and the profile, of a bar to the right, and of one to the left."""


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

    width: int
    height: int
    left: int
    bottom: int
    description: str
    ticks: Sequence[tuple[float, str]]
    bars: Sequence[Bar]


def waterfall(bench: Bench) -> Waterfall | None:
    """The waterfall of a bench; None if the profile has no speed relative to the baseline."""
    found = list(steps(bench))
    if not found:
        return None
    axis = linear_axis(0.0, max(max(step.start, step.end, *(step.spread or ())) for step in found))

    def across(value: float) -> float:
        return round(LEFT + axis.position(value) * (WIDTH - LEFT - RIGHT), 1)

    bars = []
    for place, step in enumerate(found):
        y, ends = place * ROW + (ROW - BAR) / 2, sorted((across(step.start), across(step.end)))
        whisker = ""
        rightmost = ends[1]
        if step.spread is not None:
            low, high = map(across, step.spread)
            centre = y + BAR / 2
            whisker = f"M{low} {centre}H{high}M{low} {centre - 4}v8M{high} {centre - 4}v8"
            rightmost = max(rightmost, high)
        link = "" if place + 1 == len(found) else f"M{across(step.end)} {y + BAR}V{y + ROW}"
        colour = WHOLE if step.whole else GAIN if step.end >= step.start else LOSS
        width = round(max(ends[1] - ends[0], 1.0), 1)
        bars.append(
            Bar(step.name, ends[0], y, width, BAR, y + BAR / 2, colour, step.text, round(rightmost + 8, 1), whisker, link)
        )
    bottom = len(found) * ROW
    ticks = [(across(tick), number(tick)) for tick in axis.ticks]
    description = "; ".join(f"{step.name} {step.text}" for step in found)
    return Waterfall(WIDTH, bottom + AXIS, LEFT, bottom, description, ticks, bars)


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
    yield Step(label(profile), 0.0, whole.value, f"x{whole.value:.2f}", (whole.low, whole.high))


def label(row: BenchRow) -> str:
    return cut(printable(row.name), 24)


def effect_text(row: BenchRow) -> str:
    """The ratio of a plugin; "=" before one that is not clear."""
    assert row.speedup is not None
    return f"{'' if row.speedup.clear else '= '}x{row.speedup.value:.2f}"
