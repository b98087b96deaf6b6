"""Time `hwopt plan` for ten models with an empty cache: until its first answer (fits or not), and until its last line.

CPU seconds are those of the whole process tree; on a busy machine they say more than the wall clock.

    python benchmarks/planning.py [--only NAME …] [--cached] [--json FILE]

The models are given by their configs and the data does not exist, so nothing is downloaded. `--cached` plans each model a second
time, with the traces of the first. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

CONFIGS = {
    "BERT-base": "model_type='bert', vocab_size=30522, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, "
    "intermediate_size=3072, max_position_embeddings=512",
    "Llama-3.2-1B": "model_type='llama', vocab_size=128256, hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, "
    "num_key_value_heads=8, head_dim=64, intermediate_size=8192, max_position_embeddings=131072, tie_word_embeddings=true",
    "Llama-3.2-3B": "model_type='llama', vocab_size=128256, hidden_size=3072, num_hidden_layers=28, num_attention_heads=24, "
    "num_key_value_heads=8, head_dim=128, intermediate_size=8192, max_position_embeddings=131072, tie_word_embeddings=true",
    "Qwen3-0.6B": "model_type='qwen3', vocab_size=151936, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, "
    "num_key_value_heads=8, head_dim=128, intermediate_size=3072, max_position_embeddings=40960, tie_word_embeddings=true",
    "Qwen3-4B": "model_type='qwen3', vocab_size=151936, hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, "
    "num_key_value_heads=8, head_dim=128, intermediate_size=9728, max_position_embeddings=40960, tie_word_embeddings=true",
    "Qwen3-8B": "model_type='qwen3', vocab_size=151936, hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, "
    "num_key_value_heads=8, head_dim=128, intermediate_size=12288, max_position_embeddings=40960, tie_word_embeddings=false",
    "Gemma-3-1B": "model_type='gemma3_text', vocab_size=262144, hidden_size=1152, num_hidden_layers=26, num_attention_heads=4, "
    "num_key_value_heads=1, head_dim=256, intermediate_size=6912, max_position_embeddings=32768",
    "Mistral-7B": "model_type='mistral', vocab_size=32768, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, "
    "num_key_value_heads=8, head_dim=128, intermediate_size=14336, max_position_embeddings=32768, tie_word_embeddings=false",
}
PLANS = {  # name -> (model, profile, further assignments)
    "BERT-base, rtx3070_8gb": ("BERT-base", "rtx3070_8gb", ()),
    "Llama-3.2-1B, rtx3090_24gb": ("Llama-3.2-1B", "rtx3090_24gb", ()),
    "Llama-3.2-3B, rtx3090_24gb": ("Llama-3.2-3B", "rtx3090_24gb", ()),
    "Qwen3-0.6B, rtx3070_8gb": ("Qwen3-0.6B", "rtx3070_8gb", ("plugins.batch.train=4",)),
    "Qwen3-4B, a100_40gb": ("Qwen3-4B", "a100_40gb", ()),
    "Qwen3-8B, rtx3070_8gb_qlora": ("Qwen3-8B", "rtx3070_8gb_qlora", ()),
    "Gemma-3-1B, rtx3090_24gb": ("Gemma-3-1B", "rtx3090_24gb", ()),
    "Mistral-7B, rtx3070_8gb_qlora": ("Mistral-7B", "rtx3070_8gb_qlora", ()),
    "Mistral-7B, rtx3090_24gb, full": ("Mistral-7B", "rtx3090_24gb", ("plugins.adapter.enabled=false",)),
    "Qwen3-8B, t4_16gb": ("Qwen3-8B", "t4_16gb", ()),
}
LENGTH = 512
VERDICTS = ("fits: ", "DOES NOT FIT: ", "UNKNOWN: ")


@dataclass(frozen=True)
class Timing:
    """Seconds of one `hwopt plan`, from the start of its process."""

    first: float
    """Until the verdict was printed."""
    total: float
    cpu: float
    """CPU seconds of the process and its children."""
    verdict: str
    tier: str


def timed(name: str, folder: Path) -> Timing:
    """Return the seconds of one plan, with the cache in `folder`."""
    model, profile, assignments = PLANS[name]
    job = folder / "job.toml"
    kind = "text-classification" if model.startswith("BERT") else "causal-lm"
    length = 192 if model.startswith("BERT") else LENGTH
    job.write_text(
        f"[model]\nconfig = {{ {CONFIGS[model]} }}\n[task]\nkind = '{kind}'\n"
        f"[data]\ntrain = 'none.jsonl'\nmax_length = {length}\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "hwopt", "plan", str(job), "--profile", profile]
    command += [part for assignment in assignments for part in ("--set", assignment)]
    environment = {**os.environ, "HWOPT_CACHE": str(folder / "cache"), "COLUMNS": "200"}
    started, cpu = time.perf_counter(), children_cpu_seconds()
    first, verdict, tier = 0.0, "", ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, cwd=folder, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("forecast: "):
                tier = line.split(": ")[1]
            if not verdict and line.startswith(VERDICTS):
                first, verdict = time.perf_counter() - started, line.partition(":")[0]
    if process.returncode:
        raise SystemExit(f"{name}: hwopt plan ended with exit code {process.returncode}")
    return Timing(first, time.perf_counter() - started, children_cpu_seconds() - cpu, verdict, tier)


def children_cpu_seconds() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PLANS, default=list(PLANS), metavar="NAME")
    parser.add_argument("--cached", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[str, object]] = {}
    print("| plan | verdict | tier | first answer, s | last line, s | CPU, s |" + (" cached, s |" if options.cached else ""))
    print("|---|---|---|---|---|---|" + ("---|" if options.cached else ""))
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            one = timed(name, Path(folder))
            row = f"| {name} | {one.verdict} | {one.tier} | {one.first:.1f} | {one.total:.1f} | {one.cpu:.1f} |"
            found[name] = asdict(one)
            if options.cached:
                again = timed(name, Path(folder))
                row += f" {again.total:.1f} |"
                found[name]["cached"] = again.total
        print(row, flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
