"""What a launcher put into the environment: an error where it contradicts the plan, nothing where it is neutral.

A bare `accelerate launch` exports defaults (`no`, `NO`, `False`, `1`); they contradict nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hwopt.errors import InputError, Problems
from hwopt.hardware import Hardware

NEUTRAL = frozenset({"", "0", "1", "no", "false", "none"})

ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": ("DeepSpeed", "deepspeed_plugin"),
    "ACCELERATE_USE_FSDP": ("FSDP", "fsdp_plugin"),
    "ACCELERATE_USE_MEGATRON_LM": ("Megatron-LM", "megatron_lm_plugin"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("a parallelism config", "parallelism_config"),
}
"""Variable -> what it asks for, and the option of the Accelerator that a plan has it by."""


def refuse_contradictions(environment: Mapping[str, str], accelerator: Mapping[str, Any], hardware: Hardware) -> None:
    """Raise InputError that names the variable and what the plan says instead."""
    problems = Problems()

    def asked(name: str) -> str:
        value = environment.get(name, "").strip().lower()
        return "" if value in NEUTRAL else value

    planned = accelerator.get("mixed_precision", "no")
    if (precision := asked("ACCELERATE_MIXED_PRECISION")) and precision != planned:
        problems.add(
            f"ACCELERATE_MIXED_PRECISION={precision} contradicts the plan, in which Accelerate's mixed precision is {planned!r}. "
            "Leave --mixed_precision out of the launcher, or set plugins.precision.dtype."
        )
    if backend := asked("ACCELERATE_DYNAMO_BACKEND"):
        problems.add(
            f"ACCELERATE_DYNAMO_BACKEND={backend} would compile outside of the plan. "
            "Leave --dynamo_backend out of the launcher, or use the plugin `compile`."
        )
    if steps := asked("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"):
        problems.add(
            f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={steps}: the plan cuts each step itself. "
            "Leave it out of the launcher, or set plugins.batch.accumulation."
        )
    for name, (engine, key) in ENGINES.items():
        if environment.get(name, "").strip().lower() in ("1", "true", "yes") and key not in accelerator:
            problems.add(
                f"{name}={environment[name]} asks for {engine}, which the plan does not have. Leave it out of the launcher."
            )
    if hardware.device_type == "cuda" and environment.get("ACCELERATE_USE_CPU", "").strip().lower() in ("1", "true", "yes"):
        problems.add(
            "ACCELERATE_USE_CPU is set, but the plan is for the CUDA device. Unset it, or hide the GPU: CUDA_VISIBLE_DEVICES="
        )
    problems.raise_if_any(InputError)


def local_rank(environment: Mapping[str, str]) -> int:
    """This rank's number on its machine, and so the number of its device; 0 without a launcher."""
    return int(environment.get("LOCAL_RANK", "0") or 0) if environment.get("LOCAL_RANK", "0").isdigit() else 0


def rank_and_world(environment: Mapping[str, str]) -> tuple[int, int]:
    """(rank, number of ranks) as the launcher says, (0, 1) without one."""
    try:
        return int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
    except ValueError as error:
        raise InputError(f"RANK and WORLD_SIZE must be whole numbers: {error}") from error
