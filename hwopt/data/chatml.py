"""ChatML, the chat template that hwopt brings, for tokenizers without one of their own."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

CHATML = files("hwopt.data").joinpath("chatml.jinja").read_text(encoding="utf-8").rstrip("\n")
"""The template `data.chat_template = "chatml"`, as OpenAI published the format; calls as in Nous Hermes and Qwen2.5."""
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")


def add_chatml_tokens(tokenizer: Any) -> tuple[int, ...]:
    """Add the special tokens of the template "chatml" that `tokenizer` lacks, and return their numbers."""
    missing = [token for token in CHATML_TOKENS if token not in tokenizer.get_vocab()]
    tokenizer.add_tokens(missing, special_tokens=True)
    return tuple(tokenizer.convert_tokens_to_ids(missing))
