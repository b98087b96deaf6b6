"""Bad files, options, values and variables end with exit code 2 and one message that names the place, without a traceback.

Most cases run the command line in this process. `export` resolves a job and a profile and does not trace, so it is the cheapest
command that checks all input.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from cases import examples
from command_line import hwopt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from hwopt.cli import COMMANDS
from hwopt.config.job import Data, TaskOptions
from hwopt.config.job_model import Model
from hwopt.config.job_training import Training
from hwopt.plugin.registry import Registry

JOB = b"""[model]
config = { model_type = "bert", vocab_size = 64, hidden_size = 32, num_hidden_layers = 1, num_attention_heads = 2 }
[data]
train = "train.jsonl"
max_length = 32
[task]
kind = "text-classification"
[training]
max_steps = 3
learning_rate = 1e-3
"""
PROFILE = b"""name = "mine"
summary = "a card"
[card]
match = ["A card"]
memory_gib = 8
compute_capability = "8.6"
[training]
weight_decay = 0.01
[plugins.precision]
dtype = "bf16"
[plugins.batch]
train = 4
gradient_accumulation_steps = 2
"""
CONFIG = b'{"model_type": "bert", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}'
EXPORT = ("export", "job.toml", "--profile", "cpu", "--to", "accelerate")
EXPORT_MINE = ("export", "job.toml", "--profile", "mine.toml", "--to", "accelerate")
MOST_LINES = 12
FIGURE = (
    "bad TOML, YAML, JSON, command lines",
    f"{{tests}} of {{tests}} tests of many inputs: one message of at most {MOST_LINES} lines, exit 2, no traceback",
)
LONG = "x" * 100_000
HUGE = "9" * 5000


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a valid job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("job.toml").write_bytes(JOB)
    return tmp_path


def outcome(arguments: Sequence[str]) -> tuple[int, str]:
    """The exit code and the error output."""
    done = hwopt(*arguments, cwd=Path())
    return done.returncode, done.stderr


def check_message(text: str) -> None:
    assert "Traceback" not in text
    assert 0 < len([line for line in text.splitlines() if line.strip()]) <= MOST_LINES, text
    assert len(text) < 4000
    assert not [character for character in text if not character.isprintable() and character not in "\n\t"], repr(text)


def refused(*arguments: str) -> str:
    """The message of a command line that ends with exit code 2."""
    code, text = outcome(arguments)
    assert code == 2, (code, text)
    check_message(text)
    return text


def check_outcome(arguments: Sequence[str], codes: tuple[int, ...]) -> tuple[int, str]:
    """Assert that the command line ends with 0 or one of `codes`, and with one message. Returns code and message."""
    code, text = outcome(arguments)
    assert code in (0, *codes), (arguments, code, text)
    if code and "--debug" not in arguments:
        check_message(text)
    return code, text


def many(number: int) -> settings:
    """`number` examples, twenty times as many in the long form."""
    return settings(
        max_examples=examples(number), suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    )


def test_unchanged_job_and_profile_are_accepted() -> None:
    Path("mine.toml").write_bytes(PROFILE)
    assert outcome(EXPORT)[0] == 0
    assert outcome(("profiles", "show", "mine.toml"))[0] == 0
    assert outcome(EXPORT_MINE)[0] == 0


NASTY = [
    *(b"", b"\x00", b"\xff", b"\xef\xbb\xbf", b"\r\n", b'"', b"'''", b"[", b"[[", b"{", b"}", b"=", b".", b"#", b"\\u0000"),
    *(b"nan", b"9" * 30, b"1e400", b"\xe2\x80\xae", b"\x1b[2J", b"plugins.x", b"extends = 'mine'", b"a.b.c = 1", b"{a="),
    *(b'{"a":', b"[[model]]\n", b"'\\ud800'", b"PK\x03\x04", b"!!python/object"),
]
LITERALS = [
    *("true", "1", "-1", "1.5", "nan", "-inf", "9" * 400, str(2**63 + 1), "''", "'1'", "'no-such'", "0x10", "-0.0"),
    *("[]", "[1]", "[[]]", "[['a']]", "[{}]", "[[[1]]]", "{}", "{ a = 1 }", "{ a = { b = 1 } }", '"\\u0000"'),
]
TABLES: dict[str, Any] = {"model": Model, "data": Data, "task": TaskOptions, "training": Training}
FIELDS = {f"{table}.{key}": field.annotation for table, model in TABLES.items() for key, field in model.model_fields.items()}


def is_valid(key: str, value: str) -> bool:
    """Whether the type of a key of a job takes this value in TOML."""
    with contextlib.suppress(ValueError):
        TypeAdapter(FIELDS[key]).validate_python(tomllib.loads(f"value = {value}")["value"])
        return True
    return False


@many(25)
@given(st.sampled_from(sorted(FIELDS)), st.sampled_from(LITERALS))
def test_wrong_value_is_refused_with_its_line_or_key(key: str, value: str) -> None:
    table, name = key.split(".")
    lines = [line for line in JOB.decode().splitlines() if not line.startswith(f"{name} =")]
    place = lines.index(f"[{table}]") + 1
    lines.insert(place, f"{name} = {value}")
    Path("job.toml").write_text("\n".join(lines))
    code, text = check_outcome(EXPORT, (2, 3))
    assert code == 0 or f"job.toml:{place + 1}" in text or name in text
    assert code == 2 or is_valid(key, value)


@st.composite
def damaged(draw: st.DrawFn, valid: bytes) -> bytes:
    """`valid` with a few pieces replaced, inserted, doubled, repeated many times or removed."""
    raw = valid
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(raw)))
        end = min(len(raw), start + draw(st.sampled_from([0, 0, 1, 2, 5, 20, len(raw)])))
        repeated = st.builds(lambda piece, number: piece * number, st.sampled_from(NASTY), st.sampled_from([1, 1, 2, 50_000]))
        raw = raw[:start] + draw(st.one_of(repeated, st.binary(max_size=6), st.just(raw[start:end] * 2))) + raw[end:]
    return raw


def is_document(raw: bytes, load: Callable[[str], Any]) -> bool:
    """Whether another parser reads `raw`."""
    with contextlib.suppress(ValueError, RecursionError):
        load(raw.decode("utf-8-sig"))
        return True
    return False


@many(30)
@given(damaged(JOB))
def test_damaged_job_file_is_refused_by_its_name(raw: bytes) -> None:
    Path("job.toml").write_bytes(raw)
    code, text = check_outcome(EXPORT, (2, 3))
    assert is_document(raw, tomllib.loads) or (code == 2 and "job.toml" in text)


@many(20)
@given(damaged(PROFILE))
def test_damaged_profile_is_refused_by_its_name(raw: bytes) -> None:
    Path("mine.toml").write_bytes(raw)
    for command, codes in ((EXPORT_MINE, (2, 3)), (("profiles", "show", "mine.toml"), (2,))):
        code, text = check_outcome(command, codes)
        assert is_document(raw, tomllib.loads) or (code == 2 and "mine.toml" in text)


def config_folder(content: bytes) -> None:
    """A job with a model folder that holds this config.json."""
    Path("model").mkdir(exist_ok=True)
    Path("model/config.json").unlink(missing_ok=True)
    Path("model/config.json").write_bytes(content)
    Path("job.toml").write_text("[model]\nname = 'model'\n[data]\ntrain = 'train.jsonl'\n")


@many(30)
@given(damaged(CONFIG))
def test_damaged_config_file_of_a_model_is_refused_by_its_name(raw: bytes) -> None:
    config_folder(raw)
    code, text = check_outcome(EXPORT, (2,))
    assert is_document(raw, json.loads) or code == 2
    assert code == 0 or "model" in text


OPTIONS = [(name, key) for name in Registry().names for key in Registry().plugin(name).Options.model_fields]


@many(20)
@given(st.sampled_from(OPTIONS), st.sampled_from(["{{ {} = {{ no = 1 }} }}", "{{ {} = nan }}", "{{ {}_x = 1 }}", "[]", "3"]))
def test_wrong_option_of_any_plugin_is_refused(option: tuple[str, str], table: str) -> None:
    name, key = option
    Path("mine.toml").write_text(f'name = "mine"\nplugins.{name} = {table.format(key)}\n')
    text = refused(*EXPORT_MINE)
    assert f"plugins.{name}" in text or repr(name) in text


NO_NAMES = ["", "no-such", "a/\x00", "\x1b[31m", "/", LONG, "\ud800"]
NO_COUNTS = ["", "0", "-1", "x", "1.5", HUGE]
RUN = ("run", "job.toml", "--profile", "cpu")
BAD_ARGUMENTS: list[tuple[tuple[str, ...], list[str]]] = [
    ((), [*NO_NAMES, "Run", "--no-such", "--version=1", "--", "-"]),
    *(((command,), ["--no-such", f"--{LONG}"]) for command in COMMANDS),
    (("profiles", "show"), [*NO_NAMES, "../x", "no.toml"]),
    (("export", "job.toml", "--to", "accelerate", "--profile"), [*NO_NAMES, " ", ".", "/dev/null", "job.toml"]),
    (("export", "--profile", "cpu", "--to", "accelerate"), [*NO_NAMES, "..", "job.toml/x", "https://example.org/a.toml"]),
    ((*EXPORT, "--set"), [*NO_NAMES[:-1], "=", "a.=1", "a..b=1", "a.b", "model=3", "\x00.a=1", "a." * 5000 + "b=1"]),
    ((*EXPORT, "--set"), [f"model.name={'[' * 50_000}", f"training.{LONG}=1", "\ud800.a=1", "data={}"]),
    ((*EXPORT, "--memory-limit"), ["", "8", "-8GiB", "0GiB", "nanGiB", HUGE + "GiB", "٨GiB"]),
    ((*EXPORT, "--nodes"), [*NO_COUNTS, "2"]),
    ((*EXPORT, "--output"), ["", ".", "job.toml", "\x00", LONG, "no/such/folder.yaml"]),
    ((*RUN, "--processes"), [*NO_COUNTS, "1000", "٢"]),
    ((*RUN, "--output-dir"), ["job.toml", "\x00", LONG, "/dev/null/x"]),
]


@many(30)
@given(st.sampled_from([(*words, word) for words, last in BAD_ARGUMENTS for word in last]))
def test_bad_command_line_is_refused(arguments: tuple[str, ...]) -> None:
    refused(*arguments)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev and /proc")
@pytest.mark.parametrize("name", ["folder", "pipe", "loop", "sparse", "zero", "memory"])
def test_special_file_is_refused(name: str) -> None:
    path = Path(f"a_{name}.toml")
    if name == "folder":
        path.mkdir()
    elif name == "pipe":
        os.mkfifo(path)
    elif name == "sparse":
        with path.open("wb") as file:
            file.truncate(2**40)
    else:
        path.symlink_to({"loop": path.name, "zero": "/dev/zero", "memory": "/proc/self/mem"}[name])
    assert path.name in refused("export", path.name, "--profile", "cpu", "--to", "accelerate")
    assert path.name in refused("export", "job.toml", "--profile", path.name, "--to", "accelerate")
    refused(*EXPORT, "--output", path.name)
    Path("mine.toml").write_text(f'name = "mine"\nextends = "{path.stem}"\n')
    assert path.stem in refused("profiles", "show", "mine.toml")
    config_folder(b"{}")
    Path("model/config.json").unlink()
    Path("model/config.json").symlink_to(path.absolute())
    assert "model" in refused(*EXPORT)


def test_circular_extends_is_refused() -> None:
    for number in range(3):
        Path(f"p{number}.toml").write_text(f'name = "p{number}"\nextends = "p{(number + 1) % 3}"\n')
    assert "circle" in refused("profiles", "show", "p0.toml")


TWO = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
VARIABLES: list[dict[str, str]] = [
    *({name: value} for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") for value in ("abc", "-1", "1.5", "٣", "\x1b[31m", HUGE)),
    *({"RANK": "1"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"WORLD_SIZE": "0"}, TWO, TWO | {"MASTER_ADDR": "localhost"}),
    *({f"ACCELERATE_{name}": "no-such"} for name in ("MIXED_PRECISION", "DYNAMO_BACKEND", "USE_CPU")),
    *({f"ACCELERATE_USE_{engine}": "true"} for engine in ("DEEPSPEED", "FSDP", "MEGATRON_LM")),
]


@many(30)
@given(st.sampled_from(VARIABLES))
def test_bad_launcher_variable_is_refused(variables: dict[str, str]) -> None:
    Path("train.jsonl").write_text('{"text": "a", "label": "b"}\n')
    with pytest.MonkeyPatch.context() as patched:
        for name, value in variables.items():
            patched.setenv(name, value)
        text = refused(*RUN, "--name", "n")
    assert any(name in text for name in variables)
    assert not Path("runs").exists()


WORDS = [
    *("job.toml", "mine.toml", "--profile", "cpu", "auto", "--set", "--format", "json", "--to", "accelerate", "--output"),
    *("out.yaml", "--force", "--name", "--nodes", "--measure", "list", "--memory-limit", "8GiB", "--debug", "-h", "--", "="),
]
words = st.one_of(
    st.sampled_from(WORDS), st.text(max_size=8).filter(lambda text: "/" not in text), st.integers(-3, 10**6).map(str)
)


@many(20)
@given(st.sampled_from([*COMMANDS, "", "x"]), st.lists(words, max_size=7))
def test_random_words_end_in_one_message(command: str, found: list[str]) -> None:
    """There is no data, and commands that trace, train or start processes get an option that ends them before."""
    lacking = {name: ["--profile", "no-such"] for name in ("run", "bench", "plan", "tune")} | {"doctor": ["--format", ""]}
    check_outcome((command, *found, *lacking.get(command, [])), (2, 3, 4))
