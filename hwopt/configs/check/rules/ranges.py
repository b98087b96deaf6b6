"""Values out of range: an entry for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from hwopt.configs.check import TRAINERS, Facts, Finding, Level, rule
from hwopt.configs.check.rules.combinations import positive, several
from hwopt.configs.view import View, is_number


def fraction(value: Any) -> bool:
    return is_number(value) and 0 <= value < 1


class Range(NamedTuple):
    holds: Callable[[float], bool]
    text: str
    why: str
    usual: Any
    """What to write instead."""
    level: Level | None = None


FRACTION = "at least 0 and below 1"
MEAN = "At 1 the running mean of the gradients never changes; above 1 it diverges."
# fmt: off
RANGES: Mapping[str, Range] = {
    "num_train_epochs": Range(positive, "above 0", "The run ends before its first step.", 3),
    "learning_rate": Range(lambda value: 0 < value <= 1, "above 0 and at most 1",
        "At 0 no weight changes; above 1 training diverges.", 2e-5),
    "weight_decay": Range(lambda value: 0 <= value <= 1, "from 0 to 1",
        "Far more decay than AdamW's 0.01 pulls all weights to 0.", 0.01, "warning"),
    "adam_beta1": Range(fraction, FRACTION, MEAN, 0.9),
    "adam_beta2": Range(fraction, FRACTION, MEAN, 0.999),
    "adam_epsilon": Range(lambda value: 0 <= value <= 1, "from 0 to 1", "Updates are divided by it: nearly none is left.", 1e-8),
    "label_smoothing_factor": Range(fraction, FRACTION, "At 1 the labels have no effect.", 0.1),
    "lora_r": Range(lambda value: value >= 1, "at least 1", "PEFT stops: the adapter has no rank.", 16),
    "lora_alpha": Range(positive, "above 0", "alpha / r scales the adapter: at 0 it has no effect.", 16),
    "lora_dropout": Range(fraction, FRACTION, "At 1 the adapter gets no input.", 0.05),
    "per_device_train_batch_size": Range(lambda value: value >= 1, "at least 1", "The trainer stops: a batch has no rows.", 8),
    "gradient_accumulation_steps": Range(lambda value: value >= 1, "at least 1", "The trainer stops: a step has no rows.", 1),
    "max_grad_norm": Range(lambda value: value >= 0, "at least 0", "A negative norm turns the gradients round.", 1.0),
    "eval_fraction": Range(lambda value: 0 <= value < 1 or value == int(value) > 1, "below 1, or a number of rows",
        "The split stops: more rows are held out than there are.", 0.05),
    "dataloader_num_workers": Range(lambda value: value >= 0, "at least 0", "The data loader stops.", 2),
    "fp16.loss_scale": Range(lambda value: value == 0 or value >= 1, "0, which adapts it, and 1 or more",
        "A loss scale below 1 makes small gradients 0 in fp16; it should enlarge them.", 0),
    "save_total_limit": Range(positive, "1 or more", "The Trainer keeps all checkpoints at 0.", 2, "warning"),
    "warmup_steps": Range(lambda value: value >= 0, "at least 0", "TrainingArguments stops.", 0.06),
    "num_generations": Range(several, "2 or more", "TRL stops: the advantages of a prompt compare several completions.", 8),
    "zero_stage": Range(lambda value: value in range(4), "0, 1, 2 and 3", "DeepSpeed stops.", 3),
}
# fmt: on


LEAST_SCALE, MOST_SCALE = 1 / 16, 64  # of what recipes take: the QLoRA paper has 1/4, others up to 32


@rule("lora-scale", "warning", words=("lora_alpha",), source="LoRA, arXiv:2106.09685, section 4.1", tools=TRAINERS)
def lora_scale(view: View, facts: Facts) -> Iterator[Finding]:
    """An adapter whose output is scaled to almost nothing, or far too much."""
    alpha, rank = view.number("lora_alpha") or 0, view.number("lora_r") or 0
    by_root = any("rslora" in key for key in view.source.values)
    if rank and alpha and not by_root and not LEAST_SCALE <= alpha / rank <= MOST_SCALE:
        what = f"{view.spelled('lora_alpha')} is {alpha:g} with rank {rank:g}, which scales the adapter by {alpha / rank:.2g}."
        why = f"{'Training can diverge' if alpha > rank else 'The adapter learns slowly'}; 0.25 to 2 are usual."
        yield Finding("lora_alpha", what, why, view.line("lora_alpha", int(rank)))


@rule("out-of-range", "error", words=tuple(RANGES), source="torch, AdamW; PEFT, LoraConfig")
def out_of_range(view: View, facts: Facts) -> Iterator[Finding]:
    """A value that no run can use, such as 0 epochs, or that is far from all usual ones."""
    other = {
        "num_train_epochs": (view.number("max_steps") or 0) > 0 or view.value("do_train") is False,
        "weight_decay": "adam" not in str(view.value("optim", "adamw")),  # Lion's decay is larger: arXiv:2302.06675
        "lora_r": not view.is_on("use_peft"),  # some programs turn the adapter off by a rank of 0
        "lora_alpha": not view.is_on("use_peft") or view.tool == "llama-factory",  # there 0 is twice the rank
    }
    for word, (holds, text, why, usual, level) in RANGES.items():
        value: Any = found.value if (found := view.found(word)) else None
        if is_number(value) and value != -1 and not holds(value) and not other.get(word):  # -1 is "not set" in many programs
            what = f"{view.spelled(word)} is {value:g}; usable values are {text}."
            both = view.spelled(word).endswith("betas")  # one key for two words
            yield Finding(word, what, why, view.line(word, [0.9, 0.999] if both else usual), level)
