"""Tokens and labels of chats are those of TRL, for all templates that it ships; docs/chat.md lists what differs.

`HWOPT_UPDATE_GOLDEN=1 pytest tests/data/test_chat_templates.py` rewrites the list.
"""

import json
import re
from collections import defaultdict
from functools import cache
from typing import Any

import jinja2
import pytest
from chat_templates import ALL_TEMPLATES, TEMPLATES, byte_tokenizer
from documentation import ROOT
from golden_files import check_part

from hwopt.data.chat_template import GENERATION, ChatTemplate
from hwopt.data.chatml import CHATML
from hwopt.data.sources.chat import Conversation, conversation_of
from hwopt.data.sources.messages import BadConversation, with_json_arguments

KINDS = ("plain", "tools", "thinking", "several calls", "empty answer")
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "-", "parameters": {"type": "object", "properties": {}}}}
    for name in ("add_up", "look_up")
]
PAGE = ROOT / "docs" / "chat.md"
BEGIN, END = "<!-- differences -->\n", "<!-- /differences -->"


@cache
def tokenizer() -> Any:
    """A byte-level tokenizer with the special tokens of all templates."""
    return byte_tokenizer(*ALL_TEMPLATES)


def turn(kind: str, number: int, at: int) -> list[dict[str, Any]]:
    """A question and what follows it up to the answer."""
    answer: dict[str, Any] = {"role": "assistant", "content": f"Answer {number}-{at}."}
    if kind == "empty answer" and at == number % 2:
        answer["content"] = ""
    if kind == "thinking":
        answer["reasoning_content"] = f"Thought {number}-{at}"
    names = {"tools": ("add_up",), "several calls": ("add_up", "look_up")}.get(kind, ())
    calls = [{"type": "function", "function": {"name": name, "arguments": {"x": number + at}}} for name in names]
    beside = "" if number % 3 else "Let me see."
    called = [{"role": "assistant", "content": beside, "tool_calls": calls}] if calls else []
    results = [{"role": "tool", "name": name, "content": f"Result of {name}"} for name in names]
    return [{"role": "user", "content": f"Question {number}-{at}?"}, *called, *results, answer]


def conversation(kind: str, number: int) -> Conversation:
    """One of twelve: one to three turns, with and without a system message, ending with an answer, a question or a call."""
    messages = [{"role": "system", "content": "Be brief."}] * (number % 2)
    messages += [message for at in range(1 + number % 3) for message in turn(kind, number, at)]
    if number == 10:
        messages.append({"role": "user", "content": "Question?"})
    tools = TOOLS if kind in ("tools", "several calls") else None
    return conversation_of({"messages": messages[:-1] if number == 11 and tools else messages, "tools": tools}, ("messages",))


def encoded_by_trl(template: str, chat: Conversation) -> tuple[list[int], list[bool]] | str:
    """(tokens, whether each is trained) as in SFTTrainer with assistant_only_loss; or "refuses"."""
    from trl import chat_template_utils as by_trl

    own = tokenizer()
    own.chat_template = template
    try:
        replaced = None if by_trl.has_generation_markers(template) else by_trl.get_training_chat_template(own)
        found = own.apply_chat_template(
            chat.messages, tools=chat.tools, chat_template=replaced, return_dict=True, return_assistant_tokens_mask=True
        )
    except Exception:
        return "refuses"
    return found["input_ids"], [bool(mask) for mask in found["assistant_masks"]]


def encoded_by_hwopt(template: ChatTemplate, chat: Conversation) -> tuple[list[int], list[bool]] | str:
    """(tokens, whether each is trained), or why hwopt refuses the conversation."""
    try:
        return template.encode(chat)
    except BadConversation as error:
        return re.split(r" of (?:message|an answer)|, so |: ", str(error))[0]


def check_trained_text(found: tuple[list[int], list[bool]], chat: Conversation) -> None:
    """Exactly the answers are trained: each content with an end behind it, each call, and no other message."""
    trained = tokenizer().decode([token for token, mask in zip(*found, strict=True) if mask])
    for message in chat.messages:
        if message["role"] != "assistant":
            assert message["content"] not in trained
        elif calls := message.get("tool_calls"):
            assert all(call["function"]["name"] in trained for call in calls)
        elif message["content"]:
            assert trained.split(message["content"])[1].lstrip().startswith("<")
    assert trained.strip()


