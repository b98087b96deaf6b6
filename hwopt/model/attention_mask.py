"""Attention masks of transformers' models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def skip_packed_row_search() -> Iterator[None]:
    """Keep transformers' decoders from searching their inputs for packed rows, which waits for the device in every forward pass.

    hwopt passes a mask when rows are packed.
    """
    from transformers import masking_utils

    search = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = search
