"""`hwopt.train(profile, model=module, …)`: the steps of a bare loop, retry and resume with equal bits, and refused losses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts.scripts import llama, padded, rows

import hwopt
from hwopt.api import Target
from hwopt.errors import DataError, InputError
from hwopt.hosts.script_plan import Script, plan_for

OPTIONS: dict[str, Any] = {"batch": {"train": 4}, "precision": {"dtype": "fp32"}, "schedule": False}
STEPS = {"max_steps": 6, "logging_steps": 1, "learning_rate": 1e-2, "max_grad_norm": 1.0, "weight_decay": 0.0}


class Net(torch.nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = torch.nn.Linear(8, 16), torch.nn.Dropout(dropout), torch.nn.Tanh(), torch.nn.Linear(16, 3)
        self.layers = torch.nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, torch.nn.BatchNorm1d(16))


class Points(torch.utils.data.Dataset[Any]):
    """48 rows with a class. `noise`: each read of a row adds new random noise."""

    def __init__(self, noise: float = 0.0) -> None:
        self.noise = noise
        self.x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index] + self.noise * torch.randn(8), "labels": index % 3}


def mean(outputs: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs, batch["labels"])


def summed(outputs: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs, batch["labels"], reduction="sum")


def correct(outputs: Any, batch: Any) -> torch.Tensor:
    return (outputs.argmax(-1) == batch["labels"]).float()


def train(folder: Path, model: Any = None, training: Any = None, name: str = "own", resume: bool = False, **given: Any) -> Any:
    """The rows of the log that have a loss, and the summary."""
    parts = {"model": model or Net(), "train_dataset": Points(), "loss": mean, "additive": "rows", "rows": 16, "plugins": OPTIONS}
    target = Target(folder, name, resume=resume)
    summary = hwopt.train("cpu", training=STEPS | (training or {}), target=target, **(parts | given))
    lines = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if "loss" in row], summary


def limited(model: Any, most: int) -> Any:
    def refuse(module: Any, positional: Any, named: Any) -> None:
        if torch.is_grad_enabled() and len(next(iter(named.values()))) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    return model


@pytest.mark.parametrize(("loss", "additive"), [(mean, "rows"), (mean, "labels"), (summed, "sum")])
def test_steps_are_those_of_a_bare_loop_also_out_of_memory(loss: Any, additive: str, tmp_path: Path) -> None:
    from hwopt.training.randomness import shuffled

    points, model, wanted = Points(), Net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 6)
    found, _ = train(tmp_path, loss=loss, additive=additive)
    short, _ = train(tmp_path, limited(Net(), 2), name="short", loss=loss, additive=additive)
    seed = json.loads((tmp_path / "own" / "plan.json").read_text())["training"]["seed"]
    for step in range(6):
        order = shuffled(range(48), seed, step // 3)[16 * (step % 3) : 16 * (step % 3 + 1)]
        batch = torch.utils.data.default_collate([points[int(index)] for index in order])
        value = loss(model(batch["x"]), batch)
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        wanted.append((value.item(), norm.item()))
    for log in (found, short):
        assert [(row["loss"], row["grad_norm"]) for row in log] == [pytest.approx(each, rel=1e-5) for each in wanted]


def test_model_of_transformers_with_its_own_loss_and_a_collator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def collate(features: list[Any]) -> Any:
        return padded(features, classes=False)

    parts: dict[str, Any] = {"train_dataset": rows(48), "collate_fn": collate, "loss": None, "additive": "labels"}
    whole = OPTIONS | {"batch": {"train": 16}, "length_batching": False}
    found, _ = train(tmp_path, llama(), **parts)
    other, _ = train(tmp_path, llama(), name="whole", plugins=whole, **parts)
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in other], rel=1e-5)
    assert "memory: " in capsys.readouterr().out


def test_metrics_are_means_over_all_rows_of_the_evaluation_and_the_best_weights_are_kept(tmp_path: Path) -> None:
    model = Net()
    _, summary = train(tmp_path, model, eval_dataset=Points(), metrics={"accuracy": correct})
    batch = torch.utils.data.default_collate([Points()[index] for index in range(48)])
    with torch.no_grad():
        assert summary["eval_accuracy"] == pytest.approx(correct(model.eval()(batch["x"]), batch).mean().item())
    assert (tmp_path / "own" / "final" / "model.safetensors").is_file()


def test_precision_is_full_where_no_layer_was_measured() -> None:
    entries = plan_for(torch.nn.Conv1d(4, 4, 3), "cpu", Script(16, 16, {}), {}).plan.entries
    reason = next(entry.reason for entry in entries if entry.name == "precision")
    assert re.match("fp32: .* not known", reason)


def test_resumed_run_draws_the_same_random_rows_and_dropout(tmp_path: Path) -> None:
    wanted, _ = train(tmp_path, Net(0.2), train_dataset=Points(0.5))
    calls = iter(range(10**6))

    def breaks(outputs: Any, batch: Any) -> torch.Tensor:
        if outputs.requires_grad and next(calls) > 18:
            raise ZeroDivisionError
        return mean(outputs, batch)

    parts: dict[str, Any] = {"train_dataset": Points(0.5), "training": {"save_steps": 2}, "name": "broken"}
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, Net(0.2), loss=breaks, **parts)
    found, _ = train(tmp_path, Net(0.2), resume=True, **parts)
    assert [row["loss"] for row in found] == [row["loss"] for row in wanted]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"additive": None}, InputError, "Say additive = 'rows' .* 8 rows of your data agree with 'rows'"),
        ({"additive": "sum"}, InputError, "'sum' .a sum over rows. is wrong for 8 rows of your data"),
        ({"loss": lambda outputs, batch: mean(outputs, batch) ** 2}, InputError, "is wrong for 8 rows"),
        ({"model": Normed()}, InputError, "whose statistics depend on"),
        ({"model": torch.nn.DataParallel(Net())}, InputError, "wrapped in DataParallel"),
        ({"collate_fn": lambda rows: [row["x"] for row in rows]}, DataError, "expected a dict of tensors"),
        ({"train_dataset": [{"x": torch.ones(number)} for number in range(1, 9)]}, DataError, "unequal size. Pass a collate_fn"),
        ({"train_dataset": [{"x": [1.0] * 8}] * 8}, DataError, "an entry for each of 8 rows.* Pass a collate_fn that pads"),
        ({"train_dataset": [(torch.ones(8), 1)] * 8}, DataError, "got list. Pass a collate_fn that .*whose rows are dicts"),
        ({"model": torch.nn.Sequential(torch.nn.Linear(8, 3))}, InputError, "forward.. needs 'input', .* have 'x', 'lab"),
        ({"rows": 0}, InputError, "rows = 0: expected the rows of an optimizer step"),
        ({"metrics": {"accuracy": correct}, "eval_dataset": None}, InputError, "pass eval_dataset too"),
        ({"train_dataset": iter(())}, InputError, "needs __len__ and __getitem__"),
        ({"train_dataset": None}, InputError, "needs __len__ and __getitem__; NoneType"),
        ({"loss": None}, InputError, "Net.forward.. takes no 'labels': without loss= the model computes the loss"),
        ({"loss": None, "train_dataset": [{"x": torch.ones(8)}] * 8}, InputError, "loss is None: .*from loss=lambda"),
        ({"loss": lambda outputs, batch: outputs}, InputError, r"shape .8, 3.: expected a scalar tensor, from loss$"),
    ],
)
def test_mistakes_are_refused(given: Any, error: type, message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        train(tmp_path, **given)
    assert not list(tmp_path.iterdir())


def test_metric_that_is_a_number_is_refused_in_the_evaluation(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"for each row, .*got \(\)"):
        train(tmp_path, eval_dataset=Points(0.5), metrics={"m": lambda outputs, batch: 0.5})
