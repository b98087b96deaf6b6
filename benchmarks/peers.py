"""The same fine-tuning by hwopt and by its peers, side by side: real tokens a second, and what the model learned.

    python benchmarks/peers.py MODEL TRAIN EVAL --text premise --text hypothesis [--rows 320] [--rounds 2] [--bf16]

MODEL is a Hub name or folder; TRAIN and EVAL are csv, tsv or jsonl files with a column `label`. All train the same rows once, in
steps of 16, with AdamW, clipping, a linear schedule and the same seed, on the GPU if there is one. A round trains with each, in
turn. The table has the median of the rounds, relative to `Trainer`, with minimum and maximum; the accuracy is that of the last
round. Fabric is left out if lightning-fabric is not installed. Loading and tokenizing do not count.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, Trainer, TrainingArguments

import hwopt
from hwopt.api import Target
from hwopt.data.sources.tables import read_rows, text_columns

STEP, RATE = 16, 2e-5


@dataclass
class Work:
    """What every peer trains."""

    folder: Path
    tokenizer: Any
    train: Dataset
    held_out: Dataset
    labels: list[str]
    text: list[str]
    """The columns of the texts."""
    bf16: bool

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def dtype(self) -> str:
        return "bf16" if self.bf16 else "fp32"

    @property
    def steps(self) -> int:
        return -(-len(self.train) // STEP)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.train["input_ids"]))

    def model(self) -> Any:
        torch.manual_seed(0)  # of the new head
        return AutoModelForSequenceClassification.from_pretrained(self.folder / "model", num_labels=len(self.labels))

    def loader(self) -> DataLoader:
        shuffled = torch.Generator().manual_seed(0)
        collate = DataCollatorWithPadding(self.tokenizer)
        return DataLoader(self.train, STEP, shuffle=True, generator=shuffled, collate_fn=collate)

    def arguments(self, **more: Any) -> TrainingArguments:
        return TrainingArguments(
            str(self.folder / "trainer"), per_device_train_batch_size=STEP, num_train_epochs=1, learning_rate=RATE, report_to=[],
            save_strategy="no", disable_tqdm=True, use_cpu=self.device == "cpu", bf16=self.bf16, **more,
        )  # fmt: skip


Trained = tuple[float, Any]
"""Seconds of the training, and the model."""


def bare_loop(
    work: Work, model: Any, prepare: Callable[..., Any], backward: Callable[[Any], None], clip: Callable[..., Any]
) -> Trained:
    """A loop as in tutorials. `prepare` takes and returns (model, optimizer, loader)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    model, optimizer, loader = prepare(model, optimizer, work.loader())
    schedule = torch.optim.lr_scheduler.LambdaLR(getattr(optimizer, "optimizer", optimizer), lambda step: 1 - step / work.steps)
    model.train()
    began = time.perf_counter()
    for batch in loader:
        with torch.autocast(work.device, torch.bfloat16, enabled=work.bf16):
            loss = model(**{key: value.to(work.device) for key, value in batch.items()}).loss
        backward(loss)
        clip(model, optimizer)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if work.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, model


def pytorch(work: Work) -> Trained:
    return bare_loop(
        work,
        work.model().to(work.device),
        lambda *parts: parts,
        lambda loss: loss.backward(),
        lambda model, _: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    )


def accelerate(work: Work) -> Trained:
    own = Accelerator(cpu=work.device == "cpu")
    return bare_loop(work, work.model(), own.prepare, own.backward, lambda model, _: own.clip_grad_norm_(model.parameters(), 1.0))


def fabric(work: Work) -> Trained:
    from lightning_fabric import Fabric

    own = Fabric(accelerator=work.device, devices=1)

    def prepare(model: Any, optimizer: Any, loader: Any) -> Any:
        return *own.setup(model, optimizer), own.setup_dataloaders(loader)

    return bare_loop(
        work, work.model(), prepare, own.backward, lambda model, optimizer: own.clip_gradients(model, optimizer, max_norm=1.0)
    )


def trainer(work: Work, cls: Any = Trainer, **more: Any) -> Trained:
    own = cls(
        model=work.model(), args=work.arguments(**more), train_dataset=work.train, processing_class=work.tokenizer,
        data_collator=DataCollatorWithPadding(work.tokenizer),
    )  # fmt: skip
    return own.train().metrics["train_runtime"], own.model


def grouped(work: Work) -> Trained:
    return trainer(work, train_sampling_strategy="group_by_length")


def in_trainer(work: Work) -> Trained:
    return trainer(work, hwopt.optimized(Trainer, profile_of(work), precision={"dtype": work.dtype}))


