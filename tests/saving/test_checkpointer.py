"""The content of checkpoints, which checkpoints are kept, and emergency saves of failed runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hwopt.errors import StorageError
from hwopt.saving.checkpointer import Checkpointer, load_buffers, persistent_buffers
from hwopt.saving.reader import STATE


class Writer:
    """Records the write requests."""

    seconds = 0.0

    def __init__(self, error: Exception | None = None) -> None:
        self.written: list[tuple[Path, Any, Any]] = []
        self.error = error

    def wait(self, all_ranks: bool = True) -> None:
        if self.error is not None:
            raise self.error

    def write(self, target: Path, content: Any, state: Any, weights: Any, copies: Any, then: Any) -> None:
        self.written.append((target, content, state))


def make_run(folder: Path, step: int = 5, **changed: Any) -> Any:
    """The part of a run on one rank that the checkpointer reads."""
    model = torch.nn.BatchNorm1d(2)
    engine = SimpleNamespace(
        meets_in_micro_batches=False,
        state=lambda kept: {"parameters": {}},
        all_gather=lambda value: [value],
        loaded=[],
    )
    engine.load_state = engine.loaded.append
    run = SimpleNamespace(
        folder=folder,
        step=step,
        rank=0,
        world_size=1,
        is_main=True,
        inner_model=model,
        engine=engine,
        recipe=SimpleNamespace(state=[]),
        training=SimpleNamespace(save_total_limit=2, save_steps=5, save_minutes=0),
        progress=SimpleNamespace(between_steps=True, peers_lost=False, state_dict=lambda: {"step": run.step}),
        plan=SimpleNamespace(settings={}, machine={}, decided=dict),
        facts={"seed": 0},
        checkpoint=None,
        state_dict=dict,
        warnings=[],
    )
    run.warn = run.warnings.append
    return SimpleNamespace(**(vars(run) | changed))


def make_checkpointer(run: Any, writer: Any = None, **parts: Any) -> Checkpointer:
    best: Any = SimpleNamespace(step=0, evaluated=0, state_dict=dict, load_state_dict=lambda state: None)
    return Checkpointer(run, writer or Writer(), best, parts)


@pytest.mark.parametrize(
    ("changed", "all_ranks", "saves"),
    [
        ({}, True, True),
        ({}, False, True),
        ({"progress": SimpleNamespace(between_steps=False, peers_lost=False)}, True, False),
        ({"world_size": 2}, False, True),
        ({"world_size": 2, "is_main": False, "rank": 1}, False, False),
    ],
    ids=["one rank", "one rank alone", "inside an update", "the first of two alone", "the second of two alone"],
)
def test_emergency_save_needs_a_whole_step_and_the_first_rank(
    changed: dict[str, Any], all_ranks: bool, saves: bool, tmp_path: Path
) -> None:
    writer = Writer()
    make_checkpointer(make_run(tmp_path, **changed), writer).emergency_save(all_ranks)
    assert bool(writer.written) == saves


def test_emergency_save_that_fails_is_a_warning(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    make_checkpointer(run, Writer(StorageError("No space left on device"))).emergency_save(all_ranks=True)
    assert run.warnings == ["The steps since 0 could not be saved: No space left on device"]


def write_folder(path: Path, **content: Any) -> None:
    path.mkdir()
    (path / STATE).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("limit", "best_is_final", "kept"),
    [
        (2, False, {"checkpoint-4", "checkpoint-5", "best-3", "best-9"}),
        (1, True, {"checkpoint-5", "best-3"}),
        (0, False, {"checkpoint-3", "checkpoint-4", "checkpoint-5", "best-1", "best-3", "best-9"}),
    ],
)
def test_prune_keeps_the_newest_and_the_weights_that_they_refer_to(
    limit: int, best_is_final: bool, kept: set[str], tmp_path: Path
) -> None:
    for step, best in ((3, 1), (4, 3), (5, 3)):
        write_folder(tmp_path / f"checkpoint-{step}", format=1, step=step, best_step=best, state={})
    for step in (1, 3, 9):
        write_folder(tmp_path / f"best-{step}")
    run = make_run(tmp_path)
    run.training.save_total_limit = limit
    checkpointer = make_checkpointer(run)
    checkpointer.best.step = 9
    checkpointer.prune(best_is_final)
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_buffers_are_restored_by_name() -> None:
    trained, fresh = torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)
    trained(torch.randn(8, 2))
    saved = {name: buffer.clone() for name, buffer in persistent_buffers(trained).items()}
    del saved["num_batches_tracked"]
    load_buffers(fresh, saved)
    assert torch.equal(fresh.running_mean, trained.running_mean)  # type: ignore[arg-type]
    assert int(fresh.num_batches_tracked) == 0  # type: ignore[arg-type]
