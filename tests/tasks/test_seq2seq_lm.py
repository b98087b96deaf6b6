"""Sequence-to-sequence, from prompts and completions to predictions, with T5 and BART."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from cases import DAILY, named
from rouge_score.rouge_scorer import RougeScorer
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, MBartConfig

from hwopt import api
from hwopt.cli import run_command
from hwopt.config.job import Job
from hwopt.data.batches.collate import PairCollate, StepDataset, cut_in_order
from hwopt.data.batches.step_batch import Step, Widths
from hwopt.data.stores.chunks import Chunks
from hwopt.data.stores.token_store import PairStore
from hwopt.errors import DataError, InputError
from hwopt.memory.forecast.lengths import lengths_of
from hwopt.memory.forecast.measured import cpu_memory, measure
from hwopt.memory.forecast.planner import plan_memory
from hwopt.memory.shapes import Shape
from hwopt.memory.trace.dry_run import generate_last_token
from hwopt.planning.plan import Plan
from hwopt.tasks import seq2seq_lm
from hwopt.tasks.recognition import recognise
from hwopt.tasks.seq2seq_lm import encode_targets, start_token
from hwopt.testing import TINY_T5, plan_for, tiny_job, tiny_profile, train_tiny

KIND = "seq2seq-lm"
SIZES = {"layers": 2, "ffn_dim": 64, "attention_heads": 2}
TINY_BART = {
    "model_type": "bart",
    "vocab_size": 300,
    "d_model": 32,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    **{f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in SIZES.items()},
}
MODELS = named({"t5": TINY_T5, "bart": TINY_BART}, ("bart",), DAILY)


def planned(folder: Path, config: Any = None, data: Any = None, plugins: Any = None, task: Any = None, **training: Any) -> Plan:
    job = tiny_job(folder / "data", KIND, config=config, data=data, **training)
    tables = {**job.document.data, "task": {"kind": KIND, **(task or {})}}
    return plan_for(tiny_profile(**(plugins or {})), type(job)(Job.model_validate(tables), job.document))


def write_pairs(path: Path, number: int, seed: int = 0) -> Path:
    """`path`, with sentences of colours, and their first word as the summary."""
    words = random.Random(seed)
    with path.open("w") as file:
        for _ in range(number):
            sentence = words.choices(("red", "green", "blue"), k=words.randint(2, 6))
            file.write(json.dumps({"document": " ".join(sentence), "summary": sentence[0]}) + "\n")
    return path


def test_rouge_of_an_adapter_over_half_weights(tmp_path: Path) -> None:
    """The encoder is called by generate(), outside the forward that computes under autocast."""
    plugins = {"adapter": {"kind": "lora", "always": True}, "precision": {"dtype": "bf16"}}
    train_tiny(planned(tmp_path, TINY_BART, plugins=plugins, task={"rouge": True}, max_steps=2), tmp_path)
    assert "rougeL" in json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1].replace("eval_", ""))


def test_pairs_to_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands that a user types."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HWOPT_CACHE", str(tmp_path / "cache"))
    write_pairs(Path("train.jsonl"), 80)
    write_pairs(Path("dev.jsonl"), 12, seed=1)
    assert run_command(["init", "train.jsonl", "--yes"]) == 0
    written = Path("job.toml").read_text()
    assert all(line in written for line in (f'kind = "{KIND}"', 'prompt = "document"', 'completion = "summary"'))
    tiny = "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in TINY_T5.items()) + " }"
    lines = [f"config = {tiny}" if line.startswith("config =") else line for line in written.splitlines()]
    Path("job.toml").write_text("\n".join(lines))
    assert run_command(["plan", "--sample", "1", "--profile", "cpu"]) == 0
    assert "[[" in capsys.readouterr().out
    settings = {"training.num_train_epochs": 1, "training.learning_rate": 1e-2, "data.max_target_length": 8, "task.rouge": "true"}
    settings["plugins.precision.dtype"] = "fp32"  # in bf16 a tie between two tokens depends on the batch
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    assert run_command(["run", "--profile", "cpu", "--name", "first", *options]) == 0
    assert "samples of an encoder-decoder have two lengths" in capsys.readouterr().out
    assert run_command(["evaluate", "runs/first", "dev.jsonl", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["perplexity"] == pytest.approx(np.exp(found["loss"]), rel=1e-4)
    assert run_command(["predict", "runs/first", "dev.jsonl", "-o", "out.jsonl", "--max-new-tokens", "8"]) == 0
    rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    scorer = RougeScorer(["rougeL"])
    scores = [scorer.score(row["summary"], row["generated_text"])["rougeL"].fmeasure for row in rows]
    assert found["rougeL"] == pytest.approx(np.mean(scores), abs=1e-3)
    card = Path("runs/first/final/README.md").read_text()
    assert "AutoModelForSeq2SeqLM" in card
    assert "pipeline(" not in card


@pytest.mark.parametrize("config", MODELS)
def test_loss_is_that_of_the_model_and_ignores_padding(config: dict[str, Any], tmp_path: Path) -> None:
    """The loss of padded micro-batches, summed, equals the model's own loss of each sample, with the same shifted input."""
    plan = planned(tmp_path, config)
    train_tiny(plan, tmp_path)
    report = api.evaluate(tmp_path / "run", plan.job.data.eval or "")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run" / "final").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "final")
    summed = tokens = 0.0
    for line in Path(str(plan.job.data.eval)).read_text().splitlines():
        row = json.loads(line)
        inputs = tokenizer(row["text"], truncation=True, max_length=32, return_tensors="pt")["input_ids"]
        labels = torch.tensor([[*tokenizer(text_target=row["label"])["input_ids"], tokenizer.eos_token_id][:12]])
        with torch.no_grad():
            summed += float(model(input_ids=inputs, labels=labels).loss) * labels.numel()
        tokens += labels.numel()
    assert report.metrics["loss"] == pytest.approx(summed / tokens, rel=1e-5)


