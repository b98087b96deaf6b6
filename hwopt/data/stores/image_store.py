"""ImageStore: images in files or in a table, with their labels. Workers decode them when a step needs them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwopt.data.stores.images import ImageTransform, opened
from hwopt.data.stores.store import ArrayFolder
from hwopt.data.stores.token_store import fingerprint
from hwopt.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMAT = 1
Content = str | bytes  # the path of an image, or the bytes of a file, as data sets of the hub hold images


class ImageStore(ArrayFolder):
    """Images of one part of the data, with what makes the model's input of them. The arrays:

    * `content`: uint8, the paths of all images, or their bytes, concatenated; meta["embedded"] says which
    * `offsets`: int64 (samples + 1,), the start of each one
    * `labels`: int64 (samples,)
    """

    def __init__(self, folder: Path, transform: ImageTransform | None = None) -> None:
        super().__init__(folder)
        self.transform = transform

    @property
    def lengths(self) -> NDArray[np.int32]:
        """1 for each image: all have one size."""
        import numpy as np

        return np.ones(len(self), np.int32)

    counts = lengths

    def content(self, index: int) -> bytes | Path:
        """The file of image `index`, or its bytes."""
        offsets = self.array("offsets")
        raw = self.array("content")[offsets[index] : offsets[index + 1]].tobytes()
        return raw if self.meta["embedded"] else Path(os.fsdecode(raw))

    def row(self, index: int, epoch: int = 0) -> dict[str, NDArray[Any]]:
        """ "pixel_values" (channels, height, width) float32, and "row_labels" (). Raises DataError for a damaged file."""
        assert self.transform is not None, "image_store() gives it"
        content = self.content(index)
        try:
            pixels = self.transform(content, (epoch, index))
        except ValueError as error:
            name = f"image {index + 1:,} of the table" if isinstance(content, bytes) else content
            raise DataError(f"{name}: {error}. Replace or remove it, then start the run again") from error
        return {"pixel_values": pixels, "row_labels": self.array("labels")[index, ...]}


def image_store(images: Sequence[Content], labels: NDArray[np.int64], transform: ImageTransform, cache: Path) -> ImageStore:
    """The store of `images` with the numbers `labels`; from the cache, or written now.

    meta["left_out"] has the images that cannot be opened. Only their headers are read: a damaged image shows when it is decoded.
    """
    import numpy as np

    identity = [identity_of(content) for content in images]
    key = fingerprint([FORMAT, *transform.identity], identity, labels.tolist())
    embedded = any(isinstance(content, bytes) for content in images)
    where = "embedded" if embedded else fingerprint(list(images))

    def make() -> tuple[dict[str, Any], dict[str, Any]]:
        good, left_out = [], []
        for sample, content in enumerate(images):
            try:
                opened(content if isinstance(content, bytes) else Path(content)).close()
                good.append(sample)
            except ValueError as error:
                left_out.append([sample, str(error) if isinstance(content, bytes) else f"{error}: {content}"])
        raw = [content if isinstance(content, bytes) else os.fsencode(content) for content in images]
        arrays = {
            "content": np.frombuffer(b"".join(raw[sample] for sample in good), np.uint8),
            "offsets": np.cumsum([0, *(len(raw[sample]) for sample in good)], dtype=np.int64),
            "labels": labels[good],
        }
        meta = {"labels_per_token": False, "embedded": embedded, "samples": len(good), "left_out": left_out}
        return arrays, meta

    store = ImageStore.cached(cache / "images" / where / key, make)
    store.transform = transform
    return store


def identity_of(content: Content) -> str:
    """What identifies an image: its name, its folder's name and its size in bytes, which a copied folder keeps."""
    if isinstance(content, bytes):
        return fingerprint([content.hex()])
    path = Path(content)
    try:
        size = path.stat().st_size
    except OSError:  # it is left out
        size = -1
    return f"{path.parent.name}/{path.name}:{size}"
