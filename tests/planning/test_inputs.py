"""Input is checked before a heavy package is imported."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from accelerate.utils import str_to_bool

from hwopt.cli.run import run
from hwopt.config.aliases import INSTEAD, plugin_aliases
from hwopt.config.job import Job, make_job
from hwopt.config.task_kinds import task_facts
from hwopt.config.toml import Document
from hwopt.config.validation import _fields_at
from hwopt.errors import DataError, HwoptError, InputError, StorageError, is_gated
from hwopt.memory.trace.tracer import cached_timelines
from hwopt.model.config import load_config
from hwopt.model.facts import model_facts
from hwopt.planning.inputs import NO, YES, Inputs, refuse_missing_data, refuse_mistakes, refuse_odd_switches
from hwopt.plugin.registry import Registry
from hwopt.runs.folder import run_folder
from hwopt.saving.reader import checkpoint_in
from hwopt.system.hub import hub_is_out_of_reach
from hwopt.testing import TINY_BERT


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_proxies")
def test_hub_with_an_unknown_host_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    assert hub_is_out_of_reach()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # only DNS is checked; the client detects a closed port
    assert not hub_is_out_of_reach()


@pytest.mark.usefixtures("no_proxies")
def test_proxy_resolves_the_hub_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    assert not hub_is_out_of_reach()


@pytest.mark.usefixtures("no_proxies")
@pytest.mark.parametrize(("name", "offline"), [("owner/some-model", "1"), (".", "")], ids=["of the hub", "a folder"])
def test_unreachable_hub_sets_offline_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, offline: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # for the hub's client as good as unset
    job = tmp_path / "job.toml"
    job.write_text(f'[model]\nname = "{name}"\n[data]\ntrain = "rows.jsonl"\n')
    refuse_mistakes(Inputs(), ["cpu"], job, [], None)
    assert os.environ.get("HF_HUB_OFFLINE") == offline


def test_checking_does_not_create_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HWOPT_CACHE", str(tmp_path / "cache"))
    refuse_mistakes(Inputs(), ["cpu"], None, [], "8GiB")
    assert not list(tmp_path.iterdir())


SMALL_JOB = '[model]\nname = "."\n[data]\ntrain = "rows.jsonl"\n'


def test_plugins_of_a_job_are_over_the_profile_and_under_set(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(f"{SMALL_JOB}[plugins.batch]\ntrain = 4\neval = 6\n[plugins.compile]\n")
    inputs = Inputs()
    profile = inputs.profile("cpu", ["plugins.batch.eval=7"], inputs.job(job, []))
    below = inputs.profile("cpu")
    batch = profile.content.plugins["batch"]
    assert (batch["train"], batch["eval"]) == (4, 7)
    assert batch["effective"] == below.content.plugins["batch"]["train"], "a smaller micro-batch keeps the rows per step"
    assert profile.document.place(("plugins", "batch", "train")) == f"{job}:6"
    assert profile.document.place(("plugins", "batch", "eval")) == "--set"
    assert list(profile.content.plugins) == [*below.content.plugins, "compile"]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("[plugins.batch]\ntrian = 4", r"job\.toml:6: plugins\.batch\.trian: unknown .*Did you mean 'train'"),
        ("[plugins.batsh]\ntrain = 4", r"Did you mean 'batch'"),
        ("[plugins]\nbatch = 4", r"job\.toml:6: plugins\.batch"),
    ],
)
def test_bad_plugins_of_a_job_are_refused_with_their_line(table: str, message: str, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(f"{SMALL_JOB}{table}\n")
    with pytest.raises(HwoptError, match=message):
        refuse_mistakes(Inputs(), ["cpu"], job, [], None)


def test_job_given_as_a_profile_is_recognized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text('[model]\nname = "."\n[data]\ntrain = "rows.jsonl"\n')
    with pytest.raises(InputError, match=r"this is a job; hwopt run \./job\.toml --profile NAME"):
        refuse_mistakes(Inputs(), ["./job.toml"], Path("job.toml"), [], None)
    with pytest.raises(InputError, match=r"Did you mean 'rtx3070_8gb"):
        refuse_mistakes(Inputs(), ["RTX 3070"], Path("job.toml"), [], None)


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without read permission. The system call is patched, because root may read every folder."""
    monkeypatch.chdir(tmp_path)
    folder, look = Path("private"), Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        if folder.absolute() in path.absolute().parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return look(path, **options)

    folder.mkdir()
    monkeypatch.setattr(Path, "stat", stat)
    return folder


