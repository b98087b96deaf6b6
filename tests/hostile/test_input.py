"""Bad files, options, values and variables end with exit code 2 and one message that names the place, without a traceback.

Most cases run the command line in this process. `export` resolves a job and a profile and does not trace, so it is the cheapest
command that checks all input.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from cases import examples
from command_line import hwopt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hwopt.cli import COMMANDS
from hwopt.config.job import Data, TaskOptions
from hwopt.config.job_model import Model
from hwopt.config.job_training import Training
from hwopt.errors import InputError
from hwopt.export.launcher_environment import refuse_contradictions
from hwopt.hardware.device import described
from hwopt.plugin.registry import Registry
from hwopt.text import printable

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


# fmt: off
NASTY = [
    b"", b"\x00", b"\xff", b"\xef\xbb\xbf", b"\r\n", b'"', b"'''", b"[", b"[[", b"{", b"}", b"=", b".", b"#", b"\\u0000", b"-1",
    b"nan", b"9" * 30, b"1e400", b"true", b"\xe2\x80\xae", b"\x1b[2J", b"plugins.x", b"extends = 'mine'", b"a.b.c = 1", b"{a=",
    b'"a".', b'{"a":', b"\n", b" ", b"[[model]]\n", b"'\\ud800'", b"PK\x03\x04", b"\x80\x04\x95", b"!!python/object",
]
NO_TEXT = ["true", "-1", "1.5", "nan", "[1]", "[[]]", "{ a = 1 }"]
NO_NUMBER = ["true", "nan", "''", "'1'", "[1]", "{}", "2020-01-01", "'\\u001b[2J'", "-inf", "-1", "9" * 400]
NO_COUNT = [*NO_NUMBER, "1.5", str(2**63 + 1)]
NO_FLAG = ["1", "'true'", "[]", "{}", "nan"]
NO_CHOICE = ["3", "''", "'no-such'", "[{}]", "{ a = 'x' }", "true"]
NO_LIST = ["true", "3", "[1]", "[{}]", "[['a']]", "nan"]
NO_TABLE = ["3", "'bert'", "[]", "true", "nan"]
LITERALS = [*NO_TEXT, *NO_COUNT, *NO_FLAG, *NO_CHOICE, "[[[1]]]", "{ a = { b = 1 } }", '"\\u0000"', "0x10", "-0.0"]
# fmt: on
TABLES: dict[str, Any] = {"model": Model, "data": Data, "task": TaskOptions, "training": Training}
FIELDS = {f"{table}.{key}": field.annotation for table, model in TABLES.items() for key, field in model.model_fields.items()}
KEYS = [
    *FIELDS,
    *(f"plugins.{name}" for name in ("precision.dtype", "batch.train", "optimizer.name")),
    "model.config.hidden_size",
]


def leaves(annotation: Any) -> set[Any]:
    """The types of which `annotation` is a union; Literal for a text of a list, tuple and dict without their items' types."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return leaves(get_args(annotation)[0])
    if origin in (None, Literal, tuple, dict):
        return {origin or annotation} - {type(None)}
    return set().union(*map(leaves, get_args(annotation)))


def wrong_values(annotation: Any) -> list[str]:
    """Values in TOML that a key of this type cannot have."""
    first, *others = sorted(leaves(annotation), key=str)
    lists = {bool: NO_FLAG, int: NO_COUNT, float: NO_NUMBER, str: NO_TEXT, Literal: NO_CHOICE, tuple: NO_LIST, dict: NO_TABLE}
    return [value for value in lists[first] if all(value in lists[other] for other in others)]


WRONG = [(key, value) for key, annotation in FIELDS.items() for value in wrong_values(annotation)]


def test_every_key_of_a_job_has_wrong_values() -> None:
    assert {key for key, _ in WRONG} == set(FIELDS)


