"""Attention masks of transformers' models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def skip_packed_row_search() -> Iterator[None]:
    """Context in which transformers' decoders do not search their inputs for packed rows.

    Without a mask they do so in every forward pass, which waits for the device. hwopt passes a mask when rows are packed.
    """
    from transformers import masking_utils

    search = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = search