def outcomes(name: str) -> dict[str, dict[str, int]]:
    """Kind -> what differs from TRL -> conversations of twelve."""
    found: dict[str, dict[str, int]] = {kind: defaultdict(int) for kind in KINDS}
    own = tokenizer()
    own.chat_template = TEMPLATES[name]
    template = ChatTemplate(own, "all")
    for kind in KINDS:
        for number in range(12):
            chat = conversation(kind, number)
            theirs = encoded_by_trl(TEMPLATES[name], chat)
            ours = encoded_by_hwopt(template, chat)
            if not isinstance(ours, str):
                check_trained_text(ours, chat)
            if isinstance(ours, str) and theirs != "refuses":
                found[kind][f"refused: {ours}"] += 1
            elif not isinstance(ours, str) and theirs == "refuses":
                found[kind]["trained, refused by TRL"] += 1
            elif not isinstance(ours, str):
                assert ours == theirs, (name, kind, number)
    return found


ASKED, THOUGHTFUL = {"role": "user", "content": "Question?"}, "<think>\nThought\n</think>\n\nAnswer."
EARLIER = {"role": "assistant", "content": "<think>\nThought 1\n</think>\n\nAnswer 1."}
CALLING = turn("tools", 1, 0)[1:]
COMPLETIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "plain": ([{"role": "system", "content": "Be brief."}, ASKED], [{"role": "assistant", "content": "Answer."}]),
    "thoughts in the content": ([ASKED], [{"role": "assistant", "content": THOUGHTFUL}]),
    "thoughts": ([ASKED], [{"role": "assistant", "content": "Answer.", "reasoning_content": "Thought"}]),
    "thoughts in the prompt": ([ASKED, EARLIER, ASKED], [{"role": "assistant", "content": THOUGHTFUL}]),
    "several answers": ([ASKED], [EARLIER, ASKED, {"role": "assistant", "content": THOUGHTFUL}]),
    "tool call": ([ASKED], CALLING[:1]),
    "tool result": ([ASKED], CALLING),
}


def completed_by_trl(template: str, kind: str) -> tuple[list[int], list[bool]] | str:
    """(tokens, whether each is trained) as in SFTTrainer of prompt and completion; or "refuses"."""
    from trl.data_utils import common_prefix_length

    (prompt, completion), tools = COMPLETIONS[kind], TOOLS if "tool" in kind else None
    if template == TEMPLATES["deepseekv3"]:  # joins arguments to a text, and refuses an object
        completion = [with_json_arguments(message) if "tool_calls" in message else message for message in completion]
    own, options = tokenizer(), {"tools": tools, "chat_template": template, "return_dict": True}
    try:
        asked = own.apply_chat_template(prompt, add_generation_prompt=True, **options)["input_ids"]
        tokens = own.apply_chat_template(prompt + completion, **options)["input_ids"]
    except (jinja2.TemplateError, TypeError, ValueError):
        return "refuses"
    begin = common_prefix_length(asked, tokens)
    return tokens, [at >= begin for at in range(len(tokens))]


def test_chatml_writes_tools_and_their_calls_and_trains_each_answer() -> None:
    own = tokenizer()
    own.chat_template = CHATML
    for kind in KINDS:
        for number in range(12):
            chat = conversation(kind, number)
            found = encoded_by_hwopt(ChatTemplate(own, "all"), chat)
            assert not isinstance(found, str), found
            check_trained_text(found, chat)
            text = own.decode(found[0])
            assert all(json.dumps(tool) in text for tool in chat.tools or ())
            calls = [call["function"] for message in chat.messages for call in message.get("tool_calls") or ()]
            assert [json.loads(call) for call in re.findall(r"<tool_call>\n(.*)\n</tool_call>(?!\.)", text)] == [
                {"name": call["name"], "arguments": call["arguments"]} for call in calls
            ]


