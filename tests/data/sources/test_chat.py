"""Conversations: their formats, the assistant's tokens, and runs on them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from chat_templates import FOLDER, TEMPLATES, byte_tokenizer
from task_rows import MESSAGES, chat_job, prepared_of, write_jsonl

from hwopt.config.job import Job
from hwopt.data.chat_template import ChatTemplate
from hwopt.data.chatml import CHATML
from hwopt.data.sources.chat import Conversation, conversation_of, read_conversations
from hwopt.data.sources.messages import BadConversation
from hwopt.data.sources.reading import read_all
from hwopt.data.sources.rows import ReadOptions
from hwopt.errors import DataError, InputError
from hwopt.tasks.prepared import IGNORED, Prepared

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|user|>", "<|assistant|>", "<|end|>"),
    *("<start_of_turn>", "<end_of_turn>"),
)
SHAREGPT = [{"from": {"user": "human", "assistant": "gpt"}[one["role"]], "value": one["content"]} for one in MESSAGES]
REWRITES = """{%- for message in messages %}[{{ message.role }}]
{%- if message.role == 'assistant' and not loop.last %}(earlier){%- else %}{{ message.content }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}[assistant]{%- endif %}"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer(*SPECIAL)


def without_markers(template: str) -> str:
    return template.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")


def trained_text(tokenizer: Any, messages: list[dict[str, Any]], turns: Any = "all", tools: Any = None) -> str:
    tokens, mask = ChatTemplate(tokenizer, turns).encode(Conversation(messages, tools))
    return str(tokenizer.decode([token for token, answer in zip(tokens, mask, strict=True) if answer]))


