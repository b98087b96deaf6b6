"""The process that traces: what it works after, and that it ends with the process that started it."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from applied import Applied

from hwopt.memory.shapes import Head, Shape
from hwopt.memory.trace import tracing_process
from hwopt.memory.trace.tracing_process import NotTraceable, TraceRequest, traced
from hwopt.planning.plan import Plan
from hwopt.plugin import Context, Recipe
from hwopt.plugin.registry import Registry
from hwopt.testing import plan_for, tiny_job, tiny_profile

pytestmark = pytest.mark.daily

WAIT_SECONDS = 120.0
SCRIPT = """
import sys
from pathlib import Path
print("started", flush=True)
from hwopt.memory.forecast.planner import plan_memory
from hwopt.plugin import Decision, Plugin, Stage
from hwopt.plugin.registry import Registry
from hwopt.system import fork_server
from hwopt.testing import plan_for, tiny_job, tiny_profile

class Copies(Plugin):
    name = "copies"
    stage = Stage.MODEL

    def probe(self, context):
        return Decision.apply("for the test")

    def apply(self, recipe, context):
        recipe.model_steps.append(self.copy)

    def copy(self, model, run):
        model.copies = [p.detach().clone() for p in model.parameters()]
        return model

registry = Registry()
registry.add(Copies)
folder = Path(sys.argv[1])
for profile in (tiny_profile(), tiny_profile(copies={})):
    memory = plan_memory(plan_for(profile, tiny_job(folder), registry), folder / "cache")
    print(memory.tier, round(memory.peak_gib * 2**30), flush=True)
"""

SOAK = pytest.mark.soak


def plan_of(folder: Path, registry: Registry | None = None, **plugins: Any) -> Plan:
    return plan_for(tiny_profile(**plugins), tiny_job(folder), registry)


def trace(plan: Plan) -> int:
    """Return the bytes at the peak of a training step."""
    return traced(TraceRequest(plan, Head(2), (("base", Shape(2, 16)),)))["train.base"].peak().bytes


def server() -> psutil.Process:
    return psutil.Process(tracing_process._running.process.pid)


def test_script_without_a_main_guard_is_run_once_and_its_plugin_is_traced(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    found = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, check=False, cwd=tmp_path)
    lines = found.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["started", "traced", "traced"], found.stderr
    plain, copied = (int(line.split()[1]) for line in lines[1:])
    assert copied > plain


def test_traces_while_the_caller_has_threads_that_ran_a_backward_pass(tmp_path: Path) -> None:
    def backward() -> None:
        weights = torch.ones(64, 64, requires_grad=True)
        (weights @ weights).sum().backward()

    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait), threading.Thread(target=backward)]
    for thread in threads:
        thread.start()
    try:
        assert trace(plan_of(tmp_path)) > 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_server_sees_no_gpu_and_has_one_thread(tmp_path: Path) -> None:
    trace(plan_of(tmp_path))
    assert server().environ()["CUDA_VISIBLE_DEVICES"] == ""
    assert server().num_threads() == 1


def test_server_that_was_killed_is_started_again(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    before = trace(plan)
    old = server()
    old.kill()
    old.wait(WAIT_SECONDS)
    assert trace(plan) == before
    assert server().pid != old.pid


def test_server_ends_when_it_is_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracing_process.close()
    monkeypatch.setattr(tracing_process, "IDLE_SECONDS", 0.1)
    plan = plan_of(tmp_path)
    before = trace(plan)
    assert server().wait(WAIT_SECONDS) == 0
    monkeypatch.undo()
    assert trace(plan) == before


class Local(Applied):
    """A plugin of a test; the tracing process cannot import this file."""

    name = "local"
    _bytes_held = 1 << 20

    def apply(self, recipe: Recipe, context: Context) -> None:
        recipe.model_steps.append(self.hold)

    def hold(self, model: Any, run: Any) -> Any:
        model.held = torch.zeros(self._bytes_held, dtype=torch.uint8)
        return model


def test_plugin_that_only_the_caller_can_import_is_traced(tmp_path: Path) -> None:
    registry = Registry()
    registry.add(Local)
    plain, more = trace(plan_of(tmp_path)), trace(plan_of(tmp_path, registry, local={}))
    assert more - plain == pytest.approx(Local._bytes_held, rel=0.01)


class Unsendable(Local):
    name = "unsendable"

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.lock = threading.Lock()


def test_plugin_that_cannot_be_sent_is_named_as_the_reason(tmp_path: Path) -> None:
    registry = Registry()
    registry.add(Unsendable)
    with pytest.raises(NotTraceable, match="cannot be sent to the tracing process: TypeError: cannot pickle '_thread.lock'"):
        trace(plan_of(tmp_path, registry, unsendable={}))


class Fatal(Local):
    name = "fatal"

    def hold(self, model: Any, run: Any) -> Any:
        os._exit(3)


def test_child_that_dies_is_an_error_and_the_server_goes_on(tmp_path: Path) -> None:
    registry = Registry()
    registry.add(Fatal)
    with pytest.raises(NotTraceable, match="the tracing process died with exit code 3"):
        trace(plan_of(tmp_path, registry, fatal={}))
    assert trace(plan_of(tmp_path)) > 0


@pytest.mark.parametrize(
    "sent",
    [pytest.param(signal.SIGTERM, marks=SOAK), signal.SIGINT, pytest.param(signal.SIGKILL, marks=SOAK)],
    ids=lambda sent: sent.name,
)
def test_plan_that_is_ended_by_a_signal_leaves_no_process(sent: signal.Signals, tmp_path: Path) -> None:
    config = "model_type = 'llama', hidden_size = 64, num_hidden_layers = 40, num_attention_heads = 2, intermediate_size = 64"
    job = tmp_path / "job.toml"
    job.write_text(
        f"[model]\nconfig = {{ {config}, vocab_size = 300 }}\n[task]\nkind = 'causal-lm'\n"
        "[data]\ntrain = 'none.jsonl'\nmax_length = 64\n"
    )
    command = [sys.executable, "-m", "hwopt", "plan", str(job), "--profile", "rtx3070_8gb"]
    environment = {**os.environ, "HWOPT_CACHE": str(tmp_path / "cache")}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        own = psutil.Process(process.pid)
        deadline = time.monotonic() + WAIT_SECONDS
        children: list[psutil.Process] = []
        while len(children) < 3 and process.poll() is None and time.monotonic() < deadline:  # server, builder, a shape
            children = own.children(recursive=True)
            time.sleep(0.01)
        assert len(children) >= 3
        process.send_signal(sent)
        process.wait(WAIT_SECONDS)
    _, alive = psutil.wait_procs(children, timeout=WAIT_SECONDS)
    assert alive == []