def test_inputs_and_targets_are_padded_apart_and_trimmed_by_a_finer_rung(tmp_path: Path) -> None:
    arrays = {
        "input_ids": np.arange(10, 20, dtype=np.int32),
        "offsets": np.array([0, 5, 7, 10]),
        "target_ids": np.arange(30, 38, dtype=np.int32),
        "target_offsets": np.array([0, 1, 5, 8]),
        "counts": np.array([1, 4, 3], np.int32),
    }
    store = PairStore.cached(tmp_path / "store", lambda: (arrays, {"start": 2, "max_target_length": 5}))
    assert store.lengths.tolist() == [5, 4, 3]  # the second target has 4 of 5 tokens, the longest input 5
    dataset = StepDataset(store, PairCollate(cut_in_order, 3, 0, widths=Widths((), 2)))
    batch = dataset[Step(0, 0, (0, 1, 2), 8)]
    assert batch.tokens == 18
    ((whole, last),) = batch.micro_batches()
    assert last
    assert whole.inputs["input_ids"].shape == (3, 6)
    assert whole.targets.tolist() == [[30, -100, -100, -100], [31, 32, 33, 34], [35, 36, 37, -100]]
    assert whole.inputs["decoder_input_ids"].tolist() == [[2, 0, 0, 0], [2, 31, 32, 33], [2, 35, 36, 0]]
    assert whole.inputs["attention_mask"].sum(1).tolist() == [5, 2, 3]
    (first, _), (second, _) = batch.micro_batches(1)
    assert first.inputs["input_ids"].shape == (2, 6)
    assert second.inputs["input_ids"].shape == (1, 4)
    assert second.targets.tolist() == [[35, 36, 37, -100]]


@pytest.mark.filterwarnings("ignore")
def test_memory_forecast_is_that_of_a_real_step(tmp_path: Path) -> None:
    plan = planned(tmp_path, TINY_T5 | {"vocab_size": 2_000}, plugins={"batch": {"train": 8, "gradient_accumulation_steps": 1}})
    lengths = lengths_of(plan, tmp_path / "cache")
    memory = plan_memory(plan, tmp_path / "cache", lengths)
    assert memory.tier == "traced", memory.note
    assert lengths.target < plan.job.data.max_target_length
    real = measure(plan, Shape(memory.rows, memory.width), lengths.head).train
    assert memory.peak_gib * 2**30 == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize("config", MODELS)
def test_forecast_of_generated_texts_has_the_memory_of_generate(config: dict[str, Any]) -> None:
    made = AutoConfig.for_model(**config, decoder_start_token_id=0, pad_token_id=0)
    model: Any = AutoModelForSeq2SeqLM.from_config(made).eval()
    ones = torch.ones(16, 8, dtype=torch.long)
    inputs = {"input_ids": ones, "attention_mask": ones}

    def peak(work: Callable[[], object]) -> int:
        def measured(start: Callable[[], None]) -> None:
            start()
            work()

        with torch.no_grad():
            return cpu_memory(measured)[0][-1]

    real = peak(lambda: model.generate(**inputs, max_new_tokens=48, min_new_tokens=48, do_sample=False))
    assert peak(lambda: generate_last_token(model, inputs | {"decoder_input_ids": ones}, 48)) == pytest.approx(real, rel=0.1)


