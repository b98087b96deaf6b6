"""`--memory-limit` on any CUDA device: a run trains below the limit, and the limit ends with the run."""

from pathlib import Path

import pytest
import torch
from event_calls import calling

from hwopt.hardware.detect import detect
from hwopt.hardware.device import GIB, with_memory_limit
from hwopt.plugin import RunView
from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny
from hwopt.training.build import limited_memory

pytestmark = pytest.mark.device("any")

LIMIT_GIB = 1


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_allocator_refuses_more_than_the_limit(device: str) -> None:
    before = torch.cuda.get_per_process_memory_fraction()
    with limited_memory(torch.device(device), LIMIT_GIB), pytest.raises(torch.OutOfMemoryError):
        torch.empty(LIMIT_GIB * GIB + 1, dtype=torch.uint8, device=device)
    assert torch.cuda.get_per_process_memory_fraction() == before


def test_run_with_a_memory_limit_trains_below_it(tmp_path: Path) -> None:
    seen: list[float] = []

    def count(view: RunView) -> None:
        seen.append(torch.cuda.get_per_process_memory_fraction())

    before = torch.cuda.get_per_process_memory_fraction()
    plan = plan_for(tiny_profile(), tiny_job(tmp_path), hardware=with_memory_limit(detect(), f"{LIMIT_GIB}GiB"))
    plan.recipe.events.append(calling(on_step_begin=count))
    heard = train_tiny(plan, tmp_path)
    total = torch.cuda.get_device_properties(0).total_memory
    assert seen == [pytest.approx(LIMIT_GIB * GIB / total)] * plan.training.max_steps
    assert len(heard.losses) == plan.training.max_steps
    assert torch.cuda.get_per_process_memory_fraction() == before, "the limit ended with the run"
