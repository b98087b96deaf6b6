"""Checkpoints of earlier versions: old option names are read as their present names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hwopt import api
from hwopt.planning.plan import Plan
from hwopt.saving.reader import STATE
from hwopt.system.atomic_folder import write_manifest
from hwopt.testing import Recorder, gone_back, plan_for, tiny_job, tiny_profile

FORMER = {
    "plugins.batch.gradient_accumulation_steps": "plugins.batch.accumulation",
    "plugins.dataloader.num_workers": "plugins.dataloader.workers",
    "plugins.adapter.lora_alpha": "plugins.adapter.alpha",
    "plugins.adapter.target_modules": "plugins.adapter.target",
    "plugins.adapter.lora_dropout": "plugins.adapter.dropout",
    "plugins.length_batching.tokens": "plugins.cut.tokens",
    "plugins.length_batching.overhead_tokens": "plugins.cut.overhead_tokens",
    "training.nonfinite_fraction": "training.nonfinite_share",
}


def planned(folder: Path, **adapter: Any) -> Plan:
    tables = {"adapter": {"always": True} | adapter, "length_batching": {}, "dataloader": {"num_workers": 0}}
    return plan_for(tiny_profile(**tables), tiny_job(folder, samples=16, max_steps=4, save_steps=2, save_total_limit=0))


def as_version_0_1(checkpoint: Path) -> None:
    """Give the settings in `checkpoint` the names that version 0.1 wrote."""
    content = json.loads((checkpoint / STATE).read_text())
    assert set(FORMER) <= set(content["settings"])
    content["settings"] = {FORMER.get(key, key): value for key, value in content["settings"].items()}
    content["facts"]["method"] = {FORMER.get(key, key): value for key, value in content["facts"]["method"].items()}
    (checkpoint / STATE).write_text(json.dumps(content))
    write_manifest(checkpoint)


def test_checkpoint_of_version_0_1_resumes(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    api.execute(plan, tmp_path / "run", cache=tmp_path / "cache")
    run = gone_back(tmp_path / "run", tmp_path / "again", 2)
    as_version_0_1(run / "checkpoint-2")
    recorder = Recorder()
    api.execute(plan, run, recorder, cache=tmp_path / "cache", resume=True)
    assert recorder.warnings == []
    assert recorder.run.step == 4


def test_choices_of_version_0_1_are_kept(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    before = {"machine": plan.machine, "decided": {"batch": {"train": 4, "eval": None, "accumulation": 2, "effective": None}}}
    chosen = {"train": 4, "eval": None, "gradient_accumulation_steps": 2, "effective": None}
    assert api.chosen_before(plan, before) == {"batch": chosen}
    assert api.chosen_before(plan, before | {"machine": []}) == {}
