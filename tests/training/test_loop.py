"""The training loop: kernels and host syncs per step, evaluation, best weights, non-finite gradients."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from hwopt.errors import InputError
from hwopt.saving.writer import AsyncWriter
from hwopt.testing import plan_for, tiny_job, tiny_profile, train_tiny, write_samples
from hwopt.training.build import build
from hwopt.training.evaluation import Evaluation
from hwopt.training.loop import Loop
from hwopt.training.run import Run

SYNCS = ("_local_scalar_dense", "nonzero", "item", "equal", "is_nonzero")

FUSED = {"optimizer": {"name": "adamw_torch_fused"}}
TABLES: dict[str, dict[str, Any]] = {
    "unfused": {"optimizer": {"name": "adamw_torch"}},
    "fused": {},
    "O1": {"precision": {"dtype": "bf16"}},
    "O2": {"precision": {"dtype": "bf16", "level": "O2"}},
    "checkpointing": {"checkpointing": {}},
    "length_batching": {"length_batching": {}},
    "sdpa": {"sdpa": {}},
    "decoder": {"checkpointing": {}},
    "adapter": {"adapter": {"always": True, "kind": "dora"}},
}


class Calls(TorchDispatchMode):
    """Counts the calls to the dispatcher: every kernel, and every host sync."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function._schema.name.removeprefix("aten::")] += 1
        return function(*args, **(kwargs or {}))

    @property
    def syncs(self) -> int:
        return sum(count for name, count in self.counts.items() if name in SYNCS)


def counted_step(run: Run, steps: int = 3) -> Calls:
    """The dispatcher calls of the last of `steps` steps; earlier steps create state and caches."""
    loop = Loop(run, AsyncWriter(run))
    run.model.train()
    calls = Calls()
    for number, batch in enumerate(loop.batches()):
        if number == steps - 1:
            with calls:
                loop.update(batch)
            return calls
        loop.update(batch)
    raise AssertionError("the run has too few steps")


@pytest.mark.parametrize("name", TABLES)
def test_host_reads_nothing_in_a_step_with_fused_adamw(name: str, tmp_path: Path) -> None:
    """Without it: found_inf, since the optimizer cannot skip on the device, and torch's step counters, which are host tensors."""
    kind = "causal-lm" if name == "decoder" else "text-classification"
    plan = plan_for(tiny_profile(**(FUSED | TABLES[name])), tiny_job(tmp_path / "data", kind, max_steps=4, logging_steps=4))
    with build(plan, tmp_path / "run", tmp_path / "cache") as run:
        expected = 1 + len(run.engine.parameters) if name == "unfused" else 0
        assert counted_step(run).syncs == expected


