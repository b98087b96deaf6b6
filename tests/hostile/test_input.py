"""Bad files, options, values and variables end with exit code 2 and one message that names the place, without a traceback.

Most cases run the command line in this process. `export` resolves a job and a profile and does not trace, so it is the cheapest
command that checks all input.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cases import covering, named, runs_by_default
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hwopt.cli import COMMANDS, run_command
from hwopt.config.job import Data, Job, Task
from hwopt.config.job_model import Model
from hwopt.config.job_training import Training
from hwopt.errors import InputError
from hwopt.hardware.device import described
from hwopt.interop.launcher_environment import refuse_contradictions
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
EXPORT = ("export", "job.toml", "--profile", "cpu", "--to", "accelerate")
MOST_LINES = 12


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a valid job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("job.toml").write_bytes(JOB)
    return tmp_path


SECONDS: list[float] = []
"""Seconds that each input took in this process after the libraries were imported."""


@pytest.fixture(scope="module", autouse=True)
def timed(request: pytest.FixtureRequest, figures: Callable[[str, str], None]) -> Iterator[None]:
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed == failed and SECONDS:
        figures(
            "bad TOML, YAML, JSON, command lines",
            f"{len(SECONDS):,} inputs: one message of at most {MOST_LINES} lines, exit 2, no traceback; the slowest took "
            f"{max(SECONDS):.1f} s beside imports",
        )


def outcome(arguments: Sequence[str]) -> tuple[int, str]:
    """The exit code and the error output."""
    message = io.StringIO()
    imported, began = "transformers" in sys.modules, time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(message):
        code = run_command(list(arguments))
    if imported:
        SECONDS.append(time.perf_counter() - began)
    return code, message.getvalue()


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


def test_unchanged_job_and_profile_are_accepted() -> None:
    Path("mine.toml").write_bytes(PROFILE)
    assert outcome(EXPORT)[0] == 0
    assert outcome(("profiles", "show", "mine.toml"))[0] == 0
    assert outcome(("export", "job.toml", "--profile", "mine.toml", "--to", "accelerate"))[0] == 0


BAD_TOML = {
    "empty": b"",
    "only spaces": b" \t\n\n",
    "only a comment": b"# nothing\n",
    "NUL": b"\x00",
    "NULs": b"\x00" * 5000,
    "NUL inside": b'[model]\nname = "a\x00b"\n',
    "two BOMs": 2 * b"\xef\xbb\xbf" + JOB,
    "UTF-16": JOB.decode().encode("utf-16"),
    "UTF-16 without BOM": JOB.decode().encode("utf-16-le"),
    "UTF-32": JOB.decode().encode("utf-32"),
    "Latin-1": '[model]\nname = "é"\n'.encode("latin-1"),
    "cut UTF-8": b'[model]\nname = "\xe2\x82',
    "surrogate": b'[model]\nname = "\xed\xa0\x80"\n',
    "surrogate escape": b'[model]\nname = "\\ud800"\n',
    "overlong": b'a = "\xc0\x80"',
    "lone CR": b"[model]\rname = 'x'\r",
    "control character": b'name = "\x1b[31m"',
    "control character in a key": b'"\x1b]0;x\x07" = 1',
    "escape in a string": b'name = "\\u001b[31mred"',
    "escape in a key": b'"\\u001b[31mred" = 1',
    "line separator in a key": b'"\\u2028" = 1',
    "bidi in a key": '"\u202eeman" = 1'.encode(),
    "DEL": b'"\x7f" = 1',
    "JSON": b'{"model": {"name": "x"}}',
    "YAML": b"model:\n  name: x\n",
    "YAML with a tag": b"!!python/object/apply:os.system ['true']\n",
    "INI": b"[model]\nname: x\n",
    "XML": b"<?xml version='1.0'?><job/>",
    "HTML": b"<!DOCTYPE html><html><body>404</body></html>",
    "Python": b"import os\nos.remove('job.toml')\n",
    "ELF": b"\x7fELF\x02\x01\x01" + bytes(60),
    "ZIP": b"PK\x03\x04" + bytes(60),
    "gzip": b"\x1f\x8b\x08" + bytes(60),
    "PNG": b"\x89PNG\r\n\x1a\n",
    "pickle": b"\x80\x04\x95\x0c\x00\x00\x00",
    "no value": b"[model]\nname =\n",
    "no key": b"= 1",
    "no equals": b"[model]\nname\n",
    "two equals": b"a == 1",
    "open string": b"[model]\nname = 'x",
    "open string of lines": b"name = '''x\n",
    "open array": b"a = [1, 2",
    "open table": b"[model\nname = 'x'",
    "open inline table": b"model = { name = 'x'",
    "comma at the end": b"model = { name = 'x', , }",
    "two values a line": b"a = 1 b = 2",
    "the same key": b"[model]\nname = 'a'\nname = 'b'\n",
    "the same table": b"[model]\nname = 'a'\n[model]\n",
    "the same inline key": b"model = { name = 'a', name = 'b' }",
    "a key and a table": b"model = 1\n[model]\n",
    "a table into a value": b"[model]\nname = 'a'\n[model.name]\nx = 1\n",
    "bare octal": b"a = 0777",
    "wrong number": b"a = 1_",
    "wrong float": b"a = .5",
    "wrong date": b"a = 2020-13-45",
    "wrong bool": b"a = True",
    "wrong escape": b'a = "\\x"',
    "key of many digits": b"1" * 5000 + b" = 1",
    "integer of many digits": b"a = " + b"9" * 5000,
    "negative of many digits": b"a = -" + b"9" * 5000,
    "hex of many digits": b"a = 0x" + b"f" * 9000,
    "float of many digits": b"a = 1." + b"9" * 5000,
    "huge exponent": b"a = 1e999999999",
    "deep arrays": b"a = " + b"[" * 100_000,
    "deep closed arrays": b"a = " + b"[" * 50_000 + b"]" * 50_000,
    "deep inline tables": b"a = " + b"{a=" * 60_000,
    "deep tables": b"[" + b"a." * 100_000 + b"a]",
    "deep keys": b"a" + b".a" * 100_000 + b" = 1",
    "deep quoted keys": b'"a"' + b'."a"' * 50_000 + b" = 1",
    "deep with spaces": b"a" + b" . a" * 50_000 + b" = 1",
    "deep in a string": b'a = """' + b'" [' * 30_000 + b'"""',
    "many keys": b"".join(b"k%d = 1\n" % number for number in range(20_000)),
    "many tables": b"".join(b"[t%d]\n" % number for number in range(20_000)),
    "many tables of one": b"[[model]]\n" * 50_000,
    "many dots": b"." * 200_000,
    "many quotes": b'"' * 200_000,
    "many apostrophes": b"'" * 200_000,
    "many backslashes": b'a = "' + b"\\" * 200_000,
    "many equals": b"=" * 200_000,
    "many brackets": b"[]" * 100_000,
    "many commas": b"a = [" + b"," * 200_000 + b"]",
    "many lines": b"\n" * 500_000,
    "many CRs": b"\r" * 200_000,
    "many spaces": b"a" + b" " * 500_000,
    "a key of spaces": b"a" + b" " * 400_000 + b". b",
    "too large": b"# " + b"x" * 2_000_000,
    "model is a number": b"model = 3",
    "model is a list": b"[[model]]\nname = 'x'",
    "model is a date": b"model = 2020-01-01",
    "all tables empty": b"[model]\n[data]\n[task]\n[training]\n",
    "unknown table": b"[modle]\nname = 'x'",
    "unknown tables": b"".join(b"[t%d]\nx = 1\n" % number for number in range(30)),
    "unknown key of a long name": b"[model]\n" + b"n" * 100_000 + b" = 1",
    "value of a long text": b"[task]\nkind = '" + b"n" * 100_000 + b"'",
    "plugin tables": b"[plugins.precision]\ndtype = 'bf16'\n",
}


