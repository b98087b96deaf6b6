"""Measure the overhead of the training loop over a bare PyTorch loop with clipping and a LambdaLR. The model is Linear 16 -> 2.

    python benchmarks/overhead.py [--rounds 7] [--steps 2000]

The rounds interleave the variants and rotate their order. The second bare loop shows the noise. Prints JSON with the versions.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from hwopt.data.batches.step_batch import Part, Step, StepBatch
from hwopt.distributed.engine import Engine
from hwopt.distributed.forward_backward import ForwardBackward
from hwopt.distributed.oom_backoff import OomBackoff
from hwopt.plugin.recipe import Recipe
from hwopt.training.accumulation import Accumulation
from hwopt.training.listener import Listener
from hwopt.training.loop import Loop
from hwopt.training.randomness import UPDATE, reseeder
from hwopt.training.run import Progress
from hwopt.training.telemetry.telemetry import Telemetry
from hwopt.training.telemetry.use import UseMeter

ROWS = 32


class BenchmarkRun(SimpleNamespace):
    """The attributes of a run that a step needs."""

    @property
    def step(self) -> int:
        return int(self.progress.step)


def linear_model() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """The model, its fused AdamW, and a constant schedule."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1.0)


def bare_loop(steps: int) -> Callable[[], None]:
    """A function that runs `steps` steps of a PyTorch loop as one writes it by hand."""
    model, optimizer, scheduler = linear_model()
    inputs, targets = torch.randn(ROWS, 16), torch.randint(2, (ROWS,))

    def run() -> None:
        for _ in range(steps):
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)

    return run


def hwopt_loop(steps: int) -> Callable[[], None]:
    """A function that runs `steps` steps of hwopt's loop."""
    model, optimizer, scheduler = linear_model()
    # a step batch with one micro-batch: the 32 x 16 input
    batch = StepBatch(
        Step(0, 0, tuple(range(ROWS)), ROWS),
        {"input": torch.randn(ROWS * 16), "row_labels": torch.randint(2, (ROWS,))},
        (Part(0, 0, ROWS, 16),),
        lengths=(16,) * ROWS,
        samples=tuple(range(ROWS)),
        units=(1,) * ROWS,
    )
    run: Any = BenchmarkRun(
        model=model,
        inner_model=model,
        optimizer=optimizer,
        parameter_names=[name for name, _ in model.named_parameters()],
        scheduler=scheduler,
        scaler=None,
        device=torch.device("cpu"),
        world_size=1,
        progress=Progress(),
        total_steps=10**9,
        training=SimpleNamespace(max_grad_norm=1.0, logging_steps=10**9, seed=0),
        recipe=Recipe(),
        loss=lambda outputs, targets: (torch.nn.functional.cross_entropy(outputs, targets, reduction="sum"), ROWS),
        heartbeat=lambda: None,
        listener=Listener(),
        train_loader=None,
    )
    run.engine = Engine(run)
    run.forward_backward = ForwardBackward(run)
    loop = Loop.__new__(Loop)  # without the parts that save and evaluate
    loop.run, loop.use = run, UseMeter(run)
    loop.telemetry = Telemetry(run, loop.use)
    loop.backoff = OomBackoff("Training", "plugins.batch.train", print)
    loop.reseed_update = reseeder(run.device, 0, UPDATE)
    loop.accumulation = Accumulation(run, loop.telemetry, loop.backoff)

    def train() -> None:
        with loop.use.running():
            for _ in range(steps):
                loop.telemetry.waited(0.0)
                moved = batch.to(run.device)
                loop.use.timer.begin_step()
                loop.update(moved)
                loop.use.timer.end_step()
                loop.telemetry.stepped(moved)

    return train


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--steps", type=int, default=2000)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    variants = {"bare": bare_loop(options.steps), "bare again": bare_loop(options.steps), "hwopt": hwopt_loop(options.steps)}
    for run in variants.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(options.rounds):
        for name in names[number % 3 :] + names[: number % 3]:
            began = time.perf_counter()
            variants[name]()
            seconds[name].append((time.perf_counter() - began) / options.steps * 1e6)
    found: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.processor()}
    for name, each in seconds.items():
        ratios = [one / base for one, base in zip(each, seconds["bare"], strict=True)]
        found[name] = {
            "us_per_step": round(statistics.median(each), 1),
            "over_bare_us": round(statistics.median(a - b for a, b in zip(each, seconds["bare"], strict=True)), 1),
            "ratio": [round(f(ratios), 3) for f in (min, statistics.median, max)],
        }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
