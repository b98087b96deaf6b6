"""Plans as the YAML of `accelerate config`, as the environment variables of its launcher, and as DeepSpeed's JSON.

`accelerate launch --config_file FILE -m hwopt run …` makes the plan that the file was written from. The names come from
accelerate/commands/config and accelerate/utils/launch.py. The JSON is the engine's configuration in a run, for Accelerate
(`deepspeed_config_file`), `transformers.TrainingArguments(deepspeed=FILE)` and DeepSpeed. Its `gradient_accumulation_steps`
is always 1: the loop tells the engine which micro-batch is the last of a step.

In a run, a variable of the launcher that contradicts the plan is an error. The defaults that a bare `accelerate launch` sets
(`no`, `NO`, `False`, `1`) contradict no plan.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from hwopt.config.aliases import option_for
from hwopt.errors import InputError, Problems
from hwopt.hardware.device import Hardware
from hwopt.planning.plan import Plan
from hwopt.plugin.guard import plugin_guard
from hwopt.system.paths import read_regular_file
from hwopt.text import truncate
from hwopt.training.build import option_value

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


FIRST_NODE = "ADDRESS_OF_THE_FIRST_NODE"
"""Placeholder for an address that the user fills in."""
DEEPSPEED_VARIABLES = {
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
}
"""Key of `deepspeed_config` -> the environment variable that the launcher sets."""
LAUNCHERS_WORDS = ("ACCELERATE_", "FSDP_")
"""Prefixes of the environment variables from which Accelerate's plugins take their defaults."""


def launcher_config(plan: Plan, nodes: int = 1, deepspeed_file: str | None = None) -> dict[str, Any]:
    """The content of the YAML for `plan`. `deepspeed_file`: path of a DeepSpeed JSON to point to instead of listing its settings.

    Raises InputError for an engine that the YAML cannot describe.
    """
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE", "debug": False, "machine_rank": 0, "main_training_function": "main",
        # for CPUs too: with MULTI_CPU the launcher silently starts a single process without mpirun
        "distributed_type": "MULTI_GPU" if plan.world_size > 1 else "NO",
        "dynamo_backend": "NO",  # the plan compiles the model itself
        "main_process_port": 0,  # any free port
        "mixed_precision": plan.recipe.accelerator.get("mixed_precision", "no"),
        "num_machines": nodes, "num_processes": plan.world_size, "use_cpu": plan.hardware.device_type == "cpu",
    }  # fmt: skip
    if nodes > 1:
        config |= {"main_process_ip": FIRST_NODE, "main_process_port": 29500, "rdzv_backend": "static", "same_network": True}
    engines = {key for key in ENGINES.values() if plan.recipe.accelerator.get(key) is not None}
    if engines == {"deepspeed_plugin"}:
        section = deepspeed_section(plan)
        if deepspeed_file is not None:
            del config["mixed_precision"]  # accelerate refuses a second value beside such a file
            section = {"deepspeed_config_file": deepspeed_file, "zero3_init_flag": section["zero3_init_flag"]}
        if nodes > 1:
            section["deepspeed_multinode_launcher"] = "standard"  # one launcher a node, without pdsh
        config |= {"distributed_type": "DEEPSPEED", "deepspeed_config": section}
    elif engines == {"fsdp_plugin"}:
        config |= {"distributed_type": "FSDP", "fsdp_config": fsdp_section(plan)}
    elif engines:
        names = ", ".join(sorted(engines))
        raise InputError(f"{names}: hwopt cannot write a launcher file for it; start with `hwopt run --processes`")
    return config


def deepspeed_section(plan: Plan) -> dict[str, Any]:
    config, plugin = engine_config(plan), engine_plugin(plan, "deepspeed_plugin")
    assert config is not None, "only asked for where the plan has DeepSpeed"
    zero: Mapping[str, Any] = config["zero_optimization"]
    return {
        "zero_stage": zero["stage"],
        "offload_optimizer_device": zero.get("offload_optimizer", {}).get("device", "none"),
        "offload_param_device": zero.get("offload_param", {}).get("device", "none"),
        "gradient_accumulation_steps": config["gradient_accumulation_steps"],
        "gradient_clipping": config["gradient_clipping"],
        "zero3_init_flag": plugin.zero3_init_flag,
        "zero3_save_16bit_model": zero.get("stage3_gather_16bit_weights_on_model_save", False),
    }


