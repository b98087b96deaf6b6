"""Tokenised samples as flat memory-mapped arrays in the cache folder, and the split of rows into train and eval.

Tokens are stored once per (data, tokenizer, settings): a second run starts without tokenising.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hwopt.data.stores.store import ArrayFolder
from hwopt.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def split_rows(samples: int, fraction: float, seed: int, source: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row numbers (train, eval), both ascending; a pure function of the arguments. Raises DataError as `held_out_count` does."""
    import numpy as np

    held_out = held_out_count(samples, fraction, source)
    order = np.random.Generator(np.random.Philox(seed)).permutation(samples)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def split_by_label(labels: Sequence[str], fraction: float, seed: int, source: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row numbers (train, eval), both ascending, with about the same share of each label; a pure function of the arguments.

    As many rows are held out as by `split_rows`. Every label keeps at least one row for training. Shares are rounded by the
    largest remainder. Raises DataError as `held_out_count` does.
    """
    import numpy as np

    held_out = held_out_count(len(labels), fraction, source)
    order = np.random.Generator(np.random.Philox(seed)).permutation(len(labels))
    _, numbers, counts = np.unique(np.asarray(labels, dtype=object), return_inverse=True, return_counts=True)
    exact = counts * (held_out / len(labels))
    quotas = np.minimum(np.floor(exact).astype(np.int64), counts - 1)
    while (missing := held_out - int(quotas.sum())) > 0:
        open_labels = np.flatnonzero(quotas < counts - 1)
        if len(open_labels) == 0:  # as many rows as labels would be left for training
            return split_rows(len(labels), fraction, seed, source)
        nearest_first = open_labels[np.argsort(quotas[open_labels] - exact[open_labels], kind="stable")]
        quotas[nearest_first[:missing]] += 1
    by_label = np.split(order[np.argsort(numbers[order], kind="stable")], np.cumsum(counts)[:-1])
    mask = np.zeros(len(labels), bool)
    mask[np.concatenate([rows[:quota] for rows, quota in zip(by_label, quotas, strict=True)])] = True
    return np.flatnonzero(~mask), np.flatnonzero(mask)


def held_out_count(samples: int, fraction: float, source: str) -> int:
    """Number of the `samples` to evaluate on. Raises DataError if that leaves no sample for training or for evaluation."""
    held_out = round(samples * fraction)
    if not 0 < held_out < samples:
        raise DataError(
            f"{source}: data.eval_fraction = {fraction} of {samples:,} samples leaves {held_out:,} to evaluate on and "
            f"{samples - held_out:,} to train on; both sides need at least one"
        )
    return held_out


def fingerprint(*parts: Any) -> str:
    """A hash of nested lists, dicts, strings and numbers, equal in all processes; fast for long lists of strings."""
    digest = hashlib.sha256()
    for part in parts:
        texts = part if isinstance(part, (list, tuple)) and part and all(isinstance(item, str) for item in part) else None
        for item in texts if texts is not None else [json.dumps(part, sort_keys=True)]:
            raw = item.encode("utf-8", "surrogatepass")
            digest.update(len(raw).to_bytes(8, "little") + raw)
        digest.update(b"\xff" * 8)
    return digest.hexdigest()[:32]


class TokenStore(ArrayFolder):
    """Tokenised samples. The arrays:

    * `input_ids`: int32, the tokens of all samples concatenated; optionally `token_type_ids`, likewise
    * `offsets`: int64 (samples + 1,), the start of each sample
    * `labels`: of each token, int64: its class, or the token to predict after it, or -100; or of each sample, a value or a row
    * `counts`: int32 (samples,), labels of each sample that the loss counts
    * optionally `documents`: int64 (samples,), for blocks of text: the document in which each sample starts
    """

    @property
    def lengths(self) -> NDArray[np.int32]:
        import numpy as np

        return np.diff(self.array("offsets")).astype(np.int32)

    @property
    def counts(self) -> NDArray[np.int32]:
        return self.array("counts")

    def row(self, index: int, epoch: int = 0) -> dict[str, NDArray[Any]]:
        """Sample `index`: "input_ids" and optionally "token_type_ids" (length,), and "labels" (length,) or "row_labels".

        "row_labels" is what the sample as a whole has as its label, of any shape.
        """
        offsets = self.array("offsets")
        part = slice(offsets[index], offsets[index + 1])
        found = {"input_ids": self.array("input_ids")[part]}
        if self.has("token_type_ids"):
            found["token_type_ids"] = self.array("token_type_ids")[part]
        labels = self.array("labels")
        return found | ({"labels": labels[part]} if self.meta["labels_per_token"] else {"row_labels": labels[index, ...]})


class PairStore(TokenStore):
    """Tokenised inputs and targets. The arrays, beside those of `TokenStore` for the inputs, without labels:

    * `target_ids`: int32, the targets of all samples concatenated
    * `target_offsets`: int64 (samples + 1,), the start of each target

    meta.json has `start`, the first token of every decoder's input, and `max_target_length`.
    """

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Size of each sample, int32 (samples,): the greater of its input and its target, each relative to the longest one.

        The longest input has its number of tokens; a target counts as if max_target_length were as long as that. So n times
        shorter samples have n times fewer tokens in the encoder and in the decoder than the micro-batch that a plan is made for.
        """
        import numpy as np

        inputs, targets = np.diff(self.array("offsets")), np.diff(self.array("target_offsets"))
        sizes: NDArray[np.int64] = np.maximum(inputs, -(-targets * inputs.max() // self.meta["max_target_length"]))
        return sizes.astype(np.int32)

    def row(self, index: int, epoch: int = 0) -> dict[str, NDArray[Any]]:
        """Sample `index`: "input_ids" (length,), "decoder_input_ids" and "decoder_labels" (target length,)."""
        import numpy as np

        offsets, targets = self.array("offsets"), self.array("target_offsets")
        labels = self.array("target_ids")[targets[index] : targets[index + 1]]
        shifted = np.concatenate([np.array([self.meta["start"]], labels.dtype), labels[:-1]])
        return {
            "input_ids": self.array("input_ids")[offsets[index] : offsets[index + 1]],
            "decoder_input_ids": shifted,
            "decoder_labels": labels,
        }
