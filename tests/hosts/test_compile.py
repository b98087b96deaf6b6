"""`compile` in a Trainer: training steps alone are compiled, with few widths; else the plan says why it is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hosts import scripts
from hosts.scripts import arguments, bert, farthest, llama, train
from hosts.test_trainer import CLOSE, SPLIT, Custom
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounter
from transformers import Trainer

import hwopt
from hwopt.hosts.collated import why_not_padded
from hwopt.hosts.limits import lacks_of
from hwopt.runs.record import read_record

# PEFT uses the name that transformers is about to drop
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

WIDTHS = [32, 64]
FUSED = {"backend": "torch", "chunks": 3}


@pytest.fixture(autouse=True)
def one_layer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Compiling a layer takes seconds. Forgets what is compiled: torch keeps it for the class of a layer."""
    monkeypatch.setitem(scripts.SIZES, "num_hidden_layers", 1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def padded_llama() -> Any:
    model = llama()
    model.config.pad_token_id = 0
    return model


@pytest.mark.parametrize(("make", "scope", "own"), [(bert, "block", {}), (padded_llama, "model", {"fused_loss": FUSED})])
def test_training_steps_alone_are_compiled(
    make: Any, scope: str, own: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    _, wanted = train(Trainer, tmp_path / "plain", make, **changes)
    graphs, compile_module = CompileCounter(), torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **_: compile_module(module, backend=graphs))
    table = {"scope": scope, "widths": WIDTHS}
    trainer, found = train(hwopt.optimized(Trainer, "cpu", compile=table, **SPLIT, **own), tmp_path / "ours", make, **changes)
    assert farthest(found, wanted) < CLOSE
    widths = {width for step in trainer._run.steps for _, width in step.sizes}
    assert widths == set(WIDTHS)
    assert 1 <= graphs.frame_count <= 2 * len(widths)  # one more for a single row; evaluation has other widths, and none
    assert not any(module._compiled_call_impl for module in trainer.model.modules())
    assert not trainer._run.compiled
    saved = [load_file(tmp_path / name / "checkpoint-2" / "model.safetensors") for name in ("plain", "ours")]
    assert saved[0].keys() == saved[1].keys()


@pytest.mark.integration
def test_compiled_graphs_are_called_and_counted(tmp_path: Path) -> None:
    _, wanted = train(Trainer, tmp_path / "plain", max_steps=1)
    ours = hwopt.optimized(Trainer, "cpu", compile={"scope": "block", "widths": [64]}, **SPLIT)
    _, found = train(ours, tmp_path / "ours", max_steps=1)
    assert farthest(found, wanted) < CLOSE
    evidence = next(entry for entry in read_record(tmp_path / "ours").evidence if entry["name"] == "compile")
    assert evidence["status"] == "active", evidence["seen"]
    assert evidence["seen"].startswith("1 module(s) compiled (BertLayer)")
    assert "0 graph break(s)" in evidence["seen"]


@pytest.mark.parametrize(
    ("cls", "make", "changes", "why"),
    [
        (Trainer, llama, {}, "the batches have any width: no pad token is known"),
        (Custom, bert, {}, "a step is not split: Custom computes a loss of its own"),
    ],
)
def test_batches_of_any_width_are_not_compiled(
    cls: Any, make: Any, changes: Any, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, _ = train(hwopt.optimized(cls, "cpu", compile={"widths": WIDTHS}, **SPLIT), tmp_path, make, max_steps=1, **changes)
    assert f"skip     compile: {why}" in capsys.readouterr().out
    assert not trainer._run.compiled


def test_batches_that_can_be_padded() -> None:
    ids = torch.ones(2, 3, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": ids, "labels": ids}
    assert why_not_padded(batch, 0) == ""
    assert why_not_padded(batch | {"labels": ids[:, :2]}, 0) == "'labels' is not as wide as input_ids"
    assert why_not_padded(batch | {"position_ids": ids}, 0) == "not all values are known to have a column for each token"
    assert why_not_padded({"input_ids": ids}, 0) == "not all values are known to have a column for each token"


def test_own_word_for_the_compiler_wins(tmp_path: Path) -> None:
    why = lacks_of(Trainer, arguments(tmp_path, torch_compile=True), {})["prepared_steps"]
    assert why == "torch_compile = True of your arguments compiles the model"
