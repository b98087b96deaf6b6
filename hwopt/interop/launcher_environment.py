"""What a launcher put into the environment: an error where it contradicts the plan, nothing where it is neutral.

A bare `accelerate launch` exports defaults (`no`, `NO`, `False`, `1`); they contradict nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hwopt.config.aliases import option_for
from hwopt.errors import InputError, Problems
from hwopt.hardware.device import Hardware
from hwopt.system.paths import read_regular_file
from hwopt.text import listing, truncate

NEUTRAL = frozenset({"", "0", "1", "no", "false", "none"})

ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": ("DeepSpeed", "deepspeed_plugin"),
    "ACCELERATE_USE_FSDP": ("FSDP", "fsdp_plugin"),
    "ACCELERATE_USE_MEGATRON_LM": ("Megatron-LM", "megatron_lm_plugin"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("a parallelism config", "parallelism_config"),
}
"""Variable of Accelerate's launcher -> the engine that it requests, and the argument of `Accelerator` that selects the engine."""

FSDP_DEFAULTS = {
    "FSDP_VERSION": "1",
    "FSDP_SHARDING_STRATEGY": "full_shard",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
}
"""What the launcher exports with a bare `--use_fsdp`; for DeepSpeed it exports nothing that it was not told."""

MAX_BYTES = 1_000_000
"""Of DeepSpeed's JSON."""
PRINTS_ONLY = ("steps_per_print", "wall_clock_breakdown", "dump_state")
"""Keys of DeepSpeed's JSON that change nothing but what is on the screen."""


SWITCHES = (
    "ACCELERATE_USE_CPU",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_CPU_AFFINITY",
    "ACCELERATE_DEBUG_MODE",
    "ACCELERATE_ENABLE_RICH",
    "FORK_LAUNCHED",
    "USE_TORCH_XLA",
)
"""Variables in which Accelerate wants one of these words, some of them as soon as it is imported."""
YES, NO = ("1", "true", "yes", "on", "y", "t"), ("0", "false", "no", "off", "n", "f")


def refuse_odd_switches(environment: Mapping[str, str]) -> None:
    """Raise InputError for variables that are neither on nor off, before Accelerate stumbles over them."""
    problems = Problems()
    for name in SWITCHES:
        if name in environment and environment[name].lower() not in (*YES, *NO):
            problems.add(
                f"{name}={truncate(environment[name])}: expected one of {listing(YES)}, or of {listing(NO)}; set one, or unset it"
            )
    problems.raise_if_any(InputError)


def refuse_contradictions(
    environment: Mapping[str, str],
    accelerator: Mapping[str, Any],
    hardware: Hardware,
    planned: Mapping[str, Any] | None = None,
) -> None:
    """Raise InputError that names the variable and what the plan says instead.

    `planned`: variable -> the value that a launcher exports for the engine of the plan; for a variable that names a JSON file,
    what such a file holds.
    """
    problems = Problems()

    def asked(name: str) -> str:
        value = environment.get(name, "").strip().lower()
        return "" if value in NEUTRAL else value

    mixed = accelerator.get("mixed_precision", "no")
    if (precision := asked("ACCELERATE_MIXED_PRECISION")) and precision != mixed:
        problems.add(
            f"ACCELERATE_MIXED_PRECISION={precision} contradicts the plan, in which Accelerate's mixed precision is {mixed!r}. "
            f"Leave --mixed_precision out of the launcher, or set {option_for('mixed_precision')}."
        )
    if backend := asked("ACCELERATE_DYNAMO_BACKEND"):
        problems.add(
            f"ACCELERATE_DYNAMO_BACKEND={backend} would compile outside of the plan. "
            f"Leave --dynamo_backend out of the launcher, or set {option_for('torch_compile')}."
        )
    if steps := asked("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"):
        problems.add(
            f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={steps}: the plan cuts each step itself. "
            f"Leave it out of the launcher, or set {option_for('gradient_accumulation_steps')}."
        )
    for name, (engine, key) in ENGINES.items():
        if environment.get(name, "").strip().lower() in ("1", "true", "yes") and key not in accelerator:
            option = option_for(engine.lower())
            problems.add(
                f"{name}={environment[name]} asks for {engine}, which the plan does not have. Leave it out of the launcher"
                + (f", or set {option}." if option != engine.lower() else ".")
            )
    for name, value in (planned or {}).items():
        given = environment.get(name, "").strip()
        if given and isinstance(value, Mapping):
            for problem in differences(given, value):
                problems.add(f"{name}={problem}")
        elif given and given.lower() != FSDP_DEFAULTS.get(name) and not agree(given, value):
            problems.add(
                f"{name}={given} contradicts the plan, in which it is {spelled(value)}. "
                "Change one of them, or write the launcher's file anew: hwopt export --to accelerate"
            )
    if hardware.device_type == "cuda" and environment.get("ACCELERATE_USE_CPU", "").strip().lower() in ("1", "true", "yes"):
        problems.add(
            "ACCELERATE_USE_CPU is set, but the plan is for the CUDA device. Unset it, or hide the GPU: CUDA_VISIBLE_DEVICES="
        )
    problems.raise_if_any(InputError)


def differences(path: str, planned: Mapping[str, Any]) -> Iterator[str]:
    """What the JSON file at `path` says otherwise than `planned`; what it leaves out or to "auto" is no contradiction."""
    try:
        config = json.loads(read_regular_file(Path(path), MAX_BYTES).decode())
        if not isinstance(config, dict):
            raise ValueError("it holds no object")
        known, given = dict(leaves(planned)), dict(leaves(config))
    except (InputError, ValueError, RecursionError) as error:
        yield f"{path} cannot be read as JSON ({error}). Write it anew: hwopt export --to deepspeed"
        return
    for key, value in given.items():
        if value == "auto" or key in PRINTS_ONLY or agree(value, known.get(key)):
            continue
        said = f"it is {spelled(known[key])}" if key in known else "there is no such thing"
        yield (
            f"{path}: {key} is {truncate(value)}, which contradicts the plan, in which {said}. "
            "Change one of them, or write the file anew: hwopt export --to deepspeed"
        )


def leaves(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything in `table`; of what is switched off, the switch alone."""
    for key, value in table.items():
        if isinstance(value, dict):
            off = {switch: value[switch] for switch in ("enabled", "device") if value.get(switch) in (False, "none")}
            yield from leaves(off or value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def agree(given: Any, planned: Any) -> bool:
    """Whether both mean the same, however they are spelled; what is off or zero agrees with what is not there."""
    ours, theirs = spelled(planned), spelled(given)
    if ours == theirs or (planned is None and not given):
        return True
    try:
        return float(ours) == float(theirs)
    except ValueError:
        return False


def spelled(value: Any) -> str:
    return "none" if value is None else str(value).strip().lower()
