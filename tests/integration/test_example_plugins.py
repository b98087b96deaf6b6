"""The plugins of examples/plugins on two ranks: the same weights as on one rank, also after a resume."""

from pathlib import Path
from typing import Any

import pytest
from example_plugins import BESIDE, CLASSES, OPTIONS, registry
from integration.forks import on_ranks
from integration.ranks_folder import FP32, write_job, write_profile
from safetensors.torch import load_file

from hwopt import api
from hwopt.testing import relative_error, rewound

LIMITS = {"muon": 1e-4}
"""torch's Muon orthogonalises in bf16: the rounding of a sum over two ranks may move a value by 1/256 of an update."""


@pytest.mark.parametrize("name", CLASSES)
def test_two_ranks_train_the_model_of_one_and_resume(name: str, warm: None, tmp_path: Path) -> None:
    write_job(tmp_path, max_steps=6, eval_steps=3, save_steps=3, metric_for_best_model="loss")
    write_profile(tmp_path, BESIDE.get(name, {}) | FP32 | {name: OPTIONS.get(name, {})})

    def train(ranks: int, run: str, resume: bool = False) -> dict[str, Any]:
        def work(rank: int) -> None:
            plan = api.resolve("./ranks.toml", "job.toml", world_size=ranks, registry=registry(), cache=tmp_path / "cache")
            api.execute(plan, Path("runs") / run, cache=tmp_path / "cache", resume=resume)

        on_ranks(work, tmp_path, ranks)
        return load_file(tmp_path / "runs" / run / "final" / "model.safetensors")

    one, two = train(1, "one"), train(2, "two")
    assert relative_error(two, one) <= LIMITS.get(name, 1e-6)
    rewound(tmp_path / "runs" / "two", tmp_path / "runs" / "resumed", 3)
    assert relative_error(train(2, "resumed", resume=True), two) == 0.0
