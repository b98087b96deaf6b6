"""A resumed run uses the newest valid checkpoint and the same samples, and ends with the same bits."""

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from event_calls import calling
from transformers import AutoConfig, AutoModelForSequenceClassification

from hwopt import api
from hwopt.errors import InputError, StorageError
from hwopt.planning.plan import Plan
from hwopt.saving import reader as resume
from hwopt.saving import save_timing
from hwopt.system import atomic_folder as storage
from hwopt.system import signals
from hwopt.testing import TINY_BERT, Recorder, logged, plan_for, relative_error, rewound, saved_bits, tiny_job, tiny_profile
from hwopt.training import loop
from hwopt.training.evaluation import Evaluation
from hwopt.training.loop import summarize

LAST = 12
"""Steps of a run here: three epochs of 41 rows, 12 a step, the last one of each 5; evaluations every 5 and at the end."""


def make_plan(folder: Path, training: dict[str, Any] | None = None, **tables: Any) -> Plan:
    """A plan with dropout, three micro-batches a step, and a checkpoint after every step."""
    settings = {"max_steps": LAST, "learning_rate": 1e-2, "eval_steps": 5, "save_steps": 1}
    settings |= {"save_total_limit": 0, "logging_steps": 2}
    given = {key: value for key, value in (settings | (training or {})).items() if value is not None}
    job = tiny_job(folder / "data", samples=41, **given)
    model = job.job.model.model_copy(update={"config": TINY_BERT | {"hidden_dropout_prob": 0.1}})
    job = type(job)(job.job.model_copy(update={"model": model}), job.document)
    return plan_for(tiny_profile(**{"batch": {"train": 4, "effective": 12}, **tables}), job)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    api.execute(make_plan(folder), folder / "run", cache=folder / "cache")
    return folder


@pytest.fixture(scope="module")
def ruined(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan, int]:
    """(folder, plan, best step) of a run whose learning rate ruins the model after the first evaluation."""
    folder = tmp_path_factory.mktemp("ruined")
    plan = make_plan(folder, {"learning_rate": 0.5, "eval_steps": 2, "lr_scheduler_type": "constant"})
    api.execute(plan, folder / "run", cache=folder / "cache")
    best = json.loads((folder / "run" / "summary.json").read_text())["best_step"]
    assert best < 6
    return folder, plan, best


def resumed_from(folder: Path, step: int, target: Path, plan: Plan | None = None, **options: Any) -> Recorder:
    """Resume the run of `folder` from its state after `step`. Returns what the run reported."""
    recorder = Recorder()
    run = rewound(folder / "run", target, step)
    options = {"resume": True} | options
    api.execute(plan or make_plan(folder), run, recorder, cache=folder / "cache", **options)
    return recorder


def same(ours: Path, theirs: Path) -> bool:
    parts = ("final", f"checkpoint-{LAST}")
    return all(saved_bits(ours / part) == saved_bits(theirs / part) for part in parts)


@pytest.mark.parametrize("step", [1, 4, 5, 12], ids=lambda step: f"step{step}")
def test_resume_from_any_step_gives_the_same_bits(step: int, uninterrupted: Path, tmp_path: Path) -> None:
    """Steps in an epoch, at its end (4, 12), after an evaluation (5), and in a log interval (1, 5)."""
    resumed_from(uninterrupted, step, tmp_path / "run")
    assert same(tmp_path / "run", uninterrupted / "run")
    for key in ("step", "loss", "eval_loss", "learning_rate"):
        assert logged(tmp_path / "run", key) == logged(uninterrupted / "run", key)
    ours, theirs = (json.loads((run / "run" / "summary.json").read_text()) for run in (tmp_path, uninterrupted))
    measured = ("_runtime", "_per_second", "data_wait", "use", "peak_memory_gib", "verdict")
    assert ours.keys() - {"verdict"} == theirs.keys() - {"verdict"}, "a busy machine waits for data, or does not"
    compared = [key for key in ours if not key.endswith(measured)]
    assert {key: ours[key] for key in compared} == {key: theirs[key] for key in compared}


