"""Options of a plugin that are kept together when a profile is extended, or changed with --set."""

from pathlib import Path
from typing import Any

import pytest

from hwopt import api
from hwopt.config.job import make_job
from hwopt.config.profile import Profile
from hwopt.config.toml import Document
from hwopt.hardware.device import Hardware, described
from hwopt.planning.capabilities import BERT_BASE
from hwopt.planning.inputs import Inputs
from hwopt.planning.plan import Plan
from hwopt.planning.resolve import resolve
from hwopt.plugin.registry import Registry

CARD = described("NVIDIA GeForce RTX 3070", (8, 6), 8, Hardware("cpu", "a CPU", 32, 30, cpu_cores=16, cpu_memory_gib=32))
SOFTWARE = dict.fromkeys(("torch", "accelerate", "transformers", "peft", "bitsandbytes"), "1.0")


def profile_of(folder: Path, text: str, *assignments: str) -> Profile:
    (folder / "mine.toml").write_text('name = "mine"\n' + text)
    return Inputs().profile(str(folder / "mine.toml"), assignments)


def plan_of(profile: Profile) -> Plan:
    job = make_job(Document("job.toml", {"model": {"name": "m"}, "data": {"train": "t.csv"}}))
    return resolve(profile, CARD, job, Registry(), BERT_BASE, SOFTWARE)


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


@pytest.mark.parametrize(
    ("profile", "change", "rows"),
    [
        ("[plugins.batch]\ntrain = 4\neffective = 64\n", "plugins.batch.gradient_accumulation_steps=2", 8),
        (BASE, "plugins.batch.train=auto", 128),
    ],
    ids=["accumulation wins over a parent's effective batch", "auto keeps the rows of the profile"],
)
def test_rows_of_a_step_after_a_change(profile: str, change: str, rows: int, tmp_path: Path) -> None:
    assert plan_of(profile_of(tmp_path, profile, change)).batch.step == rows


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
