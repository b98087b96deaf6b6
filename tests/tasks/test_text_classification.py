from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from task_rows import prepared_of, write_jsonl
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hwopt.config.job import Job
from hwopt.data.bad_rows import BadRows, Places
from hwopt.data.sources.json_reader import to_table
from hwopt.data.sources.rows import Rows
from hwopt.errors import DataError, InputError
from hwopt.model.config import load_config
from hwopt.tasks.base import Task
from hwopt.tasks.labels import read_labels
from hwopt.tasks.prepared import Prepared
from hwopt.tasks.recognition import recognise
from hwopt.tasks.registry import make_task

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
BERT = {"model_type": "bert", **SMALL, "max_position_embeddings": 32}
DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "llama": {"model_type": "llama", **SMALL, "num_key_value_heads": 1},
    "gemma3_text": {"model_type": "gemma3_text", **SMALL, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 8},
}
ROWS = [
    {"text": "the cat sat", "second": "a cat sat there", "label": "yes"},
    {"text": "a dog barked at the tree for hours", "second": "it was silent", "label": "no"},
    {"text": "crows fly", "second": "crows walk", "label": "no"},
    {"text": "snow is white", "second": "snow has a colour", "label": "yes"},
]


def prepare(
    folder: Path, rows: Any = ROWS, config: Any = None, positions: int | None = None, **data: Any
) -> tuple[Job, Task, Prepared]:
    """A job over `rows`, prepared under `folder`. `data` has the keys of its data table; lists become files."""
    if isinstance(data.get("eval"), list):
        data["eval"] = write_jsonl(folder / "eval.jsonl", data["eval"])
    source = rows if isinstance(rows, str) else write_jsonl(folder / "train.jsonl", rows)
    model = config if config and "name" in config else {"config": config or BERT}
    job = Job.model_validate({"model": model, "data": {"train": source, **data}})
    return job, make_task(job), prepared_of(job, folder, positions)


def load(job: Job, task: Task, prepared: Prepared, **model_kwargs: Any) -> Any:
    torch.manual_seed(0)
    return task.load_model(job, load_config(job.model.name, job.model.config), prepared, model_kwargs).eval()


