import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from hwopt.config.job import Job
from hwopt.data.bad_rows import Places
from hwopt.data.stores.chunks import Chunks
from hwopt.data.tokenizer import LengthLimit, check_vocabulary, choose_padding, encode, load_tokenizer, used_ids
from hwopt.data.tokenizer_training import planned_config, tokenizer_fingerprint, train_bpe, train_wordpiece, trained_tokenizer
from hwopt.errors import DataError, InputError

TEXTS = ["The cat sat on the mat.", "A dog, a cat and a crow!", "Où est le chat?", "cats & dogs\nsat"] * 3


def job_of(**config: Any) -> Job:
    return Job.model_validate({"model": {"config": config}, "data": {"train": "a.csv"}})


BERT = AutoConfig.for_model("bert")
GPT2 = AutoConfig.for_model("gpt2")


def encoder(cache: Path) -> Any:
    return trained_tokenizer(TEXTS, job_of(model_type="bert"), BERT, False, cache)


def decoder(cache: Path) -> Any:
    return trained_tokenizer(TEXTS, job_of(model_type="gpt2"), GPT2, True, cache)


def test_wordpiece_lowercases_and_marks_unknown_words(tmp_path: Path) -> None:
    tokenizer = encoder(tmp_path)
    found = tokenizer("The CAT", "sat ☃")
    assert tokenizer.convert_ids_to_tokens(found["input_ids"]) == ["[CLS]", "the", "cat", "[SEP]", "sat", "[UNK]", "[SEP]"]
    assert found["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1]
    assert tokenizer.pad_token_id == 0
    assert tokenizer.decode(tokenizer("a cat and a crow")["input_ids"], skip_special_tokens=True) == "a cat and a crow"


def test_bpe_loses_no_byte(tmp_path: Path) -> None:
    tokenizer = decoder(tmp_path)
    for text in [*TEXTS, "☃ \x00\t ẞ 漢"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("a", "b")["input_ids"]) == ["a", "<|endoftext|>", "b"]
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_training_is_the_same_in_every_process(kind: str) -> None:
    code = (
        "import hashlib, random; from hwopt.data.tokenizer_training import train_wordpiece, train_bpe; r = random.Random(0);"
        "texts = [''.join(r.choices('abcdefgh ', k=40)) for _ in range(200)];"
        f"print(hashlib.md5(train_{kind}(texts, 400).to_str().encode()).hexdigest())"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    found = {
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True).stdout for _ in range(3)
    }
    assert len(found) == 1


def test_vocabulary_size_is_respected() -> None:
    assert train_wordpiece(TEXTS, 40).get_vocab_size() <= 40
    assert train_bpe(TEXTS, 270).get_vocab_size() == 270
    with pytest.raises(InputError, match=r"model\.config\.vocab_size: 100 is too small"):
        trained_tokenizer(TEXTS, job_of(model_type="gpt2", vocab_size=100), GPT2, True, Path("never"))


def test_saved_tokenizer_loads_with_the_same_ids(tmp_path: Path) -> None:
    made = ((encoder(tmp_path), BERT), (decoder(tmp_path), GPT2), (encoder(tmp_path), AutoConfig.for_model("roberta")))
    for tokenizer, config in made:
        tokenizer.save_pretrained(tmp_path / "final")
        config.save_pretrained(tmp_path / "final")
        again = AutoTokenizer.from_pretrained(tmp_path / "final")
        assert again(TEXTS, TEXTS)["input_ids"] == tokenizer(TEXTS, TEXTS)["input_ids"]


def test_fingerprint_ignores_truncation_and_padding_state(tmp_path: Path) -> None:
    tokenizer = encoder(tmp_path)
    before = tokenizer_fingerprint(tokenizer)
    tokenizer("a cat", truncation=True, max_length=3, padding="max_length")
    assert tokenizer_fingerprint(tokenizer) == before
    tokenizer.add_tokens(["snowman"])
    assert tokenizer_fingerprint(tokenizer) != before


def test_padding_is_a_token_that_no_text_contains(tmp_path: Path) -> None:
    """tests/tasks/test_text_classification.py has a tokenizer with an end-of-text token only."""
    tokenizer = encoder(tmp_path)
    choose_padding(tokenizer, set())
    assert (tokenizer.pad_token, tokenizer.padding_side) == ("[PAD]", "right")
    choose_padding(tokenizer, {tokenizer.pad_token_id})
    assert tokenizer.pad_token == "[UNK]"


@pytest.mark.parametrize("size", [None, 500])
@pytest.mark.parametrize("model_type", ["modernbert", "gemma3"])
def test_planned_config_has_no_special_token_outside_of_its_vocabulary(model_type: str, size: int | None) -> None:
    """The defaults of an architecture belong to its published tokenizer: ModernBERT pads with token 50283."""
    sizes = {} if size is None else {"vocab_size": size}
    part = {"text_config": sizes} if model_type == "gemma3" else sizes
    loaded = AutoConfig.for_model(model_type, **part)
    text = planned_config(job_of(model_type=model_type, **part), loaded).get_text_config()
    assert text.vocab_size == (size or 8_000)
    for role in ("pad", "bos", "eos", "cls", "sep"):
        found = getattr(text, f"{role}_token_id", None)
        assert found is None or 0 <= found < text.vocab_size
    assert loaded.to_dict() == AutoConfig.for_model(model_type, **part).to_dict(), "the config of the job is not changed"


def test_vocabulary_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    tokenizer = encoder(tmp_path)
    size = len(tokenizer)
    tokenizer.add_tokens(["<image>"])
    check_vocabulary(tokenizer, size)  # the id of an added token may exceed the embedding
    with pytest.raises(InputError, match=f"has {size:,} tokens, but the model has {size - 1:,} embeddings"):
        check_vocabulary(tokenizer, size - 1)


@pytest.mark.parametrize("columns", [1, 2])
def test_encode_truncates_and_counts_truncated_texts(tmp_path: Path, columns: int) -> None:
    tokenizer = encoder(tmp_path)
    texts = [TEXTS] * columns
    places, types = Places("a", "line", range(len(TEXTS))), columns == 2
    whole, nothing_cut = encode(tokenizer, texts, LengthLimit(None, None), places, types, Chunks())
    found, meta = encode(tokenizer, texts, LengthLimit(9, None), places, types, Chunks())
    assert nothing_cut["cut"] == 0
    assert meta["cut"] == (whole["lengths"] > 9).sum() > 0
    assert found["lengths"].tolist() == whole["lengths"].clip(max=9).tolist()
    assert ("token_type_ids" in found) == types
    assert len(found.get("token_type_ids", found["input_ids"])) == len(found["input_ids"]) == found["lengths"].sum()
    used = used_ids(found["input_ids"], tokenizer)
    assert {tokenizer.cls_token_id, tokenizer.sep_token_id} <= set(used["special_ids"])
    assert tokenizer.pad_token_id not in used["special_ids"]
    assert used["largest_id"] == found["input_ids"].max()


def test_length_limits_are_checked(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model\.tokenizer: .*cannot load a tokenizer from"):
        load_tokenizer(str(tmp_path))
    tokenizer, places = encoder(tmp_path), Places("a.csv", "line", range(12))
    with pytest.raises(InputError, match="leaves no room for text: 3 special tokens"):
        encode(tokenizer, [TEXTS, TEXTS], LengthLimit(4, None), places, False, Chunks())
    found, meta = encode(decoder(tmp_path), [["a", "", "a"]], LengthLimit(4, None), places, False, Chunks())
    assert (found["lengths"].tolist(), meta["left_out"]) == ([1, 1], [[1, "has no tokens"]])
    with pytest.raises(DataError, match=r"a\.csv: no text has a token"):
        encode(decoder(tmp_path), [["", ""]], LengthLimit(4, None), places, False, Chunks())
