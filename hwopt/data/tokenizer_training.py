"""Train a tokenizer on the job's texts, for a model with random weights.

As in BERT and GPT-2: WordPiece (lower case, between [CLS] and [SEP]) for encoders, byte-level BPE for decoders. Training is
deterministic. WordPiece training in `tokenizers` 0.22 is not: it reads letters in the order of a hash table, which differs in
each process and breaks ties between equally frequent pairs.
"""

from __future__ import annotations

import copy
import json
import math
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwopt.config.job import Job
from hwopt.data.stores.token_store import fingerprint, write_cache_folder
from hwopt.data.tokenizer import uses_token_types
from hwopt.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PretrainedConfig

ENCODER_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
DECODER_TOKENS = ("<|endoftext|>", "<|pad|>")
FORMAT = 1  # format of the cached tokenizers
VOCABULARY = 8_000  # tokens of a trained tokenizer if the job's model.config has no vocab_size
MAX_LETTERS = 1_000  # letters in the vocabulary of a WordPiece tokenizer


def job_vocab_size(job: Job) -> int | None:
    """The vocab_size in the job's model.config; None if it has none, or if the job names a trained model."""
    config = job.model.config or {}
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def planned_config(job: Job, config: PretrainedConfig, vocab_size: int | None = None) -> PretrainedConfig:
    """The config for planning: for a model with random weights a copy with a vocabulary, as `Task.load_model` sets it.

    `vocab_size`: that of the tokenizer; None before any text is read.
    """
    if job.model.config is None:
        return config
    config = copy.deepcopy(config)
    has_vocabulary = hasattr(config.get_text_config(), "vocab_size")  # image models have none
    if has_vocabulary and job_vocab_size(job) is None and (vocab_size or job.model.tokenizer is None):
        config.get_text_config().vocab_size = vocab_size or VOCABULARY
    drop_special_tokens(config)
    return config


def drop_special_tokens(config: PretrainedConfig) -> None:
    """Remove ids of special tokens that are outside of the vocabulary of `config`, such as ModernBERT's default padding token."""
    from huggingface_hub.errors import StrictDataclassError

    text = config.get_text_config()
    size = getattr(text, "vocab_size", None) or math.inf
    for key, value in vars(text).items():
        ids = [number for number in (value if isinstance(value, list) else [value]) if isinstance(number, int)]
        if key.endswith("_token_id") and max(ids, default=0) >= size:
            with suppress(StrictDataclassError):  # some architectures declare the id as required
                setattr(text, key, None)


def trained_tokenizer(texts: Sequence[str], job: Job, config: PretrainedConfig, decoder: bool, cache: Path) -> Any:
    """A tokenizer with the job's vocab_size or fewer tokens, if the texts give fewer; stored in `cache`.

    Raises InputError if the vocabulary is too small for the special tokens and letters.
    """
    from transformers import PreTrainedTokenizerFast

    size = job_vocab_size(job) or VOCABULARY
    least = len(DECODER_TOKENS) + 256 if decoder else len(ENCODER_TOKENS) + 16
    if size < least:
        raise InputError(f"model.config.vocab_size: {size} is too small to train a tokenizer; set at least {least}")
    folder = cache / "tokenizers" / fingerprint([FORMAT, size, decoder, uses_token_types(config)], list(texts))

    def write(staged: Path) -> None:
        trained = train_bpe(texts, size) if decoder else train_wordpiece(texts, size)
        roles = ("eos_token", "pad_token") if decoder else ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
        special = dict(zip(roles, DECODER_TOKENS if decoder else ENCODER_TOKENS, strict=True))
        inputs = ["input_ids", *(["token_type_ids"] if uses_token_types(config) else []), "attention_mask"]
        PreTrainedTokenizerFast(
            tokenizer_object=trained, model_input_names=inputs, clean_up_tokenization_spaces=False, **special
        ).save_pretrained(staged)

    write_cache_folder(folder, write, done="tokenizer_config.json")
    return stored_tokenizer(cache, folder.name)


def stored_tokenizer(cache: Path, name: str) -> Any:
    """The trained tokenizer in the folder `name` of the cache; None if there is none."""
    from transformers import PreTrainedTokenizerFast

    folder = cache / "tokenizers" / name
    return PreTrainedTokenizerFast.from_pretrained(folder) if (folder / "tokenizer_config.json").is_file() else None


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
    letters = letters[: min(MAX_LETTERS, (size - len(ENCODER_TOKENS)) // 2)]
    # special tokens get their ids in the given order, so that the letters inside words do not depend on the hash table
    words = (letter for letter in sorted(letters) if letter not in string.punctuation and unicodedata.category(letter)[0] != "P")
    inside = [f"##{letter}" for letter in words]
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=[*ENCODER_TOKENS, *inside], limit_alphabet=len(letters), show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    made = Tokenizer.from_str(json.dumps({**json.loads(made.to_str()), "added_tokens": []}))
    made.add_special_tokens(list(ENCODER_TOKENS))
    numbers = [(token, made.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=numbers
    )
    made.decoder = decoders.WordPiece()
    return made


def train_bpe(texts: Sequence[str], size: int) -> Tokenizer:
    """GPT-2's tokenizer with at most `size` tokens; <|endoftext|> separates the two texts of a pair."""
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


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of everything that determines how `tokenizer` maps texts to token ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules: Any = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    else:
        rules = json.loads(backend.to_str())
        rules = {key: value for key, value in rules.items() if key not in ("truncation", "padding")}  # depend on the last call
    special = {role: str(token) for role, token in tokenizer.special_tokens_map.items()}
    return fingerprint(rules, special, [tokenizer.truncation_side])
