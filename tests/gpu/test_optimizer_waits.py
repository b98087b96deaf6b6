"""How often the optimizers of bitsandbytes make the host wait for a CUDA device, and that the update stays theirs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hwopt_plugins.optimizer import make_optimizer

SHAPES = ((512, 512), (512,), (64, 32))
"""Paged states, small ones in 32 bit, and 8-bit ones that are too small to be paged."""
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """A function that returns how often the host waited for the whole device."""
    calls: list[Any] = []
    wait = torch.cuda.synchronize
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: (calls.append(device), wait(*device)))
    return lambda: len(calls)


def weights() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).cuda()) for shape in SHAPES]


def updated(optimizer: Any, parameters: list[torch.nn.Parameter], steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).cuda()
        optimizer.step()


@pytest.mark.device("any")
@pytest.mark.parametrize(("name", "expected"), [("adamw_bnb_8bit", 0), ("paged_adamw_8bit", 2), ("paged_adamw_32bit", 2)])
def test_bitsandbytes_waits_for_paged_states_only(name: str, expected: int, waits: Callable[[], int]) -> None:
    parameters = weights()
    optimizer = make_optimizer(name, [{"params": parameters, **SETTINGS}])
    updated(optimizer, parameters, 1)  # makes the states
    paged = [getattr(optimizer.state[parameter]["state1"], "is_paged", False) for parameter in parameters]
    assert paged == [name.startswith("paged"), False, False]
    before = waits()
    updated(optimizer, parameters, 1)
    assert waits() - before == expected, "once for the paged parameter, and once at the end"


@pytest.mark.device("any")
def test_step_on_another_stream_waits_as_bitsandbytes_does(waits: Callable[[], int]) -> None:
    parameters = weights()
    optimizer = make_optimizer("adamw_bnb_8bit", [{"params": parameters, **SETTINGS}])
    with torch.cuda.stream(torch.cuda.Stream()):
        updated(optimizer, parameters, 1)
    assert waits() == len(parameters)


@pytest.mark.device("real")
@pytest.mark.parametrize("name", ["adamw_bnb_8bit", "paged_adamw_8bit"])
def test_weights_are_those_of_bitsandbytes_own_step(name: str) -> None:
    import bitsandbytes

    ours, theirs = weights(), weights()
    plain = bitsandbytes.optim.AdamW8bit if name == "adamw_bnb_8bit" else bitsandbytes.optim.PagedAdamW8bit
    updated(make_optimizer(name, [{"params": ours, **SETTINGS}]), ours, 20)
    updated(plain([{"params": theirs, **SETTINGS}]), theirs, 20)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