SHORT_JOBS = (
    "empty", "only a comment", "NUL inside", "two BOMs", "UTF-16", "Latin-1", "cut UTF-8", "surrogate escape", "lone CR",
    "control character", "escape in a key", "bidi in a key", "JSON", "YAML with a tag", "ELF", "no value", "no equals",
    "open string", "open array", "two values a line", "the same key", "the same table", "a table into a value", "bare octal",
    "wrong date", "integer of many digits", "huge exponent", "deep arrays", "deep tables", "deep keys", "deep in a string",
    "many keys", "many dots", "many lines", "too large", "model is a number", "model is a list", "all tables empty",
    "unknown table", "unknown tables", "unknown key of a long name", "value of a long text", "plugin tables",
)  # fmt: skip
SHORT_PROFILES = ("empty", "NUL", "Latin-1", "YAML", "the same key", "deep keys", "too large", "unknown table", "plugin tables")


@pytest.mark.parametrize("raw", named(BAD_TOML, SHORT_JOBS))
def test_bad_job_file_is_refused(raw: bytes) -> None:
    Path("job.toml").write_bytes(raw)
    assert "job.toml" in refused(*EXPORT)


@pytest.mark.parametrize("raw", named(BAD_TOML, SHORT_PROFILES))
def test_bad_profile_is_refused(raw: bytes) -> None:
    if raw.startswith(b"[plugins."):
        raw = raw.replace(b"precision", b"precisoin")
    Path("mine.toml").write_bytes(raw)
    assert "mine.toml" in refused("export", "job.toml", "--profile", "mine.toml", "--to", "accelerate")