def test_plugins_that_do_not_apply_say_so(tmp_path: Path) -> None:
    entries = {
        entry.name: entry for entry in planned(tmp_path, plugins={"length_batching": {}, "pack": {}, "fused_loss": {}}).entries
    }
    assert {entry.decision for name, entry in entries.items() if name != "batch"} == {"skip"}
    assert (
        entries["length_batching"].reason
        == "samples of an encoder-decoder have two lengths; group_lengths, of hwopt's loop, groups by both"
    )
    assert entries["fused_loss"].reason == "needs a decoder without an encoder (task.kind = 'causal-lm'), found seq2seq-lm"
    assert "does not accept position ids" in entries["pack"].reason


def test_longer_texts_are_truncated_with_a_note(tmp_path: Path) -> None:
    recorder = train_tiny(planned(tmp_path, data={"max_length": 8, "max_target_length": 2}), tmp_path)
    assert any("targets to 2 tokens (data.max_target_length)" in note for note in recorder.run.prepared.notes)
    assert max(recorder.run.prepared.train.row(index)["decoder_labels"].size for index in range(40)) == 2


def test_job_that_the_task_cannot_serve_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"seq2seq-lm needs data\.prompt and data\.completion"):
        planned(tmp_path, data={"prompt": None, "completion": None})
    with pytest.raises(InputError, match=r"training\.metric_for_best_model: eval_rougeL needs task\.rouge = true"):
        planned(tmp_path, metric_for_best_model="eval_rougeL")
    with pytest.raises(InputError, match="transformers has no seq2seq-lm head for 'bert'"):
        planned(tmp_path, {"model_type": "bert"})
    with pytest.raises(InputError, match="has no decoder_start_token_id"):
        start_token(MBartConfig())
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"text": "red", "label": ""}\n')
    with pytest.raises(DataError, match="'label' is empty in every row"):
        train_tiny(planned(tmp_path, data={"train": str(empty)}), tmp_path)


def test_model_that_shifts_its_target_in_another_way_is_refused(tmp_path: Path) -> None:
    """mBART moves the language at the end of the target to its start."""
    config = TINY_BART | {"model_type": "mbart"}
    with pytest.raises(InputError, match="makes the decoder's input in a way of its own"):
        train_tiny(planned(tmp_path, config), tmp_path)


def test_summaries_and_translations_are_recognised(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "train.jsonl", 5)
    assert recognise(str(path)).keys == {"prompt": "document", "completion": "summary"}
    (tmp_path / "chat.csv").write_text("prompt,response\nhello,hi there\nbye,see you\n")
    assert recognise(str(tmp_path / "chat.csv")).kind == "causal-lm"
    assert recognise(str(tmp_path / "chat.csv"), KIND).keys == {"prompt": "prompt", "completion": "response"}


def test_targets_are_continued_from_what_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Letters:
        """A letter is a token; 1 ends a text, and "!" stops the process once."""

        eos_token_id, all_special_ids = 1, (1,)
        seen: ClassVar[list[str]] = []

        def __call__(self, text_target: list[str], **_: Any) -> dict[str, list[list[int]]]:
            self.seen.extend(text_target)
            if "!" in text_target and self.seen.count("!") == 1:
                raise KeyboardInterrupt
            return {"input_ids": [[*map(ord, text), 1] for text in text_target]}

    monkeypatch.setattr(seq2seq_lm, "CHUNK", 2)
    monkeypatch.setattr("hwopt.data.stores.chunks.CHUNK_BYTES", 0)
    texts, made = ["abcd", "", "e", "f", "!", "g"], Letters()
    with pytest.raises(KeyboardInterrupt):
        encode_targets(made, texts, 3, Chunks(tmp_path))
    encode_targets(made, texts, 3, chunks := Chunks(tmp_path))
    assert made.seen == [*texts, "!", "g"]
    assert chunks.array("lengths", np.int64).tolist() == [5, 0, 2, 2, 2, 2]
    assert chunks.array("ids", np.int32).tolist() == [97, 98, 1, 101, 1, 102, 1, 33, 1, 103, 1]
