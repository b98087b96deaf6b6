"""The pretend cards of the tests and benchmarks. CUDA reports less memory than the name of a card says: about these sizes."""

from __future__ import annotations

CARDS = {
    "t4": "Tesla T4:7.5:15096",
    "rtx3070": "NVIDIA GeForce RTX 3070:8.6:7960",
    "rtx3090": "NVIDIA GeForce RTX 3090:8.6:24268",
    "rtx3060": "NVIDIA GeForce RTX 3060:8.6:12041",
    "rtx4060": "NVIDIA GeForce RTX 4060:8.9:7940",
    "rtx4090": "NVIDIA GeForce RTX 4090:8.9:24207",
    "rtx5090": "NVIDIA GeForce RTX 5090:12.0:32106",
    "a10": "NVIDIA A10:8.6:22588",
    "l4": "NVIDIA L4:8.9:22558",
    "a100_40": "NVIDIA A100-SXM4-40GB:8.0:40326",
    "a100": "NVIDIA A100-SXM4-80GB:8.0:81154",
    "h100": "NVIDIA H100 80GB HBM3:9.0:81110",
    "h200": "NVIDIA H200:9.0:143155",
}
"""Name -> "NAME:COMPUTE CAPABILITY:MIB"."""


def cards_of(text: str) -> str:
    """The cards of a comma-separated list, in which each entry is a name of CARDS or itself NAME:COMPUTE CAPABILITY:MIB.

    Raises ValueError for an entry that is neither.
    """
    found = []
    for entry in text.split(","):
        card = CARDS.get(entry, entry)
        if card.count(":") != 2:
            raise ValueError(f"unknown pretend card {entry!r}: expected NAME:COMPUTE CAPABILITY:MIB or one of {', '.join(CARDS)}")
        found.append(card)
    return ",".join(found)
