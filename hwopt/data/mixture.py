"""A mixture of sources: each epoch draws its samples from the sources in proportion to their weights.

An epoch has as many samples as all sources together. The samples of a source are drawn in passes, each one a new permutation; an
epoch continues where the one before stopped. The draw depends on (seed, epoch) only: a resumed run draws the same samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hwopt.errors import DataError
from hwopt.text import cut

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MANY_PASSES = 4  # Passes over a source in an epoch above which the screen warns (Muennighoff et al. 2023, arXiv:2305.16264).


@dataclass(frozen=True)
class Mixture:
    """The source of each sample, and the weight of each source."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    source_of: NDArray[np.int64]  # (samples,)

    def take(self, samples: Any) -> Mixture:
        return replace(self, source_of=self.source_of[samples])

    @property
    def sizes(self) -> NDArray[np.int64]:
        import numpy as np

        return np.bincount(self.source_of, minlength=len(self.names))

    @property
    def quotas(self) -> NDArray[np.int64]:
        """The number of samples that an epoch draws from each source, (sources,); rounded by the largest remainder."""
        import numpy as np

        weights = np.array(self.weights, np.float64) / max(self.weights)
        exact = len(self.source_of) * weights / weights.sum()
        quotas: NDArray[np.int64] = np.floor(exact).astype(np.int64)
        largest_first = np.argsort(quotas - exact, kind="stable")
        quotas[largest_first[: len(self.source_of) - int(quotas.sum())]] += 1
        return quotas

    def check(self) -> None:
        """Raise DataError if a source has no sample, or an epoch draws none from it."""
        for name, size, quota in zip(self.names, self.sizes, self.quotas, strict=True):
            if not size:
                raise DataError(f"{name}: has no sample to train on; lower data.eval_fraction, or leave this source out")
            if not quota:
                raise DataError(
                    f"{name}: with its weight an epoch of {len(self.source_of):,} samples draws none from it; "
                    "raise the weight, or leave this source out"
                )

    def drawn(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """The samples of an epoch, (samples,): those of a source follow each other; a sample may occur several times."""
        import numpy as np

        found = []
        for source, (size, quota) in enumerate(zip(self.sizes.tolist(), self.quotas.tolist(), strict=True)):
            if not quota:
                continue
            own = np.flatnonzero(self.source_of == source)
            begin = epoch * quota
            first, last = begin // size, (begin + quota - 1) // size
            passes = [np.random.default_rng([seed, source, number, size]).permutation(own) for number in range(first, last + 1)]
            start = begin - first * size
            found.append(np.concatenate(passes)[start : start + quota])
        return np.concatenate(found)

    def rows(self) -> Iterator[dict[str, Any]]:
        """For each source: its name, weight, samples, and samples drawn in an epoch."""
        for name, weight, size, quota in zip(self.names, self.weights, self.sizes.tolist(), self.quotas.tolist(), strict=True):
            yield {"source": name, "weight": weight, "samples": size, "samples_per_epoch": quota}

    def notes(self) -> Iterator[str]:
        for row in self.rows():
            size, quota = row["samples"], row["samples_per_epoch"]
            yield (
                f"mixture: {quota / len(self.source_of):.1%} of an epoch is {cut(row['source'])}: "
                f"{quota:,} samples drawn from {size:,} ({quota / size:.3g} passes)"
            )

    def warnings(self) -> Iterator[str]:
        for row in self.rows():
            if row["samples_per_epoch"] > MANY_PASSES * row["samples"]:
                passes = row["samples_per_epoch"] / row["samples"]
                yield f"each epoch repeats the samples of {cut(row['source'])} {passes:.3g} times; its weight may be too high"

    @property
    def fact(self) -> str:
        """What must be equal for a run to resume."""
        return ", ".join(
            f"{size:,} samples with weight {weight:g}" for size, weight in zip(self.sizes, self.weights, strict=True)
        )
