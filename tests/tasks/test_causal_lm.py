import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import FOLDER
from task_rows import prepared_of, write_jsonl
from tokenizers import Tokenizer, models, normalizers, processors, trainers
from transformers import PreTrainedTokenizerFast, TrainingArguments
from trl.data_utils import common_prefix_length

from hwopt.config.job import Job
from hwopt.data.bad_rows import Places
from hwopt.data.stores.chunks import Chunks
from hwopt.data.tokenizer import LengthLimit, tokens_of
from hwopt.errors import DataError
from hwopt.model.config import load_config
from hwopt.tasks.base import Task
from hwopt.tasks.generators import TextGenerator
from hwopt.tasks.next_token import encode_blocks, encode_prompts, encode_texts
from hwopt.tasks.prepared import IGNORED, Prepared
from hwopt.tasks.recognition import recognise
from hwopt.tasks.registry import make_task

SWITCH = "activation_checkpointing" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient_checkpointing"
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}


def prepare(source: str, folder: Path, config: Any = GPT2, positions: int | None = 64, **data: Any) -> tuple[Job, Task, Prepared]:
    job = Job.model_validate({"model": {"config": config}, "data": {"train": source, **data}, "task": {"kind": "causal-lm"}})
    return job, make_task(job), prepared_of(job, folder, positions)


def test_plain_text_is_cut_into_blocks_without_loss(tmp_path: Path) -> None:
    text = "the quick brown fox jumps over the lazy dog\n" * 20
    (tmp_path / "a.txt").write_text(text)
    _, _, prepared = prepare(str(tmp_path / "a.txt"), tmp_path, max_length=16)
    store = prepared.train
    assert store.lengths[:-1].tolist() == [16] * (len(store) - 1)
    assert store.counts.tolist() == store.lengths.tolist()
    rows = [store.row(index) for index in range(len(store))]
    tokens = [rows[0]["input_ids"][0], *np.concatenate([row["labels"] for row in rows])]
    assert np.concatenate([row["input_ids"] for row in rows]).tolist() == tokens[:-1]
    assert prepared.tokenizer.decode(tokens) == text
    assert prepare(str(tmp_path / "a.txt"), tmp_path)[2].train.lengths.max() <= 64


@pytest.fixture
def fresh_accelerator() -> Iterator[None]:
    """Accelerate keeps the settings of the first Trainer of a process, which later tests must not get."""
    from accelerate.state import AcceleratorState, PartialState

    def reset() -> None:
        AcceleratorState._reset_state()
        PartialState._reset_state()

    reset()
    yield
    reset()


