"""The largest micro-batch that fitted a card, recorded when a planned size ran out of memory, for the next plan.

There is one small JSON file per card, driver, recipe and length in the cache folder. Errors in reading or writing it are ignored.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

from hwopt.data.stores.token_store import fingerprint
from hwopt.hardware.torch_build import Driver, nvidia_driver
from hwopt.memory.forecast.lengths import Lengths, largest_micro_batch, lengths_of
from hwopt.memory.trace.tracer import trace_key
from hwopt.planning.plan import Plan


def limit_file(plan: Plan, lengths: Lengths, cache: Path) -> Path:
    """Return the file for this card, driver, recipe and length."""
    hardware = plan.hardware
    width = largest_micro_batch(plan, lengths.longest).width
    driver = nvidia_driver() if hardware.device_type == "cuda" else None
    version = (driver or Driver()).version
    card = [hardware.name, hardware.memory_gib, hardware.memory_limit_gib, hardware.source, version]
    any_rows = replace(plan, batch=replace(plan.batch, train=1))  # one file for every number of rows
    pool = plan.memory_spec.pooled_tokens
    return cache / "tried" / f"{fingerprint(card, pool, trace_key(any_rows, width, lengths.head))}.json"


def record_limit(plan: Plan, cache: Path, rows: int) -> None:
    """Record that micro-batches of `rows` rows fit and larger ones do not."""
    path = limit_file(plan, lengths_of(plan, cache), cache)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"rows": rows}), encoding="utf-8")


def recorded_limit(plan: Plan, lengths: Lengths, cache: Path) -> int | None:
    """Return the recorded number of rows; None if no planned size ran out of memory."""
    try:
        found = json.loads(limit_file(plan, lengths, cache).read_text(encoding="utf-8"))["rows"]
    except (OSError, ValueError, KeyError):
        return None
    return found if isinstance(found, int) and found > 0 else None
