"""Parts of conversations that a chat template leaves out are named, with their number and their first row."""

from pathlib import Path
from typing import Any

import pytest
from chat_templates import ALL_TEMPLATES, FOLDER, TEMPLATES, byte_tokenizer
from rich.console import Console
from task_rows import chat_job, prepared_of, write_jsonl

from hwopt.config.job import Job, make_job
from hwopt.config.toml import Document
from hwopt.data.chat_template import ChatTemplate
from hwopt.data.chatml import CHATML
from hwopt.data.sources.chat import conversation_of
from hwopt.memory.planned import with_memory
from hwopt.report.memory import PlanScreen
from hwopt.testing import plan_for, tiny_profile

TOOLS = [{"type": "function", "function": {"name": "add_up", "description": "-", "parameters": {"type": "object"}}}]
CALLS = [{"type": "function", "function": {"name": "add_up", "arguments": {"x": 1}}}]
QUESTION, ANSWER = {"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Seven."}
THOUGHTFUL = {**ANSWER, "reasoning_content": "They are seven"}
CASES: dict[str, list[dict[str, Any]]] = {
    "developer messages": [{"role": "developer", "content": "Be brief."}, QUESTION, ANSWER],
    "system messages": [{"role": "system", "content": "Be brief."}, QUESTION, ANSWER],
    "reasoning_content": [QUESTION, THOUGHTFUL],
    "thinking": [QUESTION, {**ANSWER, "thinking": "They are seven"}],
    "thoughts before </think> in the content": [QUESTION, {**ANSWER, "content": "<think>They are seven</think>Seven."}],
    "content beside tool calls": [QUESTION, {**ANSWER, "tool_calls": CALLS}, {"role": "tool", "content": "7"}, ANSWER],
    "tool messages": [QUESTION, {**ANSWER, "tool_calls": CALLS}, {"role": "tool", "content": "Result"}, ANSWER],
    "tools": [QUESTION, ANSWER],
}
WITHOUT_ROLES = CHATML.replace("in messages %}", "in messages if message.role in ('user', 'assistant') %}", 1)


def found_in(template: str, messages: list[dict[str, Any]], tools: Any = None, turns: Any = "all") -> list[str]:
    tokenizer = byte_tokenizer(*ALL_TEMPLATES)
    tokenizer.chat_template = template
    chat = conversation_of({"messages": messages, "tools": tools}, ("messages",))
    return ChatTemplate(tokenizer, turns).left_out(chat)


@pytest.mark.parametrize(
    ("kind", "template"),
    [
        ("developer messages", TEMPLATES["qwen3"]),
        ("system messages", WITHOUT_ROLES),
        ("reasoning_content", TEMPLATES["qwen2_5"]),
        ("thinking", CHATML),
        ("thoughts before </think> in the content", TEMPLATES["deepseekv3"]),
        ("content beside tool calls", TEMPLATES["muse_glimmer"]),
        ("tools", TEMPLATES["phi3"]),
    ],
)
def test_part_that_the_template_does_not_write_is_found(kind: str, template: str) -> None:
    assert found_in(template, CASES[kind], TOOLS if kind == "tools" else None) == [kind]
    assert found_in(template, [QUESTION, ANSWER]) == []


@pytest.mark.parametrize("kind", sorted(set(CASES) - {"developer messages", "thinking"}))
def test_parts_that_the_template_writes_are_not_named(kind: str) -> None:
    """Qwen3's template writes a tool's name in JSON, and the thoughts between marks of its own."""
    tools = TOOLS if kind in ("tools", "content beside tool calls", "tool messages") else None
    assert found_in(TEMPLATES["qwen3"], CASES[kind], tools) == []


def test_escaped_text_counts_as_written_and_a_name_in_a_call_not_as_the_tool() -> None:
    escaping = CHATML.replace(
        "{{- message['content'] + '<|im_end|>' }}\n{%- endif", "{{- message['content'] | tojson }}\n{%- endif"
    )
    assert found_in(escaping, [{"role": "user", "content": 'Say "é"\nnow'}, ANSWER]) == []
    calling = CHATML.replace("tool | tojson", "''").replace("{{- message['content'] }}", "{{- message | tojson }}")
    assert found_in(calling, [QUESTION, {**ANSWER, "content": "", "tool_calls": CALLS}], TOOLS) == ["tools"]


def test_key_of_messages_that_the_template_does_not_read_is_named() -> None:
    messages = [{**QUESTION, "mood": "curious", "id": "a1", "name": "bob", "rank": 3}, {**ANSWER, "thoughts": "Hm."}]
    assert found_in(CHATML, messages) == ["'mood' in messages", "'thoughts' in messages"]
    reading = CHATML.replace("{{- message['content']", "{{- message.mood or '' }}{{ message['content']")
    assert found_in(reading, [messages[0], ANSWER]) == []


def test_thoughts_of_turns_that_are_not_trained_are_not_named() -> None:
    messages = [QUESTION, THOUGHTFUL, QUESTION, ANSWER]
    assert found_in(CHATML, messages) == ["reasoning_content"]
    assert found_in(CHATML, messages, turns="last") == []


def job_of(folder: Path, **data: Any) -> Job:
    rows = [{"messages": [QUESTION, THOUGHTFUL if row % 3 == 2 else ANSWER]} for row in range(12)]
    return chat_job(write_jsonl(folder / "chat.jsonl", rows), chat_template=str(FOLDER / "phi3.jinja"), **data)


def test_each_kind_is_named_once_with_its_number_and_first_row(tmp_path: Path) -> None:
    expected = (
        f"the chat template does not write the reasoning_content of 4 of 12 conversations, the first one at "
        f"{tmp_path / 'chat.jsonl'}:3: the model does not see them. Remove them from the data, or give a template"
    )
    for _ in range(2):  # first built, then loaded from the cache
        (warning,) = [each for each in prepared_of(job_of(tmp_path), tmp_path).warnings if "does not write" in each]
        assert warning.startswith(expected)
    (warning,) = [each for each in prepared_of(job_of(tmp_path, eval_fraction=0.5), tmp_path).warnings if "not write" in each]
    assert " 4 of 12 conversations" in warning


def test_plan_names_what_the_run_will_not_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = job_of(tmp_path)
    tables = job.model_dump(exclude_none=True, exclude={"training"}) | {"training": {"max_steps": 2}}
    plan = plan_for(tiny_profile(), make_job(Document("job", tables)))
    screen = PlanScreen(Console(width=2_000))
    found = with_memory(plan, lambda assignments: plan, cache=tmp_path / "cache", listener=screen)
    assert capsys.readouterr().out.count("does not write the reasoning_content of 4 of 12 conversations") == 1
    assert len(found.to_dict()["data_warnings"]) == 1