@many(25)
@given(st.sampled_from(WRONG))
def test_wrong_value_is_refused_with_its_line_or_option(wrong: tuple[str, str]) -> None:
    key, value = wrong
    table, name = key.split(".")
    lines = [line for line in JOB.decode().splitlines() if not line.startswith(f"{name} =")]
    place = lines.index(f"[{table}]") + 1
    lines.insert(place, f"{name} = {value}")
    Path("job.toml").write_text("\n".join(lines))
    text = refused(*EXPORT)
    assert f"job.toml:{place + 1}" in text or name in text


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
    try:
        load(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return False
    return True


@many(30)
@given(damaged(JOB))
def test_damaged_job_file_is_refused_by_its_name(raw: bytes) -> None:
    Path("job.toml").write_bytes(raw)
    code, text = check_outcome(EXPORT, (2, 3))
    if not is_document(raw, tomllib.loads):
        assert code == 2
        assert "job.toml" in text


@many(20)
@given(damaged(PROFILE))
def test_damaged_profile_is_refused_by_its_name(raw: bytes) -> None:
    Path("mine.toml").write_bytes(raw)
    for command, codes in ((EXPORT_MINE, (2, 3)), (("profiles", "show", "mine.toml"), (2,))):
        code, text = check_outcome(command, codes)
        if not is_document(raw, tomllib.loads):
            assert code == 2
            assert "mine.toml" in text


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
    if not is_document(raw, json.loads):
        assert code == 2
    assert code == 0 or "model" in text


@many(30)
@given(damaged(b'{"zero_optimization": {"stage": 3}}'))
def test_damaged_deepspeed_json_is_refused(raw: bytes) -> None:
    """The file in the launcher's variable is invalid or contradicts the plan."""
    Path("zero.json").write_bytes(raw)
    planned = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": {"zero_optimization": {"stage": 2}}}
    with pytest.raises(InputError, match=r"ACCELERATE_DEEPSPEED_CONFIG_FILE=zero\.json") as caught:
        refuse_contradictions(
            {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "zero.json"}, {"mixed_precision": "no"}, described("a card", (8, 6), 8), planned
        )
    check_message(printable(str(caught.value)))


# fmt: off
WRONG_PROFILE = {
    "name": ["3", "''", "'../x'", "'a\\u0000b'", "'\\u001b[31m'", "'-x'"],
    "summary": NO_TEXT, "extends": ["3", "''", "'mine'", "'../mine'", "'/dev/zero'", "['cpu']"],
    "card": ["3", "{ mach = ['x'] }"], "card.match": NO_LIST, "card.memory_gib": [*NO_NUMBER, "0"],
    "card.compute_capability": ["8.6", "'8'", "'-8.6'", "'x'", "'٨.٦'", "'8.6\\n'"],
    "card.dense_tflops": ["3", "{ fp8 = 1 }", "{ fp16 = -1 }"], "tuned_for": ["3", "{ parameters = -1 }", "{ x = 1 }"],
    "data": ["3", "{ train = 'x' }"], "training": ["[]", "{ learning_rate = 'x' }", "{ lr = 1 }"],
    "plugins": ["3", "{ precisoin = {} }", "{ precision = [] }", "{ '' = {} }"],
}
# fmt: on


@many(20)
@given(st.sampled_from([(key, value) for key, values in WRONG_PROFILE.items() for value in values]))
def test_wrong_value_in_a_profile_is_refused(wrong: tuple[str, str]) -> None:
    key, value = wrong
    Path("mine.toml").write_text(f"name = {value}\n" if key == "name" else f'name = "mine"\n{key} = {value}\n')
    text = refused(*EXPORT_MINE)
    assert "mine" in text
    assert key.split(".")[-1] in text


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
    *(((command,), ["--no-such", "--\x1b[31m", f"--{LONG}", "-=1"]) for command in COMMANDS),
    *(((command, "a", "b"), ["c"]) for command in COMMANDS),
    (("profiles", "show"), [*NO_NAMES, "../x", "no.toml"]),
    (("plugins", "show"), [*NO_NAMES, "../x"]),
    (("export", "job.toml", "--to", "accelerate", "--profile"), [*NO_NAMES, " ", ".", "/dev/null", "job.toml"]),
    (("export", "--profile", "cpu", "--to", "accelerate"), [*NO_NAMES, "..", "job.toml/x", "https://example.org/a.toml"]),
    (("export", "job.toml", "--profile", "cpu"), ["--to=yaml", "--to=deepspeed"]),
    ((*EXPORT, "--set"), [*NO_NAMES[:-1], "=", "a.=1", "a..b=1", "a.b", "model=3", "\x00.a=1", "a." * 5000 + "b=1"]),
    ((*EXPORT, "--set"), [f"model.name={'[' * 50_000}", f"training.{LONG}=1", "\ud800.a=1", "data={}"]),
    ((*EXPORT, "--memory-limit"), ["", "8", "-8GiB", "0GiB", "nanGiB", "8GiB", HUGE + "GiB", "٨GiB"]),
    ((*EXPORT, "--world-size"), NO_COUNTS),
    ((*EXPORT, "--nodes"), [*NO_COUNTS, "2"]),
    ((*EXPORT, "--hardware"), ["", "gpu"]),
    ((*EXPORT, "--output"), ["", ".", "job.toml", "job.toml/x", "\x00", LONG, "no/such/folder.yaml"]),
    ((*RUN, "--processes"), [*NO_COUNTS, "1000", "٢"]),
    ((*RUN, "--output-dir"), ["job.toml", "\x00", LONG, "/dev/null/x"]),
    (("plan", "job.toml", "--profile", "cpu"), ["--nodes=0", "--measure=1"]),
]


