"""Which rank this process is, as the launcher's environment variables say."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hwopt.errors import InputError
from hwopt.text import listing, truncate


def local_rank(environment: Mapping[str, str]) -> int:
    """This rank's number on its machine, and so the number of its device; 0 without a launcher."""
    return number_of(environment, "LOCAL_RANK", 0)


def rank_and_world(environment: Mapping[str, str]) -> tuple[int, int]:
    """(rank, number of ranks) as the launcher says, (0, 1) without one. Raises InputError for what no launcher says."""
    rank, world_size = number_of(environment, "RANK", 0), number_of(environment, "WORLD_SIZE", 1)
    if rank >= world_size:
        raise InputError(f"RANK={rank} does not go with WORLD_SIZE={world_size}: ranks count from 0. {BY_HAND}")
    return rank, world_size


def refuse_lost_ranks(environment: Mapping[str, str]) -> None:
    """Raise InputError where the ranks that the variables speak of could not meet."""
    _, world_size = rank_and_world(environment)
    number_of(environment, "LOCAL_RANK", 0)
    number_of(environment, "MASTER_PORT", 0, 2**16)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK") if not environment.get(name)]
    if world_size > 1 and missing:
        raise InputError(f"WORLD_SIZE={world_size}, but {listing(missing)} not set: the ranks could not meet. {BY_HAND}")


BY_HAND = "Let `accelerate launch` or --processes set them, or unset them"


def number_of(environment: Mapping[str, str], name: str, default: int, most: int = 1_000_000) -> int:
    """A variable that is a whole number below `most`. Raises InputError where it is something else."""
    text = environment.get(name, "") or str(default)
    if not re.fullmatch(r"[0-9]{1,7}", text) or int(text) >= most:
        raise InputError(f"{name}={truncate(text)}: expected a whole number below {most:,}. {BY_HAND}")
    return int(text)
