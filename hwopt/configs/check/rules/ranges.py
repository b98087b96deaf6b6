"""Values outside of what is sensible: one line for each word."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from hwopt.configs.check.contract import TRAINERS, Facts, Finding, Level, rule
from hwopt.configs.view import View


class Range(NamedTuple):
    """The values that a word may have."""

    holds: Callable[[float], bool]
    text: str
    why: str
    usual: Any
    """What to write instead."""
    level: Level | None = None


def fraction(value: float) -> bool:
    return 0 <= value < 1


def one_or_more(value: float) -> bool:
    return value >= 1


MEAN = "At 1 the running mean of the gradients never changes; above 1 it diverges."
RANGES: Mapping[str, Range] = {
    "num_train_epochs": Range(lambda value: value > 0, "above 0", "The run ends before its first step.", 3),
    "learning_rate": Range(
        lambda value: 0 < value <= 1, "above 0 and at most 1", "At 0 no weight changes; above 1 training diverges.", 2e-5
    ),
    "weight_decay": Range(
        lambda value: 0 <= value <= 1, "from 0 to 1", "Far more decay than AdamW's 0.01 pulls all weights to 0.", 0.01, "warning"
    ),
    "adam_beta1": Range(fraction, "at least 0 and below 1", MEAN, 0.9),
    "adam_beta2": Range(fraction, "at least 0 and below 1", MEAN, 0.999),
    "adam_epsilon": Range(lambda value: 0 <= value <= 1, "from 0 to 1", "Updates are divided by it: nearly none is left.", 1e-8),
    "label_smoothing_factor": Range(fraction, "at least 0 and below 1", "At 1 the labels have no effect.", 0.1),
    "lora_r": Range(one_or_more, "at least 1", "PEFT stops: the adapter has no rank.", 16),
    "lora_alpha": Range(lambda value: value > 0, "above 0", "alpha / r scales the adapter: at 0 it has no effect.", 16),
    "lora_dropout": Range(fraction, "at least 0 and below 1", "At 1 the adapter gets no input.", 0.05),
    "per_device_train_batch_size": Range(one_or_more, "at least 1", "The trainer stops: a batch has no rows.", 8),
    "gradient_accumulation_steps": Range(one_or_more, "at least 1", "The trainer stops: a step has no micro-batch.", 1),
}


@rule(
    "out-of-range",
    "error",
    words=tuple(RANGES),
    source="Loshchilov and Hutter 2019 (AdamW); torch, AdamW; PEFT, LoraConfig",
    tools=(*TRAINERS, "hwopt-job", "hwopt-profile"),
)
def out_of_range(view: View, facts: Facts) -> Iterator[Finding]:
    """A value that no run can use, such as 0 epochs, or that is far from all usual ones."""
    other = {
        "num_train_epochs": (view.number("max_steps") or 0) > 0 or view.value("do_train") is False,
        "weight_decay": "adam" not in str(view.value("optim", "adamw")),  # Lion's decay is larger: arXiv:2302.06675
        "lora_r": not view.is_on("use_peft"),  # some programs turn the adapter off by a rank of 0
        "lora_alpha": not view.is_on("use_peft") or view.tool == "llama-factory",  # there 0 is twice the rank
    }
    for word, (holds, text, why, usual, level) in RANGES.items():
        value = view.number(word)
        if value is not None and value != -1 and not holds(value) and not other.get(word):  # -1 is "not set" in many programs
            what = f"{view.spelled(word)} is {value:g}; usable values are {text}."
            yield Finding(word, what, why, view.line(word, usual), level)
