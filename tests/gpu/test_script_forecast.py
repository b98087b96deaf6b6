"""`hwopt.optimized` on a GPU predicts its memory before the first step: in the plan, plan.json and the report."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hosts.scripts import arguments, bert, padded, rows
from transformers import Trainer

import hwopt
from hwopt.errors import DoesNotFitError
from hwopt.hosts.forecast import Fit

pytestmark = pytest.mark.device("any")


def trained(folder: Path, cls: Any = Trainer, **settings: Any) -> Any:
    args = arguments(folder, max_steps=2, use_cpu=False)
    trainer = hwopt.optimized(cls, "rtx3090_24gb", **settings)(bert(), args, partial(padded, classes=True), rows())
    trainer.train()
    return trainer


def test_plan_and_report_have_the_forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path)
    assert "hwopt: memory: fits: " in capsys.readouterr().out
    memory = json.loads((tmp_path / "plan.json").read_text())["memory"]
    assert memory["fits"] is True
    assert memory["tier"] == "traced"
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Memory was not predicted for this run" not in page


class Own(Trainer):
    def compute_loss(self, *positional: Any, **named: Any) -> Any:
        return super().compute_loss(*positional, **named)


def test_unknown_forecast_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, Own)
    assert "memory: UNKNOWN: Own.compute_loss() may keep more" in capsys.readouterr().out


def test_plan_that_does_not_fit_is_refused_only_with_strict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hwopt.hosts.forecast.forecast", lambda *_: Fit(False, "9.00 of 8.00 GiB"))
    trained(tmp_path)
    assert 'does not fit: 9.00 of 8.00 GiB. Start with fewer rows at once, batch={"train": 1}' in capsys.readouterr().out
    off = {"adapter": False, "dataloader": {"num_workers": 0}}
    with pytest.raises(DoesNotFitError, match="strict: memory: does not fit"):
        trained(tmp_path, strict=True, **off)