@many(30)
@given(st.sampled_from([(*words, word) for words, last in BAD_ARGUMENTS for word in last]))
def test_bad_command_line_is_refused(arguments: tuple[str, ...]) -> None:
    refused(*arguments)


SIZES = ["-1", "0", "'x'", "[]", "{}", "1.5", str(2**63 - 1), "33"]
OTHERS = ["'no-such'", "3", "'__import__'", "[]", "{ x = 'y' }", "-5"]
CONFIG_KEYS = {
    **dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "num_labels"), SIZES),
    **dict.fromkeys(("hidden_act", "rope_parameters", "id2label", "dtype", "auto_map", "quantization_config"), OTHERS),
    **dict.fromkeys(("attn_implementation", "architectures", "layer_norm_eps", "no_such_key"), OTHERS),
}


@many(20)
@given(
    st.sampled_from(["bert", "llama", "gpt2", "t5", "mixtral", "vit", "no-such", "../bert", "\\u0000"]),
    st.sampled_from([(key, value) for key, values in CONFIG_KEYS.items() for value in values]),
)
def test_bad_model_config_is_refused_with_its_line(model_type: str, wrong: tuple[str, str]) -> None:
    """transformers decides which configs are bad."""
    table = f'model_type = "{model_type}", {" = ".join(wrong)}'
    Path("job.toml").write_text(f"[model]\nconfig = {{ {table} }}\n[data]\ntrain = 'train.jsonl'\n")
    code, text = check_outcome(EXPORT, (2,))
    assert code == 0 or re.search(r"job\.toml:[12]: model", text), text
    assert code == 2 or model_type in ("bert", "llama", "gpt2", "t5", "mixtral")


def special_files() -> dict[str, Path]:
    """Name -> a path that is not a regular file, or whose end cannot be reached."""
    made = {name: Path(f"a_{name}.toml") for name in ("folder", "pipe", "loop", "lost", "sparse")}
    made["folder"].mkdir()
    os.mkfifo(made["pipe"])
    made["loop"].symlink_to(made["loop"].name)
    made["lost"].symlink_to("nowhere")
    with made["sparse"].open("wb") as file:
        file.truncate(2**40)
    for name, target in (("zero", "/dev/zero"), ("null", "/dev/null"), ("random", "/dev/urandom"), ("memory", "/proc/self/mem")):
        made[name] = Path(f"a_{name}.toml")
        made[name].symlink_to(target)
    return made


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev and /proc")
def test_special_file_is_refused() -> None:
    found = special_files()
    for name, path in found.items():
        assert path.name in refused("export", path.name, "--profile", "cpu", "--to", "accelerate"), name
        assert path.name in refused("export", "job.toml", "--profile", path.name, "--to", "accelerate"), name
        Path("mine.toml").write_text(f'name = "mine"\nextends = "{path.stem}"\n')
        assert path.stem in refused("profiles", "show", "mine.toml"), name
    job = Path("job.toml").read_bytes()
    for name, path in found.items():
        config_folder(b"{}")
        Path("model/config.json").unlink()
        Path("model/config.json").symlink_to(path.absolute())
        assert "model" in refused(*EXPORT), name
        Path("job.toml").write_bytes(job)
        if name != "lost":  # the output file is created at the link's target
            refused(*EXPORT, "--output", path.name)


