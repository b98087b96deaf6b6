"""The verdict: one for every set of figures, in agreement with its figure, with one setting to change."""

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwopt.training.telemetry.verdict import Limit, Verdict, VerdictInputs, advice, limit_of

SHARE = st.floats(0, 1)
FIGURES = st.fixed_dictionaries(
    {"cuda": st.booleans()},
    optional={
        "data_wait_share": SHARE,
        "spilled_share": SHARE,
        "throttled_share": SHARE,
        "throttle_reasons": st.dictionaries(st.sampled_from(["power brake", "thermal (hardware)"]), SHARE),
        "gpu_percent": st.floats(0, 100),
        "memory_busy_percent": st.floats(0, 100),
        "device_waits_share": SHARE,
        "mfu": SHARE,
    },
)
SETTINGS = st.builds(
    VerdictInputs,
    cuda=st.booleans(),
    workers=st.integers(0, 64),
    cores=st.integers(1, 64),
    rows=st.integers(1, 4096),
    micro_batches=st.integers(1, 64),
    half_precision=st.booleans(),
    compiled=st.booleans(),
    graphs=st.booleans(),
    batch_option=st.just("plugins.batch.train"),
)
CARD = VerdictInputs(True, 2, 8, 64, 1, True, False, True, "plugins.batch.train")


@given(FIGURES, SETTINGS)
def test_every_set_of_figures_has_one_verdict_with_a_figure_and_a_next_step(figures: dict[str, Any], settings: Any) -> None:
    limit, figure = limit_of(figures)
    assert limit in get_args(Limit)
    assert any(character.isdigit() for character in figure) or figures.get("gpu_percent") is None
    text = str(Verdict(limit, figure, advice(limit, settings)))
    assert text.startswith(f"{limit}: ")
    assert text.count("Next: ") == 1


@pytest.mark.parametrize(
    ("measured", "limit", "says"),
    [
        ({"cuda": True, "gpu_percent": 96.0, "mfu": 0.5, "device_waits_share": 0.0}, "compute-bound", "96 % of the time, MFU"),
        ({"cuda": True, "gpu_percent": 41.0}, "host-bound", "used 41 % of the time"),
        ({"cuda": True, "gpu_percent": 99.0, "device_waits_share": 0.9}, "host-bound", "waited for the host in 90%"),
        ({"cuda": True, "gpu_percent": 41.0, "data_wait_share": 0.5}, "input-bound", "waited 50% of the time"),
        ({"cuda": True, "memory_busy_percent": 80.0, "mfu": 0.1, "device_waits_share": 0.0}, "memory-bound", "busy 80 %"),
        ({"cuda": True, "memory_busy_percent": 80.0, "mfu": 0.6, "device_waits_share": 0.0}, "compute-bound", "MFU 60%"),
        ({"cuda": True, "throttled_share": 0.4, "throttle_reasons": {"power brake": 0.4}}, "throttled", "40% of the samples"),
        ({"cuda": True, "spilled_share": 0.5, "throttled_share": 1.0}, "spilling", "at 50% of the log points"),
        ({"cuda": False, "data_wait_share": 0.02}, "compute-bound", "the CPU computed 98% of the time"),
    ],
)
def test_the_first_sign_decides_and_is_named(measured: dict[str, Any], limit: str, says: str) -> None:
    found, figure = limit_of(measured)
    assert (found, says in figure) == (limit, True), figure


@pytest.mark.parametrize(
    ("limit", "changes", "next_step"),
    [
        ("input-bound", {}, "plugins.dataloader.num_workers = 4 (found 2, 8 cores)"),
        ("input-bound", {"workers": 0, "cores": 4}, "plugins.dataloader.num_workers = 1"),
        ("input-bound", {"workers": 7}, "more CPU cores (7 workers on 8 cores)"),
        ("host-bound", {"micro_batches": 4}, "plugins.batch.train = 128"),
        ("host-bound", {}, "plugins.cuda_graphs.enabled = true"),
        ("host-bound", {"graphs": False}, "plugins.compile.enabled = true"),
        ("memory-bound", {"half_precision": False}, 'plugins.precision.dtype = "auto"'),
        ("memory-bound", {}, "plugins.compile.enabled = true"),
        ("compute-bound", {}, "nothing: the GPU is used well"),
        ("compute-bound", {"cuda": False}, "no setting makes this CPU faster"),
        ("spilling", {}, "plugins.batch.train = 32"),
    ],
)
def test_advice_names_one_setting_with_its_value(limit: Limit, changes: dict[str, Any], next_step: str) -> None:
    assert next_step in advice(limit, replace(CARD, **changes))
