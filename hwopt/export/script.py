"""A job and its plan as one readable training script without hwopt, whose losses equal those of `hwopt run`.

For text classification and causal language modelling of a model with trained weights, on one
device. The script splits each step into micro-batches of equal rows: the sum of their losses over
the count of the whole step is the same whatever the split.
"""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, StrictUndefined

from hwopt.data.sources.reading import read_all, read_options
from hwopt.errors import InputError
from hwopt.export.arguments import heading, plugin_words
from hwopt.model.config import load_config
from hwopt.planning.plan import Plan
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
NOT_HERE = "Not here: evaluation, checkpoints, resume, and the retry after an out-of-memory error."

TEMPLATE = '''\
{{ heading }}
{% if "csv." in reader %}
import csv
{% endif %}
import json
from math import ceil

import numpy as np
import torch
{% if "load_dataset" in reader %}
from datasets import load_dataset
{% endif %}
from torch.nn.functional import cross_entropy
from transformers import {{ auto_class }}, AutoTokenizer, get_scheduler

MODEL, REVISION = {{ job.model.name | repr }}, {{ job.model.revision | repr }}
TRAIN, SPLIT = {{ data.train | repr }}, {{ (data.split or "train") | repr }}
MAX_LENGTH = {{ data.max_length }}
SEED, ROWS, MICRO_ROWS = {{ [training.seed, batch.step, batch.train] | join(", ") }}  # rows of a step and of a micro-batch
LEARNING_RATE, WEIGHT_DECAY = {{ training.learning_rate }}, {{ training.weight_decay }}
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
{% if words.tf32 %}
torch.set_float32_matmul_precision("high")
{% endif %}


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
tokenizer = AutoTokenizer.from_pretrained(
    {{- (job.model.tokenizer or job.model.name) | repr }}, revision={{ "None" if job.model.tokenizer else "REVISION" }})
tokenizer.padding_side = "right"
tokenizer.add_special_tokens({"pad_token": {{ prepared.tokenizer.pad_token | repr }}})
{{ reader }}{% if data.max_rows %}[:{{ data.max_rows }}]{% endif +%}
{% if not causal %}
COLUMNS, LABEL = {{ data.text | list }}, {{ data.label[0] | repr }}
LABELS = {{ prepared.label_names | list }}
samples = []
for row in rows:
    texts = [row[column] or "" for column in COLUMNS]
    if row[LABEL] in (None, "") or not any(text.strip() for text in texts):
        continue
    found = tokenizer(*texts, truncation=MAX_LENGTH is not None, max_length=MAX_LENGTH)
    samples.append((dict(found), LABELS.index(str(row[LABEL]))))
{% else %}


def tokens(texts, special):
    """The ids of each text; `special`: with the tokens that the tokenizer adds in front, not behind."""
    found = tokenizer(texts, add_special_tokens=special)["input_ids"]
    ends = special and tokenizer.eos_token_id is not None and tokenizer("")["input_ids"][-1:] == [tokenizer.eos_token_id]
    return [ids[:-1] for ids in found] if ends else found


def ended(ids):
    """The ids with the end-of-text token behind them, once."""
    return ids + ([] if tokenizer.eos_token_id in (None, *ids[-1:]) else [tokenizer.eos_token_id])


{% if data.prompt %}
pairs = [(row[{{ data.prompt | repr }}] or "", row[{{ data.completion | repr }}] or "") for row in rows]
pairs = [pair for pair in pairs if any(text.strip() for text in pair)]
samples = []  # inputs and, shifted by one, what they predict; -100 in the prompt
for first, second in zip(tokens([a for a, _ in pairs], True), tokens([b for _, b in pairs], False)):
    ids = (first + ended(second))[:MAX_LENGTH]
    masked = max(len(first) - 1, 0)
    labels = ([-100] * masked + ids[masked + 1 :])[: len(ids) - 1]
    if second and any(label != -100 for label in labels):
        samples.append(({"input_ids": ids[:-1]}, labels))
{% else %}
texts = [row[{{ data.text[0] | repr }}] for row in rows if (row[{{ data.text[0] | repr }}] or "").strip()]
{% if not prepared.train.has("documents") %}
samples = []  # inputs and, shifted by one, what they predict
for ids in tokens(texts, True):
    ids = ended(ids[1:] if ids[:2] == 2 * [tokenizer.bos_token_id] else ids)[:MAX_LENGTH]
    if len(ids) > 1:
        samples.append(({"input_ids": ids[:-1]}, ids[1:]))
{% else %}
{% set block = prepared.train.meta["max_length"] %}
stream = []
for ids in tokens(texts, True):  # documents, joined by the end-of-text token
    stream += [tokenizer.eos_token_id] if stream and tokenizer.eos_token_id is not None else []
    stream += ids
samples = []  # inputs and, shifted by one, what they predict
for begin in range(0, len(stream) - 1, {{ block }}):
    end = min(begin + {{ block }}, len(stream) - 1)
    samples.append(({"input_ids": stream[begin:end]}, stream[begin + 1 : end + 1]))
{% endif %}
{% endif %}
{% endif %}
assert len(samples) == {{ prepared.train | length }}, f"{len(samples)} samples; hwopt reads {{ prepared.train | length }}"

# model
torch.manual_seed(mix(SEED, 1))
model = {{ auto_class }}.from_pretrained(
    MODEL,
    revision=REVISION,
{% for key, value in model_kwargs.items() %}
    {{ key }}={{ value }},
{% endfor %}
{% if not causal %}
    num_labels=len(LABELS),
    id2label=dict(enumerate(LABELS)),
    label2id={name: number for number, name in enumerate(LABELS)},
    problem_type="single_label_classification",
    ignore_mismatched_sizes=True,
{% endif %}
)
if tokenizer.pad_token_id >= model.get_input_embeddings().num_embeddings:
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
model.config.pad_token_id = model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
{% if words.gradient_checkpointing %}
enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
enable({"use_reentrant": False})
{% endif %}
model.to(device).train()
{% if words.torch_compile %}
model.compile()
{% endif %}

# optimizer and schedule
parameters = [each for each in model.parameters() if each.requires_grad]
groups = [{"params": parameters}]
if WEIGHT_DECAY:  # none for biases and norms
    groups = [
        {"params": [each for each in parameters if each.ndim > 1]},
        {"params": [each for each in parameters if each.ndim <= 1], "weight_decay": 0.0},
    ]
betas = ({{ training.adam_beta1 }}, {{ training.adam_beta2 }})
options = {"lr": LEARNING_RATE, "betas": betas, "eps": {{ training.adam_epsilon }}, "weight_decay": WEIGHT_DECAY}
{% if words.optim in (None, "adamw_torch") %}
optimizer = torch.optim.AdamW(groups, **options)
{% elif words.optim == "adamw_torch_fused" %}
optimizer = torch.optim.AdamW(groups, fused=device.type == "cuda", **options)
{% else %}
from transformers import Trainer, TrainingArguments  # torch has no such optimizer

kind, own = Trainer.get_optimizer_cls_and_kwargs(TrainingArguments("out", optim={{ words.optim | repr }}))
optimizer = kind(groups, **{**own, **options})
{% endif %}
steps_of_epoch = ceil(len(samples) / ROWS)
total_steps = {{ training.max_steps or "ceil(%s * steps_of_epoch)" % training.num_train_epochs }}
scheduler = get_scheduler({{ training.lr_scheduler_type | repr }}, optimizer, {{ warmup }}, total_steps)
{% if words.fp16 %}
scaler = torch.amp.GradScaler(device.type)
{% endif %}

# training: the loss of a step is the sum over its rows, divided by what the whole step counts
step = epoch = 0
while step < total_steps:
    order = np.random.default_rng(mix(SEED, 2, epoch)).permutation(len(samples))
    for begin in range(0, len(order), ROWS):
        if step == total_steps:
            break
        batch = [samples[index] for index in order[begin : begin + ROWS]]
        count = {{ "sum(label != -100 for _, labels in batch for label in labels)" if causal else "len(batch)" }}
        total = torch.zeros((), device=device)
        for first in range(0, len(batch), MICRO_ROWS):
            part = batch[first : first + MICRO_ROWS]
            inputs = tokenizer.pad([each for each, _ in part], return_tensors="pt").to(device)
{% if causal %}
            width = inputs["input_ids"].shape[1]
            targets = torch.tensor([x for _, row in part for x in row + [-100] * (width - len(row))], device=device)
{% else %}
            targets = torch.tensor([label for _, label in part], device=device)
{% endif %}
{% set logits = "model(**inputs, use_cache=False).logits" if causal else "model(**inputs).logits" %}
{% if words.fp16 or words.bf16 %}
            with torch.autocast(device.type, {{ "torch.float16" if words.fp16 else "torch.bfloat16" }}):
                logits = {{ logits }}
{% else %}
            logits = {{ logits }}
{% endif %}
            loss = cross_entropy(logits.float(){% if causal %}.flatten(0, 1){% endif %}, targets, reduction="sum"
            {%- if smoothing %}, label_smoothing={{ smoothing }}{% endif %}) / count
            {{ "scaler.scale(loss)" if words.fp16 else "loss" }}.backward()
            total += loss.detach()
{% if words.fp16 %}
        scaler.unscale_(optimizer)
{% endif %}
{% if training.max_grad_norm %}
        torch.nn.utils.clip_grad_norm_(parameters, {{ training.max_grad_norm }})
{% endif %}
{% if words.fp16 %}
        scaler.step(optimizer)
        scaler.update()
{% else %}
        optimizer.step()
{% endif %}
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        print(json.dumps({"step": step, "loss": total.item()}), flush=True)
    epoch += 1
model.save_pretrained("out")
tokenizer.save_pretrained("out")
'''


