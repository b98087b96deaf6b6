"""The chat templates that TRL ships, and tokenizers for them."""

import re
from importlib import metadata
from pathlib import Path
from typing import Any

FOLDER = Path(str(metadata.distribution("trl").locate_file("trl"))) / "chat_templates"
ALL_TEMPLATES = [path.read_text("utf-8") for path in sorted(FOLDER.glob("*.jinja"))]
TEMPLATES = {path.stem: path.read_text("utf-8") for path in sorted(FOLDER.glob("*.jinja")) if "_training" not in path.stem}
MARKS = re.compile(r"<[|｜][^\s'\"<>{}]+?[|｜]>|<\|[a-z_]+>|<[a-z_]+\|>|</?[a-z_]+>|\[/?[A-Z_]+\]")


def byte_tokenizer(*templates: str, eos: str = "<|im_end|>") -> Any:
    """A tokenizer of bytes with the special tokens of `templates`; `eos` ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    special = sorted({eos, "<|begin_of_text|>", *(mark for template in templates for mark in MARKS.findall(template))})
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=letters, show_progress=False)
    made.train_from_iterator(["\n\n"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<|begin_of_text|>", eos_token=eos)
