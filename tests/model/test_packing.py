"""Which families of transformers keep packed documents apart, and a planted leak that is found."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from hwopt.config.task_kinds import task_facts
from hwopt.model.facts import is_decoder, model_class
from hwopt.model.packing import packing_problem

APART = "keeps documents apart"
SMALL = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
MAMBA = SMALL | {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_expand": 2}
NUMBERS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = SMALL | {"moe_intermediate_size": 64} | NUMBERS
FEW = {"hidden_size": 64, "num_hidden_layers": 2}
LINEAR = ["linear_attention", "full_attention"] * 2
DECODERS: dict[str, tuple[Mapping[str, Any], str]] = {
    "llama": (SMALL, APART),
    "mixtral": (EXPERTS, APART),
    "qwen3": (SMALL, APART),
    "gemma3_text": (SMALL | {"head_dim": 16}, APART),
    "gpt2": ({"n_embd": 64, "n_head": 4, "n_layer": 2}, APART),
    "lfm2": (SMALL | {"layer_types": ["full_attention"] * 4}, APART),
    "lfm2 with a late convolution": (SMALL | {"layer_types": ["full_attention"] * 3 + ["conv"]}, "mixes packed documents"),
    "falcon_h1": (MAMBA | {"mamba_d_ssm": 128}, "mixes packed documents"),
    "qwen3_5_text": (SMALL | {"head_dim": 16, "layer_types": LINEAR}, "mixes packed documents"),
    "gpt_oss": (EXPERTS | {"head_dim": 16}, "mixes packed documents"),
    "opt": (FEW | {"num_attention_heads": 4}, "mixes packed documents"),
    "mamba": (FEW, "does not accept position ids"),
    "longcat_flash": ({}, "may let packed documents attend to each other: the test failed (ValueError: 'the smallest model has"),
}


def problem(config: Any, kind: str) -> str:
    with torch.device("meta"):
        model = model_class(config, task_facts(kind))(config)
    return packing_problem(model, config, is_decoder(config))


@pytest.mark.parametrize("family", DECODERS)
def test_decoders_that_keep_packed_documents_apart(family: str) -> None:
    config, expected = DECODERS[family]
    found = problem(AutoConfig.for_model(family.split()[0], **config), "causal-lm")
    assert found == "" if expected is APART else found.startswith(expected), found


@pytest.mark.parametrize(("family", "apart"), [("bert", True), ("roberta", True), ("mpnet", False)])
def test_encoders_that_keep_packed_documents_apart(family: str, apart: bool) -> None:
    """With a vocabulary and positions smaller than the documents of the test, too."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    sizes |= {"vocab_size": 16, "max_position_embeddings": 20}
    config = AutoConfig.for_model(family, **sizes)
    assert (problem(config, "text-classification") == "") is apart


def test_the_size_of_the_model_does_not_change_the_answer_or_the_random_numbers() -> None:
    before = torch.get_rng_state()
    large = {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64}
    assert problem(AutoConfig.for_model("llama", **large), "causal-lm") == ""
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_cannot_be_tried_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model("llama", **SMALL)

    def fail(*inputs: Any, **named: Any) -> Any:
        raise RuntimeError("no kernel")

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaModel.forward", fail)
    found = problem(config, "causal-lm")
    assert "attend to each other: the test failed (RuntimeError" in found
