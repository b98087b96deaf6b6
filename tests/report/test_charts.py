"""Charts: axes, the path of a line, gaps, and series that are too long to draw whole."""

import math
import re
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from hwopt.report import charts
from hwopt.report.charts import ChartScale, Series, different_texts, line_chart, reduced, value_axis

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


def test_values_over_several_powers_of_ten_are_logarithmic() -> None:
    chart = line_chart("c", "Gradient norm", "", [Series("run", [(1, 0.1), (2, 1000.0)])], 2, "logarithmic")
    assert chart.unit == "logarithmic"
    assert [text for _, text in chart.y_ticks] == ["0.1", "1", "10", "100", "1,000"]
    assert not value_axis([0.0, 1000.0], "logarithmic").logarithmic
    assert value_axis([50.0, 51.0], "zero").low == 0.0


def test_line_runs_from_the_left_to_the_right_edge() -> None:
    chart = line_chart("c", "Loss", "", [Series("run", [(0, 1.0), (10, 0.0)])], 10)
    assert chart.description == "run: 1 at step 0, 0 at step 10, lowest 0, highest 1."
    assert points_of(chart.lines[0].path) == [
        (charts.LEFT, charts.TOP),
        (charts.WIDTH - charts.RIGHT, charts.HEIGHT - charts.BOTTOM),
    ]


def test_value_that_is_not_finite_breaks_the_line() -> None:
    lost = math.nan
    chart = line_chart("c", "Loss", "", [Series("run", [(1, 1.0), (2, 2.0), (3, lost), (4, 1.0), (5, 1.5)])], 5)
    assert chart.lines[0].path.count("M") == 2
    assert "1 values are not finite" in chart.description
    assert ("run", "3", "not finite") in chart.table
    assert line_chart("c", "Loss", "", [Series("run", [(1, lost)])], 1) is None


@given(st.lists(st.one_of(st.just(math.nan), FINITE), min_size=1, max_size=3000))
def test_long_series_keeps_its_extremes_and_its_order(values: list[float]) -> None:
    points = [(float(x), y) for x, y in enumerate(values)]
    kept = reduced(points)
    assert len(kept) <= 3 * charts.MAX_BUCKETS
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    finite = [y for y in values if math.isfinite(y)]
    shown = [y for _, y in kept if math.isfinite(y)]
    assert (max(finite, default=0), min(finite, default=0)) == (max(shown, default=0), min(shown, default=0))


def test_the_last_label_of_the_steps_fits_beside_its_chart() -> None:
    assert len("100,000") * 7 / 2 <= charts.RIGHT  # centred below its line, 7 pixels a character
