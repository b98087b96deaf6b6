"""Real ranks over gloo, with DDP and with ZeRO: the results of one rank. tests/integration/test_fsdp.py has FSDP."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import named
from integration.ranks_folder import BATCH, FP32, check_equal, train, write_job, write_profile
from safetensors.torch import load_file

from hwopt.testing import TINY_BERT, TINY_LLAMA, logged, relative_error, rewound, saved_bits, write_samples

CONFIGS = {"text-classification": TINY_BERT, "causal-lm": TINY_LLAMA}
Tables = dict[str, dict[str, Any]]


def tables(**more: Any) -> Tables:
    return FP32 | {"batch": {**BATCH, "eval": 4}, "length_batching": {}} | more


def zero(stage: int, offload: str = "none") -> Tables:
    return tables(zero={"stage": stage, "offload": offload})


@pytest.fixture(scope="module")
def alone(warm: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind of the job -> the folder with the job and a run of one rank."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in CONFIGS}
    for kind, folder in folders.items():
        write_job(folder, CONFIGS[kind], kind, max_steps=20, eval_steps=7)
        write_profile(folder, tables())
        train(folder, "one")
    return folders


CASES: dict[str, tuple[str, int, Tables]] = {
    "two, causal model": ("causal-lm", 2, tables()),
    "two": ("text-classification", 2, tables()),
    "four": ("text-classification", 4, tables()),
    "zero 0": ("text-classification", 2, zero(0)),
    "zero 1": ("text-classification", 2, zero(1)),
    "zero 2": ("text-classification", 2, zero(2)),
    "zero 3": ("text-classification", 2, zero(3)),
    "zero 3 with parameters on the host": ("text-classification", 2, zero(3, "parameters")),
}


@pytest.mark.parametrize("case", named(CASES, ("two, causal model", "four", "zero 2", "zero 3 with parameters on the host")))
def test_several_ranks_match_one_rank(
    case: tuple[str, int, Tables], alone: dict[str, Path], request: pytest.FixtureRequest
) -> None:
    """Ranks agree on the number of micro-batches. Of four, each has one or two samples in the partial step."""
    kind, ranks, plugins = case
    write_profile(alone[kind], plugins)
    several = train(alone[kind], request.node.callspec.id.replace(" ", "-").replace(",", ""), ranks)
    check_equal(several, alone[kind] / "runs" / "one", ranks)


@pytest.mark.soak
def test_half_weights_on_two_ranks(warm: None, tmp_path: Path) -> None:
    """Evaluations before and during training must not remove DDP's hooks from the half weights."""
    write_job(tmp_path, max_steps=10, eval_steps=5)
    write_profile(tmp_path, tables(precision={"dtype": "bf16", "level": "O2"}))
    check_equal(train(tmp_path, "two", 2), train(tmp_path, "one"), 2, saved=(), rows=2e-2)


@pytest.mark.parametrize("plugins", named({"2": zero(2), "3": zero(3, "parameters")}, ("2",)))
def test_two_ranks_resume_from_their_shards(plugins: Tables, alone: dict[str, Path]) -> None:
    """A resume on two ranks gives the same bits, on one rank the same weights up to rounding."""
    folder, steps = alone["text-classification"], ("--set", "training.save_steps=10")
    write_profile(folder, plugins)
    name = f"through-{plugins['zero']['stage']}"
    through = train(folder, name, 2, *steps)
    for ranks in (2, 1):
        again = rewound(through, folder / "runs" / f"{name}-{ranks}", 10)
        train(folder, again.name, ranks, *steps, "--resume")
        assert logged(again, "loss") == pytest.approx(logged(through, "loss"), rel=1e-5)
        for part in ("final", "checkpoint-20"):
            assert relative_error(*(load_file(run / part / "model.safetensors") for run in (again, through))) <= 1e-6
            assert ranks == 1 or saved_bits(again / part) == saved_bits(through / part)


def test_class_weights_early_stopping_and_results_are_those_of_one_rank(warm: None, tmp_path: Path) -> None:
    write_samples(tmp_path / "test.jsonl", 9, seed=9)
    write_job(
        tmp_path,
        data={"test": "test.jsonl"},
        task={"class_weights": {"colour": 4.0}, "label_smoothing": 0.1},
        max_steps=12,
        eval_steps=2,
        metric_for_best_model="eval_loss",
        early_stopping_patience=2,
        early_stopping_threshold=5.0,
    )
    write_profile(tmp_path, {"batch": BATCH})
    runs = train(tmp_path, "one"), train(tmp_path, "two", 2)
    one, two = (json.loads((run / "summary.json").read_text()) for run in runs)
    assert one["step"] == two["step"] == 6
    assert one["early_stopping_count"] == two["early_stopping_count"] == 2
    assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-5)
    for prefix in ("best_eval_", "test_"):
        assert two[f"{prefix}confusion_matrix"] == one[f"{prefix}confusion_matrix"]
        assert two[f"{prefix}classes"] == one[f"{prefix}classes"]
    weights = [load_file(run / "final/model.safetensors") for run in runs]
    assert relative_error(*weights) < 1e-5
    assert all(torch.isfinite(tensor).all() for tensor in weights[1].values())
