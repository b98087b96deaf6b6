"""Tokenizers: the model's own, a named one, or one trained on the job's texts, for models of random weights.

WordPiece (lower case, [CLS] and [SEP] around) for encoders, byte-level BPE for decoders: what BERT and GPT-2 use. Training is
deterministic, which `tokenizers` alone is not for WordPiece: it meets the letters in the order of a hash table that differs in
each process, and so breaks ties between equally frequent pairs differently (seen with tokenizers 0.22).
"""

from __future__ import annotations

import copy
import json
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwopt.caches import is_kept
from hwopt.data import fingerprint, write_folder
from hwopt.errors import DataError, InputError, is_gated, shorten
from hwopt.job import Job
from hwopt.rows import Places
from hwopt.trust import is_trusted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from tokenizers import Tokenizer
    from transformers import PretrainedConfig

VOCABULARY = 8_000
"""Tokens of a tokenizer that is trained on the spot, where the job's model.config gives no vocab_size."""
MOST_LETTERS = 1_000
ENCODER_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
DECODER_TOKENS = ("<|endoftext|>", "<|pad|>")
PADDING = "<|pad|>"
CHUNK = 1_000
FORMAT = 1


def vocabulary_of(job: Job) -> int | None:
    """The vocab_size that the job's model.config gives; None where it gives none, or names a trained model."""
    config = job.model.config or {}
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def planned_config(job: Job, config: PretrainedConfig) -> PretrainedConfig:
    """The config to plan with before any text is read: a copy of `config` with a vocabulary of 8,000 where the tokenizer will be
    trained on the spot and the job gives no vocab_size. `Task.load_model` then sets the size that the tokenizer really has."""
    if job.model.config is None or job.model.tokenizer is not None or vocabulary_of(job) is not None:
        return config
    config = copy.deepcopy(config)
    config.get_text_config().vocab_size = VOCABULARY
    return config


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
            f"{key}: {name!r} has no tokenizer that can be loaded ({shorten(text, 160)}); "
            "give model.tokenizer, a folder with tokenizer.json or a hub name"
        ) from error


def trained_tokenizer(texts: Sequence[str], job: Job, config: PretrainedConfig, decoder: bool, cache: Path) -> Any:
    """A tokenizer trained on `texts`, kept under `cache`: WordPiece for encoders, byte-level BPE for decoders.

    It has the job's vocab_size, else 8,000 tokens, or fewer where the texts do not give as many. Raises InputError where the
    vocabulary is too small for the letters that it must hold.
    """
    from transformers import PreTrainedTokenizerFast

    size = vocabulary_of(job) or VOCABULARY
    least = len(DECODER_TOKENS) + 256 if decoder else len(ENCODER_TOKENS) + 16
    if size < least:
        raise InputError(f"model.config.vocab_size: {size} is too small for a tokenizer of its own; at least {least}")
    folder = cache / "tokenizers" / fingerprint([FORMAT, size, decoder, uses_token_types(config)], list(texts))
    if not is_kept(folder / "tokenizer_config.json"):
        trained = train_bpe(texts, size) if decoder else train_wordpiece(texts, size)
        roles = ("eos_token", "pad_token") if decoder else ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
        special = dict(zip(roles, DECODER_TOKENS if decoder else ENCODER_TOKENS, strict=True))
        inputs = ["input_ids", *(["token_type_ids"] if uses_token_types(config) else []), "attention_mask"]
        made = PreTrainedTokenizerFast(
            tokenizer_object=trained, model_input_names=inputs, clean_up_tokenization_spaces=False, **special
        )
        write_folder(folder, made.save_pretrained)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def train_wordpiece(texts: Sequence[str], size: int) -> Tokenizer:
    """BERT's tokenizer with at most `size` tokens, a pure function of `texts`."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    normalizer = normalizers.BertNormalizer(lowercase=True)
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    seen: Counter[str] = Counter()
    for text in texts:
        seen.update(normalizer.normalize_str(text))
    letters = sorted((letter for letter in seen if not letter.isspace()), key=lambda letter: (-seen[letter], letter))
    letters = letters[: min(MOST_LETTERS, (size - len(ENCODER_TOKENS)) // 2)]
    # given as special tokens, the letters inside words get their numbers in our order instead of the hash table's
    inside = [f"##{letter}" for letter in sorted(letters) if not _is_punctuation(letter)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=[*ENCODER_TOKENS, *inside], limit_alphabet=len(letters), show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    made = _without_added_tokens(made)
    made.add_special_tokens(list(ENCODER_TOKENS))
    numbers = [(token, made.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=numbers
    )
    made.decoder = decoders.WordPiece()
    return made


def train_bpe(texts: Sequence[str], size: int) -> Tokenizer:
    """GPT-2's tokenizer with at most `size` tokens; <|endoftext|> stands between the two texts of a pair."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(DECODER_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="$A", pair="$A <|endoftext|> $B:1", special_tokens=[("<|endoftext|>", made.token_to_id("<|endoftext|>"))]
    )
    made.decoder = decoders.ByteLevel()
    return made


def identity(tokenizer: Any) -> str:
    """A hash of everything that decides how `tokenizer` maps texts to numbers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules: Any = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    else:
        rules = json.loads(backend.to_str())
        for state in ("truncation", "padding"):  # left there by the last call
            rules.pop(state, None)
    special = {role: str(token) for role, token in tokenizer.special_tokens_map.items()}
    return fingerprint(rules, special, [tokenizer.truncation_side])


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


def _is_punctuation(letter: str) -> bool:
    return letter in string.punctuation or unicodedata.category(letter).startswith("P")


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    rules = json.loads(tokenizer.to_str())
    rules["added_tokens"] = []
    made: Tokenizer = type(tokenizer).from_str(json.dumps(rules))
    return made
