"""training.push_to_hub: final/ is uploaded at the end; a failure keeps the run."""

import json
from pathlib import Path
from typing import Any, ClassVar

import huggingface_hub
import pytest

from hwopt.errors import InputError
from hwopt.testing import Recorder, plan_for, tiny_job, tiny_profile, train_tiny


class Hub:
    """HfApi without a network."""

    calls: ClassVar[list[tuple[str, dict[str, Any]]]] = []
    error: Exception | None = None

    def create_repo(self, name: str, **options: Any) -> Any:
        self.calls.append(("create_repo", {"name": name, **options}))
        if self.error is not None:
            raise self.error
        return Address(name)

    def upload_folder(self, **options: Any) -> None:
        files = sorted(path.name for path in Path(options["folder_path"]).iterdir())
        self.calls.append(("upload_folder", {**options, "files": files}))


class Address(str):
    @property
    def repo_id(self) -> str:
        return str(self)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    monkeypatch.setattr(Hub, "calls", [])
    monkeypatch.setattr(Hub, "error", None)
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "token")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return Hub


def train(folder: Path, **training: Any) -> Recorder:
    settings = {"max_steps": 1, "push_to_hub": True, "hub_model_id": "me/my-model"} | training
    return train_tiny(plan_for(tiny_profile(), tiny_job(folder / "data", **settings)), folder)


def test_final_is_uploaded_after_the_run(hub: type[Hub], tmp_path: Path) -> None:
    recorder = train(tmp_path, hub_private_repo=True)
    (created, repository), (uploaded, options) = hub.calls
    assert (created, repository) == ("create_repo", {"name": "me/my-model", "private": True, "exist_ok": True})
    assert uploaded == "upload_folder"
    assert (options["repo_id"], options["folder_path"]) == ("me/my-model", tmp_path / "run/final")
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(options["files"])
    assert options["ignore_patterns"] == ["manifest.json", "job.toml", "plan.json"], "the last two have local paths"
    assert recorder.warnings == []
    assert 'model="me/my-model"' in (tmp_path / "run/final/README.md").read_text()
    assert "The model is on the hub: me/my-model" in "\n".join(recorder.messages)


def test_a_failed_upload_keeps_the_run_and_says_how_to_upload_later(hub: type[Hub], tmp_path: Path) -> None:
    hub.error = OSError("no route to host")
    recorder = train(tmp_path)
    (warning,) = recorder.warnings
    assert "was not uploaded to me/my-model (OSError: no route to host). The run is complete." in warning
    assert (
        f"hf upload me/my-model {tmp_path / 'run/final'} . --exclude manifest.json --exclude job.toml --exclude plan.json"
        in warning
    )
    assert json.loads((tmp_path / "run/status.json").read_text()) == {"exit_code": 0, "message": "done"}
    assert (tmp_path / "run/final/model.safetensors").is_file()


@pytest.mark.parametrize(("offline", "message"), [(False, "not logged in to the hub"), (True, "the hub cannot be reached")])
def test_a_run_that_cannot_upload_says_so_at_its_start(
    offline: bool, message: str, hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    assert message in train(tmp_path).warnings[0]


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"push_to_hub": True}, 'push_to_hub needs hub_model_id = "OWNER/NAME"'),
        ({"hub_model_id": "a/b/c"}, "hub_model_id: Repo id must be in the form .*'a/b/c'"),
    ],
)
def test_bad_repositories_are_refused(training: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        tiny_job(tmp_path / "data", **training)