def test_path_without_permission_is_refused(locked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("job.toml").write_text('[model]\nname = "private/model"\n[data]\ntrain = "rows.jsonl"\n')
    with pytest.raises(InputError, match=r"job\.toml:2: model\.name: 'private/model': cannot access: Permission denied"):
        refuse_mistakes(Inputs(), ["cpu"], None, [], None)
    with pytest.raises(InputError, match=r"--set: model\.name: 'private/m': cannot access: Permission denied"):
        refuse_mistakes(Inputs(), ["cpu"], None, ["model.name=private/m"], None)
    Path("other.toml").write_text('[model]\nname = "."\n[data]\ntrain = "private"\n')
    with pytest.raises(DataError, match=r"data 'private/.*': cannot access: Permission denied"):
        refuse_missing_data(Inputs().job(Path("other.toml"), []))
    for path in (locked / "run", locked / "run" / "checkpoint-5"):
        with pytest.raises(InputError, match=rf"--resume-from '{path}': cannot access: Permission denied"):
            checkpoint_in(path)


def test_cache_without_permission_is_refused(locked: Path) -> None:
    config = load_config(None, TINY_BERT)
    assert model_facts(config, task_facts("text-classification"), "a model", locked / "models").parameters > 0
    assert cached_timelines(locked / "trace.npz", dict) == {}
    with pytest.raises(StorageError, match=r"private/.*: cannot write the cache .* set HWOPT_CACHE"):
        Inputs().job_or_demo(None, [], locked)


@pytest.mark.parametrize(("make", "message"), [(os.mkdir, "is a folder"), (os.mkfifo, "is not a regular file")])
def test_special_job_file_is_refused(
    make: Callable[[str], None], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make("job.toml")
    with pytest.raises(InputError, match=rf"job\.toml.*{message}"):
        Inputs().job_or_demo(None, [], tmp_path / "cache")


JOB = '[model]\nname = "."\n[data]\n'


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ('train = "rows.jsnl"', "rows.jsonl"),
        ('train = "no-such/rows.jsonl"', "the folder 'no-such' does not exist"),
        ('train = "rows.jsonl"\neval = "evaluation.csv"', r"evaluation\.csv: no such file"),
        ('train = "rows.zip"', "archive"),
        ('train = "."', r"give its files: .*\*\.jsonl. \(1 file\)"),
        ('train = "rows.jsonl"\nsplit = "train"', "applies to hub names and .datasets. folders, not to files"),
    ],
    ids=["a typo", "a folder", "evaluation", "an archive", "not made by datasets", "a split of a file"],
)
def test_missing_data_is_reported_before_planning(
    data: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"text": "a", "label": "b"}\n')
    Path("rows.zip").write_text("no archive")
    Path("job.toml").write_text(JOB + data.replace("rows.jsnl", "./rows.jsnl"))
    refuse_mistakes(Inputs(), ["cpu"], None, [], None)  # a plan needs no data
    with pytest.raises(DataError, match=message):
        refuse_missing_data(Inputs().job(None, []))


def test_hub_name_is_not_checked_locally(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB + 'train = "nyu-mll/glue:rte"\neval_split = "validation"')
    refuse_missing_data(Inputs().job(None, []))


def test_unwritable_output_folder_is_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_folder(tmp_path / "new" / "runs", "mine", "") == tmp_path / "new" / "runs" / "mine"
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # patched, because root may write everywhere
    with pytest.raises(StorageError, match="no permission to write in"):
        run_folder(tmp_path / "new" / "runs", "mine", "")
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert run_folder(tmp_path / "runs", "mine", "", resume=True).name == "mine"  # the folder's own permissions count


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("training.fp16", r"plugins\.precision\.dtype = 'fp16' \(in a profile, or with --set\)"),
        ("training.per_device_train_batch_size", r"plugins\.batch\.train \(in a profile, or with --set\)"),
        ("training.max_length", "data.max_length"),
        ("data.seed", "training.seed"),
        ("model.model_name_or_path", "model.name"),
        ("training.output_dir", "--output-dir"),
    ],
)
def test_keys_of_other_libraries_get_the_hwopt_key(word: str, instead: str) -> None:
    table, key = word.split(".")
    tables: dict[str, dict[str, object]] = {"model": {"name": "m"}, "data": {"train": "t"}, "training": {}}
    tables[table][key] = "1"
    with pytest.raises(InputError, match=f"{word}: unknown key; give {instead} instead"):
        make_job(Document("job.toml", tables))


def test_every_alias_names_an_existing_key() -> None:
    registry, options = Registry(), {option for parameter in run.params for option in parameter.opts}
    for word, instead in (plugin_aliases() | INSTEAD).items():
        place = instead.split(" ")[0].rstrip(",")
        table, *keys = place.split(".")
        if place.startswith("--"):
            assert place in options, word
        elif table != "plugins":
            assert keys[0] in _fields_at(Job, (table,)), word
        else:
            assert keys[1] in {"enabled", *registry.plugin(keys[0]).Options.model_fields}, word


@pytest.mark.parametrize(
    ("error", "gated"),
    [
        (OSError("You are trying to access a gated repo."), True),
        (OSError("401 Client Error: Unauthorized for url"), True),
        (RuntimeError("Client error '403 Forbidden' for url"), True),
        (OSError("/tmp/run-401/gated-model/config.json: no such file"), False),
    ],
)
def test_gated_hub_error_is_recognized(error: Exception, gated: bool) -> None:
    assert is_gated(error) == gated


def test_switch_must_be_on_or_off_as_accelerate_reads_it() -> None:
    for value in (*YES, *NO, "True"):
        refuse_odd_switches({"ACCELERATE_USE_CPU": value})
        assert str_to_bool(value) == (value.lower() in YES)
    with pytest.raises(InputError, match="^ACCELERATE_USE_CPU=.*: expected one of 1, true, .* unset it$"):
        refuse_odd_switches({"ACCELERATE_USE_CPU": "perhaps"})
