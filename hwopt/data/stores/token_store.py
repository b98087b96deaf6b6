"""Stores: the prepared samples of one part of the data, arrays in a folder of the cache that each process opens by path.

Tokens are stored once per (data, tokenizer, settings): a second run starts without tokenising. Splits of rows are here, too.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from hwopt.data.stores.chunks import writing_cache
from hwopt.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hwopt.data.mixture import Mixture


class Store(Protocol):
    """Samples that data-loading workers read by index. Pickling one sends paths and settings, not the samples."""

    @property
    def folder(self) -> Path:
        """The folder in the cache; its name identifies the samples."""

    @property
    def meta(self) -> Mapping[str, Any]:
        """What was found when the store was written: `left_out`, samples with the reason, and facts of the kind of store."""

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Size of each sample by which it is grouped and padded, int32 (samples,): its tokens; 1 for an image."""

    @property
    def counts(self) -> NDArray[np.int32]:
        """Labels of each sample that the loss counts, int32 (samples,)."""

    @property
    def mixture(self) -> Mixture | None:
        """The sources of the samples, if the data is a mixture; not stored, and not pickled."""

    def __len__(self) -> int: ...

    def array(self, name: str) -> NDArray[Any]:
        """One of the stored arrays, such as "labels"."""

    def row(self, index: int, epoch: int = 0) -> dict[str, NDArray[Any]]:
        """The arrays of sample `index`, with its labels. `epoch` changes a sample that is augmented."""


def write_cache_folder(folder: Path, write: Callable[[Path], None], done: str | None = None) -> None:
    """Replace `folder` atomically by a temporary sibling folder that `write` fills, unless it has the file `done`.

    Two processes may do this at the same time, because both write the same content. Raises StorageError if writing fails.
    """
    with writing_cache(folder):
        if done is not None and (folder / done).is_file():
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{folder.name}."
        with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent, ignore_cleanup_errors=True) as scratch:
            staged = Path(scratch) / "new"
            staged.mkdir()
            write(staged)
            with suppress(FileNotFoundError):
                folder.rename(Path(scratch) / "old")  # incomplete, or written by another process meanwhile
            try:
                staged.rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise


class ArrayFolder:
    """Arrays in .npy files and their meta.json, opened on first use; pickled without them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mixture: Mixture | None = None
        self._arrays: dict[str, NDArray[Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        state = {key: value for key, value in vars(self).items() if key != "meta"}
        return {**state, "mixture": None, "_arrays": {}}

    def __len__(self) -> int:
        return len(self.array("offsets")) - 1

    @cached_property
    def meta(self) -> dict[str, Any]:
        """The `meta` given to `cached`, and `bytes`: the size of each file."""
        found: dict[str, Any] = json.loads((self.folder / "meta.json").read_text(encoding="utf-8"))
        return found

    def array(self, name: str) -> NDArray[Any]:
        """One of the arrays, memory-mapped."""
        if name not in self._arrays:
            import numpy as np

            # plain ndarray views: indexing a memmap object costs several times as much
            self._arrays[name] = np.load(self.folder / f"{name}.npy", mmap_mode="r", allow_pickle=False).view(np.ndarray)
        return self._arrays[name]

    def has(self, name: str) -> bool:
        return f"{name}.npy" in self.meta["bytes"]

    def is_complete(self) -> bool:
        """Whether every file in meta.json exists with its full size."""
        try:
            return all((self.folder / name).stat().st_size == size for name, size in self.meta["bytes"].items())
        except (OSError, ValueError, KeyError):
            return False

    @classmethod
    def cached(cls, folder: Path, make: Callable[[], tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Self:
        """Those in `folder` if it is complete, else new ones written from `make()`: (arrays by name, meta)."""
        found = cls(folder)
        if found.is_complete():
            return found
        arrays, meta = make()

        def write(staged: Path) -> None:
            import numpy as np

            for name, array in arrays.items():
                np.save(staged / f"{name}.npy", array)
            sizes = {file.name: file.stat().st_size for file in sorted(staged.iterdir())}
            (staged / "meta.json").write_text(json.dumps({**meta, "bytes": sizes}, indent=1), encoding="utf-8")

        write_cache_folder(folder, write)
        return cls(folder)


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
    """A hash of nested lists, dicts, strings and numbers, equal in all processes; fast for long lists of strings.

    A generator gives strings, and counts as the list of these.
    """
    digest = hashlib.sha256()
    for part in parts:
        many = isinstance(part, Sequence) and not isinstance(part, str) and part
        texts = part if isinstance(part, Iterator) or (many and all(isinstance(item, str) for item in part)) else None
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
