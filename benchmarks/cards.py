"""What `--profile auto` chooses for many cards, and how much of their memory the forecast uses: the table of docs/cards.md.

    python benchmarks/cards.py [--write]

BERT-base with random weights, texts of 192 tokens. Memory and capability as CUDA reports them. Needs no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

from hwopt import api
from hwopt.hardware.device import described

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cards.md"
BERT = 'model.config={ model_type = "bert", vocab_size = 30522 }'
CARDS = [
    ("Tesla T4", (7, 5), 14.56),
    ("NVIDIA GeForce RTX 2080 Ti", (7, 5), 10.75),
    ("NVIDIA GeForce RTX 3060", (8, 6), 11.76),
    ("NVIDIA GeForce RTX 3060 Ti", (8, 6), 7.66),
    ("NVIDIA GeForce RTX 3070", (8, 6), 7.78),
    ("NVIDIA GeForce RTX 3070 Laptop GPU", (8, 6), 7.66),
    ("NVIDIA GeForce RTX 3080", (8, 6), 9.65),
    ("NVIDIA GeForce RTX 3080", (8, 6), 11.66),
    ("NVIDIA GeForce RTX 3080 Ti", (8, 6), 11.66),
    ("NVIDIA GeForce RTX 3090", (8, 6), 23.7),
    ("NVIDIA GeForce RTX 3090 Ti", (8, 6), 23.7),
    ("NVIDIA RTX A6000", (8, 6), 47.4),
    ("NVIDIA A10G", (8, 6), 22.19),
    ("NVIDIA A100-SXM4-40GB", (8, 0), 39.4),
    ("NVIDIA A100-SXM4-40GB MIG 1g.10gb", (8, 0), 9.5),
    ("NVIDIA A100-SXM4-80GB", (8, 0), 79.3),
    ("NVIDIA GeForce RTX 4060", (8, 9), 7.63),
    ("NVIDIA GeForce RTX 4060 Laptop GPU", (8, 9), 7.63),
    ("NVIDIA GeForce RTX 4060 Ti", (8, 9), 15.6),
    ("NVIDIA GeForce RTX 4070", (8, 9), 11.6),
    ("NVIDIA GeForce RTX 4070 SUPER", (8, 9), 11.6),
    ("NVIDIA GeForce RTX 4070 Ti", (8, 9), 11.6),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", (8, 9), 15.6),
    ("NVIDIA GeForce RTX 4080", (8, 9), 15.6),
    ("NVIDIA GeForce RTX 4080 SUPER", (8, 9), 15.6),
    ("NVIDIA GeForce RTX 4090", (8, 9), 23.64),
    ("NVIDIA L4", (8, 9), 22.03),
    ("NVIDIA L40S", (8, 9), 44.4),
    ("NVIDIA RTX 6000 Ada Generation", (8, 9), 47.4),
    ("NVIDIA H100 80GB HBM3", (9, 0), 79.2),
    ("NVIDIA H200", (9, 0), 139.8),
    ("NVIDIA B200", (10, 0), 178.4),
    ("NVIDIA GeForce RTX 5060 Ti", (12, 0), 15.5),
    ("NVIDIA GeForce RTX 5070", (12, 0), 11.5),
    ("NVIDIA GeForce RTX 5070 Ti", (12, 0), 15.5),
    ("NVIDIA GeForce RTX 5080", (12, 0), 15.5),
    ("NVIDIA GeForce RTX 5090", (12, 0), 31.36),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 94.97),
    ("NVIDIA GB10", (12, 1), 119.7),
    ("AMD Radeon RX 7900 XTX", None, 23.98),
    ("AMD Instinct MI300X", None, 191.98),
]
AMD = {"AMD Radeon RX 7900 XTX": "gfx1100", "AMD Instinct MI300X": "gfx942"}


def row(name: str, capability: tuple[int, int] | None, gib: float) -> str:
    card = described(name, capability, gib, amd=AMD.get(name, ""))
    card = replace(card, source="detected", unified_memory=name == "NVIDIA GB10")
    with mock.patch("hwopt.planning.request.detect", return_value=card):
        given = [BERT, "data.train=none.csv", "data.max_length=192"]
        plan = api.plan("auto", assignments=given, gains=False)
    memory = plan.memory
    assert memory is not None, "planned with memory"
    usable = memory.free_gib - memory.reserve_gib
    batch = f"{plan.batch.train} x {plan.batch.accumulation(1)}"
    use = f"{memory.highest_gib:.1f} of {usable:.1f} GiB ({memory.highest_gib / usable:.0%})"
    seconds = (
        "not predicted" if memory.time is None else f"{memory.time.step[0] * 1000:,.0f} to {memory.time.step[1] * 1000:,.0f} ms"
    )
    return f"| {name}, {gib:g} GiB | `{plan.profile.name}` | {batch} | {use} | {seconds} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the table of docs/cards.md")
    write = parser.parse_args().write
    lines = ["| card | profile | micro-batch x number | forecast of the memory | forecast of a step |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for card in CARDS:
            lines.append(row(*card))
            print(lines[-1], flush=True)
    if write:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(text[: text.index("| card |")] + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