def test_answers_of_all_turns_or_of_the_last_count(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    assert trained_text(tokenizer, MESSAGES) == "Hi.<|im_end|>4<|im_end|>"
    assert trained_text(tokenizer, MESSAGES, "last") == "4<|im_end|>"
    tokenizer.chat_template = without_markers(CHATML)
    assert trained_text(tokenizer, MESSAGES) == "Hi.<|im_end|>\n4<|im_end|>\n"


ALWAYS_PROMPTS = without_markers(CHATML).replace("if add_generation_prompt", "if true")


def test_template_that_always_writes_the_generation_prompt_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = ALWAYS_PROMPTS
    for prompt in (0, 1):
        with pytest.raises(BadConversation, match="also without add_generation_prompt"):
            ChatTemplate(tokenizer, "all").encode(Conversation(MESSAGES, None, prompt=prompt))
    tokenizer.chat_template = CHATML.replace("if add_generation_prompt", "if true")
    assert trained_text(tokenizer, MESSAGES) == "Hi.<|im_end|>4<|im_end|>"


def test_header_between_two_answers_is_not_trained(tokenizer: Any) -> None:
    """OLMo 2's template writes no line break behind the last turn."""
    tokenizer.chat_template = (
        "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>{{ '' if loop.last else '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    assert trained_text(tokenizer, [*MESSAGES, MESSAGES[1]]) == "Hi.<|end|>4<|end|>Hi.<|end|>"


def test_template_that_rewrites_earlier_turns_is_refused_for_all_turns(tokenizer: Any) -> None:
    tokenizer.chat_template = REWRITES
    with pytest.raises(BadConversation, match="rewrites earlier turns"):
        trained_text(tokenizer, MESSAGES)
    tokenizer.chat_template = REWRITES.replace("{{ message.content }}", "{{ message.content }}<|end|>")
    assert trained_text(tokenizer, MESSAGES, "last") == "4<|end|>"


def test_few_conversations_that_the_template_rewrites_are_bad_rows_and_many_are_refused(tmp_path: Path) -> None:
    template = tmp_path / "rewrites.jinja"
    template.write_text(REWRITES.replace("{%- endif", "<|end|>{%- endif", 1))
    short = {"messages": MESSAGES[:2]}

    def prepared(rewritten: int, **data: Any) -> Prepared:
        rows = [{"messages": MESSAGES} if row % 10 == 4 and row < 10 * rewritten else short for row in range(60)]
        return prepared_of(job_of(rows, tmp_path, chat_template=str(template), max_bad_rows=None, **data), tmp_path)

    found = prepared(2)
    assert len(found.train) == 58
    assert [(row["line"], row["why"].rpartition(": ")[2]) for row in found.bad_rows[0]["left_out"]] == [
        (5, "message 2"),
        (15, "message 2"),
    ]
    (warning,) = [each for each in found.warnings if "skipped" in each]
    assert "skipped 2 of 60 rows" in warning
    assert "lines 5, 15 (the chat template rewrites earlier turns" in warning
    for refused in ({"rewritten": 6}, {"rewritten": 1, "on_bad_row": "stop"}):
        with pytest.raises(DataError, match=r"chat\.jsonl.*5.*rewrites earlier turns.*data\.assistant_turns = 'last'"):
            prepared(**refused)


@pytest.mark.parametrize("marked", [True, False])
def test_template_that_does_not_train_the_end_of_answers_is_refused(marked: bool, tokenizer: Any) -> None:
    endless = CHATML.replace("{{- '<|im_end|>' }}{%- endgeneration %}", "{%- endgeneration %}")
    tokenizer.chat_template = endless if marked else without_markers(endless)
    with pytest.raises(BadConversation, match=r"would not learn to stop \(data\.chat_template"):
        trained_text(tokenizer, MESSAGES)


SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize("before", [[], [SYSTEM]])
def test_conversation_that_begins_with_an_answer_says_so_if_the_template_refuses_it(
    before: list[dict[str, Any]], tokenizer: Any
) -> None:
    """The template says that roles must alternate."""
    tokenizer.chat_template = TEMPLATES["gemma3"]
    with pytest.raises(BadConversation, match=r"begins with an answer, which the chat template cannot write: put a question"):
        trained_text(tokenizer, [*before, *MESSAGES[1:]])
    assert trained_text(tokenizer, [*before, *MESSAGES]).startswith("Hi.")


@pytest.mark.parametrize("template", [CHATML, without_markers(CHATML), TEMPLATES["gemma4"], TEMPLATES["llama3_1"]])
def test_answer_that_begins_a_conversation_is_trained_without_its_header(template: str, tokenizer: Any) -> None:
    """transformers writes no prompt of a conversation without messages, and most templates neither."""
    tokenizer.chat_template = template
    trained = trained_text(tokenizer, MESSAGES)
    assert trained.startswith("Hi.")
    assert trained_text(tokenizer, MESSAGES[1:]) == trained


def test_answer_that_begins_a_conversation_needs_a_generation_prompt(tokenizer: Any) -> None:
    tokenizer.chat_template = without_markers(CHATML).replace("add_generation_prompt", "false")
    with pytest.raises(BadConversation, match="the chat template has no generation prompt"):
        trained_text(tokenizer, MESSAGES[1:])


@pytest.mark.parametrize(
    ("cells", "columns"),
    [
        ({"messages": MESSAGES}, ("messages",)),
        ({"messages": json.dumps(MESSAGES)}, ("messages",)),
        ({"conversations": SHAREGPT}, ("conversations",)),
        ({"messages": [{**one, "tool_calls": None, "name": None} for one in MESSAGES]}, ("messages",)),
        ({"messages": [{**one, "tool_calls": []} for one in MESSAGES]}, ("messages",)),
        ({"messages": [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in MESSAGES]}, ("messages",)),
    ],
)
def test_formats_give_the_same_conversation(cells: dict[str, Any], columns: tuple[str, ...]) -> None:
    assert conversation_of(cells, columns).messages == MESSAGES


SWITCHED = CHATML.replace("message['content']", "('' if enable_thinking else '<think></think>') + message['content']")


@pytest.mark.parametrize("switches", [{"enable_thinking": False}, '{"enable_thinking": false}', {"enable_thinking": True}])
def test_switches_of_the_template_come_from_the_data(switches: Any, tokenizer: Any) -> None:
    tokenizer.chat_template = SWITCHED
    cells = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
    chat = conversation_of({**cells, "chat_template_kwargs": switches}, ("messages",))
    tokens, _ = ChatTemplate(tokenizer, "all").encode(chat)
    words = json.loads(switches) if isinstance(switches, str) else switches
    expected = tokenizer.apply_chat_template(cells["messages"], return_dict=False, **words)
    assert tokens == expected
    assert chat.key != conversation_of(cells, ("messages",)).key


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


CALLING = """{%- for message in messages %}[{{ message.role }}]{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}(ARGUMENTS){% endfor %}<|end|>{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""


@pytest.mark.parametrize(
    "joined", ["{{ call.function.arguments | tojson }}", "{{ '' + call.function.arguments }}", "{{ call.function.arguments }}"]
)
@pytest.mark.parametrize("text", [None, '{"a":1,  "b":null}'])
def test_arguments_are_written_in_the_form_that_the_template_takes(joined: str, text: str | None, tokenizer: Any) -> None:
    """Of an object that is joined to a text, jinja makes an error, or what Python prints."""
    tokenizer.chat_template = CALLING.replace("ARGUMENTS", joined)
    calls = [{"type": "function", "function": {"name": "f", "arguments": text or {"a": 1, "b": None}}}]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    chat = conversation_of({"messages": [MESSAGES[0], answer]}, ("messages",))
    tokens, mask = ChatTemplate(tokenizer, "all").encode(chat)
    arguments = '{"a": 1, "b": null}' if text is None or "tojson" in joined else text
    assert tokenizer.decode([token for token, answer in zip(tokens, mask, strict=True) if answer]) == f"f({arguments})<|end|>"
    plain = {**calls[0], "function": {"name": "f", "arguments": {"a": 1, "b": None}}}
    other = conversation_of({"messages": [MESSAGES[0], {**answer, "tool_calls": [plain]}]}, ("messages",))
    assert (chat.key == other.key) == (text is None), "cached tokens depend on the text of the file"


@pytest.mark.parametrize("template", ["gemma3", "deepseek_r1_distill"])
def test_name_of_a_function_that_is_part_of_the_template_does_not_hide_that_its_call_is_missing(
    template: str, tokenizer: Any
) -> None:
    """`f` is in <end_of_turn>, and gemma writes no calls, nor does DeepSeek-R1."""
    tokenizer.chat_template = TEMPLATES[template]
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    messages = [MESSAGES[0], {"role": "assistant", "content": "Let me see.", "tool_calls": calls}]
    with pytest.raises(BadConversation, match="does not write the tool calls of an answer"):
        trained_text(tokenizer, messages)


@pytest.mark.parametrize(
    "answer",
    [
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "function_call", "value": '[{"name": "add", "arguments": {"a": 1}}]'},
    ],
    ids=["openai", "function_call", "text", "sharegpt", "sharegpt-list"],
)
def test_tool_calls_of_all_formats_are_those_that_templates_expect(answer: dict[str, Any]) -> None:
    """Otherwise an empty answer is trained, or a call as plain text, or arguments as a text inside a text."""
    tools = json.dumps([{"name": "add", "parameters": {}}])
    cells = {"messages": [{"role": "user", "content": "?"}, answer], "tools": tools}
    found = conversation_of(cells, ("messages",))
    assert found.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert found.tools == [{"type": "function", "function": {"name": "add", "parameters": {}}}]


ARGUMENTS: list[dict[str, Any]] = [{"b": None, "a": 1}, {"a": 2.5, "c": {"d": None}}]


def called(folder: Path, kind: str) -> list[Any]:
    """The arguments of the calls that hwopt reads from a file, or from several, with ARGUMENTS."""
    rows = [
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": each}]}]}
        for each in ARGUMENTS
    ]
    source: Any = folder / "chat.jsonl"
    if kind == "several":
        source = [write_jsonl(folder / f"{number}.jsonl", [row]) for number, row in enumerate(rows)]
    elif kind == "array":
        source.write_text(json.dumps(rows))
    elif kind == "text":
        write_jsonl(source, [{"messages": json.dumps(row["messages"])} for row in rows])
    else:
        write_jsonl(source, rows)
    found = read_conversations(read_all(source if isinstance(source, list) else str(source), None, ReadOptions()), ["messages"])
    return [chat.messages[1]["tool_calls"][0]["function"]["arguments"] for chat in found if chat is not None]


@pytest.mark.parametrize("kind", ["jsonl", "several", "array", "text"])
def test_arguments_are_those_of_the_file_with_its_nulls(kind: str, tmp_path: Path) -> None:
    """Arrow gives each object all keys of the column, in one order, and makes the integer 1 the float 1.0."""
    assert json.dumps(called(tmp_path, kind)) == json.dumps(ARGUMENTS)


@pytest.mark.parametrize("other", ["objects", "text"])
def test_parquet_beside_another_file_keeps_the_arguments_of_each_row(other: str, tmp_path: Path) -> None:
    """The joined column has one type, whose objects have all keys and whose numbers are floats."""
    arguments = [{"a": 1}, {"b": "x"}, {"a": 2.5, "c": None}]
    chats = [
        [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": each}]}]
        for each in arguments
    ]
    pyarrow.parquet.write_table(pa.Table.from_pylist([{"messages": chat} for chat in chats[:2]]), tmp_path / "a.parquet")
    last = write_jsonl(tmp_path / "b.jsonl", [{"messages": json.dumps(chats[2]) if other == "text" else chats[2]}])
    rows = read_all([str(tmp_path / "a.parquet"), last], None, ReadOptions())
    calls = [chat.messages[1]["tool_calls"][0] for chat in read_conversations(rows, ["messages"]) if chat]
    found = [call["function"]["arguments"] for call in calls]
    assert json.dumps(found) == json.dumps(arguments)


def test_conversations_are_those_of_the_rows_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made when they are read, some rows at once."""
    monkeypatch.setattr("hwopt.data.sources.chat.CHUNK", 2)
    chats: list[Any] = [[{"role": "user", "content": f"{row}?"}, {"role": "assistant", "content": f"{row}"}] for row in range(7)]
    chats[3] = [{"role": "user", "content": "alone"}]
    rows = read_all(write_jsonl(tmp_path / "a.jsonl", [{"messages": chat} for chat in chats]), None, ReadOptions(strict=False))
    found = read_conversations(rows, ["messages"])
    assert [*rows.bad_rows.reasons] == [4]
    assert [found[row].messages for row in (6, 0, 5, 1)] == [chats[row] for row in (6, 0, 5, 1)]
    assert [chat.messages for chat in found.take([0, 1, 4, 5, 6])[1:4]] == [chats[row] for row in (1, 4, 5)]


@pytest.mark.parametrize("as_text", [True, False])
def test_half_of_a_character_in_json_becomes_a_question_mark(as_text: bool, tmp_path: Path) -> None:
    """Exports that cut texts leave them; tokenizers refuse them."""
    messages: Any = [{"role": "user", "content": "cut \ud83d"}, {"role": "assistant", "content": "\U0001f600"}]
    row = {"messages": json.dumps(messages) if as_text else messages}
    rows = read_all(write_jsonl(tmp_path / "a.jsonl", [row]), None, ReadOptions())
    assert [each["content"] for each in read_conversations(rows, ["messages"])[0].messages] == ["cut ?", "\U0001f600"]


def test_former_role_of_tool_results_is_read() -> None:
    call = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    messages = [MESSAGES[0], call, {"role": "function", "name": "f", "content": "3"}]
    assert conversation_of({"messages": messages}, ("messages",)).messages[2] == {"role": "tool", "name": "f", "content": "3"}


def test_alpaca_input_is_part_of_the_question_and_its_tools_are_read() -> None:
    cells = {"instruction": "Add.", "input": "2 and 2", "output": "4", "tools": json.dumps([CALL])}
    assert conversation_of(cells, ("instruction", "output")).tools == [CALL]
    assert conversation_of(cells, ("instruction", "output")).messages == [
        {"role": "user", "content": "Add.\n2 and 2"},
        {"role": "assistant", "content": "4"},
    ]
    assert conversation_of({**cells, "input": ""}, ("instruction", "output")).messages[0]["content"] == "Add."


@pytest.mark.parametrize("history", [[["hi", "hello"]], '[["hi", "hello"]]'])
def test_alpaca_history_comes_before_the_question(history: Any) -> None:
    cells = {"instruction": "Add.", "output": "4", "history": history, "system": "s"}
    messages = conversation_of(cells, ("instruction", "output")).messages
    assert [message["content"] for message in messages] == ["s", "hi", "hello", "Add.", "4"]
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 2]


@pytest.mark.parametrize("history", [["hi"], [["hi"]], [["hi", None]], 3, "no"])
def test_alpaca_history_of_another_form_is_refused(history: Any) -> None:
    with pytest.raises(BadConversation, match="history"):
        conversation_of({"instruction": "Add.", "output": "4", "history": history}, ("instruction", "output"))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "holds no list of messages"),
        ("no json", "is not valid JSON"),
        ([{"role": "robot", "content": "x"}], "message 1 has the role 'robot'; expected one of system"),
        ([{"role": "user", "content": "x"}], "has no message of the assistant"),
        ([{"role": "user", "content": ""}, MESSAGES[1]], r"message 1 \(user\) is empty"),
        ([{"role": "user", "content": 3}, MESSAGES[1]], "content that is not text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}, MESSAGES[1]], "message 1 has a part that is not text: {'type'"),
        (["hello"], "message 1 is not an object"),
        ([MESSAGES[0], {"from": "function_call", "value": '{"name": "add", "arguments": "{"}'}], "message 2.* not valid JSON"),
        ([MESSAGES[0], {**MESSAGES[1], "weight": 0.5}], "message 2: weight is 0.5; expected 0, 1, true or false"),
        ([MESSAGES[0], {**MESSAGES[1], "train_detail": [{"train": False}]}], "message 2 has 'train_detail', which trains parts"),
        ([{**MESSAGES[0], "train": True}, MESSAGES[1]], r"message 1 \(user\) is marked with 'train'; hwopt trains answers only"),
        ([MESSAGES[0], {**MESSAGES[1], "train": False}], "marks every message of the assistant as not to be trained"),
    ],
)
def test_bad_conversations_are_named(messages: Any, message: str) -> None:
    with pytest.raises(BadConversation, match=message):
        conversation_of({"messages": messages}, ("messages",))


