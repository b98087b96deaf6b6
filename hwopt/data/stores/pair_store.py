"""PairStore: tokenised inputs and targets of an encoder-decoder, two arrays of different lengths a sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hwopt.data.stores.token_store import TokenStore

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class PairStore(TokenStore):
    """Tokenised inputs and targets. The arrays, beside those of `TokenStore` for the inputs, without labels:

    * `target_ids`: int32, the targets of all samples concatenated
    * `target_offsets`: int64 (samples + 1,), the start of each target

    meta.json has `start`, the first token of every decoder's input, and `max_target_length`.
    """

    @property
    def target_lengths(self) -> NDArray[np.int32]:
        """Tokens of each target, int32 (samples,)."""
        if "target_lengths" not in self._arrays:
            import numpy as np

            self._arrays["target_lengths"] = np.diff(self.array("target_offsets")).astype(np.int32)
        return self._arrays["target_lengths"]

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Size of each sample, int32 (samples,): the greater of its input and its target, each relative to the longest one.

        The longest input has its number of tokens; a target counts as if max_target_length were as long as that. So n times
        shorter samples have n times fewer tokens in the encoder and in the decoder than the micro-batch that a plan is made for.
        """
        if "sizes" not in self._arrays:
            import numpy as np

            inputs = np.diff(self.array("offsets"))
            targets = -(-self.target_lengths.astype(np.int64) * inputs.max() // self.meta["max_target_length"])
            self._arrays["sizes"] = np.maximum(inputs, targets).astype(np.int32)
        return self._arrays["sizes"]

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
