"""The rank of this process, read from the environment variables of torchrun and Accelerate (RANK, WORLD_SIZE, LOCAL_RANK …)."""

from __future__ import annotations

from collections.abc import Mapping

from hwopt.errors import InputError
from hwopt.text import listing, truncate

SET_BY_LAUNCHER = "Let `accelerate launch` or --processes set it, or unset it"


def local_rank(environment: Mapping[str, str]) -> int:
    """Return the number of this rank on its host, which is also its device index; 0 without a launcher."""
    return environment_number(environment, "LOCAL_RANK", 0)


def local_ranks(environment: Mapping[str, str], world_size: int) -> int:
    """Return the number of ranks on this host: what the launcher says, else all of `world_size`."""
    return environment_number(environment, "LOCAL_WORLD_SIZE", world_size)


def rank_and_world(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return (rank, number of ranks); (0, 1) without a launcher. Raises InputError if a variable is not valid."""
    rank, world_size = environment_number(environment, "RANK", 0), environment_number(environment, "WORLD_SIZE", 1)
    if rank >= world_size:
        raise InputError(f"RANK={rank} is not below WORLD_SIZE={world_size}: ranks count from 0. {SET_BY_LAUNCHER}")
    return rank, world_size


def refuse_missing_rendezvous(environment: Mapping[str, str]) -> None:
    """Raise InputError if there are several ranks but not all variables through which they connect."""
    _, world_size = rank_and_world(environment)
    environment_number(environment, "LOCAL_RANK", 0)
    environment_number(environment, "MASTER_PORT", 0, 2**16)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK") if not environment.get(name)]
    if world_size > 1 and missing:
        raise InputError(f"WORLD_SIZE={world_size}, but not set: {listing(missing)}. The ranks cannot connect. {SET_BY_LAUNCHER}")


def environment_number(environment: Mapping[str, str], name: str, default: int, limit: int = 1_000_000) -> int:
    """Return a variable that holds a whole number below `limit`, or `default` if it is unset. Raises InputError otherwise."""
    text = environment.get(name, "") or str(default)
    if not text.isdecimal() or int(text) >= limit:
        raise InputError(f"{name}={truncate(text)}: expected a whole number below {limit:,}. {SET_BY_LAUNCHER}")
    return int(text)
