"""Data-loading workers with every start method: the weights have the same bits as without."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hwopt.config.job import make_job
from hwopt.config.toml import Document
from hwopt.planning.plan import Plan
from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny

KINDS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "cut and grouped": ("text-classification", {"length_batching": {}, "group_lengths": {}, "sdpa": {}}),
    "packed": ("causal-lm", {"pack": {}}),
}
METHODS = [method for method in ("spawn", "forkserver") if method in multiprocessing.get_all_start_methods()]


def planned(folder: Path, kind: str, **dataloader: Any) -> Plan:
    task, tables = KINDS[kind]
    job = tiny_job(folder / "data", task)
    data = {key: value for key, value in job.document.data["data"].items() if key != "eval"}
    job = make_job(Document(job.document.name, job.document.data | {"data": data}))
    loader = {"dataloader": dataloader} if dataloader else {}
    return plan_for(tiny_profile(**tables, **loader), job)


@pytest.mark.parametrize(
    ("method", "workers", "kind"),
    [("spawn", 1, "packed"), ("forkserver", 2, "cut and grouped")],
)
def test_workers_do_not_change_the_weights(method: str, workers: int, kind: str, tmp_path: Path) -> None:
    if method not in METHODS:
        pytest.skip(f"this system starts processes by {METHODS} only")
    found = []
    for number in (0, workers):
        options = {"num_workers": number, "pin_memory": False} | ({"multiprocessing_context": method} if number else {})
        plan = planned(tmp_path, kind, **options)
        assert plan.recipe.loader["num_workers"] == number
        recorder = train_tiny(plan, tmp_path / str(number))
        evidence = {entry.name: each for entry, each in recorder.found}["dataloader"]
        assert evidence.status == "active", evidence.seen
        found.append(load_file(tmp_path / str(number) / "run" / "final" / "model.safetensors"))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
