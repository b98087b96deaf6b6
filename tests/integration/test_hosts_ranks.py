"""`hwopt.optimized` on two ranks trains what the unmodified script trains on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hosts.scripts import bert, farthest, llama, train
from integration.forks import forked_ranks, wait_for_exit
from transformers import Trainer

import hwopt


@pytest.mark.parametrize("make", [bert, llama])
def test_losses_and_norms_on_two_ranks(make: Any, tmp_path: Path) -> None:
    def work(name: str) -> None:
        cls = Trainer if name == "plain" else hwopt.optimized(Trainer, "cpu", batch={"train": 4}, precision={"dtype": "fp32"})
        trainer, steps = train(cls, tmp_path / name, make)
        sizes = [step.sizes for step in trainer._run.steps] if name == "ours" else []
        (tmp_path / f"{name}-{trainer.args.process_index}.json").write_text(json.dumps([steps, sizes]))

    def result(name: str, rank: int) -> Any:
        return json.loads((tmp_path / f"{name}-{rank}.json").read_text())

    for name in ("plain", "ours"):
        output = tmp_path / f"{name}.txt"
        ranks = forked_ranks(lambda rank, name=name: work(name), 2, tmp_path, output)
        assert [wait_for_exit(rank) for rank in ranks] == [0, 0], output.read_text()
    assert farthest(result("ours", 0)[0], result("plain", 0)[0]) < 1e-5
    for rank in (0, 1):
        assert all(sum(rows for rows, _ in sizes) == 16 for sizes in result("ours", rank)[1])
    evidence = json.loads((tmp_path / "ours" / "evidence.json").read_text())["plugins"]
    assert {entry["status"] for entry in evidence} == {"active"}
