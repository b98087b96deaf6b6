"""Compare the predicted peak memory with that of the allocator, for random configurations from a grid.

    python benchmarks/memory.py [--count 12] [--seed N]
    python tests/pretend_cuda rtx3090 python benchmarks/memory.py

On a CUDA device the measured peak is `max_memory_allocated`, and *reserved* is compared with `max_memory_reserved`. On a CPU it
is the peak of all allocations that torch's profiler reports.
Each configuration runs in its own process. Without --seed the clock gives the seed, and the script prints it.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from datetime import date
from pathlib import Path
from typing import Any

MODELS = {
    "bert": {"model_type": "bert", "vocab_size": 8000, "max_position_embeddings": 2048},
    "roberta": {"model_type": "roberta", "vocab_size": 8000, "max_position_embeddings": 2050},
    "distilbert": {"model_type": "distilbert", "vocab_size": 8000, "max_position_embeddings": 2048},
    "gpt2": {"model_type": "gpt2", "vocab_size": 8000, "n_positions": 2048},
    "llama": {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 2048},
    "gemma3": {"model_type": "gemma3_text", "vocab_size": 262144, "max_position_embeddings": 2048, "sliding_window": 512},
}
DECODERS = ("gpt2", "llama", "gemma3")
GRID: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "hidden": (128, 256, 384),
    "layers": (2, 3, 6),
    "precision": ("fp32", "bf16 O1", "bf16 O2"),
    "optimizer": ("adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "adamw_torch_8bit"),
    "checkpointing": (None, "all", "selective", 2),
    "adapter": (None, "lora", "dora"),
    "length": (64, 128, 256, 512, 1024, 2048),
    "tokens": (512, 1024, 2048, 4096),
    "accumulation": (1, 2),
    "sdpa": (True, False),
    "fused_loss": (False, True),
    "zero": (None, None, None, "1 none", "2 none", "2 optimizer", "3 none"),
    "quantize": (None, None, 4, 8),
    "pack": (False, False, True),
}


def draw(seed: int, count: int) -> list[dict[str, Any]]:
    """`count` random configurations."""
    generator = random.Random(seed)
    return [compatible({key: generator.choice(values) for key, values in GRID.items()}) for _ in range(count)]


def compatible(config: dict[str, Any]) -> dict[str, Any]:
    """`config` without parts that conflict with others (docs/conflicts.md)."""
    decoder = config["model"] in DECODERS
    if not config["adapter"]:
        config["quantize"] = None
    if config["quantize"] == 8:
        config["adapter"] = "lora"
    if config["quantize"]:
        config["zero"] = None
    if config["zero"]:
        config["precision"] = config["precision"].replace("O2", "O1")
        config["optimizer"] = "adamw_torch_fused"
    config["fused_loss"] = config["fused_loss"] and decoder and config["zero"] != "3 none"
    return config


def batch_shape(config: dict[str, Any]) -> tuple[int, int]:
    """Rows and tokens per row of a micro-batch."""
    tokens = min(config["tokens"], 512) if config["model"] == "gemma3" else config["tokens"]
    return max(1, tokens // config["length"]), config["length"]


def model_config(config: dict[str, Any]) -> dict[str, Any]:
    """The model.config of the job."""
    hidden, layers = config["hidden"], config["layers"]
    names = {
        "gpt2": {"n_embd": hidden, "n_layer": layers, "n_head": 4},
        "distilbert": {"dim": hidden, "n_layers": layers, "n_heads": 4, "hidden_dim": 4 * hidden},
    }
    usual = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 4 * hidden}
    grouped = {"num_key_value_heads": 2} if config["model"] in ("llama", "gemma3") else {}
    heads = {"head_dim": hidden // 4} if config["model"] == "gemma3" else {}
    return MODELS[config["model"]] | names.get(config["model"], usual) | grouped | heads


def profile_toml(config: dict[str, Any]) -> str:
    """The profile, as TOML."""
    rows, _ = batch_shape(config)
    dtype, _, level = config["precision"].partition(" ")
    tables = ['name = "drawn"']
    if config["adapter"]:
        tables += ["[plugins.adapter]", f'kind = "{config["adapter"]}"', "always = true"]
    tables += ["[plugins.precision]", f'dtype = "{dtype}"', f'level = "{level or "O1"}"']
    if config["quantize"]:
        tables.insert(tables.index("[plugins.precision]"), f"[plugins.quantize]\nbits = {config['quantize']}")
    if config["fused_loss"]:
        tables += ["[plugins.fused_loss]"]
    if config["pack"]:
        tables += ["[plugins.pack]"]
    if config["zero"]:
        stage, offload = config["zero"].split()
        tables += ["[plugins.zero]", f"stage = {stage}", f'offload = "{offload}"']
    if config["sdpa"]:
        tables += ["[plugins.sdpa]"]
    if config["checkpointing"]:
        tables += ["[plugins.checkpointing]", f"layers = {json.dumps(config['checkpointing'])}"]
    tables += ["[plugins.optimizer]", f'name = "{config["optimizer"]}"']
    tables += ["[plugins.batch]", f"train = {rows}", f"gradient_accumulation_steps = {config['accumulation']}"]
    return "\n".join(tables)


def compare(config: dict[str, Any]) -> dict[str, Any]:
    """The predicted and the measured bytes of a training step, of an evaluation, and of the reserved memory."""
    from hwopt import api
    from hwopt.hardware.device import GIB
    from hwopt.memory.forecast.lengths import Lengths
    from hwopt.memory.forecast.measured import measure
    from hwopt.memory.forecast.planner import plan_memory
    from hwopt.memory.shapes import Shape

    rows, width = batch_shape(config)
    kind = "causal-lm" if config["model"] in DECODERS else "text-classification"
    pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in model_config(config).items())
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "drawn.toml"
        profile.write_text(profile_toml(config), encoding="utf-8")
        job = [f"model.config={{ {pairs} }}", f"task.kind={kind}", "data.train=none.csv"]
        plan = api.resolve(str(profile), assignments=job, hardware="detected", cache=Path(folder))
        lengths = Lengths(None, width, 2, "this benchmark")
        memory = plan_memory(plan, Path(folder), lengths)
    assert memory.tier == "traced", memory.note
    predicted = {"train": memory.peak_gib, "eval": memory.eval_peak_gib or 0.0, "reserved": memory.reserved_gib or 0.0}
    # torch's profiler misses memory that another thread releases, such as gloo's reduced buffers; it then counts to the
    # end, so the smaller of two measurements is the better one
    runs = [
        measure(plan, Shape(rows, width), lengths.head, plan.batch.eval_rows(width))
        for _ in range(1 if plan.hardware.device_type == "cuda" else 2)
    ]
    return {f"predicted_{what}": size * GIB for what, size in predicted.items()} | {
        f"measured_{what}": min(getattr(run, what) for run in runs) for what in predicted
    }


def compare_in_child(config: dict[str, Any]) -> dict[str, Any]:
    """What `compare` returns in a child process, or its error under "failed"."""
    command = [sys.executable, __file__, "--one", json.dumps(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:200]}
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def error_of(row: dict[str, Any], what: str = "train") -> float:
    """The relative error of a prediction; positive if it is too high."""
    return float(row[f"predicted_{what}"] / row[f"measured_{what}"] - 1)


COLUMNS = ("model", "rows x tokens", "precision", "optimizer", "checkpointing", "adapter", "base", "ZeRO", "other")
FIGURES = ("predicted MiB", "measured MiB", "off", "eval", "reserved")


def table_row(config: dict[str, Any], found: dict[str, Any]) -> str:
    """The row of the Markdown table for `config`."""
    rows, width = batch_shape(config)
    base = f"{config['quantize']} bit" if config["quantize"] else None
    other = ", ".join(name for name in ("fused_loss", "pack") if config[name])
    options = [config[key] for key in ("precision", "optimizer", "checkpointing", "adapter")] + [base, config["zero"], other]
    cells = [f"{config['model']} {config['hidden']} x {config['layers']}", f"{rows} x {width}"]
    cells += [str(option or "-") for option in options]
    if "failed" in found:
        cells += [f"failed: {found['failed']}", "", "", "", ""]
    else:
        sizes = (f"{found[f'{what}_train'] / 2**20:.1f}" for what in ("predicted", "measured"))
        cells += [*sizes, *(f"{error_of(found, what):+.2%}" for what in ("train", "eval", "reserved"))]
    return f"| {' | '.join(cells)} |"


def print_summary(rows: list[dict[str, Any]]) -> None:
    """Print the median, the 95th percentile and the maximum of the errors, and how many predictions are too low."""
    measured = [row for row in rows if "failed" not in row]
    for what in ("train", "eval", "reserved") if measured else ():
        errors = sorted(abs(error_of(row, what)) for row in measured)
        p95 = errors[min(len(errors) - 1, int(0.95 * len(errors)))]
        under = sum(error_of(row, what) < -0.03 for row in measured)
        spread = f"median {statistics.median(errors):.2%}, p95 {p95:.2%}, worst {errors[-1]:.2%}"
        print(f"{what}: {spread}; under by more than 3 %: {under}")
    print(f"{len(measured)} measured, {len(rows) - len(measured)} failed")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--count", type=int, default=12)
    arguments.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    arguments.add_argument("--one", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.one:
        warnings.simplefilter("ignore")
        print(json.dumps(compare(json.loads(options.one))))
        return
    import torch
    import transformers

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    print(f"seed {options.seed}, {versions}, {date.today()}")
    print(f"| {' | '.join((*COLUMNS, *FIGURES))} |")
    print("|---" * (len(COLUMNS) + len(FIGURES)) + "|")
    rows = []
    for config in draw(options.seed, options.count):
        found = compare_in_child(config)
        rows.append(config | found)
        print(table_row(config, found), flush=True)
    print_summary(rows)


if __name__ == "__main__":
    main()
