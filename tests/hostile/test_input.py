"""Bad files, options, values and variables end with exit code 2 and one message that names the place, without a traceback.

Most cases run the command line in this process. `export` resolves a job and a profile and does not trace, so it is the cheapest
command that checks all input.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
from cases import examples
from command_line import hwopt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hwopt.cli import COMMANDS

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


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a valid job."""
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_bytes(JOB)
    return tmp_path


def message_of(arguments: Sequence[str], *codes: int) -> str:
    """The message of a command line that ends with one of the exit `codes`; "" for 0."""
    done = hwopt(*arguments, cwd=Path())
    code, text = done.returncode, done.stderr
    assert code in codes, (arguments, code, text)
    if code == 0:
        return ""
    check_message(text)
    return text


def check_message(text: str) -> None:
    assert "Traceback" not in text
    assert 0 < len([line for line in text.splitlines() if line.strip()]) <= MOST_LINES, text
    assert len(text) < 4000
    assert not [character for character in text if not character.isprintable() and character not in "\n\t"], repr(text)


def many(number: int) -> settings:
    """`number` examples, twenty times as many in the long form."""
    return settings(
        max_examples=examples(number), suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    )


def test_unchanged_job_and_profile_are_accepted() -> None:
    Path("mine.toml").write_bytes(PROFILE)
    message_of(EXPORT_MINE, 0)


NASTY = [
    *(b"", b"\x00", b"\xff", b"\xef\xbb\xbf", b"\r\n", b'"', b"'''", b"[", b"[[", b"{", b"}", b"=", b".", b"#", b"\\u0000"),
    *(b"nan", b"1e400", b"\xe2\x80\xae", b"\x1b[2J", b"plugins.x", b"extends = 'mine'", b"a.b.c = 1", b"{a="),
    *(b'{"a":', b"[[model]]\n", b"'\\ud800'", b"PK\x03\x04", b"!!python/object"),
]


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


@pytest.mark.parametrize(
    ("name", "valid", "command"),
    [
        ("job.toml", JOB, EXPORT),
        ("mine.toml", PROFILE, EXPORT_MINE),
        ("model/config.json", CONFIG, ("export", "named.toml", *EXPORT[2:])),
    ],
    ids=["job", "profile", "config of a model"],
)
@many(25)
@given(data=st.data())
def test_damaged_file_ends_in_one_message(name: str, valid: bytes, command: tuple[str, ...], data: st.DataObject) -> None:
    Path("named.toml").write_text("[model]\nname = 'model'\n[data]\ntrain = 'train.jsonl'\n")
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_bytes(data.draw(damaged(valid)))
    message_of(command, 0, 2, 3)


NO_NAMES = ["", "no-such", "a/\x00", "\x1b[31m", "/", LONG, "\ud800"]
RUN = ("run", "job.toml", "--profile", "cpu")
BAD_ARGUMENTS: list[tuple[tuple[str, ...], list[str]]] = [
    ((), [*NO_NAMES, "Run", "--no-such"]),
    *(((command,), ["--no-such"]) for command in COMMANDS),
    (("export", "job.toml", "--to", "accelerate", "--profile"), [*NO_NAMES, ".", "/dev/null", "job.toml"]),
    (("export", "--profile", "cpu", "--to", "accelerate"), [*NO_NAMES, "..", "job.toml/x"]),
    ((*EXPORT, "--set"), [*NO_NAMES[:-1], "=", "a..b=1", "model=3", f"model.name={'[' * 50_000}", "data={}"]),
    ((*EXPORT, "--memory-limit"), ["", "8", "-8GiB", "nanGiB"]),
    ((*EXPORT, "--output"), [".", "job.toml", "\x00"]),
    ((*RUN, "--processes"), ["", "0", "-1", "1.5", "1000"]),
    ((*RUN, "--output-dir"), ["job.toml", "\x00", LONG]),
]


@many(30)
@given(st.sampled_from([(*words, word) for words, last in BAD_ARGUMENTS for word in last]))
def test_bad_command_line_is_refused(arguments: tuple[str, ...]) -> None:
    message_of(arguments, 2)


TWO = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
VARIABLES: list[dict[str, str]] = [
    *({name: value} for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") for value in ("abc", "-1")),
    *({"RANK": "2", "WORLD_SIZE": "2"}, TWO, TWO | {"MASTER_ADDR": "localhost"}),
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
        text = message_of((*RUN, "--name", "n"), 2)
    assert any(name in text for name in variables)
    assert not Path("runs").exists()