def test_step_adds_a_fixed_number_of_kernels_to_a_bare_loop(tmp_path: Path) -> None:
    """A bare loop has forward, backward, clipping and the optimizer's step."""
    plan = plan_for(tiny_profile(**FUSED), tiny_job(tmp_path / "data", max_steps=4, logging_steps=4))
    with build(plan, tmp_path / "run", tmp_path / "cache") as run:
        ours = counted_step(run)
        batch = next(Loop(run, AsyncWriter(run)).batches())  # of the next step: as many micro-batches
        parameters = list(run.inner_model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
        for _ in range(2):  # the first step creates Adam's state
            bare = Calls()
            with bare:
                for micro_batch, _last in batch.micro_batches():
                    logits = run.inner_model(**micro_batch.inputs).logits
                    loss = torch.nn.functional.cross_entropy(logits.float(), micro_batch.targets, reduction="sum") / batch.rows
                    loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        extra = ours.counts - bare.counts
        micro_batches = len(batch.parts)
        # per micro-batch: fill the factor, add its part of the loss; per step: the finite check (3), found_inf for fused AdamW
        assert sum(extra.values()) <= 4 * micro_batches + 8, extra


def test_schedule_counts_steps_and_summary_names_the_best_one(tmp_path: Path) -> None:
    job = tiny_job(tmp_path / "data", max_steps=10, learning_rate=1e-2, eval_steps=2, lr_scheduler_type="linear")
    recorder = train_tiny(plan_for(tiny_profile(), job), tmp_path)
    rates = [row["learning_rate"] for row in recorder.rows if "loss" in row]
    assert rates == pytest.approx([1e-2 * (1 - n / 10) for n in range(10)]), "of the update itself, as transformers logs it"
    evaluations = {int(row["step"]): row["eval_f1"] for row in recorder.rows if "eval_f1" in row}
    assert list(evaluations) == [2, 4, 6, 8, 10]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["best_eval_f1"] == max(evaluations.values())
    assert evaluations[summary["best_step"]] == summary["best_eval_f1"]


def test_test_data_is_evaluated_once_with_the_best_weights_which_final_holds(tmp_path: Path) -> None:
    """The learning rate ruins the model late."""
    write_samples(tmp_path / "test.jsonl", 30, seed=2)
    data, rate = {"test": str(tmp_path / "test.jsonl")}, {"learning_rate": 0.5, "lr_scheduler_type": "constant"}
    recorder = train_tiny(
        plan_for(tiny_profile(), tiny_job(tmp_path / "data", max_steps=8, eval_steps=1, data=data, **rate)), tmp_path
    )
    (tested,) = [row for row in recorder.rows if "test_loss" in row]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["best_step"] < 8
    assert (summary["test_loss"], summary["test_f1"]) == (tested["test_loss"], tested["test_f1"])
    again = tiny_job(tmp_path / "again", data={"eval": data["test"]}, max_steps=1)
    with build(plan_for(tiny_profile(), again), tmp_path / "other", tmp_path / "cache") as run:
        run.inner_model.load_state_dict(load_file(tmp_path / "run" / "final" / "model.safetensors"))
        metrics = Evaluation(run).evaluate()
    assert metrics["eval_f1"] == tested["test_f1"]
    assert metrics["eval_loss"] == pytest.approx(tested["test_loss"], rel=1e-6)
    assert not list((tmp_path / "run").glob(".*")), "no temporary files are left"


def test_workers_are_gone_after_a_run(tmp_path: Path) -> None:
    write_samples(tmp_path / "test.jsonl", 30, seed=2)
    job = tiny_job(tmp_path / "data", max_steps=2, data={"test": str(tmp_path / "test.jsonl")})
    before = set(psutil.Process().children())
    train_tiny(plan_for(tiny_profile(dataloader={"num_workers": 1}), job), tmp_path)
    assert {child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE} <= before


@pytest.mark.parametrize(("metric", "expected"), [("eval_f2", "Did you mean 'eval_f1'"), ("perplexity", "Choose one of")])
def test_unknown_metric_is_refused_before_the_run_folder_exists(metric: str, expected: str, tmp_path: Path) -> None:
    job = tiny_job(tmp_path / "data", metric_for_best_model=metric)
    with pytest.raises(InputError, match=expected):
        train_tiny(plan_for(tiny_profile(), job), tmp_path)
    assert not (tmp_path / "run").exists()


def test_failed_step_adds_no_row_to_the_log(tmp_path: Path) -> None:
    """For example, a worker dies between two micro-batches. The resumed run repeats this step."""
    plan = plan_for(tiny_profile(batch={"train": 4, "effective": 12}), tiny_job(tmp_path / "data", logging_steps=4))
    with build(plan, tmp_path / "run", tmp_path / "cache") as run:
        loop = Loop(run, AsyncWriter(run))
        batches, loss, left = loop.batches(), run.loss, [4]

        def dying(*arguments: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
            return loss(*arguments)

        run.loss = dying
        loop.update(next(batches))
        before = loop.telemetry.mark()
        left[0] = 2
        with pytest.raises(RuntimeError, match="worker"):
            loop.update(next(batches))
        assert before > 0
        assert loop.telemetry.mark() == before
        assert run.step == 1
