"""Attention masks of transformers' models: what they would compute although the run knows the answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def skip_packed_row_search() -> Iterator[None]:
    """Without a mask transformers' decoders look for packed rows in every forward, and so wait for the device. There are none."""
    from transformers import masking_utils

    search = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = search
