"""A model that has learned an answer by heart stops where the answer ends, with each chat template that TRL ships."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import DAILY, named
from chat_templates import TEMPLATES, byte_tokenizer
from documentation import ROOT
from golden_files import check_part
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, pipeline

from hwopt import api
from hwopt.config.job import make_job
from hwopt.config.toml import Document
from hwopt.data.chat_template import ChatTemplate
from hwopt.data.sources.chat import conversation_of
from hwopt.tasks.generators import Streamer, TextGenerator
from hwopt.testing import plan_for, tiny_profile, train_tiny

QUESTION = [{"role": "user", "content": "what"}]
CHAT = [*QUESTION, {"role": "assistant", "content": "it is"}]
MISTRAL = """{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]
{%- else %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"""
WITHOUT_TEXT = ("idefics3", "llava_next", "smolvlm")
"""Templates of vision models: they expect lists of parts, and hwopt refuses texts with them."""
ALL = {name: text for name, text in TEMPLATES.items() if name not in WITHOUT_TEXT} | {"mistral (not in TRL)": MISTRAL}
PAGE = ROOT / "docs" / "chat.md"
BEGIN, END = "<!-- ends -->\n", "<!-- /ends -->"
MORE = 8
"""Tokens that may be written after the end. A model that runs on writes them all."""


def encoded(tokenizer: Any) -> tuple[list[int], list[int]]:
    """(the question as a prompt, the trained tokens behind it up to the end of the answer)."""
    asked = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=True)["input_ids"]
    template = ChatTemplate(tokenizer, "all")
    tokens, mask = template.encode(conversation_of({"messages": CHAT}, ("messages",)))
    behind = tokens[len(asked) :] if tokens[: len(asked)] == asked else [tokens[i] for i, trained in enumerate(mask) if trained]
    return asked, behind[: behind.index(template.end_token()) + 1]


def base_model(folder: Path, template: str, eos: str | None) -> int:
    """Write a tokenizer whose texts end with `eos`, by default with the end of an answer, and a model. Returns its positions."""
    tokenizer = byte_tokenizer(template, eos=eos or "<|im_end|>")
    tokenizer.chat_template = template
    if eos is None:
        tokenizer.eos_token = tokenizer.decode(ChatTemplate(tokenizer, "all").end_token())
    tokenizer.save_pretrained(folder)
    positions = sum(map(len, encoded(tokenizer))) + MORE
    write_model(folder, tokenizer, positions)
    return positions


def write_model(folder: Path, tokenizer: Any, positions: int) -> None:
    """Write a model that can learn by heart."""
    sizes = {"n_embd": positions, "n_positions": positions, "n_layer": 1, "n_head": 1, "n_inner": 8}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    GPT2LMHeadModel(GPT2Config(**sizes, **ends, vocab_size=len(tokenizer), tie_word_embeddings=False)).save_pretrained(folder)


def learn_by_heart(model: Any, tokens: list[int], other: int) -> None:
    """Set the weights so that the model writes `tokens` from each of their positions on, and `other` behind them."""
    positions = model.config.n_positions
    following = [*tokens[1:], *[other] * (positions - len(tokens) + 1)]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(float(name.endswith("ln_f.weight")))
        model.transformer.wpe.weight.copy_(torch.eye(positions))
        model.lm_head.weight[following, range(positions)] = 1.0


@pytest.mark.parametrize("eos", ["<|endoftext|>", None], ids=["base", "instruct"])
@pytest.mark.parametrize("name", named({name: name for name in ALL}, ("gptoss", "qwen3"), DAILY))
def test_answer_stops_at_its_end(name: str, eos: str | None, tmp_path: Path) -> None:
    base = tmp_path / "base"
    positions = base_model(base, ALL[name], eos)
    final = trained(tmp_path, [{"messages": CHAT}] * 8, max_length=positions)
    check_end(tmp_path, *encoded(AutoTokenizer.from_pretrained(final)), {"messages": QUESTION}, QUESTION, "what")


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"messages": CHAT}, QUESTION),
        ({"prompt": "what is it?", "completion": " it is"}, "what is it?"),
        ({"text": "what is it? it is"}, "what is it?"),
    ],
    ids=["chatml", "prompt", "text"],
)
def test_answer_of_a_base_tokenizer_without_a_template_stops_at_its_end(row: dict[str, Any], asked: Any, tmp_path: Path) -> None:
    """`chatml` brings the token that ends an answer; a completion or a text ends with that of the tokenizer."""
    tokenizer = byte_tokenizer("", eos="<|endoftext|>")
    tokenizer.save_pretrained(tmp_path / "base")
    write_model(tmp_path / "base", tokenizer, positions=64)
    chat = {"chat_template": "chatml"} if "messages" in row else {}
    tokenizer = AutoTokenizer.from_pretrained(trained(tmp_path, [row] * 8, max_length=64, **chat))
    if chat:
        before = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
    else:
        before = tokenizer(asked)["input_ids"]
    answer = tokenizer("it is<|im_end|>" if chat else " it is<|endoftext|>", add_special_tokens=False)["input_ids"]
    check_end(tmp_path, before, answer, {name: asked for name in row if name != "completion"}, asked, "what" if chat else asked)


def trained(folder: Path, rows: list[dict[str, Any]], **data: Any) -> Path:
    """The `final/` of a run of one step on `rows`."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tables = {
        "model": {"name": str(folder / "base")},
        "data": {"train": str(folder / "rows.jsonl"), **data},
        "task": {"kind": "causal-lm"},
        "training": {"max_steps": 1},
    }
    train_tiny(plan_for(tiny_profile(), make_job(Document("a job", tables))), folder)
    return folder / "run" / "final"


