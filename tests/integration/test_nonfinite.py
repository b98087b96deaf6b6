"""A non-finite gradient on one of two real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hwopt.testing import TINY_BERT, finished, launcher, logged, write_samples

RANKS = '''
"""Trains job.toml on two ranks; the gradient of one parameter is not finite on the second one, in step 2."""
import math, os
from pathlib import Path
from hwopt import api
from hwopt.system.ranks import rank_and_world
from hwopt.plugin import Decision, Plugin, Stage
from hwopt.plugin.registry import Registry

rank, world = rank_and_world(os.environ)

class Poison(Plugin):
    name, stage, slots = "poison", Stage.LOOP, ("model_steps",)

    def probe(self, context):
        return Decision.apply("for the test")

    def apply(self, recipe, context):
        recipe.model_steps.append(self.enter)

    def enter(self, model, run):
        if rank == 1:
            parameter = next(p for p in model.parameters() if p.requires_grad)
            parameter.register_hook(lambda gradient: gradient * math.nan if run.step == 1 else gradient)
        return model

registry = Registry()
registry.add(Poison)
plan = api.resolve("./ranks.toml", "job.toml", world_size=world, registry=registry)
api.execute(plan, Path("runs") / "both")
'''


@pytest.mark.soak
def test_all_ranks_skip_the_same_update(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    write_samples(tmp_path / "train.jsonl", 48)
    pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in TINY_BERT.items())
    training = 'max_steps = 6\nlogging_steps = 2\non_nonfinite = "skip"\n'
    (tmp_path / "job.toml").write_text(f'[model]\nconfig = {{ {pairs} }}\n[data]\ntrain = "train.jsonl"\n[training]\n{training}')
    (tmp_path / "ranks.toml").write_text('name = "ranks"\n[plugins.poison]\n[plugins.batch]\ntrain = 4\n')
    (tmp_path / "ranks.py").write_text(RANKS)
    done = finished([*launcher(2), "ranks.py"], tmp_path, HWOPT_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert logged(tmp_path / "runs" / "both", "skipped_updates") == [1, 1, 1]
    weights = load_file(tmp_path / "runs" / "both" / "final" / "model.safetensors")
    assert all(torch.isfinite(value).all() for value in weights.values())
