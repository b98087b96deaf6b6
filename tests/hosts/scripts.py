"""Training scripts as their users write them, in functions: a tiny model, random rows, the losses and norms of each step."""

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

Steps = list[tuple[float, float]]
"""(loss, norm of the gradient) of each step."""
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def bert() -> Any:
    set_seed(0)
    config = BertConfig(vocab_size=200, hidden_dropout_prob=0, attention_probs_dropout_prob=0, num_labels=3, **SIZES)
    return BertForSequenceClassification(config)


def llama() -> Any:
    set_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=200, max_position_embeddings=64, **SIZES))


def t5() -> Any:
    set_seed(0)
    sizes = {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2, "d_kv": 16, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(vocab_size=200, decoder_start_token_id=0, **sizes))


def rows(count: int = 96) -> list[dict[str, Any]]:
    """Rows of 4 to 59 tokens, with a class."""
    choice = random.Random(0)
    return [
        {"input_ids": [choice.randrange(5, 200) for _ in range(choice.randrange(4, 60))], "label": choice.randrange(3)}
        for _ in range(count)
    ]


def padded(features: list[dict[str, Any]], classes: bool) -> dict[str, Any]:
    """A batch, padded to its longest row. The labels are classes, or the tokens."""
    width = max(len(row["input_ids"]) for row in features)
    ids, mask = (torch.zeros(len(features), width, dtype=torch.long) for _ in range(2))
    for number, row in enumerate(features):
        ids[number, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        mask[number, : len(row["input_ids"])] = 1
    labels = torch.tensor([row["label"] for row in features]) if classes else ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class Log(TrainerCallback):
    def __init__(self) -> None:
        self.steps: Steps = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **objects: Any) -> None:
        if "loss" in logs:
            self.steps.append((float(logs["loss"]), float(logs["grad_norm"])))


def arguments(folder: Path, kind: type[TrainingArguments] = TrainingArguments, **changes: Any) -> TrainingArguments:
    values: dict[str, Any] = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 4}
    values |= {"logging_steps": 1, "learning_rate": 1e-3, "report_to": [], "remove_unused_columns": False, "use_cpu": True}
    values |= {"save_strategy": "no", "disable_tqdm": True}
    return kind(str(folder), **(values | changes))


def train(
    cls: type,
    folder: Path,
    make: Callable[[], Any] = bert,
    resume: str | None = None,
    limit: int | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    collate: Any = None,
    data: Any = None,
    **changes: Any,
) -> tuple[Any, Steps]:
    """The trainer and its steps. A batch of more than `limit` tokens runs out of memory."""
    reset()
    model, log = make(), Log()
    if limit is not None:
        model.register_forward_pre_hook(memory_of(limit), with_kwargs=True)
    args = arguments(folder, **changes)
    trainer = cls(
        model=model,
        args=args,
        train_dataset=rows() if data is None else data,
        eval_dataset=rows(16),
        data_collator=collate or (lambda features: padded(features, classes=model.config.model_type not in ("llama", "t5"))),
        callbacks=[log, *callbacks],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, log.steps


def reset() -> None:
    """Forget what other packages keep of the script before: a script has a process of its own.

    That is the precision and the ranks of its Accelerator, and the weights whose 8-bit states it turned off (the Trainer does so
    for embeddings), which bitsandbytes knows by their place in the optimizer alone.
    """
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    if "bitsandbytes" in sys.modules:
        sys.modules["bitsandbytes"].optim.GlobalOptimManager.get_instance().initialize()


def memory_of(limit: int) -> Callable[..., None]:
    def refuse(module: Any, positional: Any, named: Any) -> None:
        if torch.is_grad_enabled() and named["input_ids"].numel() > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    return refuse


def farthest(found: Steps, wanted: Steps) -> float:
    """The largest relative difference of a loss or a norm."""
    assert len(found) == len(wanted) > 0
    return max(abs(a - b) / abs(b) for pair, other in zip(found, wanted, strict=True) for a, b in zip(pair, other, strict=True))
