"""Runs in float64, so that rounding does not hide a wrong weight."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from applied import Applied

from hwopt.config.job import make_job
from hwopt.plugin import Context, Recipe
from hwopt.plugin.registry import Registry
from hwopt.testing import plan_for, tiny_job, tiny_profile
from hwopt.training.build import build
from hwopt.training.run import Run


class Float64(Applied):
    name = "width"

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.model_kwargs["dtype"] = torch.float64


@contextmanager
def tiny_run(folder: Path, kind: str, *assignments: str, dtype: str = "float64", **tables: Any) -> Iterator[Run]:
    """A run of a tiny job with `assignments`, and a profile with `tables`."""
    registry = Registry()
    registry.add(Float64)
    job = make_job(tiny_job(folder / "data", kind).document, list(assignments))
    profile = tiny_profile(**({"width": {}} if dtype == "float64" else {}), **tables)
    with build(plan_for(profile, job, registry), folder / "run", folder / "cache") as run:
        yield run