NO_TEXT = ["true", "-1", "1.5", "nan", "[1]", "[[]]", "{ a = 1 }", "2020-01-01", "12:00:00"]
NO_NUMBER = [
    "true",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "9" * 400,
    "-1",
    "''",
    "'x'",
    "'1'",
    "[]",
    "[1]",
    "{}",
    "2020-01-01",
    "'\\u001b[2J'",
]
NO_COUNT = [*NO_NUMBER, "0", "1.5", "1e3", str(2**63)]
NO_FLAG = ["1", "0", "'true'", "[]", "{}", "nan"]
NO_SOURCES = ["true", "3", "''", "[]", "{}", "[1]", "['']", "[['a']]", "['a', 3]", "['a', \"b\\u0007\"]", "[{}]"]
NO_MIXTURE = [
    "[{ path = 'a', weight = 1 }]",
    "['a', { path = 'b', weight = 1 }]",
    *(
        f"[{{ path = 'a', weight = 1 }}, {rest}]"
        for rest in (
            "{}",
            "{ path = 'b' }",
            "{ weight = 1 }",
            "{ path = '', weight = 1 }",
            "{ path = ['b'], weight = 1 }",
            "{ path = 'b', weight = 0 }",
            "{ path = 'b', weight = -1 }",
            "{ path = 'b', weight = inf }",
            "{ path = 'b', weight = nan }",
            "{ path = 'b', weight = '1' }",
            "{ path = 'b', weight = true }",
            "{ path = 'b', weight = 1, wieght = 2 }",
            "{ path = 'b', weight = 1, split = 3 }",
        )
    ),
]
WRONG = {
    **dict.fromkeys(("model.name", "model.tokenizer", "model.revision", "training.metric_for_best_model"), NO_TEXT),
    **{f"data.{key}": NO_TEXT for key in ("split", "eval_split", "label", "prompt", "completion")},
    **{f"data.{key}": NO_TEXT for key in ("test_split", "messages", "chat_template")},
    "data.train": [*NO_SOURCES, *NO_MIXTURE],
    **{f"data.{key}": [*NO_SOURCES, "[{ path = 'a', weight = 1 }, { path = 'b', weight = 1 }]"] for key in ("eval", "test")},
    "data.max_rows": NO_COUNT,
    "data.streaming": NO_FLAG,
    "data.image": NO_TEXT,
    "data.max_target_length": [*NO_COUNT, "1"],
    "task.rouge": NO_FLAG,
    "data.augmentation": ["true", "3", "['turn']", "'turn'", "[1]", "{}"],
    "data.decimal": [*NO_TEXT, "';'", "'.,'"],
    "data.encoding": [*NO_TEXT, "'cp12520'", "'base64'"],
    "data.format": ["true", "3", "''", "'xlsx'", "['csv']", "{}"],
    "data.delimiter": [*NO_TEXT, "''", "';;'"],
    "data.max_bad_rows": [*NO_NUMBER, "1.1"],
    "data.assistant_turns": ["3", "''", "'first'", "['all']", "{}"],
    "data.sample_prompts": ["true", "3", "[1]", "{}", "[['a']]"],
    "task.class_weights": ["3", "''", "'balance'", "['balanced']", "{ a = 'x' }", "{ a = -1 }"],
    "task.label_smoothing": [*NO_NUMBER, "1.1"],
    "training.early_stopping_patience": [*NO_NUMBER, "0", "1.5"],
    "training.early_stopping_threshold": NO_NUMBER,
    **{f"training.{key}": NO_FLAG for key in ("push_to_hub", "hub_private_repo")},
    "training.hub_model_id": [*NO_TEXT, "''", "'a/b/c'", "'a b'"],
    "model.config": ["3", "'bert'", "[]", "{}", "true", "{ model_type = 3 }"],
    "data.label": ["true", "3", "[]", "[1]", "{}", "[['a']]"],
    "data.label_delimiter": [*NO_TEXT, "''"],
    "data.text": ["true", "3", "[]", "[1]", "['a', 'b', 'c']", "{}", "[['a']]"],
    "data.eval_fraction": [*NO_NUMBER, "0", "1", "1.5"],
    "data.max_length": [*NO_COUNT, "1", "33333333333"],
    "task.kind": ["3", "''", "'seq2seq'", "['causal-lm']", "{}"],
    "task.ignore_router_loss": NO_FLAG,
    "training.greater_is_better": NO_FLAG,
    "training.lr_scheduler_type": ["3", "''", "'lineer'", "['linear']", "{}"],
    **{f"training.{key}": [*NO_NUMBER, "0"] for key in ("num_train_epochs", "learning_rate", "adam_epsilon")},
    **{f"training.{key}": NO_NUMBER for key in ("weight_decay", "max_grad_norm")},
    **{f"training.{key}": [*NO_NUMBER, "1"] for key in ("adam_beta1", "adam_beta2")},
    "training.warmup_ratio": [*NO_NUMBER, "1.1"],
    "training.warmup_steps": [value for value in NO_COUNT if value not in ("0", str(2**63))],
    "training.seed": [value for value in NO_COUNT if value != "0"],
    **{f"training.{key}": NO_COUNT for key in ("max_steps", "logging_steps", "eval_steps", "save_steps", "nonfinite_limit")},
    "training.save_total_limit": [value for value in NO_COUNT if value != "0"],
    **{f"training.{key}": NO_NUMBER for key in ("save_minutes", "hang_timeout")},
    "training.nonfinite_fraction": [*NO_NUMBER, "0", "1.1"],
    **{
        key: ["3", "''", "'never'", "['skip']", "{}"]
        for key in ("training.on_nonfinite", "training.loss_spike", "data.on_bad_row")
    },
}
"""Key -> invalid values in TOML syntax."""
VALUES = covering((key, value) for key, values in WRONG.items() for value in values)
CHANGES_OF_TYPE = ("model.name", "model.config")


def test_wrong_values_cover_every_key_of_a_job() -> None:
    tables: dict[str, Any] = {"model": Model, "data": Data, "task": Task, "training": Training}
    assert set(Job.model_fields) == set(tables)
    assert {f"{table}.{key}" for table, model in tables.items() for key in model.model_fields} == set(WRONG)


@pytest.mark.parametrize(("key", "value"), VALUES, ids=lambda text: text[:20])
def test_wrong_value_on_the_command_line_is_refused(key: str, value: str) -> None:
    """`--set` needs no quotes: a value that is not a string in TOML is a string there."""
    text = refused(*EXPORT, "--set", f"{key}={value}")
    assert key in text or key in CHANGES_OF_TYPE


EVERY_VALUE = [parameter.values for parameter in VALUES]


@pytest.mark.parametrize(
    "values",
    [pytest.param(runs_by_default(VALUES), id="short"), pytest.param(EVERY_VALUE, id="full", marks=pytest.mark.soak)],
)
@pytest.mark.parametrize("table", ["model", "data", "task", "training"])
def test_wrong_value_in_a_job_file_is_refused_with_its_line(table: str, values: list[tuple[str, str]]) -> None:
    """One wrong value at a time."""
    head, others = f"[{table}]", JOB.decode().splitlines()
    for key, value in values:
        of, name = key.split(".")
        if of != table:
            continue
        lines = [line for line in others if not line.startswith(f"{name} =")]
        lines.insert(lines.index(head) + 1, f"{name} = {value}")
        Path("job.toml").write_text("\n".join(lines))
        text = refused(*EXPORT)
        assert f"job.toml:{lines.index(head) + 2}" in text or key in CHANGES_OF_TYPE or "data.prompt" in text, (key, value, text)


