"""How time, memory and disk grow with the data, with the length, rows and depth of a step, and with the steps of a run.

    python benchmarks/growth.py data [--rows 1000 10000 100000]      # reading and tokenising, beside `datasets`
    python benchmarks/growth.py chats [--rows 1000 10000 100000]     # the same of conversations, hwopt alone
    python benchmarks/growth.py step                                 # time of a step
    python benchmarks/growth.py run [--steps 1000 10000]             # a long run: milliseconds, memory and files

Each case is a process of its own. The model is a small BERT with random weights, so that what hwopt adds is seen.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from hwopt.testing import WORDS

MODEL = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 2000,
    "max_position_embeddings": 1024,
}


def write_rows(path: Path, rows: int, least: int = 5, most: int = 30) -> Path:
    """`path`, a JSONL file of `rows` texts of `least` to `most` words."""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for row in range(rows):
            words = draw.choices(WORDS, k=draw.randint(least, most))
            file.write(json.dumps({"text": f"{' '.join(words)} {row}", "label": draw.choice("ab")}) + "\n")
    return path


def job_toml(folder: Path, train: Path, model: dict[str, Any], tokenizer: Path | None = None, **training: Any) -> Path:
    """A job that trains `model` on `train`."""
    import tomlkit

    named: dict[str, Any] = {"config": model} if tokenizer is None else {"config": model, "tokenizer": str(tokenizer)}
    job = {"model": named, "data": {"train": str(train), "text": "text", "label": "label", "max_length": 512}}
    path = folder / "job.toml"
    path.write_text(tomlkit.dumps({**job, "task": {"kind": "text-classification"}, "training": training}))
    return path


def held(process: psutil.Process) -> float:
    """MiB that a process holds: shared pages in parts, without the pages of files, which the system can drop at any time."""
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))) / 2**10


def measured(command: list[str], **environment: str) -> dict[str, float]:
    """Seconds, CPU seconds, and the most memory (MiB) that a command and its children hold (`held`)."""
    started = time.perf_counter()
    with tempfile.TemporaryFile() as errors:
        process = psutil.Popen(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=errors)
        peak = cpu = 0.0
        while process.poll() is None:
            try:
                family = [process, *process.children(recursive=True)]
                peak = max(peak, sum(map(held, family)))
                cpu = max(cpu, sum(sum(each.cpu_times()[:2]) for each in family))
            except (psutil.Error, OSError):  # a process has just ended
                pass
            time.sleep(0.05)
        errors.seek(0)
        if process.returncode:
            raise RuntimeError(f"{command}: exit code {process.returncode}\n{errors.read().decode()[-600:]}")
    return {"seconds": time.perf_counter() - started, "cpu": cpu, "peak": peak}


PREPARE = """
import sys
from pathlib import Path
from hwopt.config.job import load_job
from hwopt.model.config import load_config
from hwopt.tasks.registry import make_task
job = load_job(Path(sys.argv[1])).job
task = make_task(job)
config = task.load_config(job)
if sys.argv[3] == "prepare":
    task.prepare(job, config, Path(sys.argv[2]), 0, 1024)
"""
PEER = """
import sys
from datasets import load_dataset
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
if sys.argv[3] == "prepare":
    rows = load_dataset("json", data_files=sys.argv[1], split="train", cache_dir=sys.argv[4])
    rows.map(lambda part: tokenizer(part["text"], truncation=True, max_length=512), batched=True, num_proc=2)
