"""`hwopt.optimized` of TRL's SFTTrainer: completion-only losses, adapters, the trainer's own metrics."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from hosts.scripts import Log, Steps, farthest, llama, memory_of, reset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import hwopt

# TRL and PEFT use the names that transformers is about to drop
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")

SPLIT = {"batch": {"train": 4}, "precision": {"dtype": "fp32"}}
QUIET = {"max_steps": 4, "logging_steps": 1, "report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True}


def tokenizer() -> Any:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(100))]
    found = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def text(choice: random.Random) -> str:
    return " ".join(f"w{choice.randrange(100)}" for _ in range(choice.randrange(2, 30)))


def data(*columns: str) -> Dataset:
    choice = random.Random(1)
    return Dataset.from_list([{name: f" {text(choice)}" for name in columns} for _ in range(64)])


def train(cls: type, config: Any, rows: Dataset, limit: int | None = None, model: Any = None, **given: Any) -> tuple[Any, Steps]:
    """`config`: makes the arguments."""
    reset()
    args = config()
    model, log = model or llama(), Log()
    if limit is not None:
        model.register_forward_pre_hook(memory_of(limit), with_kwargs=True)
    trainer = cls(model=model, args=args, train_dataset=rows, processing_class=tokenizer(), callbacks=[log], **given)
    trainer.train()
    return trainer, log.steps


def sft(folder: Path) -> Any:
    from trl import SFTConfig  # takes ten seconds to import

    own = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "learning_rate": 1e-3}
    switch = "activation_checkpointing" if hasattr(SFTConfig, "activation_checkpointing") else "gradient_checkpointing"
    return SFTConfig(str(folder), max_length=64, save_strategy="no", **QUIET, **own, **{switch: False})


@pytest.mark.parametrize("limit", [None, 150])
@pytest.mark.parametrize("adapter", [False, True])
def test_sft_trains_the_same(limit: int | None, adapter: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from peft import LoraConfig
    from trl import SFTTrainer

    rows = data("prompt", "completion")

    def given() -> dict[str, Any]:
        torch.manual_seed(0)
        return {"peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=True)} if adapter else {}

    plain, wanted = train(SFTTrainer, partial(sft, tmp_path / "plain"), rows, **given())
    cls = hwopt.optimized(SFTTrainer, "cpu", **SPLIT)
    trainer, found = train(cls, partial(sft, tmp_path / "ours"), rows, limit, **given())
    assert farthest(found, wanted) < 1e-5
    assert trainer.state.log_history[-2]["num_tokens"] == plain.state.log_history[-2]["num_tokens"]
    output = capsys.readouterr().out
    assert "a step is split by length: the loss of LlamaForCausalLM is divided by the labels of the step" in output
    assert "unlike the unmodified script's: entropy, mean_token_accuracy" in output
    assert ("out of memory" in output) == (limit is not None)


def test_preference_loss_is_left_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from trl import DPOConfig, DPOTrainer

    rows, folder = data("prompt", "chosen", "rejected"), tmp_path / "model"
    llama().save_pretrained(folder)  # DPO loads its reference by name

    def steps(cls: type, name: str) -> tuple[Any, Steps]:
        config = partial(DPOConfig, str(tmp_path / name), per_device_train_batch_size=4, save_strategy="no", **QUIET)
        return train(cls, config, rows, model=LlamaForCausalLM.from_pretrained(folder))

    _, wanted = steps(DPOTrainer, "plain")
    trainer, found = steps(hwopt.optimized(DPOTrainer, "cpu", **SPLIT), "ours")
    assert farthest(found, wanted) < 1e-5
    assert "a step is not split: DPOTrainer computes a loss of its own" in capsys.readouterr().out
    assert {"optimizer", "sdpa"} <= {entry.name for entry in trainer._run.plan.applied()}
