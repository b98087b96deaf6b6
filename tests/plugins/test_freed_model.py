"""After a run nothing holds its model: in a notebook the next run has the whole device."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from event_calls import calling

from hwopt import api
from hwopt.plugin import RunView
from hwopt.testing import plan_for, tiny_job, tiny_profile

TABLES: list[dict[str, Any]] = [
    {"adapter": {"kind": "dora", "always": True}, "checkpointing": {}},
    {"fused_loss": {"backend": "torch"}, "pack": {}},
    {"optimizer_in_backward": {"clipping": "off"}, "batch": {"train": 8}, "precision": {"dtype": "bf16", "level": "pure"}},
]


@pytest.mark.parametrize("tables", TABLES, ids="+".join)
def test_model_is_freed_after_the_run(tables: dict[str, Any], tmp_path: Path) -> None:
    weights: list[weakref.ref[Any]] = []

    def remember(run: RunView) -> None:
        weights.extend(map(weakref.ref, run.inner_model.parameters()))

    plan = plan_for(tiny_profile(**tables), tiny_job(tmp_path, "causal-lm", max_steps=2))
    plan.recipe.events.append(calling(on_step_begin=remember))
    api.execute(plan, tmp_path / "run", cache=tmp_path / "cache")
    gc.collect()
    assert weights
    assert not [weight for weight in weights if weight() is not None]
