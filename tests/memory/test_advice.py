"""Free memory is used for options that fit and that the forecast says are faster, and for no others."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hwopt import api
from hwopt.config.profile import make_profile
from hwopt.config.toml import Document
from hwopt.hardware.device import Hardware, described
from hwopt.memory import advice
from hwopt.memory.advice import PlanListener, relative_time
from hwopt.planning.memory_plan import Gain, Prediction
from hwopt.planning.plan import Plan
from hwopt.report.memory import describe_gain, show_gain
from hwopt.report.terminal import Terminal
from hwopt.system.cache import cache_folder
from hwopt.testing import TINY_BERT, plan_for, tiny_job

BERT = TINY_BERT | {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256}
CARD = {
    "match": ["a card"],
    "memory_gib": 8,
    "compute_capability": "8.6",
    "memory_bandwidth_gbps": 500,
    "dense_tflops": {"bf16": 50, "fp32": 20},
}
LARGE = described("a card", (8, 6), 8.0)
OTHERS = [described("another card", (8, 6), 8.0), Hardware("cpu", "a CPU", 8, 8)]
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder, so that the tests share their traces."""
    return tmp_path_factory.mktemp("leftover")


class Ends(PlanListener):
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def on_advice_ends(self, reason: str) -> None:
        self.reasons.append(reason)


def gains_of(folder: Path, hardware: Hardware, listener: PlanListener | None = None, **plugins: Any) -> list[Gain]:
    job = tiny_job(folder, config=BERT)
    tables = {"batch": {"train": 4, "gradient_accumulation_steps": 2}} | plugins

    def planned(changes: Sequence[str] = ()) -> Plan:
        content = {"name": "tiny", "card": CARD, "plugins": tables}
        return plan_for(make_profile(Document("a tiny profile", content), changes), job, hardware=hardware)

    plan = api.with_memory(planned(), planned, cache=cache_folder())
    found = api.with_gains(plan, planned, cache=cache_folder(), listener=listener).memory
    return list(found.gains)


def test_memory_left_over_buys_larger_micro_batches_and_no_checkpointing(folder: Path) -> None:
    gains = gains_of(folder, LARGE, checkpointing={})
    assert [gain.lines for gain in gains] == [
        ("plugins.batch.train = 8", "plugins.batch.gradient_accumulation_steps = 1", "plugins.batch.eval = 8"),
        ("plugins.checkpointing.enabled = false",),
        ("the 2 above that keep the training, combined",),
    ]
    for gain in gains:
        assert max(gain.relative) < 1
        assert not gain.alters
        assert gains[-1].relative <= gain.relative


def test_what_does_not_fit_gives_way_to_the_next_option(folder: Path) -> None:
    batch = {"train": 256, "gradient_accumulation_steps": 2}
    (gain,) = gains_of(folder, LARGE, checkpointing={}, batch=batch)
    assert gain.lines == ("plugins.checkpointing.enabled = false",)
    free = (0.99 * gain.takes_gib + 0.4) / 0.97  # the reserve is 0.4 GiB for the context, and 3 %
    (other,) = gains_of(folder, replace(LARGE, free_memory_gib=free), checkpointing={}, batch=batch)
    assert other.lines[0].startswith("plugins.checkpointing.layers = ")
    assert other.takes_gib < gain.takes_gib


def test_step_in_one_micro_batch_offers_more_rows_as_another_training(folder: Path) -> None:
    gains = gains_of(folder, LARGE, batch={"train": 8})
    assert [gain.lines for gain in gains] == [("plugins.batch.train = 128", "plugins.batch.effective = 128")]
    assert gains[0].alters
    assert "128 rows per step instead of 8" in gains[0].gain


def test_advice_ends_when_traces_have_taken_too_long(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "CPU_SECONDS", -1.0)
    ends = Ends()
    assert gains_of(folder, LARGE, ends, checkpointing={}) == []
    (reason,) = ends.reasons
    assert re.match(r"tracing this model took \d+ seconds of CPU time; not tried: plugins\.", reason)


@pytest.mark.parametrize("hardware", OTHERS, ids=["another card", "cpu"])
def test_nothing_is_offered_without_a_time_forecast(hardware: Hardware, folder: Path) -> None:
    assert gains_of(folder, hardware) == []


def test_time_is_compared_per_row() -> None:
    now, larger = Prediction((1.0, 4.0), None, None, rows=8), Prediction((1.5, 7.0), None, None, rows=16)
    assert relative_time(now, larger) == (0.75, 0.875)


def test_gain_names_memory_and_time() -> None:
    gain = Gain(("plugins.x.y = 1",), 2.15, 3.24, (0.124, 0.312), (0.77, 0.78), "stores more", False, ())
    assert describe_gain(gain) == (
        "plugins.x.y = 1: takes 3.24 GiB instead of 2.15 GiB, 22% to 23% less time per row (124 to 312 ms per step); stores more"
    )
    console = Terminal()
    with console.capture() as captured:
        show_gain(console, gain)
        show_gain(console, replace(gain, alters=True))
    shown = [line.split(":")[0] for line in captured.get().splitlines() if "plugins.x.y" in line]
    assert shown == ["faster with", "faster, but changes the training"]
