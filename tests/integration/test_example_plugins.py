"""The plugins of examples/plugins on two ranks: the same weights as on one rank, also after a resume."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from example_plugins import BESIDE, CLASSES, OPTIONS
from safetensors.torch import load_file

from hwopt.testing import TINY_BERT, apart, finished, gone_back, launcher, write_samples

SCRIPT = '''
"""Trains job.toml with a profile and a name: `script.py PROFILE NAME [resume]`."""
import os, sys, warnings
from pathlib import Path
sys.path.append(TESTS)
from example_plugins import registry
from hwopt import api
from hwopt.system.ranks import rank_and_world

warnings.simplefilter("ignore")
_, world = rank_and_world(os.environ)
plan = api.resolve(sys.argv[1], "job.toml", world_size=world, registry=registry())
api.execute(plan, Path("runs") / sys.argv[2], resume="resume" in sys.argv)
'''


def table(name: str, options: dict[str, Any]) -> str:
    return "\n".join([f"[plugins.{name}]", *(f"{key} = {json.dumps(value)}" for key, value in options.items())]) + "\n"


@pytest.mark.parametrize("name", CLASSES)
def test_two_ranks_train_the_model_of_one_and_resume(name: str, tmp_path: Path) -> None:
    write_samples(tmp_path / "train.jsonl", 41)
    write_samples(tmp_path / "dev.jsonl", 13, seed=1)
    config = ", ".join(f"{key} = {json.dumps(value)}" for key, value in TINY_BERT.items())
    training = "max_steps = 6\nlearning_rate = 1e-3\neval_steps = 3\nsave_steps = 3\nmetric_for_best_model = 'loss'\n"
    data = '[data]\ntrain = "train.jsonl"\neval = "dev.jsonl"\nmax_length = 32\n'
    (tmp_path / "job.toml").write_text(f"[model]\nconfig = {{ {config} }}\n{data}[training]\n{training}")
    tables = BESIDE.get(name, {}) | {"precision": {"dtype": "fp32"}, "batch": {"train": 3, "effective": 12}}
    profile = "".join(table(*each) for each in (tables | {name: OPTIONS.get(name, {})}).items())
    (tmp_path / "ranks.toml").write_text('name = "ranks"\n' + profile)
    (tmp_path / "script.py").write_text(SCRIPT.replace("TESTS", repr(str(Path(__file__).parents[1]))))

    def train(command: list[str], run: str, *more: str) -> dict[str, Any]:
        done = finished([*command, "script.py", "./ranks.toml", run, *more], tmp_path, HWOPT_CACHE=str(tmp_path / "cache"))
        assert done.returncode == 0, done.stderr[-3000:]
        return load_file(tmp_path / "runs" / run / "final" / "model.safetensors")

    one = train([sys.executable], "one")
    two = train(launcher(2), "two")
    assert apart(two, one) <= 1e-6
    gone_back(tmp_path / "runs" / "two", tmp_path / "runs" / "resumed", 3)
    assert apart(train(launcher(2), "resumed", "resume"), two) == 0.0
