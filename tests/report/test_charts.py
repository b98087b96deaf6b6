"""Charts: axes, the path of a line, gaps, and series that are too long to draw whole."""

from __future__ import annotations

import math
import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwopt.report import charts
from hwopt.report.charts import (
    ChartScale,
    Series,
    different_texts,
    line_chart,
    linear_axis,
    number_text,
    reduced,
    step_axis,
    value_axis,
)

FINITE = st.floats(-1e12, 1e12, allow_nan=False)


def points_of(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](\S+) ([\d.]+)", path)]


@given(st.lists(FINITE, min_size=1, max_size=20), st.sampled_from(get_args(ChartScale)))
def test_every_value_is_between_the_ends_of_its_axis(values: list[float], scale: ChartScale) -> None:
    axis = value_axis(values, scale)
    texts = different_texts(axis.ticks)
    assert len(set(texts)) == len(texts)
    assert len(axis.ticks) >= 2
    assert all(-1e-6 <= axis.position(value) <= 1 + 1e-6 for value in values)
    assert all(-1e-6 <= axis.position(tick) <= 1 + 1e-6 for tick in axis.ticks)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (2.0, 2.0, [1.8, 1.9, 2.0, 2.1, 2.2]), (0.0, 0.0, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert linear_axis(low, high).ticks == pytest.approx(ticks)


@pytest.mark.parametrize("last", [0, 1, 3, 7, 135, 108_000])
def test_steps_are_whole_numbers_from_zero(last: int) -> None:
    axis = step_axis(last)
    assert axis.ticks[0] == 0
    assert all(tick == int(tick) and tick <= max(last, 1) for tick in axis.ticks)
    assert 2 <= len(axis.ticks) <= 7


def test_values_over_several_powers_of_ten_are_logarithmic() -> None:
    chart = line_chart("c", "Gradient norm", "", [Series("run", [(1, 0.1), (2, 1000.0)])], 2, "logarithmic")
    assert chart is not None
    assert chart.unit == "logarithmic"
    assert [text for _, text in chart.y_ticks] == ["0.1", "1", "10", "100", "1,000"]
    assert not value_axis([0.0, 1000.0], "logarithmic").logarithmic
    assert not value_axis([0.1, 1000.0], "zero").logarithmic


def test_axis_from_zero_shows_how_large_a_change_is() -> None:
    assert value_axis([50.0, 51.0], "zero").low == 0.0
    assert value_axis([50.0, 51.0], "range").low == 50.0


def test_close_values_have_ticks_with_enough_digits() -> None:
    assert different_texts([0.63008, 0.6301, 0.63012]) == ["0.63008", "0.6301", "0.63012"]


def test_line_runs_from_the_left_to_the_right_edge() -> None:
    chart = line_chart("c", "Loss", "", [Series("run", [(0, 1.0), (10, 0.0)])], 10)
    assert chart is not None
    assert points_of(chart.lines[0].path) == [
        (charts.LEFT, charts.TOP),
        (charts.WIDTH - charts.RIGHT, charts.HEIGHT - charts.BOTTOM),
    ]


@pytest.mark.parametrize("lost", [None, math.nan, math.inf])
def test_value_that_is_not_finite_breaks_the_line(lost: float | None) -> None:
    chart = line_chart("c", "Loss", "", [Series("run", [(1, 1.0), (2, 2.0), (3, lost), (4, 1.0), (5, 1.5)])], 5)
    assert chart is not None
    assert chart.lines[0].path.count("M") == 2
    assert "1 values are not finite" in chart.description
    assert ("run", "3", "not finite") in chart.table
    assert line_chart("c", "Loss", "", [Series("run", [(1, lost)])], 1) is None


def test_single_value_is_a_mark() -> None:
    chart = line_chart("c", "Loss", "", [Series("run", [(5, 1.0)])], 10)
    assert chart is not None
    assert len(chart.lines[0].marks) == 1


def test_description_has_first_last_lowest_and_highest_value() -> None:
    chart = line_chart("c", "Loss", "", [Series("run", [(1, 2.0), (2, 3.0), (3, 0.5), (4, 1.0)])], 4)
    assert chart is not None
    assert chart.description == "run: 2 at step 1, 1 at step 4, lowest 0.5, highest 3."


@given(st.lists(st.one_of(st.none(), FINITE), min_size=1, max_size=3000))
def test_long_series_keeps_its_extremes_and_its_order(values: list[float | None]) -> None:
    points = [(float(x), y) for x, y in enumerate(values)]
    kept = reduced(points)
    assert len(kept) <= 3 * charts.MAX_BUCKETS
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    finite = [y for y in values if y is not None]
    shown = [y for _, y in kept if y is not None]
    assert (max(finite, default=0), min(finite, default=0)) == (max(shown, default=0), min(shown, default=0))


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (1234.5, "1,234"), (0.123456, "0.1235"), (1e-5, "1e-05"), (2.5e7, "2.5e+07"), (7.0, "7")]
)
def test_number_is_short(value: float, text: str) -> None:
    assert number_text(value) == text
