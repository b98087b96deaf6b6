"""Store: the prepared samples of one part of the data, whatever they are made of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hwopt.data.mixture import Mixture


class Store(Protocol):
    """Samples that data-loading workers read by index. Pickling one sends paths and settings, not the samples."""

    @property
    def folder(self) -> Path:
        """The folder in the cache; its name identifies the samples."""
        ...

    @property
    def meta(self) -> Mapping[str, Any]:
        """What was found when the store was written: `left_out`, samples with the reason, and facts of the kind of store."""
        ...

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Size of each sample by which it is grouped and padded, int32 (samples,): its tokens; 1 for an image."""
        ...

    @property
    def counts(self) -> NDArray[np.int32]:
        """Labels of each sample that the loss counts, int32 (samples,)."""
        ...

    @property
    def mixture(self) -> Mixture | None:
        """The sources of the samples, if the data is a mixture."""
        ...

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def array(self, name: str) -> NDArray[Any]:
        """One of the stored arrays, such as "labels"."""
        ...

    def row(self, index: int, epoch: int = 0) -> dict[str, NDArray[Any]]:
        """The arrays of sample `index`, with its labels. `epoch` changes a sample that is augmented."""
        ...
