"""Steps a second of hwopt beside its peers and beside hand-written loops on one GPU, and its forecasts beside what was measured.

    python benchmarks/gpu_speed.py [bert|bert16|lora|qlora ...] [--only REGEX] [--json FILE] [--steps N] [--small]

Models have random weights, texts are drawn from a log-normal distribution of lengths: neither changes the speed. Each variant
trains in a process of its own, forked from one that has imported torch and hwopt. `WARM` steps are left out (kernels are loaded,
compiled, captured in them), the next ones are timed as a whole, from one wait for the device to the next. Tokens are real ones,
without padding. The host's time is CPU time of the training thread. --small takes tiny models.

The import of Unsloth changes transformers, so Unsloth runs in a new process. It needs older packages than hwopt. Put them into a
folder of their own: PYTHONPATH=FOLDER python benchmarks/gpu_speed.py lora qlora --only Unsloth.

bert: BERT-base, two classes, lengths with median 64, sigma .9, up to 512; 64 rows a step, bf16. bert16: 16 rows of up to 64.
lora: a decoder with the shape of Llama 3.2 1B, LoRA of rank 16, lengths with median 150, up to 1,024, 32 rows a step.
qlora: the shape of Llama 2 7B, 4-bit weights, LoRA of rank 16, lengths with median 150, up to 512, 16 rows.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

WARM = 12
LIMIT = 240
"""Seconds for one variant."""
SHOWN = ("step_ms", "host_ms", "tokens_per_second", "allocated_gib", "reserved_gib", "whole_seconds")
RATE = 1e-4


@dataclass(frozen=True)
class Work:
    config: dict[str, Any]
    median: int
    longest: int
    rows: int
    """Of an optimizer step."""
    kind: str = "causal-lm"
    lora: bool = False
    quantized: bool = False
    timed: int = 40
    """Steps after the warm ones."""

    @property
    def steps(self) -> int:
        return WARM + self.timed


BERT = {"model_type": "bert", "vocab_size": 30522}
LLAMA_1B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_7B = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096,
}  # fmt: skip
WORKS = {
    "bert": Work(BERT, 64, 512, 64, "text-classification"),
    "bert16": Work(BERT, 40, 64, 16, "text-classification"),
    "lora": Work(LLAMA_1B, 150, 1024, 32, lora=True),
    "qlora": Work(LLAMA_7B, 150, 512, 16, lora=True, quantized=True),
}


# ---- what every variant trains


def make(work: Work, folder: Path, small: bool) -> None:
    """Write the model, its tokenizer and the texts."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

    config = dict(work.config)
    if small:
        config |= {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "vocab_size": 600,
        }
        config |= {"num_key_value_heads": 2} if work.kind == "causal-lm" else {}
    words = config["vocab_size"]
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    vocabulary = {
        word: number for number, word in enumerate([*special, *(f"w{number}" for number in range(words - len(special)))])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if work.kind == "text-classification":
        tokenizer.post_processor = processors.TemplateProcessing(
            "[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", [("[CLS]", 1), ("[SEP]", 2)]
        )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", eos_token="[SEP]", unk_token="[UNK]"
    ).save_pretrained(folder / "model")
    settings = AutoConfig.for_model(**config, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    cls: Any = AutoModelForSequenceClassification if work.kind == "text-classification" else AutoModelForCausalLM
    dtype = torch.float32 if work.kind == "text-classification" else torch.bfloat16
    with torch.device("cuda"):
        cls.from_config(settings, dtype=dtype).save_pretrained(folder / "model")
    drawn = random.Random(0)
    lines = []
    for number in range(work.rows * (work.steps + 4)):
        length = min(work.longest - 2, max(1, round(drawn.lognormvariate(math.log(work.median), 0.9))))
        text = " ".join(f"w{drawn.randrange(words - len(special))}" for _ in range(length))
        lines.append(json.dumps({"text": text} | ({"label": str(number % 2)} if work.kind == "text-classification" else {})))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def encoded(work: Work, folder: Path) -> list[dict[str, Any]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    ids = tokenizer([row["text"] for row in rows], truncation=True, max_length=work.longest)["input_ids"]
    if work.kind == "causal-lm":
        return [{"input_ids": [*own, tokenizer.eos_token_id][: work.longest]} for own in ids]
    return [{"input_ids": own, "labels": int(row["label"])} for own, row in zip(ids, rows, strict=True)]


class Collate:
    """Pads a batch, and counts its tokens in all processes."""

    def __init__(self, multiple: int = 1) -> None:
        self.tokens, self.multiple = multiprocessing.Value("q", 0), multiple

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        with self.tokens.get_lock():
            self.tokens.value += sum(len(row["input_ids"]) for row in rows)
        width = -(-max(len(row["input_ids"]) for row in rows) // self.multiple) * self.multiple
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for number, row in enumerate(rows):
            ids[number, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
            mask[number, : len(row["input_ids"])] = 1
        labels = torch.tensor([row["labels"] for row in rows]) if "labels" in rows[0] else ids.masked_fill(mask == 0, -100)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class Clock:
    """Times the steps after the warm ones; `step(tokens)` after each."""

    def __init__(self, timed: int) -> None:
        self.steps, self.timed = 0, timed
        self.began = self.first = self.host = 0.0
        self.seconds = self.tokens = None

    def step(self, tokens: int) -> bool:
        """Whether the timed steps are done. `tokens`: all that were trained so far."""
        import torch

        self.steps += 1
        if self.steps == WARM:
            torch.cuda.synchronize()
            self.began, self.host, self.first = time.perf_counter(), time.thread_time(), tokens
        if self.steps == WARM + self.timed:
            self.host = time.thread_time() - self.host
            torch.cuda.synchronize()
            self.seconds, self.tokens = time.perf_counter() - self.began, tokens - self.first
        return self.seconds is not None

    def found(self) -> dict[str, Any]:
        import torch

        return {
            "step_ms": 1e3 * self.seconds / self.timed,
            "host_ms": 1e3 * self.host / self.timed,
            "tokens_per_second": self.tokens / self.seconds,
            "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
            "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        }


def loaded(work: Work, folder: Path, dtype: str = "float32") -> Any:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig

    cls: Any = AutoModelForSequenceClassification if work.kind == "text-classification" else AutoModelForCausalLM
    more = {}
    if work.quantized:
        more["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_use_double_quant=True
        )
    return cls.from_pretrained(folder / "model", dtype=getattr(torch, dtype), **more)


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))


# ---- the variants: each returns a Clock, and what else it found


def timer(clock: Clock, tokens: Any) -> Any:
    """A callback of the Trainer that stops it after the timed steps. `tokens`: a shared number, of all tokens so far."""
    from transformers import TrainerCallback

    class Timer(TrainerCallback):
        def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = clock.step(tokens.value)

    return Timer()


def trainer(
    work: Work, folder: Path, hw: str = "", tuned: bool = False, compile: bool = False, liger: bool = False
) -> tuple[Clock, dict[str, Any]]:
    """transformers' Trainer as it is, tuned by hand, or with hwopt."""
    import torch
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    import hwopt

    clock, collate = Clock(work.timed), Collate(64 if compile else 8 if tuned else 1)

    steps = work.rows if tuned or hw else 8
    more: dict[str, Any] = {"bf16": True} if work.lora or hw or tuned else {}
    if tuned:
        more |= {"dataloader_num_workers": 4, "train_sampling_strategy": "group_by_length", "torch_compile": compile}
        more |= {"use_liger_kernel": liger}
    if tuned or hw:
        torch.backends.cuda.matmul.allow_tf32 = True
    model = loaded(work, folder, "bfloat16" if work.lora else "float32")
    own = hwopt.optimized(Trainer, hw) if hw else Trainer
    more |= {"per_device_train_batch_size": steps, "gradient_accumulation_steps": work.rows // steps}
    arguments = TrainingArguments(
        str(folder / "out"), learning_rate=RATE,
        max_steps=work.steps + 2, report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=1000, **more,
    )  # fmt: skip
    run = own(
        model=with_lora(model) if work.lora else model, args=arguments, train_dataset=Dataset.from_list(encoded(work, folder)),
        data_collator=collate, callbacks=[timer(clock, collate.tokens)],
    )  # fmt: skip
    run.train()
    return clock, {}


class Counted:
    """A collator that counts the tokens of its rows."""

    def __init__(self, own: Any, tokens: Any) -> None:
        self.own, self.tokens = own, tokens

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        self.tokens.value += sum(len(row["input_ids"]) for row in rows)
        return self.own(rows)


def unsloth(work: Work, folder: Path) -> tuple[Clock, dict[str, Any]]:
    """Unsloth's FastLanguageModel and TRL's SFTTrainer as Unsloth's notebooks have them, without checkpointing."""
    os.environ["UNSLOTH_DISABLE_STATISTICS"] = "1"
    FastLanguageModel = importlib.import_module("unsloth").FastLanguageModel  # before transformers
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model, tokenizer = FastLanguageModel.from_pretrained(
        str(folder / "model"), max_seq_length=work.longest, load_in_4bit=work.quantized, dtype=torch.bfloat16,
        local_files_only=True,
    )  # fmt: skip
    model = FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=32, lora_dropout=0, bias="none", use_gradient_checkpointing=False, random_state=0
    )
    clock, tokens = Clock(work.timed), multiprocessing.Value("q", 0)
    texts = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    run = SFTTrainer(
        model=model, processing_class=tokenizer, train_dataset=Dataset.from_list(texts), callbacks=[timer(clock, tokens)],
        args=SFTConfig(
            str(folder / "out"), learning_rate=RATE, max_steps=work.steps + 2, report_to=[], save_strategy="no", bf16=True,
            disable_tqdm=True, logging_steps=1000, per_device_train_batch_size=work.rows,
            gradient_accumulation_steps=1, max_length=work.longest,
        ),
    )  # fmt: skip
    run.data_collator = Counted(run.data_collator, tokens)
    run.train()
    return clock, {"padding_free": run.padding_free}


def by_hand(work: Work, folder: Path, parts: int = 1, compile: bool = False) -> tuple[Clock, dict[str, Any]]:
    """The fastest loop that we can write without hwopt: sorted micro-batches, fused AdamW, bf16, pinned copies, no waits."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = True
    model = loaded(work, folder, "bfloat16" if work.lora else "float32").cuda()
    model = with_lora(model) if work.lora else model
    model.config.use_cache = False
    if compile:
        model.compile(dynamic=True)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in trained:
        weight.data = weight.data.float()
    optimizer = torch.optim.AdamW(trained, lr=RATE, fused=True)
    rows = encoded(work, folder)
    random.Random(1).shuffle(rows)
    collate, clock = Collate(8), Clock(work.timed)
    batches = []
    for begin in range(0, work.rows * (work.steps), work.rows):
        step = sorted(rows[begin : begin + work.rows], key=lambda row: -len(row["input_ids"]))
        ends = list(accumulate(len(row["input_ids"]) for row in step))
        inner = [next(end for end, sum in enumerate(ends, 1) if sum * parts >= part * ends[-1]) for part in range(1, parts)]
        cuts = [0, *inner, len(step)]  # about equal tokens
        batches.append([{k: v.pin_memory() for k, v in collate(step[a:b]).items()} for a, b in pairwise(cuts)])
    model.train()
    seen = 0
    for step in batches:
        labels = sum(int((part["labels"] != -100).sum()) for part in step)
        for part in step:
            own = {key: value.cuda(non_blocking=True) for key, value in part.items()}
            with torch.autocast("cuda", torch.bfloat16):
                if work.kind == "causal-lm":
                    loss = model(**own, num_items_in_batch=labels).loss
                else:
                    loss = model(**own).loss * (len(part["labels"]) / work.rows)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += sum(int(part["attention_mask"].sum()) for part in step)
        if clock.step(seen):
            break
    return clock, {}


def hwopt_run(work: Work, folder: Path, *more: str) -> tuple[Clock, dict[str, Any]]:
    """`hwopt run --profile auto`, with the forecast of `hwopt plan` before it."""
    import torch

    from hwopt import api
    from hwopt.runs.folder import Target
    from hwopt.training.loop import Loop

    given = {
        "model.name": folder / "model", "data.train": folder / "train.jsonl", "task.kind": work.kind,
        "data.max_length": work.longest,
        "training.max_steps": work.steps + 2, "training.learning_rate": RATE, "training.logging_steps": 1000,
        "plugins.batch.effective": work.rows, "plugins.batch.train": work.rows,
    }  # fmt: skip
    if work.lora:
        given |= {"plugins.adapter.r": 16, "plugins.adapter.lora_alpha": 32}
    if work.quantized:
        given |= {"plugins.quantize.enabled": "true"}
    assignments = [*(f"{key}={value}" for key, value in given.items()), *more]
    plan = api.plan("auto", assignments=assignments, gains=False)
    memory = plan.memory
    decided = {entry.name: f"{entry.decision}: {entry.reason}" for entry in plan.entries}
    found = {
        "forecast_gib": memory.peak_gib, "forecast_reserved_gib": memory.reserved_gib, "tier": memory.tier, "decided": decided,
        "forecast_ms": [1e3 * seconds for seconds in memory.time.step] if memory.time else None,
    }  # fmt: skip
    clock, seen, update = Clock(work.timed), [0], Loop.update

    def timed(loop: Loop, batch: Any) -> None:
        update(loop, batch)
        seen[0] += batch.tokens
        clock.step(seen[0])
        found["micro_batches"] = found.get("micro_batches", 0) + len(batch.parts)

    torch.cuda.reset_peak_memory_stats()
    no_advice = mock.patch.object(api, "with_gains", lambda plan, *_, **__: plan)  # it takes time, after the training
    with tempfile.TemporaryDirectory() as target, mock.patch.object(Loop, "update", timed), no_advice:
        api.train(assignments=assignments, target=Target(Path(target), "run"))
    return clock, found


Variant = Callable[[Work, Path], tuple[Clock, dict[str, Any]]]
EAGER = ("plugins.cuda_graphs.enabled=false",)
GRAPHS = ("plugins.cuda_graphs.enabled=true", "plugins.cuda_graphs.tokens=0")  # of all sizes
COMPILE = ("plugins.compile.enabled=true",)
PACK = ("plugins.pack.enabled=true", "plugins.length_batching.enabled=false")
GROUPED = ("plugins.group_lengths.enabled=true",)
FUSED = ("plugins.fused_loss.enabled=true", "plugins.fused_loss.backend=torch")
HAND: dict[str, Variant] = {f"by hand, {n} part(s)": partial(by_hand, parts=n) for n in (1, 2, 4)}
OWN: dict[str, Variant] = {"hwopt": hwopt_run}


def with_sets(**sets: tuple[str, ...]) -> dict[str, Variant]:
    return {f"hwopt + {name}": partial(run_with, sets=given) for name, given in sets.items()}


def run_with(work: Work, folder: Path, sets: tuple[str, ...]) -> tuple[Clock, dict[str, Any]]:
    return hwopt_run(work, folder, *sets)


TRAINERS: dict[str, Variant] = {
    "Trainer": trainer,
    "Trainer, tuned": partial(trainer, tuned=True),
    "Trainer with hwopt": partial(trainer, hw="auto"),
}
COMPILED: dict[str, Variant] = {
    "by hand, compiled": partial(by_hand, parts=1, compile=True),
    "Trainer, tuned, compiled": partial(trainer, tuned=True, compile=True),
}
LIGER: dict[str, Variant] = {"Trainer, tuned, Liger": partial(trainer, tuned=True, liger=True)}
UNSLOTH: dict[str, Variant] = {"Unsloth": unsloth}
VARIANTS: dict[str, dict[str, Variant]] = {
    "bert": TRAINERS
    | COMPILED
    | HAND
    | OWN
    | with_sets(eager=EAGER, graphs=GRAPHS, compile=COMPILE, grouped=GROUPED, grouped_graphs=GROUPED + GRAPHS),
    "bert16": HAND
    | OWN
    | with_sets(eager=EAGER, graphs=GRAPHS, compile=COMPILE)
    | {"by hand, compiled": COMPILED["by hand, compiled"]},
    "lora": UNSLOTH
    | TRAINERS
    | LIGER
    | HAND
    | OWN
    | with_sets(eager=EAGER, graphs=GRAPHS, fused=FUSED, fused_grouped=FUSED + GROUPED, pack=PACK, compile=COMPILE),
    "qlora": UNSLOTH
    | {"Trainer, tuned": TRAINERS["Trainer, tuned"]}
    | LIGER
    | HAND
    | OWN
    | with_sets(eager=EAGER, graphs=GRAPHS, grouped=GROUPED, pack=PACK),
}


def child(pipe: Any, function: Callable[..., Any], *arguments: Any) -> None:
    try:
        pipe.send(function(*arguments) or {})
    except BaseException:
        pipe.send({"error": traceback.format_exc()[-3000:]})


def in_process(function: Callable[..., Any], *arguments: Any, method: str = "fork") -> dict[str, Any]:
    """The result of `function` in a child process, or its error. The parent must not have used the GPU."""
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(theirs, function, *arguments))
    process.start()
    found = ours.recv() if ours.poll(LIMIT) else {"error": f"not done after {LIMIT} s"}
    process.join(10)
    process.kill()
    return found


def run(work: Work, variant: Variant, folder: Path) -> dict[str, Any]:
    clock, found = variant(work, folder)
    return clock.found() | found


def preload() -> None:
    """Import what the variants need and what does not use the GPU. torchao does, and transformers' models import it."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    for name in ("transformers", "accelerate", "datasets", "hwopt.api", "hwopt.training.loop"):
        importlib.import_module(name)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("works", nargs="*", default=list(WORKS))
    arguments.add_argument("--only", default=".*", help="a regular expression for the names of variants")
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--steps", type=int, help="timed steps of each variant")
    arguments.add_argument("--small", action="store_true")
    options = arguments.parse_args()
    preload()
    for name in options.works:
        with tempfile.TemporaryDirectory() as place:
            work, folder = replace(WORKS[name], timed=options.steps or WORKS[name].timed), Path(place)
            if made := in_process(make, work, folder, options.small):
                sys.exit(made["error"])
            for variant, function in VARIANTS[name].items():
                if not re.fullmatch(options.only, variant):
                    continue
                began = time.perf_counter()
                row = {"work": name, "variant": variant} | in_process(
                    run, work, function, folder, method="spawn" if function is unsloth else "fork"
                )
                row["whole_seconds"] = time.perf_counter() - began
                if options.json:
                    with open(options.json, "a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
                shown = [f"{row[key]:,.2f}" for key in SHOWN if key in row] or [row["error"][-400:]]
                print(" | ".join((name, variant, *shown)), flush=True)


if __name__ == "__main__":
    main()
