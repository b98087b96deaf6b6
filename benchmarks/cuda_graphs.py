"""The tables of docs/cuda-graphs.md: steps with and without CUDA graphs on a pretend card, and the families that can be captured.

    python tests/pretend_cuda rtx3090 env PRETEND_COMPUTE=0 python benchmarks/cuda_graphs.py [ROWSxWIDTH...]
    python tests/pretend_cuda rtx3090 env PRETEND_COMPUTE=all python benchmarks/cuda_graphs.py --families
    python benchmarks/cuda_graphs.py --forecast

BERT-base in bf16 with fused AdamW, steps of one micro-batch. Launches and waits are exact. Host milliseconds are CPU time of the
training thread on this machine, in the pretend driver too. The pretend device computes nothing. --forecast needs no card: it asks
the forecast that decides whether a micro-batch gets a graph.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hwopt import api
from hwopt.errors import HwoptError
from hwopt.plugin.price import price_of
from hwopt.saving.writer import AsyncWriter
from hwopt.testing import WORDS, Recorder, plan_for, tiny_job, tiny_profile, train_tiny
from hwopt.training.build import build
from hwopt.training.loop import Loop

PROFILE = """
name = "one"
[plugins.optimizer]
name = "adamw_torch_fused"
[plugins.sdpa]
[plugins.precision]
dtype = "bf16"
[plugins.batch]
train = {rows}
"""
GRAPHS = "[plugins.cuda_graphs]\ntokens = 0\n"
STEPS, ROUNDS = 8, 5


def measured(rows: int, width: int, tables: str) -> dict[str, Any]:
    """Counts and times of a step of `rows` x `width`, and the memory that torch's allocator holds."""
    from pretend_cuda.counters import counting
    from pretend_cuda.zero_weights import large_weights_uninitialized

    with tempfile.TemporaryDirectory() as name, large_weights_uninitialized():
        folder = Path(name)
        choose = random.Random(0)
        texts = [" ".join(choose.choices(WORDS, k=2 * width)) for _ in range(64 * rows)]
        lines = [json.dumps({"text": text, "label": str(number % 2)}) for number, text in enumerate(texts)]
        (folder / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
        (folder / "profile.toml").write_text(PROFILE.format(rows=rows) + tables, encoding="utf-8")
        job = ["model.config={ model_type='bert' }", "task.kind=text-classification", f"data.train={folder / 'train.jsonl'}"]
        job += [f"data.max_length={width}", "training.max_steps=1000", "training.logging_steps=1000"]
        plan = api.resolve(str(folder / "profile.toml"), assignments=job, cache=folder / "cache")
        with build(plan, folder / "run", folder / "cache", listener=Recorder()) as run:
            loop = Loop(run, AsyncWriter(run))
            run.engine.init_state()
            run.model.train()
            batches = loop.batches()
            batch = next(batches)

            def steps(number: int) -> None:
                for _ in range(number):
                    loop.update(batch)
                    loop.telemetry.stepped(batch)

            steps(3)
            torch.cuda.reset_peak_memory_stats()
            steps(3)
            times = []
            gc.disable()
            with counting() as counts:
                for _ in range(ROUNDS):
                    began = time.thread_time()
                    steps(STEPS)
                    times.append((time.thread_time() - began) / STEPS)
            gc.enable()
            number = STEPS * ROUNDS
            return {
                "launches": counts["launch"] / number,
                "waits": counts.waits / number,
                "host_ms": 1e3 * min(times),
                "reserved_mib": torch.cuda.max_memory_reserved() / 2**20,
            }


SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 130,
}
DECODER = SIZES | {"num_key_value_heads": 1, "head_dim": 32}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "text-classification": {
        **dict.fromkeys(("bert", "roberta", "electra", "modernbert", "xlm-roberta"), SIZES),
        "albert": SIZES | {"embedding_size": 32},
        "deberta-v2": SIZES | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        "distilbert": {"vocab_size": 300, "dim": 64, "n_layers": 2, "n_heads": 2, "hidden_dim": 128},
    },
    "causal-lm": {
        **dict.fromkeys(("llama", "mistral", "qwen3", "gemma3_text", "phi3"), DECODER),
        "gpt2": {"vocab_size": 300, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128},
        "mixtral": DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2},
        "qwen3_moe": DECODER | EXPERTS | {"num_experts": 4},
        "gpt_oss": DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2},
    },
    "seq2seq-lm": {"t5": {"vocab_size": 300, "d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 2, "num_heads": 2}},
}
"""Task -> family -> a config of two small layers."""


def capture(kind: str, family: str, sizes: dict[str, Any]) -> str:
    """Whether the steps of a small model of the family can be captured, or the line that waits."""
    with tempfile.TemporaryDirectory() as name:
        job = tiny_job(Path(name) / "data", kind, config={"model_type": family, **sizes}, max_steps=6)
        task = job.job.task.model_copy(update={"ignore_router_loss": True})
        job = replace(job, job=job.job.model_copy(update={"task": task}))
        tables = {"optimizer": {"name": "adamw_torch_fused"}, "precision": {"dtype": "bf16"}, "cuda_graphs": {"tokens": 0}}
        profile = replace(tiny_profile(**tables), chosen=frozenset(tables))
        recorder = train_tiny(plan_for(profile, job), Path(name))
        passes = recorder.run.forward_backward
        return "captured" if passes.graphs else " ".join(passes.refused.values())


def show_families() -> None:
    print("| family | task | |\n|---|---|---|")
    for kind, families in FAMILIES.items():
        for family, sizes in families.items():
            try:
                found = capture(kind, family, sizes)
            except HwoptError as error:
                found = f"not trained: {error}"
            print(f"| {family} | {kind} | {found} |", flush=True)


FORECAST_CARDS = ("t4_16gb", "rtx3070_8gb", "rtx3090_24gb", "rtx4090_24gb", "h100_80gb")
FORECAST_MODELS = {
    "BERT-base": ("text-classification", '{ model_type = "bert", vocab_size = 30522 }'),
    "decoder of 1.2 B": (
        "causal-lm",
        '{ model_type = "llama", vocab_size = 128256, hidden_size = 2048, intermediate_size = 8192, num_hidden_layers = 16, '
        "num_attention_heads = 32, num_key_value_heads = 8, tie_word_embeddings = true }",
    ),
}
GRAPH_HOST_SECONDS = 3e-3
"""Host time of a step whose passes are one launch: copies, clipping, update (the table of docs/cuda-graphs.md)."""


def show_forecast() -> None:
    """Milliseconds of a micro-batch without and with a graph, and the part of them in which the device is busy."""
    shapes = [(rows, width) for rows in (8, 16, 32, 64) for width in (32, 64, 128, 192)]
    for model, (kind, config) in FORECAST_MODELS.items():
        print(f"\n| {model}, rows x tokens | " + " | ".join(FORECAST_CARDS) + " |\n" + "|---" * (len(FORECAST_CARDS) + 1) + "|")
        prices = []
        for card in FORECAST_CARDS:
            job = [f"model.config={config}", f"task.kind={kind}", "data.train=padded rows", "data.max_length=192"]
            prices.append(price_of(api.resolve(card, assignments=job, hardware="profile").context))
        for rows, width in shapes:
            cells = []
            for price in prices:
                device = price.device_seconds + rows * width * price.token_seconds
                eager, graphed = max(device, price.host_seconds), max(device, GRAPH_HOST_SECONDS)
                on = rows * width <= price.host_bound_tokens
                now = f"{1e3 * eager:.0f} ms, {device / eager:.0%}"
                cells.append(f"{now} -> **{1e3 * graphed:.0f}**, {device / graphed:.0%}" if on else now)
            print(f"| {rows} x {width} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if "--forecast" in sys.argv:
        show_forecast()
        sys.exit()
    if "--families" in sys.argv:
        show_families()
        sys.exit()
    shapes = [tuple(map(int, word.split("x"))) for word in sys.argv[1:]] or [(8, 32), (16, 64), (32, 64), (64, 128)]
    print("| rows x tokens | launches | waits | host ms | MiB reserved |")
    print("|---|---|---|---|---|")
    for rows, width in shapes:
        eager, graphs = measured(rows, width, ""), measured(rows, width, GRAPHS)
        formats = dict.fromkeys(eager, ",.0f") | {"host_ms": ".1f"}
        cells = [f"{eager[key]:{form}} -> {graphs[key]:{form}}" for key, form in formats.items()]
        print(f"| {rows} x {width} | {' | '.join(cells)} |", flush=True)
