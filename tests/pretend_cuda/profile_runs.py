"""Run a shipped profile on its pretend card, and count what its steps do, beside a bare PyTorch loop and the HF Trainer.

    python tests/pretend_cuda t4 python -m pretend_cuda.profile_runs t4_16gb own      # prints JSON; or others

All loops train the same model with the same optimizer, precision, accumulation and clipping.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from hwopt import api
from hwopt.hardware.device import GIB
from hwopt.memory import planner
from hwopt.memory.lengths import lengths_of
from hwopt.planning.plan import Plan
from hwopt.saving.async_writer import AsyncWriter
from hwopt.testing import WORDS, Recorder
from hwopt.training.build import build, reset_accelerate
from hwopt.training.loop import Loop
from hwopt.training.run import Run
from pretend_cuda.cards import CARDS
from pretend_cuda.counters import Counts, report
from pretend_cuda.zero_weights import large_weights_uninitialized

STEPS, WARM_UP = 20, 5
"""Steps of a run; the first WARM_UP are not counted."""

BERT_BASE = {"model_type": "bert", "vocab_size": 30522}
GEMMA = {  # Gemma 3 1B with 8 of its 26 layers and a smaller vocabulary
    "model_type": "gemma3_text",
    "vocab_size": 32_000,
    "hidden_size": 1152,
    "num_hidden_layers": 8,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 1024,
}
LLAMA = {  # TinyLlama-1.1B with 6 of its 22 layers: with ZeRO the optimizer state is in host memory
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "num_hidden_layers": 6,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True)
class Case:
    """What a profile trains, and on which card."""

    card: str
    model_name: str = "BERT-base"
    config: dict[str, Any] = field(default_factory=lambda: BERT_BASE)
    kind: str = "text-classification"
    max_length: int = 192
    changes: tuple[str, ...] = ()
    """Further arguments of `--set`."""
    same_as: str = ""
    """The profile whose bare loop and Trainer are the same: equal model, sizes, optimizer and precision."""


def decoder(card: str, model_name: str, config: dict[str, Any], max_length: int, *changes: str) -> Case:
    return Case(card, model_name, config, "causal-lm", max_length, changes)


DORA = "plugins.adapter.always=true"
"""The shortened model would fit without its adapter."""


CASES = {
    "rtx3070_8gb": Case("rtx3070"),
    "rtx3070_8gb_batch16": Case("rtx3070"),
    "rtx3070_8gb_batch32": Case("rtx3070"),
    "rtx3070_8gb_batch48": Case("rtx3070"),
    "rtx3070_8gb_batch48_before": Case("rtx3070"),
    "rtx3070_8gb_batch96": Case("rtx3070"),
    "rtx3070_8gb_before": Case("rtx3070"),
    "rtx3070_8gb_qlora": decoder("rtx3070", "TinyLlama, 6 layers", LLAMA, 512),
    "rtx3070_8gb_zero": decoder("rtx3070", "TinyLlama, 6 layers", LLAMA, 512),
    "rtx3060_12gb": Case("rtx3060"),
    "rtx4060_8gb": Case("rtx4060", same_as="rtx3060_12gb"),
    "t4_16gb": Case("t4"),
    "t4_16gb_before": Case("t4"),
    "t4_16gb_zero": decoder("t4", "TinyLlama, 6 layers", LLAMA, 512),
    "rtx3090_24gb": decoder("rtx3090", "Gemma 3, 8 layers", GEMMA, 256, DORA),
    "rtx3090_24gb_before": decoder("rtx3090", "Gemma 3, 8 layers", GEMMA, 256),
    "rtx3090_24gb_experimental": decoder("rtx3090", "Gemma 3, 8 layers", GEMMA, 256, DORA),
    "rtx3090_24gb_max_perf": decoder("rtx3090", "Gemma 3, 8 layers", GEMMA, 256, DORA),
    "rtx4090_24gb": Case("rtx4090", same_as="h100_80gb"),
    "rtx5090_32gb": Case("rtx5090", same_as="h100_80gb"),
    "a10_24gb": Case("a10", same_as="h100_80gb"),
    "l4_24gb": Case("l4", same_as="h100_80gb"),
    "a100_40gb": Case("a100_40", same_as="h100_80gb"),
    "a100_80gb": Case("a100", same_as="h100_80gb"),
    "h100_80gb": Case("h100"),
    "h200_141gb": Case("h200", same_as="h100_80gb"),
}
PLAIN = {
    "precision": "plugins.precision.level=O1",
    "length_batching": "plugins.length_batching.enabled=false",
    "zero": "plugins.zero.enabled=false",
}
"""Plugin -> the change with which a bare loop trains: autocast, whole micro-batches, one device without DeepSpeed."""
NO_CARD = {
    "cpu": "trains on the CPU",
    "v100_16gb": "the CUDA 13 build of torch has no kernels for Volta",
    "v100_32gb": "the CUDA 13 build of torch has no kernels for Volta",
}
"""Shipped profile -> why it does not run on a pretend card."""


@dataclass(frozen=True)
class PerStep:
    """Averages of one optimizer step."""

    launches: float
    waits: float
    products: float
    """Matrix products, of cuBLAS."""

    @classmethod
    def of(cls, steps: Callable[[int], None]) -> PerStep:
        """The averages over STEPS - WARM_UP steps, after WARM_UP uncounted ones; `steps(n)` does n steps."""
        steps(WARM_UP)
        before = report()["counters"]
        steps(STEPS - WARM_UP)
        return cls.between(before, report()["counters"])

    @classmethod
    def between(cls, before: dict[str, int], after: dict[str, int]) -> PerStep:
        """The averages over the counted steps, from the counters before and after them."""
        counts = Counts(after)
        counts.subtract(before)
        counted = STEPS - WARM_UP
        return cls(*(round(number / counted, 1) for number in (counts["launch"], counts.waits, counts["gemm"])))


def write_data(path: Path, samples: int, max_length: int) -> None:
    """JSONL with two classes. Every third text has more than `max_length` tokens, the others an eighth of that on average."""
    random_words = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for number in range(samples):
            length = 2 * max_length if number % 3 == 0 else max(3, round(random_words.lognormvariate(0, 0.6) * max_length / 8))
            text = " ".join(random_words.choices(WORDS, k=length))
            file.write(json.dumps({"text": text, "label": str(number % 2)}) + "\n")


def assignments(case: Case, folder: Path, *changes: str) -> list[str]:
    """The job of `case` as arguments of `--set`, with `changes`."""
    table = ", ".join(f"{key} = {json.dumps(value)}" for key, value in case.config.items())
    return [
        f"model.config={{ {table} }}",
        f"data.train={folder / 'train.jsonl'}",
        f"data.eval={folder / 'eval.jsonl'}",
        f"data.max_length={case.max_length}",
        f"task.kind={case.kind}",
        f"training.max_steps={STEPS}",
        "training.logging_steps=1000",
        *case.changes,
        *changes,
    ]


@contextmanager
def data_of(case: Case) -> Iterator[Path]:
    """A temporary folder with the data of `case`."""
    with tempfile.TemporaryDirectory() as name:
        write_data(Path(name) / "train.jsonl", 3600, case.max_length)  # 20 whole steps of up to 180 rows
        write_data(Path(name) / "eval.jsonl", 540, case.max_length)
        yield Path(name)


def hwopt_run(plan: Plan, folder: Path) -> dict[str, Any]:
    """Train STEPS steps, evaluate, and return the counts, the evidence, and the peaks of the longest samples in GiB."""
    heard = Recorder()
    (folder / "run").mkdir(parents=True)
    with build(plan, folder / "run", folder / "cache", listener=heard) as run:
        writer = AsyncWriter(run)
        loop = Loop(run, writer)
        loop.restore()
        run.model.train()
        batches = loop.batches()

        def steps(number: int) -> None:
            for _ in range(number):
                loop.step(next(batches))

        per_step = PerStep.of(steps)
        longest = run.train_loader.dataset[run.train_loader.sampler.longest()].to(run.device)
        torch.cuda.reset_peak_memory_stats()
        loop.update(longest)
        trained = torch.cuda.max_memory_allocated() / GIB
        torch.cuda.reset_peak_memory_stats()
        loop.evaluation.preflight()
        evaluated = torch.cuda.max_memory_allocated() / GIB
        writer.close()
        found = {entry.name: (observed.status, observed.seen) for entry, observed in heard.found}
        return {
            "steps": run.step,
            "own": vars(per_step),
            "evidence": found,
            "warnings": heard.warnings,
            "allocated_gib": trained,
            "eval_allocated_gib": evaluated,
            "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        }


def samples_of(run: Run) -> list[dict[str, Any]]:
    """The tokenised training samples of `run` as dictionaries, as the Trainer takes them."""
    train = run.prepared.train
    rows = (train.row(index) for index in range(len(train)))
    per_token = run.task.kind == "causal-lm"  # the model shifts the labels
    return [{"input_ids": row["input_ids"], "labels": row["input_ids"] if per_token else row["labels"]} for row in rows]


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The batch of `samples`, padded to the longest one."""
    tokens = [torch.as_tensor(sample["input_ids"]).long() for sample in samples]
    labels = [torch.as_tensor(sample["labels"]).long() for sample in samples]
    return {
        "input_ids": pad_sequence(tokens, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100) if labels[0].dim() else torch.stack(labels),
    }


