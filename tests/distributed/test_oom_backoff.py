"""Out of memory: no sample is lost or repeated, and only the split into micro-batches changes."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from applied import Applied
from hypothesis import given, settings
from hypothesis import strategies as st

from hwopt import api
from hwopt.config.profile import make_profile
from hwopt.distributed.oom_backoff import QUIET_STEPS, OomBackoff
from hwopt.errors import DoesNotFitError
from hwopt.memory.forecast.known_limits import recorded_limit
from hwopt.memory.forecast.lengths import lengths_of
from hwopt.planning.plan import Plan
from hwopt.plugin import Context, Plugin, Recipe
from hwopt.plugin.registry import Registry
from hwopt.testing import TINY_BERT, Recorder, plan_for, tiny_job, tiny_profile
from hwopt.training.run import Run
from hwopt.training.telemetry.use import MemoryPressure

Decide = Callable[[int, int, bool], bool]


class Shortage(Applied):
    """Raises torch's out-of-memory error inside the model, in forward or in backward, if `when` returns true."""

    name = "shortage"
    when: Decide = staticmethod(lambda rows, call, backward: False)
    _in_backward = False

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.model_steps.append(self.watch)

    def watch(self, model: Any, run: Any) -> Any:
        self.calls = 0
        embeddings = model.get_input_embeddings()
        embeddings.register_forward_hook(self.forward)
        return model

    def forward(self, module: Any, inputs: Any, output: Any) -> None:
        self.calls += 1
        rows, call = len(inputs[0]), self.calls
        if self._in_backward and output.requires_grad:
            output.register_hook(lambda gradient: self.fail(rows, call, True))
        else:
            self.fail(rows, call, False)

    def fail(self, rows: int, call: int, backward: bool) -> None:
        if type(self).when(rows, call, backward):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is.")


