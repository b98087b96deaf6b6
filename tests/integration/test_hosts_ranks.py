"""`hwopt.optimized` on two ranks trains what the unmodified script trains on two ranks."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hosts.scripts import bert, farthest, llama, padded, rows, train
from hosts.test_trl import QUIET, SPLIT, data, preference_model, sft
from hosts.test_trl import train as train_trl
from integration.forks import on_ranks
from transformers import LlamaForCausalLM, Trainer

import hwopt


@pytest.mark.parametrize("own_loop", [False, True], ids=["accumulate_batch", "micro_batches"])
def test_ranks_with_other_numbers_of_parts_share_gradients_once(own_loop: bool, tmp_path: Path) -> None:
    """The rows of rank 0 are longer, and computed in more parts."""

    def work(rank: int, ours: bool) -> None:
        own = {"profile": "cpu", "additive": "rows", "batch": {"train": 4}, "precision": False} if ours else {}
        accelerator: Any = (hwopt.Accelerator if ours else Accelerator)(cpu=True, **own)
        plain = bert()
        model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        batch = padded(rows()[:8] if rank == 0 else [rows()[0]] * 4, classes=True)
        if ours and own_loop:
            for micro in accelerator.micro_batches(batch):
                accelerator.backward(model(**micro.inputs).loss * micro.weight)
        elif ours:
            accelerator.accumulate_batch(batch, lambda inputs: model(**inputs).loss)
        else:
            accelerator.backward(model(**batch).loss)
        optimizer.step()
        if rank == 0:
            torch.save(accelerator.unwrap_model(model).classifier.weight, tmp_path / f"{ours}.pt")

    for ours in (False, True):
        on_ranks(lambda rank, ours=ours: work(rank, ours), tmp_path)
    torch.testing.assert_close(torch.load(tmp_path / "True.pt"), torch.load(tmp_path / "False.pt"))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_what_trl_gathers_in_each_micro_batch_is_added_up_once_a_step(kind: str, tmp_path: Path) -> None:
    """Ranks compute other numbers of micro-batches, with other numbers of rows."""
    if kind == "dpo":
        preference_model(tmp_path / "model")

    def work(rank: int, ours: bool) -> None:
        import trl

        folder, columns = tmp_path / str(ours), ("prompt", "chosen", "rejected") if kind == "dpo" else ("text",)
        config = partial(trl.DPOConfig, str(folder), save_strategy="no", **QUIET) if kind == "dpo" else partial(sft, folder)
        model = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32) if kind == "dpo" else None
        cls: Any = trl.DPOTrainer if kind == "dpo" else trl.SFTTrainer
        options: dict[str, Any] = SPLIT | {"length_batching": {"overhead_tokens": 16}}
        trainer, _ = train_trl(hwopt.optimized(cls, "cpu", **options) if ours else cls, config, data(*columns), model=model)
        sizes = [step.sizes for step in trainer._run.steps] if ours else []
        (tmp_path / f"{ours}-{rank}.json").write_text(json.dumps([trainer.state.log_history[:-1], sizes]))

    found: dict[tuple[bool, int], Any] = {}
    for ours in (False, True):
        on_ranks(lambda rank, ours=ours: work(rank, ours), tmp_path)
        found |= {(ours, rank): json.loads((tmp_path / f"{ours}-{rank}.json").read_text()) for rank in (0, 1)}
    counts = [[len(sizes) for sizes in found[True, rank][1]] for rank in (0, 1)]
    assert counts[0] != counts[1]
    same = ("loss", "grad_norm", "num_tokens", "rewards/", "logps/")
    for row, wanted in zip(found[True, 0][0], found[False, 0][0], strict=True):
        names = [name for name in wanted if name.startswith(same)]
        assert [row[name] for name in names] == pytest.approx([wanted[name] for name in names], rel=1e-4, abs=1e-6)


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
        on_ranks(lambda rank, name=name: work(name), tmp_path)
    assert farthest(result("ours", 0)[0], result("plain", 0)[0]) < 1e-5
    for rank in (0, 1):
        assert all(sum(rows for rows, _ in sizes) == 16 for sizes in result("ours", rank)[1])
    evidence = json.loads((tmp_path / "ours" / "evidence.json").read_text())["plugins"]
    assert {entry["status"] for entry in evidence} == {"active"}
