"""Class weights and label smoothing: what the training loss of tasks with classes shares."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hwopt.tasks.base import LossFunction, Task
from hwopt.tasks.labels import label_weights
from hwopt.tasks.prepared import Prepared
from hwopt.text import listing, truncate

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Literal

    import numpy as np
    import torch
    from numpy.typing import NDArray


def with_class_weights(
    prepared: Prepared, given: Literal["balanced"] | Mapping[str, float], labels: NDArray[np.int64]
) -> Prepared:
    """`prepared` with the weights `given` by the job for the label numbers `labels`, and a note of them."""
    names = prepared.label_names or ()
    weights = label_weights(given, names, labels)
    shown = [f"{truncate(name)} {weight:.3g}" for name, weight in zip(names, weights, strict=True)]
    prepared.notes.append(f"class weights: {listing(shown)}")
    return replace(prepared, class_weights=weights)


class WeightedClasses(Task):
    """A task whose training loss has the class weights and the label smoothing of the job."""

    _weight: torch.Tensor | None = None
    """The class weights on the device, made once."""

    @staticmethod
    def weighted_loss(
        outputs: Any, targets: torch.Tensor, weight: torch.Tensor | None, smoothing: float
    ) -> tuple[torch.Tensor, int | torch.Tensor]:
        """(cross-entropy summed with the weight of each target, sum of these weights), with label smoothing."""
        raise NotImplementedError

    def training_loss(self, prepared: Prepared, device: torch.device | str) -> LossFunction:
        """The weighted and smoothed cross-entropy of torch.nn.functional.cross_entropy, with the sum of the weights."""
        import torch

        smoothing, weights = self.options.label_smoothing, prepared.class_weights
        if weights is None and not smoothing:
            return self.loss
        if self._weight is None and weights is not None:
            self._weight = torch.tensor(weights, device=device)
        return partial(self.weighted_loss, weight=self._weight, smoothing=smoothing)
