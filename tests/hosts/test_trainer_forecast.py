"""What a Trainer's memory forecast reads, and what it leaves as it is. The card is described; tests/gpu have a pretend one."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from hosts.scripts import arguments, bert, llama, padded, rows, train
from hosts.test_trl import tokenizer
from sentence_transformers import SentenceTransformerTrainingArguments
from transformers import Trainer

import hwopt
from hwopt.hardware.device import GIB, Hardware, described
from hwopt.hosts.arguments import mean_tokens, script_of
from hwopt.hosts.cached_loss import forecast_of_cached
from hwopt.hosts.forecast import Fit, forecast_of_trainer, rows_lengths, with_own_memory
from hwopt.hosts.script_plan import plan_for

CARD = described("Tesla T4", (7, 5), 15.0)
FP32: dict[str, Any] = {"precision": {"dtype": "fp32"}}


def forecast_for(args: Any, data: Any, card: Hardware = CARD, **given: Any) -> Fit:
    given |= {"model": llama(), "train_dataset": data}
    return forecast_of_trainer(Trainer, args, given, "t4_16gb", FP32, card)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("the forecast reads a stream, which may never end")


def transformed(batch: Any) -> Any:
    raise AssertionError("the forecast runs a transform of the user")


CHOICES = Dataset.from_list([{"input_ids": [[1, 2, 3], [4]], "attention_mask": [[1, 1, 1], [1]]}])


@pytest.mark.parametrize("data", [Stream(), Dataset.from_list(rows()).with_transform(transformed), CHOICES, None])
def test_rows_that_are_not_stored_are_not_read_and_no_length_is_guessed(data: Any, tmp_path: Path) -> None:
    full = replace(CARD, free_memory_gib=0.0)
    found = forecast_for(arguments(tmp_path), data, full)
    assert found.fits is None
    assert "how many tokens a row has is not known" in found.why
    assert mean_tokens(data) is None
    assert "may hold a second model" in forecast_for(arguments(tmp_path, SentenceTransformerTrainingArguments), data).why


def test_lengths_of_stored_rows_follow_their_order(tmp_path: Path) -> None:
    stored = Dataset.from_list([{"input_ids": [1] * count, "text": "a"} for count in (3, 9, 5)])
    args = arguments(tmp_path)
    assert rows_lengths(stored.select([2, 0]), args) == [5, 3]
    assert rows_lengths(stored.with_format("torch"), args) == rows_lengths(list(stored), args) == [3, 9, 5]


def test_layers_are_recomputed_where_the_script_does_not_fit_without(tmp_path: Path) -> None:
    """The profile leaves that to a forecast, and the script does not ask for it."""
    stored, args = [{"input_ids": [1] * 480, "labels": [1] * 480}] * 32, arguments(tmp_path, per_device_train_batch_size=16)
    whole = forecast_for(args, stored)
    assert (whole.fits, whole.needs) == (True, ())
    assert whole.memory is not None
    least = whole.memory.highest_gib  # 3 % of it are kept back
    tight = replace(CARD, free_memory_gib=least, memory_limit_gib=least)
    found = forecast_for(args, stored, tight)
    assert (found.fits, found.needs) == (True, ("checkpointing",)), found.why
    assert found.why.endswith("with checkpointing")


def test_packed_rows_without_a_maximum_are_as_long_as_they_are(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    args.packing = True  # of SFTConfig
    assert rows_lengths([{"input_ids": [1, 2, 3]}], args) == [3]


def test_max_length_alone_refuses_no_training(tmp_path: Path) -> None:
    args, full = arguments(tmp_path), replace(CARD, free_memory_gib=0.0)
    assert forecast_for(args, rows(), full).fits is False
    args.max_length = 64  # as in SFTConfig
    found = forecast_for(args, [{"text": "a"}], full)
    assert found.fits is None
    assert "if a row has max_length tokens" in found.why


def test_own_loss_function_is_not_forecast(tmp_path: Path) -> None:
    found = forecast_for(arguments(tmp_path), rows(), compute_loss_func=print)
    assert (found.fits, found.why) == (None, "compute_loss_func is yours, and may read the logits")


def test_weights_that_are_on_the_device_already_are_not_counted_twice() -> None:
    host = Hardware(device_type="cpu", name="a CPU", memory_gib=8.0, free_memory_gib=4.0)
    model = llama()
    assert with_own_memory(CARD, model) == with_own_memory(CARD, "a name") == CARD
    assert with_own_memory(host, model).free_memory_gib == 4.0 + sum(p.nbytes for p in model.parameters()) / GIB


def test_forecast_leaves_the_accelerator_of_a_trainer_as_it_is(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=1)
    trainer = Trainer(llama(), args, lambda few: padded(few, False), train_dataset=rows())
    assert hwopt.fits(trainer.model, args, rows(), card="Tesla T4", **FP32)  # makes arguments, which resets the process's state
    trainer.train()


def test_measured_memory_by_kind_stands_in_the_folder_for_the_report(tmp_path: Path) -> None:
    trainer, _ = train(hwopt.optimized(Trainer, "cpu", **FP32), tmp_path, max_steps=1)
    held = json.loads((tmp_path / "memory.json").read_text(encoding="utf-8"))
    assert held["weights"] * GIB >= sum(p.nbytes for p in trainer.model.parameters())
    assert held["optimizer_state"] > 1.9 * held["weights"]


def test_cached_loss_takes_its_mini_batches_from_the_forecast(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses, modules

    bert().bert.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    model = SentenceTransformer(modules=[modules.Transformer(str(tmp_path / "model")), modules.Pooling(32)], device="cpu")
    args: Any = arguments(tmp_path, SentenceTransformerTrainingArguments, per_device_train_batch_size=4096)
    plan = plan_for(model, "t4_16gb", script_of(args, {}), FP32, hardware=CARD).plan

    def rows_of(card: Hardware, **own: Any) -> tuple[bool | None, int | None]:
        loss = losses.CachedMultipleNegativesRankingLoss(model, **own)
        found = forecast_of_cached({"model": model, "loss": loss}, args, replace(plan, hardware=card))
        assert found is not None
        assert loss.mini_batch_size == own.get("mini_batch_size", 32)
        return found.fits, found.rows

    tight = replace(CARD, free_memory_gib=0.5, memory_limit_gib=0.5)
    assert rows_of(CARD) == (True, 4096), "the whole batch"
    fits, rows_at_once = rows_of(tight)
    assert fits
    assert rows_at_once in (128, 256, 512, 1024, 2048)
    assert rows_of(tight, mini_batch_size=16) == (True, None), "the script's own"
    assert rows_of(replace(tight, free_memory_gib=0.01)) == (None, None), "the texts may be shorter"
    assert forecast_of_cached({"model": model, "loss": losses.MultipleNegativesRankingLoss(model)}, args, plan) is None
