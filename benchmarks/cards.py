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
from hwopt.config.profile_files import profile_files
from hwopt.hardware.device import Hardware, described
from hwopt.planning.inputs import Inputs

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cards.md"
BERT = 'model.config={ model_type = "bert", vocab_size = 30522 }'
OTHERS = [
    ("GeForce RTX 2080 Ti", (7, 5), 10.75),
    ("GeForce RTX 3060 Ti", (8, 6), 7.66),
    ("GeForce RTX 3070 Laptop GPU", (8, 6), 7.66),
    ("GeForce RTX 3080", (8, 6), 9.65),
    ("GeForce RTX 3080", (8, 6), 11.66),
    ("GeForce RTX 3080 Ti", (8, 6), 11.66),
    ("GeForce RTX 3090 Ti", (8, 6), 23.7),
    ("NVIDIA RTX A6000", (8, 6), 47.4),
    ("NVIDIA A10G", (8, 6), 22.19),
    ("NVIDIA A100-SXM4-40GB MIG 1g.10gb", (8, 0), 9.5),
    ("GeForce RTX 4060 Laptop GPU", (8, 9), 7.63),
    ("GeForce RTX 4060 Ti", (8, 9), 15.6),
    ("GeForce RTX 4070", (8, 9), 11.6),
    ("GeForce RTX 4070 SUPER", (8, 9), 11.6),
    ("GeForce RTX 4070 Ti", (8, 9), 11.6),
    ("GeForce RTX 4070 Ti SUPER", (8, 9), 15.6),
    ("GeForce RTX 4080", (8, 9), 15.6),
    ("GeForce RTX 4080 SUPER", (8, 9), 15.6),
    ("NVIDIA L40S", (8, 9), 44.4),
    ("NVIDIA RTX 6000 Ada Generation", (8, 9), 47.4),
    ("NVIDIA B200", (10, 0), 178.4),
    ("GeForce RTX 5060 Ti", (12, 0), 15.5),
    ("GeForce RTX 5070", (12, 0), 11.5),
    ("GeForce RTX 5070 Ti", (12, 0), 15.5),
    ("GeForce RTX 5080", (12, 0), 15.5),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 94.97),
    ("NVIDIA GB10", (12, 1), 119.7),
]
"""Cards that no profile is named after: (name, compute capability, GiB)."""


def cards() -> list[Hardware]:
    """The card of each profile, and OTHERS, by compute capability; AMD's last."""
    own = (profile.card for profile in map(Inputs().profile, profile_files()) if profile.card.match)
    found = [described(card.match[0], card.capability, card.memory_gib or 0.0, amd=card.amd or "") for card in own]
    found += [described(*card) for card in OTHERS]
    different = {(card.name, card.memory_gib): card for card in found}
    return sorted(different.values(), key=lambda card: (card.compute_capability or (99, 0), card.name, card.memory_gib))


def row(card: Hardware) -> str:
    card = replace(card, source="detected", unified_memory=card.name == "NVIDIA GB10")
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
    return f"| {card.name}, {card.memory_gib:g} GiB | `{plan.profile.name}` | {batch} | {use} | {seconds} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the table of docs/cards.md")
    write = parser.parse_args().write
    lines = ["| card | profile | micro-batch x number | forecast of the memory | forecast of a step |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for card in cards():
            lines.append(row(card))
            print(lines[-1], flush=True)
    if write:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(text[: text.index("| card |")] + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