def padded(prepared: Prepared, rows: list[int]) -> dict[str, torch.Tensor]:
    """The inputs of `rows`, padded on the right like the collator."""
    found = [prepared.train.row(row)["input_ids"] for row in rows]
    width = max(map(len, found))
    ids = torch.full((len(rows), width), prepared.tokenizer.pad_token_id)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for number, one in enumerate(found):
        ids[number, : len(one)] = torch.from_numpy(one.copy())
        mask[number, : len(one)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def test_single_texts_are_tokenized_and_labelled(tmp_path: Path) -> None:
    _, _, prepared = prepare(tmp_path, eval=ROWS[:2])
    assert prepared.label_names == ("no", "yes")
    assert prepared.train.array("labels").tolist() == [1, 0, 0, 1]
    assert prepared.train.counts.tolist() == [1] * 4
    row = prepared.train.row(0)
    assert set(row) == {"input_ids", "row_labels"}
    assert prepared.tokenizer.decode(row["input_ids"]) == "[CLS] the cat sat [SEP]"
    assert prepared.eval.row(1)["row_labels"] == 0
    assert len(prepared.notes) == 1, "the rows of the evaluation data"


@pytest.mark.parametrize("spelling", [str, str.lower, str.upper])
def test_typed_booleans_are_the_labels_of_the_training_data_in_its_spelling(spelling: Any, tmp_path: Path) -> None:
    values = [True, False, True, False]
    (tmp_path / "train.csv").write_text("text,label\n" + "".join(f"row {value},{spelling(str(value))}\n" for value in values))
    pyarrow.parquet.write_table(pa.table({"text": ["a", "b", "c"], "label": [True, False, None]}), tmp_path / "eval.parquet")
    _, _, prepared = prepare(
        tmp_path, str(tmp_path / "train.csv"), eval=str(tmp_path / "eval.parquet"), max_bad_rows=0.5, label="label"
    )
    assert prepared.label_names == (spelling("False"), spelling("True"))
    assert prepared.eval.array("labels").tolist() == [1, 0]


@pytest.mark.parametrize(
    ("trained", "evaluated"), [([1, 2], [2.0, 1.0]), ([1.0, 2.0], [2, 1]), ([Decimal(1), Decimal(2)], [2.0, 1.0])]
)
def test_typed_numbers_are_the_labels_of_the_training_data_in_its_spelling(
    trained: list[Any], evaluated: list[float], tmp_path: Path
) -> None:
    """Pandas makes integers floats if a cell is empty, databases export them as decimals. Texts are compared as texts."""
    for name, labels in (("train", trained), ("eval", evaluated)):
        pyarrow.parquet.write_table(pa.table({"text": ["a", "b"], "label": labels}), tmp_path / f"{name}.parquet")
    _, _, prepared = prepare(tmp_path, str(tmp_path / "train.parquet"), eval=str(tmp_path / "eval.parquet"), label="label")
    assert prepared.label_names == tuple(map(str, trained))
    assert prepared.eval.array("labels").tolist() == [1, 0]
    assert recognise(str(tmp_path / "train.parquet")).kind == "text-classification"
    (tmp_path / "eval.csv").write_text(f"text,label\na,{evaluated[0]}\nb,{evaluated[1]}\n")
    with pytest.raises(DataError, match="label that is not in the training data"):
        prepare(tmp_path, str(tmp_path / "train.parquet"), eval=str(tmp_path / "eval.csv"), label="label")


def test_pairs_have_token_types(tmp_path: Path) -> None:
    _, _, prepared = prepare(tmp_path, text=["text", "second"])
    longer = int((prepared.train.lengths > 10).sum())
    row = prepared.train.row(2)
    assert prepared.tokenizer.decode(row["input_ids"]) == "[CLS] crows fly [SEP] crows walk [SEP]"
    assert row["token_type_ids"].tolist() == [
        int(place > list(row["input_ids"]).index(3)) for place in range(len(row["input_ids"]))
    ]
    _, _, cut = prepare(tmp_path, text=["text", "second"], max_length=10, eval=ROWS)
    assert cut.train.lengths.max() == 10
    assert cut.notes[:2] == [
        f"truncated {longer} of 4 texts to 10 tokens",
        f"truncated {longer} of 4 texts of the evaluation data to 10 tokens",
    ]


def test_text_longer_than_the_model_allows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train\.jsonl:2: has \d+ tokens, more than .* limit of 8; set data\.max_length = 8"):
        prepare(tmp_path, positions=8)
    prepare(tmp_path, positions=32)
    with pytest.raises(DataError, match=r"train\.jsonl:2: has"):  # the cached tokens belong to a model with a larger limit
        prepare(tmp_path, positions=8)
    with pytest.raises(InputError, match="40 exceeds the model.s limit of 32 tokens"):
        prepare(tmp_path, positions=32, max_length=40)


@pytest.mark.parametrize(
    ("values", "names", "numbers"),
    [
        ([10, 9, 10, 2], ("2", "9", "10"), [2, 1, 2, 0]),
        (["b", "a", "B", "a"], ("B", "a", "b"), [2, 1, 0, 1]),
        ([True, False, True, True], ("false", "true"), [1, 0, 1, 1]),
        (["01067", "1067", "1067", "01067"], ("01067", "1067"), [0, 1, 1, 0]),
        (["a", " a", "A", "a "], (" a", "A", "a", "a "), [2, 0, 1, 3]),
        (["10", "9", "neutral", "2"], ("10", "2", "9", "neutral"), [0, 2, 3, 1]),
        (["a", 1, 1.0, "1.0"], ("1", "1.0", "a"), [2, 0, 1, 1]),
        ([1.0, 3.0, 1.0, 2.0], ("1.0", "2.0", "3.0"), [0, 2, 0, 1]),
        ([2, 1.0, 3.0, 3], ("1.0", "2", "3.0"), [1, 0, 2, 2]),
        ([1.0, True, 0, False], ("0", "1.0", "false", "true"), [1, 3, 0, 2]),
    ],
)
def test_labels_are_numbered_in_sorted_order(
    tmp_path: Path, values: list[Any], names: tuple[str, ...], numbers: list[int]
) -> None:
    _, _, prepared = prepare(tmp_path, [{**row, "label": value} for row, value in zip(ROWS, values, strict=True)])
    assert prepared.label_names == names
    assert prepared.train.array("labels").tolist() == numbers


def test_label_order_of_the_model_or_the_data_set_is_kept(tmp_path: Path) -> None:
    import datasets

    config = {**BERT, "id2label": {"0": "yes", "1": "no"}}
    assert prepare(tmp_path, config=config)[2].label_names == ("yes", "no")
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["not_same", "different", "same"])}
    )
    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [2, 0, 2]}, features=features)
    rows.save_to_disk(str(tmp_path / "folder"))
    _, _, prepared = prepare(tmp_path, str(tmp_path / "folder"))
    assert prepared.label_names == ("not_same", "same")
    assert prepared.train.array("labels").tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["a", None], r"a\.csv: row 2: 'label' has no label \(None\)"),
        (["a", ""], r"row 2: 'label' has no label \(''\)"),
        (["a", " "], r"row 2: 'label' has no label \(' '\)"),
        ([1.0, float("nan")], r"row 2: 'label' has no label"),
        (["a", float("nan")], r"row 2: 'label' has no label"),
        ([1.0, 0.37], r"row 2: 'label' is 0\.37, a measurement; expected classes"),
        ([[1], [2]], r"column 'label' holds list<.*>; labels must be .*; for lists of labels set task.kind = 'multi-label"),
    ],
)
def test_missing_or_non_class_label_is_refused(values: list[Any], message: str) -> None:
    table, originals = to_table([{"label": value} for value in values])
    with pytest.raises(DataError, match=message):
        read_labels(Rows(table, Places("a.csv", "row", [1, 2]), BadRows("a.csv", "row", True), originals), "label")