def check_end(folder: Path, asked: list[int], answer: list[int], row: dict[str, Any], piped: Any, typed: str) -> None:
    """The model of the run, which learns `answer` behind `asked` by heart, stops there in each of the ways to generate."""
    final = folder / "run" / "final"
    tokenizer, model = AutoTokenizer.from_pretrained(final), AutoModelForCausalLM.from_pretrained(final)
    learn_by_heart(model, asked + answer, tokenizer("x")["input_ids"][0])
    model.save_pretrained(final)
    options: dict[str, Any] = {"max_new_tokens": len(answer) + MORE, "do_sample": False}
    written = model.generate(torch.tensor([asked]), attention_mask=torch.ones(1, len(asked)), **options)[0, len(asked) :]
    assert written.tolist() == answer
    text = tokenizer.decode(answer, skip_special_tokens=True)
    found = pipeline("text-generation", model=str(final))(piped, **options)[0]["generated_text"]
    assert (found.removeprefix(piped) if isinstance(found, str) else found[-1]["content"]) == text
    (folder / "in.jsonl").write_text(json.dumps(row) + "\n")
    most = {"max_new_tokens": len(answer) + MORE}
    api.predict(folder / "run", str(folder / "in.jsonl"), folder / "out.jsonl", generation=most)
    assert json.loads((folder / "out.jsonl").read_text())["generated_text"].strip() == "it is"
    parts: list[str] = []
    assert api.answerer(folder / "run", generation=most).answer(typed, parts.append), "the model ended the answer"
    assert "".join(parts).strip() == "it is"
    assert len(parts) > 1


def test_headers_of_gpt_oss_are_not_in_the_predicted_text() -> None:
    """`decoded` is what a prediction has of the generated tokens."""
    tokenizer = byte_tokenizer(TEMPLATES["gptoss"])
    tokenizer.chat_template = TEMPLATES["gptoss"]
    generator = object.__new__(TextGenerator)
    generator.tokenizer, generator.headers = tokenizer, ChatTemplate(tokenizer, "last").headers
    thoughts = "<|channel|>analysis<|message|>The final analysis.<|end|><|start|>assistant"
    for written, text in {
        "<|channel|>final<|message|>It is final.<|return|>": "It is final.",
        f"{thoughts}<|channel|>final<|message|>It is.<|return|>": "The final analysis.\n\nIt is.",
        "<|channel|>analysis<|message|>The final": "The final",
        "final": "final",
        " to=functions.add<|channel|>commentary json<|message|>{}<|call|>": " to=functions.addcommentary json{}",
    }.items():
        tokens = tokenizer(written, add_special_tokens=False)["input_ids"]
        assert generator.decoded(tokens) == text
        assert streamed(generator, tokens) == text


def streamed(generator: TextGenerator, tokens: list[int]) -> str:
    """What a terminal shows of tokens that come one by one: nothing that has to be taken back."""
    parts: list[str] = []
    streamer = Streamer(generator, parts.append)
    for token in ([], *([token] for token in tokens)):
        streamer.put(torch.tensor(token))
    streamer.show(complete=True)
    return "".join(parts)


def test_letter_of_several_tokens_is_shown_when_it_is_complete() -> None:
    generator = object.__new__(TextGenerator)
    generator.tokenizer, generator.headers = byte_tokenizer("<|end|>"), []
    for text in ("Größe €", "wörter<|end|>"):
        tokens = generator.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert streamed(generator, tokens) == text.removesuffix("<|end|>")
    assert streamed(generator, generator.tokenizer("ö", add_special_tokens=False)["input_ids"][:1]) == "\ufffd"


def test_marks_that_are_no_special_tokens_stay_in_the_text() -> None:
    """Qwen's <think> is an ordinary added token."""
    tokenizer = byte_tokenizer("<|im_start|>")
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = TEMPLATES["qwen3"]
    assert ChatTemplate(tokenizer, "last").headers == []


def test_documented_ends_are_these() -> None:
    """`HWOPT_UPDATE_GOLDEN=1` rewrites them."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, template in ALL.items():
        tokenizer = byte_tokenizer(template)
        tokenizer.chat_template = template
        end = tokenizer.decode(ChatTemplate(tokenizer, "all").end_token()).replace("|", "\\|")
        names["the end of a text" if name.startswith("mistral") else f"`{end}`"].append(name)
    rows = [f"| {end} | {', '.join(found)} |" for end, found in names.items()]
    check_part(PAGE, BEGIN, "\n".join(["| end | templates |", "|---|---|", *rows, ""]), END)