def script_file(plan: Plan, cache: Path) -> str:
    """The text of the script for `plan`. Reads the job's data, for its labels and the number of its samples.

    Raises InputError for a job or a plan that the script cannot express.
    """
    refuse_unsupported(plan)
    job, training = plan.job, plan.training
    task = make_task(job)
    if task.facts.decoder and job.data.prompt is None:
        columns = read_all(job.data.train, job.data.split, read_options(job.data)).table.column_names
        if job.data.text[0] not in columns:
            raise InputError(f"--to script: needs data.prompt and data.completion, or a column {job.data.text[0]!r}")
    config = load_config(job.model.name, job.model.config, job.model.revision)
    prepared = task.prepare(job, config, cache, training.seed, max_positions=plan.model.max_positions)
    words, lines = plugin_words(plan, WORDS)
    lines += [NOT_HERE, "Losses equal those of `hwopt run` where the model has no dropout, whose random numbers differ."]
    share = f"ceil({training.warmup_ratio or 0} * total_steps)"
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters["repr"] = repr
    return environment.from_string(TEMPLATE).render(
        heading=heading(plan, "Training of", "script", lines),
        reader=READERS[Path(str(job.data.train)).suffix.lower()],
        auto_class=task.facts.auto_class,
        causal=task.facts.decoder,
        job=job,
        data=job.data,
        training=training,
        batch=plan.batch,
        prepared=prepared,
        words=dict.fromkeys(WORDS) | words,
        model_kwargs=model_kwargs(plan),
        warmup=share if training.warmup_steps is None else warmup_steps(training, 0),
        smoothing=job.task.label_smoothing,
    )


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
        "data.eos_token: has no code": data.eos_token is not None,
        "task.class_weights: has no code": job.task.class_weights is not None,
        "--world-size: the script is for one device": plan.world_size > 1,
    }
    if found := [reason for reason, unsupported in reasons.items() if unsupported]:
        raise InputError("--to script: " + "; ".join(found))


def model_kwargs(plan: Plan) -> dict[str, str]:
    """The keywords of from_pretrained as code; values of other types are in the list at the top of the script."""
    found = {"dtype": "torch.float32"}
    for key, value in plan.recipe.model_kwargs.items():
        if isinstance(value, str | int | float | bool):
            found[key] = repr(value)
        elif str(value).startswith("torch."):
            found[key] = str(value)
    return found
