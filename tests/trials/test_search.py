"""The search of `hwopt tune` on simulated cost surfaces, and its rules one by one."""

import math
from collections.abc import Callable
from statistics import median

import pytest
from trials.surfaces import searched

from hwopt.records.throughput import Window
from hwopt.trials.search import Axis, Forecast, Measurement, Search, Setting

SURFACES = range(6000, 6048)
"""The seeds of the surfaces; they were not used to choose the constants of the search."""
WITHIN = 0.05
HOLD = 0.85
"""The least part of the surfaces on which the search ends within 5 % of the best setting."""


def windows(seconds: float, noise: float = 0.0, number: int = 10) -> tuple[Window, ...]:
    """Windows of `seconds` per step, with an alternating deviation."""
    return tuple(Window(10 * n, 10, 10 * seconds * (1 + noise * (-1) ** n), 80.0, 800.0) for n in range(1, number + 1))


def search_of(
    axes: list[Axis],
    seconds: Callable[[Setting], float],
    forecast: Callable[[Setting], Forecast | None] = lambda setting: Forecast(str(setting), True),
    wait: Callable[[Setting], float] = lambda setting: 0.0,
    limit: int = 12,
) -> Search:
    """A search that measures `seconds` of each setting without noise; infinite seconds are an out-of-memory error."""

    def measure(setting: Setting) -> Measurement:
        if math.isinf(seconds(setting)):
            return Measurement(failure="out of memory")
        return Measurement(windows(seconds(setting)), wait(setting))

    return Search(axes, forecast, measure, limit)


def tried(search: Search) -> list[Setting]:
    return [trial.setting for trial in search.trials]


@pytest.mark.parametrize("seeds", [SURFACES, pytest.param(range(6000, 6400), marks=pytest.mark.soak)], ids=len)
def test_search_is_within_5_percent_of_the_best_setting_in_12_trials(
    seeds: range, record_property: Callable[[str, object], None]
) -> None:
    found = [searched(seed)[1] for seed in seeds]
    held = [each for each in found if each.regret <= WITHIN]
    trials = [each.trials for each in found]
    record_property(
        "tune",
        f"within {WITHIN:.0%} of the best setting on {len(held)} of {len(found)} surfaces, "
        f"at worst {max(each.regret for each in found):.1%} off; "
        f"{sum(trials) / len(found):.1f} trials in the mean, {max(trials)} at most; "
        f"median gain {median(each.gain for each in found):.2f} times",
    )
    assert max(trials) <= 12
    assert len(held) >= HOLD * len(found), sorted(found, key=lambda each: -each.regret)[:10]


def test_setting_that_does_not_fit_is_not_measured() -> None:
    search = search_of([Axis(5, 0, ordered=True)], lambda s: 1 / (1 + s[0]), lambda s: Forecast(str(s), s[0] < 3))
    search.run()
    assert max(tried(search)) == (2,)
    assert search.best == (2,)


def test_setting_without_a_plan_or_with_the_plan_of_another_is_not_measured() -> None:
    plans = {0: Forecast("a", True), 1: None, 2: Forecast("b", True), 3: Forecast("a", True)}
    search = search_of([Axis(4, 0)], lambda s: 1.0, lambda s: plans[s[0]])
    assert search.run() == "plateau"
    assert tried(search) == [(0,), (2,)]


def test_out_of_memory_rules_out_settings_that_need_as_much() -> None:
    gib = {0: 1.0, 1: 4.0, 2: 3.0, 3: 5.0}
    search = search_of([Axis(4, 0)], lambda s: math.inf if s[0] == 1 else 1.0, lambda s: Forecast(str(s), True, gib[s[0]]))
    search.run()
    assert tried(search) == [(0,), (1,), (2,)]


def test_choice_that_crashed_is_not_tried_again_beside_another_choice() -> None:
    def measure(setting: Setting) -> Measurement:
        if setting[0] == 1:
            return Measurement(failure="crash")
        return Measurement(windows(1.0 if setting[1] == 0 else 0.5))

    search = Search([Axis(2, 0), Axis(2, 0)], lambda s: Forecast(str(s), True), measure)
    search.run()
    assert sum(setting[0] == 1 for setting in tried(search)) == 1
    assert search.best == (0, 1)


def test_crash_of_a_size_rules_out_larger_sizes() -> None:
    def measure(setting: Setting) -> Measurement:
        return Measurement(failure="time limit") if setting[0] > 4 else Measurement(windows(1.0))

    search = Search([Axis(9, 4, ordered=True)], lambda s: Forecast(str(s), True), measure)
    search.run()
    failed = [size for (size,) in tried(search) if size > 4]
    assert failed
    assert failed == sorted(failed, reverse=True)


def test_jump_changes_two_axes_that_need_each_other() -> None:
    """Half the micro-batch alone is slower, and no checkpointing alone does not fit."""

    def forecast(setting: Setting) -> Forecast:
        rows, plain = setting
        seconds = (1.2 if rows == 0 else 1.0) * (0.6 if plain else 1.0)
        return Forecast(str(setting), not (plain and rows), None, (seconds, 2 * seconds))

    search = search_of([Axis(2, 1, ordered=True, values=(4, 8)), Axis(2, 0)], lambda s: forecast(s).seconds[0], forecast)
    search.run()
    assert tried(search)[:2] == [(1, 0), (0, 1)]
    assert search.best == (0, 1)


def test_workers_are_first_if_the_loop_waits_and_are_not_raised_if_it_does_not() -> None:
    axes = [Axis(3, 1, ordered=True), Axis(3, 1, ordered=True, input=True, parallel=True)]
    waiting = search_of(axes, lambda s: 1.0 - 0.3 * s[1], wait=lambda s: 0.5)
    waiting.run()
    assert tried(waiting)[1] == (1, 2)
    ready = search_of(axes, lambda s: 1.0)
    ready.run()
    assert (1, 2) not in tried(ready)


def test_gain_within_the_noise_is_not_adopted() -> None:
    def measure(setting: Setting) -> Measurement:
        return Measurement(windows(1.0 if setting == (0,) else 0.96, noise=0.0 if setting == (0,) else 0.2))

    search = Search([Axis(2, 0)], lambda s: Forecast(str(s), True), measure)
    search.run()
    assert search.best == (0,)


def test_interrupted_search_keeps_its_trials_and_the_best_setting() -> None:
    def seconds(setting: Setting) -> float:
        if setting == (2,):
            raise KeyboardInterrupt
        return 1.0 - 0.2 * setting[0]

    search = search_of([Axis(3, 0)], seconds)
    with pytest.raises(KeyboardInterrupt):
        search.run()
    assert search.best == (1,)
    assert len(search.trials) == 2
