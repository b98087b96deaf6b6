"""Compare a launcher's environment variables with the plan: a contradiction is an error, a neutral default is accepted.

A bare `accelerate launch` sets defaults (`no`, `NO`, `False`, `1`), which contradict no plan.
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
from hwopt.text import truncate

NEUTRAL = frozenset({"", "0", "no", "false", "none"})
# fmt: off
ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": "deepspeed_plugin", "ACCELERATE_USE_FSDP": "fsdp_plugin",
    "ACCELERATE_USE_MEGATRON_LM": "megatron_lm_plugin", "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
}
"""Variable of Accelerate's launcher that asks for an engine -> the argument of `Accelerator` that selects the engine."""
AGAIN = "Change one of them, or write the file again: hwopt export --to"
FSDP_DEFAULTS = {
    "FSDP_VERSION": "1", "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_ACTIVATION_CHECKPOINTING": "false",
}
"""What the launcher sets with a bare `--use_fsdp`. For DeepSpeed it sets only what the user gives."""
# fmt: on
MAX_BYTES = 1_000_000
PRINTS_ONLY = ("steps_per_print", "wall_clock_breakdown", "dump_state")
"""Keys of DeepSpeed's JSON that change only its output."""


def refuse_contradictions(
    environment: Mapping[str, str], accelerator: Mapping[str, Any], hardware: Hardware, planned: Mapping[str, Any] = {}
) -> None:
    """Raise InputError if a variable contradicts the plan; the message names the variable and both values.

    `planned`: variable -> the value that a launcher sets for the plan's engine; for a variable that names a JSON file, the
    content of the file.
    """
    wanted: dict[str, tuple[Any, str]] = {
        "ACCELERATE_MIXED_PRECISION": (accelerator.get("mixed_precision", "no"), "mixed_precision"),
        "ACCELERATE_DYNAMO_BACKEND": ("no", "torch_compile"),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (1, "gradient_accumulation_steps"),
    }
    wanted |= {name: (False, key.removesuffix("_plugin")) for name, key in ENGINES.items() if key not in accelerator}
    if hardware.device_type == "cuda":
        wanted["ACCELERATE_USE_CPU"] = (False, "use_cpu")
    problems = Problems()
    for name, (value, word) in wanted.items():
        given = environment.get(name, "").strip()
        if given.lower() not in NEUTRAL and not agree(given, value):
            instead = f", or set {option}" if (option := option_for(word)) != word else ""
            what = f"{name}={given} contradicts the plan, in which it is {normalized(value)}."
            problems.add(f"{what} Leave it out of the launcher{instead}.")
    for name, value in planned.items():
        given = environment.get(name, "").strip()
        if given and isinstance(value, Mapping):
            for problem in contradictions(given, value):
                problems.add(f"{name}={problem} {AGAIN} deepspeed")
        elif given and given.lower() != FSDP_DEFAULTS.get(name) and not agree(given, value):
            problems.add(f"{name}={given} contradicts the plan, in which it is {normalized(value)}. {AGAIN} accelerate")
    problems.raise_if_any(InputError)


def contradictions(path: str, planned: Mapping[str, Any]) -> Iterator[str]:
    """The values in the JSON file at `path` that differ from `planned`; absent keys and "auto" are accepted."""
    try:
        config = json.loads(read_regular_file(Path(path), MAX_BYTES).decode())
        if not isinstance(config, dict):
            raise ValueError("expected a JSON object")
        known, given = dict(leaves(planned)), dict(leaves(config))
    except (InputError, ValueError, RecursionError) as error:
        yield f"{path} cannot be read as JSON ({error})."
        return
    for key, value in given.items():
        if value != "auto" and key not in PRINTS_ONLY and not agree(value, known.get(key)):
            planned_value = f"it is {normalized(known[key])}" if key in known else "this key does not exist"
            yield f"{path}: {key} is {truncate(value)}, which contradicts the plan, in which {planned_value}."


def leaves(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything in `table`; for a disabled section only its switch."""
    for key, value in table.items():
        if isinstance(value, dict):
            off = {switch: value[switch] for switch in ("enabled", "device") if value.get(switch) in (False, "none")}
            yield from leaves(off or value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def agree(given: Any, planned: Any) -> bool:
    """Whether both values mean the same in any spelling; off and zero equal an absent value."""
    ours, theirs = normalized(planned), normalized(given)
    if ours == theirs or (planned is None and not given):
        return True
    try:
        return float(ours) == float(theirs)
    except ValueError:
        return False


def normalized(value: Any) -> str:
    return "none" if value is None else str(value).strip().lower()