ASKED, ANSWERED = [{"role": "user", "content": "Two and two?"}], [{"role": "assistant", "content": "4"}]
THOUGHT = [{"role": "assistant", "content": "<think>\nIt is\n</think>\n\n4"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLED = [{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "name": "f", "content": "4"}]
TOOLS = json.dumps([{"type": "function", "function": {"name": "f", "description": "-", "parameters": {}}}])


@pytest.mark.usefixtures("fresh_accelerator")
@pytest.mark.parametrize(
    ("rows", "template"),
    [
        (
            [{"text": "one cat"}, {"text": "a text that is longer than the others, and is cut"}, {"text": "dogs<|endoftext|>"}],
            None,
        ),
        ([{"prompt": "ask? ", "completion": "four"}, {"prompt": "a b", "completion": " that is long, and is cut"}], None),
        ([{"prompt": ASKED, "completion": ANSWERED}, {"prompt": [*ASKED, *ANSWERED, *ASKED], "completion": ANSWERED}], "chatml"),
        ([{"prompt": ASKED, "completion": THOUGHT}, {"prompt": [*ASKED, *THOUGHT, *ASKED], "completion": THOUGHT}], "qwen3"),
        ([{"prompt": ASKED, "completion": THOUGHT}, {"prompt": [*ASKED, *THOUGHT, *ASKED], "completion": THOUGHT}], "deepseekv3"),
        ([{"text": "a", "messages": [*ASKED, *ANSWERED, *ASKED, *ANSWERED]}] * 2, "qwen3"),
        ([{"messages": [*ASKED, *ANSWERED, *ASKED, *ANSWERED]}, {"messages": [*ASKED, *ANSWERED]}], "llama3"),
        (
            [{"messages": [*ASKED, *CALLED, *ANSWERED], "tools": TOOLS}, {"messages": [*ASKED, *ANSWERED], "tools": TOOLS}],
            "qwen3",
        ),
    ],
    ids=["text", "prompt", "messages", "qwen3", "deepseek", "messages beside a text", "answers", "calls"],
)
def test_samples_are_those_of_trl(tmp_path: Path, rows: list[dict[str, Any]], template: str | None) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    chat = {} if template is None else {"chat_template": template if template == "chatml" else str(FOLDER / f"{template}.jinja")}
    most = 900 if chat else 24
    config = {**GPT2, "n_positions": 1024}
    _, _, prepared = prepare(write_jsonl(tmp_path / "a.jsonl", rows), tmp_path, config, 1024, max_length=most, **chat)
    loaded = load_config(None, config)
    loaded.vocab_size = len(prepared.tokenizer)
    options: Any = {SWITCH: False, "assistant_only_loss": chat and "messages" in rows[0], "max_length": most}

    def batch_of(**packing: Any) -> Any:
        trainer = SFTTrainer(
            AutoModelForCausalLM.from_config(loaded),
            SFTConfig(str(tmp_path / "trl"), use_cpu=True, bf16=False, report_to=[], **options, **packing),
            train_dataset=Dataset.from_list(rows),
            processing_class=prepared.tokenizer,
        )
        return trainer.data_collator(list(trainer.train_dataset))

    packed = batch_of(packing=True)
    begins = np.flatnonzero(packed["position_ids"].flatten() == 0)[1:]
    documents = zip(*(np.split(packed[key].numpy().flatten(), begins) for key in ("input_ids", "labels")), strict=True)
    found = [(tokens[:-1].tolist(), labels[1:].tolist()) for tokens, labels in documents]
    stored = [prepared.train.row(row) for row in range(len(prepared.train))]
    assert sorted(found) == sorted((each["input_ids"].tolist(), each["labels"].tolist()) for each in stored)
    batch = batch_of()
    for row, (tokens, labels, mask) in enumerate(zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True)):
        ours, length = prepared.train.row(row), int(mask.sum())
        assert ours["input_ids"].tolist() == tokens[: length - 1].tolist()
        assert ours["labels"].tolist() == labels[1:length].tolist()


def like_llama_2(start: str) -> Any:
    """A tokenizer that puts a blank before a text and the token `start` before that; a text ends with </s>."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    letters = trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    made.train_from_iterator(["question: what is it? answer: it is a house"] * 5, letters)
    number = made.token_to_id(start)
    made.post_processor = processors.TemplateProcessing(single=f"{start} $A", special_tokens=[(start, number)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=start, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("start", ["<s>", "</s>"])
def test_prompts_and_texts_are_tokenized_whole_as_in_trl(start: str) -> None:
    tokenizer, places, limit = like_llama_2(start), Places("a", "row", range(3)), LengthLimit(None, None)
    prompts, completions = ["what is it? answer:", "answer: ", "quest"], [" it is a house", "a house", "ion"]
    arrays, meta = encode_prompts([prompts, completions], tokenizer, limit, places, Chunks())
    tokens, labels, merged = [], [], 0
    for prompt, completion in zip(prompts, completions, strict=True):
        alone, whole = tokenizer(prompt)["input_ids"], tokenizer(prompt + completion + "</s>")["input_ids"]
        same = common_prefix_length(alone, whole)
        merged += same < len(alone)
        tokens += whole[:-1]
        labels += [*([IGNORED] * (same - 1)), *whole[same:]]
    assert arrays["input_ids"].tolist() == tokens
    assert arrays["labels"].tolist() == labels
    assert meta["merged"] == merged > 0
    arrays, _ = encode_texts(["it is a house"], tokenizer, limit, places, Chunks())
    assert tokenizer.decode(arrays["input_ids"]) == tokenizer.decode(tokenizer("it is a house")["input_ids"])


@pytest.mark.parametrize("start", ["<s>", "</s>"])
@pytest.mark.parametrize("template", ["{0} $A", "{0} $A </s>", "$A"], ids=["start", "start and end", "nothing"])
def test_text_that_begins_with_the_first_token_gets_no_second_one(start: str, template: str) -> None:
    """In text rows, blocks, prompts with completions, and prompts to predict, whose tokens are those of training."""
    tokenizer, places, limit = like_llama_2(start), Places("a", "row", range(2)), LengthLimit(None, None)
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in {start, "</s>"}]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(template.format(start), special_tokens=special)
    plain = ["it is a house", "what is it?"]
    written = [start + text for text in plain]
    once_started = plain if "{0}" in template else written
    expected = [tokenizer.bos_token_id, *tokenizer(plain[0], add_special_tokens=False)["input_ids"]]
    assert tokens_of(tokenizer, written)[0] == tokens_of(tokenizer, once_started)[0] == expected
    for make in (
        lambda texts: encode_texts(texts, tokenizer, limit, places, Chunks()),
        lambda texts: encode_blocks(texts, tokenizer, 8, "a", Chunks()),
        lambda texts: encode_prompts([texts, [" a house"] * 2], tokenizer, limit, places, Chunks()),
    ):
        (ours, _), (theirs, _) = make(written), make(once_started)
        assert ours["input_ids"].tolist() == theirs["input_ids"].tolist()
        assert ours["labels"].tolist() == theirs["labels"].tolist()
    generator = object.__new__(TextGenerator)
    generator.tokenizer, generator.max_positions = tokenizer, None
    assert generator.encode(written)[0] == {"input_ids": expected}
    trained, _ = encode_prompts([written[:1], [" it is"]], tokenizer, limit, places, Chunks())
    assert trained["input_ids"][: len(expected)].tolist() == expected


def test_first_tokens_of_the_text_stay_if_the_tokenizer_adds_none() -> None:
    tokenizer = like_llama_2("<s>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("$A", special_tokens=[])
    assert tokens_of(tokenizer, ["<s><s>it"])[0][:2] == [tokenizer.bos_token_id] * 2


def test_preferences_are_refused_with_the_way_to_train_them(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 20)
    with pytest.raises(DataError, match=r"a\.jsonl: columns 'chosen' and 'rejected' hold preferences.*hwopt\.optimized"):
        prepare(source, tmp_path)
    with pytest.raises(DataError, match="'chosen' and 'rejected' hold preferences"):
        recognise(source)
    prepare(source, tmp_path, prompt="prompt", completion="chosen")
    with pytest.raises(DataError, match="no column 'text'. It has: ask. Set data.text, data.messages, or data.prompt"):
        prepare(write_jsonl(tmp_path / "c.jsonl", [{"ask": "a"}]), tmp_path)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{"prompt": ASKED, "completion": ASKED}], "the last message in 'completion' is not the assistant's"),
        ([{"prompt": ASKED, "completion": [{**ANSWERED[0], "weight": 0}]}], "marks a message in 'completion' as not"),
        ([{"prompt": [], "completion": ANSWERED}, {"prompt": ASKED, "completion": ANSWERED}], "'prompt' holds no list of"),
    ],
)
def test_messages_that_cannot_be_a_prompt_with_its_completion(tmp_path: Path, rows: list[Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        prepare(write_jsonl(tmp_path / "a.jsonl", rows), tmp_path, chat_template="chatml", on_bad_row="stop")


def test_documents_are_joined_by_the_end_of_text(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"story": "one cat"}, {"story": "two dogs"}, {"story": ""}])
    _, _, prepared = prepare(source, tmp_path, text="story", blocks=True, max_bad_rows=0.5)
    row = prepared.train.row(0)
    assert prepared.tokenizer.decode([row["input_ids"][0], *row["labels"]]) == "one cat<|endoftext|>two dogs"
    assert prepared.warnings == [f"skipped 1 of 3 rows of {source}: line 3 (has no text)"]


def test_held_out_part_is_the_end_of_the_data(tmp_path: Path) -> None:
    text = "".join(f"line {number}\n" for number in range(100))
    (tmp_path / "a.txt").write_text(text)
    _, _, prepared = prepare(str(tmp_path / "a.txt"), tmp_path, eval_fraction=0.1)
    row = prepared.eval.row(0)
    end = prepared.tokenizer.decode([row["input_ids"][0], *row["labels"]])
    assert text.endswith(end)
    assert len(end) == round(len(text) / 10)
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": f"document {number}"} for number in range(10)])
    _, _, prepared = prepare(source, tmp_path, eval_fraction=0.2, max_length=4, blocks=True)
    joined = [prepared.tokenizer.decode(store.array("labels")) for store in (prepared.train, prepared.eval)]
    assert sorted(part.count("<|endoftext|>") for part in joined) == [1, 7]


def test_prompt_tokens_have_no_label(tmp_path: Path) -> None:
    rows = [{"question": "two and two?", "answer": " four"}, {"question": "", "answer": "nothing asked"}]
    _, _, prepared = prepare(write_jsonl(tmp_path / "a.jsonl", rows), tmp_path)
    row = prepared.train.row(0)
    labels = row["labels"]
    assert prepared.tokenizer.decode(row["input_ids"]) == "two and two? four"
    assert prepared.tokenizer.decode(labels[labels != IGNORED]) == " four<|endoftext|>"
    assert prepared.train.counts.tolist() == [(prepared.train.row(index)["labels"] != IGNORED).sum() for index in range(2)]


def test_truncated_completion_is_noted_and_an_empty_one_is_a_bad_row(tmp_path: Path) -> None:
    rows = [{"ask": "ab", "answer": "cdefghijklmnopqrstuvwxyz"}, {"ask": "a", "answer": "c"}]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    config = {**GPT2, "vocab_size": 258}  # bytes only
    columns = {"prompt": "ask", "completion": "answer"}
    _, _, prepared = prepare(source, tmp_path, config, max_length=6, **columns)
    assert prepared.notes == ["truncated 1 of 2 texts to 6 tokens"]
    labels = prepared.train.row(0)["labels"]
    assert prepared.tokenizer.decode(labels[labels != IGNORED]) == "cdef"  # max_length counts the last label
    with pytest.raises(DataError, match=r"a\.jsonl:1: has 26 tokens, more than .* limit of 20; set data\.max_length = 20"):
        prepare(source, tmp_path, config, 20, **columns)
    source = write_jsonl(tmp_path / "b.jsonl", [{"ask": "a", "answer": "b"}, {"ask": "abcdef", "answer": "gh"}])
    with pytest.raises(DataError, match=r"b\.jsonl:2: has no completion after truncation: the prompt has 6 tokens"):
        prepare(source, tmp_path, config, max_length=5, on_bad_row="stop", **columns)
    for _ in range(2):  # first built, then loaded from the cache
        _, _, prepared = prepare(source, tmp_path, config, max_length=5, max_bad_rows=0.5, **columns)
        assert len(prepared.train) == 1
        assert prepared.bad_rows[0]["rows"] == 2
        assert [(row["line"], row["why"][:25]) for row in prepared.bad_rows[0]["left_out"]] == [(2, "has no completion after t")]


def test_chat_markers_in_texts_that_are_no_tokens_are_named(tmp_path: Path) -> None:
    rows = [{"text": f"<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n{number}<|im_end|>"} for number in range(8)]
    _, _, prepared = prepare(write_jsonl(tmp_path / "a.jsonl", rows), tmp_path)
    (warning,) = prepared.warnings
    assert "the texts have <|im_start|>, which this tokenizer splits" in warning
    plain = [{"text": f"a < b |> {number} <br>"} for number in range(8)]
    assert not prepare(write_jsonl(tmp_path / "b.jsonl", plain), tmp_path)[2].warnings