def job_of(rows: list[dict[str, Any]], folder: Path, **data: Any) -> Job:
    return chat_job(write_jsonl(folder / "chat.jsonl", rows), **{"max_bad_rows": 0.5, **data})


@pytest.mark.parametrize("row", [{"messages": MESSAGES}, {"conversations": SHAREGPT}, {"instruction": "Hello?", "output": "Hi."}])
def test_chat_files_are_recognised(row: dict[str, Any], tmp_path: Path) -> None:
    prepared = prepared_of(job_of([row] * 4, tmp_path), tmp_path)
    sample = prepared.train.row(0)
    answers = prepared.tokenizer.decode(sample["labels"][sample["labels"] != IGNORED])
    assert answers.startswith("Hi.")
    assert "Hello?" not in answers
    assert "Hello?" in prepared.tokenizer.decode(sample["input_ids"])
    assert prepared.train.counts[0] == (sample["labels"] != IGNORED).sum()


def test_bad_and_truncated_conversations_are_listed_with_their_line(tmp_path: Path) -> None:
    long = [{"role": "user", "content": " ".join(map(str, range(1000, 1400)))}, MESSAGES[1]]
    rows = [{"messages": messages} for messages in (MESSAGES, MESSAGES[:1], long, MESSAGES)]
    prepared = prepared_of(job_of(rows, tmp_path, max_length=100), tmp_path)
    assert len(prepared.train) == 2
    left_out = [(row["line"], row["why"][:30]) for row in prepared.bad_rows[0]["left_out"]]
    assert left_out == [(2, "has no message of the assistan"), (3, "has no answer after truncation")]


