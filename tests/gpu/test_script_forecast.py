"""`hwopt.optimized` on a GPU predicts its memory before the first step: in the plan, plan.json and the report."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from hosts.scripts import arguments, bert, padded, rows
from hosts.test_trl import tokenizer
from transformers import AutoModelForCausalLM, BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback

import hwopt
from hwopt.errors import DoesNotFitError
from hwopt.hardware.device import GIB
from hwopt.hosts.forecast import Fit

pytestmark = pytest.mark.device("any")


def trained(folder: Path, cls: Any = Trainer, **settings: Any) -> Any:
    args = arguments(folder, max_steps=2, use_cpu=False)
    trainer = hwopt.optimized(cls, "rtx3090_24gb", **settings)(bert(), args, partial(padded, classes=True), rows())
    trainer.train()
    return trainer


def test_plan_and_report_have_the_forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path)
    assert "hwopt: memory: fits: " in capsys.readouterr().out
    memory = json.loads((tmp_path / "plan.json").read_text())["memory"]
    assert memory["fits"] is True
    assert memory["tier"] == "traced"
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Memory was not predicted for this run" not in page


class Own(Trainer):
    def compute_loss(self, *positional: Any, **named: Any) -> Any:
        return super().compute_loss(*positional, **named)


def test_unknown_forecast_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, Own)
    assert "memory: UNKNOWN: Own.compute_loss() may keep more" in capsys.readouterr().out


def test_plan_that_does_not_fit_is_refused_only_with_strict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hwopt.hosts.forecast.forecast", lambda *_: Fit(False, "9.00 of 8.00 GiB"))
    trained(tmp_path)
    assert 'does not fit: 9.00 of 8.00 GiB. Start with fewer rows at once, batch={"train": 1}' in capsys.readouterr().out
    off = {"adapter": False, "dataloader": {"num_workers": 0}}
    with pytest.raises(DoesNotFitError, match="strict: memory: does not fit"):
        trained(tmp_path, strict=True, **off)


def test_cached_loss_computes_as_many_rows_at_once_as_are_forecast(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer import losses, modules

    config = BertConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024)
    BertModel(config).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    parts = modules.Transformer(str(tmp_path / "model"), max_seq_length=128), modules.Pooling(256)
    model = SentenceTransformer(modules=[*parts], device="cpu")
    texts = Dataset.from_dict(dict.fromkeys(("anchor", "positive"), ["w1 w2 w3 w4 w5" * 40] * 512))
    loss = losses.CachedMultipleNegativesRankingLoss(model)
    own: dict[str, Any] = {"use_cpu": False, "max_steps": 2, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 256}
    args = arguments(tmp_path, SentenceTransformerTrainingArguments, **own)
    seen: list[tuple[int, float]] = []

    class Peaks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen.append((loss.mini_batch_size, torch.cuda.max_memory_allocated() / GIB))

    cls = hwopt.optimized(SentenceTransformerTrainer, "rtx3090_24gb")
    torch.cuda.reset_peak_memory_stats()
    trainer = cls(model=model, args=args, train_dataset=texts, loss=loss, callbacks=[Peaks()])
    trainer.train()
    assert [rows_at_once for rows_at_once, _ in seen] == [256, 256], "the whole batch fits"
    assert trainer._run.plan.memory.peak_gib == pytest.approx(seen[-1][1], rel=0.04)
    assert loss.mini_batch_size == 32, "the user's object is as it was"


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning")
@pytest.mark.parametrize("frozen", [False, True])
def test_memory_of_an_sft_trainer_whose_head_is_computed_in_tiles(frozen: bool, tmp_path: Path) -> None:
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    sizes = {"hidden_size": 640, "intermediate_size": 1792, "num_hidden_layers": 4, "num_attention_heads": 10}
    config = LlamaConfig(**sizes, vocab_size=50_000, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if frozen else torch.float32)
    own: dict[str, Any] = {"use_cpu": False, "max_steps": 2, "per_device_train_batch_size": 4, "max_length": 512}
    args = arguments(tmp_path, SFTConfig, gradient_checkpointing=False, optim="adamw_torch_fused", **own)
    adapter = LoraConfig(target_modules="all-linear") if frozen else None
    texts = Dataset.from_list([{"input_ids": [5] * 400}] * 32)
    cls = hwopt.optimized(SFTTrainer, "rtx3090_24gb")
    trainer = cls(model=model, args=args, train_dataset=texts, processing_class=tokenizer(), peft_config=adapter)
    torch.cuda.reset_peak_memory_stats()
    trainer.train()
    assert trainer._run.plan.memory.peak_gib == pytest.approx(torch.cuda.max_memory_allocated() / GIB, rel=0.005)
    assert trainer._run.plan.memory.reserved_gib == pytest.approx(torch.cuda.max_memory_reserved() / GIB, rel=0.05)


def rank_of_two(folder: Path) -> None:
    """One of two ranks whose card has room for a step only if its layers are recomputed. Writes the plugins that were on."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 12, "num_attention_heads": 2, "vocab_size": 200}
    model, data = LlamaForCausalLM(LlamaConfig(**sizes)), [{"input_ids": [5] * 480}] * 64
    own: dict[str, Any] = {"use_cpu": False, "max_steps": 2, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 16}
    args = arguments(folder, **own)
    used = torch.empty(int(13.2 * GIB), dtype=torch.uint8, device=args.device)
    whole: dict[str, Any] = {"precision": {"dtype": "fp32"}, "length_batching": False, "batch": {"train": 16}}
    trainer = hwopt.optimized(Trainer, "t4_16gb", **whole)(model, args, partial(padded, classes=False), data)
    trainer.train()
    assert used.nbytes
    (folder / f"{args.process_index}.json").write_text(json.dumps([entry.name for entry in trainer._run.plan.applied()]))


@pytest.mark.device("pretend")
def test_both_ranks_recompute_layers_where_a_step_does_not_fit_without(tmp_path: Path) -> None:
    tests, card = Path(__file__).parents[1], "Tesla T4:7.5:15096"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, str(tmp_path)]
    command = [sys.executable, str(tests / "pretend_cuda"), f"{card},{card}", *launch]
    environment = os.environ | {"PYTHONPATH": str(tests)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "memory: fits" in ended.stdout
    plugins = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert plugins[0] == plugins[1]
    assert "checkpointing" in plugins[0]


if __name__ == "__main__":
    rank_of_two(Path(sys.argv[1]))
