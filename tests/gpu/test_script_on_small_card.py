"""A TRL script that runs out of memory on a T4 ends there with `hwopt.optimized`, with the losses that a large card gives.

The script trains a reward model: SFTTrainer computes its loss with Triton kernels, whose values a pretend card does not compute.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts.scripts import bert

import hwopt
from hwopt.hardware.device import GIB

TESTS = Path(__file__).parents[1]
SMALL = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 1_024, "num_hidden_layers": 4, "num_attention_heads": 2}


QWEN = {"vocab_size": 152_000, "hidden_size": 896, "intermediate_size": 4_864, "num_hidden_layers": 24, "num_attention_heads": 14}
"""The sizes of Qwen2.5-0.5B."""


def main(which: str, size: str, output: str) -> None:
    """The script: `which` says whether its one line is changed."""
    from hosts.test_trl import data, tokenizer
    from pretend_cuda.zero_weights import large_weights_uninitialized
    from transformers import LlamaConfig, LlamaForSequenceClassification, set_seed
    from trl import RewardConfig, RewardTrainer

    set_seed(0)
    large = size == "large"
    with large_weights_uninitialized(), torch.device("cuda" if large else "cpu"):
        config = LlamaConfig(**(QWEN if large else SMALL), pad_token_id=0, num_labels=1)
        model = LlamaForSequenceClassification(config)
    rows: Any = data("chosen", "rejected")
    if large:
        rows = rows.map(lambda row: {name: " ".join([text] * 10) for name, text in row.items()})
    switch = "activation_checkpointing" if hasattr(RewardConfig, "activation_checkpointing") else "gradient_checkpointing"
    own = {"per_device_train_batch_size": 32, "max_steps": 3, "logging_steps": 1, "learning_rate": 1e-3, switch: False}
    args = RewardConfig(str(Path(output).with_suffix("")), bf16=False, save_strategy="no", report_to=[], **own)
    cls: Any = RewardTrainer
    if which == "changed":
        off = {"precision": {"dtype": "fp32"}, "checkpointing": False, "length_batching": False, "batch": {"train": 32}}
        cls = hwopt.optimized(RewardTrainer, "t4_16gb", **off)
    trainer = cls(model=model, args=args, train_dataset=rows, processing_class=tokenizer())
    trainer.train()
    steps = [(float(row["loss"]), float(row["grad_norm"])) for row in trainer.state.log_history if "loss" in row]
    Path(output).write_text(json.dumps(steps))


def run(card: str, which: str, size: str, output: Path) -> subprocess.CompletedProcess[str]:
    """The script in a process with the pretend card `card`, which computes every value of the small model."""
    environment = os.environ | {"PYTHONPATH": str(TESTS)} | ({"PRETEND_COMPUTE": "all"} if size == "small" else {})
    command = [sys.executable, str(TESTS / "pretend_cuda"), card, sys.executable, __file__, which, size, str(output)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.device("pretend")
def test_script_that_runs_out_of_memory_ends_with_the_losses_of_a_large_card(tmp_path: Path) -> None:
    small_card, large_card = "Tesla T4:7.5:400", "Tesla T4:7.5:15096"
    refused = run(small_card, "plain", "small", tmp_path / "refused.json")
    assert "OutOfMemoryError" in refused.stderr
    wanted, found = tmp_path / "wanted.json", tmp_path / "found.json"
    assert run(large_card, "plain", "small", wanted).returncode == 0
    ended = run(small_card, "changed", "small", found)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "micro-batch 32 -> 1" in ended.stdout  # the plan knows that the card is small
    for ours, theirs in zip(json.loads(found.read_text()), json.loads(wanted.read_text()), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert theirs[0] > 0.1


@pytest.mark.device("pretend")
def test_model_of_half_a_billion_parameters_on_a_t4(tmp_path: Path) -> None:
    """Its large tensors are not computed: memory alone is looked at."""
    assert "OutOfMemoryError" in run("t4", "plain", "large", tmp_path / "refused.json").stderr
    ended = run("t4", "changed", "large", tmp_path / "found.json")
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "out of memory" in ended.stdout
    assert len(json.loads((tmp_path / "found.json").read_text())) == 3


@pytest.mark.device("any")
def test_blocks_that_loading_left_in_the_allocator_are_freed_before_the_first_step() -> None:
    model, batch = bert().cuda(), {"input_ids": torch.ones(2, 4, dtype=torch.long, device="cuda")}
    with hwopt.session("t4_16gb", model, rows=2, compile=False):
        torch.empty(GIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() >= GIB
        model(**batch)
        assert torch.cuda.memory_reserved() < GIB


if __name__ == "__main__":
    main(*sys.argv[1:])