WRONG_PROFILE = {
    "name": ["3", "''", "'../x'", "'a/b'", "'a\\u0000b'", "'\\u001b[31m'", "'" + "n" * 500 + "'", "'-x'", "'é'", "[]"],
    "summary": ["3", "[]", "{}", "true"],
    "extends": [
        "3",
        "''",
        "'mine'",
        "'../mine'",
        "'/dev/zero'",
        "'no such'",
        "['cpu']",
        "{}",
        "'" + "n" * 5000 + "'",
        "'a\\u0000b'",
    ],
    "card": ["3", "[]", "{ mach = ['x'] }", "'x'"],
    "card.match": ["3", "'x'", "[1]", "{}"],
    "card.memory_gib": [*NO_NUMBER, "0"],
    "card.compute_capability": [
        "8.6",
        "'8'",
        "'8.6.1'",
        "'-8.6'",
        "''",
        "'x'",
        "[]",
        "'٨.٦'",
        "'" + "8" * 5000 + ".6'",
        "'8.6\\n'",
    ],
    "card.memory_bandwidth_gbps": [*NO_NUMBER, "0"],
    "card.dense_tflops": ["3", "[]", "{ fp8 = 1 }", "{ fp16 = 'x' }", "{ fp16 = -1 }"],
    "tuned_for": ["3", "{ parameters = -1 }", "{ max_length = 0 }", "{ x = 1 }"],
    "data": ["3", "{ train = 'x' }", "{ max_length = 1 }"],
    "training": ["3", "[]", "{ learning_rate = 'x' }", "{ lr = 1 }"],
    "plugins": [
        "3",
        "[]",
        "{ precisoin = {} }",
        "{ precision = 3 }",
        "{ precision = [] }",
        "{ '' = {} }",
        "{ precision = { enabled = 1 } }",
    ],
}


PROFILE_VALUES = [(key, value) for key, values in WRONG_PROFILE.items() for value in values]


def profile_with(key: str, value: str) -> str:
    dotted = "" if key == "name" else f"{key} = {value}\n"
    return (f"name = {value}\n" if key == "name" else 'name = "mine"\n') + dotted


@pytest.mark.parametrize(
    ("key", "value"), covering(PROFILE_VALUES, ((key,) for key, _ in PROFILE_VALUES)), ids=lambda text: text[:20]
)
def test_wrong_value_in_a_profile_is_refused(key: str, value: str) -> None:
    Path("mine.toml").write_text(profile_with(key, value))
    text = refused("export", "job.toml", "--profile", "mine.toml", "--to", "accelerate")
    assert "mine" in text
    assert key.split(".")[-1] in text


NO_OPTIONS = ("{ no = 1 }", "nan", "-1", "'no such'", "9" * 400)


def wrong_options(every: bool) -> Iterator[tuple[str, str]]:
    """(plugin, its table as TOML) for every plugin and option, with all of NO_OPTIONS or with the next one in turn."""
    registry, turns = Registry(), itertools.cycle(NO_OPTIONS)
    for name in registry.names:
        yield from ((name, table) for table in ("[]", "3", "{ no_such_option = 1 }"))
        for key in registry.plugin(name).Options.model_fields:
            yield from ((name, f"{{ {key} = {value} }}") for value in (NO_OPTIONS if every else (next(turns),)))


@pytest.mark.parametrize("every", [pytest.param(False, id="short"), pytest.param(True, id="full", marks=pytest.mark.soak)])
def test_wrong_option_of_any_plugin_is_refused(every: bool) -> None:
    for name, table in wrong_options(every):
        Path("mine.toml").write_text(f'name = "mine"\nplugins.{name} = {table}\n')
        text = refused("export", "job.toml", "--profile", "mine.toml", "--to", "accelerate")
        assert f"plugins.{name}" in text or repr(name) in text, (name, table, text)


