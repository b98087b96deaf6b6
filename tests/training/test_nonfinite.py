"""Losses and gradients that are not finite: every engine skips the update, and the log shows it."""

import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from applied import Applied

from hwopt import api
from hwopt.config.job import make_job
from hwopt.config.toml import Document
from hwopt.errors import NonFiniteError
from hwopt.planning.plan import Plan
from hwopt.plugin import Context, PluginOptions, Recipe, Stage
from hwopt.plugin.registry import Registry
from hwopt.saving.writer import AsyncWriter
from hwopt.testing import Recorder, plan_for, tiny_job, tiny_profile
from hwopt.training.build import build
from hwopt.training.loop import Loop
from hwopt.training.run import Run

STEPS = 6
PARAMETERS = 12
"""Parameters of which one is poisoned, evenly spaced over the model."""


class Poison(Applied):
    """Makes the loss, or the gradient of one parameter, non-finite in one micro-batch of some steps."""

    name = "poison"
    stage = Stage.LOOP

    class Options(PluginOptions):
        steps: tuple[int, ...] = ()
        micro_batch: int = 0
        parameter: int | None = None
        """None poisons the loss."""
        value: float = math.nan

        model_config = PluginOptions.model_config | {"allow_inf_nan": True}

    options: Options

    def apply(self, recipe: Recipe, context: Context) -> None:
        poisoning = Poisoning(self.options)
        recipe.model_steps.append(poisoning.enter)
        recipe.loss = poisoning.loss


