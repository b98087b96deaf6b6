"""Preparation, loss and prediction of token classification."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from task_rows import job_of, prepare_rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hwopt.errors import DataError, InputError
from hwopt.tasks.prepared import IGNORED, Prepared
from hwopt.tasks.recognition import recognise
from hwopt.tasks.registry import make_task
from hwopt.tasks.token_classification import tokens_of_words

ROWS = [
    {"tokens": ["Anna", "lives", "in", "Oslo"], "tags": ["B-PER", "O", "O", "B-LOC"]},
    {"tokens": ["in", "unbelievably", "Oslo"], "tags": ["O", "O", "B-LOC"]},
]


KIND = "token-classification"


def prepare(folder: Path, rows: list[dict[str, Any]], task: dict[str, Any] | None = None, **data: Any) -> Prepared:
    return prepare_rows(KIND, folder, rows, data, **(task or {}))


def tagged(prepared: Prepared, sample: int) -> list[tuple[str, str]]:
    """(token, tag) of each token with a label."""
    row, names = prepared.train.row(sample), prepared.label_names
    pairs = zip(row["input_ids"].tolist(), row["labels"].tolist(), strict=True)
    return [(prepared.tokenizer.convert_ids_to_tokens(token), names[label]) for token, label in pairs if label != IGNORED]


def test_first_token_of_each_word_has_its_tag(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, ROWS)
    assert prepared.label_names == ("B-LOC", "B-PER", "O")
    assert [tag for _, tag in tagged(prepared, 0)] == ["B-PER", "O", "O", "B-LOC"]
    assert prepared.train.counts.tolist() == [4, 3]
    row = prepared.train.row(1)
    tokens = prepared.tokenizer.convert_ids_to_tokens(row["input_ids"])
    assert next(token for token, label in zip(tokens, row["labels"], strict=True) if label != IGNORED) == tokens[1]
    assert all(label == IGNORED for token, label in zip(tokens, row["labels"], strict=True) if token.startswith(("##", "[")))


def test_truncated_words_have_no_label(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, ROWS, max_length=4)
    assert all(length <= 4 for length in prepared.train.lengths)
    assert prepared.train.counts.max() <= 2
    assert prepared.notes == ["truncated 2 of 2 texts to 4 tokens"]


def byte_level(prefix: bool) -> Any:
    """A byte-level tokenizer, as those of GPT-2 and RoBERTa."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    texts = ["Anna lives in Oslo, in Oslo"] * 3
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize(
    "words", [["Anna", "lives"], ["größer", "日本", "x"], ["New York", "is"], ["a", "", "b"], ["-", "lives", "…"]]
)
def test_every_word_of_a_byte_level_tokenizer_has_its_first_token(prefix: bool, words: list[str]) -> None:
    tokenizer = byte_level(prefix)
    [(tokens, first, _)] = tokens_of_words(tokenizer, [words], None)
    assert [word for word in first if word != IGNORED] == [number for number, word in enumerate(words) if word]
    for word, text in enumerate(words):
        if text:
            begin = first.index(word)
            end = next((place for place in range(begin + 1, len(first)) if first[place] != IGNORED), len(first))
            assert tokenizer.decode(tokens[begin:end]).strip() == text


def test_tags_may_be_numbers_of_a_data_set(tmp_path: Path) -> None:
    names = datasets.ClassLabel(names=["O", "B-PER", "B-LOC"])
    features = datasets.Features({"tokens": datasets.Sequence(datasets.Value("string")), "ner_tags": datasets.Sequence(names)})
    made = datasets.Dataset.from_dict(
        {"tokens": [row["tokens"] for row in ROWS], "ner_tags": [[1, 0, 0, 2], [0, 0, 2]]}, features
    )
    made.save_to_disk(str(tmp_path / "set"))
    prepared = prepare(tmp_path, [], train=str(tmp_path / "set"))
    assert prepared.label_names == ("O", "B-PER", "B-LOC")
    assert [tag for _, tag in tagged(prepared, 0)] == ["B-PER", "O", "O", "B-LOC"]
    assert recognise(str(tmp_path / "set")).keys == {"text": ["tokens"], "label": "ner_tags"}