def test_training_variant_of_a_template_is_noted_and_not_saved(tmp_path: Path) -> None:
    """tests/data/test_chat_templates.py compares its tokens and labels with those of TRL."""
    prepared = prepared_of(job_of([{"messages": MESSAGES}] * 8, tmp_path, chat_template=str(FOLDER / "qwen3.jinja")), tmp_path)
    assert prepared.tokenizer.chat_template == TEMPLATES["qwen3"]
    assert prepared.notes == ["chat template: TRL's training variant of the tokenizer's; final/ keeps the tokenizer's"]


@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}])
@pytest.mark.parametrize("template", [CHATML, without_markers(CHATML)])
@pytest.mark.parametrize("turns", ["all", "last"])
def test_answer_that_the_data_marks_as_not_to_be_trained_is_not(
    mark: dict[str, Any], template: str, turns: Any, tokenizer: Any
) -> None:
    tokenizer.chat_template = template
    cells = {"messages": [{**MESSAGES[0], "weight": 1}, {**MESSAGES[1], **mark}, MESSAGES[2], {**MESSAGES[3], "weight": 1}]}
    found = conversation_of(cells, ("messages",))
    assert found.messages == MESSAGES
    tokens, mask = ChatTemplate(tokenizer, turns).encode(found)
    answers = [token for token, answer in zip(tokens, mask, strict=True) if answer]
    assert tokenizer.decode(answers).strip() == "4<|im_end|>"