def profile_of(work: Work) -> str:
    return "auto" if work.device == "cuda" else "cpu"


def alone(work: Work, *plugins: str) -> Trained:
    """`hwopt run`: the same rows, from a file."""
    given = {
        "model.name": work.folder / "model", "data.train": work.folder / "train.jsonl", "task.kind": "text-classification",
        "training.num_train_epochs": 1, "training.learning_rate": RATE, "training.warmup_steps": 0,
        "plugins.batch.effective": STEP, "data.text": json.dumps(work.text), "data.max_length": 256,
        "plugins.precision.dtype": work.dtype,
    }  # fmt: skip
    assignments = [f"{key}={value}" for key, value in given.items()]
    with tempfile.TemporaryDirectory() as folder:
        target = Target(Path(folder), "run")
        summary = hwopt.train(profile=profile_of(work), assignments=[*assignments, *plugins], target=target)
        return summary["train_runtime"], AutoModelForSequenceClassification.from_pretrained(f"{folder}/run/final")


def alone_grouped(work: Work) -> Trained:
    return alone(work, "plugins.group_lengths.enabled=true")


PEERS: dict[str, Callable[[Work], Trained]] = {
    "PyTorch": pytorch,
    "Accelerate": accelerate,
    **({"Fabric": fabric} if importlib.util.find_spec("lightning_fabric") else {}),
    "Trainer": trainer,
    "Trainer, group_by_length": grouped,
    "Trainer with hwopt": in_trainer,
    "hwopt": alone,
    "hwopt, group_lengths": alone_grouped,
}


@torch.no_grad()
def accuracy(work: Work, model: Any) -> float:
    model = model.to(work.device).eval()
    collate, right = DataCollatorWithPadding(work.tokenizer), 0
    names = [model.config.id2label[number] for number in range(len(work.labels))]
    own = {name: names.index(name) if name in names else number for number, name in enumerate(work.labels)}
    for batch in DataLoader(work.held_out, 64, collate_fn=collate):
        expected = torch.tensor([own[work.labels[label]] for label in batch.pop("labels").tolist()])
        logits = model(**{key: value.to(work.device) for key, value in batch.items()}).logits
        right += int((logits.argmax(-1).cpu() == expected).sum())
    return right / len(work.held_out)


def work_of(options: argparse.Namespace, folder: Path) -> Work:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    AutoModelForSequenceClassification.from_pretrained(options.model).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    parts, labels = [], []
    for file, number in ((options.train, options.rows), (options.eval, None)):
        rows = read_rows(file)
        texts = [column[:number] for column in text_columns(rows, options.text)]
        own = rows.table["label"].to_pylist()[:number]
        labels = labels or sorted({str(label) for label in own})
        encoded = tokenizer(*texts, truncation=True, max_length=256)
        parts.append(Dataset.from_dict({**encoded, "labels": [labels.index(str(label)) for label in own]}))
        if number is not None:
            columns = [*options.text, "label"]
            lines = [json.dumps(dict(zip(columns, map(str, row), strict=True))) for row in zip(*texts, own, strict=True)]
            (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Work(folder, tokenizer, *parts, labels, options.text, options.bf16)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "train", "eval"):
        arguments.add_argument(name)
    arguments.add_argument("--text", action="append", required=True)
    arguments.add_argument("--rows", type=int, default=320)
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--bf16", action="store_true")
    options = arguments.parse_args()
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        work = work_of(options, Path(folder))
        seconds: dict[str, list[float]] = {name: [] for name in PEERS}
        quality: dict[str, float] = {}
        for turn in range(options.rounds):
            names = list(PEERS)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                AcceleratorState._reset_state(reset_partial_state=True)
                PartialState._reset_state()
                took, model = PEERS[name](work)
                seconds[name].append(took)
                quality[name] = accuracy(work, model)
                print(f"{name}: {took:.1f} s", file=sys.stderr, flush=True)
        table = csv.writer(sys.stdout, delimiter="|", lineterminator="|\n")
        for name, found in seconds.items():
            ratios = [own / each for own, each in zip(seconds["Trainer"], found, strict=True)]
            middle, least, most = (f(ratios) for f in (statistics.median, min, max))
            speed = work.tokens / statistics.median(found)
            table.writerow(("", name, f"{speed:,.0f}", f"{middle:.2f} ({least:.2f} to {most:.2f})", f"{quality[name]:.3f}"))
        print(f"{len(work.train)} rows, {work.tokens:,} real tokens, {work.device}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