def test_tags_that_make_no_entities_are_named(tmp_path: Path) -> None:
    numbers = [{"tokens": ["a", "b"], "tags": [0, 1]}, {"tokens": ["c"], "tags": [2]}]
    assert "every tag of 'tags' is a number" in prepare(tmp_path, numbers).notes[0]
    alike = [{"tokens": ["a", "b"], "tags": ["O", "B-X"]}, {"tokens": ["c"], "tags": ["b-x"]}]
    assert "'B-X' and 'b-x'" in prepare(tmp_path, alike).notes[0]


@pytest.mark.parametrize(
    ("tags", "named"),
    [
        ("B-PER I-PER O I-LOC", "rows.jsonl:3: 'I-LOC' after 'O'"),
        ("B-PER I-LOC O O", "rows.jsonl:3: 'I-LOC' after 'B-PER'"),
        ("B-PER E-PER E-PER O", "rows.jsonl:3: 'E-PER' after 'E-PER'"),
        ("U-LOC B-PER I-PER L-PER", None),
        ("B-PER PER NOUN X-NOUN", None),
    ],
)
def test_entities_without_a_first_tag_are_named(tags: str, named: str | None, tmp_path: Path) -> None:
    """seqeval counts each as an entity of its own."""
    notes = prepare(tmp_path, [*ROWS, {"tokens": ["a", "b", "c", "d"], "tags": tags.split()}]).notes
    found = [note for note in notes if "without a 'B-' tag at their start: 1." in note]
    assert len(found) == (named is not None)
    assert named is None or named in found[0]


@pytest.mark.parametrize("tags", ["I-PER B-PER O I-LOC", "I-PER I-PER O I-LOC"], ids=["IOB1", "no beginnings"])
def test_files_that_do_not_mark_each_start_get_no_line(tags: str, tmp_path: Path) -> None:
    notes = prepare(tmp_path, [{"tokens": ["a", "b", "c", "d"], "tags": tags.split()}] * 3).notes
    assert not [note for note in notes if "at their start" in note]


def test_bad_sentences_are_named(tmp_path: Path) -> None:
    bad = [{"tokens": ["a", "b"], "tags": ["O"]}, {"tokens": [], "tags": []}, {"tokens": ["a"], "tags": [None]}]
    prepared = prepare(tmp_path, [*ROWS * 50, *bad])
    assert [each["why"] for each in prepared.bad_rows[0]["left_out"]] == [
        "'tags' has 1 tags for 2 words",
        "'tokens' has no words",
        "'tags' has an item that is not a tag: None",
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a b", "label": "x"}] * 4, "column 'text' holds string; token-classification needs a list of words"),
        ([{"tokens": ["a"], "tags": ["O"]}] * 4, "every tag in 'tags' is 'O'"),
        ([{"tokens": ["a"]}] * 4, "has no column 'label'"),
    ],
)
def test_unsuitable_columns_are_a_data_error(rows: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        prepare(tmp_path, rows)


def test_tokenizer_without_positions_is_refused(tmp_path: Path) -> None:
    from hwopt.tasks.token_classification import refuse_slow

    with pytest.raises(InputError, match="does not say which characters a token stands for"):
        refuse_slow(SimpleNamespace(is_fast=False), None)
    with pytest.raises(InputError, match=r"data\.max_length: 2 leaves no room for text: 2 special tokens are added"):
        prepare(tmp_path, ROWS, max_length=2)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, {"O": 0.25}])
def test_loss_is_the_sum_that_torch_averages(smoothing: float, weights: dict[str, float] | None, tmp_path: Path) -> None:
    options: dict[str, Any] = {"label_smoothing": smoothing} | ({} if weights is None else {"class_weights": weights})
    prepared = prepare(tmp_path, ROWS, options)
    task = make_task(job_of(KIND, {"train": "a.conll"}, **options))
    logits = torch.randn(2, 6, 3)
    targets = torch.tensor([[IGNORED, 0, 2, 1, IGNORED, IGNORED], [2, 2, IGNORED, 2, 0, IGNORED]])
    summed, count = task.training_loss(prepared, "cpu")(SimpleNamespace(logits=logits), targets)
    weight = None if weights is None else torch.tensor([1.0, 1.0, 0.25])
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), weight=weight, ignore_index=IGNORED, label_smoothing=smoothing
    )
    assert float(summed / count) == pytest.approx(expected.item(), rel=1e-6)
    if weights is not None:
        assert prepared.weights.tolist() == [2.5, 1.5]
        np.testing.assert_allclose(prepared.weights.sum(), 4.0)
