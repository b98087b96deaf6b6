"""The table of docs/your-script.md: scripts of others, unmodified and with `hwopt.optimized`.

    python benchmarks/your_script.py [NAME...]
    python tests/pretend_cuda rtx3090 python benchmarks/your_script.py --card [NAME...]

With --card: kernel launches and waits of the host in an optimizer step, on a pretend card.

Tiny models with random weights, fp32, 8 steps of 2 x 6 rows, on the CPU. Each row: the largest relative difference of a loss and
of a gradient norm to the unmodified script, and the tokens that were computed, of how many in the unmodified script.
"""

from __future__ import annotations

import contextlib
import io
import random
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import transformers
import trl
from accelerate.state import AcceleratorState, PartialState
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

import hwopt
from hwopt.errors import DoesNotFitError

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 104}
NO_DROPOUT = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
ARGUMENTS = {
    "per_device_train_batch_size": 6,
    "gradient_accumulation_steps": 2,
    "max_steps": 8,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
}
OPTIONS = {"batch": {"train": 3}, "precision": {"dtype": "fp32"}, "length_batching": {"overhead_tokens": 256}}
CHANGED_LINES = 2
"""The import of hwopt, and the class that is called."""


def tokenizer() -> Any:
    words = ["<pad>", "<eos>", "<unk>", "<mask>", *(f"w{number}" for number in range(100))]
    found = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {name: f"<{name[:-6]}>" for name in ("pad_token", "eos_token", "unk_token", "mask_token")}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=found, **names)


TOKENIZER = tokenizer()


def text(choice: random.Random) -> str:
    return " " + " ".join(f"w{choice.randrange(100)}" for _ in range(choice.randrange(3, 30)))


def texts(*columns: str) -> Dataset:
    choice = random.Random(1)
    return Dataset.from_list([{name: text(choice) for name in columns} for _ in range(96)])


def tokens(**values: Callable[[random.Random, int], Any]) -> Dataset:
    """Rows of tokens; `values`: column -> function of (random numbers, tokens of the row)."""
    choice, found = random.Random(1), []
    for _ in range(96):
        row = dict(TOKENIZER(text(choice)))
        found.append(row | {name: make(choice, len(row["input_ids"])) for name, make in values.items()})
    return Dataset.from_list(found)


def model(name: str, **settings: Any) -> Any:
    transformers.set_seed(0)
    cls = getattr(transformers, name)
    return cls(cls.config_class(**(SIZES | {"pad_token_id": 0} | settings)))


def saved(name: str = "LlamaForCausalLM", **settings: Any) -> Any:
    """A model that was loaded from a folder: TRL loads its reference by that name."""
    folder = tempfile.mkdtemp()
    model(name, max_position_embeddings=128, **settings).save_pretrained(folder)
    return getattr(transformers, name).from_pretrained(folder, dtype=torch.float32)


def plain(made: Any, data: Dataset, collator: Any, cls: str = "Trainer") -> Callable[..., Any]:
    """A script with a class of transformers."""
    arguments = "Seq2SeqTrainingArguments" if "Seq2Seq" in cls else "TrainingArguments"

    def script(wrap: Any, folder: str) -> Any:
        args = getattr(transformers, arguments)(folder, **ARGUMENTS)
        return wrap(getattr(transformers, cls))(model=made(), args=args, train_dataset=data, data_collator=collator)

    return script


def of_trl(kind: str, made: Any, data: Dataset, given: Any = None, **settings: Any) -> Callable[..., Any]:
    """A script with a class of TRL. `given`: makes further arguments of the constructor."""

    def script(wrap: Any, folder: str) -> Any:
        args = getattr(trl, f"{kind}Config")(folder, **(ARGUMENTS | settings))
        own = given() if given else {}
        return wrap(getattr(trl, f"{kind}Trainer"))(made(), args=args, train_dataset=data, processing_class=TOKENIZER, **own)

    return script


def sentences(wrap: Any, folder: str) -> Any:
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer import losses, modules

    encoder = tempfile.mkdtemp()
    model("BertModel", **NO_DROPOUT).save_pretrained(encoder)
    TOKENIZER.save_pretrained(encoder)
    made = SentenceTransformer(modules=[modules.Transformer(encoder), modules.Pooling(32)], device="cpu")
    args = SentenceTransformerTrainingArguments(folder, **ARGUMENTS)
    loss = losses.MultipleNegativesRankingLoss(made)
    return wrap(SentenceTransformerTrainer)(model=made, args=args, train_dataset=texts("anchor", "positive"), loss=loss)


