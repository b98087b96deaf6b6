"""Load a tokenizer, choose its padding token, and tokenise texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from hwopt.data.bad_rows import Places
from hwopt.errors import DataError, InputError, is_gated
from hwopt.model.remote_code import is_trusted
from hwopt.text import cut, first_line

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PretrainedConfig

PADDING = "<|pad|>"
CHUNK = 1_000


def load_tokenizer(name: str, revision: str | None = None, key: str = "model.tokenizer") -> Any:
    """The tokenizer of a folder or hub name. Raises InputError if it cannot be loaded; `key` is the job's key in the message."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=is_trusted(name))
    except Exception as error:  # transformers, tokenizers, the hub client and the network each raise their own
        if is_gated(error):
            raise InputError(
                f"{key}: {name!r} is gated. Accept its licence on its hub page, then log in: `hf auth login`."
            ) from error
        raise InputError(
            f"{key}: cannot load a tokenizer from {name!r} ({type(error).__name__}: {cut(first_line(error), 160)}). "
            "Set model.tokenizer to a folder with tokenizer.json or to a hub name"
        ) from error


def uses_token_types(config: PretrainedConfig) -> bool:
    """Whether the architecture marks the two texts of a pair by token_type_ids."""
    return int(getattr(config.get_text_config(), "type_vocab_size", 0) or 0) > 1


def choose_padding(tokenizer: Any, used: set[int]) -> None:
    """Set `tokenizer` to pad on the right with a token whose id is not in `used`.

    Candidates in order: its padding token, unknown token, end-of-text token, else a new token. Decoders take the rightmost token
    that is not padding as the last one, so a text that ends with the padding token would lose its end.
    """
    tokenizer.padding_side = "right"
    for token in (tokenizer.pad_token, tokenizer.unk_token, tokenizer.eos_token):
        if token is not None and tokenizer.convert_tokens_to_ids(token) not in used:
            tokenizer.pad_token = token
            return
    tokenizer.add_special_tokens({"pad_token": PADDING})


def check_vocabulary(tokenizer: Any, embeddings: int) -> None:
    """Raise InputError if the model has fewer embeddings than the tokenizer has ordinary tokens.

    Added tokens may have no embedding: Gemma-3-1B's tokenizer has an image token that its embedding lacks.
    """
    largest = max(set(tokenizer.get_vocab().values()) - set(tokenizer.added_tokens_decoder), default=0)
    if largest >= embeddings:
        raise InputError(
            f"model.tokenizer: has {largest + 1:,} tokens, but the model has {embeddings:,} embeddings; "
            "give the tokenizer that the model was trained with"
        )


@dataclass(frozen=True)
class Encoded:
    """The tokens of many texts, concatenated."""

    ids: NDArray[np.int32]  # (tokens,)
    types: NDArray[np.int32] | None  # (tokens,)
    lengths: NDArray[np.int64]  # (texts,)
    truncated: int  # number of texts that were longer than max_length
    skipped: Mapping[int, str] = field(default_factory=dict)  # samples without tokens -> reason

    def meta(self, tokenizer: Any) -> dict[str, Any]:
        """The part of a token store's meta.json that describes the tokens."""
        import numpy as np

        used = np.unique(self.ids)
        special = np.intersect1d(used, np.array(tokenizer.all_special_ids, np.int64))
        return {
            "samples": len(self.lengths),
            "cut": self.truncated,
            "left_out": [[sample, reason] for sample, reason in self.skipped.items()],
            "special_ids": special.tolist(),
            "largest_id": int(used[-1]),
        }