def fsdp_section(plan: Plan) -> dict[str, Any]:
    plugin = engine_plugin(plan, "fsdp_plugin")
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": plugin.reshard_after_forward,
        "fsdp_state_dict_type": plugin.state_dict_type.name,
        "fsdp_offload_params": type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy",
        "fsdp_cpu_ram_efficient_loading": plugin.cpu_ram_efficient_loading,
        "fsdp_activation_checkpointing": plugin.activation_checkpointing,
    }


def exports_of(plan: Plan) -> dict[str, Any]:
    """Environment variable -> the value that the launcher sets for the engine of `plan`; for a JSON file, its content."""
    if plan.recipe.accelerator.get("deepspeed_plugin") is not None:
        section = deepspeed_section(plan)
        found = {variable: section[key] for key, variable in DEEPSPEED_VARIABLES.items()}
        return found | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": engine_config(plan)}
    if plan.recipe.accelerator.get("fsdp_plugin") is not None:
        return {key.upper(): value for key, value in fsdp_section(plan).items()}
    return {}


def launcher_yaml(config: Mapping[str, Any], profile: str) -> str:
    lines = [
        f"# Profile {profile}. Start with the same job, --profile and --set as at the export:",
        "#   accelerate launch --config_file FILE -m hwopt run JOB --profile PROFILE",
    ]
    if config["num_machines"] > 1:
        ranks = f"--machine_rank 0 to {config['num_machines'] - 1}"
        lines.append(f"# On each node add {ranks} and --main_process_ip before -m, or write both into this file.")
    return "\n".join([*lines, yaml.safe_dump(dict(config))])


def engine_plugin(plan: Plan, key: str) -> Any:
    """A copy of the argument `key` that the run of `plan` gives to the Accelerator; None if it gives none.

    It is made without the variables of a launcher, which would change its defaults.
    """
    field = f"accelerator[{key!r}]"
    with mock.patch.dict(os.environ), plugin_guard(plan.recipe.named(plan.recipe.author_of(field)), f"recipe.{field}"):
        for name in [name for name in os.environ if name.startswith(LAUNCHERS_WORDS)]:
            del os.environ[name]
        return copy.deepcopy(option_value(plan.recipe.accelerator.get(key)))


def engine_config(plan: Plan) -> dict[str, Any] | None:
    """DeepSpeed's configuration in the run of `plan`; None if the plan does not use DeepSpeed."""
    plugin = engine_plugin(plan, "deepspeed_plugin")
    if plugin is None:
        return None
    plugin.set_mixed_precision(plan.recipe.accelerator.get("mixed_precision", "no"))
    config: dict[str, Any] = plugin.deepspeed_config
    config.pop("steps_per_print", None)  # Accelerate sets infinity, which JSON does not have
    return config | {
        "train_batch_size": plan.batch.train * plan.world_size,
        "train_micro_batch_size_per_gpu": plan.batch.train,
        "gradient_clipping": float(plan.training.max_grad_norm or 0.0),
    }


def no_deepspeed(plan: Plan) -> InputError:
    """The error for a plan without DeepSpeed; it names the plugin that would add it."""
    name = option_for("deepspeed").split(".")[1]
    entry = next((entry for entry in plan.entries if entry.name == name), None)
    what_to_do = f"add the plugin {name!r}, as by --set plugins.{name}.enabled=true"
    if entry is not None:
        what_to_do = f"{entry.author} {'is skipped' if entry.decision == 'skip' else 'does not use it'}: {entry.reason}"
    return InputError(f"the plan of profile {plan.profile.name} has no DeepSpeed to export: {what_to_do}")
