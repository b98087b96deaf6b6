"""What is given is checked before anything heavy is imported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hwopt.errors import InputError
from hwopt.given import hub_is_out_of_reach, refuse_mistakes


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_proxies")
def test_a_hub_whose_name_means_nothing_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    assert hub_is_out_of_reach()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # whether anybody listens there is the client's to find out
    assert not hub_is_out_of_reach()


@pytest.mark.usefixtures("no_proxies")
def test_a_proxy_knows_names_that_this_machine_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    assert not hub_is_out_of_reach()


@pytest.mark.usefixtures("no_proxies")
@pytest.mark.parametrize(("name", "offline"), [("somebody/some-model", "1"), (".", None)], ids=["of the hub", "a folder"])
def test_the_client_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, offline: str | None) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # so that it is put back
    monkeypatch.delenv("HF_HUB_OFFLINE")
    job = tmp_path / "job.toml"
    job.write_text(f'[model]\nname = "{name}"\n[data]\ntrain = "rows.jsonl"\n')
    refuse_mistakes(["cpu"], job, [], None)
    assert os.environ.get("HF_HUB_OFFLINE") == offline


def test_the_demo_is_not_made_only_to_look_at_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HWOPT_CACHE", str(tmp_path / "cache"))
    refuse_mistakes(["cpu"], None, [], "8GiB")
    assert not list(tmp_path.iterdir())


def test_jobs_and_profiles_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text('[model]\nname = "."\n[data]\ntrain = "rows.jsonl"\n')
    with pytest.raises(InputError, match=r"this is a job; hwopt run \./job\.toml --profile NAME"):
        refuse_mistakes(["./job.toml"], Path("job.toml"), [], None)
    Path("both.toml").write_text('[model]\nname = "."\n[data]\ntrain = "rows.jsonl"\n[plugins.precision]\ndtype = "bf16"\n')
    with pytest.raises(InputError, match=r"both\.toml:5: plugins: a job has no plugins; .* --set plugins\.precision\.dtype"):
        refuse_mistakes(["cpu"], Path("both.toml"), [], None)
    with pytest.raises(InputError, match=r"Did you mean 'rtx3070_8gb"):
        refuse_mistakes(["RTX 3070"], Path("job.toml"), [], None)