@dataclass(frozen=True)
class LengthLimit:
    """The maximum length of a text, in tokens. Raises InputError if the job's limit exceeds the model's."""

    max_length: int | None  # the job's limit: longer texts are truncated
    max_positions: int | None  # the model's limit: longer texts are an error unless the job truncates them

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_positions is not None and self.max_length > self.max_positions:
            raise InputError(
                f"data.max_length: {self.max_length:,} exceeds the model's limit of {self.max_positions:,} tokens; "
                f"set data.max_length = {self.max_positions} or less"
            )

    def check(self, lengths: Sequence[int] | NDArray[Any], places: Places, first: int = 0) -> None:
        """Raise DataError for the first text that is too long for the model. `first` is the sample of the first length."""
        if self.max_length is not None or self.max_positions is None:
            return
        for sample, length in enumerate(lengths, first):
            if length > self.max_positions:
                raise DataError(
                    f"{places.at(sample)}: has {length:,} tokens, more than the model's limit of {self.max_positions:,}; "
                    f"set data.max_length = {self.max_positions} to truncate longer texts"
                )


def encode(tokenizer: Any, texts: Sequence[Sequence[str]], limit: LengthLimit, places: Places, types: bool) -> Encoded:
    """The tokens of `texts` (one column, or two for pairs) with the tokenizer's special tokens; texts without tokens are skipped.

    `types`: also token_type_ids. Raises InputError if max_length leaves no room for text, DataError as `LengthLimit.check`.
    """
    import numpy as np

    special = tokenizer.num_special_tokens_to_add(pair=len(texts) == 2)
    if limit.max_length is not None and limit.max_length < special + len(texts):
        raise InputError(f"data.max_length: {limit.max_length} leaves no room for text: {special} special tokens are added")
    options = {"return_attention_mask": False, "return_token_type_ids": types, "verbose": False}
    ids, kinds, lengths = [], [], []  # an array for each chunk: one for each text takes more memory than its tokens
    truncated = 0
    skipped: dict[int, str] = {}
    for start in range(0, len(texts[0]), CHUNK):
        chunk = [list(column[start : start + CHUNK]) for column in texts]
        found = tokenizer(*chunk, **options)
        found_lengths = np.array([len(one) for one in found["input_ids"]], np.int64)
        limit.check(found_lengths, places, start)
        skipped |= dict.fromkeys((start + np.flatnonzero(found_lengths == 0)).tolist(), "has no tokens")
        if limit.max_length is not None and (too_long := found_lengths > limit.max_length).any():
            truncated += int(too_long.sum())
            found = tokenizer(*chunk, truncation="longest_first", max_length=limit.max_length, **options)
            found_lengths = np.array([len(one) for one in found["input_ids"]], np.int64)
        ids.append(joined(found["input_ids"]))
        kinds.append(joined(found.get("token_type_ids", ())))
        lengths.append(found_lengths[found_lengths > 0])
    if not sum(map(len, ids)):
        raise DataError(f"{places.source}: no text has a token")
    return Encoded(
        np.concatenate(ids), np.concatenate(kinds) if any(map(len, kinds)) else None, np.concatenate(lengths), truncated, skipped
    )


def joined(lists: Iterable[Sequence[int]]) -> NDArray[np.int32]:
    """The numbers of all `lists`, one after the other."""
    import numpy as np

    return np.fromiter(chain.from_iterable(lists), np.int32)


def tokens_of(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """The tokens of each text, with the special tokens that the tokenizer adds at the start, but not at the end.

    A text that begins with such a token itself, as one that a chat template wrote, gets no second one. TRL has two there.
    """
    options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    found: list[list[int]] = tokenizer(texts, **options)["input_ids"]
    begin, end = added(tokenizer, tokenizer.bos_token_id, 0), added(tokenizer, tokenizer.eos_token_id, -1)
    last = -1 if end else None
    return [ids[begin and ids[:2] == [tokenizer.bos_token_id] * 2 : last] for ids in found]


def added(tokenizer: Any, token: int | None, at: int) -> bool:
    """Whether the tokenizer adds `token` to a text, `at` its start (0) or its end (-1). Only a text tells which one it is."""
    with_special, without = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    place = slice(at, at + 1 or None)
    return bool(with_special[place] == [token] != without[place])
