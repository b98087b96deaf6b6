"""The windows of a run, and the ratio of two speeds with its noise."""

import random
from statistics import mean

import pytest
from report.run_folders import log_row, log_rows
from scipy.stats import t

from hwopt.records.throughput import Window, rate, rate_ratio, variance_of, windows_of


def windows(speeds: list[float], samples: list[float] | None = None) -> list[Window]:
    samples = samples or [16.0] * len(speeds)
    return [Window(n + 1, 1, s / speed, s, 20 * s) for n, (speed, s) in enumerate(zip(speeds, samples, strict=True))]


def test_first_window_of_each_process_is_left_out() -> None:
    rows = [log_row(step) for step in (5, 10, 15, 20, 25)]
    assert [w.step for w in windows_of(rows, [0])] == [10, 15, 20, 25]
    assert [w.step for w in windows_of(rows, [0, 13])] == [10, 20, 25], "step 14 was the first one of the second process"
    assert [w.step for w in windows_of(rows[:1], [0])] == [5], "the only window counts"


def test_window_has_the_seconds_and_amounts_of_its_steps() -> None:
    (window,) = windows_of([log_row(5), log_row(15, speed=80.0)], [0])
    assert window == Window(15, 10, pytest.approx(2.0), pytest.approx(160.0), pytest.approx(3200.0))


def test_rows_without_a_speed_are_no_windows() -> None:
    rows = [log_row(5), log_row(10), {"step": 15.0, "steps_per_second": None}, log_row(15)]
    assert [w.step for w in windows_of(rows, [0])] == [10]


def test_rate_weighs_windows_by_time() -> None:
    assert rate(windows([10.0, 30.0]), "samples") == pytest.approx(15.0)
    assert rate([], "samples") is None


def test_paired_ratio_has_the_interval_of_a_paired_t_test() -> None:
    draw = random.Random(1)
    ours = windows([100 * (1 + draw.gauss(0, 0.02)) for _ in range(40)])
    theirs = windows([80.0] * 40)
    ratio = rate_ratio(ours, theirs, "samples")
    assert ratio.paired
    seconds = [w.seconds for w in ours]
    spread = (sum((s - mean(seconds)) ** 2 for s in seconds) / 39 / 40) ** 0.5 / mean(seconds) * t.ppf(0.975, 39)
    assert ratio.high / ratio.value - 1 == pytest.approx(spread, rel=0.35), "plus what neighbours correlate by chance"
    assert ratio.value == pytest.approx(mean([0.2] * 40) / mean(seconds))
    assert ratio.clear


def test_pairing_cancels_what_long_and_short_samples_change() -> None:
    draw = random.Random(2)
    speeds = [draw.uniform(50, 150) for _ in range(30)]
    paired = rate_ratio(windows([1.1 * speed for speed in speeds]), windows(speeds), "samples")
    other_samples = [17.0] * 30
    alone = rate_ratio(windows([1.1 * speed for speed in speeds], other_samples), windows(speeds), "samples")
    assert (paired.paired, alone.paired) == (True, False)
    assert paired.value == pytest.approx(1.1)
    assert paired.low == pytest.approx(1.1)
    assert paired.clear
    assert not alone.clear


def test_interval_holds_the_true_ratio_in_95_of_100_cases() -> None:
    held = 0
    for seed in range(400):
        ours = windows_of(log_rows(20, 100.0, 0.1, seed), [0])
        theirs = windows_of(log_rows(20, 100.0, 0.1, seed + 10_000), [0])
        ratio = rate_ratio(ours, theirs, "samples")
        held += ratio.low <= 1.0 <= ratio.high
    assert 0.92 <= held / 400 <= 0.99


def test_correlated_windows_widen_the_interval() -> None:
    assert variance_of([1.0, 1.0, -1.0, -1.0]) > variance_of([1.0, -1.0, 1.0, -1.0])
    assert variance_of([0.0, 0.0, 0.0]) == 0.0


def test_noise_of_two_windows_is_unknown() -> None:
    ratio = rate_ratio(windows([10.0, 11.0]), windows([5.0, 5.0, 5.0]), "samples")
    assert (ratio.low, ratio.high, ratio.clear) == (None, None, False)
    assert rate_ratio([], windows([5.0]), "samples") is None
