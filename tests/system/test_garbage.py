"""Garbage is collected rarely while a command starts, and as usual while a run trains."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from hwopt import api
from hwopt.system import garbage
from hwopt.testing import Recorder, plan_for, tiny_job, tiny_profile


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


class Thresholds(Recorder):
    def on_start(self, run: object) -> None:
        self.seen = gc.get_threshold()


def test_training_collects_as_usual(tmp_path: Path) -> None:
    garbage.collect_seldom()
    assert gc.get_threshold() == garbage.STARTING
    listener = Thresholds()
    plan = plan_for(tiny_profile(), tiny_job(tmp_path / "data", max_steps=1))
    api.execute(plan, tmp_path / "run", listener, cache=tmp_path / "cache")
    assert listener.seen == garbage.USUAL
