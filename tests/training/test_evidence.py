"""What the profiler records of a step: operators, and the dtypes of the products that ran."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hwopt.plugin import Evidence, Observation
from hwopt.training.evidence import observing


def observed(function: Any) -> Observation:
    run: Any = SimpleNamespace(inner_model=torch.nn.Identity())
    with observing(run):
        function()
    found: Observation = run.observation
    return found


@pytest.mark.parametrize("product", [torch.nn.Linear(8, 8), lambda x: x @ x, lambda x: torch.bmm(x[None], x[None])])
def test_a_product_under_autocast_counts_once_with_the_dtype_that_it_computes_in(product: Any) -> None:
    x = torch.ones(8, 8)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            product(x)

    assert observed(step).matmul_dtypes == {"c10::BFloat16": 1}
    assert observed(lambda: product(x)).matmul_dtypes == {"float": 1}


@pytest.mark.parametrize("warmup", [0, 1])
def test_an_open_profiler_of_the_user_is_left_alone(warmup: int) -> None:
    from torch.profiler import ProfilerActivity, profile, schedule

    layer, x = torch.nn.Linear(8, 8), torch.ones(8, 8)
    steps = schedule(wait=0, warmup=1, active=2) if warmup else None
    with profile(activities=[ProfilerActivity.CPU], schedule=steps) as own:
        assert "your torch.profiler is open" in observed(lambda: layer(x)).missing
        for _ in range(warmup):
            own.step()
        layer(x)
    assert {each.key: each.count for each in own.key_averages()}["aten::linear"] == 2 - warmup
    assert observed(lambda: layer(x)).calls("aten::linear") == 1


def test_products_of_the_backward_pass_count() -> None:
    layer, x = torch.nn.Linear(8, 8), torch.ones(8, 8, requires_grad=True)
    assert observed(lambda: layer(x).sum().backward()).matmul_dtypes == {"float": 3}


def test_evidence_is_compared_with_what_the_options_ask_for() -> None:
    seen = Evidence.active("seen", kind="lora", rows=range(7, 10))
    assert seen.compared({"kind": "lora", "rows": 8}) is seen
    assert seen.compared({"kind": frozenset({"lora", "dora"})}) is seen
    assert seen.compared({"kind": "dora"}) == Evidence("inactive", "seen; expected kind dora, found lora", seen.found)
    assert "rows 8" not in seen.compared({"rows": 12}).seen
    missing = seen.compared({"bits": 4})
    assert (missing.status, missing.seen) == ("inactive", "seen; bits was not observed, expected 4")
    assert Evidence.unknown("no step").compared({"bits": 4}).status == "unknown"
