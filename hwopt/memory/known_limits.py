"""What a card really held: rows that the planner chose and a run then tried, kept for the next run on the same card.

One small JSON file a card, driver, recipe and length under the cache folder; whoever cannot read or write it does without.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

from hwopt.data.token_store import fingerprint
from hwopt.hardware.device import Hardware
from hwopt.memory.lengths import Lengths, largest_micro_batch
from hwopt.memory.tracer import identity
from hwopt.planning.plan import Plan


def driver(hardware: Hardware) -> str:
    """The version of NVIDIA's driver; "" where there is none to ask."""
    if hardware.device_type != "cuda":
        return ""
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return ""


def place(plan: Plan, lengths: Lengths, cache: Path) -> Path:
    hardware = plan.hardware
    _, width = largest_micro_batch(plan, lengths.longest)
    card = [hardware.name, hardware.memory_gib, hardware.memory_limit_gib, hardware.source, driver(hardware)]
    any_rows = replace(plan, batch=replace(plan.batch, train=1))  # the rows are what is asked for
    return cache / "tried" / f"{fingerprint(card, identity(any_rows, width, lengths.labels))}.json"


def remember(plan: Plan, lengths: Lengths, cache: Path, rows: int) -> None:
    """Micro-batches of `rows` rows went through, and larger ones did not."""
    path = place(plan, lengths, cache)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"rows": rows}), encoding="utf-8")


def max_rows(plan: Plan, lengths: Lengths, cache: Path) -> int | None:
    """The most rows that this card took the last time; None where it took all that were planned, or nobody tried."""
    try:
        found = json.loads(place(plan, lengths, cache).read_text(encoding="utf-8"))["rows"]
    except (OSError, ValueError, KeyError):
        return None
    return found if isinstance(found, int) and found > 0 else None
