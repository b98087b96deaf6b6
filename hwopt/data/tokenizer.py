"""Load a tokenizer, choose its padding token, and tokenise texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from hwopt.data.bad_rows import Places
from hwopt.data.stores.chunks import Chunks
from hwopt.errors import DataError, InputError, is_gated
from hwopt.model.remote_code import is_trusted
from hwopt.text import cut, first_line

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PretrainedConfig

PADDING = "<|pad|>"
CHUNK = 1_000  # texts that are tokenised at once
UNIQUE = 1 << 22  # tokens that are searched for their numbers at once


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


Encoding = tuple[dict[str, Any], dict[str, Any]]
"""(arrays: `input_ids` of all samples, concatenated; `lengths`, the tokens of each; others of a token store, what its meta.json
holds: "cut", the number of samples that were truncated, and "left_out", pairs of a sample that was skipped and the reason)."""


def used_ids(ids: NDArray[np.int32], tokenizer: Any) -> dict[str, Any]:
    """The part of a token store's meta.json that describes its `ids`."""
    import numpy as np

    parts = range(0, len(ids), UNIQUE)  # all at once would copy the array
    used = np.unique(np.concatenate([np.unique(ids[start : start + UNIQUE]) for start in parts]))
    special = np.intersect1d(used, np.array(tokenizer.all_special_ids, np.int64))
    return {"special_ids": special.tolist(), "largest_id": int(used[-1])}


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
        import numpy as np

        if np.max(lengths, initial=0) > self.max_positions:
            sample, length = next(each for each in enumerate(lengths, first) if each[1] > self.max_positions)
            raise DataError(
                f"{places.at(sample)}: has {length:,} tokens, more than the model's limit of {self.max_positions:,}; "
                f"set data.max_length = {self.max_positions} to truncate longer texts"
            )


def encode(
    tokenizer: Any, texts: Sequence[Sequence[str]], limit: LengthLimit, places: Places, types: bool, chunks: Chunks
) -> Encoding:
    """The tokens of `texts` (one column, or two for pairs) with the tokenizer's special tokens; texts without tokens are skipped.

    `types`: also token_type_ids. Raises InputError if max_length leaves no room for text, DataError as `LengthLimit.check`.
    """
    import numpy as np

    special = tokenizer.num_special_tokens_to_add(pair=len(texts) == 2)
    if limit.max_length is not None and limit.max_length < special + len(texts):
        raise InputError(f"data.max_length: {limit.max_length} leaves no room for text: {special} special tokens are added")
    state, most = chunks.state, limit.max_length
    for start in range(chunks.done, len(texts[0]), CHUNK):
        chunk = [list(column[start : start + CHUNK]) for column in texts]
        ids, kinds = encoded_batch(tokenizer, chunk, types)
        lengths = np.array([*map(len, ids)], np.int64)
        limit.check(lengths, places, start)
        if most is not None and (long := np.flatnonzero(lengths > most).tolist()):
            state["truncated"] = state.get("truncated", 0) + len(long)
            chosen = [[column[sample] for sample in long] for column in chunk]
            for sample, own, kind in zip(long, *encoded_batch(tokenizer, chosen, types, most), strict=True):
                ids[sample], kinds[sample] = own, kind
            lengths = np.array([*map(len, ids)], np.int64)
        state["empty"] = state.get("empty", []) + (start + np.flatnonzero(lengths == 0)).tolist()
        arrays: dict[str, NDArray[Any]] = {"ids": joined(ids), "types": joined(kinds), "lengths": lengths[lengths > 0]}
        chunks.add(start + len(ids), arrays)
    found = {"input_ids": chunks.array("ids", np.int32), "lengths": chunks.array("lengths", np.int64)}
    if not len(found["input_ids"]):
        raise DataError(f"{places.source}: no text has a token")
    if len(token_types := chunks.array("types", np.int32)):
        found["token_type_ids"] = token_types
    skipped = [[sample, "has no tokens"] for sample in state.get("empty", ())]
    return found, {"cut": state.get("truncated", 0), "left_out": skipped}


def encoded_batch(
    tokenizer: Any, texts: list[list[str]], types: bool, most: int | None = None
) -> tuple[list[list[int]], list[list[int]]]:
    """(tokens, token types; [] without `types`) of each of the `texts`, truncated to `most` tokens."""
    from transformers import PreTrainedTokenizerFast

    if most is None and getattr(type(tokenizer), "_encode_plus", None) is PreTrainedTokenizerFast._encode_plus:
        # what transformers does then, without its dictionaries for each text, which take a third of the time
        backend = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = tokenizer.split_special_tokens
        found = backend.encode_batch(texts[0] if len(texts) == 1 else list(zip(*texts, strict=True)))
        return [each.ids for each in found], [each.type_ids for each in found] if types else [[]] * len(found)
    cutting = {} if most is None else {"truncation": "longest_first", "max_length": most}
    slow = tokenizer(*texts, return_attention_mask=False, return_token_type_ids=types, verbose=False, **cutting)
    return slow["input_ids"], slow.get("token_type_ids") or [[]] * len(slow["input_ids"])


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