def test_unknown_eval_label_and_single_class_are_refused(tmp_path: Path) -> None:
    unknown = [ROWS[0], {**ROWS[1], "label": "yess"}]
    message = r"eval\.jsonl:2: has a label that is not in the training data: 'yess'\. Did you mean 'yes'\?"
    with pytest.raises(DataError, match=message):
        prepare(tmp_path, eval=unknown, on_bad_row="stop")
    prepared = prepare(tmp_path, eval=unknown, max_bad_rows=0.5)[2]
    assert len(prepared.eval) == 1
    assert "1 of 2 rows of" in prepared.warnings[0]
    with pytest.raises(DataError, match="every 'label' is 'yes'; classification needs at least two classes"):
        prepare(tmp_path, [ROWS[0], ROWS[3]])
    many = [{"text": "a", "label": number} for number in range(9)]
    assert prepare(tmp_path, many)[2].notes == ["9 labels in 9 samples: is 'label' the right column?"]


def test_label_without_an_evaluation_sample_is_named(tmp_path: Path) -> None:
    rows = [{"text": f"row {number}", "label": "no" if number % 4 else "yes"} for number in range(40)]
    balanced = prepare(tmp_path, rows, eval_fraction=0.1)[2]
    assert sorted(balanced.eval.array("labels").tolist()) == [0, 0, 0, 1]
    assert balanced.notes == []
    rare = [*rows, {"text": "rare", "label": "maybe"}]
    assert prepare(tmp_path, rare, eval_fraction=0.1)[2].notes == ["the evaluation data has no sample of 'maybe'"]


def test_tokens_are_cached_until_data_or_options_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(tmp_path)[2].train.folder
    assert prepare(tmp_path, max_length=8)[2].train.folder != first
    assert prepare(tmp_path, [{**row, "label": row["second"]} for row in ROWS])[2].train.folder != first
    monkeypatch.setattr("hwopt.tasks.labelled_texts.encode", None)
    assert prepare(tmp_path)[2].train.folder == first


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_decoders_pool_at_the_last_real_token(tmp_path: Path, kind: str, pad_is_eos: bool) -> None:
    """Also if the padding token is the end of text and a text ends with it."""
    rows = [dict(row) for row in ROWS]
    rows[2]["text"] += "<|endoftext|>"
    config = DECODERS[kind]
    job, task, prepared = prepare(tmp_path, rows, config)
    if pad_is_eos:
        tokenizer = prepared.tokenizer
        tokenizer.pad_token = tokenizer.eos_token
        tokenizer.save_pretrained(tmp_path / "own")
        job = Job.model_validate(
            {"model": {"config": config, "tokenizer": str(tmp_path / "own")}, "data": {"train": job.data.train}}
        )
        prepared = prepared_of(job, tmp_path)
        assert prepared.tokenizer.pad_token_id != prepared.tokenizer.eos_token_id
    model = load(job, task, prepared)
    whole = padded(prepared, [0, 1, 2, 3])
    assert whole["input_ids"][2][whole["attention_mask"][2].sum() - 1] == prepared.tokenizer.eos_token_id
    with torch.no_grad():
        together = model(**whole).logits
        for row in range(4):
            alone = padded(prepared, [row])
            torch.testing.assert_close(model(**alone).logits[0], together[row], atol=1e-5, rtol=1e-4)
            hidden = model.base_model(**alone).last_hidden_state[0, -1]
            torch.testing.assert_close(model.score(hidden), together[row], atol=1e-5, rtol=1e-4)


