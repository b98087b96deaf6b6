import re
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from hwopt.config.job import make_job
from hwopt.config.toml import Document, key_lines, parse_assignment, parse_toml
from hwopt.config.validation import validate
from hwopt.errors import InputError

GOOD = b"""[model]
name = "somewhere/some-model"
[data]
train = "train.csv"
"""


def message(raw: bytes) -> str:
    with pytest.raises(InputError) as caught:
        make_job(parse_toml(raw, "job.toml"))
    return str(caught.value)


def test_every_problem_at_once_with_its_line() -> None:
    text = message(
        b'[model]\nnmae = "x"\n[data]\ntrain = 3\nmax_length = "4"\n[task]\nkind = "text-clasification"\n[training]\nseed = 1.5\n'
    )
    assert "job.toml:2: model.nmae: unknown key. Did you mean 'name'?" in text
    assert "job.toml:4: data.train" in text
    assert "job.toml:5: data.max_length" in text
    assert "job.toml:7: task.kind" in text
    assert "Did you mean 'text-classification'?" in text
    assert "job.toml:9: training.seed" in text


SINGLE = r"column \d+\); in double quotes a backslash begins an escape; put a path into single quotes, or write it with '/'$"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (r'a = 1%b = "D:\data\x"', f"job.toml:2: .*{SINGLE}"),
        ("a = True", r"job.toml:1: is not valid TOML: Invalid value \(column 5\); write true and false in lower case$"),
        ("a = [1,% None]", r"job.toml:2: .*\(column 2\); TOML has no null; omit the key$"),
        ("model:%  name: x", r"job.toml:1: .*\(column 6\); it looks like YAML, and hwopt reads TOML"),
        ('%{%"model": {}}', "it looks like JSON"),
        ("a = 1 b = 2", r"job.toml:1: [^;]*\(column 7\)$"),
        ('a = """', "job.toml: [^;]*end of document[^;]*$"),
        ("[training]%seed = 2024-01-01", "job.toml:2: training.seed: .*, got '2024-01-01'$"),
        (
            r'[data]%train = "D:\train\best.csv"',
            r"job.toml:2: data.train: 'D:\\train.* contains a control character; .* single quotes",
        ),
    ],
)
def test_message_suggests_the_probable_fix(raw: str, expected: str) -> None:
    for end in ("\n", "\r\n"):
        text = message(raw.replace("%", end).encode())
        assert re.search(expected, text, re.MULTILINE), text
        assert not re.search(r"line \d", text)


def test_windows_path_in_single_quotes_is_accepted() -> None:
    made = make_job(parse_toml(b"model.name = 'D:\\bert'\ndata.train = 'D:\\train\\best.csv'\n", "job.toml"))
    assert made.job.data.train == r"D:\train\best.csv"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("training.seed=3", 3),
        ("training.learning_rate = 2e-5", 2e-5),
        ("model.name=bert", "bert"),
        ("data.text=['a', 'b']", ["a", "b"]),
        ("x.y=a = b", "a = b"),
        ("x.y=1\nz=2", "1\nz=2"),
    ],
)
def test_assignment_is_parsed_as_toml_or_text(text: str, value: object) -> None:
    assert parse_assignment(text)[1] == value


def test_command_line_overrides_the_job_and_is_its_place() -> None:
    made = make_job(parse_toml(GOOD, "job.toml"), ["training.seed=1", "training.seed=2", "data.train=other.csv"])
    assert made.job.training.seed == 2
    assert made.place("training", "seed") == "--set"
    assert made.place("model", "name") == "job.toml:2"
    assert made.job.data.train == "other.csv"


@pytest.mark.parametrize("text", ["seed=3", "training", "trainign.seed=3", "model.name.x=3"])
def test_wrong_assignment_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--set"):
        make_job(parse_toml(GOOD, "job.toml"), [text])


def test_epochs_that_are_asked_for_replace_the_steps_of_the_file() -> None:
    job = make_job(parse_toml(GOOD + b"\n[training]\nmax_steps = 9\n", "job.toml"), ["training.num_train_epochs=1"]).job
    assert (job.training.max_steps, job.training.num_train_epochs) == (None, 1)


@pytest.mark.parametrize(
    "extra",
    [
        ["model.config={model_type='bert'}", "model.name=x"],
        ["data.eval=a.csv", "data.eval_fraction=0.1"],
        ["data.prompt=p", "data.completion=c"],
        ["training.warmup_ratio=0.1", "training.warmup_steps=3"],
        ["task.kind=causal-lm", "data.text=['a','b']"],
    ],
)
def test_contradictory_job_is_refused(extra: list[str]) -> None:
    with pytest.raises(InputError):
        make_job(parse_toml(GOOD, "job.toml"), extra)


def test_key_lines_are_found_in_tables_and_arrays() -> None:
    text = 'a = 1\n[b]\nc.d = 2\n[[e]]\nf = 1\n[[e]]\n"g h" = 2\n'
    lines = dict(key_lines(text))
    expected = {("a",): 1, ("b",): 2, ("b", "c", "d"): 3, ("e", "0", "f"): 5, ("e", "1", "g h"): 7}
    assert {key: lines[key] for key in expected} == expected


class Alternatives(BaseModel):
    rows: Literal["auto"] | Annotated[int, Field(gt=0)] | None = None
    level: Literal["auto"] | Literal[0, 1, 2] = 0


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"rows": "many"}, "rows: expected 'auto', or a valid integer, got 'many'."),
        ({"rows": 0}, "rows: expected greater than 0, got 0."),
        ({"level": 3}, "level: expected 'auto', or 0, 1 or 2, got 3."),
    ],
)
def test_wrong_value_of_a_union_type_is_one_problem(table: dict[str, object], problem: str) -> None:
    with pytest.raises(InputError) as caught:
        validate(Alternatives, Document("here", table))
    assert str(caught.value).splitlines() == [f"here: {problem}"]


def test_utf_16_file_is_refused() -> None:
    assert parse_toml(b"\xef\xbb\xbfa = 1", "job.toml").data == {"a": 1}
    with pytest.raises(InputError, match="job.toml:1: is UTF-16; save it as UTF-8"):
        parse_toml("a = 1".encode("utf-16"), "job.toml")