LONG = "x" * 100_000
COMMAND_LINES: list[tuple[str, ...]] = [
    ("",),
    ("\x00",),
    ("\x1b[31m",),
    ("rnu",),
    ("Run",),
    (LONG,),
    ("--no-such",),
    ("--version=1",),
    ("--",),
    ("--", "--"),
    ("-x",),
    ("-",),
    *(
        (command, option)
        for command in COMMANDS
        for option in ("--no-such", "-x", "--format", "--\x1b[31m", f"--{LONG}", "--=", "-=1")
    ),
    *((command, "a", "b", "c") for command in COMMANDS),
    *(
        ("profiles", "show", name)
        for name in ("", "no-such", "../x", "\x1b[31m", "\x00.toml", "no.toml", LONG, LONG + ".toml", "/", "/.toml", "é")
    ),
    *(("plugins", "show", name) for name in ("", "no-such", "../x", "\x1b[31m", "\x00", LONG, "é", "\ud800")),
    ("profiles", "show"),
    ("plugins", "show"),
    ("profiles", "shwo"),
    ("plugins", "--format", "yaml"),
    ("doctor", "--report", "--format", ""),
    ("doctor", "x"),
    *(
        ("export", "job.toml", "--profile", profile, "--to", "accelerate")
        for profile in (
            "",
            " ",
            "no-such",
            "\x00",
            "\x00.toml",
            "a/\x00",
            "\x1b[31m",
            ".",
            "..",
            "/",
            "./",
            "/dev/null",
            "job.toml",
            LONG,
            "\ud800",
            "auto ",
            "~/x.toml",
        )
    ),
    *(
        ("export", job, "--profile", "cpu", "--to", "accelerate")
        for job in (
            "",
            "no.toml",
            "\x00",
            "a/\x00/b",
            "\x1b[31m",
            ".",
            "..",
            "/",
            "/dev/null",
            LONG,
            "\ud800",
            "job.toml/x",
            "https://example.org/job.toml",
        )
    ),
    *(
        (*EXPORT, "--set", text)
        for text in (
            "",
            "=",
            "=1",
            "a",
            "a=1",
            "a.=1",
            ".a=1",
            "a..b=1",
            "a.b",
            "model=3",
            "model.name",
            "..=",
            "\x00",
            "\x00.a=1",
            "a.\x1b[31m=1",
            "model.\x00=1",
            "a." * 5000 + "b=1",
            LONG,
            f"model.name={'[' * 50_000}",
            "plugins.precision=3",
            "plugins.precisoin.dtype=fp16",
            "plugins.precision.dtype.x=1",
            "plugins.precision.dtype=[",
            "plugins.a.b.c=1",
            "training.seed=0x" + "f" * 9000,
            f"training.{LONG}=1",
            "model.config.hidden_size={}",
            "model.config.x.y.z=1",
            "é.é=1",
            "\ud800.a=1",
            "training.seed=\ud800",
            "model.config={}",
            "data.train=",
            "data={}",
            "task.kind=\x1b[31m",
        )
    ),
    *(
        (*EXPORT, "--memory-limit", size)
        for size in (
            "",
            "8",
            "GiB",
            "-8GiB",
            "0GiB",
            "8 TiB",
            "nanGiB",
            "infGiB",
            "1e9GiB",
            "8GiB",
            "9" * 5000 + "GiB",
            "٨GiB",
            "\x1bGiB",
            "8GiB\n",
        )
    ),
    *((*EXPORT, "--world-size", number) for number in ("", "0", "-1", "x", "1.5", "nan", "9" * 5000, "\x1b")),
    *((*EXPORT, "--nodes", number) for number in ("", "0", "-1", "x", "2", "9" * 5000)),
    *((*EXPORT, "--hardware", kind) for kind in ("", "gpu", "\x1b[31m")),
    ("export", "job.toml", "--profile", "cpu"),
    ("export", "job.toml", "--profile", "cpu", "--to", "yaml"),
    ("export", "job.toml", "--profile", "cpu", "--to", "deepspeed"),
    (*EXPORT, "--deepspeed-config-file", "x.json"),
    (*EXPORT, "--output", ""),
    (*EXPORT, "--output", "."),
    (*EXPORT, "--output", "job.toml"),
    (*EXPORT, "--output", "job.toml/x"),
    (*EXPORT, "--output", "\x00"),
    (*EXPORT, "--output", LONG),
    (*EXPORT, "--output", "no/such/folder.yaml"),
    *(
        ("run", "job.toml", "--profile", "cpu", "--processes", number)
        for number in ("", "0", "-1", "x", "1.5", "9" * 5000, "1000", "\x00", "٢")
    ),
    *(
        ("run", "job.toml", "--profile", "cpu", "--output-dir", folder, "--name", "n")
        for folder in ("job.toml", "\x00", "job.toml/x", LONG)
    ),
    ("run", "job.toml", "--profile", "cpu", "--output-dir", "job.toml"),
    ("run", "job.toml", "--profile", "cpu", "--output-dir", "/dev/null/x"),
    ("plan", "job.toml", "--profile", "cpu", "--profile", "no-such"),
    ("plan", "job.toml", "--profile", "cpu", "--nodes", "0"),
    ("plan", "job.toml", "--profile", "cpu", "--world-size", "2", "--nodes", "3"),
    ("plan", "job.toml", "--profile", "cpu", "--measure=1"),
]