def adapter() -> dict[str, Any]:
    from peft import LoraConfig

    transformers.set_seed(1)
    return {"peft_config": LoraConfig(r=4, target_modules="all-linear")}


def scripts() -> dict[str, Callable[..., Any]]:
    """Name -> function of (what wraps the class, output folder) that makes a trainer."""
    bert = partial(model, "BertForSequenceClassification", num_labels=3, **NO_DROPOUT)
    tagger = partial(model, "BertForTokenClassification", num_labels=4, **NO_DROPOUT)
    t5 = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16, "dropout_rate": 0, "decoder_start_token_id": 0}
    classes = tokens(labels=lambda choice, _: choice.randrange(3))
    tags = tokens(labels=lambda choice, length: [choice.randrange(4) for _ in range(length)])
    targets = tokens(labels=lambda choice, _: TOKENIZER(text(choice))["input_ids"])
    pad, mlm = transformers.DataCollatorWithPadding(TOKENIZER), transformers.DataCollatorForLanguageModeling
    pairs, completions = texts("prompt", "chosen", "rejected"), texts("prompt", "completion")
    marked = completions.add_column("label", [number % 3 > 0 for number in range(96)])
    scorer = partial(saved, "LlamaForSequenceClassification", num_labels=1)
    smooth = {"label_smoothing_factor": 0.1}
    return {
        "Trainer, classes": plain(bert, classes, pad),
        "Trainer, stream": plain(bert, classes.to_iterable_dataset(), pad),
        "Trainer, tags": plain(tagger, tags, transformers.DataCollatorForTokenClassification(TOKENIZER)),
        "Trainer, random masks": plain(
            partial(model, "BertForMaskedLM", **NO_DROPOUT), tokens(), mlm(TOKENIZER, mlm_probability=0.4)
        ),
        "Trainer, causal": plain(partial(model, "LlamaForCausalLM"), tokens(), mlm(TOKENIZER, mlm=False)),
        "Seq2SeqTrainer": plain(
            partial(model, "T5ForConditionalGeneration", **t5),
            targets,
            transformers.DataCollatorForSeq2Seq(TOKENIZER),
            "Seq2SeqTrainer",
        ),
        "SFTTrainer": of_trl("SFT", saved, texts("text"), max_length=64),
        "SFTTrainer, completions, LoRA": of_trl("SFT", saved, completions, adapter, max_length=64),
        "SFTTrainer, packing": of_trl("SFT", saved, texts("text"), max_length=16, packing=True),
        "SFTTrainer, NEFTune": of_trl("SFT", saved, texts("text"), max_length=64, neftune_noise_alpha=5.0),
        "SFTTrainer, label smoothing": of_trl("SFT", saved, texts("text"), max_length=64, **smooth),
        "DPOTrainer": of_trl("DPO", saved, pairs),
        "DPOTrainer, aot": of_trl("DPO", saved, pairs, loss_type="aot"),
        "RewardTrainer": of_trl("Reward", scorer, texts("chosen", "rejected")),
        "KTOTrainer": of_trl("KTO", saved, marked),
        "GRPOTrainer": of_trl(
            "GRPO",
            saved,
            texts("prompt"),
            lambda: {"reward_funcs": lambda completions, **_: [float(len(set(each))) for each in completions]},
            num_generations=6,
            max_completion_length=8,
        ),
        "SentenceTransformerTrainer": sentences,
    }


def run(script: Callable[..., Any], wrap: Any, fails: bool = False) -> tuple[Any, list[dict[str, float]], int]:
    """(trainer, the logs of its steps, the tokens that its collator made, the padding included).

    `fails`: the first forward pass of step 3 runs out of memory.
    """
    for state in (AcceleratorState, PartialState):
        state._reset_state()
    transformers.set_seed(0)
    trainer = script(wrap, tempfile.mkdtemp())
    made, failed = 0, False
    collate = trainer.get_batch_samples

    def counting(*given: Any) -> Any:
        nonlocal made
        found = collate(*given)
        made += sum(batch["input_ids"].numel() for batch in found[0] if isinstance(batch, Mapping) and "input_ids" in batch)
        return found

    def fail_once(*_: Any) -> None:
        nonlocal failed
        if trainer.state.global_step == 2 and torch.is_grad_enabled() and not failed:
            failed = True
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    if fails:
        trainer.model.register_forward_pre_hook(fail_once)
    elif wrap is as_it_is:
        trainer.get_batch_samples = counting
    trainer.train()
    assert failed == fails
    return trainer, [row for row in trainer.state.log_history if "loss" in row], made


