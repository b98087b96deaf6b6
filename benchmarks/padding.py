"""Count the tokens that steps of 16 x 8 samples compute on real lengths, by method, and measure the time.

    python benchmarks/padding.py TOKENIZER FILE --text premise --text hypothesis [--max-length 512] [--time 20]

TOKENIZER is a Hub name or folder. FILE is csv, tsv or jsonl. Methods:

    random            micro-batches of 16 samples in random order
    trainer           transformers' own grouping by length, micro-batches of 16
    length_batching, grouped + length_batching, packed    hwopt's plugins

"real" is the fraction of the computed tokens that are not padding. --time runs forward and backward passes of that many steps of
each method, spread over the epoch, with the model of TOKENIZER. It prints real tokens per second relative to `trainer`: median,
minimum and maximum of 5 interleaved rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer
from transformers.trainer_pt_utils import get_length_grouped_indices

from hwopt.data.sources.tables import read_rows, text_columns
from hwopt.plugin.registry import Registry
from hwopt.training.randomness import shuffled

ROWS, STEP, ROUNDS = 16, 128, 5
Layout = list[list[list[int]]]
"""One step: micro-batches of rows, each a list of the lengths of its documents."""


def module_of(plugin: str) -> Any:
    """The module of a built-in plugin."""
    return sys.modules[Registry().plugin(plugin).__module__]


def unsorted(step: Sequence[int]) -> Layout:
    """Micro-batches of 16 samples in the given order."""
    return [[[length] for length in step[at : at + ROWS]] for at in range(0, len(step), ROWS)]


def by_length(step: Sequence[int]) -> Layout:
    """Micro-batches as the plugin length_batching makes them."""
    groups = module_of("length_batching").cut_by_length(step, ROWS, tokens=None, overhead_tokens=256)
    return [[[step[index]] for index in group] for group in groups]


def packed(step: Sequence[int]) -> Layout:
    """Micro-batches as the plugin pack makes them: rows of twice the longest sample, with the tokens of 16 longest samples."""
    width = 2 * max(step)
    rows = [[step[index] for index in row] for row in module_of("pack").pack_rows(step, width)]
    size = ROWS * max(step) // width
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def layouts(lengths: np.ndarray) -> dict[str, list[Layout]]:
    """Every whole step of an epoch by each method. Each method sees every sample once."""
    orders = {
        "random": shuffled(lengths, 0, 0),
        "trainer": get_length_grouped_indices(lengths.tolist(), STEP, generator=torch.Generator().manual_seed(0)),
        "grouped": module_of("group_lengths").grouped(lengths, 0, 0, STEP),
    }
    methods = {
        "random": ("random", unsorted),
        "trainer": ("trainer", unsorted),
        "length_batching": ("random", by_length),
        "grouped + length_batching": ("grouped", by_length),
        "packed": ("random", packed),
    }
    whole = range(0, len(lengths) // STEP * STEP, STEP)
    return {
        name: [layout(lengths[orders[order][at : at + STEP]].tolist()) for at in whole]
        for name, (order, layout) in methods.items()
    }


def tokens(steps: list[Layout]) -> tuple[int, int]:
    """The real and the computed tokens of `steps`."""
    parts = [[sum(row) for row in part] for step in steps for part in step]
    return sum(map(sum, parts)), sum(len(part) * max(part) for part in parts)


def seconds(model: Any, steps: list[Layout]) -> float:
    """The seconds of the forward and backward passes. Packed documents attend only to themselves."""
    began = time.perf_counter()
    for part in (part for step in steps for part in step):
        width = max(map(sum, part))
        numbers = torch.zeros(len(part), width, dtype=torch.long)
        for document_numbers, row in zip(numbers, part, strict=True):
            document_numbers[: sum(row)] = torch.repeat_interleave(torch.arange(1, len(row) + 1), torch.tensor(row))
        mask = numbers.ne(0).long()
        if any(len(row) > 1 for row in part):
            mask = (numbers[:, None, :, None] == numbers[:, None, None, :]) & numbers.ne(0)[:, None, None, :]
            mask |= torch.eye(width, dtype=torch.bool)  # padding attends to itself, so that no row of the softmax is empty
        output = model(input_ids=torch.ones_like(numbers), attention_mask=mask).last_hidden_state
        output.mean().backward()
        model.zero_grad(set_to_none=True)
    return time.perf_counter() - began


def speeds(model: Any, methods: dict[str, list[Layout]], number: int) -> dict[str, Any]:
    """Real tokens per second of `number` steps of each method, relative to `trainer`: [median, minimum, maximum]."""
    model.train()
    chosen = {name: [steps[at] for at in np.linspace(0, len(steps) - 1, number).astype(int)] for name, steps in methods.items()}
    chosen["trainer again"] = chosen["trainer"]
    for steps in chosen.values():
        seconds(model, steps[:1])
    names, rounds = list(chosen), []
    for turn in range(ROUNDS):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        rounds.append({name: tokens(chosen[name])[0] / seconds(model, chosen[name]) for name in order})
    ratios = {name: [each[name] / each["trainer"] for each in rounds] for name in names if name != "trainer"}
    return {name: [round(f(found), 2) for f in (statistics.median, min, max)] for name, found in ratios.items()}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("tokenizer")
    arguments.add_argument("file")
    arguments.add_argument("--text", action="append", required=True)
    arguments.add_argument("--max-length", type=int, default=512)
    arguments.add_argument("--time", type=int, default=0, metavar="STEPS")
    options = arguments.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    texts = text_columns(read_rows(options.file), options.text)
    lengths = np.array([len(ids) for ids in tokenizer(*texts, truncation=True, max_length=options.max_length)["input_ids"]])
    if len(lengths) < STEP:
        arguments.error(f"{options.file} has {len(lengths)} samples, less than a step of {STEP}")
    methods = layouts(lengths)
    counted = {name: tokens(steps) for name, steps in methods.items()}
    print(json.dumps({"file": options.file, "samples": len(lengths), "torch": torch.__version__}))
    print(json.dumps({"real": {name: round(real / computed, 3) for name, (real, computed) in counted.items()}}))
    _, plain = counted["random"]
    print(json.dumps({"fewer tokens than random": {name: round(plain / computed, 2) for name, (_, computed) in counted.items()}}))
    if options.time:
        model = AutoModel.from_pretrained(options.tokenizer, dtype=torch.float32)
        print(json.dumps({"real tokens a second over trainer": speeds(model, methods, options.time)}))


if __name__ == "__main__":
    main()