def test_circular_extends_is_refused() -> None:
    for number in range(12):
        Path(f"p{number}.toml").write_text(f'name = "p{number}"\nextends = "p{(number + 1) % 12}"\n')
    Path("linked.toml").symlink_to("p0.toml")
    assert "circle" in refused("profiles", "show", "p0.toml")
    assert "circle" in refused("profiles", "show", "linked.toml")


TWO = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
VARIABLES: list[dict[str, str]] = [
    *({name: value} for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") for value in ("abc", "-1", "1.5", "٣", "\x1b[31m", HUGE)),
    *({"RANK": "1"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"WORLD_SIZE": "0"}, TWO, TWO | {"MASTER_ADDR": "localhost"}),
    TWO | {"MASTER_ADDR": "localhost", "MASTER_PORT": "99999"},
    *({f"ACCELERATE_{name}": "no-such"} for name in ("MIXED_PRECISION", "DYNAMO_BACKEND", "USE_CPU")),
    {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "abc"},
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


def test_unknown_metric_is_refused_by_the_run() -> None:
    Path("train.jsonl").write_text('{"text": "a b", "label": "x"}\n{"text": "c d", "label": "y"}\n' * 4)
    with Path("job.toml").open("a") as job:
        job.write("metric_for_best_model = 'acuracy'\n")
    place = f"job.toml:{len(Path('job.toml').read_text().splitlines())}"
    data = ("--set", "data.eval_fraction=0.5")
    assert f"{place}: training.metric_for_best_model: " in refused("run", "job.toml", "--profile", "cpu", *data)
    asked = ("--set", "training.metric_for_best_model=loss_of")
    assert "--set: training.metric_for_best_model: " in refused("run", "job.toml", "--profile", "cpu", *data, *asked)


# fmt: off
WORDS = [
    "job.toml", "mine.toml", "--profile", "cpu", "auto", "--set", "--format", "json", "table", "--to", "accelerate", "deepspeed",
    "--output", "out.yaml", "--force", "--strict", "--name", "--hardware", "--world-size", "--nodes", "--measure", "list", "show",
    "precision", "--memory-limit", "8GiB", "--debug", "-h", "--help", "--", "-", "=",
]
# fmt: on
texts = st.text(max_size=12)
assignments = st.one_of(
    st.text(max_size=30),
    st.builds("{}={}".format, st.one_of(st.sampled_from(KEYS), texts), st.one_of(st.sampled_from(LITERALS), texts)),
)
words = st.one_of(
    st.sampled_from(WORDS), st.text(max_size=8).filter(lambda text: "/" not in text), st.integers(-3, 10**6).map(str)
)


@many(30)
@given(st.lists(assignments, min_size=1, max_size=4))
def test_random_assignments_end_in_one_message(found: list[str]) -> None:
    check_outcome((*EXPORT, *(part for text in found for part in ("--set", text))), (2, 3))


@many(20)
@given(st.sampled_from([*COMMANDS, "", "x"]), st.lists(words, max_size=7))
def test_random_words_end_in_one_message(command: str, found: list[str]) -> None:
    """There is no data, and commands that trace, train or start processes get an option that ends them before."""
    lacking = {name: ["--profile", "no-such"] for name in ("run", "bench", "plan", "tune")} | {"doctor": ["--format", ""]}
    check_outcome((command, *found, *lacking.get(command, [])), (2, 3, 4))