def test_interrupted_evaluation_is_repeated_once(uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the resumed run gets another signal during the evaluation."""
    run, options = rewound(uninterrupted / "run", tmp_path / "run", 4), {"cache": uninterrupted / "cache", "resume": True}

    def cut_short(evaluation: Evaluation) -> None:
        patched.setattr(signals, "received", lambda: 143)

    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(Evaluation, "evaluate", cut_short)
            with pytest.raises(SystemExit):
                api.execute(make_plan(uninterrupted), run, **options)
    assert resume.list_checkpoints(run)[0].name == "checkpoint-5"
    api.execute(make_plan(uninterrupted), run, **options)
    assert same(run, uninterrupted / "run")
    for key in ("step", "loss", "eval_loss"):
        assert logged(run, key) == logged(uninterrupted / "run", key)


def test_resume_with_another_micro_batch_size(uninterrupted: Path, tmp_path: Path) -> None:
    """As on another card: samples, schedule and effective batch are the same. Dropout is off, since its masks would differ."""
    from safetensors.torch import load_file

    still = make_plan(uninterrupted)
    still.job.model.config["hidden_dropout_prob"] = 0.0
    api.execute(still, tmp_path / "still" / "run", cache=uninterrupted / "cache")
    other = make_plan(uninterrupted, batch={"train": 12, "effective": 12})
    other.job.model.config["hidden_dropout_prob"] = 0.0
    resumed_from(tmp_path / "still", 6, tmp_path / "run", other)
    ours, theirs = (load_file(run / "final" / "model.safetensors") for run in (tmp_path / "run", tmp_path / "still" / "run"))
    assert relative_error(ours, theirs) < 1e-5
    assert logged(tmp_path / "run", "learning_rate") == logged(tmp_path / "still" / "run", "learning_rate")


@pytest.mark.parametrize(
    ("training", "tables", "message"),
    [
        ({"seed": 7}, {}, "seed was 0 and is now 7"),
        ({}, {"batch": {"train": 4, "effective": 8}}, r"rows a step was 12 and is now 8.*plugins.batch.effective=12"),
        ({}, {"group_lengths": {}}, "order was the core and is now plugin 'group_lengths'"),
        ({"max_steps": 4}, {}, r"is of step 6, but the job has only 4 steps"),
        ({}, {"optimizer": {"name": "adamw_bnb_8bit"}}, r"checkpoint-6 belongs to another model or optimizer: .*AdamW"),
    ],
)
def test_resume_rejects_changed_settings(training: Any, tables: Any, message: str, uninterrupted: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        resumed_from(uninterrupted, 6, tmp_path / "run", make_plan(uninterrupted, training, **tables))
    assert (tmp_path / "run" / "checkpoint-6").is_dir()


def test_resume_rejects_changed_data(uninterrupted: Path, tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "other")
    path = Path(plan.job.data.train)
    path.write_text(path.read_text(encoding="utf-8").replace("red", "blue"), encoding="utf-8")
    with pytest.raises(InputError, match="The data or data.max_length changed"):
        resumed_from(uninterrupted, 6, tmp_path / "run", plan)


def test_resume_rejects_changed_frozen_weights(uninterrupted: Path, tmp_path: Path) -> None:
    """An adapter resumes on its own base weights, also in another precision, and on no others."""
    base = tmp_path / "base"
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**TINY_BERT))
    model.save_pretrained(base)
    plan = make_plan(uninterrupted, {"save_steps": 2, "max_steps": 4}, adapter={"always": True})
    named = plan.job.model.model_copy(
        update={"name": str(base), "config": None, "tokenizer": str(uninterrupted / "run" / "final")}
    )
    plan = replace(plan, job=plan.job.model_copy(update={"model": named}))
    api.execute(plan, tmp_path / "run", cache=tmp_path / "cache")
    again = rewound(tmp_path / "run", tmp_path / "again", 2)
    model.bfloat16().float().save_pretrained(base)
    api.execute(plan, again, cache=tmp_path / "cache", resume=True)
    other = rewound(tmp_path / "run", tmp_path / "other", 2)
    torch.manual_seed(1)  # a run leaves torch's generator in the same state as the run before
    AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**TINY_BERT)).save_pretrained(base)
    with pytest.raises(InputError, match=r"checkpoint-2: the frozen weights of model.name changed .* model\.revision"):
        api.execute(plan, other, cache=tmp_path / "cache", resume=True)


def test_resume_rejects_another_method_and_reports_other_changes(uninterrupted: Path, tmp_path: Path) -> None:
    """Another scale of the same tensors changes the model; another number of workers does not."""
    few, adapter = {"save_steps": 2, "max_steps": 4}, {"always": True, "lora_alpha": 16}
    plan = make_plan(uninterrupted, few, adapter=adapter)
    api.execute(plan, tmp_path / "run", cache=uninterrupted / "cache")
    again = rewound(tmp_path / "run", tmp_path / "again", 2)
    with pytest.raises(InputError, match=r"plugins\.adapter\.lora_alpha was 16 and is now 32.* Keep it"):
        api.execute(
            make_plan(uninterrupted, few, adapter=adapter | {"lora_alpha": 32}), again, cache=uninterrupted / "cache", resume=True
        )
    with pytest.raises(InputError, match=r"plugins\.adapter was 'in use' and is now None"):
        api.execute(make_plan(uninterrupted, few), again, cache=uninterrupted / "cache", resume=True)
    recorder = Recorder()
    other = make_plan(uninterrupted, few, adapter=adapter, dataloader={"num_workers": 0}, batch={"train": 6, "effective": 12})
    api.execute(other, again, recorder, cache=uninterrupted / "cache", resume=True)
    assert recorder.warnings == [
        "Settings changed since the run started: plugins.batch.train was 4 and is 6; plugins.dataloader is new"
    ]


def test_resume_with_more_steps_reports_the_change(uninterrupted: Path, tmp_path: Path) -> None:
    """More steps change the schedule from the checkpoint on, hence the report."""
    recorder = resumed_from(uninterrupted, 12, tmp_path / "run", make_plan(uninterrupted, {"max_steps": 14}))
    assert recorder.warnings == ["Settings changed since the run started: training.max_steps was 12 and is 14"]
    assert logged(tmp_path / "run", "step")[-1] == 14


def test_best_weights_survive_a_resume(ruined: tuple[Path, Plan, int], tmp_path: Path) -> None:
    folder, plan, best = ruined
    again = rewound(folder / "run", tmp_path / "again", best + 1)
    assert (again / f"best-{best}").is_dir(), "a checkpoint refers to it"
    api.execute(plan, again, cache=folder / "cache", resume=True)
    assert same(again, folder / "run")


def kept_by_plugin(run: Path) -> tuple[int, list[float]]:
    """The counter's state in the last checkpoint."""
    parts = resume.load_checkpoint(run / f"checkpoint-{LAST}", verify=False).state["ranks"][0]
    (own,) = (state for name, state in parts.items() if name.startswith("plugins/"))
    return own["steps"], own["seen"].tolist()


def test_plugin_state_is_restored(tmp_path: Path) -> None:
    class Counter:
        def __init__(self) -> None:
            self.state: dict[str, Any] = {"steps": 0, "seen": torch.zeros(2)}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

        def updated(self, run: Any, applied: Any) -> None:
            self.state = {"steps": self.state["steps"] + 1, "seen": self.state["seen"] + 1}

    def counting() -> tuple[Counter, Plan]:
        counter = Counter()
        # the rate ruins the model: the best step is an early one, and its state is restored at the end
        plan = make_plan(tmp_path, {"learning_rate": 0.5, "eval_steps": 2, "lr_scheduler_type": "constant"})
        plan.recipe.state.append(counter)
        plan.recipe.events.append(calling(on_step_end=counter.updated))
        return counter, plan

    through, plan = counting()
    api.execute(plan, tmp_path / "run", cache=tmp_path / "cache")
    counter, plan = counting()
    resumed_from(tmp_path, 5, tmp_path / "again", plan)
    assert kept_by_plugin(tmp_path / "again") == kept_by_plugin(tmp_path / "run") == (LAST, [LAST, LAST])
    best = json.loads((tmp_path / "run" / "summary.json").read_text())["best_step"]
    assert counter.state["steps"] == through.state["steps"] == best < LAST, "final/ has the best weights, and their plugin state"


def test_timed_checkpoints_are_written_and_pruned(uninterrupted: Path, tmp_path: Path) -> None:
    """With save_minutes, checkpoints are written by the clock, and only the newest are kept."""
    training = {"save_steps": None, "save_minutes": 1e-6, "save_total_limit": 2}
    api.execute(make_plan(uninterrupted, training), tmp_path / "run", cache=uninterrupted / "cache")
    assert [path.name for path in resume.list_checkpoints(tmp_path / "run")] == [f"checkpoint-{LAST}", f"checkpoint-{LAST - 1}"]
    assert same(tmp_path / "run", uninterrupted / "run")
    api.execute(make_plan(uninterrupted, training | {"save_minutes": 0}), tmp_path / "never", cache=uninterrupted / "cache")
    assert not resume.list_checkpoints(tmp_path / "never")


@pytest.mark.parametrize(("write", "due"), [(0, 600), (60, 540), (500, 300)])
def test_timed_save_is_due_earlier_by_the_write_time(write: float, due: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill just before a checkpoint is complete loses at most save_minutes. The wait is at least half of it."""
    now = [0.0]
    monkeypatch.setattr(save_timing, "time", SimpleNamespace(monotonic=lambda: now[0]))
    run: Any = SimpleNamespace(training=SimpleNamespace(save_minutes=10), recipe=SimpleNamespace(state=[]))
    writer: Any = SimpleNamespace(seconds=write)
    timing = save_timing.SaveTiming(run, writer)
    now[0] = due - 1
    assert not timing.timed_save_due()
    now[0] = due
    assert timing.timed_save_due()


def test_timed_save_is_skipped_without_host_memory(uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the copy does not fit, only requested checkpoints are written, with one warning."""
    monkeypatch.setattr(save_timing, "host_memory", lambda: (2000, 1000))
    recorder = Recorder()
    plan = make_plan(uninterrupted, {"save_minutes": 1e-6, "save_steps": 6})
    api.execute(plan, tmp_path / "run", recorder, cache=uninterrupted / "cache")
    assert [path.name for path in resume.list_checkpoints(tmp_path / "run")] == ["checkpoint-12", "checkpoint-6"]
    (warning,) = recorder.warnings
    assert "Skipping timed checkpoint: needs" in warning


def test_corrupt_best_weights_do_not_end_the_run(ruined: tuple[Path, Plan, int], tmp_path: Path) -> None:
    """Corrupt best weights are renamed on resume."""
    folder, plan, best = ruined
    again = rewound(folder / "run", tmp_path / "again", 6)
    weights = again / f"best-{best}" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    recorder = Recorder()
    api.execute(plan, again, recorder, cache=folder / "cache", resume=True)
    assert "cannot be read" in recorder.warnings[0]
    assert (again / f"best-{best}.damaged").is_dir()
    assert storage.find_corruption(again / "final") == ""


def test_run_with_only_corrupt_checkpoints_does_not_restart(uninterrupted: Path, tmp_path: Path) -> None:
    """The second attempt is refused too, because scripts retry."""
    run = rewound(uninterrupted / "run", tmp_path / "run", 2)
    for path in resume.list_checkpoints(run):
        (path / "model.safetensors").write_bytes(b"x")
    for _ in range(2):
        with pytest.raises(StorageError, match=r"are corrupt, renamed to: checkpoint-1.damaged, .*--fresh"):
            api.execute(make_plan(uninterrupted), run, cache=uninterrupted / "cache", resume=True)
    assert not (run / "final").exists()


def test_resume_of_a_complete_run_changes_no_file(uninterrupted: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(uninterrupted / "run", run)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    summary = api.execute(make_plan(uninterrupted), run, cache=uninterrupted / "cache", resume=True)
    assert summary["step"] == LAST
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}


def test_resume_from_a_checkpoint_of_another_folder(uninterrupted: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    api.execute(make_plan(uninterrupted), run, cache=uninterrupted / "cache", resume=uninterrupted / "run" / "checkpoint-6")
    assert saved_bits(run / f"checkpoint-{LAST}") == saved_bits(uninterrupted / "run" / f"checkpoint-{LAST}")
    assert (run / "checkpoint-6").is_dir()  # saved before its first step, so that a run killed there can --resume


def test_best_weights_are_copied_from_another_folder(ruined: tuple[Path, Plan, int], tmp_path: Path) -> None:
    folder, plan, _ = ruined
    recorder = Recorder()
    first = rewound(folder / "run", tmp_path / "first", 6) / "checkpoint-6"
    api.execute(plan, tmp_path / "other", recorder, cache=folder / "cache", resume=first)
    assert recorder.warnings == []
    assert saved_bits(tmp_path / "other" / "final") == saved_bits(folder / "run" / "final")


def test_older_checkpoint_is_refused_in_its_own_folder(uninterrupted: Path, tmp_path: Path) -> None:
    run = rewound(uninterrupted / "run", tmp_path / "run", 6)
    with pytest.raises(InputError, match=r"has a newer checkpoint, checkpoint-6.*Give another --name"):
        api.execute(make_plan(uninterrupted), run, cache=uninterrupted / "cache", resume=run / "checkpoint-4")


def test_corrupt_resume_from_checkpoint_is_refused(uninterrupted: Path, tmp_path: Path) -> None:
    """A corrupt --resume-from is refused in its own folder and in another one. The checkpoint is not renamed."""
    run = rewound(uninterrupted / "run", tmp_path / "run", 6)
    (run / "checkpoint-6" / "model.safetensors").write_bytes(b"x")
    for target in (run, tmp_path / "other"):
        with pytest.raises(StorageError, match=r"--resume-from: .*checkpoint-6 is corrupt: .* --resume"):
            api.execute(make_plan(uninterrupted), target, cache=uninterrupted / "cache", resume=run / "checkpoint-6")
    assert (run / "checkpoint-6").is_dir()
    assert not (tmp_path / "other" / "checkpoint-6").exists()


def test_corrupt_checkpoint_is_quarantined_with_a_warning(uninterrupted: Path, tmp_path: Path) -> None:
    run = rewound(uninterrupted / "run", tmp_path / "run", 6)
    weights = run / "checkpoint-6" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    recorder = Recorder()
    api.execute(make_plan(uninterrupted), run, recorder, cache=uninterrupted / "cache", resume=True)
    assert "checkpoint-6 is corrupt: model.safetensors does not match its SHA-256" in recorder.warnings[0]
    assert (run / "checkpoint-6.damaged").is_dir()
    assert same(run, uninterrupted / "run")


@pytest.mark.parametrize("moment", ["before", "behind"])
def test_signal_at_the_end_loses_no_step(
    moment: str, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before final/ is written the last step is saved, even without save_steps. After that the run is complete."""
    plan, run = make_plan(uninterrupted, {"save_steps": None, "save_minutes": 0}), tmp_path / "run"

    def signal_comes(*_: Any) -> None:
        patched.setattr(signals, "received", lambda: 143)

    class AtTheEnd(Recorder):
        def on_log(self, run: Any, row: Any) -> None:
            super().on_log(run, row)
            if moment == "before" and "eval_loss" in row and row["step"] == LAST:
                signal_comes()

    with monkeypatch.context() as patched:
        if moment == "behind":
            patched.setattr(loop, "summarize", lambda *given: signal_comes() or summarize(*given))
        with pytest.raises(SystemExit):
            api.execute(plan, run, AtTheEnd(), cache=uninterrupted / "cache")
    message = json.loads((run / "status.json").read_text())["message"]
    found = [path.name for path in resume.list_checkpoints(run)]
    if moment == "before":
        assert (message, found) == (f"terminated after step {LAST}, saved; resume with --resume", [f"checkpoint-{LAST}"])
    else:
        assert (message, found) == ("terminated after the last step: final/ is complete", [])
    recorder = Recorder()
    api.execute(plan, run, recorder, cache=uninterrupted / "cache", resume=True)
    assert [row["step"] for row in recorder.rows if "loss" in row] == []
    assert saved_bits(run / "final") == saved_bits(uninterrupted / "run" / "final")


@pytest.mark.parametrize("ignored", [False, True], ids=["a notebook", "a shell's background"])
def test_signal_to_a_script_saves_the_run(ignored: bool, uninterrupted: Path, tmp_path: Path) -> None:
    """Without the command line, execute() handles signals itself and then restores the script's handlers."""
    number, ends = (signal.SIGTERM, SystemExit) if ignored else (signal.SIGINT, KeyboardInterrupt)
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    assert before == [signal.SIG_IGN if ignored else signal.default_int_handler, signal.SIG_DFL]

    class Ending(Recorder):
        def on_log(self, run: Any, row: Any) -> None:
            if row["step"] == 4:
                os.kill(os.getpid(), number)

    with pytest.raises(ends):
        api.execute(make_plan(uninterrupted), tmp_path / "run", Ending(), cache=uninterrupted / "cache")
    assert "saved; resume with --resume" in json.loads((tmp_path / "run" / "status.json").read_text())["message"]
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    api.execute(make_plan(uninterrupted), tmp_path / "run", cache=uninterrupted / "cache", resume=True)
    assert same(tmp_path / "run", uninterrupted / "run")
