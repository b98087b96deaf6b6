"""The counted cost of a forward pass, against what is known of the architectures."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hwopt.config.task_kinds import task_facts
from hwopt.model.config import load_config
from hwopt.model.facts import ModelFacts, model_facts
from hwopt.model.forward_cost import forward_cost

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 500}


def facts(kind: str, **config: Any) -> ModelFacts:
    return model_facts(load_config(None, config), task_facts(kind), "a model")


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(100, 8, device="meta")
        self.layer = torch.nn.Linear(8, 4, bias=False, device="meta")

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.layer(self.table(input_ids)).relu()


def test_operations_arithmetic_and_traffic_of_three_layers() -> None:
    cost = forward_cost(Linear(), None)
    assert cost.operations == 3, "embedding, product, relu; no views"
    assert cost.flops_per_token == 2 * 8 * 4
    assert cost.values_per_token == (1 + 8) + (4 + 4), "ids and embeddings, then the relu; no parameters"


def test_model_that_reads_values_has_no_cost() -> None:
    class Reads(Linear):
        def forward(self, input_ids: Tensor) -> Tensor:
            return super().forward(input_ids) * int(input_ids.sum())

    assert forward_cost(Reads(), None) is None


def test_short_models_are_counted_with_the_tokens_that_they_take() -> None:
    assert facts("text-classification", model_type="bert", max_position_embeddings=8, **SMALL).operations > 0


def test_arithmetic_of_a_decoder_is_two_per_weight_of_its_products() -> None:
    found = facts("causal-lm", model_type="llama", num_key_value_heads=4, **SMALL)
    weights = found.parameters - 500 * 64 - 5 * 64  # without the table of embeddings and five norms
    assert found.flops_per_token == pytest.approx(2 * weights, rel=0.2), "attention adds a little"
