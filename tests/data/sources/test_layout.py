"""Which columns are read where several could be, and lists of messages that are JSON text."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from task_rows import chat_job, prepared_of, write_jsonl

from hwopt.config.job import Data
from hwopt.data.sources.json_reader import to_table
from hwopt.data.sources.layout import layout_of
from hwopt.errors import DataError
from hwopt.tasks.causal_lm import CausalLM
from hwopt.tasks.prepared import IGNORED, Prepared
from hwopt.tasks.recognition import Recognised, choose_columns, recognise

CHAT = [{"role": "user", "content": "ask?"}, {"role": "assistant", "content": "yes"}]
SHAREGPT = [{"from": "human", "value": "ask?"}, {"from": "gpt", "value": "yes"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
ROW: dict[str, Any] = {
    "text": "a text",
    "messages": CHAT,
    "conversations": SHAREGPT,
    "prompt": "ask? ",
    "completion": "yes",
    "instruction": "ask?",
    "output": "yes",
    "question": "ask?",
    "answer": "yes",
}


def rows_with(*names: str, **changed: Any) -> Any:
    return to_table([{name: {**ROW, **changed}[name] for name in names}] * 3)[0]


@pytest.mark.parametrize(
    ("names", "data", "kind", "columns"),
    [
        (tuple(ROW), {}, "prompts", ("prompt", "completion")),
        (("text", "messages", "conversations"), {}, "messages", ("messages",)),
        (("text", "conversations"), {}, "messages", ("conversations",)),
        (("text", "instruction", "output", "question", "answer"), {}, "texts", ("text",)),
        (("question", "answer", "instruction", "output"), {}, "messages", ("instruction", "output")),
        (("question", "answer"), {}, "prompts", ("question", "answer")),
        (("text", "messages"), {"text": "text"}, "texts", ("text",)),
        (("messages",), {"text": "text"}, "messages", ("messages",)),
        (("text", "messages", "conversations"), {"messages": "conversations"}, "messages", ("conversations",)),
        (("text", "instruction", "output"), {"messages": "instruction"}, "messages", ("instruction", "output")),
        (("prompt", "completion", "text"), {"prompt": "text", "completion": "completion"}, "prompts", ("text", "completion")),
    ],
)
def test_columns_are_chosen_as_in_trl_unless_the_job_names_them(
    names: tuple[str, ...], data: dict[str, Any], kind: str, columns: tuple[str, ...]
) -> None:
    found = layout_of(rows_with(*names), Data.model_validate({"train": "a", **data}))
    assert (found.kind, found.columns) == (kind, columns)
    asked = layout_of(rows_with(*names), Data.model_validate({"train": "a", **data}), answers=False)
    assert (asked.kind, asked.columns) == (kind, columns)


@pytest.mark.parametrize(("column", "mark"), [("messages", "label"), ("conversations", "kto_tag"), ("completion", "label")])
def test_answers_that_are_marked_as_good_or_bad_are_refused(column: str, mark: str) -> None:
    """The data of KTO, in TRL and LLaMA-Factory."""
    table = to_table([{**ROW, mark: row % 2 == 0} for row in range(4)])[0].select(["prompt", column, mark])
    with pytest.raises(DataError, match=f"columns '{column}' and '{mark}' hold preferences"):
        layout_of(table, Data.model_validate({"train": "a"}))
    named: Any = {"prompt": "prompt", "completion": column} if column == "completion" else {"messages": column}
    assert layout_of(table, Data.model_validate({"train": "a", **named})).columns[-1] == column


def test_texts_with_a_boolean_label_are_for_classification() -> None:
    rows = [{"messages": f"a text {row}", "label": row % 2 == 0} for row in range(20)]
    assert choose_columns(to_table(rows)[0], None, "a")[0] == "text-classification"


def test_conversations_under_another_name_are_named() -> None:
    data = Data.model_validate({"train": "a"})
    with pytest.raises(DataError, match=r"column 'dialog' holds conversations\. Set data\.messages = \"dialog\""):
        layout_of(to_table([{"id": "a", "dialog": CHAT}] * 3)[0], data)
    alpaca = to_table([{"instruction": "ask?", "input": "x", "output": "yes"}] * 3)[0]
    assert not layout_of(alpaca, data).unread


def test_texts_under_the_name_of_messages_do_not_hide_the_text() -> None:
    data = Data.model_validate({"train": "a"})
    assert layout_of(rows_with("text", "messages", messages="no list"), data).columns == ("text",)
    assert layout_of(rows_with("messages", messages="no list"), data).columns == ("messages",)


def test_prompts_without_answers_are_read_to_predict() -> None:
    data = Data.model_validate({"train": "a"})
    assert layout_of(rows_with("prompt"), data, answers=False).kind == "prompts"
    assert layout_of(rows_with("prompt", prompt=CHAT[:1]), data, answers=False).kind == "completions"
    assert layout_of(rows_with("instruction"), data, answers=False).columns == ("instruction", "output")
    assert layout_of(rows_with("prompt"), data).columns == ("text",), "without a completion nothing can be trained"


def prepared(source: str, folder: Path, **data: Any) -> Prepared:
    return prepared_of(chat_job(source, **data), folder)


def trained_text(found: Prepared) -> str:
    labels = found.train.row(0)["labels"]
    return str(found.tokenizer.decode(labels[labels != IGNORED]))


def test_column_that_is_not_read_is_named_at_the_start_of_a_run_and_by_init(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "all of it", "messages": CHAT}] * 4)
    found = prepared(source, tmp_path)
    line = "several columns: 'messages' is read. To read others instead: 'text' by data.text = \"text\""
    assert trained_text(found) == "yes<|im_end|>"
    assert line in found.notes[0]
    assert trained_text(prepared(source, tmp_path, text="text")) == " of it<|endoftext|>"
    recognised = CausalLM.recognise(rows_with("text", "messages"), False)
    assert isinstance(recognised, Recognised)
    assert recognised.keys == {"messages": "messages"}
    assert line in recognised.why
    assert not layout_of(rows_with("text"), Data.model_validate({"train": "a"})).note


@pytest.mark.parametrize(
    ("row", "note"),
    [
        (
            {"instruction": "ask?", "context": "c", "response": "yes"},
            "'context' beside 'instruction', 'response' is not read: put what the model needs into 'instruction', 'response'",
        ),
        ({"prompt": "ask? ", "completion": "yes", "system": "s"}, "'system' beside 'prompt', 'completion' is not read: put"),
        ({"query": "ask? ", "response": "yes", "history": []}, "'history' beside 'query', 'response' is not read: put"),
        ({"instruction": "ask?", "input": "", "output": "yes", "system_prompt": "s"}, "'system_prompt' beside 'instruction'"),
        ({"messages": CHAT, "system": "s", "images": [], "id": 1}, "'images', 'id' beside 'messages' are not read: put"),
        ({"text": "all of it", "id": 1}, "'id' beside 'text' is not read: put"),
    ],
)
def test_columns_that_belong_to_the_samples_and_are_not_read_are_named(row: dict[str, Any], note: str, tmp_path: Path) -> None:
    found = prepared(write_jsonl(tmp_path / "a.jsonl", [row] * 4), tmp_path)
    assert note in found.notes[0]
    assert "text" in row or note in str(CausalLM.recognise(to_table([row] * 4)[0], False))


@pytest.mark.parametrize("name", ["image", "videos"])
@pytest.mark.parametrize("column", ["messages", "text"])
def test_samples_with_more_than_text_are_refused_unless_the_job_names_the_text(name: str, column: str, tmp_path: Path) -> None:
    rows = [{column: ROW[column], name: media} for media in (None, ["a.png"])]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=f"column '{name}' belongs to samples with more than text"):
        prepared(source, tmp_path)
    with pytest.raises(DataError, match=f"column '{name}' belongs to samples with more than text"):
        choose_columns(to_table(rows)[0], None, "a")
    assert len(prepared(source, tmp_path, **{column: column}).train) == 2


def test_prompts_without_a_blank_behind_them_are_named(tmp_path: Path) -> None:
    joined, apart = ({"question": "what is it?" + blank, "answer": "a house"} for blank in ("", "\n"))
    (warning,) = prepared(write_jsonl(tmp_path / "a.jsonl", [joined] * 4), tmp_path).warnings
    assert "nothing separates the prompts from their completions: 'what is it?a house'" in warning
    assert not prepared(write_jsonl(tmp_path / "b.jsonl", [apart] * 3 + [joined]), tmp_path).warnings


@pytest.mark.parametrize(
    ("prompt", "completion", "why"),
    [
        ("1 + 1 =", 2, "string and int64"),
        ("ask?", CHAT[1:], "string and messages"),
        (CHAT[:1], "yes", "messages and string"),
        (json.dumps(CHAT[:1]), "yes", "messages and string"),
    ],
)
def test_prompt_and_completion_of_different_kinds_are_refused(prompt: Any, completion: Any, why: str) -> None:
    table = to_table([{"prompt": prompt, "completion": completion}] * 3)[0]
    with pytest.raises(DataError, match=f"columns 'prompt' and 'completion' hold {why}; give strings or messages in both"):
        layout_of(table, Data.model_validate({"train": "a"}))
    assert why in str(CausalLM.recognise(table, True))


def test_prompts_of_digits_are_texts() -> None:
    table = to_table([{"prompt": "1 + 1 =", "completion": "2"}] * 3)[0]
    assert layout_of(table, Data.model_validate({"train": "a"})).columns == ("prompt", "completion")


def test_evaluation_data_of_another_kind_is_named(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}] * 4)
    other = write_jsonl(tmp_path / "b.jsonl", [{"text": "all of it"}] * 4)
    (warning,) = prepared(source, tmp_path, eval=other).warnings
    assert "b.jsonl holds texts, and the training data conversations: their losses do not compare" in warning
    assert not prepared(source, tmp_path, eval=source).warnings


def write_csv(path: Path, row: dict[str, Any]) -> str:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([list(row), *[list(row.values())] * 4])
    return str(path)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT, "tools": [TOOL]},
        {"conversations": SHAREGPT, "tools": [TOOL["function"]]},
        {"prompt": CHAT[:1], "completion": CHAT[1:], "tools": TOOL},
        {"prompt": CHAT[:1], "completion": CHAT[1:], "tools": [json.dumps(TOOL)]},
        {"text": "a text", "messages": CHAT},
    ],
)
def test_messages_and_tools_that_are_json_text_are_read(kind: str, row: dict[str, Any], tmp_path: Path) -> None:
    """Else the JSON itself is trained: of a prompt with its completion, without a word."""
    row = {name: value if isinstance(value, str) else json.dumps(value, indent=1) for name, value in row.items()}
    if kind == "csv":
        source = write_csv(tmp_path / "a.csv", row)
    elif kind == "jsonl":
        source = write_jsonl(tmp_path / "a.jsonl", [row] * 4)
    else:
        source = str(tmp_path / "a.parquet")
        pyarrow.parquet.write_table(pa.Table.from_pylist([row] * 4), source)
    found = prepared(source, tmp_path)
    assert trained_text(found).strip() == "yes<|im_end|>"
    assert "role" not in found.tokenizer.decode(found.train.row(0)["input_ids"])


def test_cells_that_no_json_reader_takes_are_refused_by_name(tmp_path: Path) -> None:
    source = write_csv(tmp_path / "a.csv", {"prompt": str(CHAT[:1]), "completion": str(CHAT[1:])})
    with pytest.raises(DataError, match=r"'prompt' is a list or an object as Python prints it, not JSON. Save the rows as jsonl"):
        prepared(source, tmp_path)
    with pytest.raises(DataError, match=r"'completion' is not valid JSON"):
        prepared(
            write_csv(tmp_path / "b.csv", {"prompt": json.dumps(CHAT[:1]), "completion": "yes"}),
            tmp_path,
            prompt="prompt",
            completion="completion",
        )
    with pytest.raises(DataError, match=r"'tools' holds a tool that is not an object: 'add'"):
        prepared(write_jsonl(tmp_path / "c.jsonl", [{"messages": CHAT, "tools": ['"add"']}] * 4), tmp_path)


def test_text_that_is_json_of_messages_is_trained_only_if_the_job_says_so(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "a text"}, {"text": json.dumps(CHAT)}])
    message = (
        r"a\.jsonl: column 'text' holds messages as JSON text\. Set data\.messages = \"text\" to train their answers, or data"
    )
    with pytest.raises(DataError, match=message):
        prepared(source, tmp_path)
    assert len(prepared(source, tmp_path, text="text").train) == 2
    assert trained_text(prepared(source, tmp_path, messages="text", max_bad_rows=0.5)) == "yes<|im_end|>"
    recognised = CausalLM.recognise(to_table([{"dialog": json.dumps(CHAT)}] * 9)[0], False)
    assert isinstance(recognised, Recognised)
    assert recognised.keys == {"messages": "dialog"}


@pytest.mark.parametrize(
    ("answer", "keys"),
    [
        ({"role": "assistant", "value": "yes"}, "'value'"),
        ({"role": "assistant", "content": None, "text": "yes"}, "'text'"),
        ({"from": "gpt", "text": "yes"}, "'text'"),
        ({"role": "assistant", "tool_calls": []}, "no other key"),
    ],
)
def test_answer_under_another_key_is_not_trained_as_an_empty_one(answer: dict[str, Any], keys: str, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"messages": [CHAT[0], answer]}] * 4)
    with pytest.raises(DataError, match=rf"message 2 \(assistant\) has no 'content'; beside its role it has {keys}"):
        prepared(source, tmp_path)


def test_tool_calls_that_are_json_text_are_calls(tmp_path: Path) -> None:
    answer = {"role": "assistant", "tool_calls": json.dumps([{"name": "f", "arguments": {}}])}
    source = write_jsonl(tmp_path / "a.jsonl", [{"messages": [CHAT[0], answer]}] * 4)
    called = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>'
    assert trained_text(prepared(source, tmp_path)) == called


@pytest.mark.parametrize("names", [("conversations", "chosen", "rejected"), ("messages", "chosen", "rejected", "text")])
def test_answers_to_choose_from_are_refused_before_the_conversation_is_read(names: tuple[str, ...], tmp_path: Path) -> None:
    """LLaMA-Factory's files: the conversation ends with a question, and each answer is one message."""
    good, bad = ({"from": "gpt", "value": value} for value in ("yes", "no"))
    cells = {**ROW, "conversations": SHAREGPT[:1], "messages": CHAT[:1], "chosen": good, "rejected": bad}
    source = write_jsonl(tmp_path / "a.jsonl", [{name: cells[name] for name in names}] * 4)
    with pytest.raises(DataError, match=r"a\.jsonl: columns 'chosen' and 'rejected' hold preferences"):
        recognise(source)
    with pytest.raises(DataError, match=r"a\.jsonl: columns 'chosen' and 'rejected' hold preferences"):
        prepared(source, tmp_path)
    assert trained_text(prepared(source, tmp_path, prompt=names[0], completion="chosen")).strip() == "yes<|im_end|>"
