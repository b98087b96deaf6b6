"""What a few rows tell of a loss: wrong words are found, also with equal lengths, a zero head, or labels that are shifted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hosts.scripts import bert, llama, padded, rows
from torch.nn.functional import cross_entropy, kl_div

from hwopt.hosts.probe import disturbed, laws_that_agree, probed_rows

Loss = Callable[[Any, Any], torch.Tensor]
CLASSES = torch.tensor([0.2, 1.0, 3.0])
ALL: list[tuple[Any, bool]] = [("rows", False), ("sum", False), ("labels", False), ("labels", True)]


def own(outputs: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = outputs.loss
    return loss


def weighted(outputs: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(outputs.logits, batch["labels"], weight=CLASSES)


def summed(outputs: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(outputs.logits, batch["labels"], reduction="sum")


def centered(outputs: Any, batch: Any) -> torch.Tensor:
    logits = outputs.logits - outputs.logits.mean(0)
    return cross_entropy(logits, batch["labels"])


def unshifted(outputs: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(outputs.logits.flatten(0, 1), batch["labels"].flatten())


def near_its_start(outputs: Any, batch: Any) -> torch.Tensor:
    """With a KL term, summed over the tokens, whose teacher is the untrained model."""
    with torch.no_grad():
        teacher = llama().eval()(batch["input_ids"], batch["attention_mask"]).logits
    divergence = kl_div(outputs.logits.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")
    loss: torch.Tensor = outputs.loss + divergence
    return loss


def with_zero_head() -> Any:
    model = bert()
    for parameter in model.classifier.parameters():
        torch.nn.init.zeros_(parameter)
    return model


def noisy(outputs: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(outputs.logits + torch.randn_like(outputs.logits), batch["labels"])


@pytest.mark.parametrize(
    ("make", "loss", "expected"),
    [
        (bert, own, [("rows", False)]),
        (bert, summed, [("sum", False)]),
        (bert, weighted, []),
        (with_zero_head, weighted, []),
        (with_zero_head, centered, []),
        (llama, own, [("labels", True)]),
        (llama, unshifted, [("labels", False)]),
        (llama, near_its_start, []),
        (bert, noisy, ALL),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_laws_that_hold_for_a_few_rows(make: Callable[[], Any], loss: Loss, expected: list[Any]) -> None:
    model = make().eval()
    batch = padded(rows()[:8], classes=make is not llama)
    laws = ALL if make is llama or loss is noisy else ALL[:2]  # a label for each row is a row
    with torch.no_grad(), disturbed(model):
        found = laws_that_agree(lambda inputs: float(loss(model(**inputs), inputs)), probed_rows(batch, 0), laws, rough=False)
    assert found[:1] == expected[:1]
    assert ("rows", False) in found or expected[:1] != [("rows", False)]
    if make is with_zero_head:
        assert not any(parameter.any() for parameter in model.classifier.parameters())


def test_rows_of_one_length_are_shortened() -> None:
    """Else nothing would be trimmed, and a model that sees padding would pass."""
    ids = torch.arange(1, 37).view(4, 9)
    few = probed_rows({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.ones(4)}, pad_id=0)
    assert few["attention_mask"].sum(1).tolist() == [9, 6, 9, 6]
    assert few["input_ids"][1].tolist() == [*range(10, 16), 0, 0, 0]
    assert few["labels"].tolist() == [1, 1, 1, 1]


def test_loss_that_needs_too_much_memory_tells_nothing() -> None:
    def loss_of(inputs: Any) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert laws_that_agree(loss_of, padded(rows()[:8], classes=True), ALL, rough=False) == ALL