def aspects_of(lines: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """One aspect per command line: all words but the last, and whether an earlier line has the same words."""
    counted: Counter[tuple[str, ...]] = Counter()
    found = []
    for line in lines:
        counted[line[:-1]] += 1
        found.append((" ".join((*line[:-1], str(min(counted[line[:-1]], 2)))),))
    return found


@pytest.mark.parametrize(
    "arguments",
    covering(((line,) for line in COMMAND_LINES), aspects_of(COMMAND_LINES)),
    ids=lambda arguments: " ".join(arguments)[-40:].encode("ascii", "backslashreplace").decode(),
)
def test_bad_command_line_is_refused(arguments: tuple[str, ...]) -> None:
    refused(*arguments)


SIZE = 2**63 - 1
CONFIGS = [
    "{ model_type = 'no-such' }",
    "{ model_type = '' }",
    "{ model_type = 3 }",
    "{ model_type = ['bert'] }",
    "{ model_type = {} }",
    "{ model_type = '../bert' }",
    "{ model_type = '\\u0000' }",
    "{ model_type = '\\u001b[31m' }",
    "{ hidden_size = 32 }",
    *(
        f"{{ model_type = '{model_type}', {rest} }}"
        for model_type in ("bert", "llama", "gpt2", "t5")
        for rest in (
            "no_such_key = 1",
            "'' = 1",
            "'\\u0000' = 1",
            "vocab_size = -1",
            "vocab_size = 'x'",
            "vocab_size = []",
            f"vocab_size = {SIZE}",
        )
    ),
    *(
        f"{{ model_type = 'bert', {rest} }}"
        for rest in (
            "hidden_size = 0",
            "hidden_size = -32",
            "hidden_size = 'x'",
            "hidden_size = 1.5",
            "hidden_size = []",
            "hidden_size = {}",
            f"hidden_size = {SIZE}",
            "hidden_size = 33",
            "hidden_size = 32, num_attention_heads = 0",
            "hidden_size = 32, num_attention_heads = -1",
            "hidden_size = 32, num_attention_heads = 5",
            "num_attention_heads = 'x'",
            "num_hidden_layers = 1000000000",
            f"num_hidden_layers = {SIZE}",
            "num_hidden_layers = 'x'",
            "num_hidden_layers = []",
            "intermediate_size = -1",
            "intermediate_size = 'x'",
            "max_position_embeddings = -1",
            f"max_position_embeddings = {SIZE}",
            "type_vocab_size = -1",
            "hidden_dropout_prob = -1",
            "hidden_dropout_prob = 2",
            "hidden_dropout_prob = 'x'",
            "hidden_act = 'no-such'",
            "hidden_act = 3",
            "hidden_act = '__import__'",
            "initializer_range = 'x'",
            "layer_norm_eps = 'x'",
            "is_decoder = 'x', add_cross_attention = true",
            "pad_token_id = -5",
            "num_labels = -1",
            "num_labels = 1000000000000",
            "id2label = 3",
            "id2label = { x = 'y' }",
            "problem_type = 'x'",
            "torch_dtype = 'x'",
            "dtype = 'os.system'",
            "architectures = 3",
            "auto_map = { AutoConfig = 'evil.Config' }",
            "quantization_config = { quant_method = 'no-such' }",
            "_attn_implementation = 'no-such'",
            "attn_implementation = 'evil/kernel'",
        )
    ),
    *(
        f"{{ model_type = 'llama', {rest} }}"
        for rest in (
            "num_hidden_layers = 1000000000",
            "num_hidden_layers = -1",
            "num_key_value_heads = 0",
            "num_key_value_heads = 7",
            "head_dim = -1",
            f"head_dim = {SIZE}",
            "hidden_size = 0",
            "rope_scaling = { rope_type = 'no-such' }",
            "rope_parameters = { rope_type = 'no-such' }",
            "rope_parameters = 3",
            "rope_theta = 'x'",
            "layer_types = ['x']",
            "layer_types = 3",
            "vocab_size = 0",
        )
    ),
    *(
        f"{{ model_type = 'gpt2', {rest} }}"
        for rest in (
            "n_layer = 1000000000",
            "n_layer = 'x'",
            "n_embd = -1",
            "n_head = 0",
            "n_embd = 7, n_head = 2",
            "n_positions = -1",
            "activation_function = 'x'",
        )
    ),
    *(f"{{ model_type = 'mixtral', {rest} }}" for rest in ("num_local_experts = 1000000000", "num_hidden_layers = 100000000")),
    "{ model_type = 't5' }",
    "{ model_type = 'vit' }",
    "{ model_type = 'whisper' }",
    "{ model_type = 'resnet' }",
]


ACCEPTED = {
    "{ model_type = 'bert', hidden_size = 32, num_attention_heads = -1 }",
    "{ model_type = 'bert', pad_token_id = -5 }",
    "{ model_type = 'bert', num_labels = -1 }",
    "{ model_type = 'llama', num_hidden_layers = -1 }",
    "{ model_type = 'llama', num_key_value_heads = 7 }",
    "{ model_type = 'llama', vocab_size = 0 }",
    "{ model_type = 't5' }",
}
"""Configs from which transformers builds a model."""

ACCEPTED_BY_NEWER_TRANSFORMERS = {
    "{ model_type = 'bert', problem_type = 'x' }": {"problem_type": "x"},
    "{ model_type = 'bert', architectures = 3 }": {"architectures": 3},
}
"""Configs that transformers 5.10 refuses."""


def is_accepted(config: str) -> bool:
    """Whether the installed transformers builds a model from the TOML table `config`."""
    if config not in ACCEPTED_BY_NEWER_TRANSFORMERS:
        return config in ACCEPTED
    from transformers import BertConfig

    try:
        BertConfig(**ACCEPTED_BY_NEWER_TRANSFORMERS[config])
    except Exception:
        return False
    return True


def aspects_of_config(config: str) -> tuple[str, str]:
    """The model type of a config and the key that it sets."""
    model_type, _, rest = config.strip("{ }").partition(",")
    return model_type, rest.partition("=")[0].strip()


@pytest.mark.parametrize(
    "config", covering(((config,) for config in CONFIGS), map(aspects_of_config, CONFIGS)), ids=lambda text: text[2:60]
)
def test_bad_model_config_is_refused(config: str) -> None:
    Path("job.toml").write_text(f"[model]\nconfig = {config}\n[data]\ntrain = 'train.jsonl'\n")
    if is_accepted(config):
        assert outcome(EXPORT)[0] == 0
    else:
        text = refused(*EXPORT)
        assert re.search(r"job\.toml:[12]: model", text), text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{ hidden_size = 32 }", "model.config.model_type: missing; give the architecture"),
        (
            "{ model_type = 'bert', num_hidden_layers = 1, hidden_act = 'gelo' }",
            "KeyError: 'gelo'; the config has hidden_act = 'gelo'",
        ),
        ("{ model_type = 'bert', num_hidden_layers = 1, vocab_size = 0 }", "IndexError: .*; the config has .*vocab_size = 0"),
        (
            "{ model_type = 'llama', num_hidden_layers = 1, hidden_size = 0 }",
            "; the config has head_dim = 0, hidden_size = 0",
        ),
        ("{ model_type = 'llama', hidden_size = 10_000_000 }", "hidden_size: 10000000 is too large"),
        ("{ model_type = 'gpt2', n_embd = 10_000_000 }", "n_embd: 10000000 is too large"),
        (
            "{ model_type = 'bert', vocab_size = 33_554_432 }",
            r"vocab_size: 33554432 is too large \(at most 16,777",
        ),
    ],
)
def test_message_names_the_wrong_key_of_a_config(config: str, message: str) -> None:
    Path("job.toml").write_text(f"[model]\nconfig = {config}\n[data]\ntrain = 'train.jsonl'\n")
    assert re.search(message, refused(*EXPORT))


