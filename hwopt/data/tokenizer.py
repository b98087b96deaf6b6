"""Tokenizers: the model's own, a named one, or one trained on the job's texts, for models of random weights.

WordPiece (lower case, [CLS] and [SEP] around) for encoders, byte-level BPE for decoders: what BERT and GPT-2 use. Training is
deterministic, which `tokenizers` alone is not for WordPiece: it meets the letters in the order of a hash table that differs in
each process, and so breaks ties between equally frequent pairs differently (seen with tokenizers 0.22).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hwopt.data.bad_rows import Places
from hwopt.errors import DataError, InputError, is_gated
from hwopt.model.remote_code import is_trusted
from hwopt.text import truncate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PretrainedConfig

ENCODER_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
DECODER_TOKENS = ("<|endoftext|>", "<|pad|>")
PADDING = "<|pad|>"
CHUNK = 1_000
FORMAT = 1


def load_tokenizer(name: str, revision: str | None = None, key: str = "model.tokenizer") -> Any:
    """The tokenizer of a folder or hub name. Raises InputError where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=is_trusted(name))
    except Exception as error:  # transformers, tokenizers, the hub client and the network each raise their own
        text = f"{type(error).__name__}: {error}"
        if is_gated(error):
            raise InputError(
                f"{key}: {name!r} is gated. Accept its licence on its hub page, then log in: `hf auth login`."
            ) from error
        raise InputError(
            f"{key}: {name!r} has no tokenizer that can be loaded ({truncate(text, 160)}); "
            "give model.tokenizer, a folder with tokenizer.json or a hub name"
        ) from error


def uses_token_types(config: PretrainedConfig) -> bool:
    """Whether the architecture tells the two texts of a pair apart by token_type_ids."""
    return int(getattr(config.get_text_config(), "type_vocab_size", 0) or 0) > 1


def choose_padding(tokenizer: Any, used: set[int]) -> None:
    """Give `tokenizer` a padding token whose number is not in `used`, and pad on the right.

    Its own, else the unknown, else the end-of-text token; where texts contain all of these, a token is added. Decoders find the
    last real token as the rightmost one that is not padding, so a text that ends with the padding token would be cut short.
    """
    tokenizer.padding_side = "right"
    for token in (tokenizer.pad_token, tokenizer.unk_token, tokenizer.eos_token):
        if token is not None and tokenizer.convert_tokens_to_ids(token) not in used:
            tokenizer.pad_token = token
            return
    tokenizer.add_special_tokens({"pad_token": PADDING})


def check_vocabulary(tokenizer: Any, embeddings: int) -> None:
    """Raises InputError where ordinary tokens have numbers that the model has no embedding for.

    Added tokens may lie beyond: Gemma-3-1B's own tokenizer has one for images that its embedding lacks.
    """
    largest = max(
        (number for number in tokenizer.get_vocab().values() if number not in tokenizer.added_tokens_decoder), default=0
    )
    if largest >= embeddings:
        raise InputError(
            f"model.tokenizer: has {largest + 1:,} tokens, the model has embeddings for {embeddings:,}; "
            "give the tokenizer that the model was trained with"
        )


@dataclass(frozen=True)
class Encoded:
    """Tokens of many texts, one after another."""

    ids: NDArray[np.int32]  # (tokens,)
    types: NDArray[np.int32] | None  # (tokens,)
    lengths: NDArray[np.int64]  # (texts,)
    cut: int
    """Texts that were longer than max_length."""
    left_out: Mapping[int, str] = field(default_factory=dict)
    """Samples that gave no tokens, and why."""

    def meta(self, tokenizer: Any) -> dict[str, Any]:
        """Of a token store: how many there are, and which tokens need care."""
        import numpy as np

        used = np.unique(self.ids)
        special = np.intersect1d(used, np.array(tokenizer.all_special_ids, np.int64))
        return {
            "samples": len(self.lengths),
            "cut": self.cut,
            "left_out": [[sample, why] for sample, why in self.left_out.items()],
            "special_ids": special.tolist(),
            "largest_id": int(used[-1]),
        }


@dataclass(frozen=True)
class Limit:
    """How long a text may be, in tokens."""

    max_length: int | None
    """The job's: longer texts are cut."""
    max_positions: int | None
    """The model's: longer texts are an error where nothing cuts them."""

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_positions is not None and self.max_length > self.max_positions:
            raise InputError(
                f"data.max_length: {self.max_length:,} is more than the {self.max_positions:,} tokens that the model takes; "
                f"set data.max_length = {self.max_positions} or less"
            )

    def check(self, lengths: Sequence[int] | NDArray[Any], places: Places, first: int = 0) -> None:
        """Raises DataError for the first text that nothing cuts and the model does not take; `first` is the sample of the
        first length."""
        if self.max_length is not None or self.max_positions is None:
            return
        for sample, length in enumerate(lengths, first):
            if length > self.max_positions:
                raise DataError(
                    f"{places.at(sample)}: has {length:,} tokens, the model takes {self.max_positions:,}; "
                    f"set data.max_length = {self.max_positions} to cut longer texts"
                )


def encode(tokenizer: Any, texts: Sequence[Sequence[str]], limit: Limit, places: Places, types: bool) -> Encoded:
    """Tokens of `texts` (one column, or two for pairs), with the special tokens of the tokenizer; what has none is left out.

    Raises InputError where max_length leaves no room for a token of the text, DataError for a text that is too long for the
    model.
    """
    import numpy as np

    special = tokenizer.num_special_tokens_to_add(pair=len(texts) == 2)
    if limit.max_length is not None and limit.max_length < special + len(texts):
        raise InputError(f"data.max_length: {limit.max_length} leaves no room beside {special} special tokens")
    options = {"return_attention_mask": False, "return_token_type_ids": types, "verbose": False}
    ids: list[Any] = []
    kinds: list[Any] = []
    cut = 0
    left_out: dict[int, str] = {}
    for start in range(0, len(texts[0]), CHUNK):
        chunk = [list(column[start : start + CHUNK]) for column in texts]
        found = tokenizer(*chunk, **options)
        limit.check([len(one) for one in found["input_ids"]], places, start)
        for index, one in enumerate(found["input_ids"]):
            if not one:
                left_out[start + index] = "its text has no tokens"
            if limit.max_length is not None and len(one) > limit.max_length:
                cut += 1
                again = tokenizer(
                    *(column[index] for column in chunk), truncation="longest_first", max_length=limit.max_length, **options
                )
                for key in again:
                    found[key][index] = again[key]
        ids += [np.asarray(one, np.int32) for one in found["input_ids"] if one]
        kinds += [np.asarray(one, np.int32) for one in found.get("token_type_ids", ()) if one]
    if not ids:
        raise DataError(f"{places.source}: no text has any token")
    lengths = np.array([len(one) for one in ids], np.int64)
    return Encoded(np.concatenate(ids), np.concatenate(kinds) if kinds else None, lengths, cut, left_out)