def test_date_that_the_template_writes_is_named_with_that_of_cached_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "dated.jinja"
    template.write_text("{{ strftime_now('%Y') }}" + CHATML)
    job = job_of([{"messages": MESSAGES}] * 4, tmp_path, chat_template=str(template))
    monkeypatch.setattr("hwopt.tasks.causal_lm.date", SimpleNamespace(today=lambda: "2026-01-02"))
    first = prepared_of(job, tmp_path).notes
    monkeypatch.setattr("hwopt.tasks.causal_lm.date", SimpleNamespace(today=lambda: "2027-03-04"))
    assert prepared_of(job, tmp_path).notes == first
    assert first[1].endswith("keep that of 2026-01-02")


def test_max_length_counts_the_last_label_as_trl(tmp_path: Path) -> None:
    prepared = prepared_of(job_of([{"messages": MESSAGES}] * 2, tmp_path, max_length=40), tmp_path)
    tokens, mask = ChatTemplate(prepared.tokenizer, "all").encode(Conversation(MESSAGES))
    labels = [token if answer else IGNORED for token, answer in zip(tokens, mask, strict=True)]
    assert prepared.train.row(0)["input_ids"].tolist() == tokens[:39]
    assert prepared.train.row(0)["labels"].tolist() == labels[1:40]


def test_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data\.chat_template: the tokenizer has no chat template"):
        prepared_of(job_of([{"messages": MESSAGES}], tmp_path, chat_template=None), tmp_path)
