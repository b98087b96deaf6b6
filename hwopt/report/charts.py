"""Line charts as inline SVG: one line a run, with axes, a legend, a description, and the values as a table.

Own code instead of a plotting library: matplotlib writes fixed colours, which cannot follow the theme of the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

MAX_BUCKETS = 200  # a long series is drawn with the lowest and the highest value of each of so many parts
TABLE_ROWS = 12  # points of a series in the table beside its chart
COLOURS = 6  # number of colours of the page, --line-0 and so on
LOG_FROM = 200.0  # ratio of the largest to the smallest value from which an axis may be logarithmic

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 28, 12, 40

Point = tuple[float, float]
ChartScale = Literal["range", "zero", "logarithmic"]
"""What the vertical axis shows: the range of the values, also 0, or powers of ten if the positive values span LOG_FROM."""


@dataclass(frozen=True)
class Series:
    """One line. A value that is not finite breaks it."""

    name: str
    points: Sequence[Point]
    run: int = 0  # the number of the run, which gives the colour
    dashed: bool = False
    marked: bool = False  # whether each point has a mark, as the few evaluations have

    @cached_property
    def finite(self) -> list[Point]:
        return [point for point in self.points if math.isfinite(point[1])]


@dataclass(frozen=True)
class ChartAxis:
    """An axis: its range and its ticks."""

    low: float
    high: float
    ticks: Sequence[float]
    logarithmic: bool = False

    def position(self, value: float) -> float:
        """The place of `value` between the lower end (0) and the upper one (1)."""
        if self.logarithmic:
            return (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class ChartLine:
    """A series as it is drawn."""

    name: str
    colour: int
    dash: str
    path: str
    marks: Sequence[Point]


@dataclass(frozen=True)
class Chart:
    """A chart as the template draws it. `id` is unique in the page."""

    id: str
    title: str
    unit: str
    description: str
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    lines: Sequence[ChartLine]
    table: Sequence[Sequence[str]]  # rows of (name, step, value)


def line_chart(
    id: str, title: str, unit: str, series: Sequence[Series], last_step: int, scale: ChartScale = "range"
) -> Chart | None:
    """The chart of `series` over the steps from 0 to `last_step`; None if no series has a finite value."""
    drawn = [each for each in series if each.finite]
    if not drawn:
        return None
    x_axis = step_axis(last_step)
    y_axis = value_axis([y for each in drawn for _, y in each.finite], scale)
    if y_axis.logarithmic:
        unit = f"{unit}, logarithmic" if unit else "logarithmic"
    return Chart(
        id,
        title,
        unit,
        " ".join(map(sentence, drawn)),
        [(x_position(x_axis, tick), f"{tick:,.0f}") for tick in x_axis.ticks],
        [(y_position(y_axis, tick), text) for tick, text in zip(y_axis.ticks, different_texts(y_axis.ticks), strict=True)],
        [drawn_line(each, x_axis, y_axis) for each in drawn],
        [row for each in drawn for row in table_rows(each)],
    )


def x_position(axis: ChartAxis, value: float) -> float:
    return round(LEFT + axis.position(value) * (WIDTH - LEFT - RIGHT), 1)


def y_position(axis: ChartAxis, value: float) -> float:
    return round(HEIGHT - BOTTOM - axis.position(value) * (HEIGHT - TOP - BOTTOM), 1)


def value_axis(values: Sequence[float], scale: ChartScale) -> ChartAxis:
    """The axis that shows `values`. The ends of a linear one are ticks."""
    low, high = min(values), max(values)
    if scale == "logarithmic" and low > 0 and high / low >= LOG_FROM:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        every = max(1, math.ceil((last - first) / 5))
        return ChartAxis(10.0**first, 10.0**last, [10.0**exponent for exponent in range(first, last + 1, every)], True)
    if scale == "zero":
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= max(abs(low), abs(high)) * 1e-9:
        low, high = (low - abs(low) * 0.1, high + abs(high) * 0.1) if low else (-1.0, 1.0)
    step = nice_step((high - low) / 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return ChartAxis(first * step, last * step, [float(f"{number * step:.12g}") for number in range(first, last + 1)])


def step_axis(last: int) -> ChartAxis:
    """The axis of the steps from 0 to `last`; its ticks are whole numbers."""
    last = max(last, 1)
    return ChartAxis(0, last, list(range(0, last + 1, max(int(nice_step(last / 5)), 1))))


def nice_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))


def drawn_line(series: Series, x_axis: ChartAxis, y_axis: ChartAxis) -> ChartLine:
    path, marks, pen_up = "", [], True
    for x, y in reduced(series.points):
        if not math.isfinite(y):
            pen_up = True
            continue
        place = x_position(x_axis, x), y_position(y_axis, y)
        text = f"{place[0]:g} {place[1]:g}"
        path += f"M{text}h0" if pen_up else f"L{text}"  # h0: a dot, should no other point follow
        marks.append(place)
        pen_up = False
    single = len(series.finite) == 1
    dash = "6 4" if series.dashed else ""
    return ChartLine(series.name, series.run % COLOURS, dash, "" if single else path, marks if series.marked or single else [])


def reduced(points: Sequence[Point]) -> list[Point]:
    """`points`, or the lowest, the highest and a not finite one of each of MAX_BUCKETS parts, in their order."""
    size = math.ceil(len(points) / MAX_BUCKETS)
    if size <= 2:
        return list(points)
    found: list[Point] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        finite = sorted((point for point in part if math.isfinite(point[1])), key=lambda point: point[1])
        broken = [point for point in part if not math.isfinite(point[1])]
        found += sorted({*finite[:1], *finite[-1:], *broken[:1]})
    return found


def sentence(series: Series) -> str:
    """One sentence on a line, for those who do not see it."""
    finite = series.finite
    values = [y for _, y in finite]
    missing = len(series.points) - len(finite)
    lost = f"; {missing:,} values are not finite" if missing else ""
    (first, start), (last, end) = finite[0], finite[-1]
    return (
        f"{series.name}: {number_text(start)} at step {number_text(first)}, {number_text(end)} at step {number_text(last)}, "
        f"lowest {number_text(min(values))}, highest {number_text(max(values))}{lost}."
    )


def table_rows(series: Series) -> Iterator[tuple[str, str, str]]:
    """(name, step, value) of at most TABLE_ROWS points at equal distances, with the first and the last one."""
    last = len(series.points) - 1
    for index in sorted({round(number * last / (TABLE_ROWS - 1)) for number in range(TABLE_ROWS)}):
        x, y = series.points[index]
        yield series.name, number_text(x), number_text(y) if math.isfinite(y) else "not finite"


def number_text(value: float) -> str:
    """`value` with at most four significant digits, and separators of thousands."""
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def different_texts(values: Sequence[float]) -> list[str]:
    """`values` as texts with as many digits as they need to differ."""
    texts = [number_text(value) for value in values]
    for digits in range(5, 17):
        if len(set(texts)) == len(set(values)):
            break
        texts = [f"{value:.{digits}g}" for value in values]
    return texts