"""


def folder_mib(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20


def trained_tokenizer(folder: Path) -> Path:
    """A WordPiece tokenizer of the words of all rows."""
    small = write_rows(folder / "small.jsonl", 2_000)
    run_prepare(job_toml(folder, small, MODEL), folder / "trained", "prepare")
    return next((folder / "trained" / "tokenizers").iterdir())


def data_table(sizes: list[int], folder: Path) -> None:
    """Reading and tokenising `sizes` rows: hwopt, again from its cache, and `datasets`; each less a process that only imports."""
    tokenizer = trained_tokenizer(folder)
    print("| rows | first time: s, CPU s, MiB | from the cache: s, MiB | disk MiB | `datasets`: s, CPU s, MiB | disk MiB |")
    print("|---|---|---|---|---|---|")
    for rows in sizes:
        own, cache, theirs = folder / "own", folder / "cache", folder / "theirs"
        own.mkdir(exist_ok=True)
        train = write_rows(folder / f"{rows}.jsonl", rows)
        job = job_toml(own, train, MODEL, tokenizer)
        empty = run_prepare(job, cache, "nothing")
        first, again = run_prepare(job, cache, "prepare"), run_prepare(job, cache, "prepare")
        peer = [sys.executable, "-c", PEER, str(train), str(tokenizer)]
        environment = {"HF_HOME": str(theirs), "TOKENIZERS_PARALLELISM": "false"}
        nothing = measured([*peer, "nothing", str(theirs)], **environment)
        other = measured([*peer, "prepare", str(theirs)], **environment)
        cells = [f"{rows:,}", less(first, empty, "seconds", "cpu", "peak"), less(again, empty, "seconds", "peak")]
        cells += [
            f"{folder_mib(cache / 'tokens'):.1f}",
            less(other, nothing, "seconds", "cpu", "peak"),
            f"{folder_mib(theirs):.1f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)
        for each in (cache, theirs):
            subprocess.run(["rm", "-rf", str(each)], check=True)
        train.unlink()


def chat_table(sizes: list[int], folder: Path) -> None:
    """Reading and tokenising `sizes` conversations of one to three turns, less a process that only imports."""
    import tomlkit

    draw, model = random.Random(0), {"config": MODEL | {"model_type": "llama"}, "tokenizer": str(trained_tokenizer(folder))}
    print("| conversations | MiB of the file | s, CPU s, MiB |")
    print("|---|---|---|")
    for rows in sizes:
        train, job = folder / f"chats-{rows}.jsonl", folder / "chats.toml"
        with train.open("w", encoding="utf-8") as file:
            for row in range(rows):
                roles = ["user", "assistant"] * draw.randint(1, 3)
                texts = [" ".join(draw.choices(WORDS, k=draw.randint(5, 50))) for _ in roles]
                messages = [{"role": role, "content": f"{text} {row}"} for role, text in zip(roles, texts, strict=True)]
                file.write(json.dumps({"messages": messages}) + "\n")
        data = {"train": str(train), "max_length": 512, "chat_template": "chatml"}
        job.write_text(tomlkit.dumps({"model": model, "data": data, "task": {"kind": "causal-lm"}}))
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            empty, first = (run_prepare(job, Path(cache), what) for what in ("nothing", "prepare"))
        print(f"| {rows:,} | {train.stat().st_size / 2**20:.1f} | {less(first, empty, 'seconds', 'cpu', 'peak')} |", flush=True)
        train.unlink()


def run_prepare(job: Path, cache: Path, what: str) -> dict[str, float]:
    return measured([sys.executable, "-c", PREPARE, str(job), str(cache), what])


def less(found: dict[str, float], empty: dict[str, float], *keys: str) -> str:
    return ", ".join(f"{max(0.0, found[key] - empty[key]):,.{0 if key == 'peak' else 1}f}" for key in keys)


def train(folder: Path, steps: int, words: int, rows: int, layers: int, ranks: int = 1, **options: Any) -> dict[str, Any]:
    """A run of `steps` steps of `rows` texts of `words` words: its summary, rows of metrics, peak memory and file sizes."""
    name = f"run-{steps}-{words}-{rows}-{layers}-{ranks}"
    data = write_rows(folder / f"{name}.jsonl", max(256, rows), words, words)
    job = job_toml(folder, data, MODEL | {"num_hidden_layers": layers}, max_steps=steps, save_steps=steps, **options)
    start = [sys.executable, "-m", "hwopt"]
    if ranks > 1:
        start = [sys.executable, "-m", "accelerate.commands.launch", f"--num_processes={ranks}", "--cpu", "-m", "hwopt"]
    sizes = ("batch.train", "batch.effective")
    given = [each for key in sizes for each in ("--set", f"plugins.{key}={rows}")]
    found = measured(
        [*start, "run", str(job), "--profile", "cpu", "--output-dir", str(folder), "--name", name, *given], OMP_NUM_THREADS="1"
    )
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / name / "summary.json").read_text())
    files = {path.name: path.stat().st_size / 2**10 for path in (folder / name).iterdir() if path.is_file()}
    return {"summary": summary, "rows": lines, "files": files, **found}


def step_table(folder: Path) -> None:
    """Milliseconds of a step over one size at a time."""
    base = {"words": 32, "rows": 16, "layers": 2}
    varied: dict[str, list[int]] = {
        "words": [32, 64, 128, 256],
        "rows": [16, 32, 64, 128],
        "layers": [2, 4, 8, 16],
        "ranks": [1, 2],
    }
    print("| | values | ms a step |")
    print("|---|---|---|")
    for name, values in varied.items():
        speeds = [1000 / train(folder, 60, **{**base, name: value})["summary"]["train_steps_per_second"] for value in values]
        print(f"| {name} | {', '.join(map(str, values))} | {', '.join(f'{each:.1f}' for each in speeds)} |", flush=True)


def run_table(steps: list[int], folder: Path) -> None:
    """Runs of several lengths: milliseconds of a step in the first and in the last tenth, peak memory and files."""
    print("| steps | ms a step, first and last tenth | peak MiB | metrics.jsonl, run.log, report.html (KiB) |")
    print("|---|---|---|---|")
    for number in steps:
        found = train(folder, number, 8, 8, 1, logging_steps=max(1, number // 100))
        speeds = [1000 / row["steps_per_second"] for row in found["rows"] if row.get("steps_per_second")]
        tenth = max(1, len(speeds) // 10)
        first, last = (sum(part) / len(part) for part in (speeds[1 : tenth + 1], speeds[-tenth:]))
        sizes = ", ".join(f"{found['files'].get(name, 0):,.0f}" for name in ("metrics.jsonl", "run.log", "report.html"))
        print(f"| {number:,} | {first:.2f}, {last:.2f} | {found['peak']:,.0f} | {sizes} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=["data", "chats", "step", "run"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--steps", type=int, nargs="+", default=[1_000, 10_000])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if given.which == "data":
            data_table(given.rows, folder)
        elif given.which == "chats":
            chat_table(given.rows, folder)
        elif given.which == "step":
            step_table(folder)
        else:
            run_table(given.steps, folder)


if __name__ == "__main__":
    main()
