"""`hwopt bench` with real trials: plugins that work, crash and run out of memory; a signal; and the end of the command."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from cli.test_cli import write_job
from installed_task import write_metadata

from hwopt.trials.trial import Variant, in_new_process, launching, run_trial

pytestmark = pytest.mark.daily

PLUGINS = """
import torch
from hwopt.plugin import Decision, Plugin, Stage

class Failing(Plugin):
    stage = Stage.MODEL

    def probe(self, context):
        return Decision.apply("fails")

    def apply(self, recipe, context):
        recipe.model_steps.append(self.step)

    def step(self, model, run):
        model.register_forward_pre_hook(self.fail)
        return model

class Crash(Failing):
    name = "crash"

    def fail(self, *arguments):
        raise RuntimeError("a bug in the plugin")

class Large(Failing):
    name = "large"

    def fail(self, *arguments):
        raise torch.OutOfMemoryError("tried to allocate 1 TiB")
"""
PROFILE = """name = "mine"
[plugins.optimizer]
name = "adamw_torch_fused"
fallback = []
[plugins.tf32]
"""
FAILING = PROFILE + "[plugins.crash]\n[plugins.large]\n"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with a tiny job, two profiles and the plugins, installed by the path `plugins`."""
    write_job(tmp_path, num_train_epochs=3)
    (tmp_path / "mine.toml").write_text(PROFILE)
    (tmp_path / "failing.toml").write_text(FAILING)
    (tmp_path / "tmp").mkdir()
    entries = {"crash": "failing_plugins:Crash", "large": "failing_plugins:Large"}
    write_metadata(tmp_path / "plugins", "failing_plugins", {"hwopt.plugins": entries})
    (tmp_path / "plugins" / "failing_plugins.py").write_text(PLUGINS)
    return tmp_path


def environment(work: Path) -> dict[str, str]:
    path = os.pathsep.join([str(work / "plugins"), os.environ["PYTHONPATH"]])
    return os.environ | {"PYTHONPATH": path, "TMPDIR": str(work / "tmp")}


def bench(work: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hwopt", "bench", "job.toml", "--seconds", "0.1", "--rounds", "3", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=work, env=environment(work), text=True, start_new_session=True, **pipes)


def test_failures_are_rows_and_the_others_are_measured(work: Path) -> None:
    process = bench(work, "--profile", "failing.toml", "--format", "json", "-o", "page.html")
    output, message = process.communicate(timeout=500)
    assert process.returncode == 0, message
    rows = {row["name"]: row for row in json.loads(output)["variants"]}
    endings = {name: row["ending"] for name, row in rows.items()}
    assert endings == {
        "baseline": "completed",
        "baseline again": "completed",
        "+ optimizer": "completed",
        "+ tf32": "not applied here",
        "+ crash": "crashed",
        "+ large": "out of memory",
        "profile": "crashed",
        "- optimizer": "crashed",
        "- tf32": "not applied here",
        "- crash": "out of memory",
        "- large": "crashed",
    }
    assert rows["+ crash"]["note"] == "RuntimeError: a bug in the plugin"
    assert "does not fit into the device's memory, not even row by row" in rows["+ large"]["note"]
    fused = rows["+ optimizer"]
    assert (fused["rounds"], fused["loss_agrees"]) == (3, True)
    assert fused["speedup"]["rounds"] == 3
    assert fused["samples_per_second"] > 0
    assert fused["tokens_per_second"] > fused["samples_per_second"]
    assert fused["peak_gib"] > 0.1
    assert rows["baseline again"]["loss"] == "equal"
    assert "no such" not in message
    assert (work / "page.html").is_file()
    assert os.listdir(work / "tmp") == []
    assert not (work / "runs").exists()


def wait_until(condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    """The first value of `condition` that is true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_trials_end_with_the_command(number: signal.Signals, work: Path) -> None:
    """An interrupted command prints the table of what it has measured."""
    process = bench(work, "--profile", "mine.toml", "--seconds", "600")
    wait_until(lambda: any(path.stat().st_size for path in (work / "tmp").rglob("metrics.jsonl")))
    descendants = psutil.Process(process.pid).children(recursive=True)
    assert len(descendants) >= 2  # the fork server and a trial
    process.send_signal(number)
    output, message = process.communicate(timeout=60)
    assert psutil.wait_procs(descendants, timeout=20)[1] == []
    if number == signal.SIGINT:
        assert process.returncode == 130, message
        assert "interrupted: variants without a speed were not measured" in output
        assert "+ tf32" in output
        assert "Traceback" not in message
        assert os.listdir(work / "tmp") == []


def test_new_process_and_fork_train_the_same(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    variant = Variant("mine", "mine.toml", without_dropout=True)
    new = run_trial(Path("job.toml"), variant, 5, work / "new", 300.0, in_new_process)
    with launching("cpu") as launch:
        forked = run_trial(Path("job.toml"), variant, 5, work / "forked", 300.0, launch)
        again = run_trial(Path("job.toml"), variant, 5, work / "again", 300.0, launch)
        refused = Variant("wrong", "mine.toml", ("plugins.optimizer.name=adamw_trch",))
        message = run_trial(Path("job.toml"), refused, 5, work / "wrong", 300.0, launch)
        late = run_trial(Path("job.toml"), variant, 10**9, work / "late", 3.0, launch)
        after = run_trial(Path("job.toml"), variant, 5, work / "after", 300.0, launch)
    assert (new.ending, new.message) == ("completed", "")
    assert len(new.losses) == 5
    assert new.losses == forked.losses == again.losses == after.losses
    assert message.ending == "refused"
    assert "Did you mean 'adamw_torch'" in message.message
    assert late.ending == "timed out"