def test_padding_token_is_added_if_no_other_is_free(tmp_path: Path) -> None:
    """A trained model whose tokenizer has only an end-of-text token, which the texts contain."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(letters, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    config = AutoConfig.for_model(**DECODERS["llama"], vocab_size=257, bos_token_id=256, eos_token_id=256)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "trained")
    tokenizer.save_pretrained(tmp_path / "trained")
    job, task, prepared = prepare(tmp_path, config={"name": str(tmp_path / "trained")})
    assert prepared.tokenizer.pad_token == "<|endoftext|>"  # these texts do not contain it
    assert load(job, task, prepared).get_input_embeddings().num_embeddings == 257
    rows = [{**row, "text": row["text"] + "<|endoftext|>"} for row in ROWS]
    job, task, prepared = prepare(tmp_path, rows, {"name": str(tmp_path / "trained")})
    assert (prepared.tokenizer.pad_token, prepared.tokenizer.pad_token_id) == ("<|pad|>", 257)
    model = load(job, task, prepared)
    assert model.get_input_embeddings().num_embeddings == model.config.vocab_size == 258
    with torch.no_grad():
        together = model(**padded(prepared, [0, 1])).logits
        hidden = model.base_model(**padded(prepared, [0])).last_hidden_state[0, -1]
        torch.testing.assert_close(model.score(hidden), together[0], atol=1e-5, rtol=1e-4)


def test_new_model_is_random_and_reproducible(tmp_path: Path) -> None:
    job, task, prepared = prepare(tmp_path)
    config = load_config(None, job.model.config)
    model = load(job, task, prepared)
    assert model.config.vocab_size == len(prepared.tokenizer) == model.get_input_embeddings().num_embeddings
    assert (model.config.id2label, model.config.label2id) == ({0: "no", 1: "yes"}, {"no": 0, "yes": 1})
    assert model.config.pad_token_id == prepared.tokenizer.pad_token_id
    assert model.config.use_cache is False
    assert config.vocab_size == 30_522
    assert load(job, task, prepared, dtype=torch.bfloat16).dtype == torch.bfloat16
    again = load(job, task, prepared)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))


def test_encoder_decoder_with_random_weights_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    job, task, prepared = prepare(tmp_path, config=config)
    with pytest.raises(InputError, match=r"text-classification trains an encoder-decoder \(t5\) from trained weights only"):
        load(job, task, prepared)
    of_tokens = job.model_copy(update={"task": job.task.model_copy(update={"kind": "token-classification"})})
    assert load(of_tokens, make_task(of_tokens), prepared).config.num_labels == 2, "that class has the encoder alone"


def test_trained_model_keeps_its_weights_and_gets_a_new_head(tmp_path: Path) -> None:
    """With another number of labels only the head is new. The saved model loads without hwopt."""
    job, task, prepared = prepare(tmp_path)
    model = load(job, task, prepared)
    model.save_pretrained(tmp_path / "trained")
    prepared.tokenizer.save_pretrained(tmp_path / "trained")
    rows = [*ROWS, {"text": "the dog flies", "label": "maybe"}]
    job, task, prepared = prepare(tmp_path, rows, {"name": str(tmp_path / "trained")})
    tuned = load(job, task, prepared)
    assert tuned.classifier.out_features == 3
    assert torch.equal(tuned.get_input_embeddings().weight, model.get_input_embeddings().weight)
    tuned.save_pretrained(tmp_path / "final")
    prepared.tokenizer.save_pretrained(tmp_path / "final")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "final").eval()
    tokens = AutoTokenizer.from_pretrained(tmp_path / "final")("the cat sat", return_tensors="pt")
    with torch.no_grad():
        assert torch.allclose(again(**tokens).logits, tuned(**padded(prepared, [0])).logits, atol=1e-6)


def test_labels_of_two_types_and_of_missing_labels_are_named(tmp_path: Path) -> None:
    _, _, prepared = prepare(tmp_path, [{"text": f"text {n}", "label": label} for n, label in enumerate([-1, 0, 1, "1", 2])])
    said = "\n".join(prepared.notes)
    assert "'label' holds 1 as numbers in some rows and as texts in others: one class for both" in said
    assert "'-1' is trained as a class; data sets of the hub write it for a missing label" in said


def test_labels_that_look_alike_and_repeated_rows_are_named(tmp_path: Path) -> None:
    labels = ["Yes", "yes", "no", " n\u200bo", "NA", "caf\u00e9", "cafe\u0301"]
    rows = [{"text": f"text {n}", "label": label} for n, label in enumerate(labels)]
    _, _, prepared = prepare(tmp_path, rows, eval=[*rows[:2], {**rows[0], "text": "new"}])
    said = "\n".join(prepared.notes)
    assert "labels that differ by case, blanks or Unicode form only: " in said
    assert "'Yes' and 'yes'" in said
    assert "' n\\u200bo' and 'no'" in said
    assert "labels that pandas reads as missing values: 'NA'. hwopt trains each" in said
    assert "2 of 3 evaluation samples have a text that is also in the training data, such as 'text 0'" in said
