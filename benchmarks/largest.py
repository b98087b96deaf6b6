"""Find the deepest decoder that trains a step on a card, by the memory plan and, on a GPU, by running the step.

    python benchmarks/largest.py [--profile rtx3070_8gb] [--memory-limit 8GiB] [--rows 1] [--length 512] [--json FILE]

The models are Llama-like: hidden size 2,048, vocabulary 32,000. With a GPU the step also runs under the memory limit, with the
planned number of layers and with an eighth more. Without a GPU the script plans for the profile's card and leaves the last two
columns empty.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

HIDDEN_SIZE = 2048
METHODS = {  # name -> plugin tables; those of precision and batch are added
    "plain": "",
    "8-bit optimizer": '[plugins.optimizer]\nname = "adamw_bnb_8bit"\n',
    "checkpointing": '[plugins.checkpointing]\n[plugins.optimizer]\nname = "adamw_bnb_8bit"\n',
    "fused loss": '[plugins.fused_loss]\n[plugins.checkpointing]\n[plugins.optimizer]\nname = "adamw_bnb_8bit"\n',
    "ZeRO-2 offload": '[plugins.checkpointing]\n[plugins.zero]\nstage = 2\noffload = "optimizer"\n',
    "ZeRO-3 offload": '[plugins.checkpointing]\n[plugins.zero]\nstage = 3\noffload = "parameters"\n',
    "LoRA": "[plugins.adapter]\nalways = true\n[plugins.checkpointing]\n",
    "QLoRA": "[plugins.adapter]\nalways = true\n[plugins.quantize]\n[plugins.checkpointing]\n",
}
MAX_LAYERS = 256


def model_config(layers: int) -> str:
    """The model.config of a job, as TOML."""
    return (
        f"{{ model_type = 'llama', vocab_size = 32000, hidden_size = {HIDDEN_SIZE}, num_hidden_layers = {layers}, "
        f"num_attention_heads = 16, num_key_value_heads = 4, intermediate_size = {3 * HIDDEN_SIZE}, "
        "max_position_embeddings = 4096 }"
    )


def profile_toml(card: str, method: str, rows: int) -> str:
    """A profile with the card's facts and this method only."""
    level = "O1" if "ZeRO" in method else "O2"
    tables = METHODS[method]
    precision = f'[plugins.precision]\ndtype = "bf16"\nlevel = "{level}"\n'
    before, marker, after = tables.partition("[plugins.checkpointing]")
    ordered = f"{before}{precision}{marker}{after}" if "adapter" in before else f"{precision}{tables}"
    return f'name = "largest"\n{card}\n{ordered}[plugins.batch]\ntrain = {rows}\neval = {rows}\naccumulation = 2\n'


def card_toml(name: str) -> str:
    """The [card] table of profile `name`."""
    from hwopt.config.profile import load_profile
    from hwopt.config.profile_files import profile_files

    card = load_profile(name, profile_files()).card
    facts = {"match": list(card.match), "memory_gib": card.memory_gib, "compute_capability": card.compute_capability}
    return "[card]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in facts.items())


def plan_layers(profile: Path, layers: int, options: argparse.Namespace, hardware: Literal["detected", "profile"]) -> Any:
    """The plan for a model of `layers` layers, and its memory plan."""
    from hwopt import api

    job = [
        f"model.config={model_config(layers)}",
        "task.kind=causal-lm",
        "data.train=none.txt",
        f"data.max_length={options.length}",
    ]
    plan = api.resolve(str(profile), assignments=job, hardware=hardware, memory_limit=options.memory_limit)
    from hwopt.memory.forecast import planner

    return plan, planner.plan_memory(plan, api.cache_folder())


def deepest(profile: Path, options: argparse.Namespace, hardware: Literal["detected", "profile"]) -> tuple[int, Any]:
    """The layers of the deepest model that fits, with its plan and memory plan; (0, None) if no model fits."""
    low, high, best = 0, 2, None
    while high <= MAX_LAYERS and (found := plan_layers(profile, high, options, hardware))[1].fits:
        low, best, high = high, found, 2 * high
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        found = plan_layers(profile, middle, options, hardware)
        if found[1].fits:
            low, best = middle, found
        else:
            high = middle
    return low, best


def step_fits(profile: Path, layers: int, options: argparse.Namespace) -> bool:
    """Whether a real step runs under the memory limit, in a child process."""
    command = [sys.executable, __file__, "--step", str(layers), "--one", str(profile), "--length", str(options.length)]
    command += ["--memory-limit", options.memory_limit] if options.memory_limit else []
    return subprocess.run(command, check=False).returncode == 0


def run_step(profile: Path, layers: int, options: argparse.Namespace) -> None:
    """Run one training step on random samples. Raises torch.OutOfMemoryError if the device has too little memory."""
    import torch

    from hwopt.memory.forecast.measured import measure
    from hwopt.memory.shapes import Head, Shape

    plan, _ = plan_layers(profile, layers, options, "detected")
    if plan.hardware.memory_limit_gib is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, plan.hardware.memory_limit_gib * 2**30 / total))
    print(f"measured peak {measure(plan, Shape(plan.batch.train, options.length), Head(2)).train / 2**30:.2f} GiB")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--profile", default="rtx3070_8gb")
    arguments.add_argument("--memory-limit")
    arguments.add_argument("--rows", type=int, default=1)
    arguments.add_argument("--length", type=int, default=512)
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--step", type=int, help=argparse.SUPPRESS)
    arguments.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.one:
        run_step(options.one, options.step, options)
        return
    import torch

    real = torch.cuda.is_available()
    print("| method | layers | parameters | planned peak GiB | evaluation GiB | host GiB | trains | an eighth more |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for method in METHODS:
        with tempfile.TemporaryDirectory() as folder:
            profile = Path(folder) / "largest.toml"
            profile.write_text(profile_toml(card_toml(options.profile), method, options.rows), encoding="utf-8")
            layers, found = deepest(profile, options, "detected" if real else "profile")
            if found is None:
                print(f"| {method} | 0 | | | | | | |", flush=True)
                continue
            plan, memory = found
            row = {"method": method, "layers": layers, "parameters": plan.model.parameters, "peak_gib": memory.peak_gib}
            row |= {"eval_peak_gib": memory.eval_peak_gib, "host_gib": memory.host_gib, "free_gib": memory.free_gib}
            if real:
                row |= {
                    "trains": step_fits(profile, layers, options),
                    "more": step_fits(profile, layers + max(1, layers // 8), options),
                }
        rows.append(row)
        figures = f"{row['peak_gib']:.2f} | {row['eval_peak_gib']:.2f} | {row['host_gib']:.1f}"
        truth = f"{'yes' if row['trains'] else 'NO'} | {'yes' if row['more'] else 'no'}" if real else "|"
        print(f"| {method} | {layers} | {row['parameters'] / 1e9:.2f} B | {figures} | {truth} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