def make_optimizer(name: str, parameters: list[Any]) -> Any:
    """The optimizer `name` of a profile, without hwopt."""
    if name == "adamw_bnb_8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(parameters, lr=1e-4)
    return torch.optim.AdamW(parameters, lr=1e-4, fused=name == "adamw_torch_fused" or None)


def bare_loop(run: Run, model: Any, optimizer_name: str, dtype: torch.dtype | None) -> PerStep:
    """The counts of a PyTorch loop with autocast, accumulation, clipping and a LambdaLR, as one writes it by hand."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(optimizer_name, parameters)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    accumulation = run.batch.accumulation(1)
    loader: Any = DataLoader(samples_of(run), run.batch.train, shuffle=True, drop_last=True, collate_fn=padded, pin_memory=True)
    batches = (batch for _ in range(1000) for batch in loader)
    model.train()

    def steps(number: int) -> None:
        for _ in range(number):
            for _ in range(accumulation):
                batch = {key: value.to(run.device, non_blocking=True) for key, value in next(batches).items()}
                with torch.autocast("cuda", dtype, enabled=dtype is not None):
                    loss = model(**batch).loss / accumulation
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)

    found = PerStep.of(steps)
    optimizer.zero_grad(set_to_none=True)
    return found


def hugging_face_loop(run: Run, model: Any, optimizer_name: str, dtype: torch.dtype | None, folder: Path) -> PerStep:
    """The counts of the HF Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Counter(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in (WARM_UP, STEPS):
                reports.append(report()["counters"])

    reports: list[dict[str, int]] = []
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=run.batch.train,
        gradient_accumulation_steps=run.batch.accumulation(1),
        optim=optimizer_name,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, data_collator=padded, train_dataset=samples_of(run), callbacks=[Counter()])
    trainer.train()
    return PerStep.between(*reports)