class Poisoning:
    def __init__(self, options: Any) -> None:
        self.options = options
        self.run: Any = None
        self.at = (0, 0)
        """The step, and the number of the micro-batch in it."""

    def enter(self, model: Any, run: Run) -> Any:
        self.run = run
        if self.options.parameter is not None:
            trained = [p for p in model.parameters() if p.requires_grad]
            trained[self.options.parameter * (len(trained) - 1) // (PARAMETERS - 1)].register_hook(self.gradient)
        return model

    def now(self) -> bool:
        return self.run.step + 1 in self.options.steps and self.at[1] == self.options.micro_batch + 1

    def loss(self, outputs: Any, targets: Any) -> Any:
        loss, count = self.run.task.loss(outputs, targets)
        self.at = (self.run.step, self.at[1] + 1 if self.at[0] == self.run.step else 1)
        return (loss * self.options.value if self.options.parameter is None and self.now() else loss), count

    def gradient(self, gradient: Any) -> Any:
        if self.now():
            gradient = gradient.clone()
            gradient.view(-1)[0] = self.options.value
        return gradient


def planned(folder: Path, tables: dict[str, Any], poison: dict[str, Any] | None = None, **training: Any) -> Plan:
    registry = Registry()
    registry.add(Poison)
    job = tiny_job(folder / "data", samples=48, max_steps=STEPS, **({"logging_steps": 2} | training))
    data = {key: value for key, value in job.document.data["data"].items() if key != "eval"}
    job = make_job(Document(job.document.name, job.document.data | {"data": data}))
    tables = dict(tables)
    if poison is not None:
        tables["poison"] = poison
    return plan_for(tiny_profile(**tables), job, registry)


def trained(plan: Plan, folder: Path) -> tuple[Run, Recorder, list[dict[str, Any]]]:
    recorder = Recorder()
    api.execute(plan, folder / "run", recorder, cache=folder / "cache")
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return recorder.run, recorder, rows


def state_of(run: Run) -> list[torch.Tensor]:
    """What updates change: the weights (or their fp32 masters) and the optimizer state."""
    found = [p.detach() for p in run.engine.parameters]
    for p in run.engine.parameters:
        for _, value in sorted(run.optimizer.state[p].items()):
            if isinstance(value, torch.Tensor):
                found.append(value.dequantize() if hasattr(value, "codes") else value)
    return [tensor.detach().clone() for tensor in found]


def state_without_updates(plan: Plan, folder: Path, steps: tuple[int, ...]) -> list[torch.Tensor]:
    """The state after a run that skips the updates of `steps`."""
    with build(plan, folder / "reference", folder / "cache") as run:
        loop = Loop(run, AsyncWriter(run))
        run.engine.init_state()
        run.model.train()
        for batch in loop.batches():
            if run.step + 1 in steps:
                loop.accumulation.accumulate(batch, "at a step whose update is skipped")
                run.engine.zero_grad()
                run.engine.scheduler.step()
                run.progress.step += 1
            else:
                loop.update(batch)
        return state_of(run)


OPTIMIZERS = ["adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "adamw_torch_8bit"]
PRECISIONS = [{"dtype": "fp32"}, {"dtype": "bf16"}, {"dtype": "bf16", "level": "O2"}]


def draws(number: int, optimizers: list[str]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """`number` cases (tables, poison): optimizers and precisions in turn, the rest at random."""
    drawn = random.Random(0)
    for case in range(number):
        name, precision = optimizers[case % len(optimizers)], PRECISIONS[case // len(optimizers) % len(PRECISIONS)]
        poison = {"steps": [drawn.randint(1, STEPS)], "micro_batch": drawn.randint(0, 1)}
        if drawn.random() < 0.5:
            poison["parameter"] = drawn.randrange(PARAMETERS)
        value = {"value": drawn.choice([math.nan, math.inf, -math.inf])}
        yield {"optimizer": {"name": name}, "precision": precision}, poison | value


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning", "ignore::DeprecationWarning:torch")
@pytest.mark.parametrize(
    ("number", "optimizers"), [(3, OPTIMIZERS[:1]), pytest.param(100, OPTIMIZERS, marks=pytest.mark.soak)], ids=["few", "many"]
)
def test_nonfinite_update_is_skipped(
    number: int, optimizers: list[str], tmp_path: Path, figures: Callable[[str, str], None]
) -> None:
    for place, draw in enumerate(draws(number, optimizers)):
        folder, (tables, poison) = tmp_path / str(place), draw
        (step,) = poison["steps"]
        run, recorder, rows = trained(planned(folder, tables, poison, on_nonfinite="skip"), folder)
        wanted = state_without_updates(planned(folder, tables), folder, (step,))
        found = state_of(run)
        assert all(torch.isfinite(tensor.float()).all() for tensor in found), draw
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True)), draw
        first = next(row for row in rows if "skipped_updates" in row)
        assert first["step"] == step + step % 2, "the first log point after the step"
        assert rows[-1]["skipped_updates"] == 1
        assert all(math.isfinite(row["loss"]) for row in rows), "the mean counts finite losses only"
        assert (rows[-1].get("nonfinite_losses") == 1) == ("parameter" not in poison)
        assert [line for line in recorder.warnings if f"at step {step}: the update was skipped" in line], recorder.warnings
    figures("NaN/inf in the loss or a gradient", f"{number} of {number}: no poisoned update, shown in the log")


@pytest.mark.parametrize(
    ("training", "steps", "message"),
    [
        ({}, [3], r"a gradient was not finite at step 3; the update was skipped.*on_nonfinite = 'skip'"),
        ({"on_nonfinite": "skip", "nonfinite_limit": 2, "nonfinite_fraction": 1.0}, [2, 3, 4], "3 updates in a row.*to step 4"),
        ({"on_nonfinite": "skip"}, [2, 4], r"2 of 6 updates.*up to step 4.*nonfinite_fraction = 0\.1 allows 1"),
    ],
)
def test_run_stops_at_the_limit_of_skipped_updates(
    training: dict[str, Any], steps: list[int], message: str, tmp_path: Path
) -> None:
    plan = planned(tmp_path, {}, {"steps": steps}, **training)
    with pytest.raises(NonFiniteError, match=message):
        trained(plan, tmp_path)
    assert json.loads((tmp_path / "run" / "status.json").read_text(encoding="utf-8"))["exit_code"] == 5
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows[-1]["skipped_updates"] == len(steps), "the log has the last row"


def test_run_continues_within_the_limits_of_skipped_updates(tmp_path: Path) -> None:
    plan = planned(tmp_path, {}, {"steps": [2, 3, 5]}, on_nonfinite="skip", nonfinite_limit=2, nonfinite_fraction=0.5)
    _, recorder, rows = trained(plan, tmp_path)
    assert (rows[-1]["step"], rows[-1]["skipped_updates"]) == (6, 3)
    assert sum("was skipped" in line for line in recorder.warnings) == 3, "one line per log point"


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [
        (3, "bf16"),
        *(pytest.param(stage, dtype, marks=pytest.mark.soak) for stage in (1, 2, 3) for dtype in ("fp32", "bf16")),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_zero_skips_nonfinite_updates(stage: int, dtype: str, tmp_path: Path) -> None:
    """DeepSpeed checks for overflow only with a loss scale; hwopt makes it check always."""
    pytest.importorskip("deepspeed")
    tables = {"zero": {"stage": stage, "offload": "none"}, "precision": {"dtype": dtype}}
    parameter = {1: None, 2: 0, 3: 7}[stage]
    poison = {"steps": [3], "micro_batch": 1} | ({} if parameter is None else {"parameter": parameter})
    run, recorder, rows = trained(planned(tmp_path, tables, poison, on_nonfinite="skip"), tmp_path)
    assert all(torch.isfinite(p).all() for p in run.engine.parameters)
    assert rows[-1]["skipped_updates"] == 1
    assert any("at step 3: the update was skipped" in line for line in recorder.warnings)
    # the other updates equal those of a run without ZeRO
    again = planned(tmp_path, {"precision": {"dtype": dtype}}, poison, on_nonfinite="skip")
    _, _, plain = trained(again, tmp_path / "plain")
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in plain], rel=1e-2 if dtype == "bf16" else 1e-5)


def test_nonfinite_update_applied_by_deepspeed_ends_the_run() -> None:
    """Another version of DeepSpeed may apply such an update."""
    pytest.importorskip("deepspeed")
    from hwopt_plugins.zero.engine import ZeroEngine

    engine = ZeroEngine.__new__(ZeroEngine)
    engine.found_inf, engine.norm = torch.zeros(()), torch.zeros(())
    engine.deepspeed = SimpleNamespace(
        step=lambda: None, optimizer=SimpleNamespace(overflow=False), get_global_grad_norm=lambda: math.nan
    )
    with pytest.raises(NonFiniteError, match=r"DeepSpeed .* updated the weights with a gradient that is not finite"):
        engine.update()
