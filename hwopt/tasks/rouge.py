"""RougeMetrics: ROUGE of generated texts against the targets, by the package rouge_score.

Source: Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries". rouge_score compares words of the letters a to z and
digits, so ROUGE says nothing about other scripts.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from hwopt.errors import InputError
from hwopt.tasks.metrics import GatheredMetrics, with_perplexity
from hwopt.tasks.prepared import IGNORED

NAMES = ("rouge1", "rouge2", "rougeL")


class RougeMetrics(GatheredMetrics):
    """loss, perplexity, and the mean F-measure of ROUGE-1, ROUGE-2 and ROUGE-L over the samples, from 0 to 1.

    The texts are generated greedily.
    """

    dtype: ClassVar[torch.dtype] = torch.float64
    rows: ClassVar[int] = len(NAMES)

    def __init__(self, device: torch.device | str, tokenizer: Any, max_new_tokens: int) -> None:
        """`max_new_tokens`: of a generated text. Raises InputError without rouge_score."""
        try:
            from rouge_score.rouge_scorer import RougeScorer
        except ImportError as error:
            raise InputError("task.rouge needs the package rouge_score: pip install 'hwopt[rouge]'") from error
        super().__init__(device)
        self.tokenizer, self.max_new_tokens = tokenizer, max_new_tokens
        self.scorer = RougeScorer(list(NAMES))
        self._scores = self._columns[0]

    def generate(self, model: Any, inputs: dict[str, Any], targets: torch.Tensor) -> None:
        """Generate a text for each row and keep its scores for the `update` that follows. Waits for the device."""
        given = {key: value for key, value in inputs.items() if not key.startswith("decoder_")}
        written = model.generate(
            **given,
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        references = torch.where(targets == IGNORED, self.tokenizer.pad_token_id, targets)
        texts, expected = (self.tokenizer.batch_decode(tokens, skip_special_tokens=True) for tokens in (written, references))
        scores = [self.scorer.score(reference, text) for text, reference in zip(texts, expected, strict=True)]
        self._scores = torch.tensor(
            [[each[name].fmeasure for each in scores] for name in NAMES], dtype=self.dtype, device=targets.device
        )

    def _pair(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return self._scores

    def compute(self) -> dict[str, float]:
        means = torch.from_numpy(self.gathered()).mean(1).tolist()
        return with_perplexity(super().compute()) | dict(zip(NAMES, means, strict=True))
