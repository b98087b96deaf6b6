"""Renamed options and plugins, and options of a plugin that are kept together when a profile is extended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hwopt import api
from hwopt.config.job import make_job
from hwopt.config.profile import Profile
from hwopt.config.toml import Document
from hwopt.errors import InputError
from hwopt.hardware.device import Hardware, described
from hwopt.planning.capabilities import BERT_BASE
from hwopt.planning.inputs import Inputs
from hwopt.planning.plan import Plan
from hwopt.planning.resolve import resolve
from hwopt.plugin.registry import Registry

CARD = described("NVIDIA GeForce RTX 3070", (8, 6), 8, Hardware("cpu", "a CPU", 32, 30, cpu_cores=16, cpu_memory_gib=32))
SOFTWARE = dict.fromkeys(("torch", "accelerate", "transformers", "peft", "bitsandbytes"), "1.0")

RENAMED = [
    ("dataloader", "workers", "num_workers", "3", 3),
    ("adapter", "alpha", "lora_alpha", "8", 8),
    ("adapter", "target", "target_modules", "['query']", ["query"]),
    ("adapter", "dropout", "lora_dropout", "0.1", 0.1),
    ("batch", "accumulation", "gradient_accumulation_steps", "4", 4),
]


def profile_of(folder: Path, text: str, *assignments: str) -> Profile:
    (folder / "mine.toml").write_text('name = "mine"\n' + text)
    return Inputs().profile(str(folder / "mine.toml"), assignments)


def plan_of(profile: Profile) -> Plan:
    job = make_job(Document("job.toml", {"model": {"name": "m"}, "data": {"train": "t.csv"}}))
    return resolve(profile, CARD, job, Registry(), BERT_BASE, SOFTWARE)


@pytest.mark.parametrize(("plugin", "old", "new", "text", "value"), RENAMED)
def test_old_option_works_in_a_profile_with_a_note(
    plugin: str, old: str, new: str, text: str, value: Any, tmp_path: Path
) -> None:
    profile = profile_of(tmp_path, f"[plugins.{plugin}]\n{old} = {text}\n")
    assert dict(profile.plugin_tables()) == {plugin: {new: value}}
    assert profile.place("plugins", plugin, new) == f"{tmp_path / 'mine.toml'}:3"
    assert plan_of(profile).notes[0] == (
        f"{tmp_path / 'mine.toml'}:3: plugins.{plugin}.{old} is now plugins.{plugin}.{new}; hwopt 0.4 removes the old name"
    )


@pytest.mark.parametrize(("plugin", "old", "new", "text", "value"), RENAMED)
def test_old_option_works_on_the_command_line_and_wins_over_the_profile(
    plugin: str, old: str, new: str, text: str, value: Any, tmp_path: Path
) -> None:
    profile = profile_of(tmp_path, f"[plugins.{plugin}]\n{new} = 1\n", f"plugins.{plugin}.{old}={text}")
    assert dict(profile.plugin_tables()) == {plugin: {new: value}}
    assert profile.place("plugins", plugin, new) == "--set"
    (note,) = profile.document.notes
    assert note.startswith(f"--set: plugins.{plugin}.{old} is now plugins.{plugin}.{new};")


def test_old_option_of_a_parent_is_overridden_by_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('name = "base"\n[plugins.dataloader]\nworkers = 7\n')
    profile = profile_of(tmp_path, 'extends = "base"\n[plugins.dataloader]\nnum_workers = 2\n')
    assert dict(profile.plugin_tables()) == {"dataloader": {"num_workers": 2}}


def test_both_names_in_one_table_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"mine\.toml:4: plugins\.dataloader\.workers is the old name of .*num_workers; give only"
    ):
        profile_of(tmp_path, "[plugins.dataloader]\nnum_workers = 2\nworkers = 3\n")


def test_old_option_inside_a_table_on_the_command_line(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, "", "plugins.dataloader={ workers = 3 }")
    assert dict(profile.plugin_tables()) == {"dataloader": {"num_workers": 3}}


def test_old_plugin_name_works_in_a_profile_and_on_the_command_line(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, "[plugins.cut]\ntokens = 4096\n", "plugins.cut.overhead_tokens=9")
    assert dict(profile.plugin_tables()) == {"length_batching": {"tokens": 4096, "overhead_tokens": 9}}
    assert profile.document.notes == (
        f"{tmp_path / 'mine.toml'}:2: plugins.cut is now plugins.length_batching; hwopt 0.4 removes the old name",
        "--set: plugins.cut.overhead_tokens is now plugins.length_batching.overhead_tokens; hwopt 0.4 removes the old name",
    )
    assert plan_of(profile).recipe.cut is not None


def test_old_plugin_name_removes_the_table_of_a_parent(tmp_path: Path) -> None:
    profile = Inputs().profile("cpu", ["plugins.cut.enabled=false"])
    assert "length_batching" not in dict(profile.plugin_tables())


def test_old_name_of_a_training_key(tmp_path: Path) -> None:
    tables = {"model": {"name": "m"}, "data": {"train": "t.csv"}, "training": {"nonfinite_share": 0.5}}
    job = make_job(Document("job.toml", tables, {("training", "nonfinite_share"): 6}))
    assert job.job.training.nonfinite_fraction == 0.5
    assert job.document.notes == (
        "job.toml:6: training.nonfinite_share is now training.nonfinite_fraction; hwopt 0.4 removes the old name",
    )
    job = make_job(Document("job.toml", tables), ["training.nonfinite_share=0.25"])
    assert job.job.training.nonfinite_fraction == 0.25
    profile = profile_of(tmp_path, "[training]\nnonfinite_share = 0.5\n")
    assert profile.content.training.nonfinite_fraction == 0.5


BASE = "[plugins.batch]\ntrain = 64\neval = 128\ngradient_accumulation_steps = 2\n"


@pytest.mark.parametrize(
    ("changes", "train", "rows"),
    [
        (["train=8"], 8, 128),
        (["train=48"], 48, 128),
        (["train=64"], 64, 128),
        (["eval=8"], 64, 128),
        (["train=8", "effective=16"], 8, 16),
        (["train=8", "gradient_accumulation_steps=2"], 8, 16),
        (["train=8", "accumulation=2"], 8, 16),
        (["gradient_accumulation_steps=1"], 64, 64),
        (["effective=32"], 32, 32),
    ],
)
def test_changing_one_size_keeps_the_rows_of_a_step(changes: list[str], train: int, rows: int, tmp_path: Path) -> None:
    """On the command line and in a profile with a parent. The effective batch changes only if it is set."""
    by_command = profile_of(tmp_path, BASE, *(f"plugins.batch.{change}" for change in changes))
    (tmp_path / "base.toml").write_text('name = "base"\n' + BASE)
    child = "\n".join(change.replace("=", " = ") for change in changes)
    by_child = profile_of(tmp_path, f'extends = "base"\n[plugins.batch]\n{child}\n')
    for plan in map(plan_of, (by_command, by_child)):
        assert (plan.batch.train, plan.batch.step) == (train, rows)


def test_kept_rows_per_step_are_shown_with_their_place(tmp_path: Path) -> None:
    plan = plan_of(profile_of(tmp_path, BASE, "plugins.batch.train=8"))
    (batch,) = plan.entries
    assert batch.reason.startswith("128 rows per step: 16 micro-batches of up to 8; ")
    assert batch.provenance["effective"] == f"kept ({tmp_path / 'mine.toml'}:2)"
    assert batch.provenance["train"] == "--set"


def test_gradient_accumulation_wins_over_the_effective_batch_of_a_parent(tmp_path: Path) -> None:
    plan = plan_of(
        profile_of(tmp_path, "[plugins.batch]\ntrain = 4\neffective = 64\n", "plugins.batch.gradient_accumulation_steps=2")
    )
    assert plan.batch.step == 8


def test_train_auto_keeps_the_rows_of_the_profile(tmp_path: Path) -> None:
    plan = plan_of(profile_of(tmp_path, BASE, "plugins.batch.train=auto"))
    assert plan.batch.step == 128


def test_wrong_value_of_a_parent_does_not_block_an_override(tmp_path: Path) -> None:
    plan = profile_of(tmp_path, '[plugins.batch]\ntrain = "many"\ngradient_accumulation_steps = 2\n', "plugins.batch.train=8")
    assert dict(plan.plugin_tables())["batch"] == {"train": 8, "gradient_accumulation_steps": 2}


def test_run_reads_its_job_and_its_profile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hwopt.cli.options import begin
    from hwopt.planning.inputs import refuse_missing_data

    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("text,label\na,b\nc,d\n")
    (tmp_path / "mine.toml").write_text('name = "mine"\n[plugins.batch]\ntrain = 4\n')
    config = '{ model_type = "bert", hidden_size = 8, num_hidden_layers = 1, num_attention_heads = 1, intermediate_size = 8 }'
    (tmp_path / "job.toml").write_text(f'[model]\nconfig = {config}\n[data]\ntrain = "rows.csv"\n')
    opened: list[str] = []
    real = Path.open

    def counting(path: Path, *arguments: Any, **options: Any) -> Any:
        opened.append(path.name)
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", counting)
    inputs = begin(["./mine.toml"], Path("job.toml"), [], None)
    refuse_missing_data(inputs.job(Path("job.toml"), []))
    for changes in ([], ["plugins.batch.train=2"]):
        api.resolve("./mine.toml", Path("job.toml"), assignments=changes, inputs=inputs)
    assert (opened.count("job.toml"), opened.count("mine.toml")) == (1, 1)
