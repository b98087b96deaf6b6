"""`hwopt.optimized` trains what the unmodified script trains: losses, norms, checkpoints; and says what is on."""

import json
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import DAILY
from datasets import Dataset, IterableDataset
from hosts.scripts import SIZES, Log, Steps, arguments, bert, farthest, llama, memory_of, padded, reset, rows, t5, train
from hosts.test_trl import tokenizer
from torch.utils.data import DataLoader
from transformers import (
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import hwopt
from hwopt.errors import DoesNotFitError, InputError, PluginError
from hwopt.hardware.device import described, weakest
from hwopt.hosts.additivity import additivity_of
from hwopt.hosts.arguments import own_words
from hwopt.hosts.limits import lacks_of, overridden
from hwopt.hosts.script_plan import Script, plan_for
from hwopt.hosts.script_run import ScriptRun, with_lines
from hwopt.hosts.trainer import default_arguments
from hwopt.runs.record import read_record

SPLIT = {"batch": {"train": 4}, "precision": {"dtype": "fp32"}}
"""Options with which a step of 16 rows is computed in micro-batches of 4."""
CLOSE = 1e-5


def optimized(**settings: Any) -> Any:
    return hwopt.optimized(Trainer, "cpu", **(SPLIT | settings))


def compared(
    folder: Path, cls: Any = Trainer, limit: int | None = None, make: Any = bert, changes: Any = None, **own: Any
) -> Any:
    """The trainer of `optimized(cls)`, whose steps are those of `cls`. `changes`: of the arguments; `own`: of `optimized`."""
    keywords = cls.keywords if isinstance(cls, partial) else {}
    base = cls.func if isinstance(cls, partial) else cls
    _, wanted = train(cls, folder / "plain", make, **(changes or {}))
    ours = partial(hwopt.optimized(base, "cpu", **(SPLIT | own)), **keywords)
    trainer, found = train(ours, folder / "ours", make, limit=limit, **(changes or {}))
    assert farthest(found, wanted) < CLOSE
    return trainer


@pytest.mark.parametrize(
    ("make", "limit"), [(bert, None), (llama, 150), *(pytest.param(*each, marks=DAILY) for each in ((bert, 150), (llama, None)))]
)
def test_losses_and_norms_are_those_of_the_unmodified_script(
    make: Any, limit: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = compared(tmp_path, limit=limit, make=make)
    output = capsys.readouterr().out
    assert "a step is split by length" in output
    assert ("out of memory" in output) == (limit is not None)
    assert all(size[0] * size[1] <= 150 for step in trainer._run.steps for size in step.sizes) == (limit is not None)
    computed, real = (sum(getattr(step, name) for step in trainer._run.steps) for name in ("computed", "tokens"))
    assert real <= computed < 1.3 * real


@pytest.mark.parametrize("counted", ["no", "all"])
def test_the_output_folder_holds_plan_evidence_and_report(counted: str, tmp_path: Path) -> None:
    trainer, steps = train(optimized(), tmp_path, eval_strategy="no", logging_steps=1, include_num_input_tokens_seen=counted)
    record = read_record(tmp_path)
    assert record.complete
    assert [row["loss"] for row in record.log_rows] == [loss for loss, _ in steps]
    active = {entry.name: "active" for entry in trainer._run.plan.applied()}
    assert {entry["name"]: entry["status"] for entry in record.evidence} == active
    assert "done, 4 steps" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_checkpoint_resumes_in_the_unmodified_script(tmp_path: Path) -> None:
    _, wanted = train(Trainer, tmp_path / "plain", save_strategy="steps", save_steps=2)
    train(optimized(), tmp_path / "ours", save_strategy="steps", save_steps=2)
    checkpoint = tmp_path / "ours" / "checkpoint-2"
    _, resumed = train(Trainer, tmp_path / "resumed", resume=str(checkpoint))
    assert farthest(resumed, wanted[2:]) < CLOSE
    args, own = (torch.load(tmp_path / name / "checkpoint-2/training_args.bin", weights_only=False) for name in ("ours", "plain"))
    assert args.to_dict() | {"output_dir": ""} == own.to_dict() | {"output_dir": ""}
    _, again = train(optimized(), tmp_path / "ours", resume=str(checkpoint))
    assert farthest(again, wanted[2:]) < CLOSE
    assert [row["step"] for row in read_record(tmp_path / "ours").log_rows] == [1, 2, 3, 4]


class Custom(Trainer):
    def compute_loss(self, *positional: Any, **named: Any) -> Any:
        return super().compute_loss(*positional, **named)


def with_batch_norm() -> Any:
    model = bert()
    model.bert.pooler.dense = torch.nn.Sequential(model.bert.pooler.dense, torch.nn.BatchNorm1d(SIZES["hidden_size"]))
    return model


def own_loss(found: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return torch.nn.functional.cross_entropy(found["logits"], labels)


@pytest.mark.parametrize(
    ("cls", "make", "changes", "reason"),
    [
        (Custom, bert, {}, "Custom computes a loss of its own"),
        (Trainer, with_batch_norm, {}, "is a BatchNorm"),
        (Trainer, bert, {"label_smoothing_factor": 0.1}, "label_smoothing_factor divides"),
        (Trainer, llama, {"neftune_noise_alpha": 5.0}, "the noise of NEFTune"),
        (partial(Trainer, compute_loss_func=own_loss), bert, {}, "compute_loss_func"),
    ],
)
def test_loss_that_is_not_known_to_add_up_is_not_split(
    cls: Any, make: Any, changes: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = compared(tmp_path, cls, make=make, changes=changes)
    assert reason in next(line for line in capsys.readouterr().out.splitlines() if "a step is not split" in line)
    if cls is Custom:
        with pytest.raises(DoesNotFitError, match=f"it is not split: {reason}. Lower per_device"):
            train(hwopt.optimized(Custom, "cpu", **SPLIT), tmp_path, limit=50)
        assert all(len(step.sizes) > 2 for step in compared(tmp_path / "said", Custom, additive="rows")._run.steps)
    assert {entry.name for entry in trainer._run.plan.applied()} >= {"optimizer", "sdpa", "dataloader"}


class OwnHooks(Trainer):
    """Makes its own loader, in another order, and its own optimizer."""

    def get_train_dataloader(self) -> Any:
        rows: Any = self.train_dataset
        return DataLoader(rows[::-1], batch_size=6, collate_fn=self.data_collator)

    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return self.optimizer


def test_loader_and_optimizer_of_a_subclass_stay_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = compared(tmp_path, OwnHooks)
    assert type(trainer.optimizer.optimizer) is torch.optim.SGD
    assert all(step.rows == 12 and len(step.sizes) > 2 for step in trainer._run.steps)
    output = capsys.readouterr().out
    assert "OwnHooks.get_train_dataloader() makes the DataLoader" in output
    assert "skip     optimizer: OwnHooks.create_optimizer() makes the optimizer" in output


def test_arguments_for_the_optimizer_of_the_trainer_leave_it_to_the_trainer(tmp_path: Path) -> None:
    compared(tmp_path, changes={"optim": "sgd", "optim_args": "momentum=0.9"})
    momentum = arguments(tmp_path, optim_args="betas=(0.5, 0.5)")
    assert lacks_of(Trainer, momentum, {})["optimizer"] == "optim_args of your arguments is for the Trainer's own optimizer"


def test_loss_of_liger_is_not_split(tmp_path: Path) -> None:
    trainer = Trainer(llama(), arguments(tmp_path, use_liger_kernel=True))
    assert additivity_of(trainer, True).reason == "use_liger_kernel computes the loss"
    assert lacks_of(Trainer, trainer.args, {})["loss"].startswith("use_liger_kernel of your arguments")


def test_batch_with_a_list_stays_whole_and_the_plan_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Named(Trainer):
        def get_train_dataloader(self) -> Any:
            collate: Any = self.data_collator
            self.data_collator = lambda features: collate(features) | {"names": [str(len(row["input_ids"])) for row in features]}
            return super().get_train_dataloader()

        def compute_loss(self, model: Any, inputs: Any, *positional: Any, **named: Any) -> Any:
            return super().compute_loss(model, {key: inputs[key] for key in inputs if key != "names"}, *positional, **named)

    trainer = compared(tmp_path, Named, additive="rows")
    assert "a step is not split: 'names' of a batch may not have one entry for each row" in capsys.readouterr().out
    assert "batch" not in {entry.name for entry in trainer._run.plan.applied()}


def test_false_word_of_the_user_is_found_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Squared(Trainer):
        def compute_loss(self, *positional: Any, **named: Any) -> Any:
            return super().compute_loss(*positional, **named) ** 2

    compared(tmp_path, Squared, additive="rows")
    assert "do not add up" in capsys.readouterr().out


def test_loss_that_is_not_a_number_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> Any:
        model = bert()
        torch.nn.init.constant_(model.classifier.weight, float("nan"))
        return model

    train(optimized(), tmp_path, make=broken, max_steps=1)
    assert "and yet the loss of the first batch is nan" in capsys.readouterr().out


def test_what_the_script_sets_wins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, _ = train(optimized(precision={"dtype": "fp32"}), tmp_path, max_steps=1, optim="adafactor", bf16=True)
    output = capsys.readouterr().out
    assert "optim = 'adafactor' of your arguments wins over the profile's" in output
    assert "bf16 = True of your arguments wins over the profile's" in output
    assert (trainer.args.optim, trainer.args.bf16) == ("adafactor", True)


def test_what_a_plugin_would_replace_stays_as_the_script_sets_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from bitsandbytes.optim import GlobalOptimManager

    trainer, _ = train(optimized(precision={"dtype": "fp32"}), tmp_path, max_steps=1, optim="adamw_8bit")
    output = capsys.readouterr().out
    manager = GlobalOptimManager.get_instance()  # forgets what the Trainer set for its embeddings
    assert (manager.pid2config, manager.index2config, manager.module_weight_config_triple) == ({}, {}, [])
    assert (
        "optim = 'adamw_8bit' of your arguments stays, without plugin 'optimizer': adamw_bnb_8bit: bitsandbytes on a CPU"
        in output
    )
    assert "optim = 'adamw_8bit' of your arguments wins" not in output
    assert type(trainer.optimizer.optimizer).__module__ == "bitsandbytes.optim.adamw"
    assert "optimizer" not in {entry.name for entry in trainer._run.plan.applied()}


def test_strict_refuses_what_would_be_skipped_or_replaced_and_not_what_the_arguments_set(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="group_lengths"):
        train(optimized(strict=True, group_lengths=True), tmp_path)
    with pytest.raises(InputError, match="strict: optim = 'adafactor' of your arguments wins"):
        train(optimized(strict=True), tmp_path, optim="adafactor")
    trainer, _ = train(optimized(strict=True), tmp_path, max_steps=1)
    assert {entry.name for entry in trainer._run.plan.entries if entry.decision == "skip"} == {"schedule"}


@pytest.mark.parametrize(("batch", "most"), [({}, 2), ({"batch": {"train": 4}}, 4), ({"batch": {"train": "auto", "eval": 8}}, 2)])
def test_micro_batch_has_no_more_tokens_than_that_of_the_script_unless_asked_for(
    batch: Any, most: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "max_steps": 2}
    options = {"precision": {"dtype": "fp32"}, "length_batching": {"overhead_tokens": 10_000}, **batch}
    trainer, _ = train(hwopt.optimized(Trainer, "cpu", **options), tmp_path, **sizes)
    for step in trainer._run.steps:
        computed = max(rows * width for rows, width in step.sizes)
        assert 2 * max(step.lengths) * (most > 2) < computed <= most * max(step.lengths)
    assert ("no more tokens than 2 of the longest rows" in capsys.readouterr().out) == (most == 2)


def test_model_init_and_positional_arguments(tmp_path: Path) -> None:
    def loss(cls: Any, folder: Path) -> Any:
        args = arguments(folder, max_steps=1)
        trainer = cls(None, args, partial(padded, classes=True), rows(), model_init=bert)
        trainer.train()
        return trainer.state.log_history[0]["loss"]

    assert loss(optimized(), tmp_path / "ours") == pytest.approx(loss(Trainer, tmp_path / "plain"), rel=CLOSE)


class Passes(Trainer):
    def __init__(self, *positional: Any, scale: float = 1.0, **named: Any) -> None:
        super().__init__(*positional, **named)
        self.scale = scale


def test_rows_without_a_label_do_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The loss of a classifier is a mean over the rows whose label is not -100; some micro-batches have none."""

    def collate(features: list[dict[str, Any]]) -> dict[str, Any]:
        batch = padded(features, classes=True)
        return batch | {"labels": batch["labels"].masked_fill(batch["attention_mask"].sum(1) % 3 > 0, -100)}

    ours = hwopt.optimized(Passes, "cpu", **(SPLIT | {"batch": {"train": 2}}))
    trainer, found = train(partial(ours, scale=2.0), tmp_path / "ours", collate=collate)
    assert trainer.scale == 2
    assert "inactive" not in capsys.readouterr().out
    assert farthest(found, train(Passes, tmp_path / "plain", collate=collate)[1]) < CLOSE


@dataclass
class NeedsPath(TrainingArguments):
    data_path: str = ""

    def __post_init__(self) -> None:
        if not self.data_path:
            raise ValueError("data_path is missing")
        super().__post_init__()


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(rows())


def test_arguments_that_have_no_defaults_and_streams_of_rows_stay_the_script_s(tmp_path: Path) -> None:
    args = arguments(tmp_path, NeedsPath, data_path="x", optim="adafactor")
    assert own_words(args)["optim"] == "adafactor"
    shuffled = IterableDataset.from_generator(rows).shuffle(seed=0, buffer_size=8)  # a worker draws other numbers
    for stream in (Stream(), shuffled):
        assert "may repeat rows of your IterableDataset" in lacks_of(Trainer, args, {"train_dataset": stream})["loader"]


class Substeps(Log):
    def on_substep_end(self, *positional: Any, **objects: Any) -> None:
        pass


def test_iterable_dataset_and_batches_of_other_widths_padded_by_a_token_of_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No tokenizer is given: the token that pads is that of the model's config, which finds the last token of a row by it."""

    def collate(features: list[dict[str, Any]]) -> dict[str, Any]:
        batch = padded(features, classes=True)
        return batch | {"input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 2)}

    def make() -> Any:
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=200, pad_token_id=2, num_labels=3, max_position_embeddings=64, **SIZES)
        return LlamaForSequenceClassification(config)

    def steps(cls: Any, folder: Path) -> Steps:
        data = IterableDataset.from_generator(lambda: iter(rows()))
        return train(cls, folder, make, callbacks=[Substeps()], collate=collate, data=data)[1]

    assert farthest(steps(optimized(), tmp_path / "ours"), steps(Trainer, tmp_path / "plain")) < CLOSE
    said = capsys.readouterr().out
    assert "on_substep_end of Substeps sees no gradients" in said
    assert "data without a length may end with a smaller step" in said
    assert "the last step of an epoch" not in said


class RunsOutOnce(Log):
    """Memory runs out in the second micro-batch of the third step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        calls = count(1)

        def refuse(*_: Any) -> None:
            if next(calls) == 2:
                hook.remove()
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

        if state.global_step == 2:
            hook = objects["model"].register_forward_pre_hook(refuse)


def test_repeated_step_keeps_the_gradients_of_a_stream_that_ended_within_one(tmp_path: Path) -> None:
    data = Dataset.from_list(rows(40)).to_iterable_dataset()
    _, wanted = train(Trainer, tmp_path / "plain", data=data)
    trainer, found = train(optimized(), tmp_path / "ours", data=data, callbacks=[RunsOutOnce()])
    assert trainer._run.backoff.rung
    assert farthest(found, wanted) < CLOSE


def test_encoder_decoder_in_seq2seq_trainer(tmp_path: Path) -> None:
    trainer = compared(tmp_path, Seq2SeqTrainer, make=t5, changes={"kind": Seq2SeqTrainingArguments})
    assert all(len(step.sizes) > 2 for step in trainer._run.steps)


@pytest.mark.parametrize("kind", ["in-batch", "cached", "cross-encoder"])
def test_losses_of_sentence_transformers_stay_whole(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sentence_transformers import CrossEncoder, SentenceTransformer, cross_encoder, sentence_transformer

    pair = kind == "cross-encoder"
    place = cross_encoder if pair else sentence_transformer
    config = bert().config
    config.num_labels = 1
    (BertForSequenceClassification(config) if pair else bert().bert).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    labels = [{"label": number % 2.0} if pair else {} for number in range(64)]
    texts = [{"anchor": f"w{number}", "positive": f"w{number} w{number % 7}"} for number in range(64)]
    data = Dataset.from_list([text | label for text, label in zip(texts, labels, strict=True)])
    name = "CrossEncoderTrainer" if pair else "SentenceTransformerTrainer"

    def steps(make: Any, folder: Path, limit: int | None = None, **changes: Any) -> Steps:
        reset()
        parts = sentence_transformer.modules
        if pair:
            model: Any = CrossEncoder(str(tmp_path / "model"), num_labels=1, device="cpu")
            loss: Any = cross_encoder.losses.BinaryCrossEntropyLoss(model)
        else:
            transformer, pooling = parts.Transformer(str(tmp_path / "model")), parts.Pooling(32)
            model = SentenceTransformer(modules=[transformer, pooling], device="cpu")
            loss = sentence_transformer.losses.MultipleNegativesRankingLoss(model)
            if kind == "cached":
                loss = sentence_transformer.losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=4)
        if limit is not None:
            model.register_forward_pre_hook(lambda _, inputs: memory_of(limit)(None, None, inputs[0]))
        args = arguments(folder, getattr(place, f"{name.removesuffix('Trainer')}TrainingArguments"), **changes)
        cls = make(getattr(place, name))
        cls(model=model, args=args, train_dataset=data, loss=loss, callbacks=[log := Log()]).train()
        return log.steps

    def ours(cls: Any) -> Any:
        return hwopt.optimized(cls, "cpu", **SPLIT)

    assert farthest(steps(ours, tmp_path / "ours"), steps(lambda cls: cls, tmp_path / "plain")) < CLOSE
    output = capsys.readouterr().out
    assert f"a step is not split: {name} computes a loss of its own" in output
    assert "active   sdpa" in output
    assert type(default_arguments(ours(getattr(place, name)), None)).__name__.startswith(name.removesuffix("Trainer"))
    rows_at_once = "mini_batch_size = 4 of CachedMultipleNegativesRankingLoss"
    assert (f"{rows_at_once} stays: your script sets it" in output) == (kind == "cached")
    if kind == "cached":
        with pytest.raises(DoesNotFitError, match=f"Lower {rows_at_once}, or set gradient_checkpointing"):
            steps(ours, tmp_path / "ours", limit=1)  # a step of two batches, whose first one is in the gradients already
        one = partial(steps, gradient_accumulation_steps=1)
        assert farthest(one(ours, tmp_path / "ours", limit=4), one(lambda cls: cls, tmp_path / "plain")) < CLOSE
        assert f"{rows_at_once} ran out of memory. The step is repeated with 2" in capsys.readouterr().out
        with pytest.raises(DoesNotFitError, match="Lower mini_batch_size = 1 of Cached"):
            one(ours, tmp_path / "ours", limit=1)


def test_batch_without_a_label_leaves_the_logged_loss(tmp_path: Path) -> None:
    """A loss that is not a number does not count, as docs/your-script.md says; the Trainer logs an estimate in its place."""
    data = [row | {"label": -100 if number % 16 < 8 else row["label"]} for number, row in enumerate(rows(32))]

    def steps(cls: Any) -> Steps:
        reset()
        own, collator = arguments(tmp_path, max_steps=2), partial(padded, classes=True)
        trainer = cls(bert(), own, train_dataset=data, data_collator=collator, callbacks=[log := Log()])
        trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(data)
        trainer.train()
        return log.steps

    found = steps(optimized())
    assert all(loss > 0.1 for loss, _ in found)
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in steps(Trainer)], rel=CLOSE)


def test_failed_training_says_why_in_its_folder_and_a_second_one_forgets_it(tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            raise ValueError("not now")

    own = arguments(tmp_path, max_steps=1)
    trainer = optimized()(bert(), own, train_dataset=rows(16), data_collator=partial(padded, classes=True), callbacks=[Fails()])
    with pytest.raises(ValueError, match="not now"):
        trainer.train()
    record = read_record(tmp_path)
    assert (record.exit_code, record.message) == (1, "not now")
    trainer.remove_callback(Fails)
    trainer.train()
    assert read_record(tmp_path).exit_code == 0


def test_weights_of_a_loss_of_sentence_transformers_are_trained(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformerTrainer

    assert overridden(SentenceTransformerTrainer, ("get_optimizer_cls_and_kwargs",)) == ""

    class WithLoss(Trainer):
        """As that of sentence-transformers: the optimizer gets the weights of the loss too."""

        __module__ = "sentence_transformers.trainer"

        def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> Any:
            cls, words = super().get_optimizer_cls_and_kwargs(args, model)
            return cls, words | {"optimizer_dict": [{"params": [*model.parameters(), extra], "weight_decay": 0.0}]}

    extra = torch.nn.Parameter(torch.ones(3))
    trainer, _ = train(hwopt.optimized(WithLoss, "cpu", **SPLIT), tmp_path, max_steps=1)
    trained = [each for group in trainer.optimizer.param_groups for each in group["params"]]
    assert any(each is extra for each in trained)


def test_arguments_that_the_script_changes_later_count(tmp_path: Path) -> None:
    own = arguments(tmp_path)
    trainer = optimized()(bert(), own, train_dataset=rows(16), data_collator=partial(padded, classes=True))
    own.learning_rate, own.max_steps = 0.25, 1
    trainer.train()
    assert trainer.state.log_history[0]["learning_rate"] == 0.25
    assert trainer.state.global_step == 1


def test_different_cards_are_planned_as_the_weakest_or_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = described("NVIDIA GeForce RTX 3090", (8, 6), 23.7), described("Tesla T4", (7, 5), 14.56)
    monkeypatch.setattr("hwopt.hosts.script_plan.detect", lambda index, devices: weakest(both[:devices]))
    found = plan_for(bert(), "auto", Script(16, 16, {}, devices=2), {})  # as under torch's DataParallel
    assert found.plan.recipe.accelerator["mixed_precision"] == "fp16"
    assert any(line.startswith("different cards: NVIDIA GeForce RTX 3090 (23.7 GiB") for line in found.lines())

    trainer = optimized()(bert(), arguments(tmp_path), train_dataset=rows(16), data_collator=partial(padded, classes=True))
    trainer._run.plan = replace(trainer._run.plan, world_size=2)
    monkeypatch.setattr("accelerate.utils.gather_object", lambda own: [*own, ("Tesla T4 (14.56 GiB)", {})])
    with pytest.raises(InputError, match=r"rank 1 on Tesla T4 \(14.56 GiB\), and these plugins differ: precision"):
        trainer.train()


def test_probe_that_runs_out_of_memory_leaves_it_to_the_step(tmp_path: Path) -> None:
    """Evaluation keeps whole logits, and may need more memory than a training step."""

    def refuse(module: Any, positional: Any, named: Any) -> None:
        if not torch.is_grad_enabled() and len(named["input_ids"]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    def limited() -> Any:
        (model := llama()).register_forward_pre_hook(refuse, with_kwargs=True)
        return model

    trainer, steps = train(optimized(), tmp_path, limited)
    assert trainer._split.is_split
    assert farthest(steps, train(Trainer, tmp_path, llama)[1]) < CLOSE


def test_what_a_forecast_would_choose_is_as_the_script_does_it() -> None:
    card = described("NVIDIA GeForce RTX 3090", (8, 6), 23.7)
    for spares, asked, kind, reason in (
        (False, {}, "skip", "your script does without it; checkpointing=True switches it on"),
        (False, {"checkpointing": True}, "apply", "all 2 layers: least memory"),
        (True, {}, "apply", "all 2 layers: least memory"),
    ):
        plan = plan_for(llama(), "rtx3090_24gb", Script(8, 8, {}, spares_memory=spares), asked, hardware=card).plan
        entry = next(each for each in plan.entries if each.name == "checkpointing")
        assert (entry.decision, reason in entry.reason) == (kind, True), entry.reason


def test_gpu_of_a_mac_is_told_to_have_the_plan_of_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_for(bert(), "cpu", Script(16, 16, {}), {}).plan
    ScriptRun(plan, torch.device("mps"), tmp_path, with_lines(None))
    assert "this Mac's GPU (MPS) trains with the plan of its CPU" in capsys.readouterr().out


def test_old_package_and_second_plan_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hwopt.session("cpu", bert(), rows=16), pytest.raises(InputError, match="another plan is active in this process"):
        train(optimized(), tmp_path)
    train(optimized(), tmp_path, max_steps=1)
    monkeypatch.setattr("hwopt.hosts.limits.version", lambda name: "1.2")
    with pytest.raises(InputError, match="1.2 is too old: hwopt needs >="):
        optimized()


def test_mistakes_are_refused_by_name(tmp_path: Path) -> None:
    mistakes: dict[str, Any] = {
        "a subclass of transformers.Trainer, got <class 'int'>": lambda: hwopt.optimized(int),
        "has a plan already": lambda: hwopt.optimized(optimized()),
        "additive = 'mean': expected one of": lambda: optimized(additive="mean"),
        "needs model= or model_init=": lambda: optimized()(args=TrainingArguments(str(tmp_path), use_cpu=True)),
        "expected TrainingArguments or a class of TRL, got dict": lambda: optimized()(bert(), {"output_dir": "out"}),
        "no plugin 'length_batchin' .* mean 'length_batching'": lambda: train(optimized(length_batchin=False), tmp_path),
        "expected the options of plugin 'batch' as a dict": lambda: train(optimized(batch=4), tmp_path),
        "plugins.batch.train: ": lambda: train(optimized(batch={"train": "two"}), tmp_path),
        "plugins.precision.dtype: .*torch.bfloat16": lambda: train(optimized(precision={"dtype": torch.bfloat16}), tmp_path),
        "model is an argument of Trainer, not of optimized": lambda: optimized(model=bert()),
        "wrapped in DataParallel": lambda: train(optimized(), tmp_path, lambda: torch.nn.DataParallel(bert())),
        "the model is compiled": lambda: train(optimized(), tmp_path, lambda: (model := bert()).compile() or model),
        "trains float16 weights": lambda: train(optimized(), tmp_path, lambda: bert().half()),
    }
    for message, mistake in mistakes.items():
        with pytest.raises(InputError, match=message):
            mistake()


def test_process_is_as_before_afterwards(tmp_path: Path) -> None:
    def state() -> tuple[Any, ...]:
        sdp = torch.backends.cuda
        return sdp.flash_sdp_enabled(), sdp.math_sdp_enabled(), torch.get_float32_matmul_precision()

    before, methods = state(), dict(vars(Trainer))
    train(optimized(sdpa={"prefer": ["efficient", "math"]}), tmp_path, max_steps=1)
    assert (state(), dict(vars(Trainer))) == (before, methods)
    assert json.loads((tmp_path / "status.json").read_text())["message"] == "done"


class Shrinks(torch.utils.data.Dataset[Any]):
    """Rows that are cut to `length` tokens."""

    length = 60

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = rows(16)[index]
        return row | {"input_ids": row["input_ids"][: self.length]}


class Shortens(Log):
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        objects["train_dataloader"].dataset.length //= 4


def test_dataset_that_a_callback_changes_between_epochs_is_seen_by_workers(tmp_path: Path) -> None:
    def steps(cls: Any, folder: Path) -> Steps:
        return train(cls, folder, data=Shrinks(), callbacks=[Shortens()], max_steps=-1, num_train_epochs=2)[1]

    found = steps(optimized(dataloader={"num_workers": 1}), tmp_path / "ours")
    assert farthest(found, steps(Trainer, tmp_path / "plain")) < CLOSE
