"""Trackers: TensorBoard through Accelerate, a listener of another package, and names that cannot be used."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import import_module, metadata
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from hwopt import api
from hwopt.errors import InputError
from hwopt.report import trackers
from hwopt.report.trackers import listeners_for
from hwopt.testing import Recorder, plan_for, tiny_job, tiny_profile
from hwopt.training.listener import Listener, Listeners


class Counting(Listener):
    def __init__(self) -> None:
        self.rows: list[Any] = []

    def on_log(self, run: Any, row: Any) -> None:
        self.rows.append(row)


class Broken(Listener):
    def __init__(self) -> None:
        raise RuntimeError("no server")


def test_tensorboard_gets_metrics_settings_and_evidence(tmp_path: Path) -> None:
    (listener,) = listeners_for(["tensorboard"])
    plan = plan_for(tiny_profile(), tiny_job(tmp_path / "data", max_steps=3))
    api.execute(plan, tmp_path / "run", Listeners(listener), cache=tmp_path / "cache")
    written = b"".join(path.read_bytes() for path in (tmp_path / "run" / "tensorboard").rglob("*tfevents*"))
    for part in (b"train/loss", b"train/use/data_wait_share", b"eval/f1", b"evidence", b"batch: active"):
        assert part in written
    settings = next((tmp_path / "run" / "tensorboard").rglob("hparams.yml")).read_text()
    assert "training.max_steps: 3" in settings
    assert "profile: tiny" in settings


def test_listener_of_another_package_is_found_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: dict[str, Any] = {"mine": Counting, "bad": Broken, "none": dict}
    entries = [metadata.EntryPoint(name, f"package:{cls.__name__}", trackers.GROUP) for name, cls in loaded.items()]
    plan = plan_for(tiny_profile(), tiny_job(tmp_path / "data", max_steps=2))
    monkeypatch.setattr(trackers.metadata, "entry_points", lambda group: entries)
    monkeypatch.setattr(metadata.EntryPoint, "load", lambda self: loaded[self.name])
    (listener,) = listeners_for(["mine", "mine"])
    assert isinstance(listener, Counting)
    api.execute(plan, tmp_path / "run", listener, cache=tmp_path / "cache")
    assert [int(row["step"]) for row in listener.rows if "loss" in row] == [1, 2]
    with pytest.raises(InputError, match=r"--report-to bad: .*Broken.* raised RuntimeError: no server"):
        listeners_for(["bad"])
    with pytest.raises(InputError, match="is not a hwopt"):
        listeners_for(["none"])


@pytest.mark.parametrize(
    ("name", "message"),
    [("tensorbord", "Did you mean 'tensorboard'"), ("wandb", r"is not installed\. Install it: pip install wandb")],
)
def test_tracker_that_cannot_be_used_is_refused(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", list)
    with pytest.raises(InputError, match=message):
        listeners_for([name])


class Offline:
    """A tracker of Accelerate that fails at the method that `fails` names."""

    requires_logging_directory = False
    fails = ""
    calls: ClassVar[list[str]] = []

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self) -> None:
        self.call("start")

    def store_init_configuration(self, values: Any) -> None:
        self.call("store_init_configuration")

    def log(self, values: Any, step: int) -> None:
        self.call("log")

    def finish(self) -> None:
        self.call("finish")

    def call(self, method: str) -> None:
        self.calls.append(method)
        if method == self.fails:
            raise ConnectionError("no network\nand more")


@pytest.mark.parametrize("fails", ["start", "log"])
def test_tracker_that_fails_does_not_end_the_run_after_its_start(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Offline, "fails", fails)
    monkeypatch.setattr(Offline, "calls", [])
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", Offline)
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: ["wandb"])
    recorder = Recorder()
    listener = Listeners(recorder, *listeners_for(["wandb"]))
    plan = plan_for(tiny_profile(), tiny_job(tmp_path / "data", max_steps=3))
    if fails == "start":
        with pytest.raises(InputError, match=r"--report-to wandb: ConnectionError: no network$"):
            api.execute(plan, tmp_path / "run", listener, cache=tmp_path / "cache")
        return
    assert api.execute(plan, tmp_path / "run", listener, cache=tmp_path / "cache")["step"] == 3
    warning = "The tracker wandb failed (no network) and gets nothing more; the run continues"
    assert recorder.warnings.count(warning) == Offline.calls.count("log") == 1


def test_example_listener_posts_the_end_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posted: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "listeners"))
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HWOPT_WEBHOOK", f"http://127.0.0.1:{server.server_port}")
        plan = plan_for(tiny_profile(), tiny_job(tmp_path / "data", max_steps=2))
        api.execute(plan, tmp_path / "run", import_module("webhook").Webhook(), cache=tmp_path / "cache")
        server.shutdown()
    assert posted[-1]["text"].startswith("run is done after 2 steps: eval_loss ")
