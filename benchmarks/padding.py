"""C2, tokens: what a step of 16 x 8 computes on real lengths, cut by length against random micro-batches of 16.

    python benchmarks/padding.py TOKENIZER FILE --text premise --text hypothesis [--max-length 512]

TOKENIZER is a hub name or folder; FILE a csv, tsv or jsonl.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
from transformers import AutoTokenizer

from hwopt.randomness import shuffled
from hwopt.registry import Registry
from hwopt.tables import columns, read_table


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("tokenizer")
    arguments.add_argument("file")
    arguments.add_argument("--text", action="append", required=True)
    arguments.add_argument("--max-length", type=int, default=512)
    options = arguments.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    texts = columns(read_table(options.file), options.text, options.file)
    lengths = np.array([len(ids) for ids in tokenizer(*texts, truncation=True, max_length=options.max_length)["input_ids"]])
    import sys

    module = sys.modules[Registry().plugin("cut").__module__]
    order = shuffled(lengths, 0, 0)
    real = plain = cut = 0
    for begin in range(0, len(order) - 127, 128):
        step = lengths[order[begin : begin + 128]].tolist()
        real += sum(step)
        plain += module.padded_tokens(step, [range(at, at + 16) for at in range(0, 128, 16)])
        cut += module.padded_tokens(step, module.cut_by_length(step, 16, tokens=None, overhead_tokens=256))
    figures = {"real/random": real / plain, "real/cut": real / cut, "fewer tokens": plain / cut}
    print(json.dumps({"file": options.file, "samples": len(lengths)} | {k: round(v, 3) for k, v in figures.items()}))


if __name__ == "__main__":
    main()
