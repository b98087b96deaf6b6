"""A job and its plan as one readable training script without hwopt, whose losses equal those of `hwopt run`.

For text classification and causal language modelling of a model with trained weights, on one
device. The script splits each step into micro-batches of equal rows: the sum of their losses over
the count of the whole step is the same whatever the split.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from hwopt.errors import InputError
from hwopt.export.arguments import heading, plugin_words
from hwopt.model.config import load_config
from hwopt.planning.plan import Plan
from hwopt.tasks.prepared import Prepared
from hwopt.tasks.registry import make_task
from hwopt.training.optimizer import warmup_steps

WORDS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16", "tf32"),
    *("optim", "gradient_checkpointing", "torch_compile"),
)
"""The arguments that the script has code for."""
OPEN = 'with open(TRAIN, encoding="utf-8-sig", newline="") as file:\n    rows = '
READERS = {
    ".csv": OPEN + "list(csv.DictReader(file))",
    ".tsv": OPEN + 'list(csv.DictReader(file, delimiter="\\t"))',
    ".jsonl": OPEN + "[json.loads(line) for line in file if line.strip()]",
    ".parquet": 'rows = load_dataset("parquet", data_files=TRAIN, split="train").to_list()',
    "": "rows = load_dataset(TRAIN, split=SPLIT).to_list()",
}
"""Extension of the data -> how the script reads its rows; "": a name on the hub."""
CHECKPOINTING = """\
enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
enable({"use_reentrant": False})
"""
NOT_HERE = "Not here: evaluation, checkpoints, resume, and the retry after an out-of-memory error."

BEGIN = Template('''\
${imports}import json
from math import ceil

import numpy as np
import torch
${datasets}from torch.nn.functional import cross_entropy
from transformers import $auto_class, AutoTokenizer, get_scheduler

MODEL, REVISION = $model, $revision
TRAIN, SPLIT = $train, $split
MAX_LENGTH = $max_length
SEED, ROWS, MICRO_ROWS = $seed, $rows, $micro_rows  # rows of an optimizer step and of a micro-batch
LEARNING_RATE, WEIGHT_DECAY = $learning_rate, $weight_decay
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
$switches

def mix(*parts):
    """A number that depends on all parts (splitmix64): the seed of the weights and of an epoch's order."""
    mask, state = 2**64 - 1, 0
    for part in parts:
        state = ((state ^ part) + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state >> 1


# data
tokenizer = AutoTokenizer.from_pretrained($tokenizer, revision=$tokenizer_revision)
tokenizer.padding_side = "right"
tokenizer.add_special_tokens({"pad_token": $padding})
$reader$max_rows''')
CLASSES = Template("""\
COLUMNS, LABEL = $columns, $label
LABELS = $labels
samples = []
for row in rows:
    texts = [row[column] or "" for column in COLUMNS]
    if row[LABEL] in (None, "") or not any(text.strip() for text in texts):
        continue
    found = tokenizer(*texts, truncation=MAX_LENGTH is not None, max_length=MAX_LENGTH)
    samples.append((dict(found), LABELS.index(str(row[LABEL]))))
""")
TOKENS = '''

def tokens(texts, special):
    """The ids of each text; `special`: with the tokens that the tokenizer adds in front, not behind."""
    found = tokenizer(texts, add_special_tokens=special)["input_ids"]
    ends = special and tokenizer.eos_token_id is not None and tokenizer("")["input_ids"][-1:] == [tokenizer.eos_token_id]
    return [ids[:-1] for ids in found] if ends else found


'''
BLOCKS = Template("""\
texts = [row[$column] for row in rows if (row[$column] or "").strip()]
stream = []
for ids in tokens(texts, True):  # documents, joined by the end-of-text token
    stream += [tokenizer.eos_token_id] if stream and tokenizer.eos_token_id is not None else []
    stream += ids
samples = []  # inputs and, shifted by one, what they predict
for begin in range(0, len(stream) - 1, $block):
    end = min(begin + $block, len(stream) - 1)
    samples.append(({"input_ids": stream[begin:end]}, stream[begin + 1 : end + 1]))
""")
PROMPTS = Template("""\
pairs = [(row[$prompt] or "", row[$completion] or "") for row in rows]
pairs = [pair for pair in pairs if any(text.strip() for text in pair)]
samples = []  # inputs and, shifted by one, what they predict; -100 in the prompt
for first, second in zip(tokens([a for a, _ in pairs], True), tokens([b for _, b in pairs], False)):
    ids = first + second + ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])
    masked = max(len(first) - 1, 0)
    labels = ([-100] * masked + ids[masked + 1 :])[: len(ids) - 1][:MAX_LENGTH]
    if second and any(label != -100 for label in labels):
        samples.append(({"input_ids": ids[:-1][:MAX_LENGTH]}, labels))
""")
END = Template("""\
assert len(samples) == $samples, f"{len(samples)} samples; hwopt reads $samples"

# model
torch.manual_seed(mix(SEED, 1))
model = $auto_class.from_pretrained(
    MODEL,
    revision=REVISION,
    $model_kwargs,
)
if tokenizer.pad_token_id >= model.get_input_embeddings().num_embeddings:
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
model.config.pad_token_id = model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
${checkpointing}model.to(device).train()
${compiled}
# optimizer and schedule
parameters = [each for each in model.parameters() if each.requires_grad]
groups = [{"params": parameters}]
if WEIGHT_DECAY:  # none for biases and norms
    groups = [
        {"params": [each for each in parameters if each.ndim > 1]},
        {"params": [each for each in parameters if each.ndim <= 1], "weight_decay": 0.0},
    ]
options = {"lr": LEARNING_RATE, "betas": $betas, "eps": $eps, "weight_decay": WEIGHT_DECAY}
$optimizer
steps_of_epoch = ceil(len(samples) / ROWS)
total_steps = $max_steps
scheduler = get_scheduler($scheduler, optimizer, $warmup, total_steps)
$scaler
# training: the loss of a step is the sum over its rows, divided by what the whole step counts
step = epoch = 0
while step < total_steps:
    order = np.random.default_rng(mix(SEED, 2, epoch)).permutation(len(samples))
    for begin in range(0, len(order), ROWS):
        if step == total_steps:
            break
        batch = [samples[index] for index in order[begin : begin + ROWS]]
        $count
        total = torch.zeros((), device=device)
        for first in range(0, len(batch), MICRO_ROWS):
            part = batch[first : first + MICRO_ROWS]
            inputs = tokenizer.pad([each for each, _ in part], return_tensors="pt").to(device)
            $targets
            $forward
            loss = cross_entropy(logits.float()$flat, targets, reduction="sum"$smoothing) / count
            $backward
            total += loss.detach()
        $clip
        $update
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        print(json.dumps({"step": step, "loss": total.item()}), flush=True)
    epoch += 1
model.save_pretrained("out")
tokenizer.save_pretrained("out")
""")


def script_file(plan: Plan, cache: Path) -> str:
    """The text of the script for `plan`. Reads the job's data, for its labels and the number of its samples.

    Raises InputError for a job or a plan that the script cannot express.
    """
    refuse_unsupported(plan)
    job, training = plan.job, plan.training
    task = make_task(job)
    config = load_config(job.model.name, job.model.config, job.model.revision)
    prepared = task.prepare(job, config, cache, training.seed, max_positions=plan.model.max_positions)
    words, lines = plugin_words(plan, WORDS)
    causal = task.facts.decoder
    reader = READERS[Path(str(job.data.train)).suffix.lower()]
    tokenizer_name = job.model.tokenizer or job.model.name
    values: dict[str, Any] = {
        "auto_class": task.facts.auto_class,
        "model": repr(job.model.name),
        "revision": repr(job.model.revision),
        "train": repr(job.data.train),
        "split": repr(job.data.split or "train"),
        "max_length": job.data.max_length,
        "seed": training.seed,
        "rows": plan.batch.step,
        "micro_rows": plan.batch.train,
        "learning_rate": training.learning_rate,
        "weight_decay": training.weight_decay,
        "switches": 'torch.set_float32_matmul_precision("high")\n' if words.get("tf32") else "",
        "tokenizer": repr(tokenizer_name),
        "tokenizer_revision": "REVISION" if job.model.tokenizer is None else None,
        "padding": repr(prepared.tokenizer.pad_token),
        "reader": reader,
        "imports": "import csv\n" if "csv." in reader else "",
        "datasets": "from datasets import load_dataset\n" if "load_dataset" in reader else "",
        "max_rows": "" if job.data.max_rows is None else f"[:{job.data.max_rows}]",
        "samples": len(prepared.train),
        "model_kwargs": model_kwargs(plan, prepared, causal),
        "checkpointing": CHECKPOINTING if words.get("gradient_checkpointing") else "",
        "compiled": "model.compile()\n" if words.get("torch_compile") else "",
        "betas": (training.adam_beta1, training.adam_beta2),
        "eps": training.adam_epsilon,
        "optimizer": optimizer_code(words.get("optim", "adamw_torch")),
        "max_steps": training.max_steps or f"ceil({training.num_train_epochs} * steps_of_epoch)",
        "scheduler": repr(training.lr_scheduler_type),
        "warmup": f"ceil({training.warmup_ratio or 0} * total_steps)"
        if training.warmup_steps is None
        else warmup_steps(training, 0),
        **precision_code(words, "model(**inputs, use_cache=False).logits" if causal else "model(**inputs).logits"),
        "flat": ".flatten(0, 1)" if causal else "",
        "count": "count = sum(label != -100 for _, labels in batch for label in labels)" if causal else "count = len(batch)",
        "targets": "width = inputs['input_ids'].shape[1]\n            targets = torch.tensor([x for _, labels in part "
        "for x in labels + [-100] * (width - len(labels))], device=device)"
        if causal
        else "targets = torch.tensor([label for _, label in part], device=device)",
        "smoothing": f", label_smoothing={job.task.label_smoothing}" if job.task.label_smoothing else "",
        "clip": clip_code(words, training.max_grad_norm),
    }
    lines += [NOT_HERE, "Losses equal those of `hwopt run` where the model has no dropout, whose random numbers differ."]
    parts = [heading(plan, "Training of", "script", lines), BEGIN.substitute(values), data_code(plan, prepared, causal)]
    return "\n".join([*parts[:2], ""]) + parts[2] + END.substitute(values)


def precision_code(words: Mapping[str, Any], logits: str) -> dict[str, str]:
    """The lines that differ between fp32, bf16 under autocast, and fp16 with loss scaling."""
    found = {
        "forward": f"logits = {logits}",
        "backward": "loss.backward()",
        "update": "optimizer.step()",
        "scaler": "",
    }
    if words.get("fp16") or words.get("bf16"):
        kind = "torch.float16" if words.get("fp16") else "torch.bfloat16"
        found["forward"] = f"with torch.autocast(device.type, {kind}):\n                logits = {logits}"
    if words.get("fp16"):
        found["backward"] = "scaler.scale(loss).backward()"
        found["update"] = "scaler.step(optimizer)\n        scaler.update()"
        found["scaler"] = "scaler = torch.amp.GradScaler(device.type)\n"
    return found


def clip_code(words: Mapping[str, Any], norm: float) -> str:
    unscale = "scaler.unscale_(optimizer)\n        " if words.get("fp16") else ""
    return f"{unscale}torch.nn.utils.clip_grad_norm_(parameters, {norm})" if norm else "# gradients are not clipped"


def refuse_unsupported(plan: Plan) -> None:
    """Raise InputError for what the script has no code for."""
    job, data = plan.job, plan.job.data
    suffix = Path(data.train).suffix.lower() if isinstance(data.train, str) else None
    reasons = {
        "task.kind: only text-classification and causal-lm": job.task.kind not in ("text-classification", "causal-lm"),
        "model.name: needs a model with trained weights": job.model.name is None,
        f"data.train: needs one file ({', '.join(filter(None, READERS))}) or a name on the hub": suffix not in READERS,
        "data.eval_fraction: give the evaluation data as a file in data.eval": data.eval_fraction is not None,
        "data.messages: conversations are for --to trl": data.messages is not None,
        "task.class_weights: has no code": job.task.class_weights is not None,
        "--world-size: the script is for one device": plan.world_size > 1,
    }
    if found := [reason for reason, unsupported in reasons.items() if unsupported]:
        raise InputError("--to script: " + "; ".join(found))


def data_code(plan: Plan, prepared: Prepared, causal: bool) -> str:
    data = plan.job.data
    if not causal:
        labels = list(prepared.label_names or ())
        return CLASSES.substitute(columns=list(data.text), label=repr(data.label[0]), labels=labels)
    if data.prompt is not None:
        return TOKENS + PROMPTS.substitute(prompt=repr(data.prompt), completion=repr(data.completion))
    return TOKENS + BLOCKS.substitute(column=repr(data.text[0]), block=prepared.train.meta["max_length"])


def model_kwargs(plan: Plan, prepared: Prepared, causal: bool) -> str:
    """The keywords of from_pretrained; values that are no plain text or number are in the list at the top of the script."""
    found = {"dtype": "torch.float32"}
    for key, value in plan.recipe.model_kwargs.items():
        if isinstance(value, str | int | float | bool):
            found[key] = repr(value)
        elif str(value).startswith("torch."):
            found[key] = str(value)
    if not causal:
        found |= {"num_labels": "len(LABELS)", "id2label": "dict(enumerate(LABELS))", "ignore_mismatched_sizes": "True"}
        found |= {
            "label2id": "{name: number for number, name in enumerate(LABELS)}",
            "problem_type": '"single_label_classification"',
        }
    return ",\n    ".join(f"{key}={value}" for key, value in found.items())


def optimizer_code(name: str) -> str:
    """The statement that makes the optimizer; names that torch lacks are made as transformers makes them."""
    if name in ("adamw_torch", "adamw_torch_fused"):
        fused = 'fused=device.type == "cuda", ' if name.endswith("fused") else ""
        return f"optimizer = torch.optim.AdamW(groups, {fused}**options)"
    return (
        "from transformers import Trainer, TrainingArguments\n\n"
        f'kind, own = Trainer.get_optimizer_cls_and_kwargs(TrainingArguments("out", optim="{name}"))\n'
        "optimizer = kind(groups, **{**own, **options})"
    )