def config_folder(content: bytes) -> None:
    """A job with a model folder that holds this config.json."""
    Path("model").mkdir(exist_ok=True)
    Path("model/config.json").unlink(missing_ok=True)
    Path("model/config.json").write_bytes(content)
    Path("job.toml").write_text("[model]\nname = 'model'\n[data]\ntrain = 'train.jsonl'\n")


BAD_JSON = {
    "empty": b"",
    "NULs": bytes(5000),
    "BOM": b"\xef\xbb\xbf{}",
    "UTF-16": "{}".encode("utf-16"),
    "not UTF-8": b'{"model_type": "\xff"}',
    "open": b'{"model_type": "bert"',
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "a text": b'"bert"',
    "TOML": b'model_type = "bert"',
    "pickle": b"\x80\x04\x95\x0c",
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "many digits": b'{"model_type": "bert", "hidden_size": ' + b"9" * 5000 + b"}",
    "NaN": b'{"model_type": "bert", "hidden_size": NaN}',
    "Infinity": b'{"model_type": "bert", "hidden_size": Infinity}',
    "no type": b"{}",
    "a type of code": b'{"model_type": "os.system"}',
    "a type with an escape": b'{"model_type": "\\u001b[31m"}',
    "a list as type": b'{"model_type": []}',
    "too large": b'{"model_type": "bert", "x": "' + b"x" * 20_000_000 + b'"}',
    "layers": b'{"model_type": "bert", "num_hidden_layers": 1000000000}',
    "layers of another name": b'{"model_type": "t5", "num_layers": 1000000000}',
    "layers inside": b'{"model_type": "gemma3", "text_config": {"num_hidden_layers": 1000000000}}',
    "a negative size": b'{"model_type": "bert", "hidden_size": -1}',
    "labels": b'{"model_type": "bert", "num_labels": 1000000000000}',
    "labels of text": b'{"model_type": "bert", "id2label": {"x": "y"}}',
    "remote code": b'{"model_type": "remote", "auto_map": {"AutoConfig": "code.Config"}}',
}


SHORT_JSON = ("empty", "UTF-16", "not UTF-8", "open", "a list", "deep objects", "many digits", "NaN", "no type", "a type of code",
    "too large", "layers", "layers inside", "labels", "remote code")  # fmt: skip
SHORT_DEEPSPEED = ("empty", "not UTF-8", "open", "a list", "deep objects", "many digits", "layers")


@pytest.mark.parametrize("content", named(BAD_JSON, SHORT_JSON))
def test_bad_config_file_of_a_model_is_refused(content: bytes) -> None:
    config_folder(content)
    assert "model" in refused(*EXPORT)


@pytest.mark.parametrize(
    "content", named({name: BAD_JSON[name] for name in BAD_JSON if name not in ("no type", "a list as type")}, SHORT_DEEPSPEED)
)
def test_bad_deepspeed_json_is_refused(content: bytes) -> None:
    """The file in the launcher's variable is invalid or contradicts the plan."""
    Path("zero.json").write_bytes(content)
    accelerator = {"mixed_precision": "no"}
    planned = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": {"zero_optimization": {"stage": 2}}}
    with pytest.raises(InputError, match=r"ACCELERATE_DEEPSPEED_CONFIG_FILE=zero\.json") as caught:
        refuse_contradictions(
            {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "zero.json"}, accelerator, described("a card", (8, 6), 8), planned
        )
    check_message(printable(str(caught.value)))


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
    assert "circle" in refused("profiles", "show", "p0.toml")
    Path("self.toml").write_text('name = "self"\nextends = "self"\n')
    assert "circle" in refused("profiles", "show", "self.toml")
    Path("linked.toml").symlink_to("p0.toml")
    assert "circle" in refused("profiles", "show", "linked.toml")


def test_long_chain_of_parents_is_refused() -> None:
    for number in range(2000):
        Path(f"p{number}.toml").write_text(f'name = "p{number}"\nextends = "p{number + 1}"\n')
    assert "extends" in refused("profiles", "show", "p0.toml")


