"""Names, model folders, data and caches from an untrusted source: hwopt runs no code in them and writes only to its folders."""

import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import hwopt
from documented_folder import write_model

from hwopt.errors import InputError
from hwopt.memory.trace.tracer import cached_timelines
from hwopt.runs.folder import run_folder
from hwopt.testing import finished, write_samples

FIGURE = (
    "run names, model folders, data, caches with payloads",
    "{tests} of {tests}: nothing written outside, nothing run",
)
NAMES = [
    *("", ".", "..", "/tmp/x", "a/b", "../a", "~root", "a\\b", "a.", "a ", ".a", "--help", "\x00", "a\nb"),
    *("\x1b[31m", "\ud800", "\u202ea", "／etc", "x" * 121),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder. A payload that runs creates a file next to it."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HWOPT_CACHE", str(tmp_path / "cache"))
    return work


def test_unsafe_run_names_are_refused(folder: Path) -> None:
    for name in NAMES:
        with pytest.raises(InputError, match="--name"):
            run_folder(Path("runs"), name, "")
    for name in ("a", "first run", "a.b-c_d", "3", "実験", "Müller 2"):
        assert run_folder(Path("runs"), name, "") == Path("runs") / name


class Payload:
    """Creates the folder `trace` when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.trace),)


CODE = """
import os, pathlib
from transformers import DistilBertConfig, DistilBertForSequenceClassification

pathlib.Path(os.environ["TRACE"]).mkdir(exist_ok=True)


class Config(DistilBertConfig):
    model_type = "remote"


class Model(DistilBertForSequenceClassification):
    config_class = Config
"""
AUTO_MAP = {"AutoConfig": "thing.Config", "AutoModelForSequenceClassification": "thing.Model"}
OWN_TOKENIZER = {"auto_map": {"AutoTokenizer": ["thing.Thing", None]}}
RUN = ("run", "job.toml", "--profile", "mine.toml", "--name", "r")


@pytest.fixture
def model(folder: Path) -> Path:
    """A valid model folder with its tokenizer, and code beside it; a job and a profile that train it."""
    write_model(Path("model"))
    Path("model/thing.py").write_text(CODE)
    write_samples(Path("train.jsonl"), 8)
    job = "[model]\nname = 'model'\n[data]\ntrain = 'train.jsonl'\nmax_length = 16\n[training]\nmax_steps = 1\n"
    Path("job.toml").write_text(job)
    Path("mine.toml").write_text("name = 'mine'\nplugins.batch = { train = 4 }\nplugins.dataloader = { num_workers = 0 }\n")
    return Path("model")


def change(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ("config.json", {"model_type": "remote", "auto_map": AUTO_MAP}),
        ("config.json", {"_attn_implementation": "owner/kernel"}),
        ("tokenizer_config.json", {"tokenizer_class": "Thing", **OWN_TOKENIZER}),
    ],
    ids=["code beside the config", "kernel from the hub", "tokenizer of code"],
)
def test_unsafe_model_folder_is_refused(file: str, keys: dict[str, Any], model: Path, folder: Path) -> None:
    trace = folder.parent / "was_run"
    change(model / file, **keys)
    if file == "tokenizer_config.json":
        (model / "tokenizer.json").unlink()
    done = hwopt(*RUN, cwd=folder, TRACE=str(trace))
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 12
    assert not trace.exists()


def test_unused_code_and_pickles_of_a_model_are_ignored(model: Path, folder: Path) -> None:
    """transformers has a class for the architecture, so that the model's own is not used; its template reaches for Python."""
    trace = folder.parent / "was_run"
    change(model / "config.json", auto_map=AUTO_MAP)
    reach = "{{ cycler.__init__.__globals__.os.mkdir('" + str(trace) + "') }}"
    (model / "chat_template.jinja").write_text(reach)
    change(model / "tokenizer_config.json", chat_template=reach, **OWN_TOKENIZER)
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "rng_state.pth"):
        (model / name).write_bytes(pickle.dumps(Payload(trace)))
    done = hwopt(*RUN, cwd=folder, TRACE=str(trace))
    assert done.returncode == 0, done.stderr
    assert not trace.exists()
    assert {path.name for path in folder.parent.iterdir()} <= {"work", "cache"}
    assert {path.name for path in folder.iterdir()} == {"model", "train.jsonl", "job.toml", "mine.toml", "runs"}


def test_payload_in_the_cache_is_not_run(folder: Path) -> None:
    trace = folder.parent / "was_run"
    np.savez("trace.npz", **{"train.base/x": np.array([Payload(trace)], dtype=object)})
    assert cached_timelines(Path("trace.npz"), dict) == {}
    assert not trace.exists()


@pytest.mark.integration
@pytest.mark.parametrize("named", ["model", "other"])
def test_trust_remote_code_runs_only_the_named_model(named: str, model: Path, folder: Path) -> None:
    trace = folder.parent / "was_run"
    change(model / "config.json", model_type="remote", auto_map=AUTO_MAP)
    command = [sys.executable, "-m", "hwopt", *RUN, "--trust-remote-code", named]
    found = finished(command, folder, TRACE=str(trace), HF_MODULES_CACHE=str(folder.parent / "modules"))
    assert found.returncode == (0 if named == "model" else 2), found.stderr
    assert trace.exists() == (named == "model")
    if named == "model":
        assert "note: --trust-remote-code: the code that 'model' brings is run" in found.stdout
        assert not [file for file in ("job.toml", "profile.toml") if "trust" in Path("runs/r", file).read_text()]
    else:
        assert "--trust-remote-code" in found.stderr
