"""The plugins of examples/plugins on two ranks: the same weights as on one rank, also after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from example_plugins import BESIDE, CLASSES, OPTIONS, registry
from integration.forks import forked_ranks, wait_for_exit
from safetensors.torch import load_file

from hwopt import api
from hwopt.testing import TINY_BERT, relative_error, rewound, write_samples

LIMITS = {"muon": 1e-4}
"""torch's Muon orthogonalises in bf16: the rounding of a sum over two ranks may move a value by 1/256 of an update."""


def table(name: str, options: dict[str, Any]) -> str:
    return "\n".join([f"[plugins.{name}]", *(f"{key} = {json.dumps(value)}" for key, value in options.items())]) + "\n"


@pytest.mark.parametrize("name", CLASSES)
def test_two_ranks_train_the_model_of_one_and_resume(name: str, warm: None, tmp_path: Path) -> None:
    write_samples(tmp_path / "train.jsonl", 41)
    write_samples(tmp_path / "dev.jsonl", 13, seed=1)
    config = ", ".join(f"{key} = {json.dumps(value)}" for key, value in TINY_BERT.items())
    training = "max_steps = 6\nlearning_rate = 1e-3\neval_steps = 3\nsave_steps = 3\nmetric_for_best_model = 'loss'\n"
    data = '[data]\ntrain = "train.jsonl"\neval = "dev.jsonl"\nmax_length = 32\n'
    (tmp_path / "job.toml").write_text(f"[model]\nconfig = {{ {config} }}\n{data}[training]\n{training}")
    tables = BESIDE.get(name, {}) | {"precision": {"dtype": "fp32"}, "batch": {"train": 3, "effective": 12}}
    profile = "".join(table(*each) for each in (tables | {name: OPTIONS.get(name, {})}).items())
    (tmp_path / "ranks.toml").write_text('name = "ranks"\n' + profile)

    def train(ranks: int, run: str, resume: bool = False) -> dict[str, Any]:
        def work(rank: int) -> None:
            plan = api.resolve("./ranks.toml", "job.toml", world_size=ranks, registry=registry(), cache=tmp_path / "cache")
            api.execute(plan, Path("runs") / run, cache=tmp_path / "cache", resume=resume)

        output = tmp_path / f"{run}.out"
        assert [wait_for_exit(pid) for pid in forked_ranks(work, ranks, tmp_path, output)] == [0] * ranks, output.read_text()[
            -3000:
        ]
        return load_file(tmp_path / "runs" / run / "final" / "model.safetensors")

    one, two = train(1, "one"), train(2, "two")
    assert relative_error(two, one) <= LIMITS.get(name, 1e-6)
    rewound(tmp_path / "runs" / "two", tmp_path / "runs" / "resumed", 3)
    assert relative_error(train(2, "resumed", resume=True), two) == 0.0