NO_RANKS = ("abc", "-1", "1.5", "9" * 5000, "٣", "\x1b[31m", "0x1", " 1 x", "1e3")
SECOND_OF_TWO = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
VARIABLES: list[dict[str, str]] = [
    *({name: value} for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT") for value in NO_RANKS),
    {"RANK": "1"},
    {"RANK": "2", "WORLD_SIZE": "2"},
    {"WORLD_SIZE": "0"},
    {"WORLD_SIZE": "2"},
    SECOND_OF_TWO,
    {**SECOND_OF_TWO, "MASTER_ADDR": "localhost"},
    {**SECOND_OF_TWO, "MASTER_ADDR": "localhost", "MASTER_PORT": "99999"},
    {"RANK": "abc", "HWOPT_LAUNCH_FOLDER": "/no/such/folder"},
    {"ACCELERATE_MIXED_PRECISION": "fp7"},
    {"ACCELERATE_DYNAMO_BACKEND": "no-such"},
    {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "abc"},
    {"ACCELERATE_USE_DEEPSPEED": "true"},
    {"ACCELERATE_USE_FSDP": "true"},
    {"ACCELERATE_USE_CPU": "perhaps"},
    {"ACCELERATE_DEBUG_MODE": ""},
    {"USE_TORCH_XLA": "\x1b[31m"},
    {"ACCELERATE_USE_MEGATRON_LM": "true"},
]


@pytest.mark.parametrize(
    "variables",
    covering(((each,) for each in VARIABLES), ((tuple(each), *list(each.values())[:1]) for each in VARIABLES)),
    ids=lambda found: " ".join(f"{name}={value[:8]!a}" for name, value in found.items()),
)
def test_bad_launcher_variable_is_refused(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    Path("train.jsonl").write_text('{"text": "a", "label": "b"}\n')
    text = refused("run", "job.toml", "--profile", "cpu", "--name", "n")
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
NASTY = [
    b"", b"\x00", b"\xff", b"\xef\xbb\xbf", b"\r\n", b"\r", b'"', b"'", b"'''", b"[", b"]", b"[[", b"{", b"}", b"=", b".", b",",
    b"#", b"\\", b"\\u0000", b"-1", b"0", b"nan", b"9" * 30, b"1e400", b"true", b"\xe2\x80\xae", b"\x1b[2J", b"model",
    b"plugins.x", b"extends = 'mine'", b"a.b.c = 1", b"2020-01-01",
]
LITERALS = [
    *NO_TEXT, *NO_COUNT, *NO_FLAG, "''", "'x'", "[[[1]]]", "{ a = { b = 1 } }", '"\\u0000"', "1_000", "0x10", "07:32:00", "-0.0",
]
KEYS = [
    *WRONG, "plugins.precision.dtype", "plugins.batch.train", "plugins.optimizer.name", "model.config.hidden_size",
    "model.config.num_hidden_layers",
]
WORDS = [
    "job.toml", "mine.toml", "--profile", "cpu", "auto", "--set", "--format", "json", "table", "--to", "accelerate", "deepspeed",
    "--output", "out.yaml", "--force", "--strict", "--name", "--hardware", "--world-size", "--nodes", "--measure", "list", "show",
    "precision", "--memory-limit", "8GiB", "--debug", "-h", "--help", "--", "-", "=",
]
# fmt: on


@st.composite
def damaged(draw: st.DrawFn, valid: bytes) -> bytes:
    """`valid` with a few pieces replaced, inserted, doubled or removed."""
    raw = valid
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(raw)))
        end = min(len(raw), start + draw(st.sampled_from([0, 0, 1, 2, 5, 20])))
        new = draw(st.one_of(st.sampled_from(NASTY), st.binary(max_size=6), st.just(raw[start:end] * 2)))
        raw = raw[:start] + new + raw[end:]
    return raw


texts = st.text(max_size=12)
assignments = st.one_of(
    st.text(max_size=30),
    st.builds("{}={}".format, st.one_of(st.sampled_from(KEYS), texts), st.one_of(st.sampled_from(LITERALS), texts)),
)
words = st.one_of(
    st.sampled_from(WORDS), st.text(max_size=8).filter(lambda text: "/" not in text), st.integers(-3, 10**6).map(str)
)


def check_outcome(arguments: Sequence[str], codes: tuple[int, ...]) -> None:
    """Assert that the command line ends with 0 or one of `codes`, and with one message."""
    code, text = outcome(arguments)
    assert code in (0, *codes), (arguments, code, text)
    if code and "--debug" not in arguments:
        check_message(text)


def check_damaged_job(raw: bytes) -> None:
    Path("job.toml").write_bytes(raw)
    check_outcome(EXPORT, (2, 3))


def check_damaged_profile(raw: bytes) -> None:
    Path("mine.toml").write_bytes(raw)
    check_outcome(("export", "job.toml", "--profile", "mine.toml", "--to", "accelerate"), (2, 3))
    check_outcome(("profiles", "show", "mine.toml"), (2,))


def check_assignments(found: list[str]) -> None:
    check_outcome((*EXPORT, *(part for text in found for part in ("--set", text))), (2, 3))


def check_words(command: str, found: list[str]) -> None:
    """`run`, `bench`, `plan` and `tune` get an invalid option, so that they never train or trace."""
    no_profile = ["--profile", "no-such"]
    lacking = {"run": ["--output-dir", "job.toml"], "bench": no_profile, "plan": no_profile, "tune": no_profile}.get(command, [])
    check_outcome((command, *lacking, *found), (2, 3))


ways = st.one_of(
    st.tuples(st.just(check_damaged_job), damaged(JOB)),
    st.tuples(st.just(check_damaged_profile), damaged(PROFILE)),
    st.tuples(st.just(check_assignments), st.lists(assignments, min_size=1, max_size=4)),
    st.tuples(st.just(check_words), st.sampled_from([*COMMANDS, "", "x"]), st.lists(words, max_size=7)),
)


def check_way(way: tuple[Any, ...]) -> None:
    Path("job.toml").write_bytes(JOB)
    Path("mine.toml").write_bytes(PROFILE)
    Path("out.yaml").unlink(missing_ok=True)
    way[0](*way[1:])


@pytest.mark.parametrize("examples", [60, pytest.param(10_000, marks=pytest.mark.soak)])
def test_random_input_ends_in_one_message(examples: int) -> None:
    @given(ways)
    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    def check(way: tuple[Any, ...]) -> None:
        check_way(way)

    check()
