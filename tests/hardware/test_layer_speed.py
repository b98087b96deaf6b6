"""What a CPU is measured to do decides bf16 and the price of a micro-batch, and is measured once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hwopt.hardware.detect import detect
from hwopt.hardware.layer_speed import BESIDE_LAYERS, LEAST, MOST, LayerSpeed, cached, measured
from hwopt.testing import entry_of, plan_for, tiny_job, tiny_profile

SPEED = LayerSpeed(token_seconds=1e-4, micro_batch_seconds=3e-3, bf16_ratio=0.6)


@given(st.floats(1e-9, 1), st.floats(0, 1))
def test_price_of_a_micro_batch_is_a_power_of_two_near_the_measured_one(token: float, micro_batch: float) -> None:
    tokens = LayerSpeed(token, micro_batch).micro_batch_tokens
    assert tokens.bit_count() == 1
    assert LEAST <= tokens <= MOST
    if LEAST <= (price := BESIDE_LAYERS * micro_batch / token) <= MOST:
        assert 0.5 <= tokens / price <= 2


@pytest.mark.parametrize("bf16", [False, True])
def test_measured_times_are_positive(bf16: bool) -> None:
    found = measured(64, bf16)
    assert found.token_seconds > 0
    assert found.micro_batch_seconds >= 0
    assert (found.bf16_ratio is not None) is bf16


def test_it_is_measured_once_and_again_if_the_file_is_damaged(tmp_path: Path) -> None:
    calls: list[int] = []

    def measure() -> LayerSpeed:
        calls.append(1)
        return SPEED

    file = tmp_path / "layers" / "one.json"
    assert cached(file, measure) == cached(file, measure) == SPEED
    assert len(calls) == 1
    file.write_text("{")
    assert cached(file, measure) == SPEED
    assert len(calls) == 2


@pytest.mark.usefixtures("real_machine")
def test_a_size_that_takes_seconds_is_not_measured(tmp_path: Path) -> None:
    from hwopt.hardware.detect import with_layer_speed

    state, machine = torch.get_rng_state(), detect()
    assert with_layer_speed(machine, 4096, 1, tmp_path) == with_layer_speed(machine, 0, 1, tmp_path) == machine
    found = with_layer_speed(machine, 64, 1, tmp_path)
    assert found.layer is not None
    assert with_layer_speed(machine, 64, 1, tmp_path) == found
    assert torch.equal(torch.get_rng_state(), state)


def planned(folder: Path, ratio: float | None, **tables: Any) -> Any:
    machine = replace(detect(), layer=None if ratio is None else replace(SPEED, bf16_ratio=ratio))
    return plan_for(tiny_profile(**tables), tiny_job(folder), hardware=machine)


@pytest.mark.parametrize(("ratio", "dtype"), [(None, "bf16"), (0.6, "bf16"), (0.8, "fp32"), (1.3, "fp32")])
def test_bf16_is_used_where_it_is_faster(ratio: float | None, dtype: str, tmp_path: Path) -> None:
    entry = entry_of("precision", planned(tmp_path, ratio, precision={}))
    assert entry.options.dtype == dtype
    assert (f"takes {ratio:.2f} times as long as fp32" in entry.reason) if ratio else ("times as long" not in entry.reason)


def test_bf16_that_is_asked_for_is_used(tmp_path: Path) -> None:
    assert entry_of("precision", planned(tmp_path, 1.3, precision={"dtype": "bf16"})).options.dtype == "bf16"


def test_price_of_a_micro_batch_is_the_measured_one(tmp_path: Path) -> None:
    entry = entry_of("length_batching", planned(tmp_path, 1.0, length_batching={}))
    assert entry.options.overhead_tokens == SPEED.micro_batch_tokens == 64
    assert "one more costs as much as 64 tokens, measured here" in entry.reason
    assert entry_of("length_batching", planned(tmp_path, None, length_batching={})).options.overhead_tokens == 256