class Steps(Recorder):
    """Records the samples of each optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[list[int]] = []

    def on_log(self, run: Run, row: Any) -> None:
        super().on_log(run, row)
        if "loss" in row and run.last_step_batch is not None:
            self.samples.append(sorted(run.last_step_batch.samples))


def trained(folder: Path, when: Decide, *, in_backward: bool = False, train: int | str = 4, dropout: float = 0.0) -> Steps:
    plugin = type("Shortage", (Shortage,), {"when": staticmethod(when), "_in_backward": in_backward})
    return run_with(folder, plugin, train, dropout)


def run_with(folder: Path, plugin: type[Plugin], train: int | str = 4, dropout: float = 0.0) -> Steps:
    registry = Registry()
    registry.add(plugin)
    config = TINY_BERT | {"hidden_dropout_prob": dropout}
    job = tiny_job(folder / "data", config=config, max_steps=5, eval_steps=2)
    profile = tiny_profile(shortage={}, batch={"train": train, "effective": 8, "eval": 6})
    recorder = Steps()
    api.execute(plan_for(profile, job, registry), folder / "run", recorder, cache=folder / "cache")
    return recorder


def weights(folder: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    saved = load_file(folder / "run" / "final" / "model.safetensors")
    return torch.cat([saved[name].flatten() for name in sorted(saved)])


def never(rows: int, call: int, backward: bool) -> bool:
    return False


@pytest.mark.parametrize("in_backward", [False, True])
def test_backoff_gives_the_bits_of_the_finer_split_also_with_dropout(in_backward: bool, tmp_path: Path) -> None:
    small = trained(tmp_path / "small", never, train=2, dropout=0.1)
    whole = trained(tmp_path / "whole", lambda rows, call, backward: rows > 2, in_backward=in_backward, dropout=0.1)
    assert whole.samples == small.samples
    assert "Training ran out of memory" in " ".join(whole.warnings)
    assert whole.losses == small.losses
    assert torch.equal(weights(tmp_path / "whole"), weights(tmp_path / "small"))


@pytest.mark.parametrize("examples", [4, pytest.param(100, marks=pytest.mark.soak)])
def test_oom_at_any_forward_keeps_the_result(examples: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    plain = trained(tmp_path_factory.mktemp("plain"), never)

    @given(st.integers(1, 24), st.booleans())
    @settings(deadline=None, max_examples=examples)
    def check(at: int, in_backward: bool) -> None:
        recorder = trained(tmp_path_factory.mktemp("once"), lambda rows, call, backward: call == at, in_backward=in_backward)
        assert recorder.samples == plain.samples
        assert recorder.losses == pytest.approx(plain.losses, rel=1e-5)
        evaluations = [[row["eval_loss"] for row in each.rows if "eval_loss" in row] for each in (recorder, plain)]
        assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-5)

    check()


def test_evaluation_has_its_own_backoff(tmp_path: Path) -> None:
    recorder = trained(tmp_path, lambda rows, call, backward: rows == 6)
    assert any("Evaluation ran out of memory" in warning for warning in recorder.warnings)
    assert not any("Training" in warning for warning in recorder.warnings)


class SmallEvaluations(Shortage):
    """Evaluates at most 40 tokens at once, and keeps the rows of each micro-batch that fits."""

    _evaluated: ClassVar[list[int]] = []

    def forward(self, module: Any, inputs: Any, output: Any) -> None:
        if module.training:
            return
        if inputs[0].numel() > 40:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self._evaluated.append(len(inputs[0]))


def test_an_outlier_makes_its_own_evaluation_batch_small_and_no_later_one(tmp_path: Path) -> None:
    """In the same evaluation, in later ones and after a resume; memory runs out only once."""
    registry = Registry()
    registry.add(SmallEvaluations)
    profile = tiny_profile(shortage={}, batch={"train": 4, "eval": 4})
    recorder, sizes = Recorder(), SmallEvaluations._evaluated
    texts = [" ".join(["red"] * 30), *["green tree"] * 11]
    (tmp_path / "data").mkdir()
    for steps in (2, 4):
        sizes.clear()
        job = tiny_job(tmp_path / "data", max_steps=steps, eval_steps=1, save_steps=1)
        rows = [json.dumps({"text": text, "label": "other"}) for text in texts]
        (tmp_path / "data" / "eval.jsonl").write_text("\n".join(rows))
        plan = plan_for(profile, job, registry)
        api.execute(plan, tmp_path / "run", recorder, cache=tmp_path / "cache", resume=steps == 4)
        before_step_1 = [1, 1, 1, 1]
        assert sizes == before_step_1 + [1, 1, 1, 1, 4, 4] * 2
    short = [line for line in recorder.warnings if "Evaluation ran out of memory after" in line]
    assert len(short) == 2, "4 rows, then 2 rows"


def test_oom_with_single_rows_stops_the_run_with_a_report(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFitError, match=r"not even row by row.*max_length"):
        trained(tmp_path, lambda rows, call, backward: call > 4)
    assert json.loads((tmp_path / "run" / "status.json").read_text())["exit_code"] == 7
    report = json.loads((tmp_path / "run" / "out_of_memory.json").read_text())
    assert report["held_gib"]["weights"] > 0
    assert report["held_gib"]["optimizer_state"] == pytest.approx(2 * report["held_gib"]["weights"], rel=0.05)
    assert report["micro_batches"]
    assert max(report["longest_rows"]) <= 32
    assert "not even row by row" in report["reason"]


@pytest.mark.integration
@pytest.mark.daily
def test_oom_message_lists_changes_that_save_memory(tmp_path: Path) -> None:
    """The message does not suggest fewer rows: the backoff has tried single rows."""
    plugin = type("Shortage", (Shortage,), {"when": staticmethod(lambda rows, call, backward: call > 4)})
    registry = Registry()
    registry.add(plugin)
    wide = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_hidden_layers": 4}
    job = tiny_job(tmp_path / "data", config=TINY_BERT | wide, max_steps=5)
    document = tiny_profile(shortage={}, optimizer={"name": "adamw_torch"}).document

    def resolved(changes: Sequence[str] = ()) -> Plan:
        return plan_for(make_profile(document, changes), job, registry)

    with pytest.raises(DoesNotFitError, match=r"Predicted to save memory.*\n.*adamw_bnb_8bit.*saves 0\.\d+ GiB"):
        api.execute(resolved(), tmp_path / "run", cache=tmp_path / "cache", replan=resolved)
    message = json.loads((tmp_path / "run" / "status.json").read_text())["message"]
    assert "saves" in message
    assert "plugins.batch.train = " not in message


def checkpointed(model: Any) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def test_checkpointing_is_the_last_resort_and_keeps_the_result(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", never, train=1)

    class Watched(Shortage):
        _model: Any = None

        def watch(self, model: Any, run: Any) -> Any:
            type(self)._model = model
            return super().watch(model, run)

    Watched.when = staticmethod(lambda rows, call, backward: Watched._model.training and not checkpointed(Watched._model))
    recorder = run_with(tmp_path / "short", Watched)
    assert checkpointed(Watched._model)
    assert any("recomputed instead of stored" in warning for warning in recorder.warnings)
    assert recorder.samples == plain.samples
    assert recorder.losses == pytest.approx(plain.losses, rel=1e-6)


def test_chosen_batch_is_probed_without_changing_the_result(tmp_path: Path) -> None:
    fixed = trained(tmp_path / "fixed", never, train=8, dropout=0.1)
    chosen = trained(tmp_path / "chosen", never, train="auto", dropout=0.1)
    assert chosen.run.plan.batch.train == 8
    assert chosen.losses == fixed.losses
    assert torch.equal(weights(tmp_path / "fixed"), weights(tmp_path / "chosen"))
    short = trained(tmp_path / "short", lambda rows, call, backward: rows > 4, train="auto", dropout=0.1)
    assert "with the longest samples" in short.warnings[-1]
    assert short.samples == fixed.samples
    plan, cache = short.run.plan, tmp_path / "short" / "cache"
    assert recorded_limit(plan, lengths_of(plan, cache), cache) == 4  # the next plan for this card starts with this size
    smaller = replace(plan, batch=replace(plan.batch, train=6))
    assert recorded_limit(smaller, lengths_of(plan, cache), cache) == 4
    assert recorded_limit(fixed.run.plan, lengths_of(plan, cache), tmp_path / "fixed" / "cache") is None


def test_two_consecutive_signs_warn_of_memory_pressure() -> None:
    pressure = MemoryPressure(torch.device("cpu"))
    assert pressure.message() is None
    assert [bool(pressure.judge(retries, 0, 1)) for retries in (1, 1, 2, 3, 3)] == [False, False, False, True, False]
    pressure.may_spill = True
    assert [bool(pressure.judge(3, reserved, 10)) for reserved in (11, 11, 9)] == [False, True, False]


def test_backoff_recovers_with_hysteresis() -> None:
    messages: list[str] = []
    backoff = OomBackoff("Training", "plugins.batch.train", messages.append)
    backoff.reduce(3, "here", "no room")
    for _ in range(QUIET_STEPS):
        assert backoff.rung == 1
        backoff.step_succeeded()
    assert backoff.rung == 0
    backoff.reduce(3, "here", "no room")  # out of memory again: the backoff waits twice as long
    for _ in range(2 * QUIET_STEPS):
        assert backoff.rung == 1
        backoff.step_succeeded()
    assert (backoff.rung, backoff.oom_count, len(messages)) == (0, 2, 4)


def test_a_batch_that_was_not_split_fails_without_a_finer_rung_for_others() -> None:
    backoff = OomBackoff("Training", "plugins.batch.train", lambda message: None)
    backoff.reduce(3, "here", "no room")
    backoff.batch_succeeded(1, 400)
    assert backoff.rung_for(lambda rung: 400 >> rung) == 0
    assert backoff.rung_for(lambda rung: 401 >> rung) == 1
    backoff.reduce(1, "here", "less room than before", tried=0)  # two rows that fitted before
    assert backoff.rung_for(lambda rung: 400 >> rung) == backoff.rung == 1
    for _ in range(2 * QUIET_STEPS):
        backoff.batch_succeeded(0, 100)  # small batches are not evidence that larger ones fit
    assert backoff.rung == 1
    again = OomBackoff("Evaluation", "plugins.batch.eval", lambda message: None)
    again.load_state_dict(backoff.state_dict())
    assert again.state_dict() == backoff.state_dict()