def as_it_is(cls: type) -> type:
    return cls


def optimized(cls: type) -> Any:
    return hwopt.optimized(cls, "cpu", **OPTIONS)


def farthest(found: list[dict[str, float]], wanted: list[dict[str, float]], key: str) -> str:
    """The largest relative difference of `key` in a step."""
    assert len(found) == len(wanted) == ARGUMENTS["max_steps"]
    return f"{max(abs(a[key] - b[key]) / max(abs(b[key]), 1e-9) for a, b in zip(found, wanted, strict=True)):.1g}"


def micro_batches(trainer: Any) -> int:
    return sum(len(step.sizes) for step in trainer._run.steps)


def row_of(name: str, script: Callable[..., Any]) -> str:
    """The line of the table for one script."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        _, wanted, made = run(script, as_it_is)
        trainer, found, _ = run(script, optimized)
        law, steps = trainer._split.law, trainer._run.steps
        try:
            again, after, _ = run(script, optimized, fails=True)
            repeated = f"{micro_batches(again)} micro-batches, losses {farthest(after, wanted, 'loss')}"
        except DoesNotFitError:
            repeated = "ends, with what to change"
    if law.law is None:
        computed = f"whole: {law.reason}"
    else:
        columns = sum(step.computed for step in steps) * (2 if law.pairs else 1)
        computed = f"{columns:,} of {made:,} in {micro_batches(trainer)} micro-batches"
    differences = " | ".join(farthest(found, wanted, key) for key in ("loss", "grad_norm"))
    return f"| {name} | {CHANGED_LINES} | {differences} | {computed} | {repeated} |"


class Steps(transformers.TrainerCallback):
    """Keeps the counters of the pretend card after each step."""

    def __init__(self) -> None:
        self.counts: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        from pretend_cuda.counters import Counts, report

        self.counts.append(Counts(report()["counters"]))


def per_step(script: Callable[..., Any], wrap: Any) -> tuple[float, float]:
    """(launches, waits) of a step, averaged over the WARM steps before the last one."""
    for state in (AcceleratorState, PartialState):
        state._reset_state()
    transformers.set_seed(0)
    trainer = script(wrap, tempfile.mkdtemp())
    steps = Steps()
    trainer.add_callback(steps)
    trainer.train()
    first, last = steps.counts[-WARM - 2], steps.counts[-2]
    launches, waits = last["launch"] - first["launch"], last.waits - first.waits
    return launches / WARM, waits / WARM


WARM = 4
"""Counted steps: those before the last one, because evidence looks at the first and the last."""


def card_row(name: str, script: Callable[..., Any]) -> str:
    """The line of the table of launches and waits. The plan computes as many rows at once as the script."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        plain, changed = (per_step(script, wrap) for wrap in (as_it_is, partial(hwopt.optimized, profile="auto", **ON_CARD)))
    return f"| {name} | {plain[0]:,.0f} | {changed[0]:,.0f} | {plain[1]:.1f} | {changed[1]:.1f} |"


CARD_ARGUMENTS = {"use_cpu": False, "logging_steps": 100}
ON_CARD = {"batch": {"train": 6}, "precision": {"dtype": "fp32"}, "checkpointing": False, "adapter": False, "compile": False}


if __name__ == "__main__" and "--card" in sys.argv:
    transformers.logging.set_verbosity_error()
    ARGUMENTS |= CARD_ARGUMENTS
    print("| script | launches | with hwopt | waits | with hwopt |")
    print("|---|---|---|---|---|", flush=True)
    for name, script in scripts().items():
        if not sys.argv[2:] or name in sys.argv[2:]:
            try:
                print(card_row(name, script), flush=True)
            except RuntimeError as error:  # shapes that depend on values which the card does not compute
                print(f"{name}: {error}", file=sys.stderr)
elif __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    print("| script | changed lines | losses | norms | computed tokens | after an out-of-memory error in step 3 |")
    print("|---|---|---|---|---|---|", flush=True)
    for name, script in scripts().items():
        if not sys.argv[1:] or name in sys.argv[1:]:
            print(row_of(name, script), flush=True)