@pytest.mark.parametrize("name", TEMPLATES)
def test_completions_are_those_of_trl_or_lack_what_the_template_leaves_out(name: str) -> None:
    own = tokenizer()
    own.chat_template = TEMPLATES[name]
    template, refused = ChatTemplate(own, "all"), set()
    for kind, (prompt, completion) in COMPLETIONS.items():
        cells = {"prompt": prompt, "completion": completion, "tools": TOOLS if "tool" in kind else None}
        ours = encoded_by_hwopt(template, conversation_of(cells, ("prompt", "completion")))
        used = template.replaced if name == "glm4moe" else TEMPLATES[name]  # GLM's own template writes no end of an answer
        theirs = completed_by_trl(str(used), kind)
        if isinstance(ours, str) and theirs != "refuses":
            refused.add(ours)
        elif not isinstance(ours, str):
            assert ours == theirs, kind
    assert refused <= {"the chat template does not write the tool calls", "the chat template does not write the content"}
    assert "the chat template does not write the content" not in refused or name in ("idefics3", "smolvlm")


@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - {"idefics3", "llava_next", "smolvlm"}))
def test_only_the_last_answer_is_trained_if_asked(name: str) -> None:
    own = tokenizer()
    own.chat_template = TEMPLATES[name]
    tokens, mask = ChatTemplate(own, "last").encode(conversation("plain", 8))
    trained = own.decode([token for token, answer in zip(tokens, mask, strict=True) if answer])
    assert re.findall(r"Answer \S+", trained.replace("<", " <")) == ["Answer 8-2."]


@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - {"idefics3", "llava_next", "smolvlm"}))
@pytest.mark.parametrize("number", [5, 8], ids=["system", "plain"])
def test_marks_on_all_messages_leave_out_one_answer(name: str, number: int) -> None:
    """As in axolotl's files. Phi-3's template writes a token at the end of a conversation, that of gpt-oss another end."""
    own, messages = tokenizer(), conversation("plain", number).messages
    own.chat_template = TEMPLATES[name]
    asked = [message["role"] != "assistant" or "-0" in message["content"] for message in messages]
    marked = [{**message, "train": not mark} for message, mark in zip(messages, asked, strict=True)]
    found = encoded_by_hwopt(ChatTemplate(own, "all"), conversation_of({"messages": marked}, ("messages",)))
    plain = encoded_by_hwopt(ChatTemplate(own, "all"), conversation("plain", number))
    assert isinstance(found, str) == isinstance(plain, str)
    if not isinstance(found, str):
        assert found[0] == plain[0]
        trained = own.decode([token for token, answer in zip(*found, strict=True) if answer])
        assert re.findall(r"Answer \S+", trained.replace("<", " <")) == [f"Answer {number}-1.", f"Answer {number}-2."]


def test_tokens_and_labels_are_those_of_trl_but_for_the_documented_refusals() -> None:
    """`outcomes` compares them, and checks the text that is trained."""
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in TEMPLATES:
        differences: dict[str, list[str]] = defaultdict(list)
        for kind, found in outcomes(name).items():
            for difference, count in found.items():
                assert "refused" in difference, (name, kind)
                differences[difference].append(f"{kind} ({count})")
        for difference, kinds in differences.items():
            rows[", ".join(kinds), difference].append(f"`{name}`")
    lines = ["| template | kind (conversations of 12) | in hwopt |", "|---|---|---|"]
    lines += [f"| {', '.join(names)} | {kinds} | {difference} |" for (kinds, difference), names in rows.items()]
    check_part(PAGE, BEGIN, "\n".join(lines) + "\n", END)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if not GENERATION.search(TEMPLATES[name])])
def test_answers_found_without_markers_are_whole_or_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if TRL did not know the template."""
    monkeypatch.setattr("hwopt.data.chat_template.training_template", lambda own: None)
    own = tokenizer()
    own.chat_template = TEMPLATES[name]
    for kind in KINDS:
        for number in range(0, 12, 2):
            chat = conversation(kind, number)
            found = encoded_by_hwopt(ChatTemplate(own, "all"), chat)
            if not isinstance(found, str):
                check_trained_text(found, chat)
