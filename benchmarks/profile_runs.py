"""Run a shipped profile on its pretend card, and count what its steps do, beside a bare PyTorch loop and the HF Trainer.

    python tests/pretend_cuda t4 python benchmarks/profile_runs.py t4_16gb own      # prints JSON; or others

All loops train the same model with the same optimizer, precision, accumulation and clipping.
"""

import json
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from other_loops import STEPS, PerStep, bare_loop, hugging_face_loop
from pretend_cuda.cards import CARDS
from pretend_cuda.profile_cases import CASES, PLAIN, Case
from pretend_cuda.zero_weights import large_weights_uninitialized

from hwopt import api
from hwopt.hardware.device import GIB
from hwopt.memory.forecast import planner
from hwopt.memory.forecast.lengths import lengths_of
from hwopt.planning.plan import Plan
from hwopt.saving.writer import AsyncWriter
from hwopt.testing import WORDS, Recorder
from hwopt.training.build import build, reset_accelerate
from hwopt.training.loop import Loop

OWN_WORK = ("length_batching", "fused_loss")
"""Plugins that split the work of a step: more launches and products, of smaller parts, than the bare loop has."""


def write_data(path: Path, samples: int, max_length: int) -> None:
    """JSONL with two classes. Every third text has more than `max_length` tokens, the others an eighth of that on average."""
    random_words = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for number in range(samples):
            length = 2 * max_length if number % 3 == 0 else max(3, round(random_words.lognormvariate(0, 0.6) * max_length / 8))
            text = " ".join(random_words.choices(WORDS, k=length))
            file.write(json.dumps({"text": text, "label": str(number % 2)}) + "\n")


def assignments(case: Case, folder: Path, *changes: str) -> list[str]:
    """The job of `case` as arguments of `--set`, with `changes`."""
    table = ", ".join(f"{key} = {json.dumps(value)}" for key, value in case.config.items())
    return [
        f"model.config={{ {table} }}",
        f"data.train={folder / 'train.jsonl'}",
        f"data.eval={folder / 'eval.jsonl'}",
        f"data.max_length={case.max_length}",
        f"task.kind={case.kind}",
        f"training.max_steps={STEPS}",
        "training.logging_steps=1000",
        *case.changes,
        *changes,
    ]


@contextmanager
def data_of(case: Case) -> Iterator[Path]:
    """A temporary folder with the data of `case`."""
    with tempfile.TemporaryDirectory() as name:
        write_data(Path(name) / "train.jsonl", 3600, case.max_length)  # 20 whole steps of up to 180 rows
        write_data(Path(name) / "eval.jsonl", 540, case.max_length)
        yield Path(name)


def hwopt_run(plan: Plan, folder: Path) -> dict[str, Any]:
    """Train STEPS steps, evaluate, and return the counts, the evidence, and the peaks of the longest samples in GiB."""
    heard = Recorder()
    (folder / "run").mkdir(parents=True)
    with build(plan, folder / "run", folder / "cache", listener=heard) as run:
        writer = AsyncWriter(run)
        loop = Loop(run, writer)
        loop.restore()
        run.model.train()
        batches = loop.batches()

        def steps(number: int) -> None:
            for _ in range(number):
                loop.step(next(batches))

        per_step = PerStep.of(steps)
        longest = run.train_loader.dataset[run.train_loader.sampler.longest()].to(run.device)
        torch.cuda.reset_peak_memory_stats()
        loop.update(longest)
        trained = torch.cuda.max_memory_allocated() / GIB
        torch.cuda.reset_peak_memory_stats()
        loop.evaluation.preflight()
        evaluated = torch.cuda.max_memory_allocated() / GIB
        writer.close()
        found = {entry.name: (observed.status, observed.seen) for entry, observed in heard.found}
        return {
            "steps": run.step,
            "own": vars(per_step),
            "evidence": found,
            "warnings": heard.warnings,
            "allocated_gib": trained,
            "eval_allocated_gib": evaluated,
            "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        }


def other_loops(plan: Plan, folder: Path) -> dict[str, Any]:
    """The counts of the bare loop and of the HF Trainer, with the model of `plan`."""
    options = {entry.name: entry.options for entry in plan.entries if entry.decision != "skip"}
    name = getattr(options.get("optimizer"), "name", "adamw_torch")
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(getattr(options.get("precision"), "dtype", "fp32"))
    with build(plan, folder / "run", folder / "cache") as run:
        model = run.accelerator.unwrap_model(run.model, keep_fp32_wrapper=False)
        model._is_accelerate_prepared = False  # else the Trainer would train without autocast
        run.optimizer = run.scheduler = None
        found = {"bare": vars(bare_loop(run, model, name, dtype))}
        reset_accelerate(run.accelerator)
        return found | {"trainer": vars(hugging_face_loop(run, model, name, dtype, folder))}


def memory_forecast(plan: Plan, cache: Path) -> dict[str, Any]:
    """What the planner predicts for the longest samples."""
    memory = planner.plan_memory(plan, cache, lengths_of(plan, cache))
    return {"tier": memory.tier, "peak_gib": memory.peak_gib, "eval_gib": memory.eval_peak_gib, "fits": memory.fits}


def own_loop(resolved: Callable[..., Plan], folder: Path) -> dict[str, Any]:
    """The decisions, the forecast, and what `hwopt_run` finds; "uncut" has the counts without OWN_WORK."""
    plan = resolved()
    found: dict[str, Any] = {"decisions": {entry.name: (entry.decision, entry.reason) for entry in plan.entries}}
    found["forecast"] = memory_forecast(plan, folder / "cache")  # before the run: it forks
    found |= hwopt_run(plan, folder / "own")
    if work := [PLAIN[name] for name in OWN_WORK if found["decisions"].get(name, ("skip",))[0] != "skip"]:
        found["uncut"] = hwopt_run(resolved(*work), folder / "uncut")["own"]
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    name, which = sys.argv[1:]
    case = CASES[name]
    with data_of(case) as folder, large_weights_uninitialized():

        def resolved(*changes: str) -> Plan:
            return api.resolve(name, assignments=assignments(case, folder, *changes), cache=folder / "cache")

        if which == "own":
            print(json.dumps(own_loop(resolved, folder)))
        else:
            written = {entry.name for entry in resolved().entries}
            print(json.dumps(other_loops(resolved(*(PLAIN[plugin] for plugin in PLAIN if plugin in written)), folder)))


def measure(name: str) -> dict[str, Any]:
    """What the loops of profile `name` do, each in a process on a pretend card. Raises RuntimeError if one of them fails."""
    case = CASES[name]
    found = {"profile": name, "card": CARDS[name].partition(":")[0], "model": case.model_name}
    return found | run_on_card(name, "own", CARDS[name]) | measure_others(case.same_as or name)


@cache
def measure_others(name: str) -> dict[str, Any]:
    """The counts of the bare loop and of the HF Trainer for profile `name`.

    They train without what saves memory, so their card has more of it.
    """
    card, capability, _, *processors = CARDS[name].split(":")
    return run_on_card(name, "others", ":".join([card, capability, "200000", *processors]))


def run_on_card(name: str, which: str, cards: str) -> dict[str, Any]:
    """The result of `main` in a process on the pretend `cards`."""
    on_card = [sys.executable, str(Path(__file__).parents[1] / "tests" / "pretend_cuda"), cards]
    command = [*on_card, sys.executable, __file__, name, which]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"profile {name}, {which}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