def other_loops(plan: Plan, folder: Path) -> dict[str, Any]:
    """The counts of the bare loop and of the HF Trainer, with the model of `plan`."""
    options = {entry.name: entry.options for entry in plan.entries if entry.decision != "skip"}
    name = getattr(options.get("optimizer"), "name", "adamw_torch")
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(getattr(options.get("precision"), "dtype", "fp32"))
    with build(plan, folder / "run", folder / "cache") as run:
        model = run.accelerator.unwrap_model(run.model, keep_fp32_wrapper=False)
        model._is_accelerate_prepared = False  # else the Trainer would train without autocast
        run.optimizer = run.scheduler = None
        found = {"bare": vars(bare_loop(run, model, name, dtype))}
        reset_accelerate(run.accelerator)
        return found | {"trainer": vars(hugging_face_loop(run, model, name, dtype, folder))}


def memory_forecast(plan: Plan, cache: Path) -> dict[str, Any]:
    """What the planner predicts for the longest samples."""
    memory = planner.plan_memory(plan, cache, lengths_of(plan, cache))
    return {"tier": memory.tier, "peak_gib": memory.peak_gib, "eval_gib": memory.eval_peak_gib, "fits": memory.fits}


def own_loop(resolved: Callable[..., Plan], folder: Path) -> dict[str, Any]:
    """The decisions, the forecast, and what `hwopt_run` finds; "uncut" has the counts without length-aware micro-batches."""
    plan = resolved()
    found: dict[str, Any] = {"decisions": {entry.name: (entry.decision, entry.reason) for entry in plan.entries}}
    found["forecast"] = memory_forecast(plan, folder / "cache")  # before the run: it forks
    found |= hwopt_run(plan, folder / "own")
    if "length_batching" in found["decisions"]:
        found["uncut"] = hwopt_run(resolved(PLAIN["length_batching"]), folder / "uncut")["own"]
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    name, which = sys.argv[1:]
    case = CASES[name]
    with data_of(case) as folder, large_weights_uninitialized():

        def resolved(*changes: str) -> Plan:
            return api.resolve(name, assignments=assignments(case, folder, *changes), cache=folder / "cache")

        if which == "own":
            print(json.dumps(own_loop(resolved, folder)))
        else:
            written = {entry.name for entry in resolved().entries}
            print(json.dumps(other_loops(resolved(*(PLAIN[plugin] for plugin in PLAIN if plugin in written)), folder)))


def measure(name: str) -> dict[str, Any]:
    """What the loops of profile `name` do, each in a process on a pretend card. Raises RuntimeError if one of them fails."""
    case = CASES[name]
    found = {"profile": name, "card": case.card, "model": case.model_name}
    return found | run_on_card(name, "own", CARDS[case.card]) | measure_others(case.same_as or name)


@cache
def measure_others(name: str) -> dict[str, Any]:
    """The counts of the bare loop and of the HF Trainer for profile `name`.

    They train without what saves memory, so their card has more of it.
    """
    card, _, _ = CARDS[CASES[name].card].rpartition(":")
    return run_on_card(name, "others", f"{card}:200000")


def run_on_card(name: str, which: str, cards: str) -> dict[str, Any]:
    """The result of `main` in a process on the pretend `cards`."""
    on_card = [sys.executable, str(Path(__file__).parent), cards]
    command = [*on_card, sys.executable, "-m", "pretend_cuda.profile_runs", name, which]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"profile {name}, {which}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
