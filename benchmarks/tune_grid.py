"""Measure every setting that `hwopt tune` may choose for a job, and let its search choose among these measurements.

    python benchmarks/tune_grid.py [JOB.toml] [--profile cpu] [--steps 20] [--set KEY=VALUE] [--file FILE]

Settings of the input (workers, prefetch) are left out: they are only tried while the loop waits for data. Each setting is a
trial of its own; a grid of about 50 settings takes 10 minutes for the demo. `--file` keeps the measurements as JSON, and
continues from them. On a busy machine the figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import astuple
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from hwopt.memory.planned import resolve
from hwopt.planning.inputs import Inputs
from hwopt.planning.plan import Plan
from hwopt.records.throughput import Window
from hwopt.system.cache import cache_folder
from hwopt.trials.search import Measurement, Search, Setting
from hwopt.trials.space import Space
from hwopt.trials.trial import Variant, launching, run_trial
from hwopt.trials.tuning import measurement_of


def settings_of(space: Space) -> Iterator[tuple[Setting, str]]:
    """The settings that run something else than those before, and what they run."""
    seen = set()
    for setting in product(*([axis.start] if axis.input else range(axis.choices) for axis in space.axes)):
        forecast = space.forecast(setting)
        if forecast is not None and forecast.fits is not False and forecast.plan not in seen:
            seen.add(forecast.plan)
            yield setting, forecast.plan


def measured(space: Space, options: argparse.Namespace) -> dict[str, Measurement]:
    """The measurement of each setting, by what it runs (`Forecast.plan`)."""
    known = json.loads(options.file.read_text()) if options.file and options.file.exists() else {}
    found = {plan: Measurement(tuple(Window(*each) for each in windows), unit=unit) for plan, (windows, unit) in known.items()}
    unit = "tokens" if space.start.context.task.inputs == "tokens" else "samples"
    with launching("cpu") as launch:
        for setting, plan in settings_of(space):
            if plan in found:
                continue
            variant = Variant("grid", options.profile, (*options.set, *space.assignments(setting)), None)
            with TemporaryDirectory() as folder:
                outcome = run_trial(options.job, variant, options.steps, Path(folder, "trial"), 600.0, launch)
            found[plan] = measurement_of(outcome, unit)
            speed = "failed" if found[plan].failure else f"{1 / found[plan].seconds:,.0f} {unit}/s"
            print(f"{len(found):3} {speed:>20}  {space.described(setting)}", flush=True)
            if options.file:
                kept = {each: ([astuple(window) for window in one.windows], one.unit) for each, one in found.items()}
                options.file.write_text(json.dumps(kept))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", nargs="?", type=Path)
    parser.add_argument("--profile", default="cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--file", type=Path)
    options = parser.parse_args()
    inputs = Inputs()

    def resolved(changes: tuple[str, ...] = ()) -> Plan:
        return resolve(options.profile, options.job, assignments=[*options.set, *changes], inputs=inputs)

    space = Space(resolved(), inputs.registry, resolved, cache_folder(), lambda what: None)
    grid = measured(space, options)
    failed = Measurement(failure="crash")

    def of_grid(setting: Setting) -> Measurement:
        forecast = space.forecast(setting)
        return failed if forecast is None else grid.get(forecast.plan, failed)

    search = Search(space.axes, space.forecast, of_grid)
    search.run()
    speeds = sorted(1 / each.seconds for each in grid.values() if each.failure is None)
    start, chosen = (1 / of_grid(setting).seconds for setting in (search.start, search.best))
    print(f"{len(grid)} settings, the slowest {speeds[0]:,.0f}, the profile {start:,.0f}, the best {speeds[-1]:,.0f} a second")
    print(f"the search: {chosen:,.0f} in {len(search.trials)} trials, {1 - chosen / speeds[-1]:.1%} below the best: ", end="")
    print(space.described(search.best))


if __name__ == "__main__":
    main()
