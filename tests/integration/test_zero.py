"""ZeRO on two real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from integration.forks import run_ranks
from safetensors.torch import load_file

from hwopt.testing import TINY_BERT, logged, relative_error, rewound, saved_bits, write_samples

OTHERS = [(0, "none"), (1, "none"), (3, "none")]


PROFILE = """name = "ranks"
[plugins.precision]
dtype = "fp32"
[plugins.batch]
train = 3
effective = 12
eval = 4
[plugins.length_batching]
[plugins.zero]
stage = {stage}
offload = "{offload}"
"""


def started(ranks: int, folder: Path, name: str, *arguments: str) -> Path:
    command, output = ["run", "job.toml", "--profile", "./ranks.toml", "--name", name, *arguments], folder / f"{name}.out"
    assert run_ranks(command, ranks, folder, output) == [0] * ranks, output.read_text()[-3000:]
    return folder / "runs" / name


@pytest.fixture(scope="module")
def alone(warm: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the job and a run of one rank without ZeRO."""
    folder = tmp_path_factory.mktemp("ranks")
    write_samples(folder / "train.jsonl", 41)  # the last step of an epoch has five rows
    write_samples(folder / "dev.jsonl", 13, seed=1)
    pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in TINY_BERT.items())
    (folder / "job.toml").write_text(
        f'[model]\nconfig = {{ {pairs} }}\n[data]\ntrain = "train.jsonl"\neval = "dev.jsonl"\nmax_length = 32\n'
        '[task]\nkind = "text-classification"\n'
        "[training]\nmax_steps = 20\nlearning_rate = 1e-3\nlogging_steps = 1\neval_steps = 7\n"
    )
    (folder / "ranks.toml").write_text(PROFILE.format(stage=0, offload="none"))
    started(1, folder, "one")
    return folder


@pytest.mark.parametrize(
    ("stage", "offload"), [*(pytest.param(*case, marks=pytest.mark.soak) for case in OTHERS), (2, "none"), (3, "parameters")]
)
def test_two_ranks_match_one_rank(stage: int, offload: str, alone: Path) -> None:
    """20 steps of uneven micro-batches. Ranks must agree on the number of micro-batches of a step."""
    (alone / "ranks.toml").write_text(PROFILE.format(stage=stage, offload=offload))
    two, one = started(2, alone, f"two-{stage}-{offload}"), alone / "runs" / "one"
    assert json.loads((two / "plan.json").read_text())["world_size"] == 2
    assert logged(two, "loss") == pytest.approx(logged(one, "loss"), rel=1e-5)
    assert logged(two, "eval_loss") == pytest.approx(logged(one, "eval_loss"), rel=1e-5)
    assert relative_error(load_file(two / "final" / "model.safetensors"), load_file(one / "final" / "model.safetensors")) <= 1e-6
    found = json.loads((two / "evidence.json").read_text())["plugins"]
    assert {row["status"] for row in found} == {"active"}, found


@pytest.mark.parametrize(("stage", "offload"), [(2, "none"), pytest.param(3, "parameters", marks=pytest.mark.soak)])
def test_two_ranks_resume_from_their_shards(stage: int, offload: str, alone: Path) -> None:
    """A resume on two ranks gives the same bits, on one rank the same weights up to rounding."""
    (alone / "ranks.toml").write_text(PROFILE.format(stage=stage, offload=offload))
    name = f"through-{stage}"
    through = started(2, alone, name, "--set", "training.save_steps=10")
    for ranks in (2, 1):
        again = rewound(through, alone / "runs" / f"{name}-{ranks}", 10)
        started(ranks, alone, again.name, "--set", "training.save_steps=10", "--resume")
        assert logged(again, "loss") == pytest.approx(logged(through, "loss"), rel=1e-5)
        for part in ("final", "checkpoint-20"):
            ours, theirs = (load_file(run / part / "model.safetensors") for run in (again, through))
            assert relative_error(ours, theirs) <= 1e-6
            assert ranks == 1 or saved_bits(again / part) == saved_bits(through / part)
